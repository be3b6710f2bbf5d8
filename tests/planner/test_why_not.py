"""``--why-not``: what is said of another way is what planning anew with it finds."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from plans import plan
from small_jobs import KERNELS, TYPES, small_job

from shardwright.core.errors import InputError, ShardwrightError
from shardwright.estimate.recordings import found_for
from shardwright.job.job import BatchSection, Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner import explain
from shardwright.planner.choices import Rules, exclusion
from shardwright.planner.explain.replan import forced_table
from shardwright.planner.planner import written
from shardwright.planner.problem import make_problem
from shardwright.planner.search.watch import Watch

MakeJob = Callable[..., Job]
MIB = 2**20


def _forced(job: Job, name: str, wanted: str) -> Job:
    field = "sharding_types" if wanted in TYPES else "compute_kernels"
    tables = tuple(
        msgspec.structs.replace(t, **{field: (wanted,)}) if t.name == name else t
        for t in job.tables
    )
    return msgspec.structs.replace(job, tables=tables)


def _seconds(job: Job) -> float | None:
    """Of a plan's slowest rank; None where none is found."""
    try:
        found = found_for(job, Watch())
    except ShardwrightError:
        return None
    return None if found.draft is None else found.seconds


def _problems(random_job: MakeJob, first: int) -> Any:
    """Random plans, of tables alone and, one of eight, of a DLRM."""
    for seed in itertools.count(first):
        try:
            job = random_job(seed) if seed % 8 == 7 else small_job(seed)
            found = found_for(job, Watch())
        except InputError:
            continue
        if found.draft is not None:
            yield seed, job, written(found, Watch())


@pytest.mark.parametrize(("first", "count"), [(0, 4), pytest.param(4, 40, marks=pytest.mark.slow)])
def test_a_replanned_answer_is_that_of_planning_anew_with_the_type_or_kernel_forced(
    random_job: MakeJob, first: int, count: int
) -> None:
    compared = 0
    for seed, job, made in _problems(random_job, first):
        draw = random.Random(seed)
        table = draw.choice(made.tables)
        for wanted in draw.sample((*TYPES, *KERNELS), 4):
            found = explain.why_not(made, table.name, wanted)
            if found.replanned is None:
                assert found.verdict in ("chosen", "impossible")
                continue
            assert found.replanned.seconds == _seconds(_forced(job, table.name, wanted)), seed
            compared += 1
            break
        if compared == count:
            return


NARROW = "there is nothing to cut: no width that divides 33 columns is a multiple of 4"
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "additive": ({}, "additive", "fused_uvm", "the additive costs know fused only"),
    "narrow": ({"dim": 33}, "cluster", "column_wise", NARROW),
    "sequence": ({"pooled": False}, "cluster", "grid_shard", "it pools what it looks up"),
    "packed": ({"kind": "int8"}, "cluster", "table_row_wise", "a quantised table is table_wise or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_why_not_calls_impossible_is_refused_where_nothing_else_is_allowed(case: str) -> None:
    changes, constants, wanted, why = REFUSED[case]
    table = {"name": "t", "rows": 1000, "dim": 64, "optimizer": "sgd"} | changes
    if "kind" in table:
        del table["optimizer"]
    preset = "additive" if constants == "additive" else "h100-8"
    cluster = {"preset": preset, "world_size": 4, "local_world_size": 2}
    job = parse_job(
        {"tables": [table], "cluster": cluster, "planner": {"constants": constants}},
    )
    found = explain.why_not(plan(job), "t", wanted)
    assert found.verdict == "impossible"
    field = "sharding_types" if wanted in TYPES else "compute_kernels"
    with pytest.raises(InputError) as caught:
        plan(_forced(job, "t", wanted))
    text = str(caught.value)
    where = f"tables.t.{field}: expected any that can be planned for 't', got {wanted}: {why}"
    assert text.startswith(where)
    assert text.endswith(" Name another one, or leave the key out.")
    assert why in found.reason


ON_SSD = {"preset": "local", "ssd_cap": 2**32}
KERNEL_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "packed": ({"kind": "int8"}, {"preset": "h100-8"}, "quant_uvm_caching", ""),
    "packed on a CPU": ({"kind": "int8"}, {"preset": "local"}, "quant_uvm", "quant keeps the "),
    "packed on disk": ({"kind": "int4"}, ON_SSD, "key_value", "kernels of training do not read"),
    "on disk": ({"optimizer": "sgd"}, ON_SSD, "key_value", ""),
    "no disk": ({"optimizer": "sgd"}, {"preset": "local"}, "key_value", "there is no SSD"),
}


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_of_packed_tables_and_of_disks_are_as_planning_with_them_alone(case: str) -> None:
    changes, cluster, wanted, why = KERNEL_CASES[case]
    table = {"name": "t", "rows": 100_000, "dim": 64} | changes
    job = parse_job({"tables": [table], "cluster": cluster | {"world_size": 2}})
    found = explain.why_not(plan(job), "t", wanted)
    if not why:
        made = plan(_forced(job, "t", wanted))
        assert made.tables[0].compute_kernel == wanted
        assert found.replanned is not None
        assert found.replanned.seconds == made.max_rank_seconds
        return
    assert found.verdict == "impossible"
    assert why in found.reason
    with pytest.raises(InputError, match=why):
        plan(_forced(job, "t", wanted))


