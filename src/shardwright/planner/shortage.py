"""Why nothing fits: the fullest rank, the table, the shortfall, and ways out that were tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardwright.core.cluster import MAX_PLANNED, TIERS, Tier
from shardwright.core.errors import NoPlanError, ShardwrightError
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.placement import Zero
from shardwright.core.quantities import exact_bytes
from shardwright.core.timeline import EXACT_KINDS, Kind, category
from shardwright.job.job import (
    CHOSEN_FROM,
    Job,
    checkpointing_of,
    memory_of,
    parallel_of,
    with_checkpointing,
    with_memory,
)
from shardwright.job.plan import Tried
from shardwright.planner.draft import Draft, TablesDraft
from shardwright.planner.problem import Problem, make_problem, reserve
from shardwright.planner.search.bound import ROUNDING
from shardwright.planner.search.watch import Watch
from shardwright.planner.search.widening import fits_somehow, least_memory
from shardwright.planner.sharing import Sharing, with_sharing
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.found import Found, ModelOf
from shardwright.planner.strategy.spacing import placed_tables, space_of
from shardwright.planner.strategy.steps import smallest

MAX_BYTES = 2**60
OF_PARTS: tuple[Kind, ...] = (*EXACT_KINDS, "gathered_weight", "unreduced_gradient")
MAX_NAMED = 8  # tables of a longer list
SECONDS_FOR_LEAST = 5.0  # of search for what asks least
SECONDS_FOR_A_WAY = 5.0  # after which no other variant of a kind of way out is tried
SECONDS_FOR_A_TRY = 5.0  # of search, for one variant; none is named untried
ROOMY = 1.25  # times the ranks that bytes alone ask for: tried first, for they mostly fit
MORE_MEMORY = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0)  # times what the fullest rank needs


def error(found: Found, watch: Watch) -> NoPlanError:
    """The refusal of a search without a plan, from the draft that asks least of its fullest
    rank; ``watch`` is the search's own, which hears on."""
    problem, model_of, tried = found.problem, found.model_of, found.tried
    assert model_of is not None
    whole = Watch(hear=watch.hear)
    whole.begun = watch.begun
    if problem.model.is_trained:
        draft, helps = smallest(problem), found.helps(whole) if found.helps else ""
        return _refusal(problem, draft, model_of, whole, tried, helps, found.remark, proven=False)
    least, proven = _least(problem, whole)
    if least is None:
        return _no_ranks(problem)
    if least.fits:
        return _not_looked_at(found)
    return _refusal(problem, least, model_of, whole, proven=proven)


def _not_looked_at(found: Found) -> NoPlanError:
    """The refusal of a search that ended before it came to a plan that fits."""
    why = "; ".join(found.skipped) or "none of them fits"
    return NoPlanError(
        f"no plan found among {found.proposals:,} proposals, though some that fit exist: {why}. "
        "Use planner.search 'bounded', or other planner.proposers."
    )


def _no_ranks(problem: Problem) -> NoPlanError:
    """The refusal where rules, not memory, leave a table without a rank."""
    rules = problem.job.planner.constraints
    names = list(dict.fromkeys([*(n for g in rules.apart for n in g), *rules.ranks]))
    text = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return NoPlanError(
        f"no plan found that keeps planner.constraints: apart and ranks leave a table of {text}"
        f"{more} no rank of its own. Pin fewer tables, or allow them more ranks."
    )


def _least(problem: Problem, whole: Watch) -> tuple[TablesDraft | None, bool]:
    """The draft that asks least, if the rules allow any, and whether it is proven that none
    fits."""
    space = space_of(problem, problem.tables, problem.capacity)
    found = least_memory(space, whole.part(SECONDS_FOR_LEAST))
    proven = found.bound.seconds > 1 + ROUNDING
    if found.best is None:
        return None, proven
    return TablesDraft(problem, placed_tables(space, found.best), ()), proven


def _refusal(
    problem: Problem,
    draft: Draft,
    model_of: ModelOf,
    whole: Watch,
    tried: Sequence[Tried] = (),
    helps: str = "",
    remark: str = "",
    *,
    proven: bool,
) -> NoPlanError:
    short = _fullest(problem, draft)
    known = " of TorchRec's options" if problem.job.planner.as_torchrec else ""
    what = f"no plan{known} can fit" if proven else "no plan found that fits"
    needs = ", ".join(f"{each.checkpointing} {exact_bytes(each.peak_bytes)}" for each in tried)
    text = f"Needed by checkpointing: {needs}. " if tried else ""
    text = f"{remark} {text}" if remark else text
    return NoPlanError(
        f"{what}: rank {short.rank} is the fullest and needs {exact_bytes(short.need)} of "
        f"{exact_bytes(short.capacity)}{_reserved(problem, short)}, "
        f"{short.need - short.capacity:,} B too much; {_largest(draft, short.rank)}. "
        f"{text}{_ways(problem, short, model_of, whole, helps)}"
    )


