"""Every way to shard every table that a job allows, priced by the job's profile; and why a table
cannot have a sharding type or a compute kernel."""

# Options are many (types x kernels x cuts for every table) and pricing them takes much of the time
# of planning thousands of tables. So all cases are priced in one call, as arrays; kernels that can
# only help while memory is short are left out until it is; and what was priced stays when they come
# in. What rules an option out is said once, so that a refusal and `--why-not` say the same.

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.errors import InputError
from shardwright.core.kinds import kind_of
from shardwright.core.model import DENSE, ON_DISK, QUANTIZED, ComputeKernel, ModelSpec, TableSpec
from shardwright.core.optimizers import BY_ROW
from shardwright.core.option import DEFAULT_MIN_PARTITION, Option, column_width
from shardwright.core.sharding import TYPES, traits
from shardwright.job.job import Job
from shardwright.job.model_of_job import key_of
from shardwright.planner import profiles
from shardwright.planner.choice import Choice
from shardwright.planner.options import (
    QUANTIZED_KERNELS,
    QUANTIZED_TYPES,
    SLOW_KERNELS,
    is_quantized,
    replica_kernel,
    runnable_options,
    wide_options,
)
from shardwright.planner.pricing import additive, native
from shardwright.planner.pricing.additive import SHARDING_TYPES as ADDITIVE_TYPES
from shardwright.planner.pricing.evaluate import PricingContext

CPU_KERNELS = ("fused", DENSE)
FIELDS = ("sharding_types", "compute_kernels")  # of a table, that limit its options
MAX_SHARDS = 3_000_000  # to list (like neighbours are one) or, in the finest cuts, to place: 1 GiB

Tables = tuple[tuple[Choice, ...], ...]
Case = tuple[TableSpec, Option]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While hundreds of thousands of values are made that all stay: nothing is looked for among
    them that could be let go, which takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@uncollected()
def table_choices(
    rules: Rules, *, slow: bool, capacity: tuple[int, int, int] | None = None, known: Tables = ()
) -> Tables:
    """Every allowed option of every table; those of ``known`` choices are not priced again.

    Without ``slow`` kernels with weights in host memory are left out where they can only help if
    ranks of ``capacity`` bytes have too little HBM for all tables together. They stay where the
    same shards of a fused kernel are larger than a rank or take longer.
    """
    tables = _priced(rules, _listed(rules, slow=slow), known)
    if rules.is_trained:
        return _with_latencies(rules, tables)
    if slow or capacity is None:
        return tables
    more = _needed_anyway(rules, tables, capacity)
    found = _priced(rules, more) if any(more) else ((),) * len(tables)
    return tuple((*first, *then) for first, then in zip(tables, found, strict=True))


def _priced(rules: Rules, options: Sequence[Sequence[Option]], known: Tables = ()) -> Tables:
    tables = rules.model.tables
    priced = [
        {_way(choice.option): choice for choice in own} for own in known or [()] * len(tables)
    ]
    cases = [
        (table, option)
        for table, found, its in zip(tables, options, priced, strict=True)
        for option in found
        if _way(option) not in its
    ]
    remaining = iter(price(rules.job, rules.context, cases))
    return tuple(
        tuple(its[way] if (way := _way(option)) in its else next(remaining) for option in found)
        for found, its in zip(options, priced, strict=True)
    )


def _way(option: Option) -> tuple[str, str, int]:
    """What tells the options of one table apart."""
    return option.sharding_type, option.compute_kernel, option.runs[0].columns


def _with_latencies(rules: Rules, tables: Tables) -> Tables:
    """The choices of tables that have a module, and so an exchange, for themselves with what that
    takes. The latencies of an exchange that is shared are no table's own."""
    model, context = rules.model, rules.context

    def latency(choice: Choice) -> float:
        return math.fsum(context.latencies([choice.part(context.cluster.world_size)]).values())

    paths = [model.step.tables_of(table.tensor.fqn) for table in model.tables]
    shared = {path for path, count in Counter(paths).items() if count > 1}
    return tuple(
        own
        if path in shared
        else tuple(msgspec.structs.replace(c, latency=latency(c)) for c in own)
        for path, own in zip(paths, tables, strict=True)
    )


