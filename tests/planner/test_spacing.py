from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.estimate.recordings import described
from shardwright.job.job import Job, parse_job
from shardwright.planner.draft import TablesDraft
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import relaxed
from shardwright.planner.search.search import search
from shardwright.planner.search.space import Assignment, Space, item_option
from shardwright.planner.search.state import restored
from shardwright.planner.strategy.tables import placed_tables, space_of

MakeJob = Callable[..., Job]
SIZES = (700, 50, 3000, 50, 9, 100_000)


def _problem(job: Job) -> Problem:
    return make_problem(job, described(job))


def _space(job: Job) -> tuple[Problem, Space]:
    problem = _problem(job)
    return problem, space_of(problem, problem.tables, problem.capacity)


def _ruled(make_tables: MakeJob, world: int = 4, **constraints: Any) -> tuple[Problem, Space]:
    cluster = {"preset": "h100-8", "world_size": world}
    job = make_tables(*SIZES, cluster=cluster, planner={"constraints": constraints})
    return _space(job)


def _item(space: Space, table: int) -> int:
    return next(i for i, item in enumerate(space.items) if table in item.tables)


def test_every_table_is_one_item_where_nothing_is_said(make_tables: MakeJob) -> None:
    problem, space = _space(make_tables(*SIZES))
    assert [item.tables for item in space.items] == [(table,) for table in problem.order]
    assert not space.constrained
    assert (space.ranks, space.group, space.capacity) == (2, 2, problem.capacity)


def test_items_come_in_an_order_that_the_job_does_not_decide(make_tables: MakeJob) -> None:
    shapes = []
    for rows in (SIZES, SIZES[::-1]):
        problem, space = _space(make_tables(*rows))
        shapes.append([problem.model.tables[item.tables[0]].rows for item in space.items])
    assert shapes[0] == shapes[1]


def test_tables_that_are_kept_together_are_one_item(make_tables: MakeJob) -> None:
    _, space = _ruled(make_tables, together=[["t0", "t2"], ["t1", "t5"]])
    members = {frozenset(item.tables) for item in space.items}
    assert members == {frozenset(m) for m in ((0, 2), (1, 5), (3,), (4,))}
    for item in space.items:
        if len(item.tables) > 1:
            for option in item.options:
                assert option.widths == (1,)
                assert {c.option.sharding_type for c in option.choices} == {"table_wise"}
            kernels = {tuple(c.option.compute_kernel for c in o.choices) for o in item.options}
            known = ("fused", "fused_uvm", "fused_uvm_caching")
            assert kernels == set(itertools.product(known, repeat=2))


def test_what_many_tables_together_may_take_is_not_above_any_combination(
    make_tables: MakeJob,
) -> None:
    names = [f"t{i}" for i in range(6)]
    problem, space = _ruled(make_tables, together=[names])
    (item,) = space.items
    assert len(item.options) == 3  # of one kernel each
    assert item.floor is not None
    whole = [
        [c for c in problem.tables[table] if c.option.sharding_type == "table_wise"]
        for table in item.tables
    ]
    for kernels in itertools.product(*whole):
        option = item_option(kernels, space.ranks, space.group)
        assert item.floor.total_seconds <= option.total_seconds * (1 + 1e-12)
        assert item.floor.largest <= option.largest * (1 + 1e-12)
        for least, size in zip(item.floor.total_storage, option.total_storage, strict=True):
            assert least <= size


def test_tables_together_cost_what_they_cost_alone(make_tables: MakeJob) -> None:
    _, space = _ruled(make_tables, together=[["t0", "t2"]])
    item = space.items[_item(space, 0)]
    for option in item.options:
        for tier in range(3):
            wanted = sum(choice.total_storage[tier] for choice in option.choices)
            assert option.total_storage[tier] == option.largest_storage[tier] == wanted
        everywhere = sum(choice.everywhere for choice in option.choices)
        seconds = sum(
            max(cost.total_seconds for cost in choice.shard_costs) for choice in option.choices
        )
        assert option.largest == pytest.approx(seconds + everywhere)


