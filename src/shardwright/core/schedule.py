"""What a training step does, action by action.

The memory model runs this list symbolically, the cost model puts seconds on it, and the runtime
does it for real and can say what it did: all three walk the same actions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal

import msgspec

from shardwright.core.recording import Point, Unfolded
from shardwright.core.timeline import Phase

Verb = Literal[
    "load",
    "gather",
    "free",
    "compute",
    "exchange",
    "lookup",
    "assemble",
    "reduce",
    "collect",
    "update",
]
Prefetch = Literal[0, 1]
Direction = Literal["forward", "backward"]


class Action(msgspec.Struct, frozen=True, array_like=True):
    """``verb`` on ``target`` (a unit or ``tables``; empty where a rank computes in no unit), in the
    time of ``phase``; ``place`` is that of a piece among those of its direction."""

    verb: Verb
    target: str
    phase: Phase
    direction: Direction = "forward"
    place: int = -1


# Up to here the gradient of replicated tables rides along with the row gradients, once to every
# rank, which saves a collective; beyond, its bytes cost more than an all-reduce's latency.
RIDE_BYTES = 2**20


def replicas_ride(routed: bool, world_size: int, replica_bytes: int) -> bool:
    """Whether the gradient of replicated tables travels in the exchange of row gradients."""
    return routed and 0 < replica_bytes * world_size <= RIDE_BYTES


class Modes(msgspec.Struct, frozen=True):
    """What a plan decided that changes the order of a step.

    ``merged`` are the units of several recorded ones: a name, and these as they follow one another.
    With ``prefetch`` 1 a unit is gathered while the one before it computes, and gradients are
    reduced while the next ones are computed.
    """

    sharded_units: frozenset[str]
    resharded_units: frozenset[str]
    routed: bool
    replicated_tables: bool
    prefetch: Prefetch = 0
    merged: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Merged:
    """Units of several recorded ones: which of them begins a forward, and which ends it."""

    def __init__(self, merged: Iterable[tuple[str, tuple[str, ...]]] = ()) -> None:
        self.unit_of: dict[str, str] = {}
        self._first: dict[str, str] = {}
        self._last: dict[str, str] = {}
        for name, members in merged:
            self.unit_of.update(dict.fromkeys(members, name))
            self._first[name], self._last[name] = members[0], members[-1]

    def name(self, unit: str) -> str:
        """The unit that a recorded one belongs to."""
        return self.unit_of.get(unit, unit)

    def at(self, point: str, unit: str) -> str | None:
        """The unit that gets to ``point`` with the recorded ``unit``; None if another one of its
        members does."""
        name = self.unit_of.get(unit)
        if name is None:
            return unit
        ends = self._first if point in ("enter", "leave_backward") else self._last
        return name if ends[name] == unit else None


def training_step(step: Unfolded, modes: Modes) -> tuple[Action, ...]:
    """One step: load, forward through the recorded pieces that compute, backward, then update.

    A sharded unit is gathered before its first forward, freed after its last one if it reshards,
    gathered again before its backward, and freed and reduced right after. With prefetch the next
    sharded unit is gathered as well when one is entered, and a reduce only begins: it is collected
    before the next one begins, the last before the updates. Everything is updated at the end of
    the step, when all ranks know that every gradient is finite: tables first.
    """
    return tuple(_Walk(step, modes).actions())


class UnitFlow:
    """Which units are gathered, and the one whose reduce is under way: what a runtime does when a
    unit is entered and left. ``order`` is that of their forwards."""

    def __init__(self, order: Iterable[str], modes: Modes) -> None:
        self.modes = modes
        sharded = [unit for unit in order if unit in modes.sharded_units]
        self.after = dict(pairwise(sharded))
        self.before = dict(pairwise(reversed(sharded)))
        self.gathered: set[str] = set()
        self.pending: str | None = None

    def enter(self, unit: str, direction: Direction) -> Iterator[Action]:
        """Gather a sharded unit, and with prefetch the one that is needed after it."""
        if unit not in self.modes.sharded_units:
            return
        following = (self.after if direction == "forward" else self.before).get(unit)
        wanted = (unit, following) if self.modes.prefetch and following else (unit,)
        for name in wanted:
            if name not in self.gathered:
                self.gathered.add(name)
                yield Action("gather", name, direction, direction)

    def leave(self, unit: str) -> Iterator[Action]:
        """Free a unit after its forward, if it reshards."""
        if unit in self.modes.resharded_units:
            self.gathered.discard(unit)
            yield Action("free", unit, "forward")

    def reduce(self, unit: str) -> Iterator[Action]:
        """After a unit's backward; with prefetch the reduce only begins."""
        yield from self.collect()
        if unit in self.modes.sharded_units:
            self.gathered.discard(unit)
            yield Action("free", unit, "reduce", "backward")
        yield Action("reduce", unit, "reduce", "backward")
        self.pending = unit if self.modes.prefetch else None

    def collect(self) -> Iterator[Action]:
        """Wait for the reduce that is under way."""
        if self.pending is not None:
            yield Action("collect", self.pending, "reduce", "backward")
            self.pending = None