def _needed_anyway(
    rules: Rules, choices: Tables, capacity: tuple[int, int, int]
) -> list[list[Option]]:
    """Options of kernels with weights in host memory that no option of a fused one stands for: it
    is larger than a rank, or slower, or its table shares a rank with others."""
    tables, planner = rules.model.tables, rules.job.planner
    joined = {name for group in planner.constraints.together for name in group}
    fused = [
        (number, choice)
        for number, (table, own) in enumerate(zip(tables, choices, strict=True))
        if _has_slow_kernels(rules, table)
        for choice in own
        if choice.option.compute_kernel == "fused" and not choice.is_replicated
    ]
    cases = [(tables[number], choice.option) for number, choice in fused]
    theirs = planner.constants == profiles.TORCHREC
    faster = profiles.torchrec.faster if theirs else native.faster
    found: list[list[Option]] = [[] for _ in tables]
    helps = faster(rules.context, cases, SLOW_KERNELS) if cases else set()
    for case, (number, choice) in enumerate(fused):
        always = tables[number].name in joined or not _fits(choice, capacity)
        found[number] += [
            msgspec.structs.replace(choice.option, compute_kernel=kernel)
            for kernel in SLOW_KERNELS
            if always or (case, kernel) in helps
        ]
    return found


def _has_slow_kernels(rules: Rules, table: TableSpec) -> bool:
    """Whether kernels with weights in host memory are offered though nobody named any."""
    planner, device = rules.job.planner, rules.context.cluster.compute_device
    unnamed = table.compute_kernels is None and planner.constants != "additive"
    return unnamed and device == "cuda" and not planner.as_torchrec


def _fits(choice: Choice, capacity: tuple[int, int, int]) -> bool:
    """Whether a rank can hold any shard."""
    runs, _ = choice.option.column_block
    return all(
        size <= most
        for cost in choice.costs[: len(runs)]
        for size, most in zip(cost.storage, capacity, strict=True)
    )


def _listed(rules: Rules, *, slow: bool) -> list[tuple[Option, ...]]:
    """The options of every table; raises InputError before they fill the planner's own memory."""
    found: list[tuple[Option, ...]] = []
    shards = 0
    for table in rules.model.tables:
        options = _options(rules, table, slow=slow)
        pieces = max((o.count for o in options if o.partition != "uniform"), default=0)
        listed = {id(option.runs): len(option.runs) for option in options}  # kernels share them
        # Counted before anything is priced, for it is the listing itself that would fill the
        # planner's memory.
        shards += max(pieces, sum(listed.values()))
        if shards > MAX_SHARDS:
            raise InputError(
                "tables",
                f"at most {MAX_SHARDS:,} shards to choose from",
                f"more up to '{table.name}', {len(found):,} tables before it",
                "Raise min_partition, name fewer sharding_types, or set planner.options to "
                "'torchrec'.",
            )
        found.append(options)
    return found


def price(job: Job, context: PricingContext, cases: Sequence[Case]) -> list[Choice]:
    """What options cost by the job's profile; tables alone carry their exchange buffers."""
    match job.planner.constants:
        case "torchrec-1.9":
            return profiles.torchrec.price(context, cases)
        case "additive":
            return additive.price(context, cases)
        case "cluster":
            return native.price(context, cases, exchange=not job.model.traits.has_step)


def offers_slow(model: ModelSpec, job: Job, cluster: Cluster) -> bool:
    """Whether any table may have more options where ``slow`` kernels are looked at."""
    fixed = model.is_trained or job.planner.constants == "additive" or job.planner.as_torchrec
    named = all(table.compute_kernels is not None for table in model.tables)
    return not (fixed or named or cluster.compute_device == "cpu")


def _options(rules: Rules, table: TableSpec, *, slow: bool) -> tuple[Option, ...]:
    planner, cluster = rules.job.planner, rules.context.cluster
    if (table.sharding_types, table.compute_kernels) != (None, None):
        check_limits(rules, table)
    replica = replica_of(rules, table)
    if rules.is_trained:
        return runnable_options(table, cluster, replica)
    if planner.constants == "additive":
        allowed = table.sharding_types or ADDITIVE_TYPES
        types = tuple(t for t in allowed if t in ADDITIVE_TYPES)
        table = msgspec.structs.replace(table, sharding_types=types, compute_kernels=("fused",))
    elif planner.as_torchrec:
        return profiles.torchrec.torchrec_options(table, cluster)
    every_cut, uncut = planner.search == "exact", uncut_columns(rules.job)
    return wide_options(table, cluster, replica, slow=slow, every_cut=every_cut, uncut=uncut)


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
            where = key_of(rules.job, table.name, field)
            found = "; ".join(f"{wanted}: {why}" for wanted, why in whys)
            remedy = "Name another one, or leave the key out."
            raise InputError(where, f"any that can be planned for '{table.name}'", found, remedy)


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


def _of_type(rules: Rules, table: TableSpec, wanted: str) -> Iterator[str]:
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


def _of_constraints(rules: Rules, table: TableSpec, wanted: str) -> Iterator[str]:
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


def _of_machine(rules: Rules, table: TableSpec, wanted: str) -> Iterator[str]:
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


def _of_kernel(rules: Rules, table: TableSpec, wanted: str) -> Iterator[str]:
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
