"""A complete set of choices: who gets which shard, and what that costs each rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec import UNSET

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.model import ModelSpec
from shardwright.core.timeline import PHASES, Event
from shardwright.job.plan import Attempt, RankTotals, Search, Tried
from shardwright.planner import profiles
from shardwright.planner.choice import Placed, Tally, tally
from shardwright.planner.exchange import Crossing
from shardwright.planner.problem import Problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.unit_choice import UnitChoice
from shardwright.planner.variation import ModelOf


class Filled(NamedTuple):
    """Bytes that a rank needs of a memory, and those that it may fill."""

    tier: Tier
    rank: int
    needed: int
    capacity: int

    @property
    def over(self) -> int:
        """Bytes too much; below 0 where it fits."""
        return self.needed - self.capacity


@dataclass(frozen=True)
class Draft(ABC):
    """One proposal; everything about it is derived on demand."""

    problem: Problem
    tables: tuple[Placed, ...]
    units: tuple[UnitChoice, ...]

    @property
    def model(self) -> ModelSpec:
        """The model planned for."""
        return self.problem.model

    @property
    def ranks(self) -> int:
        """Ranks planned for."""
        return self.problem.cluster.world_size

    @cached_property
    def tally(self) -> Tally:
        """What the tables add up to, in an order that no listing of the tables changes."""
        # Doubles added in another order differ in their last bits, and plans are compared to the
        # byte.
        order = self.problem.order if len(self.tables) == len(self.problem.order) else ()
        return tally((self.tables[i] for i in order), self.ranks)

    @cached_property
    @abstractmethod
    def shared_seconds(self) -> dict[str, float]:
        """Seconds by part that every rank spends whatever tables it holds."""

    @property
    def crossings(self) -> Sequence[Crossing]:
        """Exchanges that travel while ranks compute."""
        return ()

    @cached_property
    def seconds(self) -> tuple[dict[str, float], ...]:
        """Seconds per step of each rank, by part; those that are hidden are none."""
        rows = {part: values.tolist() for part, values in self.tally.seconds.items()}
        totals = []
        for rank in range(self.ranks):
            found = dict(self.shared_seconds)
            for part, values in rows.items():
                found[part] = found.get(part, 0.0) + values[rank]
            for crossing in self.crossings:
                found[crossing.phase] -= float(crossing.hidden[rank])
            totals.append(found)
        return tuple(totals)

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds per step of each rank."""
        return tuple(math.fsum(parts.values()) for parts in self.seconds)

    @property
    def max_rank_seconds(self) -> float:
        """What the search minimises."""
        return max(self.rank_seconds)

    @property
    @abstractmethod
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank has alive at once in the memory that decides."""

    @property
    def highest_peak(self) -> int:
        """The most of any rank."""
        return max(self.peak_bytes)

    @property
    def room(self) -> tuple[int, int, int]:
        """Bytes of HBM, DDR and SSD of a rank that shards of tables may keep."""
        return self.problem.capacity

    @property
    def fits(self) -> bool:
        """Whether every rank is within its capacities."""
        return all(each.over <= 0 for each in self.fills)

    @property
    @abstractmethod
    def fills(self) -> Sequence[Filled]:
        """What ranks need of their memories, the fullest of them among these."""

    @abstractmethod
    def totals(self, rank: int) -> RankTotals:
        """A rank's bytes and seconds for the plan."""

    @abstractmethod
    def byte_events(self) -> Iterable[Event]:
        """Bytes of the predicted timeline."""

    def time_events(self) -> Iterable[Event]:
        """Seconds of the predicted timeline, phase after phase."""
        # What is hidden behind compute is told apart from what is exposed: the first takes no place
        # among the phases, which add up to the seconds of the rank.
        phase_of = profiles.phase_of_part(self.problem.job.planner.constants)
        for rank, parts in enumerate(self.seconds):
            phases: dict[str, float] = {}
            for part, value in parts.items():
                phase = phase_of.get(part, part)
                phases[phase] = phases.get(phase, 0.0) + value
            start, begins = 0.0, {}
            for phase in (p for p in PHASES if p in phases):
                begins[phase] = start
                yield Event(rank, 1, phase, "time", phase, 0, start, phases[phase])
                start += phases[phase]
            for crossing in self.crossings:
                phase, name, hidden = crossing.phase, crossing.name, float(crossing.hidden[rank])
                exposed = float(crossing.seconds[rank]) - hidden
                began = begins[crossing.behind]
                yield Event(rank, 1, phase, "hidden", name, 0, began, hidden)
                yield Event(rank, 1, phase, "exposed", name, 0, begins[phase], exposed)


