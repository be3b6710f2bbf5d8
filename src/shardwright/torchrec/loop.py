"""Proposers and a partitioner at work: propose, place, rate, and keep the fastest placement."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from shardwright.core.cluster import Cluster
from shardwright.job.plan import Attempt
from shardwright.job.planner import PartitionerSection
from shardwright.planner.choice import Choice
from shardwright.planner.search.watch import Watch
from shardwright.planner.tally import Placed
from shardwright.torchrec.candidate import (
    MS_PER_SECOND,
    Bytes,
    Candidate,
    Candidates,
    Offer,
    Price,
    Proposal,
    Proposer,
    Verdict,
    walk_order,
)
from shardwright.torchrec.partitioners import OutOfTimeError, place, rank_ms
from shardwright.torchrec.room import NoRoomError, Shortfall


@dataclass(frozen=True, slots=True)
class Proposed:
    """The outcome of all proposers.

    ``tables`` is the fastest placement in the order of its proposal and ``seconds`` are those of
    its busiest rank; empty and infinite if nothing fits. Of proposals that do not fit, ``last`` is
    the latest failure, ``closest`` the one that lacks the fewest bytes and ``smallest`` the least
    sum of bytes by tier.
    """

    tables: tuple[Placed, ...]
    seconds: float
    attempts: tuple[Attempt, ...]
    last: Shortfall | None
    closest: Shortfall | None
    smallest: Bytes | None

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

    def lacks_memory(self, capacities: Sequence[Bytes]) -> bool:
        """Whether even the least bytes seen exceed those of all ranks: no placement could help."""
        if self.tables or self.smallest is None:
            return not self.tables
        room = [sum(tier) for tier in zip(*capacities, strict=True)]
        return any(needed > free for needed, free in zip(self.smallest, room, strict=True))


def propose(
    choices: Sequence[Sequence[Choice]],
    cluster: Cluster,
    capacities: Sequence[Bytes],
    proposers: Sequence[Proposer],
    partitioner: PartitionerSection,
    *,
    price: Price | None = None,
    watch: Watch | None = None,
) -> Proposed:
    """Try what the proposers propose; ``choices`` are the ways to shard each table.

    ``capacities`` are bytes of HBM, DDR and SSD per rank. ``price`` prices options that a proposer
    changes. Each proposer gets an even share of the time that ``watch`` leaves, so that none takes
    that of those after it.
    """
    watch = watch or Watch()
    known = Candidates()
    tables = _candidates(choices, known)
    loop = _Loop(cluster, capacities, partitioner, watch)
    attempts = []
    for number, proposer in enumerate(proposers):
        share = watch.part(watch.left / (len(proposers) - number))
        offer = Offer(tables, capacities, known, price, share)
        attempts.append(loop.run(proposer, offer))
    return loop.outcome(attempts)


def _candidates(
    choices: Sequence[Sequence[Choice]], known: Candidates
) -> tuple[tuple[Candidate, ...], ...]:
    by_name = {ways[0].table.name: ways for ways in choices}
    order = walk_order(ways[0].table for ways in choices)
    return tuple(tuple(known.of(choice) for choice in by_name[table.name]) for table in order)


@dataclass
class _Loop:
    """What all proposers share: verdicts by proposal, the best plan, the failures."""

    cluster: Cluster
    capacities: Sequence[Bytes]
    partitioner: PartitionerSection
    watch: Watch
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)
    best: tuple[Placed, ...] = ()
    best_ms: float = math.inf
    last: Shortfall | None = None
    closest: Shortfall | None = None
    smallest: Bytes | None = None

    def run(self, proposer: Proposer, offer: Offer) -> Attempt:
        """Let one proposer propose until it ends or its time does."""
        counts = {"proposals": 0, "plans": 0, "repeats": 0}
        stopped = "out of time"
        steps = proposer.proposals(offer)
        try:
            proposal = next(steps) if offer.tables else None
            while proposal and not offer.watch.over():
                key = _key(proposal)
                verdict = self.verdicts.get(key)
                if verdict is None:
                    verdict = self.verdicts[key] = self._try(proposal, offer.watch)
                    counts["proposals"] += 1
                    counts["plans"] += verdict.fits
                else:
                    counts["repeats"] += 1
                proposal = steps.send(verdict)
        except StopIteration as end:
            stopped = end.value or ""
        except OutOfTimeError:
            pass
        steps.close()
        return Attempt(proposer.name, **counts, stopped=stopped)

    def _try(self, proposal: Proposal, watch: Watch) -> Verdict:
        try:
            placed = place(self.partitioner, proposal, self.cluster, self.capacities, watch)
        except NoRoomError as error:
            self._note(proposal, error.shortfall)
            return Verdict(fits=False)
        rating = max(rank_ms(proposal, placed, len(self.capacities)))
        if rating < self.best_ms:
            self.best_ms = rating
            self.watch.found(rating / MS_PER_SECOND)
            self.best = tuple(
                Placed(candidate.choice, tuple(ranks))
                for candidate, ranks in zip(proposal, placed, strict=True)
            )
        return Verdict(fits=True, rating=rating)

    def _note(self, proposal: Proposal, shortfall: Shortfall) -> None:
        self.last = shortfall
        if self.closest is None or sum(shortfall.missing) < sum(self.closest.missing):
            self.closest = shortfall
        needs = [candidate.storage for candidate in proposal]
        needed = sum(n[0] for n in needs), sum(n[1] for n in needs), sum(n[2] for n in needs)
        self.smallest = needed if self.smallest is None else min(self.smallest, needed)

    def outcome(self, attempts: Sequence[Attempt]) -> Proposed:
        """What came of it."""
        seconds = self.best_ms / MS_PER_SECOND
        return Proposed(self.best, seconds, tuple(attempts), self.last, self.closest, self.smallest)


def _key(proposal: Proposal) -> bytes:
    """A digest of what is proposed, whatever the order of the tables."""
    numbers = array("q", sorted([candidate.number for candidate in proposal]))
    return blake2b(numbers.tobytes(), digest_size=16).digest()
