from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster import TIERS
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, ShardRun, row_runs
from shardwright.planner.choice import MAX_EXACT, Choice, Cost, Placed, cost, tally

RANKS = 6


def _cost(seconds: float = 1.0, hbm: int = 0, ddr: int = 0) -> Cost:
    return cost({"lookup": seconds}, hbm={"weight": hbm}, ddr={"weight": ddr})


def _placed(runs: tuple[ShardRun, ...], ranks: Sequence[int], *costs: Cost) -> Placed:
    option = Option("t", "column_wise", "fused", runs)
    return Placed(Choice(TableSpec("t", 64, 64), option, costs or (_cost(),) * len(runs)), ranks)


def _stretches(placed: Placed) -> list[tuple[int, ShardRun]]:
    return [(first, run) for first, run, _ in placed.stretches()]


def test_shards_on_ranks_that_follow_are_one_stretch() -> None:
    run = ShardRun(64, 8, 4, column_step=8)
    assert _stretches(_placed((run,), range(1, 5))) == [(1, run)]
    assert _stretches(_placed((run,), (1, 2, 3, 4))) == [(1, run)]


def test_a_stretch_ends_where_the_ranks_do_not_continue() -> None:
    placed = _placed((ShardRun(64, 8, 5, column_step=8),), (3, 4, 0, 0, 1))
    assert _stretches(placed) == [
        (3, ShardRun(64, 8, 2, column_step=8)),
        (0, ShardRun(64, 8, column=16)),
        (0, ShardRun(64, 8, 2, column=24, column_step=8)),
    ]


def test_a_stretch_never_crosses_shards_of_another_shape() -> None:
    runs = row_runs(7, 64, 4)  # 2, 2, 2, 1
    placed = _placed(runs, range(4), _cost(hbm=20), _cost(hbm=10))
    assert _stretches(placed) == [(0, runs[0]), (3, runs[1])]
    assert [found.hbm_bytes for _, _, found in placed.stretches()] == [20, 10]


@given(
    counts=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    data=st.data(),
)
def test_stretches_are_the_shards_and_ranks_in_order(
    counts: list[int], data: st.DataObject
) -> None:
    runs = tuple(
        ShardRun(1 + i, 2, count, row=i, row_step=3, column_step=2)
        for i, count in enumerate(counts)
    )
    ranks = data.draw(st.lists(st.integers(0, 3), min_size=sum(counts), max_size=sum(counts)))
    placed = _placed(runs, ranks)
    told = [
        (rank, shape)
        for first, run in _stretches(placed)
        for rank, shape in zip(range(first, first + run.count), run.shapes(), strict=True)
    ]
    assert told == list(zip(ranks, placed.choice.option.shards, strict=True))


@given(
    data=st.data(),
    count=st.integers(0, 5),
    scale=st.sampled_from([1, 2**40, 2**61, 2**70]),
)
def test_bytes_of_a_rank_are_the_exact_sum_of_its_shards(
    data: st.DataObject, count: int, scale: int
) -> None:
    sizes = st.integers(0, 1000).map(lambda size: size * scale + size)
    placed = []
    for _ in range(count):
        shards = data.draw(st.integers(1, 4))
        ranks = data.draw(st.lists(st.integers(0, RANKS - 1), min_size=shards, max_size=shards))
        found = _cost(hbm=data.draw(sizes), ddr=data.draw(sizes))
        placed.append(_placed((ShardRun(64, 8, shards, column_step=8),), ranks, found))
    total = tally(placed, RANKS)
    for tier in TIERS:
        wanted = [
            sum(
                getattr(found, f"{tier}_bytes")
                for p in placed
                for rank, found in zip(p.ranks, p.choice.shard_costs, strict=True)
                if rank == holder
            )
            for holder in range(RANKS)
        ]
        assert total.tier_bytes(tier, RANKS) == wanted
        assert all(type(size) is int for size in total.tier_bytes(tier, RANKS))


@pytest.mark.parametrize("size", [MAX_EXACT - 1, MAX_EXACT, 2**63 + 1, 2**100 + 1])
def test_bytes_beyond_64_bits_lose_no_digit(size: int) -> None:
    whole = ShardRun(64, 64)
    total = tally([_placed((whole,), (0,), _cost(hbm=size)) for _ in range(3)], 2)
    assert total.tier_bytes("hbm", 2) == [3 * size, 0]
    assert total.kinds("hbm", 0) == {"weight": 3 * size}


def test_seconds_of_a_rank_are_shown_by_part() -> None:
    lookup, exchange = cost({"lookup": 1.0}), cost({"lookup": 0.5, "exchange_rows": 2.0})
    whole = (ShardRun(64, 64),)
    total = tally([_placed(whole, (0,), lookup), _placed(whole, (1,), exchange)], 3)
    assert total.parts(0) == {"lookup": 1.0, "exchange_rows": 0.0}
    assert total.parts(1) == {"lookup": 0.5, "exchange_rows": 2.0}
    assert total.parts(2) == {"lookup": 0.0, "exchange_rows": 0.0}


def test_bytes_of_a_tier_are_shown_by_kind() -> None:
    kept = cost({}, hbm={"weight": 3, "cache": 4}, ssd={"weight": 5})
    total = tally([_placed((ShardRun(64, 64),), (1,), kept)], 2)
    assert total.kinds("hbm", 1) == {"weight": 3, "cache": 4}
    assert total.kinds("hbm", 0) == {"weight": 0, "cache": 0}
    assert total.kinds("ddr", 1) == {}
    assert total.tier_bytes("ssd", 2) == [0, 5]


def test_shards_on_one_rank_add_up() -> None:
    run = ShardRun(64, 8, 4, column_step=8)
    total = tally([_placed((run,), (2, 2, 2, 2), _cost(hbm=7))], 3)
    assert total.tier_bytes("hbm", 3) == [0, 0, 28]
    assert total.parts(2) == {"lookup": 4.0}


def test_nothing_placed_is_nothing() -> None:
    total = tally([], 2)
    assert total.seconds == {}
    assert total.tier_bytes("hbm", 2) == [0, 0]