def test_items_are_apart_in_both_directions(make_tables: MakeJob) -> None:
    _, space = _ruled(make_tables, apart=[["t0", "t1", "t2"], ["t2", "t4"]])
    partners = {
        table: {m for other in space.items[_item(space, table)].apart_from
                for m in space.items[other].tables}
        for table in range(6)
    }  # fmt: skip
    assert partners == {0: {1, 2}, 1: {0, 2}, 2: {0, 1, 4}, 3: set(), 4: {2}, 5: set()}
    assert space.constrained


def test_what_is_apart_from_one_of_a_group_is_apart_from_the_group(make_tables: MakeJob) -> None:
    _, space = _ruled(make_tables, together=[["t0", "t1"]], apart=[["t1", "t2"]])
    assert space.items[_item(space, 2)].apart_from == (_item(space, 0),)
    assert space.items[_item(space, 0)].apart_from == (_item(space, 2),)


def test_a_group_may_use_the_ranks_that_all_its_tables_may_use(make_tables: MakeJob) -> None:
    _, space = _ruled(
        make_tables,
        together=[["t0", "t1"]],
        ranks={"t0": [0, 1, 2], "t1": [1, 2, 3], "t2": [3]},
    )
    allowed = [space.items[_item(space, table)].allowed for table in (0, 2, 3)]
    assert [None if a is None else np.flatnonzero(a).tolist() for a in allowed] == [
        [1, 2],
        [3],
        None,
    ]


@pytest.mark.parametrize("constraints", [{"ranks": {"t0": [1]}}, {"apart": [["t0", "t1"]]}])
def test_a_table_with_rules_uses_no_type_of_all_ranks(
    make_tables: MakeJob, constraints: dict[str, Any]
) -> None:
    _, space = _ruled(make_tables, **constraints)
    types = {o.choices[0].option.sharding_type for o in space.items[_item(space, 0)].options}
    assert types <= {"table_wise", "column_wise"}
    free = {o.choices[0].option.sharding_type for o in space.items[_item(space, 5)].options}
    assert {"row_wise", "data_parallel"} <= free


def test_a_table_that_may_use_every_rank_is_not_ruled(make_tables: MakeJob) -> None:
    _, space = _ruled(make_tables, ranks={"t0": [2, 0, 1, 3]})
    assert not space.constrained
    types = {o.choices[0].option.sharding_type for o in space.items[_item(space, 0)].options}
    assert {"row_wise", "data_parallel"} <= types


def test_columns_beside_a_table_that_is_kept_apart_may_share_ranks(make_tables: MakeJob) -> None:
    cluster = {"preset": "h100-8", "world_size": 2}
    rules = {"constraints": {"apart": [["t0", "t1"]]}}
    _, space = _space(make_tables(50, 60, dim=64, cluster=cluster, planner=rules))
    counts = {len(option.widths) for option in space.items[0].options}
    assert {1, 2, 4} <= counts


def test_on_one_rank_rules_leave_every_type(make_tables: MakeJob) -> None:
    _, space = _ruled(make_tables, world=1, ranks={"t0": [0]})
    types = {o.choices[0].option.sharding_type for o in space.items[_item(space, 0)].options}
    assert {"row_wise", "data_parallel"} <= types


def test_rules_that_leave_a_table_no_type_are_refused(make_tables: MakeJob) -> None:
    with pytest.raises(InputError) as caught:
        _space(
            make_tables(
                50,
                cluster={"preset": "h100-8", "world_size": 16},
                table={"sharding_types": ["table_row_wise"]},
                planner={"constraints": {"ranks": {"t0": [1]}}},
            )
        )
    assert str(caught.value) == (
        "planner.constraints of 't0': expected a sharding type that leaves room for its rules, "
        "got only types that use more ranks. Allow table_wise or column_wise."
    )


