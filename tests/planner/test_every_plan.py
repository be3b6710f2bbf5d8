"""What is proven, against every plan there is."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from counting import at_most
from every_plan import TooManyError, fastest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_jobs import small_job

from shardwright.core.errors import InputError
from shardwright.estimate.recordings import described
from shardwright.job.job import Job, parse_job
from shardwright.planner.draft import Found
from shardwright.planner.planner import search
from shardwright.planner.problem import make_problem
from shardwright.planner.search.bound import ROUNDING, lower_bound, table
from shardwright.planner.search.watch import Watch
from shardwright.planner.search.widening import least_share
from shardwright.planner.strategy.tables import space_of

ROUNDED = 1e-9  # sums in another order
SOLVED = 1e-4  # the gap at which the solver ends

seeds = st.integers(0, 10**9)


def _job(seed: int, how: str = "bounded") -> Job:
    """The first small job from a seed on that makes sense: two of three do not, and a property that
    leaves so many out is now and then stopped for it."""
    for each in count(seed):
        with suppress(InputError):
            job = small_job(each, how)
            make_problem(job, described(job))
            return job
    raise AssertionError("there is always a next seed")


def _fastest(job: Job) -> float:
    try:
        return fastest(job)
    except TooManyError:
        assume(False)
        raise


def _found(job: Job) -> Found | None:
    """What the search brings, or None where rules leave a table no option."""
    try:
        return search(job, described(job), Watch())
    except InputError:
        return None


@pytest.mark.slow
@given(seed=seeds)
def test_no_plan_at_all_is_faster_than_the_bound(seed: int) -> None:
    job = _job(seed)
    best, found = _fastest(job), _found(job)
    if found is None:
        assert best == math.inf
        return
    assert found.bound <= best * (1 + ROUNDED)
    if found.draft is not None:
        assert found.draft.max_rank_seconds >= best * (1 - ROUNDED)


@pytest.mark.slow
@given(seed=seeds)
def test_it_is_proven_that_nothing_fits_only_where_nothing_fits(seed: int) -> None:
    job = _job(seed)
    best = _fastest(job)
    problem = make_problem(job, described(job))
    try:
        space = space_of(problem, problem.tables, problem.capacity)
    except InputError:
        assert best == math.inf
        return
    proven = (
        not lower_bound(space, table(space)).usable or least_share(space).seconds > 1 + ROUNDING
    )
    assert not proven or best == math.inf


@pytest.mark.slow
@given(seed=seeds)
def test_the_exact_search_brings_the_fastest_plan_of_all(seed: int) -> None:
    job = _job(seed, "exact")
    best, found = _fastest(job), _found(job)
    if found is None or best == math.inf:
        assert best == math.inf
        assert found is None or found.draft is None
        return
    assert found.draft is not None
    assert found.draft.max_rank_seconds == pytest.approx(best, rel=2 * SOLVED)
    assert max(found.bound, found.proved) <= best * (1 + ROUNDED)
    assert max(found.bound, found.proved) >= best * (1 - 2 * SOLVED)


def _tables(*tables: dict[str, Any], **sections: Any) -> Job:
    """A job of tables with memory to spare, two ranks and nothing reserved."""
    cluster = {"compute_device": "cuda", "world_size": 2, "local_world_size": 2}
    planner = {"constants": "torchrec-1.9", "reservation": {"kind": "none"}}
    return parse_job(
        {
            "tables": [{"name": f"t{i}"} | table for i, table in enumerate(tables)],
            "cluster": cluster | sections.get("cluster", {}),
            "planner": planner | sections.get("planner", {}),
        }
    )


HUGE = {"rows": 2_000_000, "dim": 64, "min_partition": 64}
WIDE = {"rows": 1000, "dim": 96, "sharding_types": ["column_wise"], "pooling_factors": [20.0]}
WHOLE = {"rows": 100_000, "dim": 64, "sharding_types": ["table_wise"], "pooling_factors": [20.0]}

# Jobs whose fastest plan is easily overlooked, by what has to be looked at.
OVERLOOKED = {
    "a kernel in host memory, for no fused shard fits a rank": _tables(
        {
            "rows": 3_400_000,
            "dim": 256,
            "min_partition": 64,
            "sharding_types": ["column_wise", "row_wise"],
        },
        cluster={"world_size": 8, "local_world_size": 4, "hbm_cap": "700 MiB"},
    ),
    "a kernel in host memory, for its rows come faster": _tables(
        HUGE, cluster={"hbm_mem_bw": 1e4, "hbm_to_ddr_mem_bw": 1e9}
    ),
    "three column shards": _tables(WIDE, cluster={"world_size": 3, "local_world_size": 3}),
    "kernels that differ within a group": _tables(
        WHOLE,
        WHOLE | {"pooling_factors": [1.0]},
        cluster={"hbm_cap": "40 MiB"},
        planner={"constraints": {"together": [["t0", "t1"]]}},
    ),
    "a type of all ranks for a table that may use all": _tables(
        WHOLE | {"sharding_types": ["table_wise", "row_wise"]},
        planner={"constraints": {"ranks": {"t0": [1, 0]}}},
    ),
    "column shards that share ranks beside a table apart": _tables(
        WIDE | {"dim": 64, "min_partition": 16},
        {"rows": 10, "dim": 4, "sharding_types": ["table_wise"]},
        {"rows": 11, "dim": 4, "sharding_types": ["table_wise"]},
        cluster={"world_size": 4, "local_world_size": 4},
        planner={"constraints": {"apart": [["t0", "t1", "t2"]]}},
    ),
    "some ranks of a host": _tables(
        WIDE | {"sharding_types": ["table_column_wise"], "min_partition": 48},
        WIDE | {"sharding_types": ["table_column_wise"], "min_partition": 48},
        cluster={"world_size": 4, "local_world_size": 4},
    ),
}


@pytest.mark.parametrize("why", OVERLOOKED)
def test_the_fastest_plan_is_found_where_it_takes(why: str) -> None:
    job = OVERLOOKED[why]
    found = search(job, described(job), Watch())
    assert found.draft is not None
    best = fastest(job)
    assert found.draft.max_rank_seconds == pytest.approx(best, rel=1e-3)
    assert found.bound <= best * (1 + ROUNDED)


def test_a_table_whose_column_shards_fit_no_rank_has_the_plan_of_the_exact_search() -> None:
    sizes = {"rows": 3_400_000, "dim": 512, "min_partition": 64}
    cluster = {"world_size": 32, "local_world_size": 8, "hbm_cap": "700 MiB"}
    seconds = []
    for how in ("bounded", "exact"):
        types = {"sharding_types": ["column_wise", "row_wise"]}
        job = _tables(sizes | types, cluster=cluster, planner={"search": how})
        job = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=256))
        found = search(job, described(job), Watch())
        assert found.draft is not None
        assert found.bound <= found.draft.max_rank_seconds * (1 + ROUNDED)
        seconds.append(found.draft.max_rank_seconds)
    assert seconds[0] == pytest.approx(seconds[1], rel=2 * SOLVED)
    assert seconds[0] < 1e-3  # with the fused kernel alone 2.6 ms


def test_the_exact_search_knows_cuts_that_no_bound_needs() -> None:
    """With 8 pieces for two ranks, as the bounded search cuts, it takes 7 % longer than with 32."""
    tables = (
        WIDE | {"dim": 2048, "min_partition": 64},
        WHOLE | {"rows": 1000, "dim": 2048, "pooling_factors": [12.0]},
    )
    job = _tables(*tables, planner={"search": "exact"})
    found = search(job, described(job), Watch())
    assert found.draft is not None
    best = fastest(job)
    assert found.draft.max_rank_seconds == pytest.approx(best, rel=2 * SOLVED)
    assert found.proved <= best * (1 + ROUNDED)


@pytest.mark.parametrize("how", ["bounded", "exact"])
def test_nothing_is_proven_of_kernels_that_are_not_listed(how: str) -> None:
    """Six tables together may have 729 combinations of kernels; only those of one are tried."""
    tables = [WHOLE | {"pooling_factors": [float(i)]} for i in range(1, 7)]
    together = {"constraints": {"together": [[f"t{i}" for i in range(6)]]}}
    cluster = {"hbm_cap": "120 MiB"}
    job = _tables(*tables, cluster=cluster, planner={"search": how} | together)
    found = search(job, described(job), Watch())
    assert found.draft is not None
    best = fastest(job)
    assert best < 0.9 * found.draft.max_rank_seconds
    assert max(found.bound, found.proved) <= best * (1 + ROUNDED)


def test_many_tables_together_need_no_kernel_in_common() -> None:
    tables = [WHOLE | {"compute_kernels": [kernel]} for kernel in ("fused", "fused_uvm")]
    tables += [WHOLE] * 6
    names = [f"t{i}" for i in range(len(tables))]
    job = _tables(*tables, planner={"constraints": {"together": [names]}})
    found = search(job, described(job), Watch())
    assert found.draft is not None
    assert found.bound <= found.draft.max_rank_seconds * (1 + ROUNDED)


def test_tables_that_take_no_time_are_planned_where_memory_is_short() -> None:
    unused = {"rows": 2_700_000, "dim": 64, "pooling_factors": [0.0], "num_poolings": [0.0]}
    job = _tables(unused, unused, unused, cluster={"hbm_cap": "700 MiB"})
    with at_most(1_000_000):
        found = search(job, described(job), Watch())
    assert found.draft is not None
    assert fastest(job) == found.draft.max_rank_seconds == found.bound == 0.0


def test_a_table_for_each_of_two_memories_may_fill_both() -> None:
    """Nothing is proven from the larger share of each."""
    size = 100_000 * 64 * 4
    job = _tables(
        WHOLE | {"compute_kernels": ["fused"]},
        WHOLE | {"compute_kernels": ["fused_uvm"]},
        cluster={"world_size": 1, "local_world_size": 1, "hbm_cap": 2 * size, "ddr_cap": 2 * size},
    )
    found = search(job, described(job), Watch())
    assert found.draft is not None
    space = space_of(found.problem, found.problem.tables, found.problem.capacity)
    assert least_share(space).seconds < 1


@pytest.mark.parametrize("kind", ["greedy", "scaleup"])
def test_proposers_that_enlarge_caches_do_not_beat_their_bound(kind: str) -> None:
    cache = {"load_factor": 0.1, "stats": [10_000.0, 0.5, 0.5]}
    table = HUGE | {"compute_kernels": ["fused_uvm_caching"], "pooling_factors": [20.0]}
    job = _tables(
        table | {"cache": cache}, planner={"search": "proposers", "proposers": [{"kind": kind}]}
    )
    found = search(job, described(job), Watch())
    assert found.draft is not None
    assert 0 < found.bound <= found.draft.max_rank_seconds * (1 + ROUNDED)
