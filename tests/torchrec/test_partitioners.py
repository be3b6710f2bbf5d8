from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.core.cluster import Cluster
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, shard_runs
from shardwright.job.planner import PartitionerSection
from shardwright.planner.choice import Choice, cost
from shardwright.planner.search.watch import Watch
from shardwright.torchrec import partitioners
from shardwright.torchrec.candidate import Candidate, candidate_of
from shardwright.torchrec.partitioners import NoRoomError, OutOfTimeError, rank_ms

EVERY_TYPE: tuple[Any, ...] = (
    *("data_parallel", "table_wise", "column_wise", "row_wise"),
    *("table_row_wise", "table_column_wise", "grid_shard"),
)


def balanced(tolerance: float = 0.02) -> PartitionerSection:
    return PartitionerSection("memory_balanced", tolerance=tolerance)


GREEDY, BY_TIME = PartitionerSection(), PartitionerSection(sort_by="perf")
PARTITIONERS: tuple[PartitionerSection, ...] = (
    GREEDY,
    BY_TIME,
    PartitionerSection(balance_modules=True),
    balanced(),
)
MANY = 10**15
MIB = 2**20


def ranks_of(world_size: int, local: int = 0, group: int = 0) -> Cluster:
    """So many ranks, ``local`` on a host, ``group`` linked closely."""
    local = local or world_size
    return Cluster("test", world_size, local, "cuda", 0, 0, 0, group or local, {})


def candidate(
    machine: Cluster,
    sharding_type: Any = "table_wise",
    size: int = 10,
    seconds: float = 1.0,
    *,
    name: str = "t",
    dim: int = 8,
    ddr: int = 0,
    kernel: str = "fused",
    pooled: bool = True,
) -> Candidate:
    """A table whose every shard takes ``size`` bytes of HBM, ``ddr`` of DDR and ``seconds``."""
    table = TableSpec(name, 64, dim, pooled=pooled)
    runs = shard_runs(table, sharding_type, machine.world_size, machine.group, 4)
    each = cost({"fwd_compute": seconds}, hbm={"weight": size}, ddr={"weight": ddr})
    choice = Choice(table, Option(name, sharding_type, kernel, runs), (each,) * len(runs))
    return candidate_of(choice, {})


def place(
    proposal: Sequence[Candidate],
    machine: Cluster,
    hbm: int = MANY,
    partitioner: PartitionerSection = GREEDY,
) -> list[list[int]]:
    """The ranks of each candidate's shards, with ``hbm`` bytes on each rank."""
    capacities = [(hbm, MANY, MANY)] * machine.world_size
    placed = partitioners.place(partitioner, proposal, machine, capacities, Watch())
    return [list(ranks) for ranks in placed]


def fits(proposal: Sequence[Candidate], machine: Cluster, hbm: int) -> bool:
    """Whether it has room."""
    try:
        place(proposal, machine, hbm)
    except NoRoomError:
        return False
    return True


def drawn(seed: int) -> tuple[list[Candidate], Cluster]:
    """Tables of every type and size on a machine of one or more hosts."""
    draw = random.Random(seed)
    machine = ranks_of(*draw.choice([(1, 1), (4, 2), (8, 4), (8, 2, 4), (6, 6)]))
    proposal = [
        candidate(
            machine,
            draw.choice(EVERY_TYPE),
            draw.randint(0, 100),
            draw.choice([0.1, 0.2, 0.3, 1.7]),
            name=f"t{i}",
            dim=draw.choice([4, 8, 16]),
            ddr=draw.choice([0, 7]),
            kernel=draw.choice(["fused", "key_value"]),
            pooled=draw.random() < 0.5,
        )
        for i in range(draw.randint(1, 12))
    ]
    return proposal, machine


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=repr)
@given(seed=st.integers(0, 10**6), share=st.floats(0.2, 3))
def test_every_shard_lies_on_a_rank_and_none_holds_more_than_it_may(
    partitioner: PartitionerSection, seed: int, share: float
) -> None:
    proposal, machine = drawn(seed)
    size = machine.world_size
    hbm = int(sum(c.storage[0] for c in proposal) / size * share) + 1
    ddr = int(sum(c.storage[1] for c in proposal) / size * share) + 8
    capacities = [(hbm, ddr, 0)] * size
    try:
        placed = partitioners.place(partitioner, proposal, machine, capacities, Watch())
    except NoRoomError:
        assume(False)
        raise
    taken = [[0, 0] for _ in range(size)]
    for one, ranks in zip(proposal, placed, strict=True):
        assert len(ranks) == one.choice.option.count
        for load, rank in zip(one.loads, ranks, strict=True):
            taken[rank][0] += load.hbm
            taken[rank][1] += load.ddr
    assert all(a <= hbm and b <= ddr for a, b in taken)


