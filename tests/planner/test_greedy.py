from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.core.job import Job
from shardwright.core.specs import model_spec
from shardwright.planner import greedy
from shardwright.planner.problem import UNIFORM, Problem, make_problem

MakeJob = Callable[..., Job]


def _problem(job: Job) -> Problem:
    return make_problem(job, model_spec(job))


@pytest.mark.parametrize("seed", range(8))
def test_proposals_keep_within_their_budget(random_job: MakeJob, seed: int) -> None:
    problem = _problem(random_job(seed))
    budget = 0.7 * problem.cluster.memory_per_rank
    for draft in greedy.proposals(problem, budget):
        assert max(draft.kept_bytes) <= budget + 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_a_proposal_places_every_shard_on_a_rank(random_job: MakeJob, seed: int) -> None:
    problem = _problem(random_job(seed))
    ranks = range(problem.cluster.world_size)
    for draft in greedy.proposals(problem, float("inf")):
        assert len(draft.tables) == len(problem.tables)
        for placed, choices in zip(draft.tables, problem.tables, strict=True):
            assert placed.choice in choices
            assert len(placed.ranks) == len(placed.choice.option.shards)
            assert set(placed.ranks) <= set(ranks)
            if placed.choice.option.sharding_type in UNIFORM:
                assert placed.ranks == tuple(ranks)


def test_a_budget_below_every_unit_has_no_proposals(make_job: MakeJob) -> None:
    assert list(greedy.proposals(_problem(make_job(50)), 100.0)) == []


def test_every_combination_of_unit_modes_is_proposed(make_job: MakeJob) -> None:
    drafts = greedy.proposals(_problem(make_job(50)), float("inf"))
    modes = {tuple(unit.replicated for unit in draft.units) for draft in drafts}
    assert modes == {(a, b) for a in (False, True) for b in (False, True)}


@pytest.mark.parametrize("seed", range(8))
def test_moving_single_tables_never_makes_a_proposal_slower(random_job: MakeJob, seed: int) -> None:
    drafts = list(greedy.proposals(_problem(random_job(seed)), float("inf")))
    for before, after in zip(drafts[::2], drafts[1::2], strict=True):
        loads = [
            max(
                sum(
                    s
                    for p in d.tables
                    for r, s in zip(p.ranks, p.choice.seconds, strict=True)
                    if r == rank
                )
                for rank in range(d.problem.cluster.world_size)
            )
            + sum(p.choice.request_seconds for p in d.tables)
            for d in (before, after)
        ]
        assert loads[1] <= loads[0] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_smallest_draft_shards_every_unit_that_it_may(random_job: MakeJob, seed: int) -> None:
    draft = greedy.smallest(_problem(random_job(seed)))
    world_size = draft.problem.cluster.world_size
    assert all(not unit.replicated for unit in draft.units) or world_size == 1


def test_the_smallest_draft_needs_less_than_any_proposal(make_job: MakeJob) -> None:
    problem = _problem(make_job(200_000, 90_000))
    least = max(greedy.smallest(problem).kept_bytes)
    for draft in greedy.proposals(problem, float("inf")):
        assert least <= max(draft.kept_bytes)


def test_a_replaced_table_moves_alone(make_job: MakeJob) -> None:
    problem = _problem(make_job(200_000, 90_000))
    draft = greedy.smallest(problem)
    choice = problem.tables[1][1]
    other = greedy.replaced(draft, 1, choice)
    assert other.tables[0] == draft.tables[0]
    assert other.tables[1].choice is choice
    assert other.units == draft.units