def test_columns_of_one_host_are_left_out_beside_columns_anywhere(make_tables: MakeJob) -> None:
    cluster = {"preset": "h100-8", "world_size": 16}
    table = {"sharding_types": ["column_wise", "table_column_wise"]}
    _, space = _space(make_tables(50, dim=128, cluster=cluster, table=table))
    types = {o.choices[0].option.sharding_type for o in space.items[0].options}
    assert types == {"column_wise"}


def test_columns_of_one_host_may_use_some_of_its_ranks(make_tables: MakeJob) -> None:
    cluster = {"preset": "h100-8", "world_size": 16}
    table = {"sharding_types": ["table_column_wise"], "compute_kernels": ["fused"]}
    table["min_partition"] = 32
    _, space = _space(make_tables(50, dim=128, cluster=cluster, table=table))
    widths = [(o.choices[0].option.count, o.widths) for o in space.items[0].options]
    assert widths == [(2, (2,)), (2, (1,)), (4, (4,)), (4, (2,)), (4, (1,))]


tables = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 10**6),
            "dim": st.sampled_from([1, 4, 16, 64, 100]),
            "pooling_factors": st.lists(st.floats(0, 50), min_size=1, max_size=2),
            "pooled": st.booleans(),
        }
    ),
    min_size=1,
    max_size=5,
)


def _job(entries: list[dict[str, Any]], hosts: int, local: int, **planner: Any) -> Job:
    return parse_job(
        {
            "tables": [{"name": f"t{i}"} | entry for i, entry in enumerate(entries)],
            "cluster": {"preset": "h100-8", "world_size": hosts * local, "local_world_size": local},
            "planner": planner,
        }
    )


@pytest.mark.slow
@given(entries=tables, hosts=st.integers(1, 3), local=st.integers(1, 4))
def test_an_assignment_costs_what_the_tables_placed_by_it_cost(
    entries: list[dict[str, Any]], hosts: int, local: int
) -> None:
    problem, space = _space(_job(entries, hosts, local))
    found = search(relaxed(space))
    assert found.best is not None
    placed = placed_tables(space, found.best)
    assert [p.choice.table.name for p in placed] == [t.name for t in problem.model.tables]
    state = restored(space, 1.0, 8.0, found.best)
    draft = TablesDraft(problem, placed, ())
    # Tables that are hardly ever looked up take less than numbers have digits for.
    assert draft.rank_seconds == pytest.approx(state.load.tolist(), rel=1e-9, abs=1e-30)
    for tier, sizes in enumerate(draft.tier_bytes.values()):
        assert sizes == state.memory[:, tier].tolist()


@given(entries=tables, hosts=st.integers(1, 3), local=st.integers(1, 4), data=st.data())
def test_every_shard_lies_where_its_type_may_lie(
    entries: list[dict[str, Any]], hosts: int, local: int, data: st.DataObject
) -> None:
    _, space = _space(_job(entries, hosts, local))
    options, slots = [], []
    for item in space.items:
        number = data.draw(st.integers(0, len(item.options) - 1))
        widths = item.options[number].widths
        options.append(number)
        slots.append(tuple(data.draw(st.integers(0, space.ranks // w - 1)) * w for w in widths))
    for placed in placed_tables(space, Assignment(tuple(options), tuple(slots))):
        ranks = list(placed.ranks)
        assert len(ranks) == placed.choice.option.count
        assert set(ranks) <= set(range(space.ranks))
        homes = [rank // local for rank in ranks]
        match placed.choice.option.partition:
            case "uniform":
                assert ranks == list(range(space.ranks))
            case "host":
                assert len(set(homes)) == 1
            case "multi_host":
                assert [rank % local for rank in ranks] == list(range(local)) * (
                    len(ranks) // local
                )
                for start in range(0, len(ranks), local):
                    assert len(set(homes[start : start + local])) == 1
