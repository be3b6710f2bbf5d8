from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan

from shardwright.core.block import check_tiling
from shardwright.core.errors import UnsupportedError
from shardwright.core.placement import Flat, Replicate
from shardwright.core.sharding import FREE
from shardwright.core.timeline import decode, exact_bytes, phase_peaks, phase_seconds
from shardwright.estimate import recordings
from shardwright.estimate.recordings import described
from shardwright.job.job import Job
from shardwright.job.plan import Plan
from shardwright.planner.choice import Choice, Placed
from shardwright.planner.draft import Found
from shardwright.planner.explain import why_not
from shardwright.planner.planner import assemble
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import search_steps, step_bound

MakeJob = Callable[..., Job]
Planned = Callable[[int], Plan]

# Random jobs that all have a plan; the first three cut tables by columns.
SEEDS = (108, 80, 171, 0, 2, 4, 6, 9, 11, 14, 17, 21)

# The search is greedy. On several hundred random jobs of 3 tables on 2 ranks it was at most 1.27
# times slower than the best of all plans, and found a plan whenever 12 % of memory was to spare.
WORST_RATIO = 1.3
MEMORY_TO_SPARE = 1.12


def _problem(job: Job) -> Problem:
    return make_problem(job, described(job))


def _search(job: Job) -> Found:
    return search_steps(job, described(job), Watch())


def _planned(job: Job) -> Plan | None:
    """The plan, or None; without the ways out that a refusal tries."""
    found = _search(job)
    return None if found.draft is None else assemble(found.draft, found.bound, found.described(0.0))


@pytest.fixture(scope="module")
def found(random_job: MakeJob) -> Callable[[int], Found]:
    """What the search brings for a seed's job, once."""
    return functools.cache(lambda seed: _search(random_job(seed)))


@pytest.fixture(scope="module")
def planned(found: Callable[[int], Found]) -> Planned:
    """The plan of a seed's job, made once."""

    @functools.cache
    def made(seed: int) -> Plan:
        brought = found(seed)
        assert brought.draft is not None
        return assemble(brought.draft, brought.bound, brought.described(0.0))

    return made


def _everything(problem: Problem) -> Iterator[StepDraft]:
    """Every choice for every table on every rank, with every choice for every unit."""
    ranks = problem.cluster.world_size

    def places(choice: Choice) -> Iterator[tuple[int, ...]]:
        if choice.option.partition == "uniform":
            return iter([tuple(range(ranks))])
        return itertools.product(range(ranks), repeat=choice.option.count)

    tables = [
        [Placed(choice, where) for choice in choices for where in places(choice)]
        for choices in problem.tables
    ]
    for chosen in itertools.product(*tables):
        for units in itertools.product(*problem.units):
            yield StepDraft(problem, chosen, units)


@pytest.mark.slow
def test_most_random_jobs_have_a_plan(found: Callable[[int], Found]) -> None:
    assert sum(found(seed).draft is not None for seed in range(24)) >= 18


def test_plans_of_random_jobs_have_tables_of_every_type(planned: Planned) -> None:
    assert {t.sharding_type for seed in SEEDS for t in planned(seed).tables} == set(FREE)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_blocks_of_a_plan_tile_the_model(planned: Planned, seed: int) -> None:
    made = planned(seed)
    blocks = made.expanded()
    tensors = described(made.job).tensors
    check_tiling(blocks, tensors, made.world_size)
    dense = {name for unit in made.units for name in unit.tensors}
    for role in ("gradient", "optimizer_state"):
        swapped = [msgspec.structs.replace(b, role="parameter") for b in blocks if b.role == role]
        check_tiling(swapped, [t for t in tensors if t.fqn in dense], made.world_size)


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_fits_its_budget_on_every_rank(planned: Planned, seed: int) -> None:
    made = planned(seed)
    assert [r.rank for r in made.ranks] == list(range(made.world_size))
    for totals in made.ranks:
        assert 0 < totals.peak_bytes <= made.cluster.memory_per_rank
        assert totals.peak_bytes == sum(totals.at_peak.values())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_faster_than_its_lower_bound(planned: Planned, seed: int) -> None:
    made = planned(seed)
    assert 0 < made.lower_bound_seconds <= made.max_rank_seconds
    ratio = made.max_rank_seconds / made.lower_bound_seconds
    assert made.gap == pytest.approx(ratio - 1, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_totals_of_a_plan_are_those_of_its_timeline(planned: Planned, seed: int) -> None:
    made = planned(seed)
    events = decode(made.timeline)
    peaks, seconds, exact = phase_peaks(events), phase_seconds(events), exact_bytes(events)
    for totals in made.ranks:
        mine = {phase: kinds for (rank, phase), kinds in peaks.items() if rank == totals.rank}
        assert max(sum(kinds.values()) for kinds in mine.values()) == totals.peak_bytes
        assert mine[totals.peak_phase] == totals.at_peak
        spent = [value for (rank, _), value in seconds.items() if rank == totals.rank]
        assert sum(spent) == pytest.approx(totals.seconds, rel=1e-12)
        for kind, size in totals.exact.items():
            told = [n for (r, _, k, _), n in exact.items() if (r, k) == (totals.rank, kind)]
            assert sum(told) == size
    assert max(totals.seconds for totals in made.ranks) == made.max_rank_seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_weights_are_the_bytes_of_the_blocks(planned: Planned, seed: int) -> None:
    made = planned(seed)
    held = [0] * made.world_size
    for block in made.expanded():
        if block.role == "parameter":
            held[block.rank] += 4 * block.numel
    assert held == [totals.exact["weight"] for totals in made.ranks]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(6))
