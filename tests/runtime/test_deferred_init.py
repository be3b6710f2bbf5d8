"""Modules built without memory get, tensor by tensor, the numbers that building them makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.deferred_init import Deferred, NotDeferredError
from shardwright.tracker.memory import MemoryTracker

SEED = 11


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors and of nested ones
        yield


def defaults() -> nn.Module:
    """What torch.nn's modules start with."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3)
    return nn.Sequential(
        *(nn.Linear(10, 20), nn.LSTM(20, 7, 2, bidirectional=True), nn.Conv2d(3, 5, 3)),
        *(nn.BatchNorm1d(4), encoder, nn.MultiheadAttention(8, 2, kdim=5), nn.PReLU()),
        *(nn.Embedding(11, 4, padding_idx=2), nn.EmbeddingBag(7, 3), nn.Bilinear(3, 4, 5)),
    )


def _as_gpt(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, 0.0, 0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def applied() -> nn.Module:
    """Filled once more by a function of the user's."""
    return defaults().apply(_as_gpt)


def inits() -> nn.Module:
    """torch.nn.init, some of which draws until it is content."""
    model = nn.Sequential(*(nn.Linear(20, 30) for _ in range(5)), nn.Conv1d(3, 3, 3))
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    nn.init.trunc_normal_(model[1].weight, a=1.0, b=2.0)
    nn.init.orthogonal_(model[2].weight)
    nn.init.sparse_(model[3].weight, 0.3)
    nn.init.eye_(model[4].weight[:3])
    nn.init.kaiming_normal_(model[4].weight[5:], mode="fan_out")
    nn.init.dirac_(model[5].weight)
    return model


class ByHand(nn.Module):
    """Parameters and buffers from expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6) * 0.02)
        self.scale = nn.Parameter(torch.tensor(2.6592))
        self.lists = nn.ParameterList(torch.rand(3) - 0.5 for _ in range(2))
        frequencies = 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8)
        self.register_buffer("angles", torch.outer(torch.arange(16.0), frequencies))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)) == 0, persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.noise = torch.rand(3)  # no buffer


def tied() -> nn.Module:
    model = nn.ModuleDict({"words": nn.Embedding(13, 6), "head": nn.Linear(6, 13, bias=False)})
    model["head"].weight = model["words"].weight  # type: ignore[union-attr]
    return model


def changed() -> nn.Module:
    """Scaled, cut and cast after it was filled."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model[0].weight[1:3] = 0
        model[1].weight.copy_(model[0].weight.T + 1)
    model.double()
    model[0].half()
    return model


def seeded() -> nn.Module:
    """With seeds and a generator of its own in between."""
    first = nn.Linear(4, 4)
    torch.manual_seed(3)
    model = nn.Sequential(first, nn.Linear(4, 4))
    generator = torch.Generator().manual_seed(5)
    for name in ("left", "right"):
        model.register_parameter(name, nn.Parameter(torch.randn(4, generator=generator)))
    model.last = nn.Parameter(torch.bernoulli(torch.full((9,), 0.5)))
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 6)),
        parametrizations.spectral_norm(nn.Linear(5, 6)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )


STYLES = [defaults, applied, inits, ByHand, tied, changed, seeded, parametrized]


