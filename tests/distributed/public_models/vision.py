"""Models of pictures: ResNet, ViT, ConvNeXt, Swin, a diffusion U-Net, a VAE, CLIP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Attention, Batch, Output

WIDTH = 12
CLASSES = 5


def pictures(generator: torch.Generator) -> Batch:
    """[3, 3, 16, 16] and their classes."""
    pixels = torch.randn(3, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"pixels": pixels, "labels": torch.randint(CLASSES, (3,), generator=generator)}


def classified(logits: torch.Tensor, labels: torch.Tensor) -> Output:
    return Output(loss=F.cross_entropy(logits, labels, label_smoothing=0.1), logits=logits)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        activated: torch.Tensor = self.relu(out)
        return activated


class ResNet(nn.Module):
    units = (BasicBlock,)
    batch = staticmethod(pictures)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(6, 6, 1), BasicBlock(6, 6, 1))
        self.layer2 = nn.Sequential(BasicBlock(6, 11, 2), BasicBlock(11, 11, 1))
        self.fc = nn.Linear(11, CLASSES)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.maxpool(self.relu(self.bn1(self.conv1(pixels))))
        x = self.layer2(self.layer1(x))
        return classified(self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), labels)


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(nn.Module):
    units = (ViTBlock,)
    batch = staticmethod(pictures)

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        return classified(self.head(self.norm(self.blocks(x))[:, 0]), labels)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = LayerNorm2d(width)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.dwconv(x)).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    units = (ConvNeXtBlock,)
    batch = staticmethod(pictures)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 4, stride=4), LayerNorm2d(7))
        self.stages = nn.ModuleList(
            nn.Sequential(ConvNeXtBlock(width), ConvNeXtBlock(width)) for width in (7, 10)
        )
        self.downsample = nn.Sequential(LayerNorm2d(7), nn.Conv2d(7, 10, 2, stride=2))
        self.head = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, CLASSES))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.stages[1](self.downsample(self.stages[0](self.stem(pixels))))
        return classified(self.head(x.mean((2, 3))), labels)


class SwinBlock(nn.Module):
    """Attention inside of 2 x 2 windows, shifted in every other block."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(WIDTH, heads=3)
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, 3) * 0.02)
        places = torch.cartesian_prod(torch.arange(2), torch.arange(2))
        away = places[:, None] - places[None] + 1
        self.register_buffer("relative_position_index", away[..., 0] * 3 + away[..., 1])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, side = x.shape[0], x.shape[1]
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        windows = y.view(batch, side // 2, 2, side // 2, 2, WIDTH).transpose(2, 3)
        bias = self.relative_position_bias_table[self.relative_position_index]
        y = self.attn(windows.reshape(-1, 4, WIDTH), mask=bias.permute(2, 0, 1)[None])
        y = y.view(batch, side // 2, side // 2, 2, 2, WIDTH).transpose(2, 3).reshape(x.shape)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Swin(nn.Module):
    units = (SwinBlock,)
    batch = staticmethod(pictures)

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.Sequential(SwinBlock(0), SwinBlock(1))
        self.merge = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.last = SwinBlock(0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.blocks(self.patch(pixels).permute(0, 2, 3, 1))
        near = (x[:, row::2, column::2] for row in (0, 1) for column in (0, 1))
        x = self.last(self.merge(torch.cat(tuple(near), dim=-1)))
        return classified(self.head(x.mean((1, 2))), labels)


class UNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = nn.Linear(10, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(2, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(temb))[..., None, None]
        out: torch.Tensor = self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(y)))
        return out


class UNet(nn.Module):
    """Predicts noise; what goes down is concatenated on the way up."""

    units = (UNetBlock,)

    def __init__(self) -> None:
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 10))
        self.conv_in = nn.Conv2d(3, 6, 3, padding=1)
        self.down_blocks = nn.ModuleList([UNetBlock(6, 6), UNetBlock(6, 10)])
        self.downsample = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.mid_attention = Attention(10, heads=2)
        self.up_blocks = nn.ModuleList([UNetBlock(20, 6), UNetBlock(12, 6)])
        self.upsample = nn.ConvTranspose2d(6, 6, 4, stride=2, padding=1)
        self.conv_out = nn.Conv2d(6, 3, 3, padding=1)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        sample = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        noise = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"sample": sample, "noise": noise, "timestep": torch.tensor([3.0, 40.0])}

    def forward(self, sample: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor) -> Output:
        angles = timestep[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=sample.dtype)
        temb = self.time_embedding(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x = self.conv_in(sample + noise)
        first = self.down_blocks[0](x, temb)
        second = self.down_blocks[1](self.downsample(first), temb)
        words = second.flatten(2).transpose(1, 2)
        x = second + self.mid_attention(words).transpose(1, 2).view_as(second)
        x = self.upsample(self.up_blocks[0](torch.cat((x, second), dim=1), temb))
        x = self.conv_out(F.silu(self.up_blocks[1](torch.cat((x, first), dim=1), temb)))
        return Output(loss=F.mse_loss(x, noise), logits=x)


class VAE(nn.Module):
    """A mean and a variance; the draw comes with the batch."""

    units = (nn.Sequential,)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, 5, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(5, 7, 4, 2, 1)),
            *(nn.InstanceNorm2d(7, affine=True), nn.PReLU(7), nn.Flatten()),
        )
        self.mean, self.log_variance = nn.Linear(112, 4), nn.Linear(112, 4)
        self.decoder = nn.Sequential(
            *(nn.Linear(4, 112), nn.Unflatten(1, (7, 4, 4)), nn.ReLU()),
            *(nn.ConvTranspose2d(7, 5, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(5, 3, 4, 2, 1)),
        )

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        pixels = torch.rand(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixels": pixels, "draw": torch.randn(2, 4, generator=generator).double()}

    def forward(self, pixels: torch.Tensor, draw: torch.Tensor) -> Output:
        hidden = self.encoder(pixels)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        made = self.decoder(mean + draw * (0.5 * log_variance).exp())
        apart = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        lost = F.binary_cross_entropy_with_logits(made, pixels)
        return Output(loss=lost + 0.01 * apart, logits=made)


class CLIP(nn.Module):
    """Two towers and a temperature, which is a number."""

    units = (ViTBlock,)

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.visual = nn.Sequential(ViTBlock(), ViTBlock())
        self.visual_projection = nn.Parameter(torch.randn(WIDTH, 6) * 0.3)
        self.token_embedding = nn.Embedding(31, WIDTH)
        self.text = nn.Sequential(ViTBlock(), ViTBlock())
        self.text_projection = nn.Linear(WIDTH, 6, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        pixels = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixels": pixels, "input_ids": torch.randint(31, (4, 5), generator=generator)}

    def forward(self, pixels: torch.Tensor, input_ids: torch.Tensor) -> Output:
        seen = self.visual(self.patch(pixels).flatten(2).transpose(1, 2)).mean(1)
        seen = F.normalize(seen @ self.visual_projection, dim=-1)
        read = self.text(self.token_embedding(input_ids))[:, -1]
        read = F.normalize(self.text_projection(read), dim=-1)
        logits = self.logit_scale.exp() * seen @ read.T
        pairs = torch.arange(len(logits))
        loss = F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)
        return Output(loss=loss / 2, logits=logits)
