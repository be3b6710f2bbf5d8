"""Why nothing fits: the fullest rank, the table, the shortfall, and ways out that were tried."""

# A way out is named only after a plan was found with it: to be told to buy memory or ranks that do
# not help is worse than to be told nothing. Every try is a search of its own, so each has a few
# seconds, and so has each kind of way; what was tried in vain is told where nothing helps. All hear
# the watch of the search itself, so that Ctrl-C ends them, too.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shardwright.core.cluster import MAX_PLANNED, TIERS, Tier
from shardwright.core.errors import NoPlanError, ShardwrightError, listed
from shardwright.core.model import ModelSpec
from shardwright.core.placement import Zero
from shardwright.core.quantities import exact_bytes
from shardwright.core.timeline import EXACT_KINDS, Kind, category
from shardwright.job.job import CHOSEN_FROM, Job, checkpointing_of, memory_of, parallel_of
from shardwright.planner.draft import Draft, Filled, Found, TablesDraft
from shardwright.planner.problem import Problem, make_problem, reserve
from shardwright.planner.search.bound import ROUNDING
from shardwright.planner.search.watch import Watch
from shardwright.planner.search.widening import fits_somehow, least_memory
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import smallest
from shardwright.planner.strategy.tables import placed_tables, space_of
from shardwright.planner.variation import changed, checkpointed, halved, shared

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
    problem = found.problem
    # Not the search's own watch: its time may be over by now, and every way out would be given up
    # at once. It began when the search did, so what is shown as elapsed is the whole.
    whole = Watch(hear=watch.hear)
    whole.begun = watch.begun
    if problem.model.is_trained:
        return _refusal(found, smallest(problem), whole, proven=False)
    least, proven = _least(problem, whole)
    if least is None:
        return _no_ranks(problem)
    # Proposers look at some plans only. Something fits that they did not come to, so that more
    # memory would be the wrong advice.
    if least.fits:
        why = "; ".join(found.skipped) or "none of them fits"
        return NoPlanError(
            f"no plan found among {found.proposals:,} proposals, though some that fit exist: "
            f"{why}. Use planner.search 'bounded', or other planner.proposers."
        )
    return _refusal(found, least, whole, proven=proven)