@dataclass(frozen=True)
class TablesDraft(Draft):
    """Tables alone: a rank's seconds and bytes are the sums over its shards."""

    @cached_property
    def shared_seconds(self) -> dict[str, float]:
        requests = math.fsum(placed.choice.everywhere for placed in self.tables)
        return {"exchange_ids": requests} if requests else {}

    @cached_property
    def tier_bytes(self) -> dict[Tier, list[int]]:
        """Bytes of every rank by tier."""
        return {tier: self.tally.tier_bytes(tier, self.ranks) for tier in TIERS}

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(self.tier_bytes[self.problem.cluster.decisive_tier])

    @property
    def fills(self) -> Sequence[Filled]:
        return [
            Filled(tier, rank, nbytes, capacity)
            for tier, capacity in zip(TIERS, self.problem.capacity, strict=True)
            for rank, nbytes in enumerate(self.tier_bytes[tier])
        ]

    def totals(self, rank: int) -> RankTotals:
        kinds = self.tally.kinds(self.problem.cluster.decisive_tier, rank)
        return RankTotals(
            rank=rank,
            peak_bytes=self.peak_bytes[rank],
            peak_phase="step",
            at_peak=kinds,
            exact={},
            seconds=self.rank_seconds[rank],
            parts=self.seconds[rank],
            hbm_bytes=self.tier_bytes["hbm"][rank],
            ddr_bytes=self.tier_bytes["ddr"][rank],
            ssd_bytes=self.tier_bytes["ssd"][rank],
        )

    def byte_events(self) -> Iterable[Event]:
        return ()


@dataclass(frozen=True)
class Found:
    """The best draft that fits, if any; ``bound`` seconds no plan of ``problem`` can beat.

    ``gave_up`` says whether a step's activations kept a draft from being better, ``tried`` what
    was found of every choice that the job left open. ``model_of`` describes models of such jobs,
    the one that was searched with a checkpointing ``policy``; ``helps`` tries a way out that only
    its giver knows, where nothing fits, and says whether it is one; ``remark`` is what its giver
    has to say then. ``attempts`` are those of its proposers.
    """

    problem: Problem
    draft: Draft | None
    bound: float
    name: str
    proposals: int
    feasible: int
    proved: float = 0.0
    skipped: tuple[str, ...] = ()
    gave_up: bool = False
    tried: tuple[Tried, ...] = ()
    model_of: ModelOf | None = None
    policy: str = "none"
    helps: Callable[[Watch], str] | None = None
    attempts: tuple[Attempt, ...] = ()
    remark: str = ""

    @property
    def seconds(self) -> float:
        """Seconds per step of the draft's slowest rank, without end where there is none."""
        return math.inf if self.draft is None else self.draft.max_rank_seconds

    def described(self, wall_seconds: float, *, cut_short: str = "") -> Search:
        """How the plan was found; ``cut_short`` says what ended the search early, if anything."""
        return Search(
            name=self.name,
            proposals=self.proposals,
            feasible=self.feasible,
            wall_seconds=wall_seconds,
            options=sum(len(choices) for choices in self.problem.tables),
            slow_kernels=self.problem.slow,
            proved_seconds=self.proved,
            skipped=(*self.skipped, cut_short) if cut_short else self.skipped,
            tried=self.tried or UNSET,
            attempts=self.attempts or UNSET,
        )
