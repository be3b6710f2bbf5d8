"""A recorded step cut in buckets: parameters as gradients come, pieces where one is complete."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from recordings import At, chain, layers, unit

from shardwright.core.bucketing import in_buckets
from shardwright.core.recording import Piece, RecordedUnit, Recording, Series, Touch, Unfolded
from shardwright.core.tensor import TensorSpec
from shardwright.core.work import Work

ACTIVE = 64  # bytes that a layer keeps for its backward
PLACES = {"a.w": 10, "a.b": 2, "b.w": 30, "b.b": 4}


def step_of(units: tuple[RecordedUnit, ...]) -> Recording:
    """Every unit keeps something until the backward of the one before it begins, and gets its
    gradients one by one."""
    touches: dict[At, tuple[Touch, ...]] = {}
    works: dict[At, Work] = {}
    slots = {u.name: 100 * number for number, u in enumerate(units)}
    for each, before in zip(units, (None, *units), strict=False):
        slot = slots[each.name]
        touches["enter", each.name] = (Touch("take", slot, ACTIVE, name="made", module=each.name),)
        found = []
        for place, tensor in enumerate(each.tensors, 1):
            found += [
                Touch("take", slot + place, tensor.nbytes, "temporary"),
                Touch("gradient", slot + place, tensor.nbytes, "temporary", tensor.fqn),
            ]
        freed = (Touch("free", slots[before.name], ACTIVE),) if before else ()
        touches["enter_backward", each.name] = (*found, *freed)
        works["enter_backward", each.name] = Work(7, 1_000, 30)
    touches["finish", ""] = ()
    return chain(units, touches=touches, works=works)


def two_units(*, frozen: bool = False) -> Recording:
    tensors = {name: TensorSpec(name, (size,)) for name, size in PLACES.items()}
    a = RecordedUnit("a", (tensors["a.w"], tensors["a.b"]), "", ("a",))
    b = RecordedUnit("b", (tensors["b.w"], tensors["b.b"]), "", ("b",), ("b.w",) * frozen)
    return step_of((a, b))


def tensors_of(recording: Recording) -> dict[str, list[str]]:
    return {unit.name: [t.fqn for t in unit.tensors] for unit in recording.units}


def points(pieces: list[Piece] | tuple[Piece, ...]) -> list[str]:
    return [f"{p.point} {p.unit}" for p in pieces if p.unit.startswith("bucket")]


def test_buckets_have_parameters_as_their_gradients_come() -> None:
    assert tensors_of(in_buckets(two_units(), 34)) == {
        "bucket-0": ["b.w", "b.b"],
        "bucket-1": ["a.w", "a.b"],
    }
    assert tensors_of(in_buckets(two_units(), 35)) == {
        "bucket-0": ["b.w", "b.b", "a.w"],
        "bucket-1": ["a.b"],
    }
    assert list(tensors_of(in_buckets(two_units(), 1))) == [f"bucket-{n}" for n in range(4)]


def test_what_gets_no_gradient_is_in_the_last_bucket() -> None:
    found = in_buckets(two_units(frozen=True), 4)
    assert tensors_of(found) == {
        "bucket-0": ["b.b"],
        "bucket-1": ["a.w"],
        "bucket-2": ["a.b", "b.w"],
    }
    assert [unit.frozen for unit in found.units] == [(), (), ("b.w",)]


def test_a_bucket_is_entered_with_the_first_unit_that_needs_it_and_left_when_it_is_complete() -> (
    None
):
    found = in_buckets(two_units(), 35)
    assert points(found.pieces) == [
        "enter bucket-1",
        "enter bucket-0",
        "leave bucket-1",
        "leave bucket-0",
        "enter_backward bucket-1",
        "enter_backward bucket-0",
        "leave_backward bucket-0",
        "leave_backward bucket-1",
    ]
    step = Unfolded(found)
    (done,) = [
        n
        for n, m in enumerate(step.backward)
        if m.unit == "bucket-0" and m.piece.point == "leave_backward"
    ]
    before = [t for m in step.backward[:done] for t in m.piece.touches]
    assert before[-1].name == "a.w"


def test_a_piece_that_is_cut_does_the_same_work() -> None:
    whole, cut = two_units(), in_buckets(two_units(), 1)
    for direction in ("forward", "backward"):
        work, again = (
            sum((m.piece.work for m in getattr(Unfolded(each), direction)), Work())
            for each in (whole, cut)
        )
        assert work == again
    parts = [p for p in cut.pieces if p.unit == "b" and p.work.flops]
    assert len(parts) > 1


@given(st.integers(3, 9), st.integers(1, 5), st.integers(1, 40))
def test_blocks_that_were_recorded_once_are_cut_each_by_itself(
    count: int, numel: int, size: int
) -> None:
    every = layers(count, numel)
    few = (every[0], every[1], every[-1])
    series = Series("layers", tuple(u.name for u in every), tuple(u.name for u in few))
    short = step_of(few)
    deep = in_buckets(Recording(short.pieces, few, (series,)), size)
    whole = in_buckets(step_of(every), size)
    assert deep.units == whole.units
    assert [p.point for p in deep.pieces] == [p.point for p in whole.pieces]
    assert [p.unit for p in deep.pieces] == [p.unit for p in whole.pieces]
    for mine, true in zip(deep.pieces, whole.pieces, strict=True):
        assert [(t.what, t.slot, t.nbytes) for t in mine.touches] == [
            (t.what, t.slot, t.nbytes) for t in true.touches
        ]


def test_modules_that_run_again_go_with_their_first_parameter() -> None:
    units = tuple(
        RecordedUnit(u.name, u.tensors, u.series, u.modules, (), "full") for u in layers(3)
    )
    found = in_buckets(step_of(units), 2)
    assert [u.checkpointed for u in found.units] == [("layers.1", "layers.2"), ("layers.0",)]


def test_a_model_that_trains_nothing_is_one_bucket() -> None:
    frozen = RecordedUnit("a", (TensorSpec("a.w", (3,)),), "", ("a",), ("a.w",))
    found = in_buckets(chain([frozen, unit("b")]), 1)
    assert tensors_of(found) == {"bucket-0": ["a.w", "b.w"]}
