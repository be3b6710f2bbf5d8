from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster import Cluster
from shardwright.core.model import CacheSpec, TableSpec
from shardwright.core.option import Option, ShardRun, shard_runs
from shardwright.job.planner import ProposerSection
from shardwright.planner.choice import Choice, cost
from shardwright.planner.search.watch import Watch
from shardwright.planner.statistics.tables import over_shards
from shardwright.torchrec import proposers
from shardwright.torchrec.candidate import Bytes, Offer, Proposal, Rating, candidate_of
from shardwright.torchrec.proposers import MAX_DRAWS, LuusJaakola

FITS = 1.0  # milliseconds of the busiest rank
TYPES: tuple[Any, ...] = ("data_parallel", "table_wise", "row_wise", "column_wise")


def way(table: TableSpec, sharding_type: Any, size: int, seconds: float, count: int = 1) -> Choice:
    """``count`` shards, each of ``size`` bytes of HBM and ``seconds``."""
    option = Option(table.name, sharding_type, "fused", (ShardRun(table.rows, table.dim, count),))
    return Choice(table, option, (cost({"fwd_compute": seconds}, hbm={"weight": size}),))


def ways(name: str, *each: tuple[Any, int, float]) -> list[Choice]:
    """One way for each sharding type, size and seconds."""
    return [way(TableSpec(name, 100, 8), *one) for one in each]


def offer(
    tables: Sequence[Sequence[Choice]], hbm: Sequence[int] = (1000,), price: Any = None
) -> Offer:
    known: Any = {}
    candidates = tuple(tuple(candidate_of(choice, known) for choice in each) for each in tables)
    capacities: list[Bytes] = [(size, 10**15, 0) for size in hbm]
    return Offer(candidates, capacities, known, price, Watch())


def proposals(
    proposer: ProposerSection, given_: Offer, ratings: Sequence[Rating] = ()
) -> tuple[list[Proposal], str | None]:
    """All proposals, told the ratings in turn and then that everything fits, and the reason."""
    steps = proposers.proposals(proposer, given_)
    told = itertools.chain(ratings, itertools.repeat(FITS))
    found = []
    try:
        found.append(next(steps))
        while True:
            found.append(steps.send(next(told)))
    except StopIteration as end:
        return found, end.value


def types(proposal: Proposal) -> list[str]:
    return [candidate.choice.option.sharding_type for candidate in proposal]


def drawn(seed: int) -> list[list[Choice]]:
    """A few tables with a few ways each."""
    draw = random.Random(seed)
    return [
        ways(
            f"t{i}",
            *(
                (sharding_type, draw.randint(0, 40), draw.choice([0.1, 0.2, 0.5]))
                for sharding_type in draw.sample(TYPES, draw.randint(1, 4))
            ),
        )
        for i in range(draw.randint(1, 5))
    ]


SMALL = ways("small", ("data_parallel", 30, 1.0), ("row_wise", 10, 2.0), ("table_wise", 5, 3.0))
LARGE = ways("large", ("row_wise", 50, 1.0), ("data_parallel", 90, 0.5), ("table_wise", 20, 2.0))


def test_a_greedy_walk_starts_fast_and_moves_the_largest_table_on() -> None:
    found, reason = proposals(ProposerSection("greedy"), offer([SMALL, LARGE]))
    assert [types(proposal) for proposal in found] == [
        ["data_parallel", "data_parallel"],
        ["data_parallel", "row_wise"],  # large: 90 > 30
        ["data_parallel", "table_wise"],  # large: 50 > 30
        ["row_wise", "table_wise"],  # large has no more ways
        ["table_wise", "table_wise"],
    ]
    assert reason is None


@given(seed=st.integers(0, 10**6), use_depth=st.booleans())
def test_a_greedy_walk_takes_one_step_of_one_table_at_a_time(seed: int, use_depth: bool) -> None:
    tables = drawn(seed)
    found, _ = proposals(ProposerSection("greedy", use_depth=use_depth), offer(tables))
    for before, after in itertools.pairwise(found):
        assert sum(a is not b for a, b in zip(before, after, strict=True)) == 1
    sized = all(min(c.total_storage) + c.total_storage[0] > 0 for each in tables for c in each)
    most = 1 + sum(len(each) - 1 for each in tables)
    assert len(found) == most if sized else len(found) <= most


