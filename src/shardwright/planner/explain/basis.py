"""What a reader of a plan must know first: on what its numbers rest, and who said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import UNSET

from shardwright.core.errors import listed
from shardwright.core.kinds import KNOWN_AUC, PACKED, SEEDS_VARY, kind_of
from shardwright.core.kinds import nbytes as nbytes_of
from shardwright.core.model import TableSpec
from shardwright.core.placement import Replicate
from shardwright.core.quantities import counted, exact_bytes, format_bytes
from shardwright.job.job import Job, checkpointing_of, memory_of
from shardwright.job.model_of_job import step_dtypes
from shardwright.job.plan import Plan
from shardwright.job.planner import EstimatorSection, ReservationSection, reservation_kind
from shardwright.planner.statistics.tables import load_factor

MOST_NAMES = 3
MOST_UNITS = 8

PROFILES = {
    "cluster": "our own costs, from the constants of a machine",
    "torchrec-1.9": "the costs of TorchRec's planner, release 1.9.2",
    "additive": "the additive costs of sharding studies",
}


class Fact(msgspec.Struct, frozen=True):
    """``what`` is ``value``, as ``origin`` has it: a key of the job, a preset, or a default."""

    what: str
    value: str
    origin: str


def basis(plan: Plan) -> tuple[Fact, ...]:
    """All facts, the model first."""
    tables = plan.model.tables
    return (
        *_model(plan, tables),
        *_machine(plan),
        *_memory(plan),
        *(_step(plan) if tables else ()),
        *(_kernels(plan, tables) if tables else ()),
        *(_units(plan) if plan.units else ()),
        *_search(plan),
    )


def _model(plan: Plan, tables: tuple[TableSpec, ...]) -> Iterator[Fact]:
    job = plan.job
    parts = [f"{len(tables)} tables"] if tables else []
    parts.append(_unit_names(plan) if plan.units else "alone, no dense part")
    text = (", " if plan.units else " ").join(parts)
    yield Fact("model", f"{job.model.kind}: {text}", "model.kind")
    if tables:
        yield from _of_tables(plan, tables)
    else:
        yield Fact("dtype", step_dtypes(job)[0] or "fp32", "what is planned and run")
    if plan.units:
        origin = _said(job.train.optimizer != "sgd", "train.optimizer")
        yield Fact("optimizer of units", job.train.optimizer, origin)
    origin = _said(job.batch.size != 128, "batch.size")
    yield Fact("batch", f"{job.batch.size:,} samples per rank and step", origin)


def _unit_names(plan: Plan) -> str:
    names = [unit.name for unit in plan.units]
    if len(names) > MOST_UNITS:
        return f"{len(names)} units, {names[0]} to {names[-1]}"
    return f"units {', '.join(names)}"


def _of_tables(plan: Plan, tables: tuple[TableSpec, ...]) -> Iterator[Fact]:
    job, units = plan.job, plan.units
    yield from _kinds(job)
    value = _counted(tables, lambda table: table.dtype) + ("; units fp32" if units else "")
    yield Fact("dtype", value, _key(job, "dtype", "fp32"))
    outputs = _counted(tables, lambda t: t.output_dtype or f"{t.dtype}, as the table")
    yield Fact("output dtype", outputs, _key(job, "output_dtype", None))
    pooled = _counted(tables, lambda table: "pooled" if table.pooled else "sequence")
    yield Fact("lookups", pooled, _key(job, "pooled", True))
    if len(tables) and any(t.module_weighted or t.constraint_weighted for t in tables):
        text = _counted(
            tables,
            lambda t: "weighted" if t.module_weighted or t.constraint_weighted else "unweighted",
        )
        yield Fact("weights of ids", text, "tables.module_weighted, tables.constraint_weighted")
    key = "train.optimizer" if job.train.table_optimizer is UNSET else "train.table_optimizer"
    default = key if plan.units else "none given: state is counted as 0 bytes"
    yield Fact(
        "optimizer of tables",
        _counted(tables, lambda table: str(table.optimizer)) + ", fused in backward",
        _key(job, "optimizer", None, default),
    )


def _kinds(job: Job) -> Iterator[Fact]:
    """What tables that are not full take, and what they would."""
    made = [table for table in job.tables if kind_of(table) != "full"]
    if not made:
        return
    own, full = sum(map(nbytes_of, made)), sum(table.nbytes for table in made)
    text = (
        _counted(job.tables, lambda table: kind_of(table))
        + f": {format_bytes(own)} instead of {format_bytes(full)}"
    )
    chosen = "planner.kinds" if job.planner.kinds is not UNSET else "embeddings.kind, tables.kind"
    yield Fact("kinds of embeddings", text, chosen)
    yield Fact("AUC beside full tables", _known(made), "benchmarks/embeddings_study.toml")


def _known(made: list[TableSpec]) -> str:
    """What kinds are known to cost in quality."""
    words = []
    for kind in dict.fromkeys(map(kind_of, made)):
        if kind in PACKED:
            words.append(f"{kind} not measured, entries within half a step of their row")
        elif kind in KNOWN_AUC:
            words.append(f"{kind} {KNOWN_AUC[kind]:+.3f} (seeds vary by {SEEDS_VARY})")
        else:
            words.append(f"{kind} not measured")
    return "; ".join(words)


def _machine(plan: Plan) -> Iterator[Fact]:
    section, cluster = plan.job.cluster, plan.cluster
    preset = _machine_name(plan)
    local, group = cluster.local_world_size, cluster.group
    linked = f", {group} linked as fast as ranks of one host" if group != local else ""
    yield Fact(
        "ranks",
        f"{cluster.world_size} on {cluster.compute_device}, {local} per host{linked}",
        "cluster.world_size" if section.world_size is not None else preset,
    )
    for tier, nbytes in zip(("hbm", "ddr", "ssd"), cluster.capacity, strict=True):
        if nbytes:
            given = getattr(section, f"{tier}_cap") is not None
            what = f"{tier.upper()} of a rank"
            yield Fact(what, exact_bytes(nbytes), f"cluster.{tier}_cap" if given else preset)


def _memory(plan: Plan) -> Iterator[Fact]:
    """What tables may not use, and by which rule."""
    section, kept = plan.job.planner.reservation, plan.reserved
    default = ReservationSection()
    kind = reservation_kind(plan.job)
    numbers = []
    if kind in ("percentage", "heuristic", "inference"):
        numbers.append(
            f"{section.percentage * 100:g} %{_mark(section.percentage, default.percentage)}"
        )
    if kind == "absolute":
        numbers.append(f"{section.nbytes:,} B{_mark(section.nbytes, default.nbytes)}")
    if kind in ("heuristic", "inference"):
        numbers.append(f"dense parameters {section.dense_bytes:,} B")
    if kind == "heuristic":
        numbers.append(f"counted {section.multiplier:g} times")
    if any(kept.dense) or any(kept.inputs):
        numbers.append(f"that is {sum(kept.dense):,} B dense, {sum(kept.inputs):,} B inputs")
    text = {
        "traced": "nothing by rule; the dense part is simulated to the byte",
        "none": "nothing",
    }
    of = f"of profile '{plan.job.planner.constants}'"
    if plan.units:
        of = f"for a {plan.job.model.kind}"
    origin = _said(section.kind is not None, "planner.reservation.kind", f"the rule {of}")
    yield Fact("reservation", f"{kind}: {text.get(kind) or ', '.join(numbers)}", origin)
    kept_left = {"HBM": kept.hbm_left, "DDR": kept.ddr_left, "SSD": kept.ssd_left}
    left = [f"{n:,} B {tier}" for tier, n in kept_left.items() if n]
    yield Fact("left for the plan", f"{', '.join(left)} per rank", "capacity less reservation")
    if plan.units:
        yield Fact(
            "peak",
            "highest live bytes of weights, gradients, states, buffers, activations, exchanges "
            "and batch in a steady step",
            "simulated",
        )


def _step(plan: Plan) -> Iterator[Fact]:
    """What a step keeps alive, and what travels."""
    section, default = plan.job.planner.estimator, EstimatorSection()
    where = "planner.estimator"

    def fact(what: str, value: str, field: str) -> Fact:
        changed = getattr(section, field) != getattr(default, field)
        return Fact(what, value, _said(changed, f"{where}.{field}"))

    yield fact("input pipeline", section.pipeline_type, "pipeline_type")
    counted = "counted where the input pipeline keeps no batch in flight"
    if section.count_ephemeral:
        counted = "always counted"
    yield fact("outputs at the peak", counted, "count_ephemeral")
    mode = "inference: no backward" if section.is_inference else "training"
    yield fact("mode", mode, "is_inference")
    own = "table" if plan.job.planner.constants == "torchrec-1.9" else "output"
    rows = f"the {own}'s own dtype, forward and backward"
    if section.communication is not None:
        rows = "{} forward, {} backward".format(*section.communication)
    yield fact("rows on the wire", rows, "communication")


def _kernels(plan: Plan, tables: tuple[TableSpec, ...]) -> Iterator[Fact]:
    counts = Counter(table.compute_kernel for table in plan.tables)
    text = ", ".join(f"{kernel} ({count})" for kernel, count in counts.items())
    slow = (
        "" if plan.search.slow_kernels else "; in host memory only what no faster kernel replaces"
    )
    value = text + (slow if plan.cluster.compute_device == "cuda" else "")
    yield Fact("kernels chosen", value, _key(plan.job, "compute_kernels", None, "free"))
    shares: dict[tuple[float, str], int] = {}
    for chosen, table in zip(plan.tables, tables, strict=True):
        found = load_factor(plan, chosen, table)
        if found is not None:
            shares[found] = shares.get(found, 0) + 1
    for (share, origin), count in shares.items():
        yield Fact("cached share of rows", f"{share:g} ({count} tables)", origin)


def _units(plan: Plan) -> Iterator[Fact]:
    """How layers were cut into units, and whether the next one is gathered ahead."""
    section, where, chosen = plan.job.planner.dense, "planner.dense", "the fastest that fits"

    def origin(field: str) -> str:
        given = getattr(section, field) is not None
        return _said(given, f"{where}.{field}", chosen)

    size = plan.model.bucket_size
    if size:
        count = len(plan.units)
        text = f"{counted(count, 'bucket')} of {size:,} elements, as their gradients come"
        tried = {row.bucket_size for row in plan.search.tried or ()}
        yield Fact("units", text, _said(len(tried) < 2, f"{where}.bucket_size", chosen))
    most = max(len(unit.members) for unit in plan.units)
    if most > 1 or section.layers_per_unit is not None:
        yield Fact("layers of a unit", f"{most} at most", origin("layers_per_unit"))
    sharded = [u for u in plan.units if not isinstance(u.optimizer_state, Replicate)]
    if sharded:
        count = sum(unit.reshard_after_forward for unit in sharded)
        text = f"of {count} of {len(sharded)} sharded units"
        yield Fact("reshard_after_forward", text, origin("reshard"))
    ran = {unit.checkpointing for unit in plan.units if unit.checkpointed}
    if ran:
        count = sum(len(unit.checkpointed) for unit in plan.units)
        text = f"{count} blocks: {', '.join(sorted(ran))}"
        given = memory_of(plan.job).checkpointing is not UNSET
        key = "memory.checkpointing" if given else f"{where}.checkpointing"
        yield Fact("checkpointed", text, _said(len(checkpointing_of(plan.job)) == 1, key, chosen))
    text = "the next unit, while one computes" if plan.prefetch else "nothing"
    yield Fact("gathered ahead", text, origin("prefetch"))


def _search(plan: Plan) -> Iterator[Fact]:
    section, search = plan.job.planner, plan.search
    over = f"{search.options:,} options of the tables" if plan.tables else "cuts and placements"
    value = f"{search.name} over {over}"
    yield Fact("search", value, _said(section.search != "bounded", "planner.search"))
    for why in search.skipped:
        yield Fact("not searched to its end", why, "the search")
    rules = section.constraints
    if rules.together or rules.apart or rules.ranks:
        text = (
            f"{len(rules.together)} groups together, {len(rules.apart)} apart, "
            f"{len(rules.ranks)} tables pinned to ranks"
        )
        yield Fact("constraints", text, "planner.constraints")
    profile = section.constants
    origin = _said(profile != "cluster", "planner.constants")
    yield Fact("costs", f"{profile}: {PROFILES[profile]}", origin)
    otherwise = "the default" if profile == "cluster" else "planner.constants say so"
    origin = _said(bool(plan.job.cluster.preset), "cluster.preset", otherwise)
    if plan.job.cluster.file:
        origin = "cluster.file"
    yield Fact("constants", _machine_name(plan), origin)


def _machine_name(plan: Plan) -> str:
    """What the machine's constants are from."""
    kind = "measured" if plan.job.cluster.file else "preset"
    return f"{kind} '{plan.cluster.name}'"


def _counted(tables: Iterable[TableSpec], of: Callable[[TableSpec], str]) -> str:
    """What tables have: one word where all have the same, else each with how many have it."""
    counts = Counter(of(table) for table in tables)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{word} ({count})" for word, count in counts.most_common())


def _key(job: Job, field: str, default: object, otherwise: str = "the default") -> str:
    """Which tables' own keys say so."""
    named = [t.name for t in job.tables if getattr(t, field) != default]
    if not named:
        return f"tables.{field} not given: {otherwise}"
    if len(named) == len(job.tables):
        return f"tables.{field}"
    return f"tables.{field} of {listed(named, MOST_NAMES)}, others {otherwise}"


def _said(given: bool, key: str, otherwise: str = "the default") -> str:
    return key if given else f"{key} not given: {otherwise}"


def _mark(value: object, default: object) -> str:
    return " (the default)" if value == default else ""
