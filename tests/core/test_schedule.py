from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import BUSY, chain, layers, unit

from shardwright.core.recording import Unfolded
from shardwright.core.schedule import Action, Merged, Modes, PlannedFlow, Prefetch, training_step
from shardwright.core.work import Work

Members = tuple[str, ...]

# Rows come between two units, what is done with them takes no unit, and nothing is done at the end.
STEP = Unfolded(
    chain(
        [unit("bottom"), unit("top")],
        tables_after="bottom",
        works={
            ("rows", "tables"): BUSY,
            ("leave_backward", "top"): BUSY,
            ("loss", ""): Work(),
            ("backward", ""): Work(),
        },
    )
)


TABLES = frozenset({"tables"})


def _step(
    sharded: str = "", resharded: str | None = None, routed: bool = True, replicated: bool = False
) -> list[str]:
    modes = Modes(
        frozenset(sharded.split()),
        frozenset((sharded if resharded is None else resharded).split()),
        TABLES if routed else frozenset(),
        TABLES if replicated else frozenset(),
    )
    return [f"{a.verb} {a.target}" for a in training_step(STEP, modes)]


def test_replicated_units_are_reduced_after_their_backward_and_never_gathered() -> None:
    assert _step() == [
        "load batch",
        "compute bottom",
        "exchange ids",
        "lookup tables",
        "exchange rows",
        "assemble tables",
        "compute ",
        "compute top",
        "compute top",
        "reduce top",
        "compute ",
        "exchange row_gradients",
        "compute bottom",
        "reduce bottom",
        "update tables",
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
        "compute ",
        "gather top",
        "compute top",
        "free top",
        "gather top",
        "compute top",
        "free top",
        "reduce top",
        "compute ",
        "exchange row_gradients",
        "gather bottom",
        "compute bottom",
        "free bottom",
        "reduce bottom",
        "update tables",
        "update bottom",
        "update top",
    ]


def test_a_unit_that_does_not_reshard_is_gathered_once_and_freed_once() -> None:
    step = _step("top", resharded="")
    assert [a for a in step if a.endswith(" top")] == [
        "gather top",
        "compute top",
        "compute top",
        "free top",
        "reduce top",
        "update top",
    ]


def test_without_routed_tables_nothing_is_exchanged() -> None:
    step = _step(routed=False, replicated=True)
    assert [a for a in step if a.startswith("exchange")] == []
    assert step.index("assemble tables") == step.index("lookup tables") + 1


@pytest.mark.parametrize("routed", [False, True])
def test_replicated_tables_are_reduced_before_they_are_updated(routed: bool) -> None:
    step = _step(routed=routed, replicated=True)
    assert step.index("reduce tables") < step.index("compute bottom", step.index("reduce tables"))
    assert step[-3:] == ["update tables", "update bottom", "update top"]


def test_without_replicated_tables_no_table_is_reduced() -> None:
    assert "reduce tables" not in _step()


def test_modules_of_tables_exchange_each_at_its_place_and_are_updated_as_gradients_went_back() -> (
    None
):
    users, items = frozenset({"users"}), frozenset({"items"})
    step = Unfolded(chain([unit("a"), unit("b")], tables_after={"a": "users", "b": "items"}))
    modes = Modes(frozenset(), frozenset(), routed=users, replicated_tables=items)
    found = [f"{a.verb} {a.target}" for a in training_step(step, modes)]
    assert [each for each in found if not each.endswith((" a", " b", " "))] == [
        "load batch",
        "exchange ids",
        "lookup users",
        "exchange rows",
        "assemble users",
        "lookup items",
        "assemble items",
        "reduce items",
        "exchange row_gradients",
        "update items",
        "update users",
    ]


@pytest.mark.parametrize("sharded", ["", "top", "bottom top"])
def test_a_step_gathers_and_frees_a_unit_equally_often(sharded: str) -> None:
    step = _step(sharded)
    for name in ("bottom", "top"):
        assert step.count(f"gather {name}") == step.count(f"free {name}")


