"""Why a table has no option of a sharding type or kernel."""

from __future__ import annotations

import typing

from shardwright.core.model import TableSpec
from shardwright.core.option import (
    DEFAULT_MIN_PARTITION,
    column_width,
    column_widths,
)
from shardwright.core.sharding import RUNNABLE, TYPES, traits
from shardwright.cost.additive import SHARDING_TYPES as ADDITIVE_TYPES
from shardwright.cost.embedding import QUANTIZED
from shardwright.planner.problem import Problem

CPU_KERNELS = ("fused", "dense")


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
    kernels, replicated = table.compute_kernels, traits(wanted).replicated
    if kernels is not None and replicated != ("dense" in kernels):
        needed = "dense" if replicated else "a kernel other than dense"
        if replicated or set(kernels) == {"dense"}:
            yield (
                f"it needs {needed}, and the job allows only {', '.join(kernels)} "
                f"(tables.{table.name}.compute_kernels)"
            )
    yield from _of_machine(problem, table, wanted)
    if traits(wanted).cuts_columns:
        yield _not_cut(problem, table)


def _of_rules(problem: Problem, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    """What the job's constraints rule out."""
    rules = problem.job.planner.constraints
    where = "planner.constraints"
    for group in rules.together:
        if table.name in group and not traits(wanted).whole:
            others = ", ".join(name for name in group if name != table.name)
            yield f"it is kept together with {others} ({where}.together), each whole on one rank"
    limited = table.name in rules.ranks or any(table.name in group for group in rules.apart)
    if limited and traits(wanted).partition == "uniform" and problem.cluster.world_size > 1:
        yield f"it uses every rank, and {where} keep the table from some"


def _of_machine(problem: Problem, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    """What the runtime, the device and the hosts rule out."""
    cluster, kind = problem.cluster, traits(wanted)
    if problem.model.is_trained:
        if kind.cuts_columns and table.optimizer == "rowwise_adagrad":
            yield "it needs sgd: the sums of row-wise Adagrad would span ranks"
        return
    if problem.job.planner.as_torchrec:
        if not (table.pooled or kind.sequences):
            yield "TorchRec cuts no sequence table that way; it pools what it looks up"
        if cluster.compute_device == "cpu" and kind.cuts_rows:
            yield "TorchRec offers it on accelerators only"
    elif kind.within_hosts and cluster.group == cluster.world_size:
        yield (
            f"all {cluster.world_size} ranks are one host, where it is the same as "
            f"{kind.on_one_host}"
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
    replicas = [traits(t).replicated for t in types or ()]
    if wanted == "dense" and types is not None and not any(replicas):
        yield f"only data_parallel is dense, and the job allows {_types(table)}"
    if wanted != "dense" and types and all(replicas):
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
