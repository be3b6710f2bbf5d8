from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from shardwright.core.batch import expected_distinct
from shardwright.estimate.recordings import described
from shardwright.heap.traffic import Asked, Served
from shardwright.job.job import Job
from shardwright.planner.choice import Placed
from shardwright.planner.draft import TablesDraft
from shardwright.planner.problem import make_problem
from shardwright.planner.step_draft import StepDraft

MakeJob = Callable[..., Job]


def _draft(job: Job, *placed: tuple[str, tuple[int, ...]], sharded: bool = False) -> StepDraft:
    problem = make_problem(job, described(job))
    tables = []
    for (kind, ranks), choices in zip(placed, problem.tables, strict=True):
        choice = next(c for c in choices if c.option.sharding_type == kind)
        tables.append(Placed(choice, ranks))
    units = tuple(choices[-1 if sharded else 0] for choices in problem.units)
    return StepDraft(problem, tuple(tables), units)


def test_exact_bytes_are_what_each_rank_keeps_of_each_table(make_job: MakeJob) -> None:
    job = make_job(10, 5, 3, train={"optimizer": "adagrad"})
    draft = _draft(job, ("table_wise", (1,)), ("row_wise", (0, 1)), ("data_parallel", (0, 1)))
    tables = [{k: n for k, n in e.items() if k[2].startswith("tables.")} for e in draft.exact]
    assert tables[0] == {
        ("setup", "weight", "tables.t1.weight"): 3 * 64,
        ("setup", "optimizer_state", "tables.t1.weight"): 3 * 4,
        ("setup", "weight", "tables.t2.weight"): 3 * 64,
        ("setup", "optimizer_state", "tables.t2.weight"): 3 * 4,
        ("reduce", "gradient", "tables.t2.weight"): 3 * 64,
    }
    assert tables[1] == {
        ("setup", "weight", "tables.t0.weight"): 10 * 64,
        ("setup", "optimizer_state", "tables.t0.weight"): 10 * 4,
        ("setup", "weight", "tables.t1.weight"): 2 * 64,
        ("setup", "optimizer_state", "tables.t1.weight"): 2 * 4,
        ("setup", "weight", "tables.t2.weight"): 3 * 64,
        ("setup", "optimizer_state", "tables.t2.weight"): 3 * 4,
        ("reduce", "gradient", "tables.t2.weight"): 3 * 64,
    }


def test_two_column_shards_on_a_rank_add_up(make_job: MakeJob) -> None:
    draft = _draft(make_job(10), ("column_wise", (1, 1)))
    assert draft.exact[1]["setup", "weight", "tables.t0.weight"] == 10 * 64


@pytest.mark.parametrize("sharded", [False, True])
def test_a_unit_is_kept_in_all_roles_with_its_padding(make_job: MakeJob, sharded: bool) -> None:
    job = make_job(10, train={"optimizer": "adam"})
    draft = _draft(job, ("table_wise", (0,)), sharded=sharded)
    top = draft.units[1]
    payload = 4 * (17 * 16 + 16 + 16 + 1)  # weight and bias of two layers: 17 -> 16 -> 1
    assert top.layout.payload_bytes == payload
    ranks = (0, 1) if sharded else (0,)
    kept = [draft.exact[r] for r in ranks]
    assert sum(k["setup", "weight", "top"] for k in kept) == payload
    assert sum(k["reduce", "gradient", "top"] for k in kept) == payload
    assert sum(k["step", "optimizer_state", "top"] - 4 for k in kept) == 2 * payload
    padding = top.layout.nbytes - payload
    assert padding == (60 if sharded else 28)
    assert sum(k["setup", "padding", "top.parameter"] for k in kept) == padding
    assert sum(k["step", "padding", "top.optimizer_state"] for k in kept) == 2 * padding