def test_actions_belong_to_a_phase_and_a_direction() -> None:
    actions = training_step(STEP, Modes(frozenset({"top"}), frozenset({"top"}), TABLES, TABLES))
    found = {(a.verb, a.target, a.direction): a.phase for a in actions}
    assert len(found) == len(actions)
    assert found == {
        ("load", "batch", "forward"): "load",
        ("compute", "bottom", "forward"): "forward",
        ("exchange", "ids", "forward"): "exchange_ids",
        ("lookup", "tables", "forward"): "lookup",
        ("exchange", "rows", "forward"): "exchange_rows",
        ("assemble", "tables", "forward"): "exchange_rows",
        ("compute", "", "forward"): "forward",
        ("gather", "top", "forward"): "forward",
        ("compute", "top", "forward"): "forward",
        ("free", "top", "forward"): "forward",
        ("gather", "top", "backward"): "backward",
        ("compute", "top", "backward"): "backward",
        ("reduce", "top", "backward"): "reduce",
        ("free", "top", "backward"): "reduce",
        ("compute", "", "backward"): "backward",
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


LAYERS = 6
UNITS = (unit("embed"), *layers(LAYERS), unit("head"))
DEEP = Unfolded(chain(UNITS))
PAIRS = (("layers.0-1", ("layers.0", "layers.1")), ("layers.2-3", ("layers.2", "layers.3")))


def _deep(
    sharded: str, resharded: str, prefetch: Prefetch, merged: tuple[tuple[str, Members], ...] = ()
) -> list[str]:
    modes = Modes(
        frozenset(sharded.split()),
        frozenset(resharded.split()),
        prefetch=prefetch,
        merged=merged,
    )
    return [f"{a.verb} {a.target}" for a in training_step(DEEP, modes)]


def test_a_unit_of_several_layers_is_gathered_and_reduced_once() -> None:
    step = _deep("layers.0-1", "layers.0-1", 0, PAIRS[:1])
    inside = [a for a in step if "layers.0" in a or "layers.1" in a]
    assert inside == [
        "gather layers.0-1",
        "compute layers.0-1",
        "compute layers.0-1",
        "free layers.0-1",
        "gather layers.0-1",
        "compute layers.0-1",
        "compute layers.0-1",
        "free layers.0-1",
        "reduce layers.0-1",
        "update layers.0-1",
    ]


def test_with_prefetch_the_next_unit_is_gathered_before_one_computes() -> None:
    units = "embed layers.0-1 layers.2-3"
    step = _deep(units, units, 1, PAIRS)
    assert step[: step.index("compute layers.4")] == [
        "load batch",
        "gather embed",
        "gather layers.0-1",
        "compute embed",
        "free embed",
        "gather layers.2-3",
        "compute layers.0-1",
        "compute layers.0-1",
        "free layers.0-1",
        "compute layers.2-3",
        "compute layers.2-3",
        "free layers.2-3",
    ]


def test_with_prefetch_a_reduce_is_collected_before_the_next_one_and_at_the_end() -> None:
    units = "embed layers.0-1 layers.2-3"
    step = _deep(units, units, 1, PAIRS)
    backward = step[len(step) - step[::-1].index("gather layers.2-3") - 1 :]
    assert backward == [
        "gather layers.2-3",
        "gather layers.0-1",
        "compute layers.2-3",
        "compute layers.2-3",
        "collect layers.4",
        "free layers.2-3",
        "reduce layers.2-3",
        "gather embed",
        "compute layers.0-1",
        "compute layers.0-1",
        "collect layers.2-3",
        "free layers.0-1",
        "reduce layers.0-1",
        "compute embed",
        "collect layers.0-1",
        "free embed",
        "reduce embed",
        "collect embed",
        "update embed",
        "update layers.0-1",
        "update layers.2-3",
        "update layers.4",
        "update layers.5",
        "update head",
    ]


def test_a_unit_that_is_kept_calls_the_one_before_it_when_its_backward_begins() -> None:
    step = _deep("layers.5 head", "layers.5", 1)
    assert step.count("gather head") == 1
    after_loss = step[step.index("compute ") + 2 :]
    assert after_loss[:2] == ["gather layers.5", "compute head"]


@st.composite
def _modes(draw: st.DrawFn) -> Modes:
    """Any cut of the layers into neighbours, any units sharded, any of these resharded."""
    cuts = sorted({0, LAYERS, *draw(st.sets(st.integers(1, LAYERS - 1)))})
    names, merged = ["embed"], []
    for first, last in itertools.pairwise(cuts):
        inside = tuple(f"layers.{i}" for i in range(first, last))
        names.append(inside[0] if len(inside) == 1 else f"layers.{first}-{last - 1}")
        if len(inside) > 1:
            merged.append((names[-1], inside))
    names.append("head")
    sharded = draw(st.sets(st.sampled_from(names)))
    resharded = draw(st.sets(st.sampled_from(sorted(sharded)))) if sharded else set()
    prefetch = draw(st.sampled_from([0, 1]))
    return Modes(frozenset(sharded), frozenset(resharded), prefetch=prefetch, merged=tuple(merged))


def _units(modes: Modes) -> list[str]:
    """What a step gathers, in the order of its forward."""
    merged = Merged(modes.merged)
    return list(dict.fromkeys(merged.name(each.name) for each in UNITS))


@pytest.mark.slow
@given(modes=_modes())
def test_a_unit_computes_only_while_it_is_gathered(modes: Modes) -> None:
    gathered: set[str] = set()
    for action in training_step(DEEP, modes):
        if action.verb == "gather":
            assert action.target in modes.sharded_units - gathered
            gathered.add(action.target)
        elif action.verb == "free":
            gathered.remove(action.target)
        elif action.verb == "compute" and action.target in modes.sharded_units:
            assert action.target in gathered
    assert not gathered


@pytest.mark.slow
@given(modes=_modes())
def test_where_all_units_reshard_no_more_are_gathered_than_prefetch_asks_for(modes: Modes) -> None:
    modes = msgspec.structs.replace(modes, resharded_units=modes.sharded_units)
    gathered = most = 0
    for action in training_step(DEEP, modes):
        gathered += (action.verb == "gather") - (action.verb == "free")
        most = max(most, gathered)
    assert most <= 1 + modes.prefetch


@pytest.mark.slow
@given(modes=_modes())
def test_every_reduce_is_collected_before_the_next_and_before_the_updates(modes: Modes) -> None:
    pending: list[str] = []
    reduced: list[str] = []
    for action in training_step(DEEP, modes):
        if action.verb == "reduce":
            assert not pending
            reduced.append(action.target)
            pending = [action.target] if modes.prefetch else []
        elif action.verb == "collect":
            assert pending == [action.target]
            pending = []
        elif action.verb == "update":
            assert not pending
    assert reduced == _units(modes)[::-1]


@pytest.mark.slow
@given(modes=_modes())
def test_every_layer_computes_once_in_each_direction_and_every_unit_is_updated_once(
    modes: Modes,
) -> None:
    actions = training_step(DEEP, modes)
    forward = [a.target for a in actions if (a.verb, a.direction) == ("compute", "forward")]
    backward = [a.target for a in actions if (a.verb, a.direction) == ("compute", "backward")]
    merged = Merged(modes.merged)
    assert forward == [*(merged.name(each.name) for each in UNITS), ""]  # the loss is in no unit
    assert backward == forward[::-1]
    updated = [a.target for a in actions if a.verb == "update"]
    assert updated == _units(modes)


@pytest.mark.slow
@given(modes=_modes())
def test_pieces_that_compute_are_done_in_order_and_others_are_no_action(modes: Modes) -> None:
    actions = training_step(DEEP, modes)
    for direction, moments in (("forward", DEEP.forward), ("backward", DEEP.backward)):
        places = [a.place for a in actions if (a.verb, a.direction) == ("compute", direction)]
        assert places == [k for k, moment in enumerate(moments) if moment.piece.work.calls]


@pytest.mark.slow
@given(modes=_modes())
def test_prefetch_changes_when_units_are_gathered_but_not_how_often(modes: Modes) -> None:
    ahead = msgspec.structs.replace(modes, prefetch=1)
    on_demand = msgspec.structs.replace(modes, prefetch=0)
    counts = [
        Counter((a.verb, a.target) for a in training_step(DEEP, m) if a.verb != "collect")
        for m in (ahead, on_demand)
    ]
    assert counts[0] == counts[1]


THREE = frozenset("abc")
AHEAD = Modes(THREE, THREE, prefetch=1)


def _said(actions: Iterable[Action]) -> list[str]:
    return [f"{action.verb} {action.target}" for action in actions]


def _forward(flow: PlannedFlow, units: str) -> list[str]:
    flow.begin()
    return [
        said for unit in units for said in _said([*flow.enter(unit, "forward"), *flow.leave(unit)])
    ]


def test_a_flow_that_knows_no_order_expects_what_the_last_pass_asked_for() -> None:
    flow = PlannedFlow("", AHEAD)
    assert _forward(flow, "aba") == [
        "gather a",
        "free a",
        "gather b",
        "free b",
        "gather a",
        "free a",
    ]
    assert _forward(flow, "aba") == [
        "gather a",
        "gather b",
        "free a",
        "gather a",
        "free b",
        "free a",
    ]


def test_a_pass_that_strays_from_the_last_has_nothing_gathered_ahead_from_there_on() -> None:
    flow = PlannedFlow("abc", AHEAD)
    assert _said(flow.enter("a", "forward")) == ["gather a", "gather b"]
    assert _said(flow.enter("c", "forward")) == ["gather c"]
    assert _said(flow.enter("b", "forward")) == []
    assert _said(flow.leave("b")) == ["free b"]
    assert _said(flow.enter("b", "forward")) == ["gather b"]


def test_a_unit_that_is_entered_again_at_once_is_one_visit() -> None:
    flow = PlannedFlow("abc", AHEAD, "ccbbaa")
    flow.begin_backward()
    found = [flow.enter(unit, "backward") for unit in "ccbbaa"]
    assert [_said(each) for each in found] == [
        ["gather c", "gather b"],
        [],
        ["gather a"],
        [],
        [],
        [],
    ]


def test_who_chooses_what_is_gathered_ahead_gets_the_unit_alone() -> None:
    assert _said(PlannedFlow("abc", AHEAD).enter("a", "forward", ahead=False)) == ["gather a"]


def test_a_gradient_that_is_held_back_leaves_the_reduce_under_way_alone() -> None:
    flow = PlannedFlow("abc", AHEAD)
    assert _said(flow.reduce("c")) == ["free c", "reduce c"]
    assert _said(flow.reduce("b", holds=True)) == ["free b", "hold b"]
    assert _said(flow.reduce("a")) == ["collect c", "free a", "reduce a"]
    assert _said(flow.collect()) == ["collect a"]


def test_a_backward_without_gradients_of_a_unit_frees_it_and_reduces_nothing() -> None:
    flow = PlannedFlow("abc", AHEAD)
    assert _said(flow.reduce("c", sums=False)) == ["free c"]
    assert _said(flow.reduce("b", frees=False)) == ["reduce b"]


def test_a_unit_is_done_with_its_last_gradient_before_the_next_one_comes() -> None:
    flow = PlannedFlow("abc", AHEAD)
    flow.reduce("c")
    assert _said(flow.touch("b")) == []
    assert _said(flow.touch("c")) == ["collect c"]
    assert list(flow.touched) == ["b", "c"]


def test_what_was_gathered_ahead_and_not_needed_goes_when_the_backward_is_over() -> None:
    flow = PlannedFlow("abc", AHEAD)
    assert flow.begin_backward()
    flow.enter("c", "backward")
    flow.touch("c")
    assert not flow.begin_backward()
    flow.reduce("c")
    assert _said([*flow.collect(), *flow.finish()]) == ["collect c", "free b"]
    assert flow.begin_backward()


def test_after_a_backward_that_failed_nothing_is_under_way() -> None:
    flow = PlannedFlow("abc", AHEAD)
    flow.begin_backward()
    flow.touch("b")
    flow.reduce("c")
    flow.forget()
    assert flow.collect() == []
    assert not flow.touched
    assert not flow.in_backward
