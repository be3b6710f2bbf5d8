"""What a training step does, action by action.

:class:`UnitFlow` says what is done with units. The runtime does it for real, the memory model on a
symbolic heap; the cost model puts seconds on a whole step of it.
"""

# The order of a step is said once. Were it written in the runtime and again in the estimator,
# peaks and seconds would drift from what runs with the first change, and only a measurement would
# show it. So UnitFlow has no side effects: it answers with actions, and its three drivers do them.
# It also may not assume that passes repeat: modules are called several times, in changing order,
# or not at all, and a gather that was announced and never used has to be freed by the end of the
# step.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
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
    "ask",
    "lookup",
    "assemble",
    "reduce",
    "hold",
    "collect",
    "update",
]
Prefetch = Literal[0, 1]
Direction = Literal["forward", "backward"]


class Action(msgspec.Struct, frozen=True, array_like=True):
    """``verb`` on ``target`` (a unit, a module of tables, or what they exchange; empty where a rank
    computes in no unit), in the time of ``phase``; ``place`` is that of a piece among those of its
    direction."""

    verb: Verb
    target: str
    phase: Phase
    direction: Direction = "forward"
    place: int = -1


# Up to here the gradient of replicated tables rides along with the row gradients, once to every
# rank, which saves a collective; beyond, its bytes cost more than an all-reduce's latency.
RIDE_BYTES = 2**20


# Asked by the runtime and by what plans count of exchanges alike: if one of them had a rule of its
# own, ranks would send what the plan never counted.
def replicas_ride(routed: bool, world_size: int, replica_bytes: int) -> bool:
    """Whether the gradient of replicated tables travels in the exchange of row gradients."""
    return routed and 0 < replica_bytes * world_size <= RIDE_BYTES


BAGS_OF_ONE = 4096  # so many rows are read faster as bags, which a CPU fetches ahead
UPDATED_AT_ONCE = 2**19  # bytes of gradients, which stay in a core's cache until rows have them