def test_modes_follow_the_tables_and_units(make_job: MakeJob) -> None:
    job = make_job(10, 20)
    mixed = _draft(job, ("data_parallel", (0, 1)), ("row_wise", (0, 1)), sharded=True).modes
    assert mixed.routed == mixed.replicated_tables == {"tables"}
    assert mixed.sharded_units == mixed.resharded_units == {"bottom", "top"}
    routed = _draft(job, ("table_wise", (0,)), ("row_wise", (0, 1))).modes
    assert (routed.routed, routed.replicated_tables) == ({"tables"}, set())
    assert routed.sharded_units == frozenset()
    replicas = _draft(job, ("data_parallel", (0, 1)), ("data_parallel", (0, 1))).modes
    assert (replicas.routed, replicas.replicated_tables) == (set(), {"tables"})


def test_traffic_groups_tables_by_width_and_counts_the_ids_to_sort(make_job: MakeJob) -> None:
    job = make_job(10, 50, 7, 9, batch={"size": 100}, planner={"dedup": False})
    draft = _draft(
        job,
        ("table_wise", (1,)),
        ("row_wise", (0, 1)),
        ("column_wise", (0, 1)),
        ("data_parallel", (0, 1)),
    )
    traffic = draft.traffic(1)["tables"]
    assert traffic.asked == (Asked(200, 200, 200, 8), Asked(200, 200, 200, 16, cut=100))
    both = expected_distinct(100, 25) + expected_distinct(200, 10)
    narrow = Served(200, 200, 8, expected_distinct(200, 7))
    assert traffic.served == (narrow, Served(300, 300, 16, both))
    assert traffic.replicas == (Served(100, 100, 16, 0, size=9),)
    assert traffic.ride_bytes == 2 * 9 * 64
    alone = Served(100, 100, 16, expected_distinct(100, 25))
    assert draft.traffic(0)["tables"].served[1] == alone


def test_traffic_of_rows_that_travel_once_is_what_is_expected_of_the_ids(
    make_job: MakeJob,
) -> None:
    job = make_job(10, 50, batch={"size": 100})
    draft = _draft(job, ("table_wise", (1,)), ("row_wise", (0, 1)))
    traffic = draft.traffic(1)["tables"]
    whole, cut = expected_distinct(100, 10), expected_distinct(100, 50)
    assert traffic.asked == (Asked(200, whole + cut, 200, 16, cut=100, dedup=True),)
    rows = 2 * whole + cut  # of two ranks; half of the rows that are cut
    both = expected_distinct(100, 25) + expected_distinct(200, 10)
    assert traffic.served == (Served(rows, rows, 16, both),)


def test_seconds_of_a_rank_add_up_over_phases(make_job: MakeJob) -> None:
    draft = _draft(make_job(10, 50), ("table_wise", (1,)), ("row_wise", (0, 1)))
    assert draft.rank_seconds == tuple(math.fsum(phases.values()) for phases in draft.seconds)
    assert draft.max_rank_seconds == draft.rank_seconds[1]
    whole = draft.tables[0].choice.shard_costs[0].total_seconds
    assert draft.rank_seconds[1] - draft.rank_seconds[0] == pytest.approx(whole)


def test_kept_bytes_are_all_exact_bytes(make_job: MakeJob) -> None:
    draft = _draft(make_job(10, 50), ("table_wise", (1,)), ("row_wise", (0, 1)))
    assert draft.kept_bytes[1] - draft.kept_bytes[0] == 10 * 64
    assert all(
        peak >= kept - 10**4 for peak, kept in zip(draft.peak_bytes, draft.kept_bytes, strict=True)
    )


def test_gradients_are_no_part_of_what_a_step_starts_with(make_job: MakeJob) -> None:
    draft = _draft(make_job(10), ("data_parallel", (0, 1)))
    resident = draft.load(0).resident
    assert "gradient" not in resident
    assert resident["weight"] == draft.exact[0]["setup", "weight", "tables.t0.weight"] + sum(
        unit.layout.payload_bytes for unit in draft.units
    )
    assert set(resident) <= {"weight", "optimizer_state", "padding"}