class _Walk:
    """A step, piece by piece."""

    def __init__(self, step: Unfolded, modes: Modes) -> None:
        self.step = step
        self.modes = modes
        self.merged = Merged(modes.merged)
        self.units = dict.fromkeys(
            self.merged.name(u) for u, its in step.units.items() if its.tensors
        )
        self.flow = UnitFlow(self.units, modes)
        self.touched: dict[str, None] = {}  # whose backward is under way
        self.left: list[str] = []  # sharded units as their forwards ended

    def actions(self) -> Iterator[Action]:
        yield Action("load", "batch", "load")
        for place, moment in enumerate(self.step.forward):
            yield from self._reach(moment.piece.point, moment.unit)
            if moment.piece.work.calls:
                yield self._compute(place, "forward")
        self.flow.before = dict(pairwise(reversed(self.left)))
        for place, moment in enumerate(self.step.backward):
            yield from self._reach_backward(moment.piece.point, moment.unit)
            if moment.piece.work.calls:
                yield self._compute(place, "backward")
        for unit in list(self.touched):
            yield from self.flow.reduce(unit)
        yield from self.flow.collect()
        if any(moment.piece.point == "lookup" for moment in self.step.forward):
            yield Action("update", "tables", "step", "backward")
        for unit in self.units:
            yield Action("update", unit, "step", "backward")

    def _compute(self, place: int, direction: Direction) -> Action:
        home = self.step.homes[direction][place]
        return Action("compute", self.merged.name(home), direction, direction, place)

    def _reach(self, point: Point, unit: str) -> Iterator[Action]:
        if point == "lookup":
            if self.modes.routed:
                yield Action("exchange", "ids", "exchange_ids")
            yield Action("lookup", "tables", "lookup")
            if self.modes.routed:
                yield Action("exchange", "rows", "exchange_rows")
        elif point == "rows":
            yield Action("assemble", "tables", "exchange_rows")
        elif point in ("enter", "leave"):
            name = self.merged.at(point, unit)
            if name is None or name not in self.units:
                return
            if point == "enter":
                yield from self.flow.enter(name, "forward")
            else:
                if name in self.modes.sharded_units:
                    self.left.append(name)
                yield from self.flow.leave(name)

    def _reach_backward(self, point: Point, unit: str) -> Iterator[Action]:
        if point == "row_gradients":
            if self.modes.routed:
                yield Action("exchange", "row_gradients", "reduce", "backward")
            if self.modes.replicated_tables:
                yield Action("reduce", "tables", "reduce", "backward")
        elif point in ("enter_backward", "leave_backward"):
            name = self.merged.at(point, unit)
            if name is None or name not in self.units:
                return
            if point == "enter_backward":
                self.touched[name] = None
                yield from self.flow.enter(name, "backward")
            elif name in self.touched:
                del self.touched[name]
                yield from self.flow.reduce(name)
