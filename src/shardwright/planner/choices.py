"""Every way to shard every table that a job allows, priced by the job's profile."""

# Options are many (types x kernels x cuts for every table) and pricing them takes much of the time
# of planning thousands of tables. So all cases are priced in one call, as arrays; kernels that can
# only help while memory is short are left out until it is; and what was priced stays when they come
# in.

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.errors import InputError, expected
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.option import Option
from shardwright.job.job import Job
from shardwright.planner import profiles
from shardwright.planner.choice import Choice
from shardwright.planner.exclusion import Rules, check_limits, replica_of, uncut_columns
from shardwright.planner.options import SLOW_KERNELS, runnable_options, wide_options
from shardwright.planner.pricing import additive, native
from shardwright.planner.pricing.additive import SHARDING_TYPES as ADDITIVE_TYPES
from shardwright.planner.pricing.evaluate import PricingContext

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
    rules: Rules,
    *,
    slow: bool,
    capacity: tuple[int, int, int] | None = None,
    known: Tables = (),
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
                expected(
                    "tables",
                    f"at most {MAX_SHARDS:,} shards to choose from",
                    f"more up to '{table.name}', {len(found):,} tables before it",
                    "Raise min_partition, name fewer sharding_types, or set planner.options to "
                    "'torchrec'.",
                )
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
