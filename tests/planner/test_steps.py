from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from shardwright.core.quantities import SAME_SECONDS
from shardwright.estimate.recordings import described
from shardwright.job.job import Job
from shardwright.planner.choice import Choice, Placed
from shardwright.planner.draft import Found
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import relaxed
from shardwright.planner.search.search import search
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import (
    AVOIDED,
    search_steps,
    smallest,
    smallest_tables,
    step_bound,
    without,
)
from shardwright.planner.strategy.tables import placed_tables, space_of

MakeJob = Callable[..., Job]


def _problem(job: Job) -> Problem:
    return make_problem(job, described(job))


def _found(job: Job) -> Found:
    return search_steps(job, described(job), Watch())


def _with_memory(job: Job, nbytes: int) -> Job:
    cluster = msgspec.structs.replace(job.cluster, ddr_cap=nbytes)
    return msgspec.structs.replace(job, cluster=cluster)


@pytest.mark.parametrize("seed", [0, *range(2, 8), 9])
def test_the_draft_that_is_found_keeps_within_the_memory(random_job: MakeJob, seed: int) -> None:
    draft = _found(random_job(seed)).draft
    assert draft is not None
    assert draft.fits
    assert max(draft.peak_bytes) <= draft.problem.decisive_capacity


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_in_the_memory_that_the_fastest_draft_needs_it_is_found_again(
    random_job: MakeJob, seed: int
) -> None:
    job = _with_memory(random_job(seed, tables=2 + seed % 4), 2**33)
    free = _found(job).draft
    assert free is not None
    tight = _found(_with_memory(job, free.highest_peak)).draft
    assert tight is not None
    assert tight.max_rank_seconds <= free.max_rank_seconds * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_the_draft_that_is_found_places_every_shard_on_a_rank(
    random_job: MakeJob, seed: int
) -> None:
    found = _found(_with_memory(random_job(seed), 2**33))
    draft, problem = found.draft, found.problem
    assert draft is not None
    ranks = range(problem.cluster.world_size)
    assert len(draft.tables) == len(problem.tables)
    for placed, choices in zip(draft.tables, problem.tables, strict=True):
        assert any(placed.choice is choice for choice in choices)
        assert len(placed.ranks) == placed.choice.option.count
        assert set(placed.ranks) <= set(ranks)
        if placed.choice.option.partition == "uniform":
            assert tuple(placed.ranks) == tuple(ranks)


def test_memory_below_every_unit_has_no_draft(make_job: MakeJob) -> None:
    found = _found(make_job(50, cluster={"world_size": 2, "ddr_cap": 100}))
    assert (found.draft, found.feasible) == (None, 0)


@pytest.mark.parametrize("avoided", AVOIDED)
def test_choices_are_left_out_where_a_table_has_others(
    make_job: MakeJob, avoided: Callable[[Choice], bool]
) -> None:
    problem = _problem(make_job(50, 60))
    for choices, left in zip(problem.tables, without(problem.tables, avoided), strict=True):
        assert left == tuple(c for c in choices if not avoided(c))
        assert left


def test_a_table_keeps_the_only_types_it_has(make_job: MakeJob) -> None:
    problem = _problem(make_job(50, table={"sharding_types": ["data_parallel"]}))
    assert without(problem.tables, AVOIDED[0]) == problem.tables


@pytest.mark.parametrize("seed", range(8))
def test_the_smallest_draft_fills_no_more_than_one_that_shards_or_replicates_all(
    random_job: MakeJob, seed: int
) -> None:
    draft = smallest(_problem(random_job(seed)))
    for way in (0, -1):
        units = tuple(choices[way] for choices in draft.problem.units)
        other = StepDraft(draft.problem, draft.tables, units)
        assert draft.highest_peak <= other.highest_peak


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_tables_keep_as_little_as_any_on_the_fullest_rank(
    random_job: MakeJob, seed: int
) -> None:
    problem = _problem(random_job(seed, tables=3, ranks=2))
    least = max(StepDraft(problem, smallest_tables(problem), ()).kept_bytes)
    everywhere = [
        [
            Placed(choice, ranks)
            for choice in choices
            for ranks in (
                [range(2)]
                if choice.option.partition == "uniform"
                else itertools.product(range(2), repeat=choice.option.count)
            )
        ]
        for choices in problem.tables
    ]
    for tables in itertools.product(*everywhere):
        assert least <= max(StepDraft(problem, tables, ()).kept_bytes)


def test_the_smallest_draft_is_tried_where_nothing_else_fits(random_job: MakeJob) -> None:
    job = random_job(18, tables=3, ranks=2)
    least = smallest(_problem(job))
    found = _found(_with_memory(job, max(least.peak_bytes)))
    assert found.draft is not None
    assert found.draft.max_rank_seconds <= least.max_rank_seconds


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_below_the_draft_that_is_found(random_job: MakeJob, seed: int) -> None:
    found = _found(_with_memory(random_job(seed), 2**33))
    assert found.draft is not None
    assert 0 < step_bound(found.problem) == found.bound
    assert found.bound <= found.draft.max_rank_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_no_arrangement_of_units_with_tables_placed_for_it_is_faster(
    random_job: MakeJob, seed: int
) -> None:
    found = _found(_with_memory(random_job(seed), 2**33))
    problem = found.problem
    for avoided in (lambda choice: False, *AVOIDED):
        tables = without(problem.tables, avoided)
        space = space_of(problem, tables, problem.capacity)
        best = search(relaxed(space)).best
        assert best is not None
        for arranged in problem.unit_space.arrangements:
            placed = placed_tables(space, best)
            draft = StepDraft(problem, placed, arranged.units, arranged.prefetch)
            assert found.seconds <= draft.max_rank_seconds * (1 + SAME_SECONDS)


def test_a_search_that_is_out_of_time_still_ends_with_a_draft(make_job: MakeJob) -> None:
    job = make_job(50, 3000, 70_000)
    found = search_steps(job, described(job), Watch(0.0))
    assert found.draft is not None
