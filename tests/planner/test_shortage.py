from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import le
from typing import Any

import msgspec
import pytest
from counting import at_most

from shardwright.core.errors import EXIT_NO_PLAN, InputError, NoPlanError
from shardwright.core.model import TableSpec
from shardwright.estimate.recordings import described, plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner import shortage
from shardwright.planner.problem import make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.strategy.steps import smallest

MakeJob = Callable[..., Job]
CAP = 8 * 2**20


@pytest.fixture
def too_large(make_job: MakeJob) -> Job:
    """Rows of 19 MB on two ranks of 8 MiB; activations and the dense part on top."""
    return make_job(
        200_000, 90_000, 50, cluster={"world_size": 2, "ddr_cap": CAP}, batch={"size": 1024}
    )


def _refusal(job: Job) -> str:
    with pytest.raises(NoPlanError) as caught:
        plan(job)
    assert caught.value.exit_code == EXIT_NO_PLAN == 3
    message = str(caught.value)
    assert "\n" not in message
    return message


def _number(pattern: str, message: str) -> int:
    found = re.search(pattern.replace("#", "([0-9,]+)"), message)
    assert found is not None, message
    return int(found.group(1).replace(",", ""))


def _changed(job: Job, section: str, **values: Any) -> Job:
    part = msgspec.structs.replace(getattr(job, section), **values)
    return msgspec.structs.replace(job, **{section: part})


def test_a_plan_that_does_not_fit_names_the_fullest_rank(too_large: Job) -> None:
    message = _refusal(too_large)
    peaks = smallest(make_problem(too_large, described(too_large))).peak_bytes
    rank = _number("rank # needs most", message)
    assert peaks[rank] == max(peaks) == _number("needs most, # B", message)


def test_the_shortfall_is_the_need_less_the_capacity(too_large: Job) -> None:
    message = _refusal(too_large)
    need = _number("needs most, # B", message)
    assert _number(r"\) of # B", message) == CAP
    assert _number("# B too much", message) == need - CAP > 0


def test_the_largest_part_of_the_fullest_rank_is_named(too_large: Job) -> None:
    message = _refusal(too_large)
    assert "its largest part is tables.t0.weight" in message
    assert _number("tables.t0.weight with # B", message) == 100_000 * 64


