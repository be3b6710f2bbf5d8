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
    """A dense unit on a rank: its padded buffer whole, what a rank gets of its gradient's sum, the
    note in it, and the parts of all ranks where the rank itself sums them (on gloo)."""

    full: int
    row: int
    note: int
    replicated: bool
    ranks: int = 1
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
        self.replicated_tables = modes.replicated_tables
        units = stages_of_units(model, modes)
        self.unit_of = {stage: unit for unit, stages in units.items() for stage in stages}
        self.gradients: dict[str, list[str]] = {unit: [] for unit in units}  # that are there
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
        self._work(stage.backward)
        kept = [i.name for w in stage.backward for i in w.takes if i.kind == "unreduced_gradient"]
        self.gradients.get(self.unit_of.get(stage.name, ""), []).extend(kept)

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
            if not self.replicated_tables:
                self._end_of_tables()

    def _end_of_tables(self) -> None:
        """Their backward is over; what arrived stays until the update."""
        route.forget_trip(self.heap, self.load.traffic)
        self._work(self.stages["tables"].backward)

    def _lookup(self, action: Action) -> None:
        route.look_up(self.heap, self.load.traffic)

    def _assemble(self, action: Action) -> None:
        route.assemble(self.heap, self.load.traffic)

    def _reduce(self, action: Action) -> None:
        if action.target == "tables":
            route.reduce_replicas(self.heap, self.load.traffic)
            self._end_of_tables()
            return
        name, unit = action.target, self.load.units[action.target]
        ranks = 1 if unit.replicated else unit.ranks
        self.heap.take(f"{name}.send", "reduce_scatter", unit.row * ranks)
        with self.heap.passing("temporary", unit.note):
            pass
        for gradient in self.gradients[name]:
            self.heap.free(gradient)
        self.gradients[name].clear()
        self.heap.take(f"{name}.gradient", "gradient", unit.row)
        if unit.replicated:
            self.heap.free(f"{name}.send")
        self.heap.take(f"{name}.scratch", "communication", unit.scratch)
        if not self.prefetch:
            self._collect(action)

    def _collect(self, action: Action) -> None:
        self.heap.free(f"{action.target}.scratch")
        self.heap.free(f"{action.target}.send")

    def _update(self, action: Action) -> None:
        if action.target == "tables":
            route.update(self.heap, self.load.traffic)
            return
        self.heap.free(f"{action.target}.gradient")
