"""Why nothing fits: the fullest rank, the table, the shortfall, and ways out that were tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from shardwright.core.cluster import TIERS
from shardwright.core.errors import NoPlanError, ShardwrightError
from shardwright.core.job import CHOSEN_FROM, Job, checkpointing_of, with_checkpointing
from shardwright.core.memory_section import HAVE_BLOCKS
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.plan import Tried
from shardwright.core.quantities import format_bytes
from shardwright.planner.draft import Draft, TablesDraft
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import ROUNDING
from shardwright.planner.search.least import fits_somehow, least_memory
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.found import Found, ModelOf
from shardwright.planner.strategy.spacing import placed_tables, space_of
from shardwright.planner.strategy.steps import smallest

MAX_RANKS = 4096
MAX_NAMED = 8  # tables of a longer list
SECONDS_FOR_LEAST = 5.0  # of search for what asks least
SECONDS_FOR_A_WAY = 3.0  # of search, for each kind of way out; none is named untried


def error(found: Found) -> NoPlanError:
    """The refusal of a search without a plan, from the draft that asks least of its fullest
    rank."""
    problem, model_of, tried = found.problem, found.model_of, found.tried
    assert model_of is not None
    if problem.model.is_trained:
        return _refusal(problem, smallest(problem), model_of, tried, proven=False)
    draft, proven = _least(problem)
    if draft is None:
        return _no_ranks(problem)
    if draft.fits:
        return _not_looked_at(found)
    return _refusal(problem, draft, model_of, proven=proven)


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


def _least(problem: Problem) -> tuple[TablesDraft | None, bool]:
    """The draft that asks least, if the rules allow any, and whether it is proven that none
    fits."""
    space = space_of(problem, problem.tables, problem.capacity)
    found = least_memory(space, Watch(SECONDS_FOR_LEAST))
    proven = found.bound.seconds > 1 + ROUNDING
    if found.best is None:
        return None, proven
    return TablesDraft(problem, placed_tables(space, found.best), ()), proven


def _refusal(
    problem: Problem,
    draft: Draft,
    model_of: ModelOf,
    tried: Sequence[Tried] = (),
    *,
    proven: bool,
) -> NoPlanError:
    tier, rank, need, capacity = _fullest(problem, draft)
    known = " of TorchRec's options" if problem.job.planner.as_torchrec else ""
    what = f"no plan{known} can fit" if proven else "no plan found that fits"
    ways = [f"cluster.{tier}_cap {way}" for way in _larger_memory(problem, draft, model_of)]
    ways += _ways(problem, model_of)
    text = f"What would help: {'; '.join(ways)}." if ways else "No way out was found."
    needs = ", ".join(f"{each.checkpointing} {_size(each.peak_bytes)}" for each in tried)
    text = f"Needed by checkpointing: {needs}. {text}" if tried else text
    return NoPlanError(
        f"{what}: rank {rank} is the fullest and needs {_size(need)} of {_size(capacity)}"
        f"{_reserved(problem, tier, capacity)}, {need - capacity:,} B too much; "
        f"{_largest(draft, rank)}. {text}"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes:,} B ({format_bytes(nbytes)})"


def _reserved(problem: Problem, tier: str, capacity: int) -> str:
    total: int = getattr(problem.cluster, f"{tier}_cap")
    return f" left of {_size(total)} by the reservation" if total > capacity else ""


def _fullest(problem: Problem, draft: Draft) -> tuple[str, int, int, int]:
    """The tier and rank that exceed their capacity most, the bytes needed and those there are."""
    if isinstance(draft, TablesDraft):
        found = [
            (size - capacity, tier, rank, size, capacity)
            for tier, capacity in zip(TIERS, problem.capacity, strict=True)
            for rank, size in enumerate(draft.tier_bytes[tier])
        ]
        _, tier, rank, size, capacity = max(found, key=lambda f: (f[0], -f[2]))
        return tier, rank, size, capacity
    peak = max(draft.peak_bytes)
    tier = "ddr" if problem.cluster.compute_device == "cpu" else "hbm"
    return tier, draft.peak_bytes.index(peak), peak, problem.decisive_capacity


def _largest(draft: Draft, rank: int) -> str:
    if isinstance(draft, StepDraft):
        held = {n: size for (_, kind, n), size in draft.exact[rank].items() if kind == "weight"}
    else:
        held = {}
        for placed in draft.tables:
            for first, run, cost in placed.stretches():
                if first <= rank < first + run.count:
                    name = placed.choice.table.name
                    held[name] = held.get(name, 0) + sum(cost.storage)
    name = max(held, key=lambda n: held[n])
    return f"its largest part is {name} with {_size(held[name])}"


def _larger_memory(problem: Problem, draft: Draft, model_of: ModelOf) -> Iterator[str]:
    """The capacity with which the draft fits, with what the reservation takes of it."""
    tier, _, need, capacity = _fullest(problem, draft)
    total = getattr(problem.cluster, f"{tier}_cap")
    for wanted in (need + total - capacity, -(-need * total // max(capacity, 1))):
        job = _with(problem.job, "cluster", **{f"{tier}_cap": wanted})
        if _fits(model_of, job, Watch(SECONDS_FOR_A_WAY)):
            yield f"of {_size(wanted)} fits"
            return


def _ways(problem: Problem, model_of: ModelOf) -> Iterator[str]:
    """Checkpointing, more ranks, a smaller batch, host memory, fewer limits: each tried before it
    is named."""
    for way in (_checkpointing, _more_ranks, _smaller_batch, _host_memory, _fewer_limits):
        found = way(problem, model_of, Watch(SECONDS_FOR_A_WAY))
        if found:
            yield found


def _checkpointing(problem: Problem, model_of: ModelOf, watch: Watch) -> str:
    """The first policy that the job does not allow with which a plan fits."""
    job = problem.job
    if job.model.kind not in HAVE_BLOCKS or not any(unit.series for unit in problem.model.units):
        return ""
    for policy in (name for name in CHOSEN_FROM if name not in checkpointing_of(job)):
        if _fits(model_of, with_checkpointing(job, policy), watch):
            return f"checkpointing '{policy}' fits"
    return ""


def _more_ranks(problem: Problem, model_of: ModelOf, watch: Watch) -> str:
    """The fewest further hosts that fit, or, on one CPU, processes."""
    job = problem.job
    cluster = problem.cluster
    one_cpu = cluster.compute_device == "cpu" and cluster.group >= cluster.world_size
    unit = 1 if one_cpu else cluster.group

    def job_of(ranks: int) -> Job:
        local = ranks if one_cpu else cluster.local_world_size
        return _with(job, "cluster", world_size=ranks, local_world_size=local)

    most = MAX_RANKS // unit
    count = _first(
        lambda n: _fits(model_of, job_of(n * unit), watch),
        cluster.world_size // unit + 1,
        most,
        watch,
    )
    if count is None:
        return ""
    ranks = count * unit
    return f"{ranks} ranks fit ({ranks - cluster.world_size} more)"


def _smaller_batch(problem: Problem, model_of: ModelOf, watch: Watch) -> str:
    """The largest smaller batch that fits."""
    job = problem.job
    size = job.batch.size
    steps = _first(
        lambda n: _fits(model_of, _with(job, "batch", size=max(size // 2**n, 1)), watch),
        1,
        31,
        watch,
    )
    if steps is None or size == 1:
        return ""
    low, high = max(size // 2**steps, 1), size // 2 ** (steps - 1)
    while high - low > max(1, low // 16) and not watch.over():  # to about 6 %
        middle = (low + high) // 2
        if _fits(model_of, _with(job, "batch", size=middle), watch):
            low = middle
        else:
            high = middle
    return f"a batch of {low} per rank fits"


def _host_memory(problem: Problem, model_of: ModelOf, watch: Watch) -> str:
    """The fewest of the largest tables that have to live in host memory."""
    job = problem.job
    if problem.model.is_trained or problem.cluster.compute_device == "cpu":
        return ""
    if job.planner.constants == "additive":
        return ""
    order = sorted(job.tables, key=lambda t: -t.nbytes)

    def job_of(count: int) -> Job:
        moved = {t.name for t in order[:count]}
        return msgspec.structs.replace(
            job, tables=tuple(_offloaded(t) if t.name in moved else t for t in job.tables)
        )

    count = _first(lambda n: _fits(model_of, job_of(n), watch), 1, len(order), watch)
    if count is None:
        return ""
    names = ", ".join(t.name for t in order[:count][:MAX_NAMED])
    more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
    return f"{names}{more} with compute_kernels fused_uvm fits"


def _offloaded(table: TableSpec) -> TableSpec:
    return msgspec.structs.replace(table, compute_kernels=("fused_uvm",))


def _fewer_limits(problem: Problem, model_of: ModelOf, watch: Watch) -> str:
    """Whether the limits on types and widths are what is in the way."""
    job = problem.job
    limited = [t.name for t in job.tables if t.sharding_types is not None or t.min_partition]
    if not limited:
        return ""
    free = tuple(
        msgspec.structs.replace(t, sharding_types=None, min_partition=None) for t in job.tables
    )
    if not _fits(model_of, msgspec.structs.replace(job, tables=free), watch):
        return ""
    names = ", ".join(limited[:MAX_NAMED])
    more = f" and {len(limited) - MAX_NAMED} more" if len(limited) > MAX_NAMED else ""
    return f"without the sharding_types and min_partition of {names}{more} a plan fits"


def _first(fits: Callable[[int], bool], low: int, high: int, watch: Watch) -> int | None:
    """The smallest number from ``low`` to ``high`` that fits, by doubling steps and bisection; when
    time runs out the smallest that was tried."""
    step, at, failed = 1, low, low - 1
    while not fits(at):
        failed = at
        if at >= high or watch.over():
            return None
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


def _fits(model_of: ModelOf, job: Job, watch: Watch) -> bool:
    """Whether a plan of ``job`` is found that fits."""
    try:
        model = model_of(job)
        problem = make_problem(job, model)
    except ShardwrightError:  # a way out that is none: too small for its own reservation, say
        return False
    if "none" not in checkpointing_of(job) and not_run(model):
        return False
    if not model.is_trained:
        return fits_somehow(space_of(problem, problem.tables, problem.capacity), watch)
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
