from __future__ import annotations

from typing import Any

import pytest

from shardwright.core.model import Allocation, ModelSpec, Stage, UnitSpec, Work
from shardwright.core.schedule import Modes, Prefetch
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
            (
                Work(
                    "mlp",
                    1,
                    (
                        Allocation("slope", "temporary", 2, 5),
                        Allocation("gradient", "unreduced_gradient", 0, 200),
                    ),
                    ("out", "slope"),
                ),
            ),
        ),
    ),
    (Allocation("x", "input", 3),),
)
BATCH = 10
NOTE = 8  # bytes that travel with a gradient


def _peaks(
    *, sharded: bool, scratch: int = 0, resident: dict[Kind, int] | None = None
) -> dict[str, dict[str, int]]:
    names = frozenset({"mlp"}) if sharded else frozenset[str]()
    kept = 104 if sharded else 208
    unit = UnitBytes(
        full=208, row=kept + NOTE, note=NOTE, replicated=not sharded, ranks=2, scratch=scratch
    )
    load = RankLoad(resident or {"weight": kept}, {"mlp": unit}, NO_TABLES, BATCH)
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
        "unreduced_gradient": 200,
        "temporary": 25,
    }
    assert peaks["reduce"] == {  # what is sent beside what autograd left, then beside the sum
        "weight": 208,
        "input": 30,
        "reduce_scatter": 208 + NOTE,
        "gradient": 208 + NOTE,
    }
    assert peaks["step"] == {"weight": 208, "input": 30, "gradient": 208 + NOTE}


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
        "unreduced_gradient": 200,
        "temporary": 25,
    }
    assert peaks["step"] == {"weight": 104, "input": 30, "gradient": 104 + NOTE}


def test_a_sharded_gradient_is_sent_from_one_buffer_when_weights_and_gradients_are_gone() -> None:
    assert _peaks(sharded=True, scratch=2 * (104 + NOTE))["reduce"] == {
        "weight": 104,
        "input": 30,
        "reduce_scatter": 2 * (104 + NOTE),
        "gradient": 104 + NOTE,
        "communication": 2 * (104 + NOTE),  # the parts of all ranks
    }


def test_the_parts_of_all_ranks_count_while_they_are_summed() -> None:
    plain, copying = _peaks(sharded=True), _peaks(sharded=True, scratch=208)
    assert sum(copying["reduce"].values()) > sum(plain["reduce"].values())
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


def _leaving(name: str) -> Work:
    """A backward that leaves a gradient of 100 B."""
    return Work(name, 0, (Allocation(f"gradient.{name}", "unreduced_gradient", 0, 100),))


def _layers(prefetch: Prefetch, merged: bool, *, sharded: bool = True) -> dict[str, Any]:
    """Peaks of a chain a, b, c of layers of 100 B without activations; a and b may be one unit."""
    names = ("a", "b", "c")
    model = ModelSpec(
        "chain",
        (),
        tuple(UnitSpec(name, (TensorSpec(f"{name}.w", (25,)),)) for name in names),
        tuple(Stage(name, "gather", (Work(name),), (_leaving(name),)) for name in names),
    )
    sizes = {"a-b": 200, "c": 100} if merged else dict.fromkeys(names, 100)
    kept = {name: size // 2 if sharded else size for name, size in sizes.items()}
    units = {
        name: UnitBytes(size, kept[name], 0, not sharded, 2, size if sharded else 0)
        for name, size in sizes.items()
    }
    unit_names = frozenset(sizes) if sharded else frozenset[str]()
    groups = (("a-b", ("a", "b")),) if merged else ()
    modes = Modes(unit_names, unit_names, False, False, prefetch, groups)
    resident: dict[Kind, int] = {"weight": sum(kept.values())}
    found: Any = phase_peaks(model, modes, RankLoad(resident, units, NO_TABLES, 1))
    return found


def test_layers_of_one_unit_are_whole_together() -> None:
    assert _layers(0, merged=False)["forward"]["gathered_weight"] == 100
    assert _layers(0, merged=True)["forward"]["gathered_weight"] == 200


def test_with_prefetch_two_units_are_whole_at_once() -> None:
    assert _layers(1, merged=False)["forward"]["gathered_weight"] == 200
    assert _layers(1, merged=True)["forward"]["gathered_weight"] == 300


def test_a_reduce_under_way_keeps_what_is_sent_and_the_parts_of_all_ranks() -> None:
    assert _layers(0, merged=False)["backward"] == {
        "weight": 150,
        "gathered_weight": 100,
        "unreduced_gradient": 100,
        "gradient": 100,  # of c and b
    }
    assert _layers(1, merged=False)["backward"] == {
        "weight": 150,
        "gathered_weight": 200,  # b and, ahead, a
        "unreduced_gradient": 100,  # b's
        "reduce_scatter": 100,  # c's under way
        "gradient": 50,
        "communication": 100,
    }


def test_shards_of_gradients_live_from_their_reduce_to_the_update() -> None:
    for prefetch in (0, 1):
        assert _layers(prefetch, merged=True)["step"] == {"weight": 150, "gradient": 150}


def test_replicas_hold_whole_gradients_to_the_update() -> None:
    for prefetch in (0, 1):
        step = _layers(prefetch, merged=True, sharded=False)["step"]
        assert step == {"weight": 300, "gradient": 300}


def test_the_gradient_of_a_merged_unit_comes_layer_by_layer() -> None:
    assert _layers(0, merged=True)["backward"] == {
        "weight": 150,
        "gathered_weight": 200,
        "unreduced_gradient": 200,
        "gradient": 50,
    }
