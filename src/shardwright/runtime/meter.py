"""Measures what a plan predicts, in the plan's own event type.

Seconds are exclusive: a phase inside another stops the outer clock. Memory is followed by a
:class:`MemoryTracker` on chosen steps only, because following it slows a step.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from shardwright.core.amount import ceil_div
from shardwright.core.errors import InputError
from shardwright.core.measurement import Meeting
from shardwright.core.schedule import Action
from shardwright.core.timeline import PEAK, Event, Kind, Phase
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.flat_tensors import FlatPart
from shardwright.runtime.model_parts import tables_in
from shardwright.runtime.optimizer_state import per_block
from shardwright.runtime.probe import Probe
from shardwright.runtime.torch_private import following_backwards
from shardwright.runtime.units.dstorage import units_in
from shardwright.runtime.units.unit import Unit
from shardwright.tracker.memory import MemoryTracker
from shardwright.tracker.private import in_backward

MEMORY_STEPS = (3, 4, 5)  # by then the optimizer has its states
OUTSIDE = "outside"  # of all phases
STEADY = 1  # the step number of events that hold for every steady step


# What tables exchange, by the label of the collective: how plans name it, and in which phase.
_TRAVELS: dict[str, tuple[str, Phase]] = {
    "exchange counts": ("ids", "exchange_ids"),
    "exchange ids": ("ids", "exchange_ids"),
    "exchange more ids": ("ids", "exchange_ids"),
    "exchange rows": ("rows", "exchange_rows"),
    "exchange row gradients": ("row_gradients", "reduce"),
}


class Beside(NamedTuple):
    """Of exchanges of one name in a step: how long after its begin the first one was on its way,
    how long this rank computed on meanwhile, and how long it was held by them then."""

    start: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0


class Watcher(Protocol):
    """Who follows the phases and collectives of some steps one by one."""

    def passed(self, phase: str, since: float, until: float) -> None:
        """That part of a phase is over; seconds of ``time.perf_counter``."""
        ...

    def met(self, meeting: Meeting, phase: str) -> None:
        """A collective of a phase is done."""
        ...


class Meter(Probe):
    """A probe that keeps seconds by phase and step, peaks by phase, and the actions of a step.

    Inside of ``watching`` it finds the phases of a loop: a step loads until the model's forward
    begins, and what follows a backward is the optimizer's ``step``. ``begin`` and ``end`` enclose
    one. Memory is followed on ``MEMORY_STEPS``, seconds are those of the steps after them; in a
    shorter loop of those before them, the first apart. Of what tables exchange, seconds of what is
    named in ``beside`` are kept, for it travels while the rank computes.
    """

    def __init__(
        self,
        rank: int,
        listener: Callable[[Phase | None], None] | None = None,
        synchronise: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.listener = listener  # called at every phase and (with None) at every collective
        self.synchronise = synchronise  # waits for a device that computes on its own, before a look
        self.number = 0  # of the step that began last
        self.first = 0  # the last step of the run that this one goes on from
        self.actions: list[Action] = []
        self.exact: list[Event] = []  # of the first step whose memory was followed
        self.tracker: MemoryTracker | None = None
        self._around_tracker = ExitStack()
        # Of steps that are profiled, whose seconds do not count.
        self.watcher: Watcher | None = None
        self._inputs: list[weakref.ref[torch.Tensor]] = []
        self._stack: list[Phase] = []
        self._since = 0.0
        self._seconds: dict[Phase, float] = {}
        self._waited = 0.0
        self._busy: dict[int, float] = {}  # seconds of a step that were not waited
        self._steps: dict[int, dict[Phase, float]] = {}
        self.beside: frozenset[str] = frozenset()
        self._travelled: dict[str, Beside] = {}
        self._besides: dict[int, dict[str, Beside]] = {}
        self._slowed: set[int] = set()
        self._peaks: dict[Phase, dict[Kind, int]] = {}

    # ---- what the runtime says -------------------------------------------------------------------

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Clock, tracker and listener follow the phase."""
        self._enter(phase)
        try:
            yield
        finally:
            self._leave()
            if self.listener and self._stack:
                self.listener(self._stack[-1])

    def collective(self, label: str, nbytes: int) -> None:
        """Call the listener, so that a rank that hangs can be named."""
        if self.listener:
            self.listener(None)

    def met(self, meeting: Meeting) -> None:
        """Add to what the step has waited; on an accelerator nothing is known by that."""
        self._waited += meeting.ended - meeting.began
        name, _ = _TRAVELS.get(meeting.label, ("", None))
        if name in self.beside:
            hidden, exposed = meeting.began - meeting.arrived, meeting.ended - meeting.began
            before = self._travelled.get(name)
            start = meeting.arrived - self._began if before is None else before.start
            before = before or Beside()
            self._travelled[name] = Beside(start, before.hidden + hidden, before.exposed + exposed)
        if self.watcher is not None:
            self.watcher.met(meeting, self._stack[-1] if self._stack else OUTSIDE)

    def holds(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Let the tracker know."""
        if self.tracker is not None:
            self.tracker.adopt(tensor, kind)
        if kind == "input":
            self._inputs.append(weakref.ref(tensor))

    def did(self, action: Action) -> None:
        """Keep what was done since the step began."""
        self.actions.append(action)

    # ---- a loop and its steps --------------------------------------------------------------------

    @contextmanager
    def watching(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Find the phases of steps of ``model`` and ``optimizer`` inside."""
        self.model, self.optimizer = model, optimizer
        comm = comm_of(model)
        before, comm.probe = comm.probe, self
        with ExitStack() as around:
            around.callback(setattr, comm, "probe", before)
            # Also after an exception: a phase that is left on would count all that follows.
            around.callback(self.drop)
            for handle in (
                model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True),
                optimizer.register_step_pre_hook(self._before_step),
            ):
                around.callback(handle.remove)
            around.enter_context(following_backwards(self._turn))
            yield

    def begin(self) -> None:
        """The next step begins."""
        self.number += 1
        self.actions.clear()
        self._seconds, self._waited, self._travelled = {}, 0.0, {}
        # Counted from where this run began, for after a resume the optimizer has its states no
        # sooner.
        if self.number - self.first in MEMORY_STEPS:
            self.tracker = self._tracker()
        self._inputs = [reference for reference in self._inputs if reference() is not None]
        self._since = self._began = time.perf_counter()
        self._enter("load")

    def end(self) -> None:
        """The step is over."""
        self._leave()
        if self.watcher is not None:
            self._slowed.add(self.number)
        if self.tracker is None:
            self._steps[self.number] = self._seconds
            self._besides[self.number] = self._travelled
            self._busy[self.number] = sum(self._seconds.values()) - self._waited
            return
        for phase, kinds in self._end_tracker().peaks.items():
            # Of several steps the one with the largest sum, with all its kinds: maxima of each kind
            # would be a moment that never was.
            if phase != "setup" and sum(kinds.values()) > sum(self._peaks.get(phase, {}).values()):
                self._peaks[phase] = kinds

    def drop(self) -> None:
        """Forget the step that is under way, if there is one."""
        while self._stack:
            self._leave()
        if self.tracker is not None:
            self._end_tracker()

    def _turn(self, phase: Phase) -> None:
        """The loop goes on to ``phase``, if a step is under way."""
        if self._stack and self._stack[-1] != phase:
            self._leave()
            self._enter(phase)

    def _forward(self, _: nn.Module, arguments: Any, keywords: Any) -> None:
        if in_backward():  # computed again
            return
        for leaf in tree_iter((arguments, keywords)):
            if isinstance(leaf, torch.Tensor):
                self.holds(leaf, "input")
        self._turn("forward")

    def _before_step(self, *_: Any) -> None:
        # Once: steps are alike, and this walks through every tensor.
        if self.tracker is not None and not self.exact:
            self.exact = exact_events(self.rank, self.model, self.optimizer)

    # ---- memory and seconds ----------------------------------------------------------------------

    def _tracker(self) -> MemoryTracker:
        """One that knows what was there before."""
        tracker = MemoryTracker()
        for tensor, kind in _lasting(self.model, self.optimizer):
            tracker.adopt(tensor, kind)
        for reference in self._inputs:  # of the batch that was loaded in the step before
            if (loaded := reference()) is not None:
                tracker.adopt(loaded, "input")
        for unit in units_in(self.model):
            for handle in unit.gradients.follow(self._left):
                self._around_tracker.callback(handle.remove)
        tracker.__enter__()
        return tracker

    def _left(self, gradient: torch.Tensor) -> None:
        self.holds(gradient, "unreduced_gradient")

    def _end_tracker(self) -> MemoryTracker:
        tracker, self.tracker = self.tracker, None
        assert tracker is not None
        self._around_tracker.close()
        tracker.__exit__(None, None, None)
        return tracker

    def _enter(self, phase: Phase) -> None:
        self._look()
        self._stack.append(phase)
        if self.tracker is not None:
            self.tracker.begin(phase)
        if self.listener:
            self.listener(phase)

    def _leave(self) -> None:
        self._look()
        self._stack.pop()
        if self.tracker is not None:
            self.tracker.end()

    def _look(self) -> None:
        """Add what passed since the last look to the phase that is on."""
        # A kernel is only queued when its call returns. Without this its time would be that of
        # whichever phase waits for it.
        if self.synchronise:
            self.synchronise()
        now = time.perf_counter()
        if self._stack:
            current = self._stack[-1]
            self._seconds[current] = self._seconds.get(current, 0.0) + now - self._since
            if self.watcher is not None:
                self.watcher.passed(current, self._since, now)
        self._since = now

    # ---- what was measured -----------------------------------------------------------------------

    def forget_peaks(self) -> None:
        """Start the peaks anew."""
        self._peaks.clear()

    @property
    def memory_steps(self) -> tuple[int, ...]:
        """The steps on which memory was followed."""
        numbers = (self.first + n for n in MEMORY_STEPS)
        return tuple(number for number in numbers if number < self.number)

    @property
    def time_steps(self) -> tuple[int, ...]:
        """The steps whose seconds count: profiled ones where there are no others."""
        for slowed in (self._slowed, set[int]()):
            # After those whose memory was followed; in a shorter loop without the first step, which
            # warms up.
            for first in (MEMORY_STEPS[-1] + 1, 2, 1):
                found = [n for n in self._steps if n - self.first >= first and n not in slowed]
                if found:
                    return tuple(found)
        return ()

    @property
    def seconds_per_step(self) -> float:
        """The median of a step's seconds; 0 where none was taken."""
        seconds = [sum(self._steps[number].values()) for number in self.time_steps]
        return statistics.median(seconds) if seconds else 0.0

    @property
    def busy_seconds_per_step(self) -> float:
        """The median of what a step did not wait for other ranks; 0 where none was taken."""
        busy = [self._busy[number] for number in self.time_steps]
        return statistics.median(busy) if busy else 0.0

    def events(self) -> list[Event]:
        """Peaks by phase and kind, and median seconds by phase laid one after the other."""
        events = [
            Event(self.rank, STEADY, phase, kind, PEAK, size)
            for phase, kinds in self._peaks.items()
            for kind, size in sorted(kinds.items())
        ]
        start = 0.0
        steps = [self._steps[number] for number in self.time_steps]
        for phase in dict.fromkeys(phase for step in steps for phase in step):
            duration = statistics.median(step.get(phase, 0.0) for step in steps)
            events.append(Event(self.rank, STEADY, phase, "time", phase, 0, start, duration))
            start += duration
        return [*events, *self._beside_events()]

    def _beside_events(self) -> Iterator[Event]:
        """Medians of what exchanges took while this rank computed, and of what it was held."""
        steps = [self._besides[number] for number in self.time_steps]
        for name, phase in dict.fromkeys(_TRAVELS.values()):
            found = [step[name] for step in steps if name in step]
            if found:
                start, hidden, exposed = map(statistics.median, zip(*found, strict=True))
                place = (self.rank, STEADY, phase)
                yield Event(*place, "hidden", name, 0, start, hidden)
                yield Event(*place, "exposed", name, 0, start + hidden, exposed)


