from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.block import check_tiling
from shardwright.core.job import Job
from shardwright.core.placement import Flat, Replicate
from shardwright.core.plan import Plan, Search
from shardwright.core.specs import model_spec
from shardwright.core.timeline import decode, exact_bytes, phase_peaks, phase_seconds
from shardwright.planner.draft import Draft, Placed
from shardwright.planner.planner import assemble, lower_bound, plan, search
from shardwright.planner.problem import UNIFORM, Problem, TableChoice, make_problem

MakeJob = Callable[..., Job]

# The search is greedy. On several hundred random jobs of 3 tables on 2 ranks it was at most 1.27
# times slower than the best of all plans, and found a plan whenever 12 % of memory was to spare.
WORST_RATIO = 1.3
MEMORY_TO_SPARE = 1.12


def _problem(job: Job) -> Problem:
    return make_problem(job, model_spec(job))


def _planned(job: Job) -> Plan | None:
    """The plan, or None; without the ways out that a refusal tries."""
    draft, tried, feasible = search(_problem(job))
    return None if draft is None else assemble(draft, Search("greedy", tried, feasible, 0.0))


def _everything(problem: Problem) -> Iterator[Draft]:
    """Every choice for every table on every rank, with every choice for every unit."""
    ranks = problem.cluster.world_size

    def places(choice: TableChoice) -> Iterator[tuple[int, ...]]:
        if choice.option.sharding_type in UNIFORM:
            return iter([tuple(range(ranks))])
        return itertools.product(range(ranks), repeat=len(choice.option.shards))

    tables = [
        [Placed(choice, where) for choice in choices for where in places(choice)]
        for choices in problem.tables
    ]
    for chosen in itertools.product(*tables):
        for units in itertools.product(*problem.units):
            yield Draft(problem, chosen, units)


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=12)
def test_the_blocks_of_a_plan_tile_the_model(random_job: MakeJob, seed: int) -> None:
    job = random_job(seed)
    if made := _planned(job):
        blocks = made.expanded()
        tensors = model_spec(job).tensors
        check_tiling(blocks, tensors, made.world_size)
        dense = {name for unit in made.units for name in unit.tensors}
        for role in ("gradient", "optimizer_state"):
            swapped = [
                msgspec.structs.replace(b, role="parameter") for b in blocks if b.role == role
            ]
            check_tiling(swapped, [t for t in tensors if t.fqn in dense], made.world_size)


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=12)
def test_a_plan_fits_its_budget_on_every_rank(random_job: MakeJob, seed: int) -> None:
    if made := _planned(random_job(seed)):
        assert [r.rank for r in made.ranks] == list(range(made.world_size))
        for totals in made.ranks:
            assert 0 < totals.peak_bytes <= made.cluster.memory_per_rank
            assert totals.peak_bytes == sum(totals.at_peak.values())


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=12)
def test_no_plan_is_faster_than_its_lower_bound(random_job: MakeJob, seed: int) -> None:
    if made := _planned(random_job(seed)):
        assert 0 < made.lower_bound_seconds <= made.max_rank_seconds
        ratio = made.max_rank_seconds / made.lower_bound_seconds
        assert made.gap == pytest.approx(ratio - 1, rel=1e-9)


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=8)
def test_totals_of_a_plan_are_those_of_its_timeline(random_job: MakeJob, seed: int) -> None:
    made = _planned(random_job(seed))
    if made is None:
        return
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


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=8)
def test_exact_weights_are_the_bytes_of_the_blocks(random_job: MakeJob, seed: int) -> None:
    made = _planned(random_job(seed))
    if made is None:
        return
    held = [0] * made.world_size
    for block in made.expanded():
        if block.role == "parameter":
            held[block.rank] += 4 * block.numel
    assert held == [totals.exact["weight"] for totals in made.ranks]


@pytest.mark.parametrize("seed", range(12))
def test_every_possible_plan_is_above_the_bound_and_the_search_is_near_the_best(
    random_job: MakeJob, seed: int
) -> None:
    problem = _problem(random_job(seed, tables=3, ranks=2))
    drafts = sorted(_everything(problem), key=lambda draft: draft.max_rank_seconds)
    assert drafts[0].max_rank_seconds >= lower_bound(problem)
    best = next((draft for draft in drafts if draft.fits), None)
    found, _, _ = search(problem)
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert best.max_rank_seconds <= found.max_rank_seconds * (1 + 1e-12)
        assert found.max_rank_seconds <= WORST_RATIO * best.max_rank_seconds


