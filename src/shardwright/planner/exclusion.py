"""Why a table cannot have a sharding type or a compute kernel: what ``--why-not`` answers and,
where a job allows nothing else, why it is refused. One place, so that both say the same."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import kind_of
from shardwright.core.model import (
    DENSE,
    ON_DISK,
    QUANTIZED,
    ComputeKernel,
    ModelSpec,
    TableSpec,
)
from shardwright.core.optimizers import BY_ROW
from shardwright.core.option import DEFAULT_MIN_PARTITION, column_width
from shardwright.core.sharding import TYPES, traits
from shardwright.job.job import Job
from shardwright.job.model_of_job import key_of
from shardwright.planner import profiles
from shardwright.planner.options import (
    QUANTIZED_KERNELS,
    QUANTIZED_TYPES,
    is_quantized,
    replica_kernel,
)
from shardwright.planner.pricing.additive import SHARDING_TYPES as ADDITIVE_TYPES
from shardwright.planner.pricing.evaluate import PricingContext

CPU_KERNELS = ("fused", DENSE)
FIELDS = ("sharding_types", "compute_kernels")


class Rules(NamedTuple):
    """What rules out options of tables: the job, its model, and its machine."""

    job: Job
    model: ModelSpec
    context: PricingContext

    @property
    def is_trained(self) -> bool:
        """Whether there is a step to plan, not tables alone."""
        return self.model.is_trained


def check_limits(rules: Rules, table: TableSpec) -> None:
    """InputError where a job limits a table to types, or to kernels, that it cannot have."""
    for field in FIELDS:
        allowed = getattr(table, field)
        whys = [(wanted, exclusion(rules, table, wanted)) for wanted in allowed or ()]
        if whys and all(why for _, why in whys):
            raise InputError(
                expected(
                    key_of(rules.job, table.name, field),
                    f"any that can be planned for '{table.name}'",
                    "; ".join(f"{wanted}: {why}" for wanted, why in whys),
                    "Name another one, or leave the key out.",
                )
            )


def exclusion(rules: Rules, table: TableSpec, wanted: str) -> str:
    """The rule that rules ``wanted`` out; empty where none does, so that it is worth a try."""
    whys = _of_type if wanted in TYPES else _of_kernel
    return next((why for why in whys(rules, table, wanted) if why), "")


def replica_of(rules: Rules, table: TableSpec) -> ComputeKernel:
    """The kernel of replicas of ``table``, which TorchRec has as dense ones only."""
    planner, context = rules.job.planner, rules.context
    theirs = planner.constants != "cluster" or planner.as_torchrec
    return DENSE if theirs else replica_kernel(table, context.cluster, context.batch)


def uncut_columns(job: Job) -> bool:
    """Whether a table that is cut by columns may be one shard, as in TorchRec, where a job goes by
    that planner's costs or options."""
    return job.planner.constants == profiles.TORCHREC or job.planner.as_torchrec


def uncut_notes(job: Job, tables: Sequence[TableSpec]) -> list[str]:
    """That tables which are to be cut by columns are not, where that is so."""
    if not uncut_columns(job):
        return []
    wanted = ((t, [traits(kind) for kind in t.sharding_types or ()]) for t in tables)
    found = [
        table
        for table, kinds in wanted
        if kinds and all(k.cuts_columns for k in kinds) and not _can_cut(table, table.min_partition)
    ]
    if not found:
        return []
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    which = f"table {found[0].name}{others}"
    return [f"{which}: {found[0].dim} columns cannot be cut and are one shard, as in TorchRec"]


def _can_cut(table: TableSpec, least: int | None) -> bool:
    return column_width(table, least or DEFAULT_MIN_PARTITION) < table.dim


