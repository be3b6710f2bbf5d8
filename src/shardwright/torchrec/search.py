"""TorchRec's way to search: proposers and a partitioner, over the options that it looks at."""

# Everything that TorchRec does is here behind one name, so that its search can be compared with
# ours on the same options: same prices, same bound. It knows no constraints between tables; they
# are refused rather than left out. Each proposer has a share of the time, or the first could leave
# none to the others.

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.errors import UnsupportedError
from shardwright.core.model import CacheSpec, ModelSpec, TableSpec
from shardwright.core.option import Option
from shardwright.job.job import Job
from shardwright.job.plan import Attempt
from shardwright.job.planner import (
    ConstraintsSection,
    PartitionerSection,
    PlannerSection,
    ProposerSection,
)
from shardwright.planner.choice import Choice, Cost, Placed
from shardwright.planner.choices import Tables, price
from shardwright.planner.draft import Found, TablesDraft
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.strategy.tables import tables_bound
from shardwright.torchrec.candidate import (
    MS_PER_SECOND,
    Bytes,
    Candidate,
    Key,
    Offer,
    Price,
    Proposal,
    Rating,
    candidate_of,
    walk_order,
)
from shardwright.torchrec.partitioners import NoRoomError, OutOfTimeError, place, rank_ms
from shardwright.torchrec.proposers import CACHED, DEFAULT, WHOLE, proposals


def search(job: Job, model: ModelSpec, watch: Watch) -> Found:
    """The best plan of the job's proposers; its bound is that of the same options."""
    if job.planner.constraints != ConstraintsSection():
        wanted = "none with search 'proposers', as in TorchRec"
        raise UnsupportedError("planner.constraints", wanted, "a section", "Use search 'bounded'.")
    problem = make_problem(job, model)

    def priced(cases: Sequence[tuple[TableSpec, Option]]) -> Sequence[Choice]:
        return price(problem.job, problem.context, cases)

    capacities = [problem.capacity] * problem.cluster.world_size
    found = propose(
        problem.tables, problem.cluster, capacities, job.planner, price=priced, watch=watch
    )
    return Found(
        problem,
        _draft(problem, found),
        tables_bound(problem),
        "proposers",
        found.proposals,
        found.plans,
        skipped=tuple(f"{name}: {why}" for name, why in found.skipped.items()),
        attempts=found.attempts,
    )


def _draft(problem: Problem, found: Proposed) -> TablesDraft | None:
    """The best placement in the job's order of tables."""
    if not found.tables:
        return None
    # TorchRec's walk has another order of tables than the job, and a plan has the job's.
    placed = {item.choice.table.name: item for item in found.tables}
    return TablesDraft(problem, tuple(placed[table.name] for table in problem.model.tables), ())


def bounded_tables(problem: Problem) -> Tables:
    """The choices of every table; where proposers may enlarge caches, cached ones take no longer
    than with any larger cache, and a table may be kept whole instead."""
    planner = problem.job.planner
    if planner.search != "proposers" or all(p.kind != "scaleup" for p in planner.proposers):
        return problem.tables
    return tuple(_enlarged(problem, choices) for choices in problem.tables)


