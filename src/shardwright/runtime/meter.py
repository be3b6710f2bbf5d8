"""Measures what a plan predicts, in the plan's own event type.

Seconds are exclusive: a phase inside another stops the outer clock. Memory is followed by a
:class:`MemoryTracker` on chosen steps only, because following it slows a step.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.core.schedule import Action
from shardwright.core.timeline import PEAK, Event, Kind, Phase
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.probe import Probe
from shardwright.runtime.units.dstorage import DStorage, storages_in
from shardwright.tracker.memory import MemoryTracker

LASTING: tuple[Kind, ...] = (
    "weight",
    "optimizer_state",
    "gathered_weight",
    "unreduced_gradient",
    "reduce_scatter",
    "communication",
    "buffer",
)
STEADY = 1  # the step number of events that hold for every steady step


class Meter(Probe):
    """A probe that keeps seconds by phase and step, peaks by phase, and the actions of a step."""

    def __init__(
        self,
        rank: int,
        listener: Callable[[Phase | None], None] | None = None,
        synchronise: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.listener = listener  # called at every phase and (with None) at every collective
        self.synchronise = synchronise  # waits for a device that computes on its own, before a look
        self.actions: list[Action] = []
        self.tracker: MemoryTracker | None = None
        self._kinds: list[tuple[weakref.ref[torch.Tensor], Kind]] = []
        self._stack: list[Phase] = []
        self._since = 0.0
        self._seconds: dict[Phase, float] = {}
        self._steps: list[dict[Phase, float]] = []
        self._peaks: dict[Phase, dict[Kind, int]] = {}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Clock, tracker and listener follow the phase."""
        self._turn()
        self._stack.append(phase)
        if self.listener:
            self.listener(phase)
        try:
            if self.tracker is None:
                yield
            else:
                with self.tracker.during(phase):
                    yield
        finally:
            self._turn()
            self._stack.pop()
            if self.listener and self._stack:
                self.listener(self._stack[-1])

    def collective(self, label: str, nbytes: int) -> None:
        """Call the listener, so that a rank that hangs can be named."""
        if self.listener:
            self.listener(None)

    def holds(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Remember long-lived storages and report them to the tracker."""
        if kind in LASTING:
            self._kinds.append((weakref.ref(tensor), kind))
        if self.tracker is not None:
            self.tracker.adopt(tensor, kind)

    def did(self, action: Action) -> None:
        """Keep what was done since the step began."""
        self.actions.append(action)

    @contextmanager
    def timed_step(self, *, keep: bool = True) -> Iterator[None]:
        """A step whose seconds count, if ``keep``."""
        self._begin()
        yield
        self._turn()
        if keep:
            self._steps.append(dict(self._seconds))

    @contextmanager
    def metered_step(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> Iterator[None]:
        """A step whose memory is followed; its seconds do not count."""
        self._begin()
        tracker = MemoryTracker()
        for reference, kind in self._kinds:
            tensor = reference()
            if tensor is not None:
                tracker.adopt(tensor, kind)
        for buffer in module.buffers():
            tracker.adopt(buffer, "buffer")
        for tensor in _optimizer_tensors(optimizer):
            tracker.adopt(tensor, "optimizer_state")
        self.tracker = tracker
        try:
            with tracker:
                yield
        finally:
            self.tracker = None
            tracker.close()
        for phase, kinds in tracker.peaks.items():
            if phase != "setup" and sum(kinds.values()) > sum(self._peaks.get(phase, {}).values()):
                self._peaks[phase] = kinds

    def _begin(self) -> None:
        self.actions.clear()
        self._seconds = {}
        self._since = time.perf_counter()

    def _turn(self) -> None:
        if self.synchronise:
            self.synchronise()
        now = time.perf_counter()
        if self._stack:
            current = self._stack[-1]
            self._seconds[current] = self._seconds.get(current, 0.0) + now - self._since
        self._since = now

    def forget_peaks(self) -> None:
        """Start the peaks anew."""
        self._peaks.clear()

    def events(self) -> list[Event]:
        """Peaks by phase and kind, and median seconds by phase laid one after the other."""
        events = [
            Event(self.rank, STEADY, phase, kind, PEAK, size)
            for phase, kinds in self._peaks.items()
            for kind, size in sorted(kinds.items())
        ]
        start = 0.0
        for phase in dict.fromkeys(phase for step in self._steps for phase in step):
            duration = statistics.median(step.get(phase, 0.0) for step in self._steps)
            events.append(Event(self.rank, STEADY, phase, "time", phase, 0, start, duration))
            start += duration
        return events


def exact_events(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Event]:
    """Bytes of weights, gradients, states and padding, read off the tensors themselves.

    Call between a backward and the optimizer's step, when there are gradients to be counted.
    """
    events: list[Event] = []
    for module in model.modules():
        if isinstance(module, ShardedTables):
            events.extend(_table_events(rank, module))
    for storage in storages_in(model):
        events.extend(_unit_events(rank, storage, optimizer))
    return events


def _table_events(rank: int, tables: ShardedTables) -> Iterator[Event]:
    for store, held in tables.holdings():
        name = held.block.tensor
        weight, state = store.block_view(held), store.state_view(held)
        yield Event(rank, 0, "setup", "weight", name, _bytes(weight))
        if state.numel():
            yield Event(rank, 0, "setup", "optimizer_state", name, _bytes(state))
        if store is tables.replicas:
            size = tables.replica_gradient_bytes * held.rows // len(store.weight)
            yield Event(rank, STEADY, "reduce", "gradient", name, size)


def _unit_events(rank: int, storage: DStorage, optimizer: torch.optim.Optimizer) -> Iterator[Event]:
    padding, trained = (
        layout.padding_bytes(storage.comm.rank)
        for layout in (storage.layout, storage.layout.trained)
    )
    buffer = storage.byte_storage.nbytes
    yield Event(rank, 0, "setup", "weight", storage.name, buffer - padding)
    yield Event(rank, 0, "setup", "padding", f"{storage.name}.parameter", padding)
    gradient = state = learnt = 0
    for taker in storage.all_takers:
        flat = taker.flat.parameter
        size = taker.run.length * flat.element_size()
        learnt += size if flat.requires_grad else 0
        gradient += size if flat.grad is not None else 0
        kept = optimizer.state.get(flat, {}).values()
        tensors = [t for t in kept if torch.is_tensor(t)]
        state += sum(size if t.numel() == flat.numel() else _bytes(t) for t in tensors)
    if gradient:
        yield Event(rank, STEADY, "reduce", "gradient", storage.name, gradient - trained)
        yield Event(rank, STEADY, "reduce", "padding", f"{storage.name}.gradient", trained)
    if state:
        extra = trained * (state // learnt) if learnt else 0
        yield Event(rank, STEADY, "step", "optimizer_state", storage.name, state - extra)
        yield Event(rank, STEADY, "step", "padding", f"{storage.name}.optimizer_state", extra)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))
