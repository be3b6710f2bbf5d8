from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.job.pipelining import (
    SCHEDULES,
    Pass,
    chunk_count,
    highest,
    order,
    representative,
    stage_of,
)


def in_flight(
    schedule: str, stages: int, microbatches: int, chunks: int | None = None
) -> tuple[int, ...]:
    """The most (chunk, microbatch) pairs whose activations a rank keeps at once, rank by rank: from
    the forward to the end of the backward, of that of the weights where it is split."""
    return tuple(map(_most, order(schedule, stages, microbatches, chunks)))


def _most(passes: Sequence[Pass]) -> int:
    now = most = 0
    for each in passes:
        if each.kind == "forward":
            now += 1
            most = max(most, now)
        elif each.kind != "input_backward":
            now -= 1
    return most


def _possible(name: str, stages: int, microbatches: int) -> bool:
    schedule = SCHEDULES[name]
    if microbatches < schedule.fewest_microbatches(stages):
        return False
    return not schedule.rounds or microbatches % max(1, microbatches // stages) == 0


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A schedule with numbers it can be run with."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.integers(1, 6))
    least = SCHEDULES[name].fewest_microbatches(stages)
    microbatches = draw(st.integers(least, 24).filter(lambda m: _possible(name, stages, m)))
    several = SCHEDULES[name].chunks == "several"
    chunks = draw(st.integers(2, 4)) if several else chunk_count(name)
    return name, stages, microbatches, chunks


@given(pipelines())
def test_every_rank_runs_every_microbatch_of_every_chunk_once(
    pipeline: tuple[str, int, int, int],
) -> None:
    name, stages, microbatches, chunks = pipeline
    slots = {(c, m) for c in range(chunks) for m in range(microbatches)}
    for passes in order(name, stages, microbatches, chunks):
        for kinds in (
            ("forward",),
            ("backward", "input_backward"),
            ("backward", "weight_backward"),
        ):
            ran = [(p.chunk, p.microbatch) for p in passes if p.kind in kinds]
            assert len(ran) == len(slots)
            assert set(ran) == slots


@given(pipelines())
def test_every_order_can_be_carried_out(pipeline: tuple[str, int, int, int]) -> None:
    assert _unit_seconds(*pipeline)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (5, 12)])
def test_the_second_zero_bubble_schedule_never_waits_between_its_passes(
    stages: int, microbatches: int
) -> None:
    for rank, (start, end) in enumerate(_unit_seconds("zbh2", stages, microbatches, 1)):
        assert (start, end) == (rank, rank + 3 * microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (5, 12)])
def test_the_first_zero_bubble_schedule_waits_a_third_of_what_1f1b_waits(
    stages: int, microbatches: int
) -> None:
    """The bubbles of arXiv:2401.10241 where the three passes take the same time."""
    for name, bubble in (("zbh1", stages - 1), ("1f1b", 3 * (stages - 1))):
        start, end = _unit_seconds(name, stages, microbatches, 1)[0]
        assert end - start == 3 * microbatches + bubble


# What others wait for when a pass has ended.
DONE = {
    "forward": "output",
    "backward": "gradient",
    "input_backward": "gradient",
    "weight_backward": "weights",
}