def test_columns_that_cannot_be_cut_are_one_shard_with_a_note_where_costs_are_torchrecs() -> None:
    table = {"name": "t", "rows": 1000, "dim": 33, "sharding_types": ["column_wise"]}
    cluster = {"world_size": 2, "compute_device": "cuda"}
    section = {"constants": "torchrec-1.9"}
    made = plan(parse_job({"tables": [table], "cluster": cluster, "planner": section}))
    assert made.tables[0].sharding_type == "column_wise"
    note = "table t: 33 columns cannot be cut and are one shard, as in TorchRec"
    assert note in made.assumptions


@pytest.mark.parametrize("wanted", ["table_row_wise", "grid_shard", "table_column_wise"])
def test_a_type_of_hosts_that_is_named_is_followed_on_one_host(wanted: str) -> None:
    table = {"name": "t", "rows": 1000, "dim": 64, "optimizer": "sgd"}
    job = parse_job({"tables": [table], "cluster": {"preset": "h100-8", "world_size": 4}})
    found = explain.why_not(plan(job), "t", wanted)
    forced = plan(_forced(job, "t", wanted))
    assert forced.tables[0].sharding_type == wanted
    assert found.replanned is not None
    assert found.replanned.seconds == forced.max_rank_seconds


def test_a_plan_that_takes_no_time_is_no_divisor() -> None:
    idle = {"name": "t", "rows": 550_000, "dim": 2048, "pooling_factors": [0.0]}
    machine = {"world_size": 2, "compute_device": "cpu"}
    constants = {"constants": "torchrec-1.9"}
    job = {"tables": [idle | {"optimizer": "sgd"}], "cluster": machine, "planner": constants}
    made = plan(parse_job(job))
    assert made.max_rank_seconds == 0
    found = explain.why_not(made, "t", "data_parallel")
    assert found.replanned is not None
    assert found.replanned.seconds
    assert [" instead of 0 per step." in line for line in found.lines] == [False, True, True]


@pytest.fixture(scope="module")
def tight() -> Plan:
    """Two tables on two ranks, each whole on one, which is nearly full."""
    table = {"rows": 100_000, "dim": 64, "optimizer": "sgd", "compute_kernels": ["fused"]}
    cluster = {"preset": "h100-8", "world_size": 2, "hbm_cap": 42 * MIB}
    tables = [table | {"name": "a"}, table | {"name": "b", "rows": 150_000}]
    return plan(parse_job({"tables": tables, "cluster": cluster}))


def test_what_does_not_fit_with_everything_else_in_place_may_fit_planned_anew(
    tight: Plan,
) -> None:
    assert {t.sharding_type for t in tight.tables} == {"table_wise"}
    found = explain.why_not(tight, "a", "row_wise")
    assert found.verdict == "does not fit"
    assert found.reason.startswith("row_wise (fused, 2 x 50,000 x 64) with everything else in ")
    assert " does not fit: rank 1 would need " in found.reason
    assert found.replanned is not None
    assert found.replanned.seconds == _seconds(_forced(tight.job, "a", "row_wise"))
    assert found.replanned.reason.startswith("row_wise with the rest planned anew (")
    assert "fused, 2 x 50,000 x 64" in found.replanned.option