@dataclass(frozen=True, slots=True)
class _Short:
    """The memory and the rank that exceed their capacity most, in bytes."""

    tier: Tier
    rank: int
    need: int
    capacity: int


def _reserved(problem: Problem, short: _Short) -> str:
    total: int = getattr(problem.cluster, f"{short.tier}_cap")
    return f" left of {exact_bytes(total)} by the reservation" if total > short.capacity else ""


def _fullest(problem: Problem, draft: Draft) -> _Short:
    if isinstance(draft, TablesDraft):
        found = [
            _Short(tier, rank, size, capacity)
            for tier, capacity in zip(TIERS, problem.capacity, strict=True)
            for rank, size in enumerate(draft.tier_bytes[tier])
        ]
        return max(found, key=lambda its: (its.need - its.capacity, -its.rank))
    assert isinstance(draft, StepDraft)
    tier: Tier = "ddr" if problem.cluster.compute_device == "cpu" else "hbm"
    fullest = draft.peak_bytes.index(max(draft.peak_bytes))
    return _Short(tier, fullest, draft.demand, problem.decisive_capacity)


def _largest(draft: Draft, rank: int) -> str:
    """What the rank has most of: of what passes through a step its kind, else the part that it
    keeps most of."""
    if isinstance(draft, StepDraft):
        phases = draft.phase_peaks(draft.load(rank))
        phase, kinds = max(phases.items(), key=lambda item: sum(item[1].values()))
        passing = [(size, kind) for kind, size in kinds.items() if kind not in OF_PARTS]
        size, kind = max(passing, default=(0, "temporary"))
        if size > sum(kinds.get(each, 0) for each in OF_PARTS):
            most = f"{category(kind)} with {exact_bytes(size)}"
            return f"the most at its peak, in {phase}, are {most}"
        held = {n: size for (_, kind, n), size in draft.exact[rank].items() if kind == "weight"}
    else:
        held = {}
        for placed in draft.tables:
            for first, run, cost in placed.stretches():
                if first <= rank < first + run.count:
                    name = placed.choice.table.name
                    held[name] = held.get(name, 0) + sum(cost.storage)
    name = max(held, key=lambda n: held[n])
    return f"its largest part is {name} with {exact_bytes(held[name])}"


@dataclass(frozen=True, slots=True)
class _Try:
    """Variants of a job, of which each is tried before it is named, and what was ``tried``."""

    problem: Problem
    short: _Short
    model_of: ModelOf
    whole: Watch
    watch: Watch
    tried: list[str]

    @property
    def job(self) -> Job:
        """The job that does not fit."""
        return self.problem.job

    def fits(self, job: Job, what: str) -> bool:
        """Whether a plan of ``job`` is found, which differs in ``what``."""
        self.tried.append(what)
        return _fits(self.model_of, job, self.whole)


def _ways(problem: Problem, short: _Short, model_of: ModelOf, whole: Watch, helps: str) -> str:
    """What would help, each tried before it is named; where nothing was found, what was tried."""
    found, tried = [helps] if helps else [], []
    for way in WAYS:
        attempt = _Try(problem, short, model_of, whole, whole.part(SECONDS_FOR_A_WAY), [])
        text = way(attempt)
        if text:
            found.append(text)
        elif attempt.tried:
            some = list(dict.fromkeys(attempt.tried))
            if len(some) > MAX_NAMED:
                some = [*some[: MAX_NAMED - 1], "...", some[-1]]
            cut = f" (cut at {SECONDS_FOR_A_WAY:g} s)" if attempt.watch.ended else ""
            tried.append(f"{', '.join(some)}{cut}")
    if found:
        return f"What would help: {'; '.join(found)}."
    if not tried:
        return "No way out was found: there is none to try."
    return f"No way out was found. Tried: {'; '.join(tried)}."


