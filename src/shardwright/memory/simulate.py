"""Run a step's schedule on a symbolic heap: the peak of every phase, by kind, for one rank."""

from __future__ import annotations

import msgspec

from shardwright.core.model import ModelSpec, Work
from shardwright.core.schedule import Action, Modes, stages_of_units, training_step
from shardwright.core.timeline import Kind, Phase
from shardwright.memory import route
from shardwright.memory.ledger import Ledger
from shardwright.memory.route import Traffic


class UnitBytes(msgspec.Struct, frozen=True):
    """A dense unit on a rank: its padded buffer whole, this rank's slice of it, and the room that
    the parts of all ranks take until they are summed (on gloo)."""

    full: int
    shard: int
    replicated: bool
    scratch: int = 0


class RankLoad(msgspec.Struct, frozen=True):
    """What a rank keeps (``resident`` bytes by kind) and what passes through it in a step."""

    resident: dict[Kind, int]
    units: dict[str, UnitBytes]
    traffic: Traffic
    batch_size: int


def phase_peaks(model: ModelSpec, modes: Modes, load: RankLoad) -> dict[Phase, dict[Kind, int]]:
    """Live bytes by kind at the peak of each phase of a steady training step."""
    heap = Ledger()
    for kind, nbytes in load.resident.items():
        heap.take(f"resident.{kind}", kind, nbytes)
    heap.peaks.clear()
    walker = _Walker(model, modes, load, heap)
    for action in training_step(model, modes):
        with heap.during(action.phase):
            walker.run(action)
    del heap.peaks["setup"]
    return heap.peaks


class _Walker:
    """What each action of the schedule does to the heap."""

    def __init__(self, model: ModelSpec, modes: Modes, load: RankLoad, heap: Ledger) -> None:
        self.load = load
        self.prefetch = modes.prefetch
        units = stages_of_units(model, modes)
        self.begins_backward = {stages[-1]: unit for unit, stages in units.items()}
        self.heap = heap
        self.inputs = model.inputs
        self.stages = {stage.name: stage for stage in model.stages}

    def run(self, action: Action) -> None:
        getattr(self, f"_{action.verb}")(action)

    def _load(self, action: Action) -> None:
        for item in self.inputs:
            self.heap.take(item.name, item.kind, item.nbytes(self.load.batch_size))

    def _gather(self, action: Action) -> None:
        unit = self.load.units[action.target]
        self.heap.take(f"{action.target}.full", "gathered_weight", unit.full)

    def _free(self, action: Action) -> None:
        self.heap.free(f"{action.target}.full")

    def _compute(self, action: Action) -> None:
        stage = self.stages[action.target]
        if action.direction == "forward":
            self._work(stage.forward)
            return
        if stage.name in self.begins_backward:
            unit = self.begins_backward[stage.name]
            self.heap.take(f"{unit}.unreduced", "unreduced_gradient", self.load.units[unit].full)
        self._work(stage.backward)

    def _work(self, works: tuple[Work, ...]) -> None:
        for work in works:
            for item in work.takes:
                self.heap.take(item.name, item.kind, item.nbytes(self.load.batch_size))
            for name in work.frees:
                self.heap.free(name)

    def _exchange(self, action: Action) -> None:
        if action.target == "ids":
            route.exchange_ids(self.heap, self.load.traffic)
        elif action.target == "rows":
            route.exchange_rows(self.heap, self.load.traffic)
        else:
            route.return_gradients(self.heap, self.load.traffic)

    def _lookup(self, action: Action) -> None:
        route.look_up(self.heap, self.load.traffic)

    def _assemble(self, action: Action) -> None:
        route.assemble(self.heap, self.load.traffic)

    def _reduce(self, action: Action) -> None:
        if action.target == "tables":
            route.reduce_replicas(self.heap, self.load.traffic)
            return
        unit = self.load.units[action.target]
        if not unit.replicated:
            self.heap.take(f"{action.target}.gradient", "gradient", unit.shard)
            self.heap.take(f"{action.target}.scratch", "communication", unit.scratch)
        if not self.prefetch:
            self._collect(action)

    def _collect(self, action: Action) -> None:
        self.heap.free(f"{action.target}.scratch")
        if not self.load.units[action.target].replicated:
            self.heap.free(f"{action.target}.unreduced")

    def _update(self, action: Action) -> None:
        if action.target == "tables":
            route.update(self.heap, self.load.traffic)
            self._work(self.stages["tables"].backward)
            return
        self.heap.free(f"{action.target}.gradient")
        self.heap.free(f"{action.target}.unreduced")