def comm_of(model: nn.Module) -> Comm:
    """The collectives of a sharded model."""
    found = next((unit.comm for unit in units_in(model)), None)
    found = found or next((tables.comm for tables in tables_in(model)), None)
    if found is None:
        remedy = "Measure what apply returned."
        raise InputError("model", "one that runs a plan", type(model).__name__, remedy)
    return found


def _lasting(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.Tensor, Kind]]:
    """What is there before a step, and what it is for."""
    for tables in tables_in(model):
        for store in tables.every_store:
            yield from store.lasting()
        for lookup in tables.ahead:
            yield from ((tensor, "communication") for tensor in lookup.under_way())
    for unit in units_in(model):
        yield from unit.lasting()
    for buffer in model.buffers():
        yield buffer, "buffer"
    for state in optimizer.state.values():
        yield from (
            (value, "optimizer_state") for value in state.values() if torch.is_tensor(value)
        )


def exact_events(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Event]:
    """Bytes of weights, gradients, states and padding, read off the tensors themselves.

    Call between a backward and the optimizer's step, when there are gradients to be counted.
    """
    events: list[Event] = []
    for tables in tables_in(model):
        events.extend(_table_events(rank, tables))
    for unit in units_in(model):
        events.extend(_unit_events(rank, unit, optimizer))
    return events


