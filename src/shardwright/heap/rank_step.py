"""One step of one rank: its passes in order, with what its runtime takes and frees around them."""

# Why one walk for three heaps: a ledger that only knows peaks, a tape of every event, and one
# that writes down what an allocator is asked for. The peak that a plan is refused by, the tensors
# that are shown for it and the bytes that are reserved around it must be those of the same step.
#
# What must stay true: the order of what comes and goes is the runtime's. Around every piece the
# machine acts first (a unit is gathered before its forward takes anything), then the piece runs,
# and gradients that stay get their unit's name after that, for the piece's own sums have counted
# them.
#
# Why repetitions are skipped: a step of 1,000 microbatches is soon steady. Passes are left out
# where heap and machine are in the state that they had, name by name; then what they did once
# they do again, and no peak can be missed. A heap that keeps events never skips, since each is
# asked for.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import msgspec

from shardwright.core.optimizers import OPTIMIZERS, Optimizer
from shardwright.core.recording import BlockNames, Moment, Point, Recording, Unfolded
from shardwright.core.schedule import Merged
from shardwright.core.slots import Slots
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import Kind, Phase, StorageChange
from shardwright.heap import route
from shardwright.heap.ledger import STAYING, GradientRule, Ledger, Scene, Summaries
from shardwright.heap.machine import Machine, Repetition, Sharding
from shardwright.heap.tape import PieceRequests, RequestTape, StepRequests, Tape
from shardwright.heap.traffic import Traffic
from shardwright.job.pipelining import Pass, PassKind, PassRun

Place = Literal["device", "host"]


class StateTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of state: an allocation of its own."""

    name: str
    bytes: int
    place: Place = "device"


def states(optimizer: Optimizer, tensor: TensorSpec) -> Iterator[StateTensor]:
    """Every tensor that is kept for ``tensor``, as the first step makes them."""
    optimizer = optimizer.of(tensor)
    for state in optimizer.kept:
        elements = state.elements(tensor)
        if elements is None:
            continue
        nbytes = elements * element_bytes(state.dtype or optimizer.value_dtype(tensor))
        # torch keeps a scalar such as Adam's step on the host unless its fused kernel reads it on
        # the device.
        waits = state.place == "kernel" and not optimizer.fused
        on_host = optimizer.offload or state.place == "host" or waits
        yield StateTensor(state.name, nbytes, "host" if on_host else "device")


def step_temporaries(
    optimizer: Optimizer, tensors: Iterable[TensorSpec], *, on_gpu: bool = False
) -> tuple[StorageChange, ...]:
    """What a step over ``tensors`` takes and frees, in order; all of it is freed in the end.

    ``tensors`` have their local shapes. Muon orthogonalizes whole matrices: give it the shapes of
    what a rank orthogonalizes.
    """
    if optimizer.offload:
        return ()
    parts: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        parts.setdefault(optimizer.of(tensor).name, []).append(tensor)
    changes: list[StorageChange] = []
    for its in parts.values():
        names = _Locals()
        part = replace(optimizer.of(its[0]), on_gpu=on_gpu)
        part.step(part, its, names)
        changes += names.closed()
    return tuple(changes)


class _Locals:
    """The local names of a step (``core.optimizers.Names``), and what they took and freed."""

    def __init__(self) -> None:
        self._changes: list[StorageChange] = []
        self._held: dict[str, list[StorageChange]] = {}
        self._made = 0

    def bind(self, name: str, *sizes: int) -> None:
        """Make tensors, then let the name hold them instead of what it held."""
        # In Python `a = f(a)` makes the new tensor while the name still holds the old one: both are
        # alive for a moment, which is often the peak of an optimizer's step.
        made = self._take(name, sizes)
        self.drop(name)
        self._held[name] = made

    def drop(self, name: str) -> None:
        """The name holds nothing any more."""
        self._free(self._held.pop(name, []))

    def move(self, name: str, to: str) -> None:
        """What ``name`` holds is held by ``to`` instead of what that held."""
        self.drop(to)
        self._held[to] = self._held.pop(name)

    def passing(self, name: str, size: int) -> None:
        """A tensor that an expression makes and no name holds."""
        self._free(self._take(name, (size,)))

    def closed(self) -> list[StorageChange]:
        """Every change, after all names have gone."""
        for name in list(self._held):
            self.drop(name)
        return self._changes

    def _take(self, name: str, sizes: Iterable[int]) -> list[StorageChange]:
        made = []
        for size in sizes:
            self._made += 1
            made.append(StorageChange(f"{name}.{self._made}", size))
        self._changes += made
        return made

    def _free(self, made: list[StorageChange]) -> None:
        self._changes += [each._replace(bytes=-each.bytes) for each in made]


# Moments of the exchange with tables, and the phase of what is recorded there.
EXCHANGES: dict[str, Phase] = {"lookup": "exchange_rows", "row_gradients": "reduce"}
EXCHANGES_AND_AFTER = (*EXCHANGES, "rows")
ENDING: tuple[PassKind, ...] = ("backward", "weight_backward")  # with them a microbatch goes
ONE_PASS = PassRun((Pass("forward", 0, 0), Pass("backward", 0, 0)))
# A runtime on a heap, with the tensors of every unit and the names of those that are not trained.
MakeMachine = Callable[[Ledger, dict[str, tuple[TensorSpec, ...]], frozenset[str]], Machine]


@dataclass
class Chunk:
    """A piece of the model on a rank: its recording, unfolded once. ``sent`` are bytes of the
    gradient that goes to the stage before: torch's schedules name it until the next backward;
    ``named`` those of a result that a step names until its backward is over."""

    recording: Recording
    sent: int = 0
    named: int = 0

    @cached_property
    def step(self) -> Unfolded:
        """It at its full depth."""
        return Unfolded(self.recording)

    @property
    def blocks(self) -> BlockNames:
        """Names of its repeated blocks."""
        return self.step.blocks

    @cached_property
    def units(self) -> dict[str, tuple[TensorSpec, ...]]:
        """Parameters of every unit."""
        return {name: unit.tensors for name, unit in self.step.units.items()}

    @property
    def forward(self) -> list[Moment]:
        """Up to the loss."""
        return self.step.forward

    @property
    def backward(self) -> list[Moment]:
        """From the loss on."""
        return self.step.backward

    @cached_property
    def slots(self) -> Slots:
        """Names for its storages."""
        return Slots(self.recording, self.blocks)

    @cached_property
    def asks(self) -> PieceRequests:
        """What its pieces ask an allocator for."""
        return PieceRequests(self.slots)

    @cached_property
    def summaries(self) -> dict[GradientRule, Summaries]:
        """Sums of its pieces, by what becomes of gradients."""
        rules: tuple[GradientRule, ...] = ("stays", "added")
        return {rule: Summaries(self.recording, rule) for rule in rules}


@dataclass
class RankStep:
    """What a rank does in a step: its passes in ``runs``. ``receives`` are bytes of buffers that a
    pipeline holds for what its neighbours send, for each microbatch that is in flight. ``merged``
    are units of several recorded ones, ``tables`` a rank's share of what modules of tables
    exchange, by path.
    ``resident`` is what is there between steps, by kind, where it is known better than by the
    recording."""

    chunks: Sequence[Chunk]
    runs: Sequence[PassRun] = (ONE_PASS,)
    optimizer: Optimizer = OPTIMIZERS["adam"]
    receives: int = 0
    merged: Merged = field(default_factory=Merged)
    tables: Mapping[str, Traffic] = field(default_factory=dict)
    resident: Mapping[Kind, int] | None = None

    @cached_property
    def units(self) -> dict[str, tuple[TensorSpec, ...]]:
        """Parameters of every unit, chunk after chunk."""
        found: dict[str, tuple[TensorSpec, ...]] = {}
        for chunk in self.chunks:
            for unit, tensors in chunk.units.items():
                name = self.merged.name(unit)
                found[name] = (*found.get(name, ()), *tensors)
        return found

    def run(self, heap: Ledger, make: MakeMachine) -> Machine:
        """A steady step on ``heap``; the machine that it was run with."""
        units = (unit for chunk in self.chunks for unit in chunk.step.units.values())
        frozen = frozenset(name for unit in units for name in unit.frozen)
        machine = make(heap, self.units, frozen)
        self._settle(heap, machine)
        ahead = [tables for tables in self.tables.values() if tables.ahead]
        inputs = sum(chunk.recording.inputs for chunk in self.chunks)
        # A steady step begins with the batch that the step before fetched ahead: its inputs and ids
        # are there already, and it fetches the next one itself.
        if ahead:  # came in the step before
            heap.take("inputs of before", "input", inputs)
            for tables in ahead:
                route.ask(heap, tables)
                route.advance(heap, tables)
        with heap.during("load"):
            heap.take("inputs", "input", 0 if ahead else inputs)
        # A chunk's gradients are complete after its last backward, which schedules put at different
        # places for different chunks: runtimes that reduce once do it there.
        last = {
            p.chunk: (number, place)
            for number, run in enumerate(self.runs)
            for place, p in enumerate(run.passes)
            if p.kind in ENDING
        }
        for number, run in enumerate(self.runs):
            self._repeat(heap, machine, run, [place for n, place in last.values() if n == number])
        with heap.during("backward"):
            for chunk in range(len(self.chunks)):
                heap.free(f"sent.{chunk}")
        heap.unit = ""
        with heap.during("step"):
            returned = [path for chunk in self.chunks for path in chunk.step.returned]
            # Tables are updated before the optimizer steps, as the runtime does it: what an update
            # takes for a moment is freed again before the optimizer takes its own.
            for path in filter(self.tables.__contains__, returned):
                if self.tables[path].late:
                    with heap.during("reduce"):
                        route.receive_gradients(heap, self.tables[path])
                route.update(heap, self.tables[path])
            on_gpu = machine.sharding.on_gpu
            for change in step_temporaries(self.optimizer, machine.updated(), on_gpu=on_gpu):
                if change.bytes > 0:
                    heap.take(f"step.{change.storage}", "temporary", change.bytes)
                else:
                    heap.free(f"step.{change.storage}")
            machine.zero_grad()
        heap.peaks.pop("setup", None)  # what is there before a step is no phase of it
        return machine

    def _repeat(self, heap: Ledger, machine: Machine, run: PassRun, last: Collection[int]) -> None:
        """Passes over and over; at the last repetition those at places in ``last`` are the last
        backwards of their chunks.

        Where a repetition leaves all as it was but for more or fewer bytes, those after it do the
        same, so that the first or the last of them has the highest peak: what lies between is
        skipped on a heap that keeps peaks alone.
        """
        done = 0
        while done < run.times:
            # The first repetition may take what stays from then on (accumulated gradients), and the
            # last one reduces. Both are run in any case, so only what lies between may be left out.
            left = run.times - done - 2  # between this one and the last
            before = Repetition(heap, machine) if left > 0 and not heap.keeps_events else None
            done += 1
            for place, each in enumerate(run.repeated(done - 1)):
                self._pass(heap, machine, each, done == run.times and place in last)
            if before is not None:
                done += before.skip(left)

    def _pass(self, heap: Ledger, machine: Machine, each: Pass, last: bool) -> None:
        forward, backward = self._entered[each.chunk]
        machine.begin(forward, backward, last)
        if each.kind == "forward":
            with heap.during("forward"):
                for path in self.chunks[each.chunk].step.lookups:
                    # Before anything of the forward runs, since the rows are to travel while the
                    # first layers compute.
                    if path in self.tables and self.tables[path].early:
                        self._look_up(heap, self.tables[path])
                self._walk(heap, machine, each, self.chunks[each.chunk].forward)
                self._look_ahead(heap)
        elif each.kind in ENDING:
            with heap.during("backward"):
                # A training loop names the model's output until the backward returns, so autograd
                # cannot free it with the graph: it stays beside everything the backward takes.
                with heap.passing("activation", self.chunks[each.chunk].named):
                    self._walk(heap, machine, each, self.chunks[each.chunk].backward)
                    machine.finish_backward()
                self._send(heap, each.chunk)

    def _send(self, heap: Ledger, chunk: int) -> None:
        """The gradient of the stream is on its way; that of the microbatch before is forgotten."""
        heap.free(f"sent.{chunk}")
        heap.take(f"sent.{chunk}", "communication", self.chunks[chunk].sent)

    def ledger(self, make: MakeMachine, *, fine: bool = False) -> Ledger:
        """The sums of a steady step; ``fine`` ones are of every phase of a run."""
        heap = Ledger(fine=fine)
        self.run(heap, make)
        return heap

    def taped(self, make: MakeMachine) -> Tape:
        """A steady step with every event written down."""
        tape = Tape([chunk.slots for chunk in self.chunks])
        self.run(tape, make)
        return tape

    def asked(self, make: MakeMachine) -> StepRequests:
        """What an allocator is asked for before a steady step and in it."""
        heap = RequestTape([chunk.asks for chunk in self.chunks])
        self.run(heap, make)
        return heap.requests()

    def parameters(self, sharding: Sharding) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of parameters on this rank by module, with a star for the number of a block, and
        how many blocks a star stands for."""
        nbytes: dict[str, int] = {}
        counts: dict[str, int] = {}
        for chunk in self.chunks:
            for series in chunk.recording.series:
                prefix = f"{series.recorded[0].rpartition('.')[0]}."
                counts[prefix] = counts.get(prefix, 0) + len(series.names)
            for name, unit in chunk.blocks.unfolded():
                for tensor in unit.tensors:
                    size = sharding.parameter_bytes(self.merged.name(name), tensor)
                    parts = chunk.slots.folded(tensor.fqn).split(".")
                    for length in range(len(parts)):
                        path = ".".join(parts[:length])
                        nbytes[path] = nbytes.get(path, 0) + size
        return nbytes, counts

    def _settle(self, heap: Ledger, machine: Machine) -> None:
        """What is there before the step."""
        known = self.resident
        for kind, nbytes in (machine.resident() if known is None else known).items():
            heap.take(f"resident.{kind}", kind, nbytes)
        if known is None:
            self._settle_states(heap, machine)
        heap.take("buffers", "buffer", max((c.recording.buffers for c in self.chunks), default=0))
        heap.take("received", "communication", self.receives)

    def _settle_states(self, heap: Ledger, machine: Machine) -> None:
        here = not machine.sharding.on_gpu  # the host is the device
        kept = sum(
            state.bytes
            for tensor in machine.updated()
            for state in states(self.optimizer, tensor)
            if here or state.place == "device"
        )
        heap.take("states", "optimizer_state", kept + self.optimizer.shared_bytes)

    @cached_property
    def _entered(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Units as forwards and backwards of every chunk enter them."""
        return [self.merged.entered(chunk.step) for chunk in self.chunks]

    def _walk(self, heap: Ledger, machine: Machine, each: Pass, where: list[Moment]) -> None:
        chunk = self.chunks[each.chunk]
        rule = machine.rule()
        summaries = chunk.summaries[rule]
        acts: dict[Point, Callable[[str], None]] = {
            "enter": machine.enter,
            "leave": machine.leave,
            "enter_backward": machine.enter_backward,
            "leave_backward": machine.leave_backward,
            "finish": lambda unit: machine.finish(),
        }
        if where is chunk.backward:
            del acts["leave"]  # a unit that ran again for a backward stays until that is over
        for moment in where:
            heap.unit = moment.unit
            point = moment.piece.point
            act = acts.get(point)
            if act is not None:
                name = self.merged.at(point, moment.unit)
                if name is not None:
                    act(name)
            elif point in EXCHANGES_AND_AFTER and moment.unit in self.tables:
                self._exchange(heap, point, self.tables[moment.unit])
            summary = summaries.of(moment.piece)
            gradients = [
                (self.merged.name(chunk.blocks.beside(unit, moment)), dtype, nbytes)
                for (unit, dtype), nbytes in summary.gradients.items()
            ]
            # The machine hears of gradients before the piece runs: the first one may begin a unit's
            # backward, for which a reduce of the same unit that is still under way is waited for.
            # What stays of them gets its name after the piece, which counts their bytes.
            for name, dtype, nbytes in gradients:
                machine.arrive(name, dtype, nbytes)
            scene = Scene(moment.piece, moment.unit, moment.block, each.chunk, each.microbatch)
            if point in EXCHANGES:
                with heap.during(EXCHANGES[point]):
                    heap.run(summary, scene, rule)
            else:
                heap.run(summary, scene, rule)
            for name, _, nbytes in gradients:
                if nbytes:
                    heap.hold(f"{name}.unreduced", STAYING, nbytes)

    def _exchange(self, heap: Ledger, point: str, tables: Traffic) -> None:
        """What is between modules and tables when a forward or a backward gets there."""
        if point == "lookup" and tables.early:
            with heap.during("exchange_rows"):
                route.arrive(heap, tables)
        elif point == "lookup":
            self._look_up(heap, tables)
        elif point == "rows":
            with heap.during("exchange_rows"):
                route.assemble(heap, tables)
        else:
            if tables.ahead:
                with heap.during("exchange_ids"):
                    route.advance(heap, route.next_batch(tables))
            with heap.during("reduce"):
                route.return_gradients(heap, tables)
                route.reduce_replicas(heap, tables)
                route.forget_trip(heap, tables)

    def _look_ahead(self, heap: Ledger) -> None:
        """The next batch is loaded, and its ids go out."""
        ahead = [tables for tables in self.tables.values() if tables.ahead]
        if ahead:
            with heap.during("load"):
                inputs = sum(chunk.recording.inputs for chunk in self.chunks)
                heap.take("inputs of the next batch", "input", inputs)
        for tables in ahead:
            with heap.during("exchange_ids"):
                route.ask(heap, route.next_batch(tables))

    def _look_up(self, heap: Ledger, tables: Traffic) -> None:
        """Ids go out, or are under way, rows are looked up and sent."""
        if tables.asked:
            with heap.during("exchange_ids"):
                if tables.ahead:
                    route.hear(heap, tables)
                else:
                    route.exchange_ids(heap, tables)
        with heap.during("lookup"):
            route.look_up(heap, tables)
        if tables.asked:
            with heap.during("exchange_rows"):
                route.exchange_rows(heap, tables)