def test_a_larger_table_of_another_rank_is_no_part_of_the_fullest() -> None:
    """The largest table is alone on rank 0; the two on rank 1 are more together."""
    table = {"dim": 16, "sharding_types": ["table_wise"], "compute_kernels": ["fused"]}
    sizes = [{"rows": size * 2**14} | table for size in (5, 3, 3)]
    message = _refusal(_tables(*sizes, cluster=_h100(2, hbm_cap=11 * MIB // 2)))
    assert "rank 1 needs most" in message
    assert "its largest part is t1" in message


def test_the_capacity_that_is_named_fits(too_large: Job) -> None:
    capacity = _number("cluster.ddr_cap of # B", _refusal(too_large))
    made = plan(_changed(too_large, "cluster", ddr_cap=capacity))
    assert max(r.peak_bytes for r in made.ranks) <= capacity


def test_the_number_of_ranks_that_is_named_fits(too_large: Job) -> None:
    ranks = _number("# ranks fit", _refusal(too_large))
    made = plan(_changed(too_large, "cluster", world_size=ranks))
    assert max(r.peak_bytes for r in made.ranks) <= CAP
    _refusal(_changed(too_large, "cluster", world_size=ranks // 2))


@pytest.mark.slow
def test_the_batch_that_is_named_fits(make_job: MakeJob) -> None:
    job = make_job(50, cluster={"world_size": 2, "ddr_cap": 2**20}, batch={"size": 8192})
    batch = _number("a batch of # per rank fits", _refusal(job))
    made = plan(_changed(job, "batch", size=batch))
    assert max(r.peak_bytes for r in made.ranks) <= 2**20


def test_a_way_out_that_does_not_fit_is_not_named(too_large: Job) -> None:
    assert "a batch of" not in _refusal(too_large)  # the weights alone are too large


def test_an_accelerator_s_own_key_is_named(make_job: MakeJob) -> None:
    cluster = {"preset": "h100-8", "world_size": 2, "hbm_cap": CAP}
    assert "cluster.hbm_cap of " in _refusal(make_job(200_000, 90_000, cluster=cluster))


@pytest.mark.slow
def test_of_a_job_beyond_every_way_out_the_capacity_alone_is_named(make_job: MakeJob) -> None:
    message = _refusal(make_job(50, cluster={"world_size": 2, "ddr_cap": 1}))
    assert message.endswith(" fits.")
    assert message.count("fit") == 2  # "found that fits", and the capacity that does


# Tables alone, and every way out that a refusal names.

GIB = 2**30
MIB = 2**20


def _tables(
    *entries: dict[str, Any], profile: str = "cluster", batch: int = 128, **sections: Any
) -> Job:
    tables = [{"name": f"t{i}"} | entry for i, entry in enumerate(entries)]
    planner = {"constants": profile} | sections.pop("planner", {})
    return parse_job({"tables": tables, "planner": planner, "batch": {"size": batch}} | sections)


def _h100(world_size: int, **more: Any) -> dict[str, Any]:
    return {"preset": "h100-8", "world_size": world_size} | more


def _ways(message: str) -> list[str]:
    found = re.search(r"What would help: (.*)\.$", message)
    return found.group(1).split("; ") if found else []


def _with_way(job: Job, way: str) -> Job:
    """The job after following one of the ways out, read from the message alone."""
    if found := re.fullmatch(r"cluster\.(\w+_cap) of ([0-9,]+) B \([^)]*\) fits", way):
        return _changed(job, "cluster", **{found.group(1): int(found.group(2).replace(",", ""))})
    if found := re.fullmatch(r"([0-9,]+) ranks fit \(\d+ more\)", way):
        return _changed(job, "cluster", world_size=int(found.group(1).replace(",", "")))
    if found := re.fullmatch(r"a batch of ([0-9,]+) per rank fits", way):
        return _changed(job, "batch", size=int(found.group(1).replace(",", "")))
    if found := re.fullmatch(r"(.*?) with compute_kernels fused_uvm fits", way):
        names = _names(found.group(1), job, lambda table: -table.nbytes)
        return _tables_changed(job, names, compute_kernels=("fused_uvm",))
    if found := re.fullmatch(
        r"without the sharding_types and min_partition of (.*) a plan fits", way
    ):
        limited = [t for t in job.tables if t.sharding_types is not None or t.min_partition]
        names = _names(found.group(1), msgspec.structs.replace(job, tables=tuple(limited)))
        return _tables_changed(job, names, sharding_types=None, min_partition=None)
    raise AssertionError(f"a way out that this test does not know: {way}")


def _names(told: str, job: Job, key: Callable[[TableSpec], int] | None = None) -> set[str]:
    """Table names as they are told: ``t0, t1 and 3 more``."""
    found = re.fullmatch(r"(.*?)(?: and (\d+) more)?", told)
    assert found is not None
    named = found.group(1).split(", ")
    order = [table.name for table in (sorted(job.tables, key=key) if key else job.tables)]
    assert named == order[: len(named)]
    return set(order[: len(named) + int(found.group(2) or 0)])


def _tables_changed(job: Job, names: set[str], **changes: Any) -> Job:
    return msgspec.structs.replace(
        job,
        tables=tuple(
            msgspec.structs.replace(t, **changes) if t.name in names else t for t in job.tables
        ),
    )


# 10,240,000 B of weights, on the accelerator alone
BIG = {"rows": 40_000, "dim": 64, "compute_kernels": ["fused", "dense"]}
REFUSED: dict[str, Job] = {
    "weights": _tables(*[BIG] * 3, cluster=_h100(2, hbm_cap=10 * MIB)),
    "whole tables": _tables(
        *[BIG | {"sharding_types": ["table_wise"]}] * 3, cluster=_h100(2, hbm_cap=15 * MIB)
    ),
    "wide columns": _tables(
        *[BIG | {"sharding_types": ["column_wise"], "min_partition": 32}] * 4,
        cluster=_h100(3, hbm_cap=14 * MIB),
    ),
    "replicas": _tables(
        *[BIG | {"sharding_types": ["data_parallel"]}] * 2, cluster=_h100(2, hbm_cap=15 * MIB)
    ),
    "batch": _tables(
        {"rows": 10, "dim": 64, "pooling_factors": [50.0]},
        cluster=_h100(2, hbm_cap=4 * MIB),
        batch=65536,
    ),
    "hosts": _tables(*[BIG] * 8, cluster=_h100(4, local_world_size=2, hbm_cap=10 * MIB)),
    "pods": _tables(*[BIG] * 8, cluster=_h100(4, local_world_size=2, pod_size=2, hbm_cap=10 * MIB)),
    "host memory": _tables(
        *[BIG | {"compute_kernels": ["fused_uvm"]}] * 3,
        cluster=_h100(2, ddr_cap=10 * MIB),
    ),
    "the other memory": _tables(  # host memory lacks most, and more of it is no way out
        {"rows": 209_887, "dim": 8, "pooling_factors": [1.9], "optimizer": "adam"},
        {"rows": 11_826, "dim": 16, "pooling_factors": [16.9], "optimizer": "adam"},
        {"rows": 15_731, "dim": 20, "pooling_factors": [15.9], "optimizer": "adam"},
        cluster=_h100(8, hbm_cap=545_733, ddr_cap=873_173),
        batch=512,
    ),
    "kernels": _tables(
        *[BIG | {"compute_kernels": ["fused"]}] * 12, cluster=_h100(2, hbm_cap=15 * MIB)
    ),
    "processor": _tables(
        *[BIG] * 3, cluster={"preset": "cpu-host", "world_size": 2, "ddr_cap": 10 * MIB}
    ),
    "percentage": _tables(
        *[BIG] * 3,
        cluster=_h100(2, hbm_cap=20 * MIB),
        planner={"reservation": {"kind": "percentage", "percentage": 0.5}},
    ),
    "absolute": _tables(
        *[BIG] * 3,
        cluster=_h100(2, hbm_cap=20 * MIB),
        planner={"reservation": {"kind": "absolute", "nbytes": 10 * MIB}},
    ),
    "torchrec": _tables(
        *[BIG] * 3,
        profile="torchrec-1.9",
        cluster={"world_size": 2, "hbm_cap": 16 * MIB},
        planner={"options": "torchrec", "reservation": {"percentage": 0.25}},
    ),
    "additive": _tables(*[BIG] * 3, profile="additive", cluster={"hbm_cap": 7 * MIB}),
}


@pytest.fixture(scope="module", params=list(REFUSED))
def refused(request: pytest.FixtureRequest) -> tuple[Job, str]:
    """A job of tables alone that does not fit, and why."""
    job = REFUSED[request.param]
    return job, _refusal(job)


def _fitting(job: Job) -> Plan:
    made = plan(job)
    left = made.reserved
    for totals in made.ranks:
        assert totals.hbm_bytes <= left.hbm_left
        assert totals.ddr_bytes <= left.ddr_left
        assert totals.ssd_bytes <= left.ssd_left
    return made


def test_a_refusal_of_tables_names_rank_need_capacity_and_shortfall(
    refused: tuple[Job, str],
) -> None:
    _, message = refused
    known = r"( of TorchRec's options)?"
    start = rf"no plan({known} can fit| found that fits): rank \d+ needs most, "
    assert re.match(start, message)
    need, capacity = (
        _number("needs most, # B", message),
        _number(r"needs most, [^)]*\) of # B", message),
    )
    assert _number(", # B too much", message) == need - capacity > 0
    assert 0 < _number(r"its largest part is t\d+ with # B", message) <= need


@pytest.mark.slow_after(1)
def test_every_way_out_of_tables_is_one(refused: tuple[Job, str]) -> None:
    job, message = refused
    ways = _ways(message)
    assert ways, message
    for way in ways:
        _fitting(_with_way(job, way))


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("weights", ["cluster.hbm_cap", "ranks fit", "fused_uvm"]),
        ("whole tables", ["cluster.hbm_cap", "ranks fit", "fused_uvm", "without the sharding"]),
        ("wide columns", ["cluster.hbm_cap", "ranks fit", "without the sharding_types"]),
        ("replicas", ["cluster.hbm_cap", "without the sharding_types"]),
        ("batch", ["cluster.hbm_cap", "a batch of"]),
        ("hosts", ["cluster.hbm_cap", "ranks fit", "fused_uvm"]),
        ("host memory", ["cluster.ddr_cap", "ranks fit"]),
        ("the other memory", ["cluster.hbm_cap"]),
        ("processor", ["cluster.ddr_cap", "ranks fit"]),
        ("percentage", ["cluster.hbm_cap", "ranks fit"]),
        ("additive", ["cluster.hbm_cap", "ranks fit"]),
    ],
)
def test_a_way_out_is_named_where_there_is_one(name: str, ways: list[str]) -> None:
    message = _refusal(REFUSED[name])
    for way in ways:
        assert way in message


def test_every_way_out_of_a_model_is_one(too_large: Job) -> None:
    ways = _ways(_refusal(too_large))
    assert ways
    for way in ways:
        plan(_with_way(too_large, way))


@pytest.mark.parametrize("start", [0, 3, 8])
def test_the_smallest_number_that_fits_is_found_wherever_it_is(start: int) -> None:
    for least in range(2, 40):
        assert shortage._first(partial(le, least), 2, 64, Watch(), start) == least


def test_a_few_ranks_less_than_named_do_not_fit() -> None:
    job = REFUSED["hosts"]
    ranks = _number("# ranks fit", _refusal(job))
    assert ranks % 2 == 0  # whole hosts
    _refusal(_changed(job, "cluster", world_size=ranks - 2))


def test_a_capacity_of_a_byte_less_than_named_may_not_do() -> None:
    job = REFUSED["additive"]
    capacity = _number("cluster.hbm_cap of # B", _refusal(job))
    assert capacity == -(-3 * 40_000 * 64 * 4 // 4)
    _refusal(_changed(job, "cluster", hbm_cap=capacity - 1))


def test_the_reservation_is_shown_where_it_takes_memory() -> None:
    message = _refusal(REFUSED["percentage"])
    left, whole = 10 * MIB, 20 * MIB
    assert f" of {left:,} B (10.00 MiB) left of {whole:,} B (20.00 MiB) by the " in message
    assert "by the reservation" not in _refusal(REFUSED["weights"])


def test_a_reservation_of_accelerator_memory_is_not_one_of_host_memory() -> None:
    job = _tables(
        *[BIG | {"compute_kernels": ["fused_uvm"]}] * 3,
        cluster=_h100(2, ddr_cap=10 * MIB),
        planner={"reservation": {"kind": "percentage", "percentage": 0.5}},
    )
    message = _refusal(job)
    assert f"of {10 * MIB:,} B (10.00 MiB), " in message
    assert "by the reservation" not in message


@pytest.mark.parametrize("profile", ["cluster", "torchrec-1.9"])
def test_a_reservation_that_leaves_nothing_is_named(profile: str) -> None:
    cluster = _h100(2) if profile == "cluster" else {"world_size": 2}
    reservation = {"kind": "heuristic", "dense_bytes": 100 * GIB}
    message = _refusal(
        _tables(BIG, profile=profile, cluster=cluster, planner={"reservation": reservation})
    )
    assert message.startswith("planner.reservation: nothing is left for tables on rank 0: of ")
    assert f"{600 * GIB:,} B (600.00 GiB) for dense parameters" in message
    assert "dense_bytes or multiplier" in message


def test_an_absolute_reservation_of_everything_leaves_nothing() -> None:
    reservation = {"kind": "absolute", "nbytes": 200 * GIB}
    job = _tables(BIG, cluster=_h100(2), planner={"reservation": reservation})
    message = _refusal(job)
    assert "of 0 B left of 80,000,000,000 B (74.51 GiB) by the reservation" in message
    for way in _ways(message):
        _fitting(_with_way(job, way))


def test_three_whole_tables_larger_than_a_rank_are_shown_as_they_are() -> None:
    """TorchRec's planner shows a requirement below what there is, and one shard's bytes."""
    table = {"rows": 30_000_000, "dim": 128, "sharding_types": ["table_wise"]}
    job = _tables(
        *[table] * 3,
        profile="torchrec-1.9",
        cluster={"world_size": 8, "hbm_cap": 10 * GIB, "ddr_cap": 16 * GIB},
        planner={"reservation": {"kind": "none"}},
    )
    limited = _tables_changed(job, {"t0", "t1", "t2"}, compute_kernels=("fused",))
    message = _refusal(limited)
    assert message.startswith("no plan can fit: ")
    assert _number("needs most, # B", message) > 30_000_000 * 512 > _number(r"\) of # B", message)
    assert "its largest part is t" in message
    assert "without the sharding_types and min_partition of t0, t1, t2 a plan fits" in message
    assert "ranks fit" not in message  # no number of ranks makes a shard smaller
    for way in _ways(message):
        _fitting(_with_way(limited, way))


def test_the_bytes_that_four_huge_tables_on_eight_ranks_lack_are_named() -> None:
    table = {"rows": 2_000_000_000, "dim": 128, "compute_kernels": ["fused"]}
    job = _tables(*[table] * 4, profile="torchrec-1.9", cluster={"world_size": 8})
    message = _refusal(job)
    assert message.startswith("no plan can fit: ")
    assert _number("needs most, # B", message) >= 4 * 2_000_000_000 * 512 // 8
    assert "object at 0x" not in message
    for way in _ways(message):
        _fitting(_with_way(job, way))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine finds the same ways out as an idle one."""
    for limit in ("SECONDS_FOR_LEAST", "SECONDS_FOR_A_WAY", "SECONDS_FOR_A_TRY"):
        monkeypatch.setattr(shortage, limit, 100 * getattr(shortage, limit))


@pytest.mark.slow
def test_a_shortage_of_many_tables_on_many_ranks_is_shown_without_trying_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    tables = [
        {"rows": 10_000_000 + 1000 * i, "dim": 128, "pooling_factors": [1.0 + i % 9]}
        for i in range(120)
    ]
    job = _tables(*tables, cluster=_h100(24, hbm_cap=8 * GIB, ddr_cap=8 * GIB))
    with at_most(100_000_000):
        message = _refusal(job)
    assert "rank " in message


def test_a_table_that_no_rule_leaves_a_rank_has_no_plan() -> None:
    constraints = {"apart": [["t0", "t1"]], "ranks": {"t0": [1], "t1": [1]}}
    job = _tables(BIG, BIG, cluster=_h100(2), planner={"constraints": constraints})
    with pytest.raises((NoPlanError, InputError)) as caught:
        plan(job)
    assert "\n" not in str(caught.value)
    assert "t0" in str(caught.value)
    assert "t1" in str(caught.value)


def test_proposers_that_propose_nothing_are_blamed_and_no_memory() -> None:
    tables = [{"rows": 1000 * (i + 1), "dim": 64} for i in range(12)]
    planner = {"search": "proposers", "options": "torchrec", "proposers": [{"kind": "grid"}]}
    cluster = {"compute_device": "cuda", "world_size": 16, "local_world_size": 8}
    planner |= {"constants": "torchrec-1.9", "reservation": {"kind": "none"}}
    entries = [{"name": f"t{i}"} | table for i, table in enumerate(tables)]
    job = parse_job({"tables": entries, "cluster": cluster, "planner": planner})
    message = _refusal(job)
    assert "grid: about 10^" in message
    assert "'bounded'" in message
    assert "too much" not in message


def test_the_number_of_ranks_is_found_in_few_tries_however_many_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    fits = shortage._fits

    def counted(model_of: Any, job: Job, watch: Any) -> bool:
        tried.append(job.cluster.world_size or 0)
        return fits(model_of, job, watch)

    monkeypatch.setattr(shortage, "_fits", counted)
    job = _tables(*[BIG] * 60, cluster=_h100(4, local_world_size=2, hbm_cap=12 * MIB))
    ranks = _number("# ranks fit", _refusal(job))
    others = [number for number in tried if number not in (0, 4)]
    assert 50 <= ranks <= others[0]
    assert len(others) <= 8


def test_two_memories_that_are_both_short_are_proven_short_and_one_of_them_is_named() -> None:
    """What is enough of one memory is named though the other one stays as short as it is."""
    free = {"rows": 40_000, "dim": 64}
    job = _tables(*[free] * 12, cluster=_h100(2, hbm_cap=30 * MIB, ddr_cap=10 * MIB))
    message = _refusal(job)
    assert message.startswith("no plan can fit: ")
    assert "cluster.hbm_cap of " in message
    assert " ranks fit " in message
    for way in _ways(message):
        _fitting(_with_way(job, way))


def test_where_the_reservation_takes_all_the_memory_named_is_its_bytes_and_what_tables_need() -> (
    None
):
    reservation = {"kind": "absolute", "nbytes": 16 * GIB}
    job = _tables(
        *[BIG] * 4, cluster=_h100(2, hbm_cap=2 * GIB), planner={"reservation": reservation}
    )
    message = _refusal(job)
    assert "of 0 B left of 2,147,483,648 B (2.00 GiB) by the reservation" in message
    wanted = _number("cluster.hbm_cap of # B", message)
    assert wanted == _number("needs most, # B", message) + 16 * GIB
    _fitting(_changed(job, "cluster", hbm_cap=wanted))


def test_where_no_way_out_was_found_it_is_said_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("SECONDS_FOR_A_WAY", "SECONDS_FOR_A_TRY"):
        monkeypatch.setattr(shortage, limit, 0.0)
    message = _refusal(REFUSED["hosts"])
    assert "No way out was found. Tried: cluster.hbm_cap of " in message
    assert re.search(r"; \d+ ranks, \d+ ranks \(cut at 0 s\); a batch of 1", message)


def test_a_shortage_is_heard_as_its_search_was() -> None:
    heard: list[float] = []
    with pytest.raises(NoPlanError):
        plan(REFUSED["hosts"], lambda watch: heard.append(watch.elapsed))
    assert heard == sorted(heard)
    assert len(heard) > 1
