"""Prices by our own cost model: what the runtime keeps, and seconds from a machine's constants.

Shards that one set of formulas serves are priced together: their seconds as arrays of doubles,
their bytes as arrays of Python ints. A derivation calls the same formulas on Amounts.
"""

# Whether a table's rows travel once (dedup) is decided by what it saves, so a scheme is known only
# after the quantities of its table are; it is part of the scheme, for the formulas differ.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwright.core.amount import Lift, bare, leaf, named, noted, total
from shardwright.core.batch import distinct_rows, expected_distinct, lookups
from shardwright.core.cluster import Tier, decisive
from shardwright.core.kinds import is_packed, kind_of
from shardwright.core.model import ON_DISK, TableSpec
from shardwright.core.optimizers import BY_ROW
from shardwright.core.option import Option
from shardwright.core.sharding import traits
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.cost import embedding, optimizer
from shardwright.cost.embedding import CACHED_KERNELS, Cache, Demand, cache_bytes, cached_rows
from shardwright.planner.choice import Choice, Cost
from shardwright.planner.pricing.evaluate import (
    Derived,
    PricingContext,
    constants_of,
    costs,
    faster_kernels,
    priced,
    shard_shape,
    tier_totals,
    traffic,
)

MIB = 2**20
PREFETCHING = "train_prefetch_sparse_dist"


class Scheme(NamedTuple):
    """The names and flags that formulas branch on.

    ``prefetch``: rows are in the cache before a step asks for them. ``limited``: the cache has a
    largest size. ``dedup``: a row travels once to a rank that asks for it several times. ``sums``:
    an update needs sums over columns that lie in several shards.
    """

    sharding_type: str
    kernel: str
    dtype: str
    optimizer: str
    prefetch: bool
    limited: bool
    dedup: bool = False
    sums: bool = False


class TableFacts(NamedTuple):
    """The quantities of a table, or of each shard's table as arrays.

    Elements take ``forward`` and ``backward`` bytes in the exchange and ``output`` bytes after it.
    """

    ids: Any
    bags: Any
    forward: Any
    backward: Any
    output: Any
    load_factor: Any
    limit: Any
    miss_rate: Any
    distinct: Any
    touched: Any
    dim: Any
    swept: Any


class LinkedRanks(NamedTuple):
    """All ranks, and those of a host or pod; None where that is all of them."""

    ranks: Any
    local: Any


def price(
    context: PricingContext, cases: Sequence[tuple[TableSpec, Option]], *, exchange: bool
) -> list[Choice]:
    """What each option costs, in the order of ``cases``; ``exchange`` adds transient buffers."""
    c, mesh = context.values, _mesh(context, bare)
    batches = _in_flight(context, bare) if exchange else None

    def facts_of(table: TableSpec) -> TableFacts:
        return _facts(context, table, mesh.ranks, c, bare)

    def scheme_of(table: TableSpec, option: Option, facts: TableFacts) -> Scheme:
        return _scheme_of(context, table, option, facts, mesh)

    def costs_of(scheme: Scheme, exact: list[Any]) -> list[Cost]:
        # Seconds as doubles, which are fast and as exact as the constants; bytes by the same
        # formulas on Python's ints.
        fast = [values.astype(np.float64) for values in exact]
        seconds = _seconds(context, scheme, _arrays(scheme, fast, c), mesh, c)
        output = TableFacts(*exact[2:]).output
        kept = _arrays(scheme, exact, c)
        storage = _storage(context, scheme, kept, output, mesh, batches)
        return costs(seconds, storage, len(output))

    found = priced(cases, facts_of, scheme_of, costs_of)
    return [
        Choice(table, option, each, _everywhere(context, option, facts, scheme), dedup=scheme.dedup)
        for (table, option), (facts, scheme, each) in zip(cases, found, strict=True)
    ]


def derive(
    context: PricingContext, table: TableSpec, option: Option, run_index: int, *, exchange: bool
) -> Derived:
    """The price of one shard of a run as derivations, by the formulas that priced it."""
    c = constants_of(context.cluster)
    mesh, numbers = _mesh(context, leaf), _mesh(context, bare)
    # Whether rows travel once is decided by numbers, before anything is derived: a derivation
    # follows the formula that was chosen and cannot choose itself.
    facts = _facts(context, table, numbers.ranks, context.values, bare)
    scheme = _scheme_of(context, table, option, facts, numbers)
    facts = _facts(context, table, mesh.ranks, c, leaf)
    parts = embedding.row_parts(scheme.sharding_type, *mesh)
    demand = _demand(scheme, *shard_shape(table, option, run_index, parts), facts, c)
    seconds = _seconds(context, scheme, demand, mesh, c)
    batches = _in_flight(context, leaf) if exchange else None
    storage = _storage(context, scheme, demand, facts.output, mesh, batches)
    spent = named("seconds_per_step", total(seconds.values()), "s")
    return Derived(spent, tier_totals(storage))