@given(seed=st.integers(0, 10**6))
def test_shards_go_where_their_type_lets_them(seed: int) -> None:
    proposal, machine = drawn(seed)
    group = machine.group
    try:
        placed = place(proposal, machine)
    except NoRoomError:  # a key-value table has more column shards than there are ranks
        assume(False)
        raise
    for one, ranks in zip(proposal, placed, strict=True):
        match one.partition:
            case "uniform":
                assert ranks == list(range(machine.world_size))
            case "host":
                assert len({rank // group for rank in ranks}) == 1
            case "multi_host":
                for k in range(0, len(ranks), group):
                    start = ranks[k]
                    assert start % group == 0
                    assert ranks[k : k + group] == list(range(start, start + group))
        if one.choice.option.sharding_type == "table_row_wise":
            assert ranks == list(range(ranks[0], ranks[0] + group))


def test_equal_ranks_are_filled_host_after_host_first_rank_first() -> None:
    machine = ranks_of(4, local=2)
    tables = [candidate(machine, name=f"t{i}") for i in range(5)]
    assert place(tables, machine) == [[0], [2], [1], [3], [0]]


def test_the_rank_with_the_least_time_is_taken_whatever_it_holds() -> None:
    machine = ranks_of(2)
    tables = [candidate(machine, size=100, seconds=0.1), candidate(machine, size=50, seconds=0.2)]
    assert place([*tables, candidate(machine, size=10)], machine) == [[0], [1], [0]]


def test_a_full_rank_is_passed_over() -> None:
    machine = ranks_of(2)
    tables = [candidate(machine, size=100, seconds=0.1), candidate(machine, size=50, seconds=0.2)]
    placed = place([*tables, candidate(machine, size=10)], machine, hbm=105)
    assert placed == [[0], [1], [1]]


def test_large_tables_go_first_and_equal_ones_in_the_order_of_the_proposal() -> None:
    machine = ranks_of(4)
    sizes = [10, 30, 10, 20]
    tables = [candidate(machine, size=size) for size in sizes]
    assert place(tables, machine) == [[2], [0], [3], [1]]


def test_slow_tables_go_first_where_that_is_asked() -> None:
    machine = ranks_of(2)
    tables = [candidate(machine, size=30, seconds=1.0), candidate(machine, size=10, seconds=2.0)]
    assert place(tables, machine, partitioner=BY_TIME) == [[1], [0]]


def test_small_modules_go_first_where_modules_are_balanced() -> None:
    machine = ranks_of(3)
    tables = [
        candidate(machine, size=30),
        candidate(machine, size=20),
        candidate(machine, size=10, pooled=False),
    ]
    balanced = PartitionerSection(balance_modules=True)
    assert place(tables, machine, partitioner=balanced) == [[1], [2], [0]]


def test_column_shards_may_share_a_rank_unless_rows_come_from_a_key_value_store() -> None:
    machine = ranks_of(2)
    busy = candidate(machine, size=100, seconds=9.0)
    columns = candidate(machine, "column_wise", size=5)
    stored = candidate(machine, "column_wise", size=5, kernel="key_value")
    assert place([busy, columns], machine)[1] == [1, 1]
    assert place([busy, stored], machine)[1] == [1, 0]


def test_more_key_value_shards_than_ranks_do_not_fit() -> None:
    machine = ranks_of(2)
    stored = candidate(machine, "column_wise", dim=12, kernel="key_value")
    assert not fits([stored], machine, MANY)


def test_a_table_of_one_host_goes_to_the_host_with_the_least_time() -> None:
    machine = ranks_of(4, local=2)
    busy = candidate(machine, size=100)
    assert place([busy, candidate(machine, "table_row_wise")], machine) == [[0], [2, 3]]
    assert place([busy, candidate(machine, "table_column_wise")], machine) == [[0], [2, 3]]


def test_a_table_of_one_host_passes_over_a_host_with_a_full_rank() -> None:
    machine = ranks_of(4, local=2)
    tables = [
        candidate(machine, size=90, seconds=0.1),
        candidate(machine, size=60, seconds=9.0),
        candidate(machine, "table_row_wise", size=30, name="rows"),
    ]
    assert place(tables, machine, hbm=100) == [[0], [2], [2, 3]]
    assert place(tables, machine, hbm=120) == [[0], [2], [0, 1]]


def test_a_table_that_no_host_takes_does_not_fit() -> None:
    machine = ranks_of(4, local=2)
    tables = [
        candidate(machine, size=90, seconds=0.1),
        candidate(machine, size=80, seconds=9.0),
        candidate(machine, "table_row_wise", size=30, name="rows"),
    ]
    assert not fits(tables, machine, 100)
    assert fits(tables, machine, 110)


def test_a_host_that_failed_keeps_nothing_of_what_was_tried() -> None:
    machine = ranks_of(4, local=2)
    tables = [
        candidate(machine, size=20, seconds=6.0),
        candidate(machine, size=70, seconds=5.0),
        candidate(machine, "table_column_wise", size=60, seconds=2.0),
        candidate(machine, size=100, seconds=0.1),
    ]
    placed = place(tables, machine, 100, BY_TIME)
    assert placed == [[0], [2], [1, 0], [3]]


def test_a_grid_takes_neighbours_in_the_order_of_time_and_goes_around() -> None:
    machine = ranks_of(6, local=2)
    busy = candidate(machine, size=100)
    assert place([busy, candidate(machine, "grid_shard")], machine)[1] == [2, 3, 4, 5]
    around = candidate(machine, "grid_shard", dim=16)
    assert place([busy, around], machine)[1] == [2, 3, 4, 5, 0, 1, 2, 3]


def test_a_grid_is_put_on_the_busiest_hosts_where_they_alone_have_room() -> None:
    machine = ranks_of(6, local=2)
    full = candidate(machine, size=95, seconds=0.01)
    busy = [candidate(machine, size=50, seconds=5.0) for _ in range(5)]
    placed = place([full, *busy, candidate(machine, "grid_shard")], machine, 100)
    assert placed == [[0], [2], [4], [1], [3], [5], [2, 3, 4, 5]]


def test_even_shards_are_placed_before_all_others() -> None:
    machine = ranks_of(2)
    tables = [candidate(machine, size=60), candidate(machine, "row_wise", size=50, name="even")]
    assert not fits(tables, machine, 100)
    assert fits(tables, machine, 110)


def test_a_table_that_fits_nowhere_does_not_fit() -> None:
    machine = ranks_of(2)
    tables = [candidate(machine, size=70, name="first"), candidate(machine, size=200, name="big")]
    assert not fits(tables, machine, 199)
    assert fits(tables, machine, 200)


@pytest.mark.parametrize("least", [100, 119, 120])
def test_even_shards_do_not_fit_where_one_rank_is_too_small(least: int) -> None:
    machine = ranks_of(3)
    tables = [candidate(machine, "row_wise", name=name, size=60) for name in ("a", "b")]
    capacities = [(130, MANY, MANY), (least, MANY, MANY), (130, MANY, MANY)]
    if least < 120:
        with pytest.raises(NoRoomError):
            partitioners.place(GREEDY, tables, machine, capacities, Watch())
    else:
        assert partitioners.place(GREEDY, tables, machine, capacities, Watch())


def test_a_shard_without_hbm_does_not_fit_where_less_than_none_is_left() -> None:
    machine = ranks_of(1)
    for sharding_type in ("table_wise", "row_wise", "table_row_wise"):
        assert not fits([candidate(machine, sharding_type, size=0)], machine, -1)


def test_memory_is_balanced_as_far_as_the_tolerance_goes() -> None:
    machine = ranks_of(2)
    sizes = ((1, 1.5), (100, 1.0), (100, 0.4), (1, 0.3))
    tables = [candidate(machine, size=size * MIB, seconds=seconds) for size, seconds in sizes]
    assert place(tables, machine, partitioner=BY_TIME) == [
        [0],
        [1],
        [1],
        [1],
    ]
    strict, lenient = balanced(0.02), balanced(0.2)
    assert place(tables, machine, partitioner=strict) == [[0], [1], [1], [1]]
    assert place(tables, machine, partitioner=lenient) == [[0], [1], [0], [1]]


@given(seed=st.integers(0, 10**6), tolerance=st.sampled_from([0.0, 0.02, 0.5]))
def test_balancing_never_fills_a_rank_more_and_keeps_its_tolerance(
    seed: int, tolerance: float
) -> None:
    draw = random.Random(seed)
    machine = ranks_of(draw.choice([2, 3, 4]))
    proposal = [
        candidate(machine, size=draw.randint(1, 200) * MIB, seconds=draw.uniform(0.1, 1))
        for _ in range(draw.randint(1, 12))
    ]
    before = place(proposal, machine, partitioner=BY_TIME)
    after = place(proposal, machine, partitioner=balanced(tolerance))

    def most(placed: list[list[int]]) -> tuple[int, float]:
        held = [0] * machine.world_size
        for one, ranks in zip(proposal, placed, strict=True):
            held[ranks[0]] += one.storage[0]
        return max(held), max(rank_ms(proposal, placed, machine.world_size))

    assert most(after)[0] <= most(before)[0]
    assert most(after)[1] <= most(before)[1] * (1 + tolerance)


def test_a_time_that_is_over_stops_placing() -> None:
    machine = ranks_of(2)
    with pytest.raises(OutOfTimeError):
        partitioners.place(GREEDY, [candidate(machine)], machine, [(MANY, 0, 0)] * 2, Watch(0.0))


def test_the_time_of_a_rank_is_that_of_its_shards_and_of_what_all_ranks_do() -> None:
    machine = ranks_of(2)
    table = TableSpec("t", 10, 4)
    option = Option("t", "table_wise", "fused", shard_runs(table, "table_wise", 2, 2, 4))
    shard = cost({"lookup": 0.25, "fwd_compute": 0.5})
    shared = candidate_of(Choice(table, option, (shard,), everywhere=0.125), {})
    assert rank_ms([shared, shared], [[1], [1]], machine.world_size) == [250.0, 1750.0]
