"""Recordings of a few blocks, unfolded to many."""

from __future__ import annotations

from itertools import chain as chains

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import chain, layers, unit

from shardwright.core.errors import InputError
from shardwright.core.recording import (
    BlockNames,
    Piece,
    RecordedTable,
    RecordedUnit,
    Recording,
    Series,
    Touch,
    Unfolded,
    check_recording,
    moments,
)
from shardwright.core.work import Work


def recording(*counts: tuple[int, int], turns: bool = False) -> Recording:
    """Forward and backward through stretches of so many blocks of so long a period, of which three
    periods are recorded; one after the other, or block by block in ``turns``."""
    series = []
    for place, (count, period) in enumerate(counts):
        names = [f"s{place}.{k}" for k in range(count)]
        few = min(count, 3 * period + count % period)
        head = 2 * period if few < count else few
        recorded = [*names[:head], *names[len(names) - (few - head) :]]
        series.append(Series(f"s{place}", tuple(names), tuple(recorded), period))
    every = [each.recorded for each in series]
    order = list(
        chains.from_iterable(zip(*every, strict=True)) if turns else chains.from_iterable(every)
    )
    forward = [Piece(point, unit, ()) for unit in order for point in ("enter", "leave")]
    backward = [
        Piece(point, unit, ())
        for unit in reversed(order)
        for point in ("enter_backward", "leave_backward")
    ]
    ends = (Piece("begin", "", ()), Piece("backward", "", ()))
    units = tuple(RecordedUnit(unit, ()) for unit in order)
    return Recording((ends[0], *forward, ends[1], *backward), units, tuple(series))


def order_of(found: Recording, point: str) -> list[str]:
    return [m.unit for m in moments(found, BlockNames(found)) if m.piece.point == point]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=3))
def test_every_block_runs_forward_in_order_and_backward_in_reverse(
    counts: list[tuple[int, int]],
) -> None:
    found = recording(*counts)
    names = [name for series in found.series for name in series.names]
    for point in ("enter", "leave"):
        assert order_of(found, point) == names
    for point in ("enter_backward", "leave_backward"):
        assert order_of(found, point) == names[::-1]


def test_blocks_that_take_turns_go_on_doing_so() -> None:
    found = recording((6, 1), (6, 1), turns=True)
    names = [f"s{place}.{k}" for k in range(6) for place in range(2)]
    assert order_of(found, "enter") == names
    assert order_of(found, "leave_backward") == names[::-1]


@given(st.integers(1, 20), st.integers(1, 3))
def test_every_unit_stands_once_beside_one_of_its_place_in_the_pattern(
    count: int, period: int
) -> None:
    found = recording((count, period))
    pairs = list(BlockNames(found).unfolded())
    assert [name for name, _ in pairs] == list(found.series[0].names)
    for name, beside in pairs:
        assert int(name.split(".")[1]) % period == int(beside.name.split(".")[1]) % period


def test_a_block_beside_another_is_as_far_from_it_as_when_it_was_recorded() -> None:
    found = recording((10, 1))
    blocks = BlockNames(found)
    entered = [m for m in moments(found, blocks) if m.piece.point == "enter"]
    before = [blocks.beside(_before(m.piece.unit), m) for m in entered[1:]]
    assert before == [f"s0.{k}" for k in range(9)]


def _before(recorded: str) -> str:
    order = ["s0.0", "s0.1", "s0.9"]
    return order[order.index(recorded) - 1]


def _homes(recording: Recording) -> tuple[list[str], list[str]]:
    """Who is at work in the pieces that compute."""
    step = Unfolded(recording)
    forward, backward = (
        [h for h, m in zip(step.homes[d], where, strict=True) if m.piece.work.calls]
        for d, where in (("forward", step.forward), ("backward", step.backward))
    )
    return forward, backward


def test_a_piece_belongs_to_the_unit_that_was_entered_and_not_left() -> None:
    forward, backward = _homes(chain([unit("a"), unit("b")]))
    assert forward == ["a", "b", ""]  # the loss is no unit's
    assert backward == ["", "b", "a"]


def _inside(*, empty: bool) -> Recording:
    """A unit within another one, which goes on after it."""
    inner = RecordedUnit("outer.inner", () if empty else unit("outer.inner").tensors)
    points = (
        ("enter", "outer"),
        ("enter", "outer.inner"),
        ("leave", "outer.inner"),
        ("leave", "outer"),
        ("backward", ""),
        ("enter_backward", "outer"),
        ("enter_backward", "outer.inner"),
        ("leave_backward", "outer.inner"),
        ("leave_backward", "outer"),
    )
    pieces = tuple(Piece(point, name, (), Work(1)) for point, name in points)  # type: ignore[arg-type]
    return Recording(pieces, (unit("outer"), inner))