def faster(
    context: PricingContext, cases: Sequence[tuple[TableSpec, Option]], kernels: Sequence[str]
) -> set[tuple[int, str]]:
    """Cases of which some shard takes less time with one of ``kernels``: number and kernel."""
    c, mesh = context.values, _mesh(context, bare)

    def seconds(scheme: Scheme, columns: Sequence[Any]) -> Any:
        return sum(_seconds(context, scheme, _arrays(scheme, columns, c), mesh, c).values())

    return faster_kernels(
        cases,
        kernels,
        lambda table: _facts(context, table, mesh.ranks, c, bare),
        lambda table, sharding_type, kernel: _scheme(context, table, sharding_type, kernel),
        seconds,
    )


def _arrays(scheme: Scheme, columns: Sequence[Any], c: Any) -> Demand:
    rows, width, *facts = columns
    return _demand(scheme, rows, width, TableFacts(*facts), c)


def _demand(scheme: Scheme, rows: Any, columns: Any, facts: TableFacts, c: Any) -> Demand:
    """What a step asks of a shard."""
    row = embedding.row_bytes(columns, scheme.dtype, scheme.kernel)
    cache = None
    if scheme.kernel in CACHED_KERNELS:
        kept = _cached_row_bytes(scheme, columns, row)
        limit = named("cache_limit", facts.limit // kept, "rows") if scheme.limited else rows
        cached = cached_rows(rows, facts.load_factor, limit)
        cache = Cache(cached, facts.miss_rate, facts.distinct)
    passes = optimizer.table_passes(scheme.optimizer, c, like=rows)
    ids, bags, forward, backward = facts[:4]
    distinct = facts.touched
    # Each different row is one id and one row of its own on its way: there is nothing left to be
    # summed into bags at the owner.
    if scheme.dedup:
        ids = bags = distinct
    swept = facts.swept if scheme.sums else None
    return Demand(
        *(ids, bags, rows, columns, row, forward, backward, passes, cache, distinct),
        facts.dim,
        swept,
    )


def _cached_row_bytes(scheme: Scheme, columns: Any, row_bytes: Any) -> Any:
    """Bytes of a row in a cache: rows on disk have their optimizer states with them."""
    if scheme.kernel != ON_DISK or scheme.optimizer == "none":
        return row_bytes
    one = noted(1, "rows", "", "a row", like=columns)
    return row_bytes + optimizer.table_state_bytes(one, columns, scheme.optimizer)


def _seconds(
    context: PricingContext, scheme: Scheme, demand: Demand, mesh: LinkedRanks, c: Any
) -> Any:
    return embedding.shard_seconds(
        demand,
        scheme.sharding_type,
        scheme.kernel,
        mesh.ranks,
        c,
        local=mesh.local,
        training=not context.estimator.is_inference,
        prefetch=scheme.prefetch,
    )


def _storage(
    context: PricingContext,
    scheme: Scheme,
    demand: Demand,
    output: Any,
    mesh: LinkedRanks,
    batches: Any,
) -> dict[Tier, dict[str, Any]]:
    """Bytes of a shard by tier and kind; its exchange is of ``batches`` at once, None without."""
    device = context.cluster.compute_device
    near = decisive(device)
    kept = embedding.shard_bytes(
        demand.rows,
        demand.columns,
        scheme.dtype,
        scheme.optimizer,
        scheme.kernel,
        training=not context.estimator.is_inference,
    )
    found: dict[Tier, dict[str, Any]] = {near: {}}
    found[embedding.home(scheme.kernel, device)] = kept
    if demand.cache is not None:
        kept_row = _cached_row_bytes(scheme, demand.columns, demand.row_bytes)
        found[near]["cache"] = cache_bytes(demand.rows, demand.cache.rows, kept_row)
    if batches is not None:
        found[near] |= embedding.exchange_bytes(
            demand, scheme.sharding_type, output, batches, *mesh
        )
    return found


def _in_flight(context: PricingContext, lift: Lift) -> Any:
    """Batches whose inputs a step keeps at once."""
    pipeline = context.estimator.pipeline_type
    source = f"planner.estimator.pipeline_type {pipeline}"
    return lift(embedding.INPUTS_IN_FLIGHT[pipeline], "batches_in_flight", "batches", source)


def _everywhere(
    context: PricingContext, option: Option, facts: TableFacts, scheme: Scheme
) -> float:
    """Seconds that every rank spends to address its own ids."""
    if option.traits.replicated:
        return 0.0
    seconds: float = embedding.request_seconds(
        facts.ids, option.sharding_type, context.values, dedup=scheme.dedup
    )
    return seconds


def _scheme_of(
    context: PricingContext, table: TableSpec, option: Option, facts: TableFacts, mesh: LinkedRanks
) -> Scheme:
    """The scheme of an option, of which a row may travel once to a rank that asks for it several
    times: where the job says so, else where that pays."""
    scheme = _scheme(context, table, option.sharding_type, option.compute_kernel)
    routed = scheme.kernel == "fused" and not option.traits.replicated
    if context.dedup is False or not routed or not _is_single(table):
        return scheme
    run, c = option.runs[0], context.values
    demand = _demand(scheme, run.rows, run.columns, facts, c)
    pays = context.dedup or embedding.dedup_pays(
        demand, scheme.sharding_type, scheme.kernel, mesh.ranks, c, mesh.local
    )
    return scheme._replace(dedup=pays)


def _is_single(table: TableSpec) -> bool:
    """Whether every id gets a row of its own, as it lies in the table."""
    return not (table.jagged or table.weighted)


def _mesh(context: PricingContext, lift: Lift) -> LinkedRanks:
    cluster = context.cluster
    ranks = lift(cluster.world_size, "ranks", "", "cluster.world_size")
    if cluster.linked is None:
        return LinkedRanks(ranks, None)
    source = "cluster.pod_size x cluster.local_world_size"
    if cluster.group == cluster.local_world_size:
        source = "cluster.local_world_size"
    return LinkedRanks(ranks, lift(cluster.linked, "ranks_of_host", "", source))


def _scheme(context: PricingContext, table: TableSpec, sharding_type: str, kernel: str) -> Scheme:
    estimator = context.estimator
    prefetch, limited = False, False
    if kernel in CACHED_KERNELS:
        asked = table.cache.prefetch_pipeline if table.cache else None
        asked = estimator.prefetch_pipeline if asked is None else asked
        prefetch = estimator.pipeline_type == PREFETCHING if asked is None else asked
        limited = kernel == "key_value" and table.kv_l1_mb is not None
    kind = table.optimizer or "none"
    kept = kind_of(table) if is_packed(table) else table.dtype
    sums = kind in BY_ROW and traits(sharding_type).cuts_columns
    return Scheme(sharding_type, kernel, kept, kind, prefetch, limited, sums=sums)


def _facts(context: PricingContext, table: TableSpec, ranks: Any, c: Any, lift: Lift) -> TableFacts:
    where = f"tables.{table.name}"
    ids, bags = traffic(context, table, lift)
    dtype, source = table.dtype, f"{where}.dtype"
    if table.output_dtype is not None:
        dtype, source = table.output_dtype, f"{where}.output_dtype"
    output = lift(ELEMENT_BYTES[dtype], "output_element_bytes", "B", f"{source} {dtype}")
    forward = backward = output
    if context.estimator.communication is not None:
        forward, backward = (
            lift(ELEMENT_BYTES[kind], name, "B", f"planner.estimator.communication {kind}")
            for name, kind in zip(
                ("forward_element_bytes", "backward_element_bytes"),
                context.estimator.communication,
                strict=True,
            )
        )
    distinct = named("ids_of_all_ranks", ids * ranks, "ids")
    cache = _cache_facts(context, table, distinct, c, lift)
    touched = lift(
        _touched(context, table),
        "different_rows_of_one_rank",
        "rows",
        f"{where}: expected of its ids",
    )
    dim = lift(table.dim, "dim", "columns", f"{where}.dim")
    source = f"{where}: expected of all ranks' ids"
    swept = lift(_swept(context, table), "different_rows_of_all_ranks", "rows", source)
    return TableFacts(ids, bags, forward, backward, output, *cache, touched, dim, swept)


def _swept(context: PricingContext, table: TableSpec) -> int:
    """Different rows among all ranks' ids, where columns may be cut beside an optimizer that has
    one number a row."""
    if table.optimizer not in BY_ROW or not any(
        traits(kind).cuts_columns for kind in table.sharding_types or ()
    ):
        return 0
    ids = round(lookups(table, context.batch) * context.cluster.world_size)
    return expected_distinct(ids, table.rows, context.batch.zipf_of(table))


def _touched(context: PricingContext, table: TableSpec) -> int:
    """Different rows among a rank's ids, where these alone may travel."""
    ids = lookups(table, context.batch)
    few = embedding.rows_are_few(ids, table.rows, table.dim, context.cluster.world_size)
    if not few and (context.dedup is False or not _is_single(table)):
        return 0
    return distinct_rows(table, context.batch)


def _cache_facts(
    context: PricingContext, table: TableSpec, distinct: Any, c: Any, lift: Lift
) -> tuple[Any, Any, Any, Any]:
    """Load factor, largest size, miss rate without a cache, and different rows per step:
    ``distinct`` where no statistics are given."""
    where = f"tables.{table.name}"
    cache = table.cache
    load_factor = c["cache_load_factor"]
    if cache is not None and cache.load_factor is not None:
        load_factor = lift(cache.load_factor, "load_factor", "", f"{where}.cache.load_factor")
    elif context.estimator.cache_load_factor is not None:
        source = "planner.estimator.cache_load_factor"
        load_factor = lift(context.estimator.cache_load_factor, "load_factor", "", source)
    limit = lift((table.kv_l1_mb or 0) * MIB, "largest_cache_bytes", "B", f"{where}.kv_l1_mb")
    if cache is not None and cache.stats is not None:
        lookups, _, misses = cache.stats
        source = f"{where}.cache.stats"
        distinct = lift(lookups, "expected_lookups", "rows", source)
        return load_factor, limit, lift(misses, "misses_without_cache", "", source), distinct
    return load_factor, limit, c["cache_miss_rate"], distinct