def rows_at_once(width: int) -> int:
    """How many rows of fp32 an update makes gradients for at a time."""
    return max(UPDATED_AT_ONCE // (4 * width), 1)


class Modes(msgspec.Struct, frozen=True):
    """What a plan decided that changes the order of a step.

    ``routed`` are the modules of tables that exchange ids and rows, ``replicated_tables`` those
    with replicas; some are both. Lookups of ``early`` ones begin with the forward, and those of
    ``asked`` ones are asked for when the forward of the step before is over. ``merged`` are the
    units of several recorded ones: a name, and these as they follow one another.
    With ``prefetch`` 1 a unit is gathered while the one before it computes, and gradients are
    reduced while the next ones are computed. Of the sharded units, among which are replicas that
    are copied to be computed with, those that stay are whole between steps too, and are gathered
    again when they were updated.
    """

    sharded_units: frozenset[str]
    resharded_units: frozenset[str]
    routed: frozenset[str] = frozenset()
    replicated_tables: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    prefetch: Prefetch = 0
    merged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    staying_units: frozenset[str] = frozenset()


# A unit that is left with one of its modules must not be freed while the next module of the same
# unit is about to run: it would be gathered once per layer. So only the last member ends a forward
# and only the first one a backward, while any member may be the one that needs it gathered.
class Merged:
    """Units of several recorded ones. Each of them enters the whole, in forwards and backwards; the
    last one ends a forward, the first one a backward."""

    def __init__(self, merged: Iterable[tuple[str, tuple[str, ...]]] = ()) -> None:
        self.unit_of: dict[str, str] = {}
        self._ends: dict[Point, dict[str, str]] = {"leave": {}, "leave_backward": {}}
        for name, members in merged:
            self.unit_of.update(dict.fromkeys(members, name))
            self._ends["leave"][name] = members[-1]
            self._ends["leave_backward"][name] = members[0]

    def name(self, unit: str) -> str:
        """The unit that a recorded one belongs to."""
        return self.unit_of.get(unit, unit)

    def at(self, point: Point, unit: str) -> str | None:
        """The unit that gets to ``point`` with the recorded ``unit``; None if it takes another one
        of its members."""
        name = self.unit_of.get(unit)
        if name is None:
            return unit
        ends = self._ends.get(point)
        return name if ends is None or ends[name] == unit else None

    def entered(self, step: Unfolded) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Units as the forward and the backward of a step enter them, one of several modules with
        each of these."""
        forward, backward = (
            tuple(
                name
                for moment in moments
                if moment.piece.point in ("enter", "enter_backward")
                and (name := self.at(moment.piece.point, moment.unit)) is not None
            )
            for moments in (step.forward, step.backward)
        )
        return forward, backward


def training_step(step: Unfolded, modes: Modes) -> tuple[Action, ...]:
    """One steady step: load, forward through the recorded pieces that compute, backward, update.

    A sharded unit is gathered before its first forward, freed after its last one if it reshards,
    gathered again before its backward, and freed, unless it stays, and reduced right after. With
    prefetch the next sharded unit is gathered as well when one is entered, and a reduce only
    begins: it is collected before the next one begins, the last before the updates. Everything is
    updated at the end of the step, when all ranks know that every gradient is finite: tables first.
    """
    return tuple(_Walk(step, modes).actions())


class Order:
    """The units that passes of one direction ask for, in order: what is ``expected`` of this one,
    which is what the last one asked for, and what it has asked for so far."""

    __slots__ = ("expected", "seen")

    def __init__(self, expected: Iterable[str] = ()) -> None:
        self.expected = [unit for unit, _ in groupby(expected)]
        self.seen: list[str] = []

    def begin(self) -> None:
        """A new pass: the last one, if there was one, is what to expect."""
        if self.seen:
            self.expected, self.seen = self.seen, []

    def visit(self, unit: str, depth: int) -> list[str]:
        """A unit is needed; the next ``depth`` units, if all is as expected."""
        # Only a pass that goes exactly as the last one is looked ahead in: a gather for a unit that
        # does not come holds memory until the backward's end. One surprise, and nothing is expected
        # of this pass.
        position = len(self.seen)
        # Entered again at once, as with the next of its modules, it is one visit.
        if position and self.seen[-1] == unit:
            return []
        self.seen.append(unit)
        if position >= len(self.expected) or self.expected[position] != unit:
            self.expected = []
            return []
        return self.expected[position + 1 : position + 1 + depth]


class UnitFlow:
    """What is to be done with units as they are entered and left: the one place that says it.

    The runtime does it, the estimator does it on a symbolic heap, ``training_step`` writes it down.
    It knows what passes ask for, in which order, and what is under way. Which units there are, and
    what of them is there, is answered by whoever has them: :class:`PlannedFlow` by a plan, the
    runtime's flow by looking at its units. ``prefetch`` is how many are gathered ahead.
    """

    def __init__(self, prefetch: int, forward: Order, backward: Order) -> None:
        self.prefetch = prefetch
        self.orders: dict[Direction, Order] = {"forward": forward, "backward": backward}
        # A dict for its order: what is left at the end of a step is reduced in the order in which
        # backwards reached it, which is the same on every rank. A set's order is not, and
        # collectives would not match.
        self.touched: dict[str, None] = {}  # units whose backward is under way
        self.pending: str | None = None  # the unit whose reduce is under way
        self.in_backward = False

    # ---- who has the units answers ---------------------------------------------------------------

    def is_gathered(self, unit: str) -> bool:
        """Whether nothing has to travel: it is there, or on its way, or whole on every rank."""
        raise NotImplementedError

    def reshards(self, unit: str) -> bool:
        """Whether it goes after a forward that trains."""
        raise NotImplementedError

    def is_freed(self, unit: str) -> bool:
        """Whether a backward frees it."""
        raise NotImplementedError

    def left(self) -> Iterable[str]:
        """Units that are there after a backward and shall not stay."""
        raise NotImplementedError

    # ---- steps -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward begins, or the last one is over."""
        self.orders["forward"].begin()

    def enter(self, unit: str, direction: Direction, *, ahead: bool = True) -> list[Action]:
        """A unit is needed: gather it, and with prefetch those that are needed after it, unless
        someone chose others to be gathered ``ahead``."""
        after: Sequence[str] = ()
        if self.prefetch and ahead:
            after = self.orders[direction].visit(unit, self.prefetch)
        return [
            Action("gather", name, direction, direction)
            for name in (unit, *after)
            if not self.is_gathered(name)
        ]

    def leave(self, unit: str) -> list[Action]:
        """Free a unit after a forward that trains, if it reshards."""
        return [Action("free", unit, "forward")] if self.reshards(unit) else []

    def begin_backward(self) -> bool:
        """A backward reaches some unit; whether it is the first."""
        begins, self.in_backward = not self.in_backward, True
        if begins:
            self.orders["backward"].begin()
        return begins

    def touch(self, unit: str) -> list[Action]:
        """Gradients are on their way to a unit, which is done with those of its last backward."""
        # A unit has one sum under way at a time: what its last reduce brings has to be in the shard
        # before another gradient of the same unit comes.
        found = self.collect() if self.pending == unit else []
        self.touched[unit] = None
        return found

    def arrive(self, unit: str) -> list[Action]:
        """A gradient comes to a unit, which no output has announced since its last reduce."""
        return [] if unit in self.touched else self.touch(unit)

    def reduce(
        self, unit: str, *, frees: bool = True, sums: bool = True, holds: bool = False
    ) -> list[Action]:
        """A unit's backward is over: free it, and reduce its gradient, which with prefetch only
        begins, or hold it back for a later backward. ``sums`` tells whether there is one."""
        # The last reduce is collected before this one begins, so that at most one unreduced
        # gradient is alive besides the one that is made: the estimator counts two buffers, not all.
        self.touched.pop(unit, None)
        found = [] if holds else self.collect()
        # Freed before the reduce begins: the full weights are gone by the time that the reduced
        # shard is made, and the peak does not have both.
        if frees and self.is_freed(unit):
            found.append(Action("free", unit, "reduce", "backward"))
        if sums:
            found.append(Action("hold" if holds else "reduce", unit, "reduce", "backward"))
            if self.prefetch and not holds:
                self.pending = unit
        return found

    def collect(self) -> list[Action]:
        """Wait for the reduce that is under way."""
        unit, self.pending = self.pending, None
        return [] if unit is None else [Action("collect", unit, "reduce", "backward")]

    def finish(self) -> list[Action]:
        """A backward is over, and everything collected: free what is left, such as what was
        gathered ahead and not needed."""
        self.in_backward = False
        self.begin()
        return [Action("free", unit, "reduce", "backward") for unit in self.left()]

    def forget(self) -> None:
        """A backward failed, or none came: nothing is under way."""
        self.pending = None
        self.in_backward = False
        self.touched.clear()


class PlannedFlow(UnitFlow):
    """The flow of units that are in no memory: it remembers itself what was gathered and freed.

    ``forward`` and ``backward`` are the units in the order in which passes ask for them, backwards
    in turn where it is left out; a flow that begins without any learns them from pass to pass.
    """

    def __init__(
        self, forward: Iterable[str], modes: Modes, backward: Iterable[str] | None = None
    ) -> None:
        # Only what has to be gathered is expected. A unit that is whole on every rank is never
        # asked for, and would end every look ahead as a surprise.
        known = [unit for unit in forward if unit in modes.sharded_units]
        is_sharded = modes.sharded_units.__contains__
        turned = known[::-1] if backward is None else filter(is_sharded, backward)
        super().__init__(modes.prefetch, Order(known), Order(turned))
        self.modes = modes
        self.gathered: dict[str, None] = {}
        self.current: set[str] = set()  # units that stay and are as they were updated

    def is_gathered(self, unit: str) -> bool:
        return unit in self.gathered

    def reshards(self, unit: str) -> bool:
        return unit in self.modes.resharded_units

    def is_freed(self, unit: str) -> bool:
        """What has to be gathered is, unless it is whole between steps."""
        return unit in self.modes.sharded_units and not self._stays(unit)

    def left(self) -> Iterable[str]:
        """What was gathered and not freed."""
        return [unit for unit in self.gathered if not self._stays(unit)]

    def _stays(self, unit: str) -> bool:
        return unit in self.modes.staying_units

    def state(self) -> object:
        """What it does next follows from it; a value that later passes do not change."""
        orders = [(tuple(o.expected), tuple(o.seen)) for o in self.orders.values()]
        there = tuple(self.gathered), frozenset(self.current)
        return orders, there, tuple(self.touched), self.pending, self.in_backward

    def enter(self, unit: str, direction: Direction, *, ahead: bool = True) -> list[Action]:
        """A unit is needed; one that stays is asked for once after each update."""
        # One that stays is gathered once after each update. Asked for again it is there, and no
        # visit is counted: what is looked ahead for is only what may have to travel.
        if unit not in self.modes.sharded_units or unit in self.current:
            return []
        if self._stays(unit):
            self.current.add(unit)
        return self._done(super().enter(unit, direction, ahead=ahead))

    def leave(self, unit: str) -> list[Action]:
        return self._done(super().leave(unit))

    def reduce(
        self, unit: str, *, frees: bool = True, sums: bool = True, holds: bool = False
    ) -> list[Action]:
        return self._done(super().reduce(unit, frees=frees, sums=sums, holds=holds))

    def finish(self) -> list[Action]:
        return self._done(super().finish())

    def _done(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if action.verb == "gather":
                self.gathered[action.target] = None
            elif action.verb == "free":
                self.gathered.pop(action.target, None)
        return actions

    def update(self) -> None:
        """Shares were updated: what stays is out of date."""
        self.gathered.clear()
        self.current.clear()


class _Walk:
    """A step, piece by piece."""

    def __init__(self, step: Unfolded, modes: Modes) -> None:
        self.step = step
        self.modes = modes
        self.merged = Merged(modes.merged)
        self.units = dict.fromkeys(
            self.merged.name(u) for u, its in step.units.items() if its.tensors
        )
        forward, backward = self.merged.entered(step)
        self.flow = PlannedFlow(forward, modes, backward)

    def actions(self) -> Iterator[Action]:
        yield Action("load", "batch", "load")
        # Before any unit: their ids are in the batch, so they can travel while the first layers
        # compute.
        for tables in filter(self.modes.early.__contains__, self.step.lookups):
            yield from self._look_up(tables)
        for place, moment in enumerate(self.step.forward):
            yield from self._reach(moment.piece.point, moment.unit)
            if moment.piece.work.calls:
                yield self._compute(place, "forward")
        # Behind the forward: the ids of the next batch travel while the backward computes, and the
        # buffers that hold them are alive through it.
        for tables in filter(self.modes.asked.__contains__, self.step.lookups):
            yield Action("ask", tables, "exchange_ids")
        self.flow.begin_backward()
        for place, moment in enumerate(self.step.backward):
            yield from self._reach_backward(moment.piece.point, moment.unit)
            for unit in self.step.arrivals[place]:
                yield from self.flow.arrive(self.merged.name(unit))
            if moment.piece.work.calls:
                yield self._compute(place, "backward")
        # Units whose inputs need no gradient (the first one) are never left in the backward.
        for unit in list(self.flow.touched):
            yield from self.flow.reduce(unit)
        yield from self.flow.collect()
        # Tables before units, as a run has it: they are updated when all ranks know that the step
        # is finite, and the optimizer of the units steps after that.
        for tables in self.step.returned:
            yield Action("update", tables, "step", "backward")
        for unit in self.units:
            yield Action("update", unit, "step", "backward")

    def _compute(self, place: int, direction: Direction) -> Action:
        home = self.step.homes[direction][place]
        return Action("compute", self.merged.name(home), direction, direction, place)

    def _reach(self, point: Point, unit: str) -> Iterator[Action]:
        if point == "lookup":
            if unit not in self.modes.early:
                yield from self._look_up(unit)
        elif point == "rows":
            yield Action("assemble", unit, "exchange_rows")
        elif point in ("enter", "leave"):
            name = self.merged.at(point, unit)
            if name is None or name not in self.units:
                return
            if point == "enter":
                yield from self.flow.enter(name, "forward")
            else:
                yield from self.flow.leave(name)

    def _look_up(self, tables: str) -> Iterator[Action]:
        if tables in self.modes.routed:
            yield Action("exchange", "ids", "exchange_ids")
        yield Action("lookup", tables, "lookup")
        if tables in self.modes.routed:
            yield Action("exchange", "rows", "exchange_rows")

    def _reach_backward(self, point: Point, unit: str) -> Iterator[Action]:
        if point == "row_gradients":
            if unit in self.modes.routed:
                yield Action("exchange", "row_gradients", "reduce", "backward")
            if unit in self.modes.replicated_tables:
                yield Action("reduce", unit, "reduce", "backward")
        elif point in ("enter", "enter_backward", "leave_backward"):
            name = self.merged.at(point, unit)
            if name is None or name not in self.units:
                return
            if point != "leave_backward":
                yield from self.flow.enter(name, "backward")
            if point == "enter_backward":
                yield from self.flow.touch(name)
            elif point == "leave_backward" and name in self.flow.touched:
                yield from self.flow.reduce(name)
