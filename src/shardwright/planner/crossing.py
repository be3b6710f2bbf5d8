"""Exchanges of tables that travel while ranks compute, and how much of their seconds is hidden."""

# Compute hides an exchange only once: seconds of compute beside which rows travel are no longer
# there for ids. So legs are sorted by their windows, the narrowest first (a wide one can still use
# what a narrow one left), and ids, which may travel all step long, get what rows and gradients did
# not take.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.amount import minimum, named
from shardwright.core.schedule import Direction
from shardwright.core.timeline import Phase
from shardwright.cost import embedding
from shardwright.cost.pipeline import hidden_seconds
from shardwright.job.job import overlap_of
from shardwright.job.model_of_job import early_tables
from shardwright.planner.choice import tally
from shardwright.planner.exchange import Exchange
from shardwright.planner.problem import Problem, ranks_per_host

Computed = Mapping[str, float]  # seconds by the unit that computes; empty for none


@dataclass(frozen=True)
class Windows:
    """What a rank computes while exchanges may travel: by module of tables from a forward's begin
    until it needs its rows, from its row gradients to the end of the backward, and in all."""

    rows: Mapping[str, Computed]
    gradients: Mapping[str, Computed]
    everything: Computed

    def most(self, *, ids: bool) -> float:
        """The most that can be hidden of rows and their gradients, or with ``ids`` as well."""
        if ids:
            return _sum(self.everything)
        widest = (
            max((_sum(window) for window in windows.values()), default=0.0)
            for windows in (self.rows, self.gradients)
        )
        return math.fsum(widest)


@dataclass(frozen=True)
class Leg:
    """One exchange of a crossing: seconds of its bytes on every rank, of its collectives on each,
    and what is computed meanwhile."""

    exchange: Exchange
    moved: NDArray[np.float64]
    latency: float
    window: Computed


@dataclass(frozen=True)
class Crossing:
    """What travels in ``phase`` under a ``name``, ``behind`` the phase that computes meanwhile. The
    narrowest windows come first, of which ``taken`` seconds of every rank hide other exchanges."""

    phase: Phase
    name: str
    behind: Phase
    legs: Sequence[Leg]
    overlap: float
    taken: Any = 0.0

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """What they take on every rank."""
        return sum((leg.moved + leg.latency for leg in self.legs), start=np.zeros(1))

    @cached_property
    def hidden(self) -> NDArray[np.float64]:
        """What of it costs a rank nothing."""
        pairs = [
            (leg.moved + leg.latency, _sum(leg.window) - self.taken if leg.window else 0.0)
            for leg in self.legs
        ]
        found: NDArray[np.float64] = hidden_seconds(pairs, self.overlap)
        return found


def windows_of(problem: Problem) -> Windows | None:
    """Those of a job; None where nothing travels while a rank computes."""
    overlap = overlap_of(problem.job, problem.cluster.world_size)
    if overlap == "none" or not problem.model.is_trained:
        return None
    step, early = problem.model.step, early_tables(problem.job, problem.model)
    rows = {
        moment.unit: _computed(problem, "forward", range(place))
        for place, moment in enumerate(step.forward)
        if moment.piece.point == "lookup" and moment.unit in early
    }
    count = len(step.backward)
    gradients = {
        moment.unit: _computed(problem, "backward", range(place, count))
        for place, moment in enumerate(step.backward)
        if moment.piece.point == "row_gradients"
    }
    everything = _computed(problem, "forward", range(len(step.forward)))
    for unit, seconds in _computed(problem, "backward", range(count)).items():
        everything[unit] = everything.get(unit, 0.0) + seconds
    return Windows(rows, gradients, everything)


def _computed(problem: Problem, direction: Direction, places: range) -> dict[str, float]:
    homes = problem.model.step.homes[direction]
    pieces = problem.unit_space.pieces[direction]
    found: dict[str, float] = {}
    for place in places:
        if pieces[place]:
            found[homes[place]] = found.get(homes[place], 0.0) + pieces[place]
    return found


def crossings(problem: Problem, exchanges: Iterable[Exchange]) -> tuple[Crossing, ...]:
    """What travels of ``exchanges`` while ranks compute."""
    windows = windows_of(problem)
    if windows is None:
        return ()
    exchanges = list(exchanges)
    routed = [each for each in exchanges if each.late]
    early = [each.path for each in routed if each.early]
    overlap = problem.values["overlap"]
    found = []
    if early:
        legs = _legs(problem, routed, "exchange_rows", windows.rows)
        found.append(Crossing("exchange_rows", "rows", "forward", legs, overlap))
    if routed:
        legs = _legs(problem, routed, "reduce", windows.gradients)
        found.append(Crossing("reduce", "row_gradients", "backward", legs, overlap))
    if early and problem.job.train.overlap == "ids_and_rows":
        legs = _legs(problem, routed, "exchange_ids", dict.fromkeys(early, windows.everything))
        # Ids of the next batch travel all step long, and lose the compute that hides rows already.
        taken = sum(crossing.hidden for crossing in found)
        found.append(Crossing("exchange_ids", "ids", "forward", legs, overlap, taken))
    return tuple(found)


def _legs(
    problem: Problem, exchanges: Iterable[Exchange], phase: Phase, windows: Mapping[str, Computed]
) -> list[Leg]:
    values, local = problem.values, ranks_per_host(problem.cluster)
    found = []
    for each in exchanges:
        moved = tally(each.routed, each.ranks).seconds.get(phase, np.zeros(each.ranks))
        part = each.routed_part
        latency = embedding.exchange_latency(part, phase, each.ranks, values, local)
        found.append(Leg(each, moved, latency, windows.get(each.path, {})))
    return sorted(found, key=lambda leg: _sum(leg.window))


def without_hidden(problem: Problem, tables: Any, lift: Any = None) -> Any:
    """Seconds of tables that a step takes at least, of those that they take at least alone.

    Whatever their exchanges, no more is hidden than is computed meanwhile, nor than their share.
    ``lift`` makes an input of a number.
    """
    # Which tables are routed, and so what can travel, is not known where a bound is asked for: it
    # may hide as much as any placement could.
    windows = windows_of(problem)
    if windows is None:
        return tables
    most: Any = windows.most(ids=problem.job.train.overlap == "ids_and_rows")
    share: Any = problem.values["overlap"]
    if lift is not None:
        most = lift(most, "computed_meanwhile", "s", "while exchanges of tables may travel")
        share = lift(share, "overlap", "", "constant")
    hidden = named("hidden_at_most", minimum(tables * share, most), "s")
    return tables - hidden


def _sum(window: Computed) -> float:
    return math.fsum(window.values())
