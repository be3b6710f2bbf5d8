from __future__ import annotations

import math
import statistics as plain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import plan

from shardwright.core.cluster import TIERS
from shardwright.core.option import ShardRun
from shardwright.estimate.recordings import described
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import (
    Plan,
    RankTotals,
    Reserved,
    ShardPlan,
    TablePlan,
    read_plan,
    write_plan,
)
from shardwright.planner.explain import draft_of
from shardwright.planner.planner import bound_of
from shardwright.planner.problem import make_problem
from shardwright.planner.statistics import memory_prices, statistics
from shardwright.planner.statistics.memory import set_aside
from shardwright.planner.statistics.ranks import each_rank, medians, parts_of

MIB, GIB = 2**20, 2**30


def _tables(constants: str = "torchrec-1.9", **sections: Any) -> Job:
    """Lookups of several kinds on two hosts."""
    return parse_job(
        {
            "tables": [
                {"name": "whole", "rows": 9000, "dim": 64, "sharding_types": ["table_wise"]},
                {"name": "rows", "rows": 9001, "dim": 64, "sharding_types": ["row_wise"]},
                {"name": "host", "rows": 9001, "dim": 64, "sharding_types": ["table_row_wise"]},
                {"name": "columns", "rows": 90, "dim": 64, "sharding_types": ["column_wise"]},
                {"name": "copies", "rows": 90, "dim": 64, "sharding_types": ["data_parallel"]},
                {"name": "list", "rows": 900, "dim": 64, "pooled": False, "pooling_factors": [3.0]},
                {
                    "name": "bags",
                    "rows": 900,
                    "dim": 64,
                    "module_weighted": True,
                    "pooling_factors": [20.0, 0.5],
                    "num_poolings": [1.0, 2.0],
                },
            ],
            "cluster": {"world_size": 4, "local_world_size": 2, "compute_device": "cuda"},
            "batch": {"size": 48},
            "planner": {"constants": constants},
        }
        | sections
    )


def _dlrm() -> Job:
    tables = [{"name": f"t{i}", "rows": 10**i, "dim": 16} for i in range(2, 6)]
    return parse_job(
        {
            "tables": tables,
            "model": {"bottom": [8, 16], "top": [16, 1]},
            "cluster": {"world_size": 3, "ddr_cap": "12 MiB"},
            "train": {"optimizer": "adam"},
        }
    )


JOBS = {
    "torchrec": _tables(),
    "our costs": _tables("cluster"),
    "a dlrm": _dlrm(),
    "slow kernels": _tables(
        tables=[
            {"name": kernel, "rows": 5000, "dim": 64, "compute_kernels": [kernel]}
            | {"cache": {"load_factor": 0.3}, "sharding_types": ["row_wise", "table_wise"]}
            for kernel in ("fused", "fused_uvm", "fused_uvm_caching", "key_value")
        ],
    ),
}


@pytest.fixture(scope="module", params=JOBS)
def made(request: pytest.FixtureRequest) -> Plan:
    return plan(JOBS[request.param])


def _shard(rank: int, count: int, compute: float, comms: float, hbm: int) -> ShardPlan:
    run = ShardRun(10, 4, count)
    seconds = {"fwd_compute": compute, "fwd_comms": comms, "bwd_compute": 2 * compute}
    return ShardPlan(rank, run, {**seconds, "bwd_comms": comms}, {"weight": hbm}, {}, {})


def _table(name: str, kind: Any, *shards: ShardPlan) -> TablePlan:
    return TablePlan(name, name, 10, 4, kind, "fused", "sgd", shards)


