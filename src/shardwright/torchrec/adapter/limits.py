"""What TorchRec's runtime (1.9.2) executes, so that no plan asks for more.

A sharder offers more than runs: a sequence table cannot be replicated on a CPU, a fused kernel
reads rows of whole groups of four columns, and a shard without rows has no weight to look up on a
CPU. Where a table of averaged bags is cut by rows, the sums of all tables of its module that are
not are divided too. Types and kernels that TorchRec guards are left to those who name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.model import ComputeKernel, TableSpec
from shardwright.core.option import column_width, column_widths, row_runs
from shardwright.core.sharding import TYPES, ShardingType, traits
from shardwright.job.plan import Plan
from shardwright.planner.options import USUAL_MIN_PARTITION
from shardwright.torchrec.adapter.tables import TorchRecTable

GUARDED_TYPES: tuple[ShardingType, ...] = ("grid_shard",)
KERNELS: dict[str, tuple[ComputeKernel, ...]] = {
    "cpu": ("dense", "fused"),
    "cuda": ("dense", "fused", "fused_uvm", "fused_uvm_caching"),
}
GUARDED_KERNELS: tuple[ComputeKernel, ...] = ("key_value",)
COLUMNS = 4  # a fused kernel's rows are multiples of
NARROWEST = 32  # columns; a lookup of fewer costs TorchRec as much, and its kernels too


@dataclass(frozen=True)
class Ranks:
    """``world`` ranks of one kind of device, ``ssd`` bytes each; ``group`` of them are linked."""

    device: str
    world: int
    group: int
    ssd: int = 0


def limited(table: TorchRecTable, ranks: Ranks, *, lean: bool) -> TableSpec:
    """The table with the types and kernels that may be chosen for it.

    ``lean``: without types of which another one covers every placement at the same cost, and
    without column shards that are too narrow, unless the table's constraint names them.

    :raises InputError: nothing is left.
    """
    spec = table.spec
    offered = table.sharder.sharding_types(ranks.device)
    named: tuple[str, ...] = spec.sharding_types or ()
    types = [t for t in TYPES if t in (named or offered) and t in offered]
    types = [t for t in types if named or t not in GUARDED_TYPES]
    types = [t for t in types if _runs(t, spec, ranks)]
    if table.is_averaged and not named:
        types = [t for t in types if not traits(t).cuts_rows]
    if lean and spec.min_partition is None:
        spec = msgspec.structs.replace(spec, min_partition=NARROWEST)
    if lean and not named:
        types = [t for t in types if not _covered(t, types, spec, ranks)]
    kernels = _kernels(table, types, ranks)
    if not types or not kernels:
        raise InputError(_nothing_left(table, ranks, types, kernels))
    changed: dict[str, Any] = {"sharding_types": tuple(types)}
    if spec.compute_kernels or set(kernels) != set(KERNELS[ranks.device]):
        changed["compute_kernels"] = kernels
    return msgspec.structs.replace(spec, **changed)


def check_averages(plan: Plan, tables: Sequence[TorchRecTable]) -> None:
    """UnsupportedError where averages of one table would be taken of the sums of another."""
    types = {table.name: table.sharding_type for table in plan.tables}
    whole = {t.module_path: t for t in tables if not traits(types[t.spec.name]).cuts_rows}
    for table in tables:
        other = whole.get(table.module_path)
        if table.is_averaged and traits(types[table.spec.name]).cuts_rows and other:
            kind, beside = types[table.spec.name], types[other.spec.name]
            raise UnsupportedError(
                expected(
                    f"table '{table.spec.name}'",
                    f"a type that cuts no rows, for TorchRec divides the sums of "
                    f"'{other.spec.name}' ({beside}) too where averaged bags are cut by rows",
                    kind,
                    "Constrain all tables of the module to types that cut rows, or this one to "
                    "types that do not.",
                )
            )


def _runs(sharding_type: ShardingType, spec: TableSpec, ranks: Ranks) -> bool:
    if traits(sharding_type).replicated:
        return spec.pooled or ranks.device != "cpu"
    if spec.dim % COLUMNS:
        return False
    if traits(sharding_type).cuts_rows and ranks.device == "cpu":
        parts = traits(sharding_type).row_parts(ranks.world, ranks.group)
        return all(run.rows for run in row_runs(spec.rows, spec.dim, parts))
    return True


def _covered(
    sharding_type: ShardingType, types: list[ShardingType], spec: TableSpec, ranks: Ranks
) -> bool:
    match sharding_type:
        case "column_wise":
            narrowest = column_width(spec, spec.min_partition or USUAL_MIN_PARTITION)
            cuts = column_widths(spec) or narrowest < spec.dim
            return not cuts and "table_wise" in types
        case "table_row_wise":
            return ranks.group >= ranks.world and "row_wise" in types
        case _:
            return traits(sharding_type).freer in types


def _kernels(
    table: TorchRecTable, types: list[ShardingType], ranks: Ranks
) -> tuple[ComputeKernel, ...]:
    named: tuple[str, ...] = table.spec.compute_kernels or ()
    offered = {k for t in types for k in table.sharder.compute_kernels(t, ranks.device)}
    known = KERNELS[ranks.device] + (GUARDED_KERNELS if named and ranks.ssd else ())
    return tuple(k for k in known if k in offered and (k in named or not named))


def _nothing_left(
    table: TorchRecTable,
    ranks: Ranks,
    types: list[ShardingType],
    kernels: tuple[ComputeKernel, ...],
) -> str:
    spec = table.spec
    kind = "pooled" if spec.pooled else "sequence"
    named = [*(spec.sharding_types or ("any type",)), *(spec.compute_kernels or ("any kernel",))]
    remedy = "Widen the table's constraint, or give its module's sharder more types."
    if spec.dim % COLUMNS:
        remedy = f"All types but data_parallel need a dim that is a multiple of {COLUMNS}."
    return expected(
        f"table '{spec.name}'",
        f"a sharding type and a kernel that TorchRec runs on {ranks.device} for a {kind} table of "
        f"{spec.rows} x {spec.dim} on {ranks.world} ranks",
        ", ".join(named),
        remedy,
    )
