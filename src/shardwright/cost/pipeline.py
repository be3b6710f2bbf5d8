"""Seconds of a step's dense part, action by action.

A rank has two lanes: one computes, one communicates. Without prefetch a collective holds up the
lane that computes until it is done. With prefetch gathers and reduces run beside it: the share
``overlap`` of a collective's seconds costs no compute, the rest does, for it needs the same cores.
Whoever needs what is not there yet waits. Collectives run one after the other.

Numbers give numbers, Amounts derivations. What tables do is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shardwright.core.amount import maximum, named
from shardwright.core.model import ModelSpec
from shardwright.core.schedule import Action, Modes, stages_of_units, training_step
from shardwright.core.timeline import Phase

Settle = Callable[[str, Any], Any]


class UnitSeconds(NamedTuple):
    """Seconds of one gather, one reduce, the gradient's buffer, and the update of a unit."""

    gather: Any
    reduce: Any
    gradient: Any
    update: Any


class StageSeconds(NamedTuple):
    """Seconds that a stage computes."""

    forward: Any
    backward: Any


class Spent(NamedTuple):
    """What an action takes of the lane that computes; ``unit`` is empty for a stage without one."""

    action: Action
    unit: str
    seconds: Any


def walk(
    model: ModelSpec,
    modes: Modes,
    units: Mapping[str, UnitSeconds],
    stages: Mapping[str, StageSeconds],
    overlap: Any,
    settle: Settle = named,
) -> list[Spent]:
    """Every action of the step that computes, gathers, reduces or updates a unit.

    ``units`` and ``stages`` have the seconds by name; a unit that has none is left out with its
    stages. ``settle`` is given the clocks, which otherwise grow into derivations of all that came
    before.
    """
    return list(_Lanes(model, modes, units, stages, overlap, settle).run())


def by_phase(spent: Iterable[Spent]) -> dict[str, dict[Phase, Any]]:
    """The sums of every unit, phase by phase; those of stages without a unit under no name."""
    found: dict[str, dict[Phase, Any]] = {}
    for action, unit, seconds in spent:
        phases = found.setdefault(unit, {})
        before = phases.get(action.phase)
        phases[action.phase] = seconds if before is None else before + seconds
    return found


class _Lanes:
    """Two clocks; ``ready`` says when what a collective brings is there."""

    def __init__(
        self,
        model: ModelSpec,
        modes: Modes,
        units: Mapping[str, UnitSeconds],
        stages: Mapping[str, StageSeconds],
        overlap: Any,
        settle: Settle,
    ) -> None:
        self.actions = training_step(model, modes)
        self.prefetch = modes.prefetch
        self.units = units
        self.stages = stages
        self.overlap = overlap
        self.settle = settle
        members = stages_of_units(model, modes)
        self.unit_of = {stage: unit for unit, inside in members.items() for stage in inside}
        self.begins_backward = {inside[-1] for inside in members.values()}
        self.computing: Any = 0.0
        self.communicating: Any = 0.0
        self.ready: dict[str, Any] = {}

    def run(self) -> Iterator[Spent]:
        for action in self.actions:
            computes = action.verb == "compute"
            unit = self.unit_of.get(action.target, "") if computes else action.target
            ours = unit in self.units and action.verb != "free"
            if ours or (computes and not unit):
                yield self._spent(action, unit, getattr(self, f"_{action.verb}"))

    def _spent(self, action: Action, unit: str, of: Callable[[Action, str], Any]) -> Spent:
        seconds = of(action, unit)
        if self.prefetch:
            clock = self.computing + seconds
            self.computing = self.settle(f"clock after {_words(action)}", clock)
        return Spent(action, unit, seconds)

    def _compute(self, action: Action, unit: str) -> Any:
        stage = self.stages[action.target]
        seconds = stage.forward if action.direction == "forward" else stage.backward
        if action.direction == "backward" and action.target in self.begins_backward:
            seconds = self.units[unit].gradient + seconds
        waits = self._wait(f"{unit} gathered")
        return seconds if waits is None else waits + seconds

    def _gather(self, action: Action, unit: str) -> Any:
        return self._communicate(self.units[unit].gather, f"{unit} gathered")

    def _reduce(self, action: Action, unit: str) -> Any:
        return self._communicate(self.units[unit].reduce, f"{unit} reduced")

    def _collect(self, action: Action, unit: str) -> Any:
        return self._wait(f"{unit} reduced")

    def _update(self, action: Action, unit: str) -> Any:
        return self.units[unit].update

    def _communicate(self, seconds: Any, what: str) -> Any:
        """Everything at once, or what cannot hide; then ``what`` is ready later."""
        if not self.prefetch:
            return seconds
        done = maximum(self.computing, self.communicating) + seconds
        self.communicating = self.ready[what] = self.settle(f"{what} at", done)
        return seconds * (1 - self.overlap)

    def _wait(self, what: str) -> Any:
        """Until ``what`` is ready; None where nothing is under way."""
        ready = self.ready.pop(what, None)
        return None if ready is None else maximum(ready - self.computing, 0.0)


def _words(action: Action) -> str:
    return f"{action.verb} {action.target} {action.direction}"
