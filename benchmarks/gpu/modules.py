"""Modules in the style of the common libraries, for ``[model] python``: whatever device the caller
has set (``torch.device(...)``) has their parameters and their batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fsdp_contestants import GPT2
from torch import nn

from shardwright.models.t5 import build as t5

__all__ = ["bert", "gpt2", "lstm", "resnet", "t5", "tensor_parallel", "vit"]


def _words(vocab: int, batch: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab, (batch, sequence))
    return tokens, tokens.roll(-1, 1)


def next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits [B, T, V] at targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2(batch: int, sequence: int, vocab: int = 50257, dim: int = 768, layers: int = 12) -> Any:
    """GPT-2, whose head is its embedding."""
    keys = {"dim": dim, "heads": dim // 64, "layers": layers, "vocab": vocab, "tied": 1}
    tokens, targets = _words(vocab, batch, sequence)
    return GPT2({**keys, "sequence": sequence}), tokens, next_token, targets


class Bert(nn.Module):
    """An encoder with dropout, whose words may be padding."""

    def __init__(self, vocab: int, dim: int, layers: int, sequence: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, dim), nn.Embedding(sequence, dim)
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, dim // 64, 4 * dim, dropout=0.1, activation="gelu", batch_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.words(tokens) + self.places(places)))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        found: torch.Tensor = self.head(x)
        return found


def bert(batch: int, sequence: int, vocab: int = 30522, dim: int = 768, layers: int = 12) -> Any:
    """BERT's encoder, every word a target."""
    tokens, targets = _words(vocab, batch, sequence)
    padding = torch.zeros(batch, sequence, dtype=torch.bool)
    return Bert(vocab, dim, layers, sequence), (tokens, padding), next_token, targets


class Layer(nn.Module):
    """Norm first, then attention and an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // 64
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, dim] to the same."""
        shape = (*x.shape[:2], 3, self.heads, -1)
        query, key, value = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found


class ViT(nn.Module):
    """Patches of a picture, a token for its class."""

    def __init__(self, size: int, dim: int, layers: int, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.zeros(1, (size // 16) ** 2 + 1, dim))
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] of pictures [B, 3, size, size]."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(self.norm(x)[:, 0])
        return found


def vit(batch: int, size: int = 224, dim: int = 768, layers: int = 12) -> Any:
    """A vision transformer."""
    pictures, classes = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    return ViT(size, dim, layers), pictures, F.cross_entropy, classes


class Bottleneck(nn.Module):
    """Three convolutions beside a way past them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        convolution: Any = nn.Conv2d
        self.conv1 = convolution(before, width, 1, bias=False)
        self.conv2 = convolution(width, width, 3, stride, 1, bias=False)
        self.conv3 = convolution(width, after, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(n) for n in (width, width, after))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(convolution(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride > 1 or before != after
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, before, H, W] to [B, 4 width, H / stride, W / stride]."""
        past = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        found: torch.Tensor = self.relu(self.bn3(self.conv3(y)) + past)
        return found


class ResNet(nn.Module):
    """Four groups of bottlenecks."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        blocks, before = [], width
        for group, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if group and not number else 1
                blocks.append(Bottleneck(before, width << group, stride))
                before = 4 * width << group
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(before, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] of pictures [B, 3, size, size]."""
        x = self.layers(self.pool(self.relu(self.bn1(self.conv1(pictures)))))
        found: torch.Tensor = self.fc(x.mean((2, 3)))
        return found


def resnet(
    batch: int, size: int = 224, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)
) -> Any:
    """ResNet-50."""
    pictures, classes = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    return ResNet(tuple(depths), width), pictures, F.cross_entropy, classes


class Lstm(nn.Module):
    """Words, some recurrent layers, words."""

    def __init__(self, vocab: int, dim: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        found: torch.Tensor = self.head(self.lstm(self.words(tokens))[0])
        return found


def lstm(batch: int, sequence: int, vocab: int = 10000, dim: int = 1024, layers: int = 2) -> Any:
    """A language model with cuDNN's recurrent layers."""
    tokens, targets = _words(vocab, batch, sequence)
    return Lstm(vocab, dim, layers), tokens, next_token, targets


class Attention(nn.Module):
    """Heads as many as the layers give, so that tensor ranks have some of them each."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, dim] to the same."""
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.width).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = self.wo(seen.transpose(1, 2).reshape(batch, length, -1))
        return found


class Block(nn.Module):
    """A llama's layer whose matrices tensor ranks share."""

    def __init__(self, dim: int, width: int, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, width)
        self.w1, self.w3 = (nn.Linear(dim, ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, dim] to the same."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        found: torch.Tensor = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return found


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, vocab: int, dim: int, layers: int, ffn: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, min(128, dim // 2), ffn) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.output(self.norm(x))
        return found


def tensor_parallel(
    batch: int,
    sequence: int,
    vocab: int = 32000,
    dim: int = 2048,
    layers: int = 16,
    ffn: int = 5632,
) -> Any:
    """A llama of whole heads whose layers ``parallel.parallelize_plan`` can name."""
    tokens, targets = _words(vocab, batch, sequence)
    return Decoder(vocab, dim, layers, ffn), tokens, next_token, targets