def deferred(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    noting = Deferred()
    with noting:
        module = build()
    noting.settle(module)
    noting.check_left()
    return module


def value(module: nn.Module, name: str) -> torch.Tensor:
    shape = tuple(module.get_parameter(name).shape)
    return module.initial_block(name, (0,) * len(shape), shape)


def real(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
@pytest.mark.parametrize("build", STYLES)
def test_numbers_are_those_of_building_it_bit_for_bit(
    build: Callable[[], nn.Module], backwards: bool
) -> None:
    module, true = deferred(build), dict(real(build).named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(true)
    assert all(parameter.is_meta for parameter in module.parameters())
    for name in reversed(true) if backwards else true:
        found = value(module, name)
        assert found.dtype == true[name].dtype
        assert torch.equal(found, true[name]), name


class Tables(nn.Module):
    """Tables, of which one is scaled, one has a row of padding and one is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.EmbeddingBag(9001, 3)
        self.padded = nn.Embedding(4097, 1, padding_idx=4096)
        self.even = nn.EmbeddingBag(8192, 4).bfloat16()
        nn.init.uniform_(self.scaled.weight, -0.5, 0.5)
        with torch.no_grad():
            self.scaled.weight.mul_(2.0).add_(1.0)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that was made with memory."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_rows_of_a_table_are_those_of_building_it_and_never_all_there(backwards: bool) -> None:
    module, true = deferred(Tables), dict(real(Tables).named_parameters())
    names = [*true][:2]  # a cast is not done row by row
    pieces = [(0, 100, 0, 1), (100, 4000, 0, 1), (4000, 4097, 0, 1), (5, 9, 0, 1)]
    found = {}
    with Largest() as largest:
        for name in reversed(names) if backwards else names:
            for piece in pieces:
                low, high, first, last = piece
                block = module.initial_block(name, (low, first), (high - low, last - first))
                found[name, piece] = block
    for (name, (low, high, first, last)), block in found.items():
        assert torch.equal(block, true[name][low:high, first:last]), name
    assert largest.elements <= 2 * 4096 * 3
    name = "even.weight"
    assert torch.equal(module.initial_block(name, (3, 1), (9, 2)), true[name][3:12, 1:3])


@pytest.mark.parametrize("build", [defaults, ByHand])
def test_buffers_are_there_at_once(build: Callable[[], nn.Module]) -> None:
    module, true = deferred(build), dict(real(build).named_buffers())
    found = dict(module.named_buffers())
    assert found.keys() == true.keys() != set()
    for name, buffer in true.items():
        assert torch.equal(found[name], buffer), name


def test_plain_tensors_are_there_at_once() -> None:
    module, true = deferred(ByHand), real(ByHand)
    assert isinstance(module, ByHand)
    assert isinstance(true, ByHand)
    assert torch.equal(module.noise, true.noise)
    assert module.rates == true.rates


def test_tied_parameters_stay_one() -> None:
    module = deferred(tied)
    assert module["head"].weight is module["words"].weight  # type: ignore[index]


def test_frozen_ones_and_what_was_set_on_them_stay() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        model.weight.requires_grad_(False).group = "frozen"  # type: ignore[attr-defined]
        return model

    weight = deferred(build).weight
    assert not weight.requires_grad
    assert weight.group == "frozen"  # type: ignore[union-attr]


def test_the_generator_is_left_as_it_was() -> None:
    module = deferred(defaults)
    before = torch.get_rng_state()
    value(module, "9.weight")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_is_made_without_the_others() -> None:
    layers, width = 12, 128

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        for layer in model:
            nn.init.trunc_normal_(layer.weight, std=0.02)
        return model

    module = deferred(build)
    with MemoryTracker() as seen:
        for name, _ in module.named_parameters():
            value(module, name)
    one = 4 * width * width
    most = max(sum(kinds.values()) for kinds in seen.peaks.values())
    assert most < layers * one / 2


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("file", "memory that no operation has made"),
        ("elsewhere", "tensors that are neither the module's nor its inputs"),
        ("shared", "parameters that share memory"),
        ("before", "a change of a tensor that was there before"),
    ],
)
def test_what_cannot_be_made_later_says_why(what: str, reason: str, tmp_path: Path) -> None:
    path, there, kept = tmp_path / "weights.pt", torch.ones(3), []
    torch.save(nn.Linear(3, 3).state_dict(), path)

    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        if what == "file":
            model.load_state_dict(torch.load(path))
        elif what == "elsewhere":
            kept.append(torch.rand(2))
        elif what == "shared":
            model.more = nn.Parameter(model.weight.data[0])
        else:
            there.add_(1)
        return model

    with pytest.raises(NotDeferredError, match=reason):
        deferred(build)
