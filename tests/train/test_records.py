"""Waiting is told from moving by who came last; kernels are counted over all ranks."""

from __future__ import annotations

import msgspec
import pytest

from shardwright.core.measurement import (
    MOST_KERNELS,
    Awaited,
    Meeting,
    RankProfile,
    Record,
    by_phase,
)
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.train.records import OTHERS, merge, stages_of, waiting


def meeting(number: int, arrived: float, ended: float, began: float | None = None) -> Meeting:
    held = arrived if began is None else began
    return Meeting("g", number, "all_to_all", "rows", 64, arrived, held, ended, "exchange_rows")


def profile(rank: int, meetings: tuple[Meeting, ...], **changes: object) -> RankProfile:
    given = {
        "kernels": {"mm": (1.0, 3.0)},
        "phases": {"exchange_rows": 8.0, "load": 2.0},
        **changes,
    }
    return RankProfile("training", rank, 2, meetings=meetings, **given)  # type: ignore[arg-type]


def test_a_rank_waits_until_the_last_one_has_come_and_then_bytes_move() -> None:
    early, late = meeting(1, 10.0, 15.0), meeting(1, 14.0, 15.5)
    found, unmatched = waiting({0: [early], 1: [late]})
    assert [(rank, seconds, last) for rank, _, seconds, last in found] == [(0, 4.0, 1), (1, 0, 1)]
    assert unmatched == 0


def test_a_collective_that_began_before_it_was_waited_for_costs_only_what_it_held() -> None:
    early, late = meeting(1, 10.0, 15.0, began=13.0), meeting(1, 14.0, 14.5)
    assert waiting({0: [early], 1: [late]})[0][0][2] == 1.0


def test_a_rank_that_is_held_for_less_than_others_are_late_waited_no_longer_than_that() -> None:
    early, late = meeting(1, 10.0, 11.0), meeting(1, 14.0, 14.5)
    assert waiting({0: [early], 1: [late]})[0][0][2] == 1.0


def test_collectives_that_not_all_ranks_saw_are_counted_and_left_out() -> None:
    own = [meeting(1, 1.0, 2.0), meeting(2, 3.0, 4.0)]
    found, unmatched = waiting({0: own, 1: own[:1]})
    assert {m.number for _, m, _, _ in found} == {1}
    assert unmatched == 1


def test_a_stage_has_means_per_step_in_the_order_of_phases() -> None:
    ranks = [
        [profile(0, (meeting(1, 1.0, 6.0),))],
        [profile(1, (meeting(1, 5.0, 7.0),), kernels={"mm": (5.0,), "add": (1.0,)})],
    ]
    (stage,) = stages_of(ranks)
    lines = by_phase(stage)
    assert list(lines) == ["load", "exchange_rows"]
    assert [(p.seconds, p.waiting, p.moving) for p in lines["exchange_rows"]] == [
        (4.0, 2.0, 0.5),
        (4.0, 0.0, 1.0),
    ]
    assert stage.awaited == (Awaited(1, 2.0),)
    first, second = stage.kernels
    assert (first.name, first.calls, first.mean, first.median, first.longest) == ("mm", 3, 3, 3, 5)
    assert first.share == pytest.approx(0.9)
    assert second.name == "add"


def test_a_stage_that_a_rank_has_not_profiled_is_no_stage() -> None:
    assert stages_of([[profile(0, ())], []]) == ()


def test_kernels_past_the_most_are_one_line() -> None:
    kernels = {f"k{n}": (1.0 + n,) for n in range(MOST_KERNELS + 3)}
    (stage,) = stages_of([[profile(0, (), kernels=kernels)]])
    assert len(stage.kernels) == MOST_KERNELS + 1
    last = stage.kernels[-1]
    assert (last.name, last.calls, last.seconds) == (OTHERS, 3, 6.0)
    assert sum(kernel.share for kernel in stage.kernels) == pytest.approx(1)


def test_profiled_steps_at_the_end_count_as_steps() -> None:
    tables = [{"name": "t", "rows": 100, "dim": 8}]
    made = plan(parse_job({"model": {"bottom": [8], "top": [4, 1]}, "tables": tables}))
    losses = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    own = Record(
        schema="shardwright.record/1",
        plan_fingerprint=made.fingerprint,
        rank=0,
        events=(),
        losses=losses,
        seconds_per_step=0.1,
        memory_steps=(3, 4, 5),
        time_steps=(2, 3, 4, 5),  # for 6, 7 and 8 were slowed
        bad_rows=0,
        versions={},
        machine={},
    )
    found = merge(made, [own, msgspec.structs.replace(own, rank=1)])
    assert found.steps == 8
    assert found.curve.loss == losses