def test_a_table_of_no_size_is_never_moved_on() -> None:
    nothing = ways("nothing", ("data_parallel", 0, 1.0), ("row_wise", 5, 2.0))
    found, _ = proposals(ProposerSection("greedy"), offer([nothing]))
    assert [types(proposal) for proposal in found] == [["data_parallel"]]


def test_depth_looks_at_the_largest_shard_and_sum_at_all_of_them() -> None:
    table = TableSpec("t", 100, 8)
    cut, whole = way(table, "row_wise", 5, 1.0, count=4), way(table, "table_wise", 5, 2.0)
    first = {
        use_depth: types(
            proposals(ProposerSection("greedy", use_depth=use_depth), offer([[whole, cut]]))[0][0]
        )
        for use_depth in (True, False)
    }
    assert first == {True: ["row_wise"], False: ["table_wise"]}


def test_a_threshold_stops_after_more_plans_in_a_row_that_are_not_better() -> None:
    table = ways("t", *((kind, 9, 1.0) for kind in TYPES))
    many = offer([table, [*table]])
    worse = [5.0, 4.0, 4.0, 6.0, 6.0]
    assert len(proposals(ProposerSection("greedy", threshold=1), many, worse)[0]) == 4
    assert len(proposals(ProposerSection("greedy", threshold=2), many, worse)[0]) == 5
    assert len(proposals(ProposerSection("greedy"), many, worse)[0]) == 7


def test_proposals_that_do_not_fit_do_not_count_for_a_threshold() -> None:
    table = ways("t", *((kind, 9, 1.0) for kind in TYPES))
    misfits = [None] * 9
    assert len(proposals(ProposerSection("greedy", threshold=1), offer([table]), misfits)[0]) == 4


def test_uniform_proposes_each_type_that_every_table_has_once() -> None:
    table = TableSpec("other", 100, 8)
    cuts = way(table, "row_wise", 1, 1.0), way(table, "row_wise", 1, 0.5, count=2)
    other = [*cuts, way(table, "data_parallel", 1, 1.0)]
    found, reason = proposals(ProposerSection("uniform"), offer([SMALL, other]))
    assert [types(p) for p in found] == [["data_parallel"] * 2, ["row_wise"] * 2]
    assert [p[1].storage[0] for p in found] == [1, 2]  # the faster of two row cuts
    assert reason is None


def test_a_grid_is_every_combination_best_first() -> None:
    found, reason = proposals(ProposerSection("grid"), offer([SMALL, LARGE]))
    seconds = [[candidate.max_ms for candidate in proposal] for proposal in found]
    assert seconds == sorted(seconds)
    assert len({tuple(types(proposal)) for proposal in found}) == len(found) == 9
    assert reason is None


@pytest.mark.parametrize(
    ("tables", "told"),
    [(2, "9 combinations, more than max_proposals = 8"), (5000, "about 10^2386")],
)
def test_a_grid_above_its_cap_proposes_nothing_and_says_so(tables: int, told: str) -> None:
    names = [ways(f"t{i}", *((kind, 1, 1.0) for kind in TYPES[:3])) for i in range(tables)]
    found, reason = proposals(ProposerSection("grid", max_proposals=8), offer(names))
    assert found == []
    assert told in (reason or "")


@given(seed=st.integers(0, 10**6), bins=st.sampled_from([20, 500]))
def test_dynamic_programming_finds_the_least_work_for_the_memory_there_is(
    seed: int, bins: int
) -> None:
    tables = drawn(seed)
    room = 60
    found, _ = proposals(
        ProposerSection("dynamic_programming", bins_per_device=bins), offer(tables, (room,))
    )
    first, *rest = found
    for candidate, each in zip(sorted(first, key=lambda c: c.table), tables, strict=True):
        assert candidate.storage[0] == min(choice.total_storage[0] for choice in each)
    assert all(sum(c.storage[0] for c in proposal) <= room for proposal in rest)
    least = min((sum(c.sum_ms for c in proposal) / 1000 for proposal in rest), default=math.inf)
    within, below = (
        min(
            (
                math.fsum(over_shards(choice, "seconds") for choice in combination)
                for combination in itertools.product(*tables)
                if sum(choice.total_storage[0] for choice in combination) <= most
            ),
            default=math.inf,
        )
        for most in (room, room - 1)
    )
    assert within - 1e-9 <= least
    if bins == 500:  # finer than a byte: nothing is lost in a bin; all of the room may be too much
        assert least <= below + 1e-9