def _enlarged(problem: Problem, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    cached = [choice for choice in choices if choice.option.compute_kernel == CACHED]
    full, whole = [], []
    # The bound must hold for every cache that a proposer may ask for, of which there are endlessly
    # many: each part's seconds are least at one end, so the lesser of both ends is below all of
    # them.
    for choice in cached:
        cache = msgspec.structs.replace(choice.table.cache or CacheSpec(), load_factor=1.0)
        full.append((msgspec.structs.replace(choice.table, cache=cache), choice.option))
        whole.append((choice.table, msgspec.structs.replace(choice.option, compute_kernel=WHOLE)))
    relaxed = {
        choice.option: msgspec.structs.replace(
            choice, costs=tuple(map(_least, choice.costs, other.costs))
        )
        for choice, other in zip(cached, price(problem.job, problem.context, full), strict=True)
    }
    kept = {choice.option for choice in choices}
    more = [c for c in price(problem.job, problem.context, whole) if c.option not in kept]
    return (*(relaxed.get(choice.option, choice) for choice in choices), *more)


def _least(small: Cost, large: Cost) -> Cost:
    """Part by part the lesser seconds of two sizes of a cache, each of which falls or rises from
    one to the other; the bytes of the smaller."""
    seconds = {part: min(value, large.seconds[part]) for part, value in small.seconds.items()}
    return msgspec.structs.replace(small, seconds=seconds, total_seconds=sum(seconds.values()))


@dataclass(frozen=True, slots=True)
class Proposed:
    """The outcome of all proposers.

    ``tables`` is the fastest placement in the order of its proposal and ``seconds`` are those of
    its busiest rank; empty and infinite if nothing fits.
    """

    tables: tuple[Placed, ...]
    seconds: float
    attempts: tuple[Attempt, ...]

    @property
    def proposals(self) -> int:
        """Different proposals that were tried."""
        return sum(attempt.proposals for attempt in self.attempts)

    @property
    def plans(self) -> int:
        """Those that fit."""
        return sum(attempt.plans for attempt in self.attempts)

    @property
    def skipped(self) -> dict[str, str]:
        """Proposers that did not go to their end, and why; further ones of a kind by number."""
        found = {}
        for number, attempt in enumerate(self.attempts):
            before = [other.name for other in self.attempts[:number]].count(attempt.name)
            if attempt.stopped:
                found[f"{attempt.name} {before + 1}" if before else attempt.name] = attempt.stopped
        return found


def propose(
    choices: Sequence[Sequence[Choice]],
    cluster: Cluster,
    capacities: Sequence[Bytes],
    section: PlannerSection,
    *,
    price: Price | None = None,
    watch: Watch | None = None,
) -> Proposed:
    """Try what the proposers of a section propose, or TorchRec's where it names none; ``choices``
    are the ways to shard each table.

    ``capacities`` are bytes of HBM, DDR and SSD per rank. ``price`` prices options that a proposer
    changes. Each proposer gets an even share of the time that ``watch`` leaves, so that none takes
    that of those after it.
    """
    watch = watch or Watch()
    known: dict[Key, Candidate] = {}
    by_name = {ways[0].table.name: ways for ways in choices}
    order = walk_order(ways[0].table for ways in choices)
    tables = tuple(
        tuple(candidate_of(choice, known) for choice in by_name[table.name]) for table in order
    )
    loop = _Loop(cluster, capacities, section.partitioner, watch)
    proposers = section.proposers or DEFAULT
    attempts = []
    for number, proposer in enumerate(proposers):
        share = watch.part(watch.left / (len(proposers) - number))
        offer = Offer(tables, capacities, known, price, share)
        attempts.append(loop.run(proposer, offer))
    return Proposed(loop.best, loop.best_ms / MS_PER_SECOND, tuple(attempts))


@dataclass
class _Loop:
    """What all proposers share: ratings by proposal, the best plan, the failures."""

    cluster: Cluster
    capacities: Sequence[Bytes]
    partitioner: PartitionerSection
    watch: Watch
    ratings: dict[bytes, Rating] = field(default_factory=dict)
    best: tuple[Placed, ...] = ()
    best_ms: float = math.inf

    def run(self, proposer: ProposerSection, offer: Offer) -> Attempt:
        """Let one proposer propose until it ends or its time does."""
        counts = {"proposals": 0, "plans": 0, "repeats": 0}
        stopped = "out of time"
        steps = proposals(proposer, offer)
        try:
            proposal = next(steps) if offer.tables else None
            while proposal and not offer.watch.over():
                key = _key(proposal)
                if key in self.ratings:
                    counts["repeats"] += 1
                else:
                    # Whoever proposed it: the answer is the same, and placing is what takes the
                    # time.
                    self.ratings[key] = self._try(proposal, offer.watch)
                    counts["proposals"] += 1
                    counts["plans"] += self.ratings[key] is not None
                proposal = steps.send(self.ratings[key])
        except StopIteration as end:
            stopped = end.value or ""
        except OutOfTimeError:
            pass
        steps.close()
        return Attempt(proposer.kind, **counts, stopped=stopped)

    def _try(self, proposal: Proposal, watch: Watch) -> Rating:
        try:
            placed = place(self.partitioner, proposal, self.cluster, self.capacities, watch)
        except NoRoomError:
            return None
        rating = max(rank_ms(proposal, placed, len(self.capacities)))
        if rating < self.best_ms:
            self.best_ms = rating
            self.watch.found(rating / MS_PER_SECOND)
            self.best = tuple(
                Placed(candidate.choice, tuple(ranks))
                for candidate, ranks in zip(proposal, placed, strict=True)
            )
        return rating


def _key(proposal: Proposal) -> bytes:
    """A digest of what is proposed, whatever the order of the tables."""
    # A digest and not the numbers: a million proposals of a thousand tables would be gigabytes.
    numbers = array("q", sorted([candidate.number for candidate in proposal]))
    return blake2b(numbers.tobytes(), digest_size=16).digest()
