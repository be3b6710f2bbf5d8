from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster import Cluster
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, ShardRun, shard_runs
from shardwright.job.planner import PlannerSection, ProposerSection
from shardwright.planner.choice import Choice, Placed, cost
from shardwright.planner.search.watch import Watch
from shardwright.torchrec import proposers
from shardwright.torchrec.candidate import Bytes, Offer, Proposals, add_often
from shardwright.torchrec.profile import critical_terms
from shardwright.torchrec.search import Proposed, propose

MACHINE = Cluster("test", 4, 2, "cuda", 0, 0, 0, 2, {})
MANY = 10**15
TYPES: tuple[Any, ...] = (
    *("data_parallel", "table_wise", "column_wise", "row_wise"),
    *("table_row_wise", "table_column_wise"),
)


def way(table: TableSpec, sharding_type: Any, size: int, seconds: float) -> Choice:
    """Shards of ``size`` bytes of HBM and ``seconds`` each."""
    option = Option(
        table.name, sharding_type, "fused", shard_runs(table, sharding_type, 4, 2, table.dim // 2)
    )
    each = cost({"fwd_compute": seconds}, hbm={"weight": size})
    return Choice(table, option, (each,) * len(option.runs))


def ways(name: str, *each: tuple[Any, int, float], pooled: bool = True) -> list[Choice]:
    return [way(TableSpec(name, 64, 8, pooled=pooled), *one) for one in each]


def capacities(hbm: int) -> list[Bytes]:
    return [(hbm, MANY, MANY)] * MACHINE.world_size


def proposed(
    tables: list[list[Choice]], *sections: ProposerSection, hbm: int = MANY, **more: Any
) -> Proposed:
    return propose(tables, MACHINE, capacities(hbm), PlannerSection(proposers=sections), **more)


def drawn(seed: int) -> list[list[Choice]]:
    """A few tables with a few ways each."""
    draw = random.Random(seed)
    return [
        ways(
            f"t{i}",
            *((t, draw.randint(1, 40), draw.uniform(0.1, 1)) for t in draw.sample(TYPES, 3)),
            pooled=draw.random() < 0.5,
        )
        for i in range(draw.randint(1, 4))
    ]


def busiest(found: Proposed) -> float:
    spent = [0.0] * MACHINE.world_size
    for placed in found.tables:
        for rank, shard in zip(placed.ranks, placed.choice.shard_costs, strict=True):
            spent[rank] += shard.total_seconds
    return max(spent)


@given(seed=st.integers(0, 10**6), hbm=st.integers(20, 120))
def test_no_proposer_that_goes_through_the_same_options_beats_the_grid(seed: int, hbm: int) -> None:
    tables = drawn(seed)
    every = proposed(tables, ProposerSection("grid"), hbm=hbm)
    assert every.proposals == 3 ** len(tables)
    for proposer in (
        ProposerSection("greedy"),
        ProposerSection("greedy", use_depth=False),
        ProposerSection("uniform"),
    ):
        found = proposed(tables, proposer, hbm=hbm)
        assert found.plans <= found.proposals
        assert bool(found.tables) == bool(found.plans)
        assert every.seconds <= found.seconds
    if every.tables:
        assert every.seconds == pytest.approx(busiest(every))
        assert {placed.choice.table.name for placed in every.tables} == {
            each[0].table.name for each in tables
        }


@given(seed=st.integers(0, 10**6), hbm=st.integers(20, 120))
def test_a_plan_respects_the_memory_of_every_rank(seed: int, hbm: int) -> None:
    held = [0] * MACHINE.world_size
    for placed in proposed(drawn(seed), hbm=hbm).tables:
        assert len(placed.ranks) == placed.choice.option.count
        for rank, shard in zip(placed.ranks, placed.choice.shard_costs, strict=True):
            held[rank] += shard.hbm_bytes
    assert max(held) <= hbm


def test_a_proposal_made_before_is_not_placed_again() -> None:
    tables = drawn(3)
    found = proposed(
        tables, ProposerSection("grid"), ProposerSection("greedy"), ProposerSection("grid")
    )
    grid, greedy, again = found.attempts
    assert grid.proposals == again.repeats == found.proposals
    assert (greedy.proposals, again.proposals) == (0, 0)
    assert greedy.repeats > 0


def test_proposals_in_another_order_of_tables_are_the_same() -> None:
    small, large = ways("small", ("table_wise", 1, 1.0)), ways("large", ("table_wise", 9, 1.0))
    found = proposed(
        [large, small], ProposerSection("greedy"), ProposerSection("dynamic_programming")
    )
    assert found.proposals == 1
    assert found.attempts[1].repeats == 2


def test_of_equal_plans_the_first_one_stays() -> None:
    tables = [ways("t", ("table_wise", 1, 1.0), ("row_wise", 1, 1.0))]
    found = proposed(tables, ProposerSection("grid"))
    assert found.tables[0].choice.option.sharding_type == "table_wise"


def test_tables_that_are_not_pooled_come_first_as_in_torchrec() -> None:
    tables = [
        ways("bag", ("table_wise", 1, 1.0)),
        ways("plain", ("table_wise", 1, 1.0), pooled=False),
    ]
    assert [placed.choice.table.name for placed in proposed(tables).tables] == ["plain", "bag"]


def test_skipped_proposers_show_why() -> None:
    tables = [ways(f"t{i}", ("table_wise", 1, 1.0), ("row_wise", 1, 1.0)) for i in range(4)]
    found = proposed(
        tables,
        ProposerSection("grid", max_proposals=9),
        ProposerSection("greedy"),
        ProposerSection("grid", max_proposals=3),
    )
    assert found.skipped == {
        "grid": "16 combinations, more than max_proposals = 9",
        "grid 2": "16 combinations, more than max_proposals = 3",
    }


def test_of_what_does_not_fit_everything_was_proposed() -> None:
    tables = [
        ways(
            "t",
            ("table_wise", 500, 1.0),
            ("row_wise", 110, 2.0),
            ("table_row_wise", 150, 3.0),
        )
    ]
    found = proposed(tables, ProposerSection("grid"), hbm=100)
    assert (found.tables, found.plans, found.proposals) == ((), 0, 3)


def test_without_tables_there_is_nothing_to_propose() -> None:
    found = proposed([])
    assert (found.tables, found.proposals) == ((), 0)


def test_a_time_that_is_over_lets_nothing_be_tried() -> None:
    found = proposed(drawn(1), watch=Watch(0.0))
    assert (found.tables, found.proposals) == ((), 0)
    assert set(found.skipped.values()) == {"out of time"}


def endless(section: ProposerSection, offer: Offer) -> Proposals:
    """The same proposal for ever."""
    for _ in itertools.repeat(None):
        yield tuple(each[0] for each in offer.tables)
    return None


def test_a_proposer_without_end_leaves_time_to_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock here goes on by a second whenever it is looked at."""
    clock = itertools.count(0.0)
    watch = Watch(300.0, clock=lambda: next(clock))
    tables = [ways("t", ("table_wise", 5, 2.0), ("row_wise", 5, 1.0))]
    monkeypatch.setitem(proposers.WALKS, "uniform", endless)
    forever = ProposerSection("uniform")
    found = proposed(tables, forever, forever, ProposerSection("grid"), watch=watch)
    assert next(clock) < 290
    assert found.attempts[0].proposals == 1
    assert found.skipped == {"uniform": "out of time", "uniform 2": "out of time"}
    assert found.tables[0].choice.option.sharding_type == "row_wise"


def test_a_critical_path_waits_for_the_slowest_rank_of_each_group_and_phase() -> None:
    def choice(name: str, *each: dict[str, float], pooled: bool = True) -> Choice:
        table = TableSpec(name, 64, 4 * len(each), pooled=pooled)
        split = tuple(ShardRun(64, 4, column=4 * k) for k in range(len(each)))
        option = Option(name, "column_wise", "fused", split)
        return Choice(table, option, tuple(cost(seconds) for seconds in each))

    bags = choice("bags", {"fwd_comms": 1.0, "bwd_comms": 4.0}, {"fwd_comms": 2.0})
    more = choice("more", {"fwd_comms": 1.5, "fwd_compute": 3.0})
    plain = choice("plain", {"fwd_comms": 8.0, "bwd_compute": 1.0, "prefetch": 9.0}, pooled=False)
    placed = (Placed(bags, (0, 1)), Placed(more, (0,)), Placed(plain, (1,)))
    terms = list(critical_terms(placed, 2))
    assert sum(t.seconds for t in terms if t.communication) == (1.0 + 1.5) + 4.0 + 8.0
    assert sum(t.seconds for t in terms if not t.communication) == 3.0 + 1.0


@given(start=st.floats(0, 1e3), value=st.floats(0, 1e3), count=st.integers(0, 300))
def test_adding_often_rounds_after_each_addition(start: float, value: float, count: int) -> None:
    expected = start
    for _ in range(count):
        expected += value
    assert add_often(start, value, count) == expected
