"""A module is planned from Python, with no job file."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.timeline import decode, exact_bytes
from shardwright.estimate.recordings import plan_module
from shardwright.planner import explain

X = torch.randn(4, 6)


class Model(nn.Module):
    """A frozen layer, some in half precision, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6).bfloat16() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = scale * self.first(x)
        for layer in self.layers:
            x = x + layer(x.bfloat16()).float()
        return self.head(x)


def made(**given: Any) -> Any:
    return plan_module(Model, given.pop("inputs", X), **given)


class Masks(nn.Module):
    """Blocks of two kinds, with a mask for each kind, made in the order of a set."""

    kinds: tuple[str, ...] = ("sliding", "full")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        masks = {kind: (x > 0).float() for kind in self.kinds}
        for number, layer in enumerate(self.layers):
            x = layer(x) * masks["sliding" if number < 2 else "full"]
        return x


def test_the_order_in_which_a_set_of_names_is_gone_through_changes_no_plan() -> None:
    """Another in every process, as PYTHONHASHSEED is."""
    made = plan_module(Masks, X)
    Masks.kinds = Masks.kinds[::-1]
    assert plan_module(Masks, X).fingerprint == made.fingerprint


def test_ranks_and_optimizer_are_the_caller_s() -> None:
    found = made(cluster={"preset": "local", "world_size": 3}, optimizer="adagrad")
    assert found.world_size == 3
    assert {unit.optimizer for unit in found.units} == {"adagrad"}
    assert found.job.batch.size == len(X)


def test_a_mapping_is_keywords() -> None:
    assert made(inputs={"x": X, "scale": 2.0}).units == made().units


def test_sections_of_a_job_may_be_given() -> None:
    found = made(planner={"units": {"layers": "shard"}}, memory={"param_dtype": "bf16"})
    kinds = {unit.name: type(unit.parameter).__name__ for unit in found.units}
    assert {kind for name, kind in kinds.items() if name.startswith("layers")} == {"Flat"}


def test_what_is_frozen_does_not_stand_in_the_way_of_what_is_faster() -> None:
    def build() -> nn.Module:
        return (
            nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 6))
            .requires_grad_(False)
            .append(nn.Linear(6, 1))
        )

    fastest = plan_module(build, X)
    assert {type(unit.parameter).__name__ for unit in fastest.units} == {"Replicate"}
    needed = fastest.ranks[0].peak_bytes
    tight = plan_module(build, X, cluster={"preset": "local", "ddr_cap": needed})
    assert tight.units == fastest.units


@pytest.mark.parametrize("way", ["shard", "replicate"])
def test_what_is_frozen_and_what_is_narrower_explain_their_bytes(way: str) -> None:
    cluster = {"preset": "local", "world_size": 2}
    units = dict.fromkeys(("first", "layers", "root"), way)
    found = made(cluster=cluster, planner={"units": units})
    for unit in found.units:
        for statement in explain.explain_tensor(found, unit.name):
            assert statement.steps[-1].value == pytest.approx(statement.stored, rel=1e-12)
    copies = 2 if way == "replicate" else 1
    exact = exact_bytes(decode(found.timeline))
    totals: dict[tuple[str, str], int] = {}
    for (_, _, kind, name), size in exact.items():
        totals[kind, name] = totals.get((kind, name), 0) + size
    assert totals["weight", "first"] == copies * 4 * (6 * 6 + 6)
    assert ("gradient", "first") not in totals
    assert ("optimizer_state", "first") not in totals
    assert totals["weight", "layers.0-2"] == copies * 2 * 3 * (6 * 6 + 6)
    assert totals["gradient", "layers.0-2"] == totals["weight", "layers.0-2"]


def test_a_plan_that_does_not_fit_says_so() -> None:
    with pytest.raises(NoPlanError, match="no plan found that fits: rank 0 needs most"):
        made(cluster={"preset": "local", "world_size": 2, "ddr_cap": "1 KiB"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optimizer": "sgdd"}, "plan_module: optimizer"),
        ({"planner": {"unit": {}}}, "planner"),
        ({"planner": {"units": {"tail": "shard"}}}, "planner.units: expected units"),
        ({"inputs": (X, X)}, "a forward that takes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        made(**given)


def test_a_function_whose_signature_cannot_be_read_is_called_as_it_is() -> None:
    def build() -> torch.nn.Module:
        return Model()

    build.__signature__ = 3  # type: ignore[attr-defined]  # inspect.signature: a TypeError
    with pytest.raises(TypeError):
        inspect.signature(build)
    assert plan_module(build, X).units
