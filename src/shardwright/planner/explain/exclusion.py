"""Why a table has no option of a sharding type or kernel."""

from __future__ import annotations

import typing

from shardwright.core.model import ShardingType, TableSpec
from shardwright.core.option import (
    DEFAULT_MIN_PARTITION,
    PARTITION,
    column_width,
    column_widths,
)
from shardwright.cost.additive import SHARDING_TYPES as ADDITIVE_TYPES
from shardwright.cost.embedding import QUANTIZED
from shardwright.planner.options import ON_A_HOST, RUNNABLE
from shardwright.planner.problem import Problem

TYPES: tuple[str, ...] = typing.get_args(ShardingType)
COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")
CPU_KERNELS = ("fused", "dense")
SEQUENCE_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise")


def reason(problem: Problem, index: int, wanted: str) -> str:
    """The rule that rules ``wanted`` out; empty where none does, so that it is worth a try."""
    table = problem.model.tables[index]
    rules = _of_type if wanted in TYPES else _of_kernel
    return next((why for why in rules(problem, table, wanted) if why), "")


def _of_type(problem: Problem, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    yield _not_named(table, "sharding_types", wanted)
    yield from _of_rules(problem, table, wanted)
    if problem.model.is_trained and wanted not in RUNNABLE:
        yield f"this version's runtime carries out {', '.join(RUNNABLE)} only"
    if problem.job.planner.constants == "additive" and wanted not in ADDITIVE_TYPES:
        yield f"the additive costs know {' and '.join(ADDITIVE_TYPES)} only"
    kernels = table.compute_kernels
    if kernels is not None and (wanted == "data_parallel") != ("dense" in kernels):
        needed = "dense" if wanted == "data_parallel" else "a kernel other than dense"
        if wanted == "data_parallel" or set(kernels) == {"dense"}:
            yield (
                f"it needs {needed}, and the job allows only {', '.join(kernels)} "
                f"(tables.{table.name}.compute_kernels)"
            )
    yield from _of_machine(problem, table, wanted)
    if wanted in COLUMN_TYPES:
        yield _not_cut(problem, table)


def _of_rules(problem: Problem, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    """What the job's constraints rule out."""
    rules = problem.job.planner.constraints
    where = "planner.constraints"
    for group in rules.together:
        if table.name in group and wanted != "table_wise":
            others = ", ".join(name for name in group if name != table.name)
            yield f"it is kept together with {others} ({where}.together), each whole on one rank"
    limited = table.name in rules.ranks or any(table.name in group for group in rules.apart)
    everywhere = wanted in PARTITION and PARTITION[wanted] == "uniform"
    if limited and everywhere and problem.cluster.world_size > 1:
        yield f"it uses every rank, and {where} keep the table from some"


def _of_machine(problem: Problem, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    """What the runtime, the device and the hosts rule out."""
    cluster = problem.cluster
    if problem.model.is_trained:
        if wanted == "column_wise" and table.optimizer == "rowwise_adagrad":
            yield "it needs sgd: the sums of row-wise Adagrad would span ranks"
        return
    if problem.job.planner.as_torchrec:
        if not table.pooled and wanted not in SEQUENCE_TYPES:
            yield "TorchRec cuts no sequence table that way; it pools what it looks up"
        if cluster.compute_device == "cpu" and wanted in (
            "table_row_wise",
            "grid_shard",
            "row_wise",
        ):
            yield "TorchRec offers it on accelerators only"
    elif wanted in ON_A_HOST and cluster.group == cluster.world_size:
        plain = {"table_row_wise": "row_wise", "table_column_wise": "column_wise"}
        yield (
            f"all {cluster.world_size} ranks are one host, where it is the same as "
            f"{plain.get(wanted, 'row_wise of column blocks')}"
        )


def _not_cut(problem: Problem, table: TableSpec) -> str:
    """Nothing where there is a width to cut to."""
    if problem.model.is_trained:
        least = table.min_partition or max(DEFAULT_MIN_PARTITION, table.dim // 2)
        cut = column_width(table, least) < table.dim
    else:
        least = table.min_partition or DEFAULT_MIN_PARTITION
        cut = bool(column_widths(table)) or column_width(table, least) < table.dim
    if cut:
        return ""
    return (
        f"there is nothing to cut: no width that divides {table.dim} columns is a multiple of 4 "
        f"and at least {least} (tables.{table.name}.min_partition)"
    )


def _of_kernel(problem: Problem, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    yield _not_named(table, "compute_kernels", wanted)
    types, cluster = table.sharding_types, problem.cluster
    if wanted in QUANTIZED:
        yield "it serves quantised tables in inference, which this version does not plan"
    if problem.job.planner.constants == "additive" and wanted != "fused":
        yield "the additive costs know fused only"
    if wanted == "dense" and types is not None and "data_parallel" not in types:
        yield f"only data_parallel is dense, and the job allows {_types(table)}"
    if wanted != "dense" and types is not None and set(types) == {"data_parallel"}:
        yield f"data_parallel is dense, and the job allows {_types(table)}"
    if problem.model.is_trained and wanted not in CPU_KERNELS:
        yield "this version's runtime carries out fused for routed tables and dense for replicas"
    if cluster.compute_device == "cpu" and wanted not in CPU_KERNELS:
        yield "a CPU has no faster memory beside its host's: fused keeps the table there"
    if wanted == "key_value" and not cluster.ssd_cap:
        yield "there is no SSD: cluster.ssd_cap is 0"


def _not_named(table: TableSpec, field: str, wanted: str) -> str:
    allowed = getattr(table, field)
    if allowed is None or wanted in allowed:
        return ""
    return f"the job allows only {', '.join(allowed)} (tables.{table.name}.{field})"


def _types(table: TableSpec) -> str:
    return f"only {', '.join(table.sharding_types or ())} (tables.{table.name}.sharding_types)"
