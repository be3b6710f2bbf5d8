"""Whole plans and measures of TorchRec 1.9.2's planner, made again and compared.

Bytes, counts and names are equal; times are equal but for the last digits of a double.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from oracle import Record, check_fields, given, repeated, setting, table

from shardwright.core.cluster import Cluster
from shardwright.core.errors import NoPlanError
from shardwright.core.model import TableSpec
from shardwright.cost.reservation import Reservation, reserve
from shardwright.job.planner import (
    PartitionerSection,
    PlannerSection,
    ProposerSection,
    ReservationSection,
)
from shardwright.planner.choice import Choice
from shardwright.planner.pricing.evaluate import PricingContext
from shardwright.planner.statistics.ranks import each_rank, unevenness
from shardwright.torchrec import partitioners, search
from shardwright.torchrec.candidate import Bytes, Proposal
from shardwright.torchrec.pricing import price
from shardwright.torchrec.profile import critical_terms, torchrec_options
from shardwright.torchrec.search import Proposed

RELATIVE = 1e-9
MS = 1000
LACKING = "insufficient_storage"
CASE_FIELDS = {
    *("id", "problem", "proposer_name", "proposers", "partitioner", "reservation"),
    *("dense_params", "estimator", "qcomm", "fused_params", "want_stats", "expected"),
}
PROBLEM_FIELDS = {"kind", "tables", "topology", "batch_size"}
EXPECTED_FIELDS = {
    *("wall_s", "num_proposals", "num_plans", "dense_storage", "kjt_storage"),
    *("planning_hbm_per_rank", "planning_ddr_per_rank", "max_rank_perf", "sum_perf", "rank_perf"),
    *("rank_sparse_hbm", "rank_sparse_ddr", "tables", "perf_imbalance", "critical_path"),
    *("error_type", "error", "stats_table"),
}
DENSE_BYTES = 4  # of an element of the extra dense parameter, fp32
RESERVATIONS: dict[str, Any] = {
    "fixed": "percentage",
    "fixed_percentage": "percentage",
    "fixed_absolute": "absolute",
}
RESERVATION_FIELDS = {"parameter_multiplier", "dense_tensor_estimate", "hbm_reserved_bytes"}
PROPOSERS: dict[str, Any] = {"dp": "dynamic_programming"}
PROPOSER_FIELDS = {"hbm_bins_per_device": "bins_per_device"}


def reservation_section(case: Record) -> ReservationSection:
    """The reservation [kind, percentage, arguments] of a case."""
    kind, percentage, *rest = case.get("reservation") or ["heuristic", 0.15]
    arguments = given(rest[0] if rest else None)
    check_fields(arguments, RESERVATION_FIELDS, "reservation")
    multiplier = arguments.get("parameter_multiplier", 6.0)
    dense = DENSE_BYTES * (case.get("dense_params") or 0)
    if estimate := arguments.get("dense_tensor_estimate"):  # replaces the product of the two
        dense, multiplier = estimate, 1.0
    return ReservationSection(
        kind=RESERVATIONS.get(kind, kind),
        percentage=percentage or 0.0,
        nbytes=arguments.get("hbm_reserved_bytes", 0),
        dense_bytes=dense,
        multiplier=multiplier,
    )


def proposer_sections(case: Record) -> tuple[ProposerSection, ...]:
    """The proposers [name, arguments] of a case; none means TorchRec's default list."""
    found = []
    for name, *rest in case.get("proposers") or []:
        arguments = {
            PROPOSER_FIELDS.get(k, k): v for k, v in given(rest[0] if rest else {}).items()
        }
        found.append(ProposerSection(kind=PROPOSERS.get(name, name), **arguments))
    return tuple(found)


def partitioner_section(case: Record) -> PartitionerSection:
    """The partitioner [name, arguments...] of a case."""
    name, *arguments = case.get("partitioner") or ["greedy"]
    names = {
        "greedy": ("sort_by", "balance_modules"),
        "memory_balanced": ("max_search_count", "tolerance", "balance_modules"),
    }[name]
    return PartitionerSection(kind=name, **dict(zip(names, arguments, strict=False)))


def compare_plan(case: Record) -> None:
    """Plan the case's problem and compare everything that is expected."""
    check_fields(case, CASE_FIELDS, "case")
    check_fields(case["problem"], PROBLEM_FIELDS, "problem")
    expected = given(case["expected"])
    check_fields(expected, EXPECTED_FIELDS, "expected")
    priced = setting({**case["problem"], **{k: v for k, v in case.items() if k != "problem"}})
    tables = [table(record) for record in case["problem"]["tables"]]
    cluster = priced.cluster
    ranks = [cluster.capacity] * cluster.world_size
    section = reservation_section(case)
    try:
        room = reserve(section, ranks, cluster.compute_device, tables, priced.batch)
    except NoPlanError:  # before anything is proposed
        assert expected["error_type"] == LACKING
        assert not expected.get("num_proposals")
        return
    compare_room(room, case["expected"])
    found, refused = plan(case, priced, tables, room)
    counts = {"num_proposals": found.proposals, "num_plans": found.plans}
    assert counts == {name: expected.get(name, count) for name, count in counts.items()}
    if "error_type" in expected:
        told = LACKING if lacks_memory(refused, room) else "strict_constraints"
        assert (found.tables, told) == ((), expected["error_type"])
        return
    compare_tables(found, expected, cluster)
    compare_ranks(found, expected, cluster)