def test_every_possible_plan_is_above_the_bound_and_the_search_is_near_the_best(
    random_job: MakeJob, seed: int
) -> None:
    problem = _problem(random_job(seed, tables=3, ranks=2))
    drafts = sorted(_everything(problem), key=lambda draft: draft.max_rank_seconds)
    assert drafts[0].max_rank_seconds >= step_bound(problem)
    best = next((draft for draft in drafts if draft.fits), None)
    found = _search(problem.job).draft
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert best.max_rank_seconds <= found.max_rank_seconds * (1 + 1e-12)
        assert found.max_rank_seconds <= WORST_RATIO * best.max_rank_seconds


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "tables"), [(18, 3), (71, 2), (1011, 2), (1038, 2)])
def test_a_tight_budget_is_met_and_costs_little_more_than_it_must(
    random_job: MakeJob, seed: int, tables: int
) -> None:
    job = random_job(seed, tables=tables, ranks=2)
    drafts = list(_everything(_problem(job)))
    budget = int(min(max(draft.peak_bytes) for draft in drafts) * MEMORY_TO_SPARE)
    best = min(d.max_rank_seconds for d in drafts if max(d.peak_bytes) <= budget)
    cluster = msgspec.structs.replace(job.cluster, ddr_cap=budget)
    made = plan(msgspec.structs.replace(job, cluster=cluster))
    assert best * (1 - 1e-12) <= made.max_rank_seconds <= WORST_RATIO * best


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_table_alone_makes_a_plan_faster_by_another_type(planned: Planned, seed: int) -> None:
    made = planned(seed)
    ways = [(table.name, kind) for table in made.tables for kind in FREE]
    for name, kind in random.Random(seed).sample(ways, min(len(ways), 4)):
        assert why_not(made, name, kind).verdict != "faster"


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise", "column_wise"])
def test_a_table_gets_the_only_type_it_allows(make_job: MakeJob, kind: str) -> None:
    made = plan(make_job(50, 3000, table={"sharding_types": [kind]}))
    assert [table.sharding_type for table in made.tables] == [kind, kind]


@given(
    types=st.lists(
        st.sampled_from(["data_parallel", "table_wise", "row_wise", "column_wise"]),
        min_size=1,
        unique=True,
    ),
    rows=st.integers(1, 10**6),
)
@settings(max_examples=12)
def test_a_table_gets_one_of_the_types_it_allows(
    make_job: MakeJob, types: list[str], rows: int
) -> None:
    made = plan(make_job(rows, table={"sharding_types": types}))
    assert made.tables[0].sharding_type in types


@pytest.mark.parametrize(
    ("update", "states", "expected"),
    [
        ("sgd", 0, "column_wise"),
        ("rowwise_adagrad", 0, "row_wise"),
        ("partial_rowwise_adam", 1, "row_wise"),
    ],
)
def test_a_large_table_is_cut_by_columns_but_for_an_update_that_sums_over_rows(
    make_job: MakeJob, update: str, states: int, expected: str
) -> None:
    size = 300_000 * 64 * 4 * (1 + states)
    made = _planned(
        make_job(
            300_000,
            dim=64,
            cluster={"world_size": 2, "ddr_cap": int(0.8 * size) + 3_000_000},
            batch={"size": 32},
            train={"table_optimizer": update},
        )
    )
    assert made is not None
    assert [t.sharding_type for t in made.tables] == [expected]