def _table_events(rank: int, tables: ShardedTables) -> Iterator[Event]:
    for store, held in tables.holdings():
        name = held.block.tensor
        for kind, size in store.kept(held).items():
            yield Event(rank, 0, "setup", kind, name, size)
        size = store.gradient_bytes * held.rows // len(store.weight)
        if size and store in tables.replicas.stores:
            yield Event(rank, STEADY, "reduce", "gradient", name, size)


def _unit_events(rank: int, unit: Unit, optimizer: torch.optim.Optimizer) -> Iterator[Event]:
    padding = unit.layout.paddings(stored=True)[unit.comm.rank]
    trained = unit.layout.trained.paddings(stored=False)[unit.comm.rank]
    buffer = unit.buffers.shard.nbytes
    yield Event(rank, 0, "setup", "weight", unit.name, buffer - padding)
    yield Event(rank, 0, "setup", "padding", f"{unit.name}.parameter", padding)
    gradient = state = extra = 0
    for part in unit.all_flat_parts:
        flat = part.flat.parameter
        size = part.length * flat.element_size()
        gradient += size if flat.grad is not None else 0
        kept, rest = _state_bytes(part, optimizer)
        state, extra = state + kept, extra + rest
    if gradient:
        yield Event(rank, STEADY, "reduce", "gradient", unit.name, gradient - trained)
        yield Event(rank, STEADY, "reduce", "padding", f"{unit.name}.gradient", trained)
    if state:
        yield Event(rank, STEADY, "step", "optimizer_state", unit.name, state - extra)
        yield Event(rank, STEADY, "step", "padding", f"{unit.name}.optimizer_state", extra)


def _state_bytes(part: FlatPart, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of state of a part, and those of them that belong to padding."""
    found = extra = 0
    blocks = per_block(optimizer)
    for name, value in optimizer.state.get(part.flat.parameter, {}).items():
        if not torch.is_tensor(value) or not value.dim():
            found += value.nbytes if torch.is_tensor(value) else 0
            continue
        block, item = blocks.get(name, 1), value.element_size()
        kept = ceil_div(part.length, block)
        own = sum(ceil_div(home.sizes.numel(), block) for home in part.homes)
        found, extra = found + kept * item, extra + (kept - own) * item
    return found, extra