def test_that_no_plan_fits_planned_anew_is_said(tight: Plan) -> None:
    found = explain.why_not(tight, "b", "data_parallel")
    assert found.verdict == "does not fit"  # by rows, for the job allows fused only
    roomy = msgspec.structs.replace(tight.job, tables=_free(tight.job))
    made = plan(roomy)
    found = explain.why_not(made, "b", "data_parallel")
    assert found.replanned is not None
    assert found.replanned.seconds is None
    assert found.replanned.reason.endswith("has no plan that fits, as far as was searched.")


@pytest.mark.parametrize(
    ("batch", "why"), [(10, ""), (10**7, "it needs dense, and the job allows")]
)
def test_replicas_need_dense_where_a_batch_has_many_rows(tight: Plan, batch: int, why: str) -> None:
    job = msgspec.structs.replace(tight.job, batch=BatchSection(batch))
    rules = Rules(job, tight.model, make_problem(job, tight.model).context)
    assert exclusion(rules, tight.model.tables[1], "data_parallel").startswith(why)


def _free(job: Job) -> Any:
    return tuple(msgspec.structs.replace(t, compute_kernels=("fused", "dense")) for t in job.tables)


def test_a_kernel_that_changes_with_the_type_is_named(make_tables: MakeJob) -> None:
    made = plan(make_tables(5000, table={"optimizer": "sgd", "sharding_types": None}))
    kernel = made.tables[0].compute_kernel
    other = "row_wise" if kernel == "dense" else "data_parallel"
    assert f"; its kernel was {kernel})" in explain.why_not(made, "t0", other).reason


def test_a_way_that_is_faster_than_the_plan_is_called_faster_with_its_key(
    make_job: MakeJob,
) -> None:
    """The job forces a unit, and of a unit every way is tried whatever is forced."""
    places = {"shard": "sharded", "replicate": "replicated"}
    by_place = {
        place: plan(make_job(500, planner={"units": {"top": place, "bottom": place}}))
        for place in places
    }
    slow = max(by_place, key=lambda place: by_place[place].max_rank_seconds)
    (fast,) = set(places) - {slow}
    found = explain.why_not(by_place[slow], "top", places[fast])
    assert found.replanned is not None
    assert found.replanned.seconds is not None
    assert found.replanned.seconds < by_place[slow].max_rank_seconds
    assert " is faster: " in found.replanned.reason
    key = f'To have it: planner.units = {{"top" = "{fast}"}}.'
    assert found.replanned.reason.endswith(key)


def test_a_search_that_is_cut_says_where(make_tables: MakeJob) -> None:
    job = make_tables(*range(1000, 60_000, 1000), cluster={"preset": "h100-8", "world_size": 8})
    watch = Watch(hear=lambda its: its.stop() if its.best is not None else None)
    found = explain.why_not(plan(job), "t3", "row_wise", watch=watch)
    assert found.replanned is not None
    assert found.replanned.cut == "stopped"
    assert found.lines[-1].endswith("The search was stopped: a longer one may find a faster plan.")


def test_a_plan_that_is_proven_slower_names_its_bound(make_tables: MakeJob) -> None:
    made = plan(make_tables(3_000_000, 20, table={"optimizer": "sgd"}))
    found = explain.why_not(made, "t0", "data_parallel")
    assert found.replanned is not None
    assert found.replanned.bound > made.max_rank_seconds
    assert " is slower: " in found.replanned.reason
    least = re.search(r"No such plan takes less than (.*) (m?s|µs|ns)\.$", found.replanned.reason)
    assert least
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[least[2]]
    assert float(least[1]) * scale == pytest.approx(found.replanned.bound, rel=1e-2)


def test_of_a_part_the_key_is_that_of_its_table(make_job: MakeJob) -> None:
    """A job has no key for a part alone."""
    table = {"kind": "qr", "sharding_types": ["table_wise", "row_wise"]}
    made = plan(make_job(20_000, table=table))
    assert {t.name for t in made.tables} == {"t0.quotient", "t0.remainder"}
    found = explain.why_not(made, "t0.quotient", "data_parallel")
    assert found.reason.endswith("allows only table_wise, row_wise (tables.t0.sharding_types).")
    key = forced_table(made, 0, "sharding_types", "row_wise").words
    assert key == 'tables.t0.sharding_types = ["row_wise"], which is of all its parts'
