"""Models of sound, graphs and clicks: Wav2Vec2, torch's own Transformer, a graph attention network,
DLRM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .parts import Attention, Batch, Output

WIDTH = 12


class Wav2Vec2Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, heads=2)
        self.layer_norm, self.final_layer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer_norm(x + self.attention(x))
        out: torch.Tensor = self.final_layer_norm(x + self.feed_forward(x))
        return out


class Wav2Vec2(nn.Module):
    """Frozen filters, a position convolution under weight normalisation, letters by CTC."""

    units = (Wav2Vec2Layer,)

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Sequential(
            *(nn.Conv1d(1, 7, 5, stride=3, bias=False), nn.GroupNorm(7, 7), nn.GELU()),
            *(nn.Conv1d(7, WIDTH, 3, stride=2), nn.GELU()),
        ).requires_grad_(False)
        self.masked_spec_embed = nn.Parameter(torch.rand(WIDTH))
        self.pos_conv = weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4), dim=2)
        self.layers = nn.ModuleList(Wav2Vec2Layer() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 8)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        sound = torch.randn(2, 1, 80, generator=generator, dtype=torch.float64)
        return {"sound": sound, "letters": torch.randint(1, 8, (2, 4), generator=generator)}

    def forward(self, sound: torch.Tensor, letters: torch.Tensor) -> Output:
        x = self.filters(sound).transpose(1, 2).clone()
        x[:, 3] = self.masked_spec_embed
        x = x + F.gelu(self.pos_conv(x.transpose(1, 2))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        times = torch.full((2,), x.shape[1])
        scores = logits.log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, letters, times, torch.tensor([4, 3]), zero_infinity=True)
        return Output(loss=loss, logits=logits)


class Transformer(nn.Module):
    """torch's own encoder and decoder layers, for translation."""

    units = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(23, WIDTH), nn.Embedding(29, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 2, 2, 2, dim_feedforward=21, dropout=0.0, batch_first=True
        )
        self.generator = nn.Linear(WIDTH, 29)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        source = torch.randint(23, (2, 6), generator=generator)
        return {"source": source, "target": torch.randint(29, (2, 5), generator=generator)}

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Output:
        read, given = self.source(source), self.target(target[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=given.dtype)
        logits = self.generator(self.transformer(read, given, tgt_mask=mask, tgt_is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        return Output(loss=loss, logits=logits)


class GraphAttention(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int = 2) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, heads * outputs, bias=False)
        self.att_src = nn.Parameter(torch.randn(1, heads, outputs) * 0.3)
        self.att_dst = nn.Parameter(torch.randn(1, heads, outputs) * 0.3)
        self.bias = nn.Parameter(torch.zeros(heads * outputs))
        self.heads = heads

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        h = self.lin(x).unflatten(-1, (self.heads, -1))
        scores = (h * self.att_src).sum(-1)[source] + (h * self.att_dst).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2).exp()
        total = torch.zeros_like(h[..., 0]).index_add(0, target, scores)
        sent = h[source] * (scores / total[target])[..., None]
        out: torch.Tensor = torch.zeros_like(h).index_add(0, target, sent).flatten(1) + self.bias
        return out


class GAT(nn.Module):
    units = (GraphAttention,)

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphAttention(9, 5), GraphAttention(10, 5)
        self.norm = nn.BatchNorm1d(10)
        self.critic = spectral_norm(nn.Linear(10, 3))

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        edges = torch.randint(11, (2, 30), generator=generator)
        loops = torch.arange(11).expand(2, 11)
        x = torch.randn(11, 9, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (11,), generator=generator)
        return {"x": x, "edge_index": torch.cat((edges, loops), dim=1), "labels": labels}

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, labels: torch.Tensor) -> Output:
        x = F.elu(self.norm(self.conv1(x, edge_index)))
        logits = self.critic(F.elu(self.conv2(x, edge_index)))
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)


class DLRM(nn.Module):
    """Bags of ids, some of them empty, and the products of every two of them."""

    units = (nn.Sequential, nn.EmbeddingBag)

    def __init__(self) -> None:
        super().__init__()
        rows = (41, 3, 17, 5)
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, 6, mode="sum") for n in rows)
        self.bot_l = nn.Sequential(nn.Linear(5, 13), nn.ReLU(), nn.Linear(13, 6), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(16, 11), nn.ReLU(), nn.Linear(11, 1))

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        return {
            "dense": torch.randn(4, 5, generator=generator, dtype=torch.float64),
            "ids": [torch.randint(n, (7,), generator=generator) for n in (41, 3, 17, 5)],
            "offsets": torch.tensor([0, 2, 2, 6]),
            "clicks": torch.randint(2, (4,), generator=generator).double(),
        }

    def forward(
        self,
        dense: torch.Tensor,
        ids: list[torch.Tensor],
        offsets: torch.Tensor,
        clicks: torch.Tensor,
    ) -> Output:
        x = self.bot_l(dense)
        bags = [table(each, offsets) for table, each in zip(self.emb_l, ids, strict=True)]
        every = torch.stack([x, *bags], dim=1)
        row, column = torch.tril_indices(5, 5, offset=-1)
        products = torch.bmm(every, every.transpose(1, 2))[:, row, column]
        logits = self.top_l(torch.cat((x, products), dim=1)).squeeze(-1)
        return Output(loss=F.binary_cross_entropy_with_logits(logits, clicks), logits=logits)