def plan(
    case: Record, priced: PricingContext, tables: Sequence[TableSpec], room: Reservation
) -> tuple[Proposed, list[Bytes]]:
    """What this package plans for a case, and the bytes of every proposal without room."""
    cases = [(t, option) for t in tables for option in torchrec_options(t, priced.cluster)]
    choices: dict[str, list[Choice]] = {}
    for choice in price(priced, cases):
        choices.setdefault(choice.table.name, []).append(choice)
    refused = []
    section = PlannerSection(
        proposers=proposer_sections(case), partitioner=partitioner_section(case)
    )

    def place(partitioner: Any, proposal: Proposal, *more: Any) -> Any:
        try:
            return partitioners.place(partitioner, proposal, *more)
        except partitioners.NoRoomError:
            hbm, ddr, ssd = (sum(one.storage[tier] for one in proposal) for tier in range(3))
            refused.append((hbm, ddr, ssd))
            raise

    with mock.patch.object(search, "place", place):
        found = search.propose(
            list(choices.values()),
            priced.cluster,
            room.capacities,
            section,
            price=lambda changed: price(priced, changed),
        )
    return found, refused


def lacks_memory(refused: Sequence[Bytes], room: Reservation) -> bool:
    """Whether the least bytes of any proposal exceed those of all ranks."""
    every = [sum(tier) for tier in zip(*room.capacities, strict=True)]
    return not refused or any(n > free for n, free in zip(min(refused), every, strict=True))


def compare_room(room: Reservation, expected: Record) -> None:
    """What is left for tables, and what is reserved for the rest."""
    found = {
        "planning_hbm_per_rank": {hbm for hbm, _, _ in room.capacities},
        "planning_ddr_per_rank": {ddr for _, ddr, _ in room.capacities},
        "dense_storage": room.dense,
        "kjt_storage": room.kjt,
    }
    for name in expected.keys() & found.keys():
        wanted = expected[name]
        as_found = {wanted} if isinstance(wanted, int) else wanted and tuple(wanted)
        assert found[name] == as_found, name


def compare_tables(found: Proposed, expected: Record, cluster: Cluster) -> None:
    """Type, kernel, rank of each shard, first shard and load factor of every table, in order."""
    tables = {}
    for placed in found.tables:
        option, cache = placed.choice.option, placed.choice.table.cache
        ranks = list(placed.ranks)
        first = option.shards[0]
        tables[placed.choice.table.name] = [
            option.sharding_type,
            option.compute_kernel,
            "all" if len(ranks) == cluster.world_size else ranks,
            [first.rows, first.columns],
            cache.load_factor if cache else None,
        ]
    assert list(tables) == list(expected["tables"])
    assert tables == expected["tables"]


def compare_ranks(found: Proposed, expected: Record, cluster: Cluster) -> None:
    """Bytes and milliseconds of every rank, and what is worked out of them."""
    size = cluster.world_size
    hbm, ddr, ms = [0] * size, [0] * size, [0.0] * size
    for placed in found.tables:
        for rank, cost in zip(placed.ranks, placed.choice.shard_costs, strict=True):
            hbm[rank] += cost.hbm_bytes
            ddr[rank] += cost.ddr_bytes
            ms[rank] += cost.total_seconds * MS
    terms = list(critical_terms(found.tables, size))
    exact = {"rank_sparse_hbm": hbm, "rank_sparse_ddr": ddr}
    close = {
        "rank_perf": ms,
        "max_rank_perf": [found.seconds * MS],
        "sum_perf": [sum(ms)],
        "critical_path": [
            sum(term.seconds * MS for term in terms if term.communication is told)
            for told in (True, False)
        ],
    }
    for name in expected.keys() & exact.keys():
        assert exact[name] == listed(expected[name]), name
    for name in expected.keys() & close.keys():
        wanted = pytest.approx(listed(expected[name]), rel=RELATIVE, abs=0)
        assert close[name] == wanted, name
    if "perf_imbalance" in expected:
        compare_measures(ms, expected["perf_imbalance"])


def listed(value: Any) -> list[Any]:
    """A number, numbers, or run-length-encoded numbers as a list."""
    if not isinstance(value, list):
        return [value]
    if value and isinstance(value[0], list):
        return [each for (each,) in repeated(value)]
    return value


def compare_measures(values: Sequence[float], expected: Record) -> None:
    """The four measures by TorchRec's short names."""
    found = unevenness("seconds", each_rank(values))
    assert found is not None
    measures = {
        "tv": found.largest_deviation,
        "td": found.total_distance,
        "chi": found.chi,
        "kl": found.relative_entropy,
    }
    assert measures == pytest.approx(expected, rel=RELATIVE, abs=1e-12)


def compare_imbalance(case: Record) -> None:
    """The measures of a case's values."""
    check_fields(case, {"id", "values", "tv", "td", "chi", "kl"}, "case")
    compare_measures(case["values"], {name: case[name] for name in ("tv", "td", "chi", "kl")})
