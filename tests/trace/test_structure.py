"""Parts of a module that are built alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.trace.checkpointing import policy
from shardwright.trace.structure import PartRange, containers


class Layer(nn.Module):
    """A layer with attributes of every kind."""

    def __init__(
        self,
        place: int = 0,
        *,
        width: int = 4,
        rate: float = 0.1,
        act: Callable[[Tensor], Tensor] = functional.gelu,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.place, self.rate, self.act, self.scale = place, rate, act, scale
        self.sizes = {"heads": (2, width)}
        self.inner = nn.Linear(width, width)


def cut(parts: list[nn.Module]) -> list[PartRange]:
    found = containers(nn.Sequential(OrderedDict(layers=nn.ModuleList(parts))))
    return list(found[0].stretches) if found else []


def test_layers_that_differ_in_their_number_alone_are_alike() -> None:
    assert cut([Layer(k) for k in range(6)]) == [PartRange(0, 6, 1)]


def test_a_rate_that_goes_up_evenly_is_a_place_too() -> None:
    rates = torch.linspace(0, 0.3, 6).tolist()
    assert cut([Layer(rate=rate) for rate in rates]) == [PartRange(0, 6, 1)]


def test_kinds_that_alternate_are_alike_in_periods_from_two_of_each_on() -> None:
    """As sliding and full attention are, with numbers from 0 in a model of four layers."""
    kinds = [functional.gelu, functional.silu]
    assert cut([Layer(k, act=kinds[k % 2]) for k in range(4)]) == [PartRange(0, 4, 2)]
    first = [Layer(0, width=8), Layer(1), Layer(2)]
    assert cut(first) == [PartRange(0, 1, 1), PartRange(1, 2, 1)]
    assert cut([Layer(1), Layer(2)]) == []  # a dilation, say


def test_a_number_that_changes_otherwise_is_how_a_layer_is_built() -> None:
    assert cut([Layer(rate=0.1 * (k % 2)) for k in range(6)]) == [PartRange(0, 6, 2)]
    assert cut([Layer(rate=0.1 * (k // 3)) for k in range(6)]) == [
        PartRange(0, 3, 1),
        PartRange(3, 3, 1),
    ]


@pytest.mark.parametrize(
    "other",
    [
        partial(Layer, width=8),
        partial(Layer, act=functional.silu),
        partial(Layer, scale=torch.ones(3)),
        lambda: Layer().requires_grad_(False),
        lambda: Layer().to(torch.bfloat16),
        lambda: Layer().eval(),
    ],
)
def test_what_decides_a_forward_distinguishes_layers(other: Callable[[], nn.Module]) -> None:
    assert cut([Layer(), Layer(), other(), other()]) == [PartRange(0, 2, 1), PartRange(2, 2, 1)]


def test_functions_made_at_one_place_are_alike_if_they_hold_the_same() -> None:
    def scaled(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * by

    assert cut([Layer(act=scaled(2.0)) for _ in range(4)]) == [PartRange(0, 4, 1)]
    pairs = [Layer(act=scaled(by)) for by in (2.0, 2.0, 3.0, 3.0)]
    assert cut(pairs) == [PartRange(0, 2, 1), PartRange(2, 2, 1)]


def test_the_outermost_parts_that_repeat_are_the_units() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    found = containers(nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*blocks)))
    assert [(each.path, each.names) for each in found] == [("1", ("1.0", "1.1", "1.2"))]
    assert found[0].units == (0, 1, 2)


def test_a_part_of_the_same_class_beside_those_that_repeat_is_a_unit_too() -> None:
    found = containers(nn.ModuleList([Layer(width=8), Layer(), Layer(), nn.Embedding(9, 4)]))[0]
    assert found.units == (0, 1, 2)


def test_parts_without_parameters_are_no_units() -> None:
    parts = [part for _ in range(3) for part in (nn.Linear(4, 4), nn.ReLU())]
    assert containers(nn.Sequential(*parts))[0].units == (0, 2, 4)
    assert containers(nn.Sequential(*(nn.ReLU() for _ in range(3)))) == []


def test_layers_that_share_parameters_are_like_none() -> None:
    shared, own = [Layer() for _ in range(3)], [Layer() for _ in range(3)]
    for layer in shared:
        layer.inner.weight = shared[0].inner.weight
    assert cut([*shared]) == []
    assert cut([*own, own[0]]) == [PartRange(0, 1, 1), PartRange(1, 2, 1), PartRange(3, 1, 1)]


def test_a_layer_tied_to_what_is_outside_is_no_unit() -> None:
    layers = [Layer() for _ in range(4)]
    head = nn.Linear(4, 4)
    head.weight = layers[3].inner.weight
    found = containers(nn.Sequential(nn.ModuleList(layers), head))
    assert found[0].units == (0, 1, 2)


def test_parts_that_a_policy_picks_are_unlike_the_others() -> None:
    model = nn.ModuleList(Layer() for _ in range(9))
    assert containers(model, policy("layers:2"))[0].stretches == (PartRange(0, 9, 2),)
    first = containers(model, policy("first:4"))[0].stretches
    assert first == (PartRange(0, 4, 1), PartRange(4, 5, 1))
    two = nn.ModuleDict({"a": nn.ModuleList(Layer() for _ in range(3)), "b": model})
    assert [each.stretches[0] for each in containers(two, policy("layers:3"))] == [
        PartRange(0, 2, 1),
        PartRange(0, 9, 3),
    ]