@pytest.mark.parametrize("seed", [18, 31, 71, 1011, 1027, 1038, 1041])
def test_a_tight_budget_is_met_and_costs_little_more_than_it_must(
    random_job: MakeJob, seed: int
) -> None:
    job = random_job(seed, tables=3, ranks=2)
    drafts = list(_everything(_problem(job)))
    budget = int(min(max(draft.peak_bytes) for draft in drafts) * MEMORY_TO_SPARE)
    best = min(d.max_rank_seconds for d in drafts if max(d.peak_bytes) <= budget)
    cluster = msgspec.structs.replace(job.cluster, ddr_cap=budget)
    made = plan(msgspec.structs.replace(job, cluster=cluster))
    assert best * (1 - 1e-12) <= made.max_rank_seconds <= WORST_RATIO * best


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
@settings(deadline=None, max_examples=12)
def test_a_table_gets_one_of_the_types_it_allows(
    make_job: MakeJob, types: list[str], rows: int
) -> None:
    made = plan(make_job(rows, table={"sharding_types": types}))
    assert made.tables[0].sharding_type in types


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=12)
def test_rowwise_adagrad_is_never_cut_by_columns(random_job: MakeJob, seed: int) -> None:
    job = random_job(seed)
    if made := _planned(job):
        cut = {t.optimizer for t in made.tables if t.sharding_type == "column_wise"}
        assert cut <= {"sgd"}


@pytest.mark.parametrize(("mode", "placement"), [("shard", Flat()), ("replicate", Replicate())])
def test_a_unit_is_placed_as_the_job_forces_it(
    make_job: MakeJob, mode: str, placement: Flat | Replicate
) -> None:
    made = plan(make_job(50, planner={"units": {"top": mode}}))
    top = made.units[1]
    assert (top.parameter, top.gradient, top.optimizer_state) == (placement,) * 3
    assert top.reshard_after_forward == (mode == "shard")


def test_two_column_shards_may_share_a_rank_only_when_the_plan_says_so(make_job: MakeJob) -> None:
    made = plan(make_job(3000, table={"sharding_types": ["column_wise"], "min_partition": 4}))
    table = made.tables[0]
    assert table.shard_sizes == ((3000, 4),) * 4
    blocks = [b for b in made.expanded() if b.tensor == table.fqn]
    assert [b.rank for b in blocks] == list(table.ranks)
    assert [b.offsets for b in blocks] == [(0, 0), (0, 4), (0, 8), (0, 12)]


@pytest.mark.parametrize("seed", range(5))
def test_planning_twice_gives_the_same_fingerprint(random_job: MakeJob, seed: int) -> None:
    job = random_job(seed, ranks=2)
    cluster = msgspec.structs.replace(job.cluster, ddr_cap="1 GiB")
    job = msgspec.structs.replace(job, cluster=cluster)
    assert plan(job).fingerprint == plan(job).fingerprint


def test_a_tighter_budget_never_makes_a_plan_faster(make_job: MakeJob) -> None:
    seconds = []
    for budget in ("64 MiB", "24 MiB", "16 MiB", "14 MiB"):
        cluster = {"world_size": 2, "ddr_cap": budget}
        seconds.append(plan(make_job(200_000, 90_000, 50, cluster=cluster)).max_rank_seconds)
    assert seconds == sorted(seconds)


def test_a_plan_states_what_it_assumes(make_job: MakeJob) -> None:
    assumptions = plan(make_job(50)).assumptions
    assert "cluster.ddr_cap is the preset 'local's: 2,147,483,648 B per rank" in assumptions
    assert "ids spread evenly over the rows of a row_wise table" in assumptions


def test_one_rank_holds_everything_whole(make_job: MakeJob) -> None:
    made = plan(make_job(50, 3000, cluster={"world_size": 1}))
    assert {t.ranks for t in made.tables} == {(0,)}
    assert {b.rank for b in made.expanded()} == {0}


def test_a_plan_counts_its_proposals(make_job: MakeJob) -> None:
    found = plan(make_job(50)).search
    assert found.name == "greedy"
    assert 1 <= found.feasible <= found.proposals


def test_a_draft_of_a_fitting_search_is_written_down_as_it_was_found(make_job: MakeJob) -> None:
    problem = _problem(make_job(50, 3000))
    draft, _, _ = search(problem)
    assert draft is not None
    made = assemble(draft, plan(problem.job).search)
    assert made.max_rank_seconds == draft.max_rank_seconds
    assert tuple(t.ranks for t in made.tables) == tuple(p.ranks for p in draft.tables)
    assert tuple(r.peak_bytes for r in made.ranks) == draft.peak_bytes