def _no_ranks(problem: Problem) -> NoPlanError:
    """The refusal where rules, not memory, leave a table without a rank."""
    rules = problem.job.planner.constraints
    names = list(dict.fromkeys([*(n for g in rules.apart for n in g), *rules.ranks]))
    return NoPlanError(
        f"no plan found that keeps planner.constraints: apart and ranks leave a table of "
        f"{listed(names, MAX_NAMED)} no rank of its own. "
        "Pin fewer tables, or allow them more ranks."
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


def _refusal(found: Found, draft: Draft, whole: Watch, *, proven: bool) -> NoPlanError:
    problem = found.problem
    helps = found.helps(whole) if found.helps else ""
    short = max(draft.fills, key=lambda its: (its.over, -its.rank))
    known = " of TorchRec's options" if problem.job.planner.as_torchrec else ""
    what = f"no plan{known} can fit" if proven else "no plan found that fits"
    needs = ", ".join(f"{row.checkpointing} {exact_bytes(row.peak_bytes)}" for row in found.tried)
    text = f"Needed by checkpointing: {needs}. " if needs else ""
    text = f"{found.remark} {text}" if found.remark else text
    return NoPlanError(
        f"{what}: rank {short.rank} needs most, {exact_bytes(short.needed)} of "
        f"{exact_bytes(short.capacity)}{_reserved(problem, short)}, "
        f"{short.over:,} B too much; {_largest(draft, short.rank)}. "
        f"{text}{_ways(found, short, whole, helps)}"
    )


def _reserved(problem: Problem, short: Filled) -> str:
    total: int = getattr(problem.cluster, f"{short.tier}_cap")
    return f" left of {exact_bytes(total)} by the reservation" if total > short.capacity else ""


def _largest(draft: Draft, rank: int) -> str:
    """What the rank has most of: of what passes through a step its kind, else the part that it
    keeps most of."""
    if isinstance(draft, StepDraft):
        phases = draft.ledger(draft.load(rank)).peaks
        phase, kinds = max(phases.items(), key=lambda item: sum(item[1].values()))
        passing = [(size, kind) for kind, size in kinds.items() if kind not in OF_PARTS]
        size, kind = max(passing, default=(0, "temporary"))
        # Where activations or buffers outweigh everything that a rank keeps, naming the largest
        # table or unit would send the user to the wrong end.
        if size > sum(kinds.get(each, 0) for each in OF_PARTS):
            most = f"{category(kind)} with {exact_bytes(size)}"
            return f"the most at its peak, in {phase}, are {most}"
        held = {n: size for (_, kind, n), size in draft.exact[rank].items() if kind == "weight"}
    else:
        held = {}
        for placed in draft.tables:
            for _, _, cost in placed.on_rank(rank):
                name = placed.choice.table.name
                held[name] = held.get(name, 0) + sum(cost.storage)
    name = max(held, key=lambda n: held[n])
    return f"its largest part is {name} with {exact_bytes(held[name])}"


@dataclass(frozen=True, slots=True)
class _Try:
    """One way out of a shortage: variations of a job, each of which is tried before it is named,
    and what was ``tried`` in vain."""

    found: Found
    short: Filled
    whole: Watch
    watch: Watch
    tried: list[str]

    @property
    def problem(self) -> Problem:
        """What does not fit."""
        return self.found.problem

    @property
    def job(self) -> Job:
        """Its job."""
        return self.found.problem.job

    def fits(self, keys: Mapping[str, Any], what: str) -> bool:
        """Whether a plan is found with other values of ``keys``, which is ``what`` is changed."""
        return self.job_fits(changed(self.job, keys), what)

    def job_fits(self, job: Job, what: str) -> bool:
        """Whether a plan of a ``job`` is found, which differs in ``what``."""
        self.tried.append(what)
        return _fits(self.found, job, self.whole)


def _ways(found: Found, short: Filled, whole: Watch, helps: str) -> str:
    """What would help, each tried before it is named; where nothing was found, what was tried."""
    help_, tried = [helps] if helps else [], []
    for way in WAYS:
        attempt = _Try(found, short, whole, whole.part(SECONDS_FOR_A_WAY), [])
        text = way(attempt)
        if text:
            help_.append(text)
        elif attempt.tried:
            some = list(dict.fromkeys(attempt.tried))
            if len(some) > MAX_NAMED:
                some = [*some[: MAX_NAMED - 1], "...", some[-1]]
            cut = f" (cut at {SECONDS_FOR_A_WAY:g} s)" if attempt.watch.ended else ""
            tried.append(f"{', '.join(some)}{cut}")
    if help_:
        return f"What would help: {'; '.join(help_)}."
    if not tried:
        return "No way out was found: there is none to try."
    return f"No way out was found. Tried: {'; '.join(tried)}."


def _larger_memory(attempt: _Try) -> str:
    """The capacity with which the draft fits, with what the reservation takes of it; where tables
    alone may lie elsewhere and more of this memory is not enough, that of another one."""
    short, cluster = attempt.short, attempt.problem.cluster
    total, left = getattr(cluster, f"{short.tier}_cap"), short.capacity
    # A reservation may be a share of the memory, so what is missing has to be scaled up by what of
    # every further byte is left; or a fixed amount, which the exact sum is right for. Both are
    # tried.
    if not left:  # it is all reserved; what is left of plenty says how much that asks for
        total, left = MAX_BYTES, _left_of_plenty(attempt)
    exact = short.needed + total - left
    found = _enough(attempt, short.tier, exact, -(-short.needed * total // max(left, 1)))
    if found or attempt.problem.model.is_trained:
        return found
    missing = short.over
    for tier in TIERS:
        has: int = getattr(cluster, f"{tier}_cap")
        if has and tier != short.tier and (found := _enough(attempt, tier, has + missing)):
            return found
    return ""


def _enough(attempt: _Try, tier: Tier, exact: int, scaled: int = 0) -> str:
    """The first of growing capacities with which a plan is found: ``exact``, then multiples of
    ``scaled``."""
    more = (round(times * (scaled or exact)) for times in MORE_MEMORY)
    # The least and the most are tried whatever the time: the first is the answer that is wanted,
    # the last says whether memory is what is missing at all.
    *usual, plenty = sorted({min(wanted, MAX_BYTES) for wanted in (exact, *more)})
    for wanted in (*usual, plenty):
        if attempt.watch.over() and wanted not in (exact, plenty):
            continue
        what = f"cluster.{tier}_cap of {exact_bytes(wanted)}"
        if attempt.fits({f"cluster.{tier}_cap": wanted}, what):
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
        if attempt.fits({"planner.dense.checkpointing": (policy,)}, what):
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
        keys = {"cluster.world_size": ranks, "cluster.local_world_size": local}
        return attempt.fits(keys, f"{ranks} ranks")

    low, most = cluster.world_size // unit + 1, MAX_PLANNED // unit
    if low > most:
        return ""
    # Near the border a search takes longest and may miss the only plan there is, so the first try
    # has plenty of room; from there on fewer are tried by halves.
    roomy = math.ceil(ROOMY * cluster.world_size * short.needed / (max(short.capacity, 1) * unit))
    count = _first(fits, low, most, attempt.watch, min(max(low, roomy), most))
    if count is None:
        return ""
    ranks = count * unit
    return f"{ranks} ranks fit ({ranks - cluster.world_size} more)"


def _smaller_batch(attempt: _Try) -> str:
    """The largest smaller batch that fits."""
    size = attempt.job.batch.size

    def fits(batch: int) -> bool:
        return attempt.fits({"batch.size": batch}, f"a batch of {batch}")

    if size == 1 or not fits(1):  # of less, no more fits
        return ""
    most = size.bit_length() - 1  # halvings down to one sample
    # By halves first, for a try of a plan takes seconds and batches go up to thousands; one sample
    # is known to fit.
    steps = _first(lambda n: n == most or fits(size // 2**n), 1, most, attempt.watch) or most

    def enough(low: int, high: int) -> bool:
        """To about 6 %."""
        return high - low <= max(1, low // 16) or attempt.watch.over()

    largest = halved(fits, size // 2**steps, size // 2 ** (steps - 1), enough=enough)
    return f"a batch of {largest} per rank fits"


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
        tables = tuple(
            msgspec.structs.replace(t, compute_kernels=("fused_uvm",)) if t.name in moved else t
            for t in job.tables
        )
        what = f"compute_kernels fused_uvm of the {count} largest tables"
        return attempt.fits({"tables": tables}, what)

    count = _first(fits, 1, len(order), attempt.watch)
    if count is None:
        return ""
    names = listed([table.name for table in order[:count]], MAX_NAMED)
    return f"{names} with compute_kernels fused_uvm fits"


def _units_on_host(attempt: _Try) -> str:
    """Whether units of an accelerator fit with their shards in its host's memory."""
    job, problem = attempt.job, attempt.problem
    on_cpu = problem.cluster.compute_device == "cpu"
    if on_cpu or not problem.model.units or memory_of(job).offload != "none":
        return ""

    what = "memory.offload = 'auto'"
    return f"{what} fits" if attempt.fits({"memory.offload": "auto"}, what) else ""


def _fewer_replicas(attempt: _Try) -> str:
    """Whether units fit that all ranks share."""
    job = attempt.job
    if parallel_of(job).data_replicate == 1:
        return ""
    zero = memory_of(job).zero
    what = "parallel.data_replicate = 1"
    stage: Zero = 3 if isinstance(zero, tuple) or zero == "auto" else zero
    size = job.planner.dense.bucket_size if stage < 3 else 0
    its = shared(job, stage, bucket_size=size if isinstance(size, int) else 0)
    return f"{what} fits" if attempt.job_fits(its, what) else ""


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
    if not attempt.fits({"tables": free}, what):
        return ""
    names = listed(limited, MAX_NAMED)
    return f"without the sharding_types and min_partition of {names} a plan fits"


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
    # The next number is tried in steps that double, since a try takes about as long whatever its
    # size and the answer may be far away; between one that fits and one that does not halves are
    # left.
    at = begun = max(start, low)
    step, failed = 1 if begun == low else begun, low - 1
    while not fits(at):
        failed = at
        if at >= high or watch.over():
            return low if begun > low and fits(low) else None
        at = min(at + step, high)
        step *= 2
    return halved(fits, at, failed, enough=lambda good, bad: good - bad <= 1 or watch.over())


def not_run(model: ModelSpec) -> str:
    """Why a model is not run as it was recorded with checkpointing; empty where it is."""
    if not any(unit.checkpointed for unit in model.units):
        return "in which no part repeats, or parts write buffers in a forward, as BatchNorm does"
    backward = (moment.piece.point for moment in model.step.backward)
    return "with tables in parts that repeat" if "lookup" in backward else ""


def _fits(found: Found, job: Job, whole: Watch) -> bool:
    """Whether a plan of ``job``, a variation of that of what was ``found``, is found that fits, in
    the time that a try has."""
    assert found.model_of is not None
    try:
        model = found.model_of(checkpointed(job, found.policy))
        problem = make_problem(job, model)
    except ShardwrightError:  # a way out that is none: too small for its own reservation, say
        return False
    # The policy is there in the job, but this model cannot run with it: a plan that fits only so is
    # no way out.
    if "none" not in checkpointing_of(job) and not_run(model):
        return False
    if not model.is_trained:
        space = space_of(problem, problem.tables, problem.capacity)
        return fits_somehow(space, whole.part(SECONDS_FOR_A_TRY))
    return _step_fits(problem)


def _step_fits(problem: Problem) -> bool:
    # A try takes the smallest draft, not a search: whether anything fits is all that is asked. Most
    # that do not fit are refused by their kept bytes, or by the fullest rank alone.
    draft = smallest(problem)
    loads = draft.kept_bytes
    fullest = max(range(len(loads)), key=lambda r: loads[r])
    capacity = problem.decisive_capacity
    # Bytes that are kept are a sum; a peak takes a run of the step.
    if loads[fullest] > capacity:
        return False
    peaks = draft.ledger(draft.load(fullest)).peaks
    alone = max(sum(kinds.values()) for kinds in peaks.values())
    return alone <= capacity and draft.fits  # one rank can say no for all of them