def test_a_piece_belongs_to_the_innermost_unit() -> None:
    forward, backward = _homes(_inside(empty=False))
    assert forward == ["outer", "outer.inner", "outer", ""]
    assert backward == ["", "outer", "outer.inner", "outer", ""]


def test_a_unit_without_parameters_is_part_of_what_surrounds_it() -> None:
    forward, backward = _homes(_inside(empty=True))
    assert forward == ["outer", "outer", "outer", ""]
    assert backward == ["", "outer", "outer", "outer", ""]


def test_what_happens_in_no_unit_belongs_to_the_root_that_is_around_them() -> None:
    forward, backward = _homes(chain([unit(""), unit("a")]))
    assert (forward, backward) == (["", "a", ""], ["", "a", ""])


def test_units_of_a_deep_model_have_names_and_tensors_of_their_own() -> None:
    every = [
        msgspec.structs.replace(each, checkpointed=(f"{each.name}.part",)) for each in layers(9)
    ]
    few = [every[0], every[1], every[8]]
    series = Series("layers", tuple(u.name for u in every), tuple(u.name for u in few))
    short = chain(few)
    deep = Unfolded(Recording(short.pieces, tuple(few), (series,)))
    assert list(deep.units.values()) == list(every)
    whole = Unfolded(chain(every))
    for direction in ("forward", "backward"):
        assert deep.homes[direction] == whole.homes[direction]


def _takes_and_frees(*touches: Touch) -> Recording:
    return chain([unit("a")], touches={("enter", "a"): touches})


TAKEN = Touch("take", 1, 4)


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (
            Recording((Piece("enter", "b", ()),), (unit("a"),)),
            "recording: piece 0: unit: expected one that is recorded, got 'b'.",
        ),
        (
            _takes_and_frees(Touch("free", 1, 4)),
            "recording: piece 1: expected a storage of 4 B that is there, got storage 1.",
        ),
        (
            _takes_and_frees(TAKEN, Touch("free", 1, 5)),
            "recording: piece 1: expected a storage of 5 B that is there, got storage 1.",
        ),
        (
            _takes_and_frees(TAKEN, TAKEN),
            "recording: piece 1: expected a storage that is not there, got storage 1.",
        ),
        (
            _takes_and_frees(TAKEN, Touch("gradient", 1, 4, name="b.w")),
            "recording: piece 1: gradient: expected one that is recorded, got 'b.w'.",
        ),
        (
            _takes_and_frees(TAKEN, *[Touch("gradient", 1, 4, name="a.w")] * 2),
            "recording: piece 1: expected a storage of 4 B that is there, got storage 1.",
        ),
        (
            Recording((), (unit("a", series="layers"),)),
            "recording: unit of series: expected one that is recorded, got 'layers'.",
        ),
        (
            Recording((), (), (Series("layers", ("a",), ("b",)),)),
            "recording: block: expected one that is recorded, got 'b'.",
        ),
    ],
)
def test_a_recording_that_speaks_of_what_is_not_there_is_refused(
    recording: Recording, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_recording(recording)
    assert str(caught.value) == message


def test_a_recording_that_speaks_of_what_is_there_is_none_to_refuse() -> None:
    check_recording(_takes_and_frees(TAKEN, Touch("free", 1, 4), TAKEN, Touch("free", 1, 4)))
    check_recording(recording((6, 2)))


def test_a_table_belongs_to_the_module_that_looks_it_up() -> None:
    step = Unfolded(chain([unit("a"), unit("b")], tables_after={"a": "user", "b": "users.seen"}))
    assert step.lookups == ("user", "users.seen")
    assert step.returned == ("users.seen", "user")
    assert [step.tables_of(f"{path}.weight") for path in step.lookups] == ["user", "users.seen"]
    assert step.tables_of("users.other.weight") == ""


def test_a_table_that_no_step_looks_up_is_refused() -> None:
    recorded = chain([unit("a")], tables_after={"a": "users"})
    for path in ("users", "items"):
        tables = (RecordedTable(path, 9, 4, 2),)
        changed = msgspec.structs.replace(recorded, tables=tables)
        if path == "users":
            check_recording(changed)
        else:
            with pytest.raises(InputError, match="table: expected one that is recorded"):
                check_recording(changed)