def _larger_memory(attempt: _Try) -> str:
    """The capacity with which the draft fits, with what the reservation takes of it; where tables
    alone may lie elsewhere and more of this memory is not enough, that of another one."""
    short, cluster = attempt.short, attempt.problem.cluster
    total, left = getattr(cluster, f"{short.tier}_cap"), short.capacity
    if not left:  # it is all reserved; what is left of plenty says how much that asks for
        total, left = MAX_BYTES, _left_of_plenty(attempt)
    exact = short.need + total - left
    found = _enough(attempt, short.tier, exact, -(-short.need * total // max(left, 1)))
    if found or attempt.problem.model.is_trained:
        return found
    missing = short.need - short.capacity
    for tier in TIERS:
        has: int = getattr(cluster, f"{tier}_cap")
        if has and tier != short.tier and (found := _enough(attempt, tier, has + missing)):
            return found
    return ""


def _enough(attempt: _Try, tier: Tier, exact: int, scaled: int = 0) -> str:
    """The first of growing capacities with which a plan is found: ``exact``, then multiples of
    ``scaled``."""
    more = (round(times * (scaled or exact)) for times in MORE_MEMORY)
    *usual, plenty = sorted({min(wanted, MAX_BYTES) for wanted in (exact, *more)})
    for wanted in (*usual, plenty):
        if attempt.watch.over() and wanted not in (exact, plenty):
            continue
        what = f"cluster.{tier}_cap of {exact_bytes(wanted)}"
        if attempt.fits(_with(attempt.job, "cluster", **{f"{tier}_cap": wanted}), what):
            return f"{what} fits"
    return ""


def _left_of_plenty(attempt: _Try) -> int:
    """Bytes of ``MAX_BYTES`` of the short memory that the reservation leaves."""
    problem, tier = attempt.problem, attempt.short.tier
    roomy = msgspec.structs.replace(problem.cluster, **{f"{tier}_cap": MAX_BYTES})
    left = reserve(problem.job, problem.model, roomy).capacities[0]
    return int(left[TIERS.index(tier)])


def _checkpointing(attempt: _Try) -> str:
    """The first policy that the job does not allow with which a plan fits."""
    job = attempt.job
    repeats = any(unit.series for unit in attempt.problem.model.units)
    if not job.model.traits.has_blocks or not repeats:
        return ""
    for policy in (name for name in CHOSEN_FROM if name not in checkpointing_of(job)):
        what = f"checkpointing '{policy}'"
        if attempt.fits(with_checkpointing(job, policy), what):
            return f"{what} fits"
    return ""


def _more_ranks(attempt: _Try) -> str:
    """The fewest further hosts that fit, or, on one CPU, processes: first as many as have plenty
    of room for all bytes, then fewer, or more."""
    short, cluster = attempt.short, attempt.problem.cluster
    one_cpu = cluster.compute_device == "cpu" and cluster.group >= cluster.world_size
    unit = 1 if one_cpu else cluster.group

    def fits(count: int) -> bool:
        ranks = count * unit
        local = ranks if one_cpu else cluster.local_world_size
        job = _with(attempt.job, "cluster", world_size=ranks, local_world_size=local)
        return attempt.fits(job, f"{ranks} ranks")

    low, most = cluster.world_size // unit + 1, MAX_PLANNED // unit
    if low > most:
        return ""
    roomy = math.ceil(ROOMY * cluster.world_size * short.need / (max(short.capacity, 1) * unit))
    count = _first(fits, low, most, attempt.watch, min(max(low, roomy), most))
    if count is None:
        return ""
    ranks = count * unit
    return f"{ranks} ranks fit ({ranks - cluster.world_size} more)"


def _smaller_batch(attempt: _Try) -> str:
    """The largest smaller batch that fits."""
    size = attempt.job.batch.size

    def fits(batch: int) -> bool:
        return attempt.fits(_with(attempt.job, "batch", size=batch), f"a batch of {batch}")

    if size == 1 or not fits(1):  # of less, no more fits
        return ""
    most = size.bit_length() - 1  # halvings down to one sample
    steps = _first(lambda n: n == most or fits(size // 2**n), 1, most, attempt.watch) or most
    low, high = size // 2**steps, size // 2 ** (steps - 1)
    while high - low > max(1, low // 16) and not attempt.watch.over():  # to about 6 %
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return f"a batch of {low} per rank fits"


def _host_memory(attempt: _Try) -> str:
    """The fewest of the largest tables that have to live in host memory."""
    job, problem = attempt.job, attempt.problem
    if problem.model.is_trained or problem.cluster.compute_device == "cpu":
        return ""
    if all(table.compute_kernels is None for table in job.tables):
        return ""  # it could be there already
    if job.planner.constants == "additive":
        return ""
    order = sorted(job.tables, key=lambda t: -t.nbytes)

    def fits(count: int) -> bool:
        moved = {t.name for t in order[:count]}
        tables = tuple(_offloaded(t) if t.name in moved else t for t in job.tables)
        what = f"compute_kernels fused_uvm of the {count} largest tables"
        return attempt.fits(msgspec.structs.replace(job, tables=tables), what)

    count = _first(fits, 1, len(order), attempt.watch)
    if count is None:
        return ""
    names = ", ".join(t.name for t in order[:count][:MAX_NAMED])
    more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
    return f"{names}{more} with compute_kernels fused_uvm fits"


def _offloaded(table: TableSpec) -> TableSpec:
    return msgspec.structs.replace(table, compute_kernels=("fused_uvm",))


def _units_on_host(attempt: _Try) -> str:
    """Whether units of an accelerator fit with their shards in its host's memory."""
    job, problem = attempt.job, attempt.problem
    on_cpu = problem.cluster.compute_device == "cpu"
    if on_cpu or not problem.model.units or memory_of(job).offload != "none":
        return ""

    what = "memory.offload = 'auto'"
    fits = attempt.fits(with_memory(job, offload="auto"), what)
    return f"{what} fits" if fits else ""


def _fewer_replicas(attempt: _Try) -> str:
    """Whether units fit that all ranks share."""
    job = attempt.job
    if parallel_of(job).data_replicate == 1:
        return ""
    zero = memory_of(job).zero
    what = "parallel.data_replicate = 1"
    stage: Zero = 3 if isinstance(zero, tuple) or zero == "auto" else zero
    size = job.planner.dense.bucket_size if stage < 3 else 0
    shared = with_sharing(job, Sharing(stage, bucket_size=size if isinstance(size, int) else 0))
    return f"{what} fits" if attempt.fits(shared, what) else ""


def _fewer_limits(attempt: _Try) -> str:
    """Whether the limits on types and widths are what is in the way."""
    job = attempt.job
    limited = [t.name for t in job.tables if t.sharding_types is not None or t.min_partition]
    if not limited:
        return ""
    free = tuple(
        msgspec.structs.replace(t, sharding_types=None, min_partition=None) for t in job.tables
    )
    what = "no sharding_types and min_partition"
    if not attempt.fits(msgspec.structs.replace(job, tables=free), what):
        return ""
    names = ", ".join(limited[:MAX_NAMED])
    more = f" and {len(limited) - MAX_NAMED} more" if len(limited) > MAX_NAMED else ""
    return f"without the sharding_types and min_partition of {names}{more} a plan fits"


WAYS: tuple[Callable[[_Try], str], ...] = (
    _larger_memory,
    _checkpointing,
    _more_ranks,
    _smaller_batch,
    _host_memory,
    _units_on_host,
    _fewer_replicas,
    _fewer_limits,
)


def _first(
    fits: Callable[[int], bool], low: int, high: int, watch: Watch, start: int = 0
) -> int | None:
    """The smallest number from ``low`` to ``high`` that fits: from ``start`` on by doubling steps,
    then by bisection; when time runs out the smallest that was tried. Where none from ``start`` on
    does, ``low`` is tried."""
    at = begun = max(start, low)
    step, failed = 1 if begun == low else begun, low - 1
    while not fits(at):
        failed = at
        if at >= high or watch.over():
            return low if begun > low and fits(low) else None
        at = min(at + step, high)
        step *= 2
    while at - failed > 1 and not watch.over():
        middle = (at + failed) // 2
        if fits(middle):
            at = middle
        else:
            failed = middle
    return at


def _with(job: Job, section: str, **changes: Any) -> Job:
    changed = msgspec.structs.replace(getattr(job, section), **changes)
    return msgspec.structs.replace(job, **{section: changed})


def not_run(model: ModelSpec) -> str:
    """Why a model is not run as it was recorded with checkpointing; empty where it is."""
    if not any(unit.checkpointed for unit in model.units):
        return "in which no part repeats, or parts write buffers in a forward, as BatchNorm does"
    backward = (moment.piece.point for moment in model.step.backward)
    return "with tables in parts that repeat" if "lookup" in backward else ""


def _fits(model_of: ModelOf, job: Job, whole: Watch) -> bool:
    """Whether a plan of ``job`` is found that fits, in the time that a try has."""
    try:
        model = model_of(job)
        problem = make_problem(job, model)
    except ShardwrightError:  # a way out that is none: too small for its own reservation, say
        return False
    if "none" not in checkpointing_of(job) and not_run(model):
        return False
    if not model.is_trained:
        space = space_of(problem, problem.tables, problem.capacity)
        return fits_somehow(space, whole.part(SECONDS_FOR_A_TRY))
    return _step_fits(problem)


def _step_fits(problem: Problem) -> bool:
    draft = smallest(problem)
    loads = draft.kept_bytes
    fullest = max(range(len(loads)), key=lambda r: loads[r])
    capacity = problem.decisive_capacity
    if loads[fullest] > capacity:
        return False
    peaks = draft.phase_peaks(draft.load(fullest))
    alone = max(sum(kinds.values()) for kinds in peaks.values())
    return alone <= capacity and draft.fits  # one rank can say no for all of them
