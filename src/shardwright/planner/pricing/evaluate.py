"""What a price depends on; formulas over many shards as arrays, over one as a derivation."""

# A price is one formula and three kinds of values. Thousands of shards are priced at once: their
# seconds as doubles, their bytes as Python ints in object arrays, for bytes must be those that the
# runtime allocates and pass through divisions that round up. One shard is explained with Amounts.
# So a formula may not branch on a value: what it branches on is a scheme of names and flags, and
# shards are grouped by that before they are priced (``priced``). Shards of one shape in a table
# are priced once and share one Cost object, which later sums rely on to add up like shards at
# once.

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.amount import Amount, Lift, ceil_div, leaf, maximum, minimum, named, total
from shardwright.core.batch import Batch, features
from shardwright.core.cluster import TIERS, Cluster, Tier
from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.cost.clock import reached
from shardwright.cost.embedding import Part, step_latencies
from shardwright.job.planner import EstimatorSection
from shardwright.planner.choice import Cost, cost

S = TypeVar("S", bound=Hashable)
F = TypeVar("F", bound=Sequence[Any])
Floats = NDArray[np.float64]
Tiers = Mapping[Tier, Mapping[str, Any]]


@dataclass(frozen=True)
class PricingContext:
    """The machine, the batch of one rank, and what a step keeps alive.

    ``dedup`` says whether rows that a rank asks for several times travel once; None: where it pays.
    """

    cluster: Cluster
    batch: Batch
    estimator: EstimatorSection = field(default_factory=EstimatorSection)
    dedup: bool | None = False

    @cached_property
    def values(self) -> Mapping[str, float]:
        """The cluster's constants by name, rates as they are reached."""
        return reached(self.cluster.values)

    def latencies(self, parts: Iterable[Part]) -> dict[str, float]:
        """Seconds of a step, by phase, that an exchange takes whatever its tables."""
        cluster = self.cluster
        return step_latencies(parts, cluster.world_size, self.values, cluster.linked)


@dataclass(frozen=True, slots=True)
class Derived:
    """One shard's price as derivations: seconds per step, and bytes by tier."""

    seconds: Amount
    storage: dict[Tier, Amount]


def constants_of(cluster: Cluster) -> Mapping[str, Any]:
    """A cluster's constants as leaves of a derivation, rates as they are reached."""
    constants = cluster.constants.items()
    return reached({n: leaf(c.value, n, c.unit, f"{c.source}, {c.date}") for n, c in constants})


def costs(
    seconds: Mapping[str, Any], storage: Tiers, count: int, hidden: Mapping[str, Any] | None = None
) -> list[Cost]:
    """The costs of ``count`` shards out of arrays; kinds without bytes are left out."""
    tiers = [_records(storage.get(tier, {}), count) for tier in TIERS]
    spent = _records(seconds, count), _records(hidden or {}, count)
    return [
        cost(parts, hbm=_held(hbm), ddr=_held(ddr), ssd=_held(ssd), hidden=untold)
        for parts, untold, hbm, ddr, ssd in zip(*spent, *tiers, strict=True)
    ]


