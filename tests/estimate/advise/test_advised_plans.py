"""Layouts of jobs with tables: the answer against the plan of every layout, bounds against what
they bound.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwright.core.advice import Advice
from shardwright.core.errors import InputError
from shardwright.core.quantities import SAME_SECONDS
from shardwright.estimate.advise import advise, fewest_ranks, job_of
from shardwright.estimate.advise.planned import Plans, planned_layouts
from shardwright.estimate.advise.space import global_batch
from shardwright.estimate.recordings import found_for, plan
from shardwright.job.exported import exported
from shardwright.job.job import Job, parse_job
from shardwright.planner.planner import watch_of
from shardwright.planner.step_draft import StepDraft


def random_job(seed: int, world: int, preset: str, **cluster: Any) -> Job:
    """A DLRM with a few tables, whose units are large enough to be worth a choice."""
    draw = random.Random(seed)
    tables = [
        {
            "name": f"t{k}",
            "rows": draw.choice((50, 2_000, 30_000)) + k,
            "dim": draw.choice((8, 16, 32)),
            "pooling_factors": [draw.choice((1.0, 4.0))],
        }
        for k in range(draw.randint(2, 5))
    ]
    wide = draw.choice((32, 256, 1024))
    return parse_job(
        {
            "model": {"bottom": [wide, 16], "top": [wide, 1], "interaction": "cat"},
            "tables": tables,
            "cluster": {"preset": preset, "world_size": world, **cluster},
            "batch": {"size": draw.choice((16, 128))},
            "train": {"optimizer": "adam"},
        }
    )


def own_job(function: str = "build", world: int = 2, cap: str = "1 GiB", **train: Any) -> Job:
    return parse_job(
        {
            "model": {"python": f"recommenders:{function}"},
            "cluster": {"preset": "local", "world_size": world, "ddr_cap": cap},
            "batch": {"size": 8},
            "train": {"optimizer": "sgd", **train},
        }
    )


def plans_of(job: Job, **fixed: str) -> Plans:
    world = job.cluster.world_size or 1
    batch = global_batch(job, world)
    found = planned_layouts(job, "", (world, world), batch, fixed, lambda _: None)
    assert found
    return found


def check_answer(job: Job, found: Advice) -> None:
    """The answer is the fastest of the plans of all layouts, each made as `plan` makes it."""
    seconds = {}
    for layout in plans_of(job).space.layouts():
        its = job_of(job, layout)
        alone = found_for(its, watch_of(its))
        if isinstance(alone.draft, StepDraft) and alone.problem.sure:
            seconds[layout] = alone.seconds
            assert alone.draft.needs[1] <= alone.problem.decisive_capacity
    assert bool(seconds) == bool(found.rows)
    if found.answer:
        assert found.answer.time.seconds == pytest.approx(min(seconds.values()), rel=1e-12)
        assert seconds[found.answer.layout] == pytest.approx(min(seconds.values()), rel=1e-12)
        assert found.lower_bound_seconds
        assert found.lower_bound_seconds <= min(seconds.values()) * (1 + SAME_SECONDS)
        assert found.gap >= -SAME_SECONDS


WORLDS = ((1, "local"), (2, "a100-8"), (3, "local"), (8, "a100-8"))


@pytest.mark.parametrize(("world", "preset"), WORLDS)
def test_no_plan_of_any_layout_is_faster_than_the_answer(world: int, preset: str) -> None:
    job = random_job(world, world, preset)
    found = advise(job)
    assert found.layouts == len(list(plans_of(job).space.layouts()))
    check_answer(job, found)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_nor_where_memory_is_short(share: float) -> None:
    roomy = advise(random_job(4, 2, "local"))
    assert roomy.answer
    job = random_job(4, 2, "local", ddr_cap=int(roomy.answer.most_bytes * share))
    check_answer(job, advise(job))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_no_plan_of_many_random_jobs_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    world, preset = draw.choice((1, 2, 3, 4, 8)), draw.choice(("local", "a100-8"))
    cap = f"{draw.choice((1, 2, 4, 64))} {'MiB' if preset == 'local' else 'GiB'}"
    tier = "ddr_cap" if preset == "local" else "hbm_cap"
    job = random_job(seed, world, preset, **{tier: cap})
    check_answer(job, advise(job))


@pytest.mark.parametrize("preset", ["local", "a100-8"])
def test_bounds_are_below_what_a_plan_takes(preset: str) -> None:
    plans = plans_of(random_job(5, 4, preset))
    for layout in plans.space.layouts():
        found = plans.plan(layout)
        assert found.fits
        assert 0 < plans.least_seconds(layout) <= found.time.seconds * (1 + SAME_SECONDS)
        assert 0 < plans.least_bytes(layout) <= found.footprint.worst.peak_bytes


def test_what_cannot_be_faster_is_not_planned() -> None:
    # Host links are slow: whoever shares among both hosts takes longer than any plan of the others.
    job = random_job(2, 8, "a100-8", local_world_size=2)
    found = advise(job)
    assert found.answer
    assert found.exact < found.layouts
    left = [point for point in found.points if not point.verdict]
    assert len(left) == found.layouts - found.exact - found.bounded
    assert min(point.seconds for point in left) >= found.answer.time.seconds
    check_answer(job, found)


def test_where_nothing_fits_the_nearest_and_more_ranks_are_told() -> None:
    job = random_job(4, 1, "local", ddr_cap="3 MiB")
    found = advise(job)
    assert not found.rows
    assert found.nearest
    assert found.lack(found.nearest) > 0
    assert found.fewest_ranks
    more = advise(random_job(4, found.fewest_ranks, "local", ddr_cap="3 MiB"),
                  global_batch=found.global_batch)  # fmt: skip
    assert more.rows


def test_headroom_stays_free_and_is_not_in_the_budget_of_the_job() -> None:
    job = random_job(4, 2, "local")
    roomy = advise(job)
    assert roomy.answer
    spare = roomy.capacity - roomy.answer.most_bytes * 9 // 10
    found = advise(job, headroom=spare)
    assert found.answer
    assert found.answer.most_bytes + spare <= found.capacity == roomy.capacity
    its = job_of(job, found.answer.layout, headroom=spare)
    assert max(rank.peak_bytes for rank in plan(its).ranks) == found.answer.most_bytes


def test_a_job_of_the_answer_is_planned_as_it_was() -> None:
    job = random_job(3, 4, "a100-8")
    found = advise(job)
    assert found.answer
    its = job_of(job, found.answer.layout)
    assert exported(its, "shardwright")
    assert plan(its).max_rank_seconds == pytest.approx(found.answer.time.seconds, rel=1e-12)
    assert its.batch.size * 4 == found.global_batch == job.batch.size * 4


def test_modules_of_ones_own_are_planned_where_embeddings_are_tables() -> None:
    said = own_job(table_optimizer="rowwise_adagrad", table_learning_rate=0.1)
    for job in (said, own_job()):  # of the second a plan chooses which are tables
        found = advise(job)
        assert found.lower_bound_seconds
        check_answer(job, found)


def test_checkpointing_is_an_axis_of_a_model_with_blocks() -> None:
    job = parse_job(
        {
            "model": {"kind": "transformer", "layers": 2, "dim": 32, "heads": 2, "vocab": 64},
            "cluster": {"preset": "local", "world_size": 2},
            "batch": {"size": 4, "sequence": 16},
        }
    )
    found = advise(job)
    assert found.space["checkpointing"] == ("none", "selective", "full")
    check_answer(job, found)


def test_a_measured_step_scales_the_bound_as_well() -> None:
    job = random_job(4, 2, "local")
    found = advise(job)
    assert found.answer
    assert found.lower_bound_seconds
    its = job_of(job, found.answer.layout)
    scaled = advise(job, measured=[(its, 3 * found.answer.time.seconds)])
    assert scaled.answer
    assert scaled.answer.time.seconds == pytest.approx(3 * found.answer.time.seconds)
    assert scaled.lower_bound_seconds == pytest.approx(3 * found.lower_bound_seconds)
    assert scaled.gap == pytest.approx(found.gap)


def test_the_fewest_ranks_hold_the_global_batch() -> None:
    job = random_job(4, 1, "local", ddr_cap="3 MiB")
    found = fewest_ranks(job, lambda _: True)
    assert found
    assert found[1].world_size > 1
    assert found[1].global_batch == job.batch.size


def test_an_interruption_shows_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    job, planned, made = random_job(8, 8, "a100-8"), Plans.plan, 0

    def interrupted(self: Plans, layout: Any) -> Any:
        nonlocal made
        if layout not in self.planned:
            made += 1
            if made > 2:
                raise KeyboardInterrupt
        return planned(self, layout)

    whole = advise(job)
    assert whole.exact > 2
    monkeypatch.setattr(Plans, "plan", interrupted)
    found = advise(job)
    assert found.answer
    assert found.exact == 2
    assert not found.proven
    assert found.lower_bound_seconds
    assert found.lower_bound_seconds <= whole.rows[0].time.seconds <= found.answer.time.seconds


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"tensor": "2"}, "--fix: expected one of data_replicate, zero, got 'tensor'"),
        ({"zero": "1"}, "--fix zero: expected 3 or 2, got 1"),
        ({"data_replicate": "3"}, "--fix data_replicate: expected 1 or 2, got 3"),
    ],
)
def test_an_axis_that_there_is_not_is_refused(fixed: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        advise(random_job(4, 2, "local"), fixed=fixed)


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="a layout of 7 samples on 2 ranks"):
        advise(random_job(4, 2, "local"), global_batch=7)