@pytest.mark.parametrize(("mode", "placement"), [("shard", Flat()), ("replicate", Replicate())])
def test_a_unit_is_placed_as_the_job_forces_it(
    make_job: MakeJob, mode: str, placement: Flat | Replicate
) -> None:
    made = plan(make_job(50, planner={"units": {"top": mode}}))
    top = made.units[1]
    assert (top.parameter, top.gradient, top.optimizer_state) == (placement,) * 3


@pytest.mark.parametrize("reshard", [False, True])
def test_sharded_units_reshard_as_the_job_forces_them(make_job: MakeJob, reshard: bool) -> None:
    units = {"bottom": "replicate", "top": "shard"}
    made = plan(make_job(50, planner={"units": units, "dense": {"reshard": reshard}}))
    assert [unit.reshard_after_forward for unit in made.units] == [False, reshard]


def test_with_room_to_spare_a_sharded_unit_stays_whole_until_its_backward(
    make_job: MakeJob,
) -> None:
    made = plan(make_job(50, planner={"units": {"top": "shard"}}))
    assert not made.units[1].reshard_after_forward


def test_two_column_shards_may_share_a_rank_only_when_the_plan_says_so(make_job: MakeJob) -> None:
    columns = {"sharding_types": ["column_wise"], "min_partition": 4}
    made = plan(make_job(3000, dim=12, table=columns))  # three shards, for 6 is no multiple of 4
    table = made.tables[0]
    assert table.shard_sizes == ((3000, 4),) * 3
    assert len(set(table.ranks)) == 2
    blocks = [b for b in made.expanded() if b.tensor == table.fqn]
    assert [b.rank for b in blocks] == list(table.ranks)
    assert [b.offsets for b in blocks] == [(0, 0), (0, 4), (0, 8)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(5))
def test_planning_twice_gives_the_same_fingerprint(random_job: MakeJob, seed: int) -> None:
    job = random_job(seed, ranks=2)
    cluster = msgspec.structs.replace(job.cluster, ddr_cap="1 GiB")
    job = msgspec.structs.replace(job, cluster=cluster)
    assert recordings.plan(job).fingerprint == recordings.plan(job).fingerprint


def test_a_tighter_budget_never_makes_a_plan_faster(make_job: MakeJob) -> None:
    seconds = []
    for budget in ("64 MiB", "24 MiB", "16 MiB", "14 MiB"):
        cluster = {"world_size": 2, "ddr_cap": budget}
        seconds.append(plan(make_job(200_000, 90_000, 50, cluster=cluster)).max_rank_seconds)
    assert seconds == sorted(seconds)


def test_a_plan_states_what_it_assumes(make_job: MakeJob) -> None:
    assumptions = plan(make_job(50)).assumptions
    assert (
        "cluster.ddr_cap is the preset 'local's: 2,147,483,648 B per rank (assumed)" in assumptions
    )
    assert "ids spread evenly over the rows of a table cut by rows" in assumptions


def test_one_rank_holds_everything_whole(make_job: MakeJob) -> None:
    made = plan(make_job(50, 3000, cluster={"world_size": 1}))
    assert {t.ranks for t in made.tables} == {(0,)}
    assert {b.rank for b in made.expanded()} == {0}


def test_a_plan_counts_its_proposals(make_job: MakeJob) -> None:
    found = plan(make_job(50)).search
    assert found.name == "bounded"
    assert 1 <= found.feasible <= found.proposals


def test_a_draft_of_a_fitting_search_is_written_down_as_it_was_found(make_job: MakeJob) -> None:
    found = _search(make_job(50, 3000))
    assert found.draft is not None
    made = assemble(found.draft, found.bound, found.described(0.0))
    assert made.max_rank_seconds == found.draft.max_rank_seconds
    assert made.lower_bound_seconds == found.bound
    assert tuple(t.ranks for t in made.tables) == tuple(tuple(p.ranks) for p in found.draft.tables)
    assert tuple(r.peak_bytes for r in made.ranks) == found.draft.peak_bytes


def test_a_bound_is_never_above_the_plan_it_belongs_to(make_job: MakeJob) -> None:
    found = _search(make_job(50))
    assert found.draft is not None
    made = assemble(found.draft, 2 * found.draft.max_rank_seconds, found.described(0.0))
    assert made.lower_bound_seconds == made.max_rank_seconds
    assert made.gap == 0


@pytest.mark.parametrize("search", ["exact", "proposers"])
def test_a_model_is_searched_by_the_bounded_search_only(make_job: MakeJob, search: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(make_job(50, planner={"search": search}))
    assert str(caught.value) == (
        f"planner.search: expected 'bounded' for a dlrm, got '{search}'. Leave [model] out to "
        "plan the tables alone."
    )
