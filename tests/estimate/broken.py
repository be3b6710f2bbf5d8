"""Modules that cannot be traced, as users write them: functions for ``[model] python``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = Any


class Around(nn.Module):
    """A part that fails, two modules deep."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), part)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Masks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.nonzero().shape[0]


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 8, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(x, x, tgt_mask=mask)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask=mask)


class Points(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.data_ptr() % 2


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(x.detach().numpy())


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.shardwright_tests.without_fake(x)


def reads() -> Made:
    return Around(Reads())


class EmbeddingBagCollection(Reads):
    """By name one of TorchRec's, which read lengths."""


def collects() -> Made:
    return Around(EmbeddingBagCollection())


def branches() -> Made:
    return Around(Branches())


def masks() -> Made:
    return Around(Masks())


def counts() -> Made:
    return Around(Counts())


def decodes() -> Made:
    return Around(Decodes())


def encodes() -> Made:
    return Around(Encodes())


def points() -> Made:
    return Around(Points())


def numpy() -> Made:
    return Around(Numpy())


def kernel() -> Made:
    if not hasattr(torch.ops.shardwright_tests, "without_fake"):
        library = torch.library.Library("shardwright_tests", "FRAGMENT")
        library.define("without_fake(Tensor x) -> Tensor")
        library.impl("without_fake", lambda x: x.clone(), "CPU")
        _LIBRARIES.append(library)
    return Around(Kernel())


_LIBRARIES: list[torch.library.Library] = []


def raises() -> Made:
    raise ValueError("no such flavour\nand more of it")


def leaves() -> Made:
    raise SystemExit(3)


def number() -> Made:
    return 3


def pair() -> Made:
    return 3, nn.Linear(2, 2)


def wants_images() -> Made:
    return nn.Conv2d(3, 8, 3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(4, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.inner(tokens) * mask


def two_inputs() -> Made:
    return Two()


def frozen() -> Made:
    return nn.Embedding(4, 4).requires_grad_(False)


def lazy() -> Made:
    return nn.Sequential(nn.Embedding(4, 4), nn.LazyLinear(8))


def compiled() -> Made:
    return torch.compile(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)))


def compiled_in_place() -> Made:
    module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    module[1].compile()
    return module


def sparse() -> Made:
    return nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))


def loss_of_many() -> Made:
    return nn.Embedding(4, 4), torch.zeros(2, dtype=torch.int64), lambda result: result


def takes_width(width: int) -> Made:
    return nn.Embedding(4, width)


def elsewhere() -> Made:
    return nn.Embedding(4, 4, device="cuda")


NOT_A_FUNCTION = 3


def mismatched() -> Made:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8)), torch.zeros(3, 4)
