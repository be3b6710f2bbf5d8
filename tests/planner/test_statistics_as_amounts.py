"""Statistics called with numbers and with Amounts: one result, which the Amounts derive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan

from shardwright.core.amount import Amount, Step, derivation, leaf, named
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.planner.planner import gap, proven
from shardwright.planner.search.bound import beyond_room, priced, slowest_rank
from shardwright.planner.statistics import memory, ranks, tables
from shardwright.planner.statistics.ranks import RankGroup
from shardwright.planner.statistics.records import MEASURE_WORDS, CriticalTerm, Measure
from shardwright.planner.statistics.tables import Holdings
from shardwright.planner.strategy.steps import step_seconds

Agree = Callable[[Any, Any], None]
SECONDS = st.floats(1e-9, 1e3)
NBYTES = st.integers(0, 2**45)
MANY = st.lists(st.tuples(SECONDS, st.integers(1, 4)), min_size=1, max_size=15)


def _values(result: Any) -> Iterator[Any]:
    """The numbers of a result, whatever holds them."""
    if isinstance(result, (Amount, float, int)):
        yield result
    elif isinstance(result, msgspec.Struct):
        for name in result.__struct_fields__:
            yield from _values(getattr(result, name))
    elif isinstance(result, (list, tuple)):
        for one in result:
            yield from _values(one)


@pytest.fixture(scope="session")
def agree(reevaluate: Callable[[Sequence[Step]], None]) -> Agree:
    def check(numbers: Any, amounts: Any) -> None:
        pairs = list(zip(_values(numbers), _values(amounts), strict=True))
        assert any(isinstance(amount, Amount) for _, amount in pairs)
        for number, amount in pairs:
            assert not isinstance(number, Amount)
            if isinstance(amount, Amount):
                near = 0.0 if amount.unit else 1e-12  # shares that may cancel out
                assert amount.value == pytest.approx(number, rel=1e-12, abs=near)
                reevaluate(derivation(named("result_of_test", amount)))
            else:
                assert amount == number  # ranks, counts and ranges are no derivations

    return check


def _leaves(**values: float) -> list[Amount]:
    return [leaf(value, name) for name, value in values.items()]


@functools.cache
def _plan(constants: str) -> Plan:
    kinds = ("table_wise", "row_wise", "column_wise", "data_parallel")
    rows = [
        {"name": f"t{i}", "rows": 997 * (i + 1), "dim": 16 * (i % 3 + 1)}
        | {"sharding_types": [kinds[i % 4]], "pooling_factors": [float(i + 1)]}
        for i in range(9)
    ]
    cluster = {"world_size": 4, "local_world_size": 2, "compute_device": "cuda"}
    return plan(
        parse_job({"tables": rows, "cluster": cluster, "planner": {"constants": constants}})
    )


PROFILES = pytest.mark.parametrize("constants", ["torchrec-1.9", "cluster"])


@given(pairs=MANY)
@pytest.mark.parametrize(
    "statistic",
    [
        functools.partial(ranks.spread, "seconds"),
        functools.partial(ranks.part_maximum, "lookup"),
        ranks.excess,
        lambda groups: [group.value for group in ranks.idle(groups, groups[0].value)],
    ],
    ids=["spread", "part", "excess", "idle"],
)
def test_statistics_over_ranks(
    agree: Agree, statistic: Callable[[Sequence[RankGroup]], Any], pairs: list[tuple[float, int]]
) -> None:
    first = 0
    groups: list[RankGroup] = []
    for value, count in pairs:
        groups.append(RankGroup(value, range(first, first + count)))
        first += count
    named_groups = [
        group._replace(value=leaf(group.value, f"seconds[{n}]"), label=f"{n}")
        for n, group in enumerate(groups)
    ]
    agree(statistic(groups), statistic(named_groups))


@PROFILES
@pytest.mark.parametrize("of", MEASURE_WORDS)
def test_what_the_shards_of_a_table_take(agree: Agree, constants: str, of: Measure) -> None:
    for placed in Holdings(_plan(constants)).tables:
        choice = placed.choice
        agree(tables.over_shards(choice, of), tables.over_shards(choice, of, leaf))
        for rank in placed.ranks:
            agree(tables.on_rank(placed, rank, of), tables.on_rank(placed, rank, of, leaf))


@PROFILES
def test_what_passes_through_a_shard(agree: Agree, constants: str) -> None:
    made = _plan(constants)
    for placed in Holdings(made).tables:
        for _, run, _ in placed.stretches():
            agree(tables.traffic(made, placed, run), tables.traffic(made, placed, run, leaf))


@PROFILES
def test_bytes_of_a_kernel(agree: Agree, constants: str) -> None:
    placed = Holdings(_plan(constants)).tables
    for kernel in {one.choice.option.compute_kernel for one in placed}:
        own = [one for one in placed if one.choice.option.compute_kernel == kernel]
        agree(tables.kernel_of(kernel, own), tables.kernel_of(kernel, own, leaf))


@given(values=st.lists(st.tuples(SECONDS, st.booleans()), min_size=1, max_size=12))
def test_the_critical_path(agree: Agree, values: list[tuple[float, bool]]) -> None:
    terms = [CriticalTerm(f"term {n}", comms, value, n) for n, (value, comms) in enumerate(values)]
    told: list[Any] = [
        msgspec.structs.replace(term, seconds=leaf(term.seconds, term.name)) for term in terms
    ]
    agree(ranks.path_of(tuple(terms)).seconds, ranks.path_of(tuple(told)).seconds)


@given(capacity=NBYTES, taken=st.lists(NBYTES, max_size=12))
def test_free_memory(agree: Agree, capacity: int, taken: list[int]) -> None:
    told = [leaf(nbytes, f"line {n}") for n, nbytes in enumerate(taken)]
    agree(memory.free(capacity, taken), memory.free(leaf(capacity, "capacity"), told))


@given(now=SECONDS, more=SECONDS, slowest=SECONDS, ranks_=st.integers(1, 4096))
def test_bounds(agree: Agree, now: float, more: float, slowest: float, ranks_: int) -> None:
    first, second, third, count = _leaves(now=now, more=more, slowest=slowest, ranks=ranks_)
    agree(memory.fall(now, more), memory.fall(first, second))
    agree(slowest_rank(now, more, ranks_), slowest_rank(first, second, count))
    agree(proven([now, more], slowest), proven([first, second], third))
    agree(gap(slowest, now), gap(third, first))
    agree(
        step_seconds(now, [more, slowest], [slowest]), step_seconds(first, [second, third], [third])
    )


@given(work=SECONDS, nbytes=st.tuples(NBYTES, NBYTES), prices=st.tuples(SECONDS, SECONDS))
def test_priced_work(
    agree: Agree, work: float, nbytes: tuple[int, int], prices: tuple[float, float]
) -> None:
    numbers = list(zip(nbytes, prices, strict=True))
    amounts = [
        (leaf(size, f"bytes_{n}"), leaf(price, f"price_{n}"))
        for n, (size, price) in enumerate(numbers)
    ]
    for number in range(3):  # scarce tiers
        asked, told = numbers[:number], amounts[:number]
        agree(priced(work, asked), priced(leaf(work, "work"), told))
        agree(beyond_room(work, asked), beyond_room(leaf(work, "work"), told))