def test_dynamic_programming_goes_from_the_most_memory_to_the_least() -> None:
    found, _ = proposals(
        ProposerSection("dynamic_programming", bins_per_device=100), offer([SMALL, LARGE], (200,))
    )
    sizes = [sum(c.storage[0] for c in proposal) for proposal in found[1:]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("bins", "hbm", "told"), [(10, 0, "no HBM"), (10**8, 9, "cells")])
def test_dynamic_programming_says_why_it_proposes_no_more_than_the_smallest_options(
    bins: int, hbm: int, told: str
) -> None:
    found, reason = proposals(
        ProposerSection("dynamic_programming", bins_per_device=bins), offer([SMALL], (hbm,))
    )
    assert [types(proposal) for proposal in found] == [["table_wise"]]
    assert told in (reason or "")


MACHINE = Cluster("test", 2, 2, "cuda", 0, 0, 0, 2, {})
INPUT = 64


def cached(name: str, rows: int, need: float, load_factor: float = 0.1) -> TableSpec:
    return TableSpec(name, rows, 4, cache=CacheSpec(load_factor, stats=(1000.0, need, 0.9)))


def priced(cases: Sequence[tuple[TableSpec, Option]]) -> list[Choice]:
    """A cache holds its share of the rows, and twice the input; a whole table all rows."""
    found = []
    for table, option in cases:
        assert table.cache is not None
        share = table.cache.load_factor
        if option.compute_kernel == "fused":
            assert share is None
            size, misses = table.nbytes + INPUT, 0.0
        else:
            assert share is not None
            size, misses = round(table.nbytes * share) + 2 * INPUT, 1 - share
        spent = cost({"fwd_compute": 1.0, "prefetch": misses}, hbm={"weight": size})
        found.append(Choice(table, option, (spent,)))
    return found