def _by_hand() -> Plan:
    """Four ranks of 100 MiB: a table on rank 1, one on rank 3, one on all ranks.

    Seconds of ranks are 4, 10, 4, 7 and their bytes 1, 61, 1, 60.5 MiB.
    """
    names = [{"name": name, "rows": 10, "dim": 4} for name in ("a", "b", "c")]
    cluster = {"world_size": 4, "local_world_size": 4, "compute_device": "cuda"}
    base = plan(
        parse_job({"tables": names, "cluster": cluster, "planner": {"constants": "torchrec-1.9"}})
    )
    tables = (
        _table("a", "table_wise", _shard(1, 1, compute=1.0, comms=1.5, hbm=60 * MIB)),
        _table("b", "table_wise", _shard(3, 1, compute=0.5, comms=0.75, hbm=59 * MIB + MIB // 2)),
        _table("c", "row_wise", _shard(0, 4, compute=1.0, comms=0.5, hbm=MIB)),
    )
    totals = []
    for rank in range(4):
        shards = [s for t in tables for s in t.shards if rank in s.ranks]
        parts = {part: sum(s.seconds[part] for s in shards) for part in shards[0].seconds}
        hbm = sum(s.hbm["weight"] for s in shards)
        seconds = sum(parts.values())
        totals.append(RankTotals(rank, hbm, "step", {"weight": hbm}, {}, seconds, parts, hbm, 0))
    return msgspec.structs.replace(
        base,
        cluster=msgspec.structs.replace(base.cluster, hbm_cap=100 * MIB),
        tables=tables,
        ranks=tuple(totals),
        max_rank_seconds=10.0,
        reserved=Reserved(
            "heuristic", 70 * MIB, 0, 0, dense=(10 * MIB, 0), inputs=(5 * MIB + 1, 0)
        ),
    )


def test_ranks_of_a_plan_made_by_hand() -> None:
    ranks = statistics(_by_hand()).ranks
    assert [rank.seconds for rank in ranks] == [4.0, 10.0, 4.0, 7.0]
    assert [rank.idle_seconds for rank in ranks] == [6.0, 0.0, 6.0, 3.0]
    assert [rank.hbm_bytes / MIB for rank in ranks] == [1, 61, 1, 60.5]
    assert [rank.hbm_share for rank in ranks] == [1 / 70, 61 / 70, 1 / 70, 60.5 / 70]
    assert [rank.shards for rank in ranks] == [
        {"row_wise": 1},
        {"table_wise": 1, "row_wise": 1},
        {"row_wise": 1},
        {"table_wise": 1, "row_wise": 1},
    ]


def test_waiting_names_the_slowest_rank_and_where_it_loses() -> None:
    told = statistics(_by_hand()).waiting
    assert (told.slowest, told.longest) == (1, 0)
    assert (told.mean_seconds, told.longest_seconds) == (3.75, 6.0)
    # compute of rank 1 is 2 + 4, communication 2 + 2; the means are 1.375, 2.75, 1.0625, 1.0625
    assert (told.part, told.part_seconds, told.part_mean) == ("bwd_compute", 4.0, 2.75)


def test_the_slowest_and_the_fullest_rank_are_shown_with_what_they_hold() -> None:
    seconds, nbytes = statistics(_by_hand()).bottlenecks
    assert (seconds.of, seconds.rank, seconds.ranks, seconds.total) == ("seconds", 1, (1,), 10.0)
    assert [(t.name, t.amount) for t in seconds.tables] == [("a", 6.0), ("c", 4.0)]
    assert (nbytes.of, nbytes.rank, nbytes.total) == ("hbm_bytes", 1, 61 * MIB)
    assert [(t.name, t.amount) for t in nbytes.tables] == [("a", 60 * MIB), ("c", MIB)]


def test_the_critical_path_waits_for_each_type_and_for_all_compute() -> None:
    path = statistics(_by_hand()).critical_path
    assert {term.name: (term.seconds, term.rank) for term in path.terms} == {
        "ebc table_wise fwd_comms": (1.5, 1),
        "ebc table_wise bwd_comms": (1.5, 1),
        "ebc row_wise fwd_comms": (0.5, 0),
        "ebc row_wise bwd_comms": (0.5, 0),
        "fwd_compute": (2.0, 1),
        "bwd_compute": (4.0, 1),
    }
    assert (path.communication, path.compute, path.seconds) == (4.0, 6.0, 10.0)


def test_the_ledger_of_a_plan_made_by_hand_leaves_no_byte_out() -> None:
    (ledger,) = statistics(_by_hand()).ledgers
    assert (ledger.tier, ledger.rank, ledger.capacity) == ("hbm", 1, 100 * MIB)
    assert [(line.what, line.nbytes) for line in ledger.lines] == [
        ("set_aside", 15 * MIB - 1),
        ("dense", 10 * MIB),
        ("inputs", 5 * MIB + 1),
        ("weight", 61 * MIB),
        ("free", 9 * MIB),
    ]


def test_peak_tiers_have_true_rank_numbers() -> None:
    """Ranks 1 and 3 are half a MiB apart, ranks 0 and 2 equal: indices into what is left of a list
    would be told as 0 and 1 in the second tier."""
    tiers = statistics(_by_hand()).peak_tiers
    assert [(tier.nbytes, tier.ranks) for tier in tiers] == [(61 * MIB, (1, 3)), (MIB, (0, 2))]


def test_only_the_five_fullest_tiers_are_shown() -> None:
    by_hand = _by_hand()
    ranks = tuple(
        msgspec.structs.replace(by_hand.ranks[0], rank=r, hbm_bytes=(r * 7 % 16) * 3 * MIB)
        for r in range(16)
    )
    cluster = msgspec.structs.replace(by_hand.cluster, world_size=16)
    tiers = statistics(msgspec.structs.replace(by_hand, ranks=ranks, cluster=cluster)).peak_tiers
    order = sorted(range(16), key=lambda r: -(r * 7 % 16))
    assert [tier.ranks for tier in tiers] == [(rank,) for rank in order[:5]]


def test_the_spread_of_a_plan_made_by_hand() -> None:
    seconds, hbm = statistics(_by_hand()).spreads
    assert (seconds.largest, seconds.largest_ranks) == (10.0, (1,))
    assert (seconds.smallest, seconds.smallest_ranks) == (4.0, (0, 2))
    assert (seconds.mean, seconds.low_median, seconds.high_median) == (6.25, 4.0, 7.0)
    assert (hbm.largest, hbm.smallest_ranks) == (61 * MIB, (0, 2))
    assert statistics(_by_hand()).excess == 10.0 / 6.25 - 1


def test_ids_and_rows_of_whole_tables_are_what_torchrec_prints() -> None:
    """Four tables on each of two of 8 ranks, 2048 samples, 128 columns: 0.5 MB in, 32 MB out."""
    tables = [
        {"name": f"c{i}", "rows": 1000, "dim": 128, "sharding_types": ["table_wise"]}
        for i in range(32)
    ]
    cluster = {"world_size": 8, "local_world_size": 8, "compute_device": "cuda"}
    made = plan(_tables(tables=tables, cluster=cluster, batch={"size": 2048}))
    for rank in statistics(made).ranks:
        assert rank.shards == {"table_wise": 4}
        assert (rank.input_bytes, rank.output_bytes) == (MIB // 2, 32 * MIB)


def test_ids_and_rows_by_the_rules_of_torchrec() -> None:
    """Ids of 8 B; partial sums of a table cut by rows count in full on every rank."""
    made = plan(_tables())
    ids, rows = [0] * 4, [0] * 4
    for table, spec in zip(made.tables, made.job.tables, strict=True):
        poolings = spec.num_poolings or (1.0,) * len(spec.pooling_factors)
        asked = sum(f * p * 48 for f, p in zip(spec.pooling_factors, poolings, strict=True))
        given = asked
        if spec.pooled:
            given = sum(
                min(1.0, f) * p * 48 for f, p in zip(spec.pooling_factors, poolings, strict=True)
            )
        for rank, (_, columns) in zip(table.ranks, table.shard_sizes, strict=True):
            parts = {"row_wise": 4, "table_row_wise": 2, "grid_shard": 2}.get(
                table.sharding_type, 1
            )
            world = 1 if table.sharding_type == "data_parallel" else 4
            ids[rank] += math.ceil(asked / parts * world * 8)
            back = given if spec.pooled else given / parts
            rows[rank] += math.ceil(back * world * columns * 4)
    found = statistics(made).ranks
    assert [rank.input_bytes for rank in found] == ids
    assert [rank.output_bytes for rank in found] == rows


def test_sums_over_shards_are_what_the_plan_has_of_each_rank(made: Plan) -> None:
    found = statistics(made)
    for told, totals in zip(found.ranks, made.ranks, strict=True):
        assert told.seconds == totals.seconds == pytest.approx(math.fsum(told.parts.values()))
        assert (told.hbm_bytes, told.ddr_bytes) == (totals.hbm_bytes, totals.ddr_bytes)
        if not made.units:
            here = [s for t in made.tables for s in t.shards if told.rank in s.ranks]
            sums = [sum(s.storage[tier] for s in here) for tier in range(3)]
            assert sums == [told.hbm_bytes, told.ddr_bytes, told.ssd_bytes]
        assert sum(told.shards.values()) == sum(
            told.rank == rank for table in made.tables for rank in table.ranks
        )


def test_tables_are_the_sums_of_their_shards(made: Plan) -> None:
    for told, table in zip(statistics(made).tables, made.tables, strict=True):
        assert told.seconds == pytest.approx(sum(table.seconds))
        assert told.seconds == pytest.approx(sum(told.parts.values()))
        assert told.hbm_bytes + told.ddr_bytes + told.ssd_bytes == sum(table.nbytes)
        assert told.ranks == table.ranks
        assert told.columns == min(columns for _, columns in table.shard_sizes)


def test_kernels_add_up_to_the_tables_and_by_kind_to_the_memories(made: Plan) -> None:
    found = statistics(made)
    for told in found.kernels:
        own = [table for table in found.tables if table.compute_kernel == told.kernel]
        assert told.tables == len(own)
        for tier in TIERS:
            name = f"{tier}_bytes"
            assert getattr(told, name) == sum(getattr(table, name) for table in own)
        by_kind = told.weight_bytes + told.optimizer_bytes + told.other_bytes
        assert by_kind == told.hbm_bytes + told.ddr_bytes + told.ssd_bytes
    assert sum(told.tables for told in found.kernels) == len(made.tables)
    limited = sum(table.compute_kernels is not None for table in made.job.tables)
    assert sum(told.named for told in found.kernels) == limited


def test_lookups_are_shown_as_the_job_has_them() -> None:
    tables = {table.name: table for table in statistics(plan(_tables())).tables}
    bags = tables["bags"]
    assert (bags.features, bags.pooling_factor, bags.num_poolings) == (2, 20.5, 3.0)
    assert (bags.ids, bags.pooled, bags.weighted) == ((20 + 1) * 48, True, True)
    assert (tables["list"].pooled, tables["list"].ids) == (False, 144)
    assert tables["whole"].load_factor is None
    assert (tables["bags"].rows, tables["bags"].dim) == (900, 64)


@pytest.mark.parametrize(
    ("cache", "estimator", "share"),
    [({"load_factor": 0.3}, {}, 0.3), (None, {"cache_load_factor": 0.4}, 0.4), (None, {}, 0.2)],
)
def test_the_cached_share_is_the_tables_the_jobs_or_the_constants(
    cache: Any, estimator: dict[str, float], share: float
) -> None:
    table = {"name": "t", "rows": 900, "dim": 8, "compute_kernels": ["fused_uvm_caching"]}
    table |= {"sharding_types": ["table_wise"]} | ({"cache": cache} if cache else {})
    planner = {"constants": "torchrec-1.9", "estimator": estimator}
    (told,) = statistics(plan(_tables(tables=[table], planner=planner))).tables
    assert told.load_factor == share


def test_measures_of_unevenness_by_their_definitions(made: Plan) -> None:
    found = {told.of: told for told in statistics(made).unevenness}
    k = made.world_size
    for name, told in found.items():
        values = [getattr(totals, name) for totals in made.ranks]
        shares = [value / sum(values) for value in values]
        away = [abs(share - 1 / k) for share in shares]
        assert told.largest_deviation == pytest.approx(max(away), abs=1e-12)
        assert told.total_distance == pytest.approx(sum(away), abs=1e-12)
        most = ((k - 1) / k) ** 2 * k + (k - 1) / k
        chi = sum(a * a * k for a in away) / most
        assert told.chi == pytest.approx(chi, abs=1e-12)
        entropy = sum(p * math.log(k * p) for p in shares if p) / math.log(k)
        assert told.relative_entropy == pytest.approx(entropy, abs=1e-12)
        assert (told.highest_deviation, told.highest_distance) == ((k - 1) / k, 2 * (k - 1) / k)
    used = {"seconds"} | {f"{t}_bytes" for t in TIERS if any(_filled(made, t))}
    assert set(found) == used


def _filled(made: Plan, tier: str) -> list[int]:
    return [getattr(totals, f"{tier}_bytes") for totals in made.ranks]


def test_a_rank_with_everything_is_as_uneven_as_can_be() -> None:
    by_hand = _by_hand()
    ranks = tuple(
        msgspec.structs.replace(totals, hbm_bytes=totals.rank // 3, seconds=1.0)
        for totals in by_hand.ranks
    )
    seconds, hbm = statistics(msgspec.structs.replace(by_hand, ranks=ranks)).unevenness
    assert (hbm.largest_deviation, hbm.total_distance) == (0.75, 1.5)
    assert (hbm.chi, hbm.relative_entropy) == (1.0, 1.0)
    assert (hbm.highest_deviation, hbm.highest_distance) == (0.75, 1.5)
    assert (seconds.largest_deviation, seconds.chi, seconds.relative_entropy) == (0, 0, 0)


def test_mean_and_medians_lie_between_least_and_most(made: Plan) -> None:
    for told in statistics(made).spreads:
        values = [getattr(totals, told.of) for totals in made.ranks]
        assert told.smallest == min(values) <= told.low_median <= told.high_median <= max(values)
        assert told.mean == pytest.approx(plain.fmean(values))
        for rank in told.largest_ranks:
            assert values[rank] == pytest.approx(told.largest)


def test_parts_have_their_slowest_ranks_and_means(made: Plan) -> None:
    found = statistics(made)
    for told in found.parts:
        values = [totals.parts.get(told.part, 0.0) for totals in made.ranks]
        assert (told.seconds, told.mean) == (max(values), pytest.approx(plain.fmean(values)))
        assert [values[rank] for rank in told.ranks] == pytest.approx(
            [max(values)] * len(told.ranks)
        )
    assert found.sum_of_maxima >= made.max_rank_seconds * (1 - 1e-12)


def test_the_critical_path_is_that_of_the_costs(made: Plan) -> None:
    found = statistics(made).critical_path
    if made.job.planner.constants == "torchrec-1.9":
        draft = draft_of(made)
        for term in found.terms:
            if not term.communication:
                slowest = max(parts.get(term.name, 0.0) for parts in draft.seconds)
                assert term.seconds == pytest.approx(slowest)
        assert {term.communication for term in found.terms} == {True, False}
    else:
        names = {part for totals in made.ranks for part in totals.parts}
        slowest = [max(totals.parts.get(part, 0.0) for totals in made.ranks) for part in names]
        assert found.seconds == pytest.approx(sum(slowest))
    for term in found.terms:
        assert 0 <= term.rank < made.world_size


RESERVATIONS: dict[str, dict[str, Any]] = {
    "the profile's": {},
    "none": {"kind": "none"},
    "a share": {"kind": "percentage", "percentage": 0.3},
    "an amount": {"kind": "absolute", "nbytes": 12_345_678},
    "heuristic": {"kind": "heuristic", "dense_bytes": 1_234_567, "multiplier": 5.5},
    "inference": {"kind": "inference", "dense_bytes": 1_234_567},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constants", ["torchrec-1.9", "cluster"])
@pytest.mark.parametrize("case", RESERVATIONS)
def test_a_ledger_sums_to_the_capacity_whatever_is_reserved(case: str, constants: str) -> None:
    planner = {"constants": constants, "reservation": RESERVATIONS[case]}
    made = plan(_tables(planner=planner))
    for ledger in statistics(made).ledgers:
        lines = {line.what: line.nbytes for line in ledger.lines}
        assert sum(lines.values()) == ledger.capacity == getattr(made.cluster, f"{ledger.tier}_cap")
        assert min(lines.values()) > 0
        aside = sum(lines.get(what, 0) for what in ("set_aside", "dense", "inputs"))
        assert ledger.capacity - aside == getattr(made.reserved, f"{ledger.tier}_left")
        assert lines["free"] == ledger.capacity - aside - max(_filled(made, ledger.tier))
    if case == "heuristic":
        assert lines["dense"] == round(5.5 * 1_234_567)


def test_every_ledger_is_of_the_fullest_rank(made: Plan) -> None:
    found = statistics(made)
    assert [ledger.tier for ledger in found.ledgers] == [t for t in TIERS if any(_filled(made, t))]
    for ledger in found.ledgers:
        nbytes = _filled(made, ledger.tier)
        assert nbytes[ledger.rank] == max(nbytes)


def test_tiers_are_within_a_mebibyte_and_name_no_rank_twice(made: Plan) -> None:
    found = statistics(made)
    nbytes = _filled(made, found.decisive)
    told = [rank for tier in found.peak_tiers for rank in tier.ranks]
    assert len(told) == len(set(told))
    for tier in found.peak_tiers:
        assert max(nbytes[rank] for rank in tier.ranks) == tier.nbytes
        assert all(tier.nbytes - nbytes[rank] <= MIB for rank in tier.ranks)
    below = found.peak_tiers[-1].nbytes
    assert all(nbytes[rank] <= below for rank in range(made.world_size) if rank not in told)


def test_statistics_follow_from_the_plan_alone(made: Plan, tmp_path: Path) -> None:
    write_plan(made, tmp_path / "plan.json")
    read = statistics(read_plan(tmp_path / "plan.json"))
    assert msgspec.to_builtins(read) == msgspec.to_builtins(statistics(made))
    slower = tuple(msgspec.structs.replace(t, seconds=t.seconds * 2) for t in made.ranks)
    edited = msgspec.structs.replace(made, ranks=slower, max_rank_seconds=2 * made.max_rank_seconds)
    for twice, once in zip(statistics(edited).ranks, statistics(made).ranks, strict=True):
        assert twice.seconds == 2 * once.seconds


def test_one_rank_is_even_and_waits_for_nobody() -> None:
    cluster = {"world_size": 1, "local_world_size": 1, "compute_device": "cuda"}
    found = statistics(plan(_tables(cluster=cluster, tables=[{"name": "t", "rows": 9, "dim": 8}])))
    assert (found.waiting.part, found.waiting.mean_seconds) == ("", 0.0)
    for told in found.unevenness:
        assert (told.largest_deviation, told.chi, told.relative_entropy) == (0, 0, 0)


def _short(hbm: int) -> Job:
    """Eight tables of 440 MiB in all on two ranks."""
    tables = [{"name": f"t{i}", "rows": 50_000 * (i + 1), "dim": 64} for i in range(8)]
    cluster = {"preset": "h100-8", "world_size": 2, "hbm_cap": hbm}
    return _tables("cluster", tables=tables, cluster=cluster)


def test_memory_that_is_not_short_has_no_price(made: Plan) -> None:
    prices = memory_prices(made)
    there = [t for t, size in zip(TIERS, made.cluster.capacity, strict=True) if size]
    assert [price.tier for price in prices] == there
    assert {(price.bound_falls, price.price) for price in prices} == {(0.0, 0.0)}


def _relaxed(made: Plan) -> float:
    """The bound of shards that are spread at will; a search may have proved more."""
    job = made.job
    return bound_of(make_problem(job, described(job), slow=made.search.slow_kernels))


def test_one_more_gib_lowers_the_bound_by_what_is_shown() -> None:
    short = plan(_short(150 * MIB))
    more = plan(_short(150 * MIB + GIB))
    told = {price.tier: price for price in memory_prices(short)}
    fall = _relaxed(short) - _relaxed(more)
    assert fall > 0
    assert told["hbm"].bound_falls == pytest.approx(fall, rel=1e-6)
    assert told["hbm"].price >= told["hbm"].bound_falls
    assert told["ddr"].bound_falls == 0


def test_waiting_names_the_part_in_which_ranks_differ_not_the_largest() -> None:
    job = parse_job(
        {
            "tables": [{"name": "a", "rows": 500, "dim": 8, "sharding_types": ["table_wise"]}],
            "model": {"bottom": [512, 8], "top": [512, 1]},
            "cluster": {"world_size": 2},
        }
    )
    made = plan(job)
    found = statistics(made).waiting
    parts = parts_of(made)
    lost = {name: values[found.slowest] - plain.mean(values) for name, values in parts.items()}
    assert found.part == max(lost, key=lost.__getitem__)
    assert found.part != max(parts, key=lambda name: parts[name][found.slowest])


@pytest.mark.parametrize("kind", ["heuristic", "inference"])
def test_what_a_reservation_subtracts_is_set_aside_by_name(kind: str) -> None:
    planner = {"constants": "torchrec-1.9", "reservation": {"kind": kind}}
    made = plan(_tables(planner=planner))
    aside, place = set_aside(made, "hbm"), TIERS.index("hbm")
    assert aside["dense"] == made.reserved.dense[place]
    assert aside["inputs"] == made.reserved.inputs[place] > 0
    assert sum(aside.values()) == made.cluster.hbm_cap - made.reserved.hbm_left


@pytest.mark.parametrize("count", range(1, 8))
def test_medians_are_those_of_all_ranks(count: int) -> None:
    values = [float(7 * rank % 5) for rank in range(count)]
    low, high = medians(each_rank(values))
    assert (low, high) == (plain.median_low(values), plain.median_high(values))