def _records(columns: Mapping[str, Any], count: int) -> Sequence[dict[str, Any]]:
    if not columns:
        return [{}] * count
    # A column may be one number for all shards; tolist gives Python's own numbers, so that bytes
    # stay exact ints whatever their size.
    lists = [np.broadcast_to(np.asarray(values), count).tolist() for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _held(kinds: dict[str, int]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes} if kinds else kinds


def tier_totals(storage: Tiers) -> dict[Tier, Any]:
    """The bytes of every tier as derivations."""
    return {tier: _tier_total(tier, storage.get(tier, {})) for tier in TIERS}


def _tier_total(tier: Tier, kinds: Mapping[str, Any]) -> Any:
    name = f"{tier}_bytes"
    if not kinds:
        return leaf(0, name, "B", "nothing is kept there")
    return named(name, total(kinds.values()), "B")


def traffic(context: PricingContext, table: TableSpec, lift: Lift) -> tuple[Any, Any]:
    """Ids of one rank's batch for ``table``, and the rows it gets back for them."""
    where = f"tables.{table.name}"
    origin = f"{where}.batch_sizes" if table.batch_sizes else "batch.size"
    ids, bags = [], []
    for number, (length, poolings, size) in enumerate(features(table, context.batch)):
        factor = lift(length, f"pooling_factor_{number}", "ids", f"{where}.pooling_factors")
        count = lift(poolings, f"num_poolings_{number}", "bags", f"{where}.num_poolings")
        samples = lift(size, f"batch_size_{number}", "samples", origin)
        ids.append(factor * count * samples)
        bags.append(minimum(1.0, factor) * count * samples)
    asked = named("ids_of_one_rank", total(ids), "ids")
    return asked, named("bags_of_one_rank", total(bags), "rows") if table.pooled else asked


def shard_shape(table: TableSpec, option: Option, run_index: int, parts: Any) -> tuple[Any, Any]:
    """Rows and columns of a run's first shard as derivations; ``parts`` share the table's rows."""
    run = option.runs[run_index]
    kind = option.sharding_type
    rows = leaf(table.rows, "table_rows", "rows", f"tables.{table.name}.rows")
    columns = leaf(table.dim, "dim", "columns", f"tables.{table.name}.dim")
    if option.traits.cuts_rows:
        chunk = named("rows_per_part", ceil_div(rows, parts), "rows")
        first = leaf(run.row, "first_row", "rows", f"{kind}: the shard's first row")
        rows = named("rows_of_shard", minimum(chunk, maximum(rows - first, 0)), "rows")
    if run.columns != columns.value:
        blocks = leaf(table.dim // run.columns, "column_blocks", "", f"{kind}: of equal width")
        columns = named("columns_of_shard", columns // blocks, "columns")
    assert (rows.value, columns.value) == (run.rows, run.columns)
    return rows, columns


@dataclass
class ShardGroup:
    """Shards that one set of formulas serves: for each a table's number, rows and columns; then its
    cost."""

    tables: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def add(self, table: int, option: Option) -> list[int]:
        """Note an option's shards; returns the place of each run, one for equal shapes."""
        seen: dict[tuple[int, int], int] = {}
        slots = []
        runs, times = option.column_block
        for run in runs:
            shape = run.rows, run.columns
            if shape not in seen:
                seen[shape] = len(self.tables)
                self.tables.append(table)
                self.rows.append(run.rows)
                self.columns.append(run.columns)
            slots.append(seen[shape])
        return slots * times


def priced(
    cases: Sequence[tuple[TableSpec, Option]],
    facts_of: Callable[[TableSpec], F],
    scheme_of: Callable[[TableSpec, Option, F], S],
    costs_of: Callable[[S, list[Any]], list[Cost]],
) -> Iterator[tuple[F, S, tuple[Cost, ...]]]:
    """Of every case the quantities of its table, the scheme of its shards, and what each run costs.

    Shards of one scheme are priced together, as arrays of Python ints: ``costs_of`` is given their
    rows, columns and quantities.

    :param facts_of: the quantities of a table.
    :param scheme_of: what formulas branch on.
    """
    numbers: dict[int, int] = {}
    facts: list[F] = []
    groups: dict[S, ShardGroup] = {}
    placed: list[tuple[int, S, ShardGroup, list[int]]] = []
    for table, option in cases:
        number = numbers.setdefault(id(table), len(facts))
        if number == len(facts):
            facts.append(facts_of(table))
        scheme = scheme_of(table, option, facts[number])
        group = groups.get(scheme)
        if group is None:
            group = groups[scheme] = ShardGroup()
        placed.append((number, scheme, group, group.add(number, option)))
    # Of objects: bytes stay Python's ints, which are exact whatever they are multiplied with.
    quantities = np.array(facts, dtype=object).T
    for scheme, group in groups.items():
        sizes = [np.array(sizes, dtype=object) for sizes in (group.rows, group.columns)]
        group.costs = costs_of(scheme, [*sizes, *quantities[:, group.tables]])
    for number, scheme, group, slots in placed:
        yield facts[number], scheme, tuple([group.costs[slot] for slot in slots])


def faster_kernels(
    cases: Sequence[tuple[TableSpec, Option]],
    kernels: Sequence[str],
    facts_of: Callable[[TableSpec], Sequence[Any]],
    scheme_of: Callable[[TableSpec, str, str], S],
    seconds: Callable[[S, list[Floats]], Floats],
) -> set[tuple[int, str]]:
    """Cases of which some shard takes less time with one of ``kernels``: number and kernel.

    :param facts_of: the quantities of a table.
    :param scheme_of: what formulas branch on, by table, sharding type and kernel.
    :param seconds: of shards by scheme, from their rows, columns and quantities.
    """
    numbers: dict[int, int] = {}
    facts: list[Sequence[Any]] = []
    known: dict[tuple[int, str, str], tuple[ShardGroup, list[int]]] = {}
    groups: dict[tuple[S, ...], tuple[ShardGroup, list[int]]] = {}
    for case, (table, option) in enumerate(cases):
        number = numbers.setdefault(id(table), len(facts))
        if number == len(facts):
            facts.append(facts_of(table))
        place = number, option.sharding_type, option.compute_kernel
        if place not in known:
            own = (option.compute_kernel, *kernels)
            schemes = tuple(scheme_of(table, option.sharding_type, kernel) for kernel in own)
            known[place] = groups.setdefault(schemes, (ShardGroup(), []))
        group, owners = known[place]
        group.add(number, option)
        owners += [case] * (len(group.tables) - len(owners))
    found: set[tuple[int, str]] = set()
    for schemes, (group, owners) in groups.items():
        quantities = np.array(facts, dtype=np.float64).T[:, group.tables]
        sizes = (np.array(group.rows, dtype=np.float64), np.array(group.columns, dtype=np.float64))
        own_seconds, *others = (seconds(scheme, [*sizes, *quantities]) for scheme in schemes)
        for kernel, other in zip(kernels, others, strict=True):
            found |= {(owners[i], kernel) for i in np.flatnonzero(other < own_seconds)}
    return found
