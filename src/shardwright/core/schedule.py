"""What a training step does, action by action.

The memory model runs this list symbolically, the cost model puts seconds on it, and the runtime
does it for real and can say what it did: all three walk the same actions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal

import msgspec

from shardwright.core.model import ModelSpec, Stage
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
    """``verb`` on ``target`` (a stage, a unit, or ``tables``), in the time of ``phase``."""

    verb: Verb
    target: str
    phase: Phase
    direction: Direction = "forward"


# Up to here the gradient of replicated tables rides along with the row gradients, once to every
# rank, which saves a collective; beyond, its bytes cost more than an all-reduce's latency.
RIDE_BYTES = 2**20


def replicas_ride(routed: bool, world_size: int, replica_bytes: int) -> bool:
    """Whether the gradient of replicated tables travels in the exchange of row gradients."""
    return routed and 0 < replica_bytes * world_size <= RIDE_BYTES


class Modes(msgspec.Struct, frozen=True):
    """What a plan decided that changes the order of a step.

    ``merged`` are the units of several stages: a name, and its stages as they follow one another.
    With ``prefetch`` 1 a unit is gathered while the one before it computes, and gradients are
    reduced while the next ones are computed.
    """

    sharded_units: frozenset[str]
    resharded_units: frozenset[str]
    routed: bool
    replicated_tables: bool
    prefetch: Prefetch = 0
    merged: tuple[tuple[str, tuple[str, ...]], ...] = ()


def stages_of_units(model: ModelSpec, modes: Modes) -> dict[str, tuple[str, ...]]:
    """The stages of every unit, both in the order of a step."""
    unit_of = {stage: unit for unit, stages in modes.merged for stage in stages}
    found: dict[str, tuple[str, ...]] = {}
    for stage in model.stages:
        if stage.access == "gather":
            unit = unit_of.get(stage.name, stage.name)
            found[unit] = (*found.get(unit, ()), stage.name)
    return found


def training_step(model: ModelSpec, modes: Modes) -> tuple[Action, ...]:
    """One step: load, forward through the stages, backward through them, then update.

    A sharded unit is gathered before its first forward, freed after its last one if it reshards,
    gathered again before its backward, and freed and reduced right after. With prefetch the next
    sharded unit is gathered as well when one is entered, and a reduce only begins: it is collected
    before the next one begins, the last before the updates. Everything is updated at the end of
    the step, when all ranks know that every gradient is finite: tables first.
    """
    return tuple(_Walk(model, modes).actions())


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
    """A step, stage by stage."""

    def __init__(self, model: ModelSpec, modes: Modes) -> None:
        self.model = model
        self.modes = modes
        self.units = stages_of_units(model, modes)
        self.unit_of = {stage: unit for unit, stages in self.units.items() for stage in stages}
        self.flow = UnitFlow(self.units, modes)

    def actions(self) -> Iterator[Action]:
        yield Action("load", "batch", "load")
        for stage in self.model.stages:
            yield from self._forward(stage)
        for stage in reversed(self.model.stages):
            yield from self._backward(stage)
        yield from self.flow.collect()
        for stage in self.model.stages:
            if stage.access == "route":
                yield Action("update", stage.name, "step", "backward")
        names = (self.unit_of.get(unit.name, unit.name) for unit in self.model.units)
        for unit in dict.fromkeys(names):
            yield Action("update", unit, "step", "backward")

    def _forward(self, stage: Stage) -> Iterator[Action]:
        if stage.access == "route":
            if self.modes.routed:
                yield Action("exchange", "ids", "exchange_ids")
            yield Action("lookup", stage.name, "lookup")
            if self.modes.routed:
                yield Action("exchange", "rows", "exchange_rows")
            yield Action("assemble", stage.name, "exchange_rows")
            return
        unit = self.unit_of.get(stage.name, "")
        if unit and stage.name == self.units[unit][0]:
            yield from self.flow.enter(unit, "forward")
        yield Action("compute", stage.name, "forward")
        if unit and stage.name == self.units[unit][-1]:
            yield from self.flow.leave(unit)

    def _backward(self, stage: Stage) -> Iterator[Action]:
        if stage.access == "route":
            if self.modes.routed:
                yield Action("exchange", "row_gradients", "reduce", "backward")
            if self.modes.replicated_tables:
                yield Action("reduce", "tables", "reduce", "backward")
            return
        unit = self.unit_of.get(stage.name, "")
        if unit and stage.name == self.units[unit][-1]:
            yield from self.flow.enter(unit, "backward")
        yield Action("compute", stage.name, "backward", "backward")
        if unit and stage.name == self.units[unit][0]:
            yield from self.flow.reduce(unit)
