from __future__ import annotations

import pytest

from shardwright.core.model import ModelSpec, Stage, UnitSpec
from shardwright.core.schedule import Action, Modes, training_step
from shardwright.core.tensor import TensorSpec

MODEL = ModelSpec(
    "test",
    (),
    tuple(UnitSpec(name, (TensorSpec(f"{name}.w", (1,)),)) for name in ("bottom", "top")),
    (
        Stage("bottom", "gather"),
        Stage("tables", "route"),
        Stage("interaction", "none"),
        Stage("top", "gather"),
    ),
)


def _step(
    sharded: str = "", resharded: str | None = None, routed: bool = True, replicated: bool = False
) -> list[str]:
    modes = Modes(
        frozenset(sharded.split()),
        frozenset((sharded if resharded is None else resharded).split()),
        routed,
        replicated,
    )
    return [f"{a.verb} {a.target}" for a in training_step(MODEL, modes)]


def test_replicated_units_are_reduced_after_their_backward_and_never_gathered() -> None:
    assert _step() == [
        "load batch",
        "compute bottom",
        "exchange ids",
        "lookup tables",
        "exchange rows",
        "assemble tables",
        "compute interaction",
        "compute top",
        "compute top",
        "reduce top",
        "compute interaction",
        "exchange row_gradients",
        "update tables",
        "compute bottom",
        "reduce bottom",
        "update bottom",
        "update top",
    ]


def test_sharded_units_are_gathered_and_freed_in_both_directions() -> None:
    assert _step("bottom top") == [
        "load batch",
        "gather bottom",
        "compute bottom",
        "free bottom",
        "exchange ids",
        "lookup tables",
        "exchange rows",
        "assemble tables",
        "compute interaction",
        "gather top",
        "compute top",
        "free top",
        "gather top",
        "compute top",
        "reduce top",
        "free top",
        "compute interaction",
        "exchange row_gradients",
        "update tables",
        "gather bottom",
        "compute bottom",
        "reduce bottom",
        "free bottom",
        "update bottom",
        "update top",
    ]


def test_a_unit_that_does_not_reshard_is_gathered_once_and_freed_once() -> None:
    step = _step("top", resharded="")
    assert [a for a in step if a.endswith(" top")] == [
        "gather top",
        "compute top",
        "compute top",
        "reduce top",
        "free top",
        "update top",
    ]


def test_without_routed_tables_nothing_is_exchanged() -> None:
    step = _step(routed=False, replicated=True)
    assert [a for a in step if a.startswith("exchange")] == []
    assert step.index("assemble tables") == step.index("lookup tables") + 1


@pytest.mark.parametrize("routed", [False, True])
def test_replicated_tables_are_reduced_before_they_are_updated(routed: bool) -> None:
    step = _step(routed=routed, replicated=True)
    assert step.index("update tables") == step.index("reduce tables") + 1


def test_without_replicated_tables_no_table_is_reduced() -> None:
    assert "reduce tables" not in _step()


@pytest.mark.parametrize("sharded", ["", "top", "bottom top"])
def test_a_step_gathers_and_frees_a_unit_equally_often(sharded: str) -> None:
    step = _step(sharded)
    for unit in ("bottom", "top"):
        assert step.count(f"gather {unit}") == step.count(f"free {unit}")


def test_actions_belong_to_a_phase_and_a_direction() -> None:
    actions = training_step(MODEL, Modes(frozenset({"top"}), frozenset({"top"}), True, True))
    found = {(a.verb, a.target, a.direction): a.phase for a in actions}
    assert len(found) == len(actions)
    assert found == {
        ("load", "batch", "forward"): "load",
        ("compute", "bottom", "forward"): "forward",
        ("exchange", "ids", "forward"): "exchange_ids",
        ("lookup", "tables", "forward"): "lookup",
        ("exchange", "rows", "forward"): "exchange_rows",
        ("assemble", "tables", "forward"): "exchange_rows",
        ("compute", "interaction", "forward"): "forward",
        ("gather", "top", "forward"): "forward",
        ("compute", "top", "forward"): "forward",
        ("free", "top", "forward"): "forward",
        ("gather", "top", "backward"): "backward",
        ("compute", "top", "backward"): "backward",
        ("reduce", "top", "backward"): "reduce",
        ("free", "top", "backward"): "reduce",
        ("compute", "interaction", "backward"): "backward",
        ("exchange", "row_gradients", "backward"): "reduce",
        ("reduce", "tables", "backward"): "reduce",
        ("update", "tables", "backward"): "step",
        ("compute", "bottom", "backward"): "backward",
        ("reduce", "bottom", "backward"): "reduce",
        ("update", "bottom", "backward"): "step",
        ("update", "top", "backward"): "step",
    }


def test_actions_are_forward_where_nothing_is_said() -> None:
    assert Action("load", "batch", "load").direction == "forward"