def _unit_seconds(name: str, stages: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """First start and last end on every rank, where a pass takes 1 and a whole backward 2.

    Fails if a pass waits for one that can never have been run.
    """
    ranks = order(name, stages, microbatches, chunks)
    last = stages * chunks - 1
    ends: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * stages, [0] * stages
    begun = [-1] * stages
    while any(at[r] < len(ranks[r]) for r in range(stages)):
        moved = False
        for r in range(stages):
            if at[r] == len(ranks[r]):
                continue
            p = ranks[r][at[r]]
            stage = stage_of(name, stages, r, p.chunk)
            needs = _needs(p, stage, last)
            if not all(need in ends for need in needs):
                continue
            start = max([clock[r], *(ends[need] for need in needs)])
            begun[r] = start if begun[r] < 0 else begun[r]
            clock[r] = start + (2 if p.kind == "backward" else 1)
            ends[(DONE[p.kind], stage, p.microbatch)] = clock[r]
            at[r] += 1
            moved = True
        assert moved, "every rank waits for another one"
    return list(zip(begun, clock, strict=True))


def _needs(p: Pass, stage: int, last: int) -> list[tuple[str, int, int]]:
    if p.kind == "forward":
        return [("output", stage - 1, p.microbatch)] if stage else []
    if p.kind == "weight_backward":
        return [("gradient", stage, p.microbatch)]
    own = [("output", stage, p.microbatch)]
    return own if stage == last else [*own, ("gradient", stage + 1, p.microbatch)]


@given(st.integers(1, 9), st.integers(1, 30))
def test_gpipe_keeps_every_microbatch(stages: int, microbatches: int) -> None:
    assert in_flight("gpipe", stages, microbatches) == (microbatches,) * stages


@given(st.integers(1, 9), st.integers(1, 30))
def test_1f1b_keeps_a_microbatch_for_every_rank_from_its_own_on(
    stages: int, microbatches: int
) -> None:
    wanted = tuple(min(stages - rank, microbatches) for rank in range(stages))
    assert in_flight("1f1b", stages, microbatches) == wanted


@given(st.integers(2, 8), st.integers(2, 5), st.integers(2, 5))
def test_interleaving_costs_the_first_rank_the_factor_of_its_paper(
    stages: int, chunks: int, rounds: int
) -> None:
    most = in_flight("interleaved_1f1b", stages, rounds * stages, chunks)
    factor = 1 + (stages - 1) / (stages * chunks)
    assert most[0] / chunks == pytest.approx(stages * factor)
    assert most == tuple(most[0] - 2 * rank for rank in range(stages))


@given(st.integers(1, 8), st.integers(1, 20))
def test_the_first_zero_bubble_schedule_keeps_on_every_rank_what_1f1b_keeps_on_the_first(
    stages: int, microbatches: int
) -> None:
    assert in_flight("zbh1", stages, microbatches) == (min(stages, microbatches),) * stages


@given(st.integers(1, 8), st.integers(1, 30))
def test_the_second_zero_bubble_schedule_keeps_almost_twice_as_many(
    stages: int, microbatches: int
) -> None:
    most = in_flight("zbh2", stages, microbatches)
    assert most == (min(2 * stages - 1, microbatches),) * stages


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_zero_bubble_v_keeps_no_more_on_any_rank_than_1f1b_on_the_first(stages: int) -> None:
    assert in_flight("zbv", stages, 4 * stages) == (2 * stages,) * stages


def test_passes_are_shown_by_kind_chunk_and_microbatch() -> None:
    assert order("1f1b", 2, 2)[0] == (
        Pass("forward", 0, 0),
        Pass("forward", 0, 1),
        Pass("backward", 0, 0),
        Pass("backward", 0, 1),
    )


@given(pipelines())
def test_the_representative_is_the_fewest_microbatches_with_the_same_in_flight(
    pipeline: tuple[str, int, int, int],
) -> None:
    name, stages, microbatches, chunks = pipeline
    wanted = highest(name, stages, microbatches, chunks)
    found = representative(name, stages, microbatches, chunks)
    assert in_flight(name, stages, found, chunks) == in_flight(name, stages, microbatches, chunks)
    if SCHEDULES[name].growing:
        assert found == microbatches
        return
    alike = [
        m
        for m in range(1, microbatches + 1)
        if _possible(name, stages, m)
        and (not SCHEDULES[name].rounds or _round(stages, m) == _round(stages, microbatches))
        and highest(name, stages, m, chunks) == wanted
    ]
    assert found == min(alike)


def _round(stages: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // stages)


@pytest.mark.parametrize(
    ("name", "chunks", "most"),
    [("1f1b", 1, 17), ("zbh1", 1, 32), ("interleaved_1f1b", 8, 48), ("zbv", 2, 48)],
)
def test_many_microbatches_cost_no_more_than_few(name: str, chunks: int, most: int) -> None:
    assert representative(name, 16, 2**20, chunks) <= most


@pytest.mark.parametrize(
    ("name", "title"),
    [("Interleaved1F1B", "interleaved_1f1b"), ("ZBVZeroBubble", "zbv"), ("ZB-H1", "zbh1")],
)
def test_a_schedule_answers_to_its_name_in_torch(name: str, title: str) -> None:
    assert order(name, 2, 4) == order(title, 2, 4)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks", "message"),
    [
        ("zigzag", 2, 2, None, r"\[parallel\] schedule: expected one of gpipe, 1f1b.*'zigzag'"),
        ("1f1b", 2, 4, 2, r"chunks: expected 1, got 2.*take interleaved_1f1b"),
        ("interleaved_1f1b", 2, 4, 1, r"chunks: expected 2 or more, got 1.*take 1f1b"),
        ("zbv", 2, 4, 3, r"chunks: expected 2, got 3"),
        ("1f1b", 2, 0, None, r"microbatches: expected at least 1, got 0"),
        ("1f1b", 0, 1, None, r"pipeline: expected at least 1 rank, got 0"),
        ("dualpipev", 4, 7, None, r"microbatches: expected at least 8, got 7"),
        ("interleaved_1f1b", 4, 11, 2, r"a multiple of 2, .*got 11\. 8 and 12 will do"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_in_one_line(
    schedule: str, stages: int, microbatches: int, chunks: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        order(schedule, stages, microbatches, chunks)
    assert "\n" not in str(caught.value)
