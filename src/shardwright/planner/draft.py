"""A complete set of choices: who gets which shard, and what that costs each rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.model import ModelSpec
from shardwright.core.timeline import PHASES, Event
from shardwright.job.plan import RankTotals
from shardwright.planner import profiles
from shardwright.planner.crossing import Crossing
from shardwright.planner.problem import Problem
from shardwright.planner.tally import Placed, Tally, tally
from shardwright.planner.unit_choice import UnitChoice


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
    @abstractmethod
    def fits(self) -> bool:
        """Whether every rank is within its capacities."""

    @abstractmethod
    def totals(self, rank: int) -> RankTotals:
        """A rank's bytes and seconds for the plan."""

    @abstractmethod
    def byte_events(self) -> Iterable[Event]:
        """Bytes of the predicted timeline."""

    def time_events(self) -> Iterable[Event]:
        """Seconds of the predicted timeline, phase after phase."""
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
        return tuple(self.tier_bytes["ddr" if self._on_cpu else "hbm"])

    @property
    def _on_cpu(self) -> bool:
        return self.problem.cluster.compute_device == "cpu"

    @property
    def fits(self) -> bool:
        return all(
            max(self.tier_bytes[tier]) <= capacity
            for tier, capacity in zip(TIERS, self.problem.capacity, strict=True)
        )

    def totals(self, rank: int) -> RankTotals:
        kinds = self.tally.kinds("ddr" if self._on_cpu else "hbm", rank)
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
