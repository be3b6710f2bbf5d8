"""Tables and kernels as the sums of their shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.core.amount import leaf, named
from shardwright.core.batch import feature_batches
from shardwright.core.cluster import TIERS
from shardwright.core.statistics import KernelStatistics, TableStatistics
from shardwright.planner.choice import Cost
from shardwright.planner.explain.explanation import Explanation, alike, finished, summed
from shardwright.planner.explain.subject import RELATIVE, Subject
from shardwright.planner.tally import Placed

WEIGHTS, STATES = "weight", "optimizer_state"


def explain_tables(subject: Subject) -> Iterator[Explanation]:
    """Seconds and bytes of every table, or of the one that is asked for."""
    for told, placed in zip(subject.statistics.tables, subject.held.tables, strict=True):
        if subject.table in (None, told.name, told.fqn):
            yield from _table(subject, told, placed)


def _table(subject: Subject, told: TableStatistics, placed: Placed) -> Iterator[Explanation]:
    def over_shards(name: str, unit: str, of: Any) -> Any:
        terms = []
        for number, (run, cost) in enumerate(_runs(placed)):
            label = f"{name}[{run.rows} x {run.columns}, {number}]"
            term = leaf(of(cost), label, unit, f"one shard; --tensor {told.name}")
            terms.append(term * run.count if run.count > 1 else term)
        return summed(name, terms, unit)

    where = f"{told.fqn}, all shards"
    yield finished(
        f"{where}: seconds",
        told.seconds,
        over_shards("seconds", "s", lambda cost: cost.total_seconds),
        ranks=told.ranks,
        relative=RELATIVE,
    )
    for index, tier in enumerate(TIERS):
        stored = getattr(told, f"{tier}_bytes")
        if stored:
            amount = over_shards(f"{tier}_bytes", "B", lambda cost, at=index: cost.storage[at])
            yield finished(f"{where}: {tier.upper()} bytes", stored, amount, ranks=told.ranks)
    yield _ids(subject, told, placed)


def _runs(placed: Placed) -> Iterator[tuple[Any, Cost]]:
    option = placed.choice.option
    yield from zip(option.runs, placed.choice.costs, strict=True)


def _ids(subject: Subject, told: TableStatistics, placed: Placed) -> Explanation:
    table = placed.choice.table
    terms = []
    sizes = feature_batches(table, subject.draft.problem.batch)
    features = zip(table.pooling_factors, table.poolings, sizes, strict=True)
    for number, (length, bags, size) in enumerate(features):
        factor = leaf(length, f"pooling_factor_{number}", "ids", "tables.pooling_factors")
        count = leaf(bags, f"num_poolings_{number}", "bags", "tables.num_poolings")
        terms.append(factor * count * leaf(size, f"batch_size_{number}", "samples", "batch.size"))
    return finished(
        f"{told.fqn}: ids of one rank's batch",
        told.ids,
        summed("ids", terms, "ids"),
        ranks=told.ranks,
        relative=RELATIVE,
    )


def explain_kernels(subject: Subject) -> Iterator[Explanation]:
    """Bytes of every kernel's tables: by what they are and by where they lie."""
    for told in subject.statistics.kernels:
        tables = [
            placed
            for placed in subject.held.tables
            if placed.choice.option.compute_kernel == told.kernel
        ]
        yield from _kernel(told, tables)


def _kernel(told: KernelStatistics, tables: list[Placed]) -> Iterator[Explanation]:
    def over_tables(name: str, of: Any) -> Any:
        values = {p.choice.table.name: of(p) for p in tables}
        nonzero = {table: n for table, n in values.items() if n}
        return summed(name, alike(name, nonzero, "B", "all shards of that table"), "B")

    def kind(wanted: str) -> Any:
        return lambda placed: sum(
            run.count * cost.kinds(tier).get(wanted, 0)
            for run, cost in _runs(placed)
            for tier in TIERS
        )

    where = f"kernel {told.kernel}"
    weights = over_tables("weight_bytes", kind(WEIGHTS))
    states = over_tables("optimizer_bytes", kind(STATES))
    yield finished(f"{where}: bytes of weights", told.weight_bytes, weights)
    yield finished(f"{where}: bytes of optimizer states", told.optimizer_bytes, states)
    tiers = []
    for index, tier in enumerate(TIERS):
        name = f"{tier}_bytes"
        amount = over_tables(name, lambda p, at=index: p.choice.total_storage[at])
        tiers.append(amount)
        if amount.value:
            stored = getattr(told, name)
            yield finished(f"{where}: {tier.upper()} bytes", stored, amount)
    whole = summed("all_bytes", tiers, "B")
    rest = named("other_bytes", whole - weights - states, "B")
    yield finished(f"{where}: bytes of all else", told.other_bytes, rest)