def test_buffers_of_the_model_are_there_throughout_a_step(make_job: MakeJob) -> None:
    draft = _draft(make_job(10), ("data_parallel", (0, 1)))
    peaks = draft.ledger(draft.load(0)).peaks
    pair, places = 1, 2 * 2  # of each product
    assert {kinds["buffer"] for kinds in peaks.values()} == {(pair + places) * 8}


def _tables(job: Job, *placed: tuple[str, tuple[int, ...]]) -> TablesDraft:
    problem = make_problem(job, described(job))
    tables = []
    for (kind, ranks), choices in zip(placed, problem.tables, strict=True):
        choice = next(c for c in choices if c.option.sharding_type == kind)
        tables.append(Placed(choice, ranks))
    return TablesDraft(problem, tuple(tables), ())


PLACED = (("table_wise", (1,)), ("row_wise", (0, 1)), ("data_parallel", (0, 1)))


def test_tables_alone_take_what_their_shards_take(make_tables: MakeJob) -> None:
    draft = _tables(make_tables(10, 5, 3), *PLACED)
    for rank in (0, 1):
        costs = [
            cost
            for placed in draft.tables
            for holder, cost in zip(placed.ranks, placed.choice.shard_costs, strict=True)
            if holder == rank
        ]
        totals = draft.totals(rank)
        assert totals.peak_bytes == totals.hbm_bytes == sum(c.hbm_bytes for c in costs)
        assert sum(totals.at_peak.values()) == totals.hbm_bytes
        assert (totals.ddr_bytes, totals.ssd_bytes, totals.exact) == (0, 0, {})
        requests = math.fsum(placed.choice.everywhere for placed in draft.tables)
        assert totals.seconds == pytest.approx(requests + sum(c.total_seconds for c in costs))
        assert totals.seconds == math.fsum(totals.parts.values())


def test_tables_alone_fit_up_to_the_last_byte_of_their_capacity(make_tables: MakeJob) -> None:
    fullest = max(_tables(make_tables(10, 5, 3), *PLACED).peak_bytes)
    for spare in (-1, 0, 1):
        cluster = {"preset": "h100-8", "world_size": 2, "hbm_cap": fullest + spare}
        assert _tables(make_tables(10, 5, 3, cluster=cluster), *PLACED).fits == (spare >= 0)


def test_the_order_of_tables_changes_no_total(make_tables: MakeJob) -> None:
    rows = (10, 500, 31, 5, 77)
    kinds = ("table_wise", "row_wise", "data_parallel", "row_wise", "table_wise")
    ranks = ((1,), (0, 1), (0, 1), (0, 1), (0,))
    there = _tables(make_tables(*rows), *zip(kinds, ranks, strict=True))
    back = _tables(
        make_tables(*reversed(rows)), *zip(reversed(kinds), reversed(ranks), strict=True)
    )
    assert there.rank_seconds == back.rank_seconds
    assert there.tier_bytes == back.tier_bytes


def test_a_rank_without_shards_only_addresses_its_ids(make_tables: MakeJob) -> None:
    draft = _tables(make_tables(10), ("table_wise", (1,)))
    assert draft.seconds[0].keys() >= {"exchange_ids"}
    assert draft.rank_seconds[0] == draft.tables[0].choice.everywhere > 0
    assert draft.peak_bytes[0] == 0


def test_the_timeline_of_tables_alone_has_the_seconds_of_every_rank(make_tables: MakeJob) -> None:
    draft = _tables(make_tables(10, 5, 3), *PLACED)
    for rank in (0, 1):
        events = [event for event in draft.time_events() if event.rank == rank]
        assert sum(e.duration for e in events) == pytest.approx(draft.rank_seconds[rank])
        for before, after in itertools.pairwise(events):
            assert after.start == pytest.approx(before.start + before.duration)
    assert list(draft.byte_events()) == []
