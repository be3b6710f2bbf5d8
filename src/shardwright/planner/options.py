"""The ways to shard a table that the search looks at: all that exist, or all that run here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from shardwright.core import option
from shardwright.core.batch import Batch, lookups
from shardwright.core.cluster import Cluster, Device
from shardwright.core.errors import InputError
from shardwright.core.kinds import is_packed
from shardwright.core.model import DENSE, ON_DISK, QUANTIZED, ComputeKernel, TableSpec
from shardwright.core.optimizers import BY_ROW
from shardwright.core.sharding import FREE, TYPES, ShardingType, traits
from shardwright.cost.embedding import rows_are_few

USUAL_MIN_PARTITION = 128  # columns; the narrowest shard that is looked at first, as in TorchRec
WIDE: tuple[ShardingType, ...] = tuple(t for t in TYPES if traits(t).freer is None)
SLOW_KERNELS: tuple[ComputeKernel, ...] = ("fused_uvm", "fused_uvm_caching")

# Of quantised tables, pooled or not: they serve inference, and have to be asked for by a kernel.
QUANTIZED_TYPES: tuple[ShardingType, ...] = ("table_wise", "row_wise", "column_wise")
QUANTIZED_KERNELS: dict[Device, tuple[ComputeKernel, ...]] = {"cpu": ("quant",), "cuda": QUANTIZED}

MOST_PIECES = 256  # of a table's columns, on few ranks


def is_quantized(table: TableSpec) -> bool:
    """Whether the rows of ``table`` are bytes, or it names kernels of quantised tables.

    :raises InputError: it names kernels of training as well.
    """
    named = table.compute_kernels or ()
    quantized = [kernel for kernel in named if kernel in QUANTIZED]
    if quantized and len(quantized) < len(named):
        wanted = "kernels of training or kernels of quantised tables"
        remedy = "A quantised table serves inference only: make it a table of its own."
        raise InputError(f"tables '{table.name}'.compute_kernels", wanted, ", ".join(named), remedy)
    return bool(quantized) or is_packed(table)


def replica_kernel(table: TableSpec, cluster: Cluster, batch: Batch) -> ComputeKernel:
    """How replicas of ``table`` learn unless its kernels are named: the faster way."""
    ids = lookups(table, batch)
    few = rows_are_few(ids, table.rows, table.dim, cluster.world_size)
    return "fused" if few else DENSE


def runnable_options(
    table: TableSpec, cluster: Cluster, replica: ComputeKernel = DENSE
) -> tuple[option.Option, ...]:
    """What the runtime can execute for this table and the job allows; replicas of kernel
    ``replica``, or ``dense`` where that is named and the other is not.

    Types that keep a table within hosts where there are several, or where they are named. Columns
    of a table whose optimizer needs sums over all of them are cut where that is named.
    """
    least = table.min_partition or max(option.DEFAULT_MIN_PARTITION, table.dim // 2)
    cuts = option.column_widths(msgspec.structs.replace(table, min_partition=least))
    local = cluster.group
    options = []
    named = table.sharding_types or _usual_types(table, cluster)
    types = [sharding_type for sharding_type in TYPES if sharding_type in named]
    for sharding_type in types:
        kind = traits(sharding_type)
        # a table whose columns are not cut is another type
        for width in cuts if kind.cuts_columns else (table.dim,):
            runs = option.shard_runs(table, sharding_type, cluster.world_size, local, width)
            options += [
                option.Option(table.name, sharding_type, kernel, runs)
                for kernel in _runnable_kernels(table, sharding_type, cluster, replica)
            ]
    if not options:
        raise InputError(
            f"tables '{table.name}'",
            "a sharding type and kernel that this version runs",
            f"types {types}, kernels {list(table.compute_kernels or ('any',))}",
            f"{_no_cut(table, types, cuts)}Allow table_wise or row_wise with kernel fused, "
            "data_parallel with dense, or on a CPU that has cluster.ssd_cap key_value.",
        )
    return tuple(options)


def _of_replicas(table: TableSpec, replica: ComputeKernel) -> tuple[ComputeKernel, ...]:
    named = table.compute_kernels
    found = (kernel for kernel in (replica, DENSE) if named is None or kernel in named)
    return tuple(itertools.islice(found, 1))


def _runnable_kernels(
    table: TableSpec, sharding_type: ShardingType, cluster: Cluster, replica: ComputeKernel
) -> tuple[ComputeKernel, ...]:
    named = table.compute_kernels
    if traits(sharding_type).replicated:
        return _of_replicas(table, replica)
    known: tuple[ComputeKernel, ...] = ("fused",)
    if cluster.compute_device == "cpu" and named is not None and cluster.ssd_cap:
        known = ("fused", ON_DISK)
    return tuple(kernel for kernel in known if named is None or kernel in named)


def _usual_types(table: TableSpec, cluster: Cluster) -> tuple[ShardingType, ...]:
    one_host = cluster.group >= cluster.world_size
    return tuple(
        sharding_type
        for sharding_type in (FREE if one_host else TYPES)
        if not (traits(sharding_type).cuts_columns and table.optimizer in BY_ROW)
    )


def _no_cut(table: TableSpec, types: Sequence[ShardingType], cuts: Sequence[int]) -> str:
    if not cuts and any(traits(t).cuts_columns for t in types):
        return f"No cut of {table.dim} columns is a multiple of 4 and at least min_partition. "
    return ""


def wide_options(
    table: TableSpec,
    cluster: Cluster,
    replica: ComputeKernel = DENSE,
    *,
    slow: bool,
    every_cut: bool = False,
    uncut: bool = False,
) -> tuple[option.Option, ...]:
    """Every sharding type, even cut of columns and kernel of the device that can be of use;
    replicas as in ``runnable_options``.

    ``slow``: also the kernels whose weights lie in host memory where none is named. ``every_cut``:
    also cuts so fine that no bound depends on them. ``uncut``: columns that are asked for may be
    one shard. A key-value store and kernels of quantised tables have to be named. The types that
    keep a table's shards on a host are for pooled tables.
    """
    types = WIDE if table.sharding_types is None else table.sharding_types
    options = []
    for sharding_type in types:
        kind = traits(sharding_type)
        if not (table.pooled or kind.sequences):
            continue
        one_host = cluster.group >= cluster.world_size
        if one_host and kind.within_hosts and table.sharding_types is None:
            continue  # the same as the type without its host
        widths = _widths(table, sharding_type, cluster, every_cut=every_cut, uncut=uncut)
        for width in widths:
            runs = option.shard_runs(table, sharding_type, cluster.world_size, cluster.group, width)
            options += [
                option.Option(table.name, sharding_type, kernel, runs)
                for kernel in _kernels(table, sharding_type, cluster, replica, slow=slow)
            ]
    if not options:
        raise InputError(
            f"tables '{table.name}'",
            f"a sharding type and a compute kernel that go together on {cluster.compute_device}",
            f"types {list(types)}, kernels {list(table.compute_kernels or ('any',))}",
            "Widen sharding_types or compute_kernels, or lower min_partition.",
        )
    return tuple(options)


def _widths(
    table: TableSpec, sharding_type: ShardingType, cluster: Cluster, *, every_cut: bool, uncut: bool
) -> tuple[int, ...]:
    """Column widths to try, widest first. Shards by the thousand on few ranks are none, but for
    ``every_cut``."""
    kind = traits(sharding_type)
    if not kind.cuts_columns:
        return (table.dim,)
    most = _enough_cuts(table, sharding_type, cluster)
    cuts = option.column_widths(table)
    coarse = [width for width in cuts if table.dim // width < most]
    widths = list(cuts if every_cut else cuts[: len(coarse) + 1])
    narrow = option.column_width(table, table.min_partition or USUAL_MIN_PARTITION)
    if narrow < table.dim and table.dim // narrow <= max(most, MOST_PIECES):
        widths = sorted({*widths, narrow}, reverse=True)
    named = table.sharding_types if uncut else None
    if named is not None and (kind.cuts_rows or not any(traits(t).whole for t in named)):
        widths = [table.dim, *widths]  # asked for; uncut it is no other type that may be chosen
    return tuple(widths)


def _enough_cuts(table: TableSpec, sharding_type: ShardingType, cluster: Cluster) -> int:
    """Column shards of which no bound needs more.

    Cut further, a table takes as much work and memory or more. If one of ``n`` equal shards is
    longer than a whole step or larger than a rank, all ``n`` are more than the ranks can hold as
    soon as ``n`` is the number of ranks; four times as many are tried, so that they even out.
    Finer ones may even out by a little more. A column block of a grid lies on as many ranks of a
    host as it has full row shards.
    """
    # Cuts multiply the options of every table, and a search with thousands of tables has no time
    # for cuts that no bound depends on.
    if not traits(sharding_type).cuts_rows:
        return 4 * cluster.world_size
    full = table.rows // -(-table.rows // cluster.group)
    return max(-(-cluster.world_size // full), 2)


def _kernels(
    table: TableSpec,
    sharding_type: ShardingType,
    cluster: Cluster,
    replica: ComputeKernel,
    *,
    slow: bool,
) -> tuple[ComputeKernel, ...]:
    named = table.compute_kernels
    if is_quantized(table):
        offered = QUANTIZED_KERNELS[cluster.compute_device]
        known = offered if sharding_type in QUANTIZED_TYPES else ()
        return tuple(kernel for kernel in known if named is None or kernel in named)
    if traits(sharding_type).replicated:
        return _of_replicas(table, replica)
    if cluster.compute_device == "cpu":
        return _runnable_kernels(table, sharding_type, cluster, replica)
    # A store on disk is never better than memory, only larger: it has to be asked for.
    known = ("fused", *SLOW_KERNELS)
    if named is not None:
        if cluster.ssd_cap:
            known = (*known, "key_value")
        return tuple(kernel for kernel in known if kernel in named)
    return known if slow else known[:1]