def caches(*tables: TableSpec, hbm: int) -> Offer:
    each = [
        priced(
            [
                (
                    t,
                    Option(
                        t.name,
                        "table_wise",
                        "fused_uvm_caching",
                        shard_runs(t, "table_wise", 2, 2, 4),
                    ),
                )
            ]
        )
        for t in tables
    ]
    return offer(each, (hbm // 2, hbm - hbm // 2), priced)


def load_factors(proposal: Proposal) -> list[float | None]:
    found = []
    for candidate in proposal:
        assert candidate.choice.table.cache is not None
        found.append(candidate.choice.table.cache.load_factor)
    return found


def test_caches_grow_with_their_need_inside_the_memory_that_is_left() -> None:
    hbm = 20_000
    given_ = caches(cached("a", 1000, 0.2), cached("b", 1000, 0.6), hbm=hbm)
    found, reason = proposals(ProposerSection("scaleup"), given_)
    assert reason is None
    assert load_factors(found[0]) == [0.1, 0.1]
    assert len(found) == 17
    for proposal in found[1:]:
        assert sum(c.storage[0] for c in proposal) <= hbm + 1
        a, b = load_factors(proposal)
        assert b is None or (a is not None and 0.1 <= a <= b)


def test_caches_that_can_hold_all_rows_are_given_up() -> None:
    given_ = caches(cached("a", 100, 0.9), cached("b", 100, 0.1), hbm=10**6)
    found, _ = proposals(ProposerSection("scaleup"), given_)
    whole = [p[0] for p in found if p[0].choice.option.compute_kernel == "fused"]
    assert whole
    assert all(candidate.storage[0] == 100 * 16 + INPUT for candidate in whole)
    assert all(load_factors((candidate,)) == [None] for candidate in whole)


def test_a_cache_that_takes_more_than_its_table_is_given_up_at_once() -> None:
    found, _ = proposals(ProposerSection("scaleup"), caches(cached("tiny", 2, 0.5), hbm=10**6))
    assert [c.choice.option.compute_kernel for c in found[0]] == ["fused"]
    assert len(found) == 1  # and nothing is left that could grow


@pytest.mark.parametrize(
    "table", [cached("t", 100, 0.0), TableSpec("t", 100, 4, cache=CacheSpec(0.5))]
)
def test_a_cache_that_nobody_needs_does_not_grow(table: TableSpec) -> None:
    found, reason = proposals(ProposerSection("scaleup"), caches(table, hbm=10**6))
    assert (len(found), reason) == (1, None)


def test_the_search_ends_if_the_caches_do_not_fit_as_they_are() -> None:
    given_ = caches(cached("a", 1000, 0.2), hbm=100)
    found, reason = proposals(ProposerSection("scaleup"), given_, [None])
    assert (len(found), reason) == (1, "the caches do not fit as they are")


def test_caches_that_do_not_fit_bound_those_tried_later() -> None:
    given_ = caches(cached("a", 1000, 0.2), cached("b", 1000, 0.6), hbm=30_000)
    found, _ = proposals(ProposerSection("scaleup"), given_, [FITS, None])
    refused = sum(c.storage[0] for c in found[1])
    assert all(sum(c.storage[0] for c in proposal) < refused for proposal in found[2:])


def test_without_prices_the_caches_stay_as_they_are() -> None:
    given_ = caches(cached("a", 1000, 0.2), hbm=10**6)
    bare = Offer(given_.tables, given_.capacities, given_.known, None, Watch())
    found, reason = proposals(ProposerSection("scaleup"), bare)
    assert (load_factors(found[0]), len(found)) == ([0.1], 1)
    assert "price" in (reason or "")


def test_a_search_draws_the_numbers_that_torch_draws() -> None:
    search = LuusJaakola(0.0, 1.0, 10, None)
    generator = torch.Generator()
    generator.manual_seed(42)
    drawn_ = [torch.rand(1, generator=generator).item() for _ in range(700)]
    assert search.next(0.0) == drawn_[0]
    assert [search._uniform(0.0, 1.0) for _ in range(699)] == drawn_[1:]


def test_the_arithmetic_of_load_factors_is_torchs_single_precision() -> None:
    generator = np.random.default_rng(0)
    low = generator.integers(1, 2**36, 200)
    high = low + generator.integers(1, 2**38, 200)
    factors = generator.uniform(0, 1, 200)
    slope = torch.tensor(high - low) / (0.9 - 0.1)
    fixed = torch.tensor(low) - slope * 0.1
    ours = (high - low).astype(np.float32) / np.float32(0.9 - 0.1)
    also = low.astype(np.float32) - ours * np.float32(0.1)
    assert slope.dtype == torch.float32
    assert np.array_equal(slope.numpy(), ours)
    assert np.array_equal(fixed.numpy(), also)
    sizes = (slope * torch.tensor(factors.tolist()) + fixed).to(torch.float64)
    assert np.array_equal(sizes.numpy(), (ours * factors.astype(np.float32) + also).astype(float))


@given(left=st.floats(-10, 10), width=st.floats(0.1, 1e9), seed=st.integers(0, 99))
def test_a_search_stays_inside_its_bounds_and_ends(left: float, width: float, seed: int) -> None:
    draw = random.Random(seed)
    search = LuusJaakola(left, left + width, 16, left_cost=1.0)
    probes = []
    while (probe := search.next(draw.random())) is not None:
        probes.append(probe)
    assert len(probes) <= 16
    assert all(left <= probe <= left + width for probe in probes)
    assert left not in probes[1:]


def test_a_search_ends_where_there_is_nothing_left_to_probe() -> None:
    search = LuusJaakola(0.0, 0.0, MAX_DRAWS, left_cost=1.0)
    assert search.next(1.0) == 0.0
    assert search.next(1.0) is None


def test_a_job_without_proposers_has_those_of_torchrec() -> None:
    assert (
        ProposerSection("grid"),
        ProposerSection("greedy"),
        ProposerSection("greedy", use_depth=False),
        ProposerSection("uniform"),
    ) == proposers.DEFAULT


def test_each_kind_that_a_job_may_name_has_a_walk() -> None:
    assert {*proposers.WALKS} == {*get_args(get_type_hints(ProposerSection)["kind"])}
