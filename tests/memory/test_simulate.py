from __future__ import annotations

from typing import Any

import pytest

from shardwright.core.model import Allocation, ModelSpec, Stage, UnitSpec, Work
from shardwright.core.schedule import Modes
from shardwright.core.tensor import TensorSpec
from shardwright.core.timeline import Kind
from shardwright.memory.route import Traffic
from shardwright.memory.simulate import RankLoad, UnitBytes, phase_peaks

NO_TABLES = Traffic((), (), 0, 0, 0, 0, 0, 4, 10, False)
MODEL = ModelSpec(
    "test",
    (),
    (UnitSpec("mlp", (TensorSpec("mlp.w", (50,)),)),),
    (
        Stage(
            "mlp",
            "gather",
            (Work("mlp", 1, (Allocation("out", "activation", 4),)),),
            (Work("mlp", 1, (Allocation("slope", "temporary", 2, 5),), ("out", "slope")),),
        ),
    ),
    (Allocation("x", "input", 3),),
)
BATCH = 10


def _peaks(
    *, sharded: bool, scratch: int = 0, resident: dict[Kind, int] | None = None
) -> dict[str, dict[str, int]]:
    names = frozenset({"mlp"}) if sharded else frozenset[str]()
    unit = UnitBytes(full=208, shard=104 if sharded else 208, replicated=not sharded)
    if scratch:
        unit = UnitBytes(208, 104, not sharded, scratch)
    load = RankLoad(resident or {"weight": unit.shard}, {"mlp": unit}, NO_TABLES, BATCH)
    found: Any = phase_peaks(MODEL, Modes(names, names, False, False), load)
    return found


def test_a_replicated_unit_has_its_gradient_whole_from_backward_to_step() -> None:
    peaks = _peaks(sharded=False)
    assert peaks["load"] == {"weight": 208, "input": 30}
    assert peaks["forward"] == {"weight": 208, "input": 30, "activation": 40}
    assert peaks["backward"] == {
        "weight": 208,
        "input": 30,
        "activation": 40,
        "unreduced_gradient": 208,
        "temporary": 25,
    }
    assert peaks["reduce"] == {"weight": 208, "input": 30, "unreduced_gradient": 208}
    assert peaks["step"] == {"weight": 208, "input": 30, "unreduced_gradient": 208}


def test_a_sharded_unit_is_whole_only_while_it_is_used() -> None:
    peaks = _peaks(sharded=True)
    assert peaks["load"] == {"weight": 104, "input": 30}
    assert peaks["forward"] == {
        "weight": 104,
        "input": 30,
        "gathered_weight": 208,
        "activation": 40,
    }
    assert peaks["backward"] == {
        "weight": 104,
        "input": 30,
        "gathered_weight": 208,
        "activation": 40,
        "unreduced_gradient": 208,
        "temporary": 25,
    }
    assert peaks["step"] == {"weight": 104, "input": 30, "gradient": 104}


def test_a_sharded_gradient_is_reduced_beside_the_whole_one() -> None:
    assert _peaks(sharded=True)["reduce"] == {
        "weight": 104,
        "input": 30,
        "gathered_weight": 208,
        "unreduced_gradient": 208,
        "gradient": 104,
    }


def test_what_the_backend_takes_for_itself_counts_while_it_reduces() -> None:
    plain, copying = _peaks(sharded=True), _peaks(sharded=True, scratch=208)
    assert sum(copying["reduce"].values()) == sum(plain["reduce"].values()) + 208
    assert {p: k for p, k in copying.items() if p != "reduce"} == {
        p: k for p, k in plain.items() if p != "reduce"
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_rank_keeps_is_part_of_every_peak(sharded: bool) -> None:
    kept: dict[Kind, int] = {"weight": 7, "optimizer_state": 11, "buffer": 13}
    for kinds in _peaks(sharded=sharded, resident=kept).values():
        assert kept.items() <= kinds.items()


def test_set_up_is_no_phase_of_a_step() -> None:
    assert set(_peaks(sharded=True)) == {"load", "forward", "backward", "reduce", "step"}
