"""In which order units are needed, so that the next one can be on its way.

The units of one model share a flow. It records the order in which a pass asks for them, and in the
next such pass, as long as the order is the same, begins to gather a unit while the one before it
computes. Every rank records the same order, so every rank issues the same collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal

from shardwright.core.errors import InputError, expected
from shardwright.core.schedule import Action
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import (
    adds_to,
    after_backward,
    in_backward,
    outside_of_transforms,
)
from shardwright.runtime.units.linked import asked_for
from shardwright.runtime.units.rebind import absorb
from shardwright.runtime.units.unit import Unit

Direction = Literal["forward", "backward"]


class Order:
    """What one kind of pass asked for last time, and what it has asked for so far."""

    __slots__ = ("expected", "seen")

    def __init__(self) -> None:
        self.expected: list[int] = []
        self.seen: list[int] = []

    def begin(self) -> None:
        """A new pass: the last one, if there was one, is what to expect."""
        if self.seen:
            self.expected = self.seen
            self.seen = []

    def visit(self, number: int, depth: int) -> list[int]:
        """Note that unit ``number`` is needed; the next ``depth`` units, if all is as expected."""
        position = len(self.seen)
        if position and self.seen[-1] == number:
            return []
        self.seen.append(number)
        if position >= len(self.expected) or self.expected[position] != number:
            self.expected = []
            return []
        return self.expected[position + 1 : position + 1 + depth]


class Flow:
    """The units of a model in the order they were added, held weakly, and the pass they are in."""

    def __init__(self, prefetch: int = 1, guard: Guard | None = None) -> None:
        self.prefetch = prefetch
        self.guard = guard  # looks at every gradient before it is summed
        self.after: Any = None  # an event of another stream that a forward waits for
        self.settings: dict[str, Any] = {}  # what was set for every unit of the model
        self._leader: weakref.ref[Unit] | None = None
        self._units: dict[int, weakref.ref[Unit]] = {}
        self._next = 0
        self._orders: dict[Direction, Order] = {"forward": Order(), "backward": Order()}
        self._in_backward = False
        self._pending: Unit | None = None
        self._touched: dict[int, Unit] = {}

    def add(self, unit: Unit) -> None:
        """Drive a unit from now on, under the settings of the model."""
        for name, value in self.settings.items():
            setattr(unit, name, value)
        unit.flow, unit.number = self, self._next
        self._units[self._next] = weakref.ref(unit)
        self._next += 1

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of every unit, of those to come as well."""
        self.settings[name] = value
        for unit in self.units():
            setattr(unit, name, value)

    def join(self, other: Flow) -> None:
        """Take in every unit of another flow, whose forwards are parts of this one's. What was set
        there before this flow began holds here too."""
        other.lead(None)
        for name, value in other.settings.items():
            if self.settings.get(name, value) != value:
                raise InputError(
                    expected(
                        f"'{name}' of the units of a model",
                        f"{self.settings[name]}, as of other ones",
                        f"{value}",
                        "Make such settings after the whole model is sharded.",
                    )
                )
            self.set(name, value)
        for unit in list(other.units()):
            self.add(unit)

    def lead(self, unit: Unit | None) -> None:
        """The unit whose forward is the forward of the whole model, if a unit has it."""
        self._leader = None if unit is None else weakref.ref(unit)

    def is_led_by(self, unit: Unit) -> bool:
        """Whether the forward of ``unit`` is that of the whole model."""
        return self._leader is not None and self._leader() is unit

    @property
    def has_units(self) -> bool:
        """Whether there are any."""
        return bool(self._units)

    def reshards(self, unit: Unit) -> bool:
        """Whether the whole unit goes after a forward that trains. Left open, it does unless it is
        the root of others, whose backward comes at once."""
        if unit.keeps_whole:
            return True
        if unit.reshard_after_forward is None:
            return not (self.is_led_by(unit) and len(self._units) > 1)
        return unit.reshard_after_forward is not False

    def units(self) -> Iterator[Unit]:
        """Every unit that still lives, in order."""
        for reference in self._units.values():
            unit = reference()
            if unit is not None:
                yield unit

    def __deepcopy__(self, memo: dict[int, Any]) -> Flow:
        made = memo[id(self)] = Flow(self.prefetch, self.guard)
        made.settings = dict(self.settings)
        return made

    # ---- a forward ------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the whole model begins: nothing of an earlier one may be in the way."""
        if in_backward():
            return
        if self.after is not None:
            self.after.wait()
            self.after = None
        self.recover()
        self._orders["forward"].begin()

    def enter_forward(self) -> None:
        """A unit's own forward begins; if a backward never ended, it failed."""
        if self._in_backward:
            self.recover()

    def recover(self, *, absorbs: bool = True) -> None:
        """Drop what exceptions or forwards without backward left; gradients held back stay. With
        ``absorbs`` also take over what was done to sharded parameters."""
        failed = self._in_backward
        self._pending = None
        self._in_backward = False
        self._touched.clear()
        for unit in self.units():
            unit.recover(failed=failed)
            if absorbs:
                absorb(unit)

    def need(self, unit: Unit, direction: Direction) -> None:
        """Gather ``unit`` now, and let what will be needed next be on its way."""
        with outside_of_transforms():
            if unit.keeps_whole:  # nothing travels
                if not unit.is_present:
                    unit.start_gather()
                unit.finish_gather()
                return
            if unit.writes.is_changed:
                if direction == "backward":
                    raise unit.changed()
                unit.free()
            if not unit.is_present:
                self._start(unit, direction)
            for following in self._following(unit, direction):
                if not following.is_present and not following.keeps_whole:
                    self._start(following, direction)
            unit.finish_gather()

    def _following(self, unit: Unit, direction: Direction) -> list[Unit]:
        """The units that are to be on their way while ``unit`` computes."""
        if unit.ahead[direction] is not None:
            return [u for u in (reference() for reference in unit.ahead[direction]) if u]
        if not self.prefetch:
            return []
        numbers = self._orders[direction].visit(unit.number, self.prefetch)
        return [u for u in (self._units[number]() for number in numbers) if u]

    def _start(self, unit: Unit, direction: Direction) -> None:
        unit.start_gather()
        unit.comm.probe.did(Action("gather", unit.name, direction, direction))

    # ---- a backward -----------------------------------------------------------------------------

    def enter_backward(self, unit: Unit, accumulates: bool | None) -> None:
        """A backward reaches ``unit``: its whole parameters are there."""
        if accumulates is False:
            trains = (parameter for parameter in unit.sharded.all if parameter.requires_grad)
            if any(adds_to(parameter) is not False for parameter in trains):
                raise asked_for(unit.name)
        self._begin_backward()
        if unit.keeps_whole:
            if unit.writes.is_changed:
                raise unit.changed()
        elif unit.unshard_in_backward:
            self.need(unit, "backward")
        self._touch(unit, expect=bool(accumulates))

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._orders["backward"].begin()
            after_backward(self.end_backward)

    def arrive(self, unit: Unit) -> None:
        """A gradient comes to ``unit`` that none of its outputs announced: what was captured inside
        of its forward, or a parameter that was used outside of it."""
        self._begin_backward()
        self._touch(unit, expect=True)

    def _touch(self, unit: Unit, *, expect: bool) -> None:
        """Gradients are on their way to ``unit``, which is done with those of its last backward."""
        if self._pending is unit:
            self.collect()
        self._touched[unit.number] = unit
        if expect:
            unit.gradients.expect()

    def leave_backward(self, unit: Unit) -> None:
        """Every gradient of ``unit`` is there: free its parameters, and sum it over ranks."""
        if self._touched.pop(unit.number, None) is None:
            return
        did = unit.comm.probe.did
        for name in reversed(unit.module_names):
            did(Action("compute", name, "backward", "backward"))
        if unit.synchronise:
            self.collect()
        if unit.reshard_after_backward:
            unit.free()  # before the reduce, which takes memory of its own
            if not unit.keeps_whole:
                did(Action("free", unit.name, "reduce", "backward"))
        if not unit.gradients.expected:  # torch.autograd.grad, which asks for others
            return
        if not unit.synchronise:
            unit.gradients.keep()
            return
        unit.start_reduce()
        did(Action("reduce", unit.name, "reduce", "backward"))
        if self.prefetch:
            self._pending = unit
        else:
            unit.finish_reduce()

    def collect(self) -> None:
        """Finish the reduce that is under way."""
        unit, self._pending = self._pending, None
        if unit is not None:
            unit.finish_reduce()
            unit.comm.probe.did(Action("collect", unit.name, "reduce", "backward"))

    def end_backward(self) -> None:
        """Reduce what no input announced, in the order of need, and finish everything."""
        for unit in list(self._touched.values()):
            self.leave_backward(unit)
        self.collect()
        self._in_backward = False
        self._orders["forward"].begin()
        for unit in self.units():
            unit.settle()
            is_running = (
                unit.writes.watched is not None
            )  # torch.autograd.grad inside of its forward
            if unit.reshard_after_backward and not unit.driven_by_hand and not is_running:
                unit.free()  # kept after a forward, and no part of this backward