def _of_type(rules: Rules, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    # The first reason is told: what the job says itself comes before what a machine or a table
    # rules out, for that is what its user can change.
    job = rules.job
    yield _not_named(job, table, "sharding_types", wanted)
    yield from _of_constraints(rules, table, wanted)
    if job.planner.constants == "additive" and wanted not in ADDITIVE_TYPES:
        yield f"the additive costs know {' and '.join(ADDITIVE_TYPES)} only"
    kernels, replicated = table.compute_kernels, traits(wanted).replicated
    ways = dict.fromkeys((replica_of(rules, table), DENSE))
    fitting = ways if replicated else [k for k in kernels or () if k != DENSE]
    if kernels is not None and not any(kernel in fitting for kernel in kernels):
        needed = " or ".join(ways) if replicated else "a kernel other than dense"
        yield (
            f"it needs {needed}, and the job allows only {', '.join(kernels)} "
            f"({key_of(job, table.name, 'compute_kernels')})"
        )
    yield from _of_machine(rules, table, wanted)
    if traits(wanted).cuts_columns and not uncut_columns(job):
        yield _not_cut(rules, table)


def _of_constraints(rules: Rules, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    """What the job's constraints rule out."""
    constraints = rules.job.planner.constraints
    where = "planner.constraints"
    for group in constraints.together:
        if table.name in group and not traits(wanted).whole:
            others = ", ".join(name for name in group if name != table.name)
            yield f"it is kept together with {others} ({where}.together), each whole on one rank"
    apart = any(table.name in group for group in constraints.apart)
    limited = table.name in constraints.ranks or apart
    if limited and traits(wanted).partition == "uniform" and rules.context.cluster.world_size > 1:
        yield f"it uses every rank, and {where} keep the table from some"


def _of_machine(rules: Rules, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    """What the runtime, the device and the table's rows rule out."""
    kind = traits(wanted)
    if rules.is_trained:
        if kind.cuts_columns and table.optimizer in BY_ROW and not table.sharding_types:
            yield (
                f"{table.optimizer} sums over all columns of a row, so it is planned where "
                f"{wanted} is named alone ({key_of(rules.job, table.name, 'sharding_types')})"
            )
        return
    if is_quantized(table) and wanted not in QUANTIZED_TYPES:
        yield f"a quantised table is {' or '.join(QUANTIZED_TYPES)}"
    if not (table.pooled or kind.sequences):
        yield "it pools what it looks up, and the rows of this table stay apart"
    on_cpu = rules.context.cluster.compute_device == "cpu"
    if rules.job.planner.as_torchrec and on_cpu and table.pooled and kind.cuts_rows:
        yield "TorchRec offers it on accelerators only"


def _not_cut(rules: Rules, table: TableSpec) -> str:
    """Nothing where there is a width to cut to."""
    least = table.min_partition or DEFAULT_MIN_PARTITION
    if rules.is_trained:
        least = table.min_partition or max(DEFAULT_MIN_PARTITION, table.dim // 2)
    if _can_cut(table, least):
        return ""
    return (
        f"there is nothing to cut: no width that divides {table.dim} columns is a multiple of 4 "
        f"and at least {least} ({key_of(rules.job, table.name, 'min_partition')})"
    )


def _of_kernel(rules: Rules, table: TableSpec, wanted: str) -> typing.Iterator[str]:
    yield _not_named(rules.job, table, "compute_kernels", wanted)
    types, cluster = table.sharding_types, rules.context.cluster
    if is_quantized(table):
        if wanted not in QUANTIZED:
            kind = kind_of(table)
            yield f"rows of kind '{kind}' are bytes, which kernels of training do not read"
        elif wanted not in QUANTIZED_KERNELS[cluster.compute_device]:
            yield "a CPU has no faster memory beside its host's: quant keeps the table there"
        return
    if wanted in QUANTIZED:
        yield "it serves quantised tables in inference: say kind = 'int8' or 'int4'"
    if rules.job.planner.constants == "additive" and wanted != "fused":
        yield "the additive costs know fused only"
    replicas = [traits(t).replicated for t in types or ()]
    if wanted == DENSE and types is not None and not any(replicas):
        yield f"only data_parallel is dense, and the job allows {_types(rules.job, table)}"
    way = replica_of(rules, table)
    if wanted not in (DENSE, way) and types and all(replicas):
        yield f"data_parallel is {way}, and the job allows {_types(rules.job, table)}"
    if wanted == ON_DISK and not cluster.ssd_cap:
        yield "there is no SSD: cluster.ssd_cap is 0"
    on_cpu = cluster.compute_device == "cpu"
    known = (*CPU_KERNELS, ON_DISK) if on_cpu else CPU_KERNELS
    if rules.is_trained and wanted not in known:
        yield "this version's runtime carries out fused for routed tables and dense for replicas"
    if on_cpu and wanted not in known:
        yield "a CPU has no faster memory beside its host's: fused keeps the table there"


def _not_named(job: Job, table: TableSpec, field: str, wanted: str) -> str:
    allowed = getattr(table, field)
    if allowed is None or wanted in allowed:
        return ""
    return f"the job allows only {', '.join(allowed)} ({key_of(job, table.name, field)})"


def _types(job: Job, table: TableSpec) -> str:
    allowed = ", ".join(table.sharding_types or ())
    return f"only {allowed} ({key_of(job, table.name, 'sharding_types')})"
