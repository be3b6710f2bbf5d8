"""What a proposer is: a generator of proposals that is told how each one fared."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.planner.proposing.candidate import Bytes, Candidate, Candidates, Price

Proposal = tuple[Candidate, ...]  # one candidate for each table


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a proposal fits and, if so, the milliseconds of its busiest rank."""

    fits: bool
    rating: float | None = None


# Yields proposals, receives verdicts and returns why it stopped early, if it did.
Proposals = Generator[Proposal, Verdict, str | None]


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is to choose from: the candidates of each table, and room on each rank.

    ``price`` prices options anew, for a proposer that changes them; ``deadline`` is a moment of
    ``time.monotonic`` after which long work is to stop.
    """

    tables: tuple[tuple[Candidate, ...], ...]
    capacities: Sequence[Bytes]
    known: Candidates
    price: Price | None
    deadline: float

    @property
    def hbm(self) -> int:
        """Bytes of HBM on all ranks."""
        return sum(hbm for hbm, _, _ in self.capacities)

    def by_score(self, use_depth: bool) -> list[list[Candidate]]:
        """The candidates of each table, fastest first; ties stay in order."""
        return [sorted(ways, key=lambda c: c.score(use_depth)) for ways in self.tables]


class Proposer(Protocol):
    """A way to propose."""

    @property
    def name(self) -> str:
        """What it is called in a job."""
        ...

    def proposals(self, offer: Offer) -> Proposals:
        """One proposal after the other."""
        ...
