"""Our own runtime on a symbolic heap: the actions of :mod:`shardwright.core.schedule`.

A flat unit is cut evenly and gathered straight into place; one whose parameters are cut each by
itself arrives in a stage and is put together from there. Gradients stay where autograd leaves them
until their unit's backward is over; then they are copied to where each rank's share lies together,
and summed over ranks into the share that the optimizer reads.
"""

# Why the schedule is not written here: ``core.schedule.UnitFlow`` says what is gathered, freed
# and reduced when, to the runtime and to this heap alike. What is here is what each action
# allocates, and in which order within it: in a reduce the buffer that is sent is there before the
# gradients that are copied into it go, and the sum is there before the buffer goes. The bytes are
# those of ``core.unit_bytes``, which ``runtime.units`` allocates; tests train and hold the two
# against each other to the byte, so a buffer that is added there is to be taken here.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.core.layout import Segment, UnitLayout, unit_layout
from shardwright.core.optimizer_states import ShardStretch
from shardwright.core.placement import Flat, Replicate, Shard
from shardwright.core.schedule import Action, Direction, Modes, PlannedFlow
from shardwright.core.tensor import TensorSpec
from shardwright.core.timeline import Kind
from shardwright.core.unit_bytes import SegmentBytes, UnitBytes
from shardwright.heap.ledger import STAYING
from shardwright.heap.machine import Machine


@dataclass(slots=True)
class FlatUnits(Machine):
    """Units of our runtime on a rank, driven by the schedule that it follows."""

    sizes: dict[str, UnitBytes] = field(default_factory=dict)  # given as far as they are known
    flows: dict[Sequence[str], PlannedFlow] = field(default_factory=dict)
    flow: PlannedFlow = field(init=False)
    last: bool = True
    # Bytes of gradients that no reduce has taken, by unit and dtype; segments that are reduced
    # though none of their gradients is there; and what goes to host memory.
    come: dict[tuple[str, str], int] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    landing: list[LandedMean] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = {
            name: self.sizes.get(name) or self._bytes(name, its) for name, its in self.units.items()
        }

    def _bytes(self, name: str, tensors: Sequence[TensorSpec]) -> UnitBytes:
        sharding = self.sharding
        whole, kept = name in sharding.replicated, sharding.kept_of(name)
        copied = sharding.copied(tensors, on_host=sharding.on_host(name))
        layout = unit_layout(
            tensors,
            Replicate() if whole else Flat() if sharding.flat else Shard(0),
            sharding.shards_of(name) * kept,
            self.frozen,
            zero=sharding.zero,
            kept=kept,
            cast=copied,
            block=sharding.block,
        )
        return UnitBytes.of(layout, sharding, copied)

    def state(self) -> object:
        """What the flow of every chunk has under way, and whose gradients are there."""
        flows = {units: flow.state() for units, flow in self.flows.items()}
        return flows, dict(self.come), frozenset(self.absent)

    def resident(self) -> dict[Kind, int]:
        """The parameters' shares; of units that stay what they compute with."""
        here = [its.layout for name, its in self.sizes.items() if not self.sharding.away(name)]
        found: dict[Kind, int] = {"weight": sum(layout.stored_bytes for layout in here)}
        staying = sum(its.room for name, its in self.sizes.items() if self.sharding.stays(name))
        return found | {"gathered_weight": staying} if staying else found

    def updated(self) -> list[TensorSpec]:
        """One flat tensor per stretch of one dtype, for that is what the optimizer is given, on the
        rank that has most to keep of it; what is in another memory is updated there."""
        return [
            tensor
            for name, sizes in self.sizes.items()
            for index, segment in enumerate(sizes.layout.segments)
            if segment.trainable and not self.sharding.away(name)
            for tensor in _flat_tensors(f"{name}.{index}", segment, sizes.layout)
        ]

    def begin(self, forward: Sequence[str], backward: Sequence[str], last: bool) -> None:
        """Only the last microbatch's gradient is reduced, unless every one's is."""
        units = frozenset(forward)
        self.last = last or self.sharding.reduces == "each"
        # autograd keeps the first gradient that it makes as it is and adds every further one in
        # place: only where an earlier microbatch's is still there, nothing new stays.
        self.adding = any(self.heap.holds(f"{unit}.unreduced") for unit in units)
        # Each chunk of a pipeline has a flow of its own that remembers what is under way: its
        # passes come between those of others.
        if forward not in self.flows:
            sharded = frozenset(unit for unit in units if self._comes(unit))
            staying = frozenset(filter(self.sharding.stays, units))
            kept = self.sharding.kept if self.sharding.reshard_after_forward else units
            resharded = sharded - kept - staying
            modes = Modes(
                sharded, resharded, prefetch=self.sharding.prefetch, staying_units=staying
            )
            self.flows[forward] = PlannedFlow(forward, modes, backward)
        self.flow = self.flows[forward]

    def _comes(self, unit: str) -> bool:
        """Whether its whole parameters are filled to compute with them: by ranks that share them,
        or with a copy of a replica in another dtype. What stays and is never updated is there."""
        sizes = self.sizes[unit]
        if self.sharding.stays(unit) and not sizes.trained:
            return False
        return unit not in self.sharding.replicated or bool(sizes.room)

    # ---- forward -------------------------------------------------------------------------------

    def enter(self, unit: str) -> None:
        """Before a forward, which may be one that runs again for a backward."""
        # A checkpointed block runs its forward again in the backward: what it gathers then belongs
        # to the backward.
        direction: Direction = "backward" if self.flow.in_backward else "forward"
        self._run(self.flow.enter(unit, direction))
        self._arrive(unit)

    def leave(self, unit: str) -> None:
        """After a forward."""
        self._run(self.flow.leave(unit))

    def finish(self) -> None:
        """After the whole forward."""
        self.flow.begin()

    # ---- backward ------------------------------------------------------------------------------

    def enter_backward(self, unit: str) -> None:
        """Before a backward: gathered."""
        self.flow.begin_backward()
        self._run(self.flow.enter(unit, "backward"))
        self._arrive(unit)
        self._run(self.flow.touch(unit))

    def arrive(self, unit: str, dtype: str, nbytes: int) -> None:
        """A gradient comes, perhaps after the unit's backward."""
        self._run(self.flow.arrive(unit))
        self.come[unit, dtype] = self.come.get((unit, dtype), 0) + nbytes

    def leave_backward(self, unit: str) -> None:
        """After a backward."""
        if unit in self.flow.touched:
            self._run(self.flow.reduce(unit, holds=not self.last))

    def finish_backward(self) -> None:
        """After the whole backward: units whose inputs have no gradient follow now."""
        # autograd calls no hook for a unit of which no input needs a gradient (the first one that
        # sees only data): what is left at the end is reduced now.
        for unit in list(self.flow.touched):
            self.leave_backward(unit)
        self._run(self.flow.collect())
        self._land()
        self._run(self.flow.finish())

    def zero_grad(self) -> None:
        """Gradients go."""
        for flow in self.flows.values():
            flow.update()
        for unit, sizes in self.sizes.items():
            for index, _ in enumerate(sizes.trained):
                self.heap.free(f"{unit}.{index}.gradient")

    # ---- actions -------------------------------------------------------------------------------

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            phase = "reduce" if action.phase == "reduce" else self.heap.phase
            with self.heap.during(phase):
                getattr(self, f"_{action.verb}")(action.target, action)
            # Without prefetch the runtime waits for the sum at once, so the buffer that was sent is
            # gone before anything else comes.
            if action.verb == "reduce" and not self.sharding.prefetch:
                with self.heap.during(phase):
                    self._collect(action.target, action)

    def _gather(self, unit: str, action: Action) -> None:
        """Take room for the whole unit and begin to fill it."""
        sizes = self.sizes[unit]
        if not self.sharding.stays(unit):
            self.heap.take(f"{unit}.full", "gathered_weight", sizes.room)
        self.heap.take(f"{unit}.stage", "all_gather", sizes.stage)
        with self.heap.passing("all_gather", sizes.parts):
            self.heap.take(f"{unit}.cast", "all_gather", sizes.cast)
        # One rank sends nothing to anybody: nothing reads the cast after the copy.
        if sizes.layout.world_size == 1:
            self.heap.free(f"{unit}.cast")

    def _arrive(self, unit: str) -> None:
        """The unit is there; what took it there goes."""
        self.heap.free(f"{unit}.cast")
        self.heap.free(f"{unit}.stage")

    def _free(self, unit: str, action: Action) -> None:
        """Free the whole unit."""
        self._arrive(unit)
        self.heap.free(f"{unit}.full")

    def _hold(self, unit: str, action: Action) -> None:
        """Hold a gradient back in the dtype of sums, or let autograd go on adding to it."""
        for index, way in enumerate(self.sizes[unit].trained):
            came = (unit, way.segment.dtype) in self.come
            if came and way.held and not self.heap.holds(f"{unit}.{index}.held"):
                self.heap.take(f"{unit}.{index}.held", STAYING, way.held)
            if way.held:
                self._let_go(unit, way)

    def _let_go(self, unit: str, way: SegmentBytes) -> None:
        """A segment's gradient as autograd left it goes; those of others stay."""
        # Gradients of a unit stand under one name, but segments of different dtypes are reduced one
        # after the other: those of the others are still where autograd left them.
        rest = self.heap.free(f"{unit}.unreduced") - self.come.pop((unit, way.segment.dtype), 0)
        if rest > 0:
            self.heap.take(f"{unit}.unreduced", STAYING, rest)

    def _reduce(self, unit: str, action: Action) -> None:
        """Begin to sum over ranks, segment by segment."""
        heap, parts = self.heap, self.sizes[unit].layout.world_size
        for index, way in enumerate(self.sizes[unit].trained):
            name, sent = f"{unit}.{index}", way.row * parts
            if heap.holds(f"{name}.held"):  # to which this backward's is added
                self._let_go(unit, way)
            elif (unit, way.segment.dtype) not in self.come:
                self.absent.add(name)  # a later call of its modules brings it
            # The order is the runtime's and decides the peak: the buffer to be sent is there before
            # the gradients that are copied into it go.
            heap.take(f"{name}.send", "reduce_scatter", sent)
            with heap.passing("temporary", way.note):
                pass
            if heap.holds(f"{name}.held"):
                heap.free(f"{name}.held")
            else:
                self._let_go(unit, way)
            heap.take(f"{name}.row", "gradient", way.row)
            if unit in self.sharding.replicated:  # summed where it lies
                heap.free(f"{name}.send")
            heap.take(f"{name}.kept", "communication", way.again)
            # gloo: an all-to-all, and a sum of what came
            sums_itself = not self.sharding.on_gpu and sent > max(way.row, way.again)
            heap.take(f"{name}.received", "communication", sent if sums_itself else 0)

    def _collect(self, unit: str, action: Action) -> None:
        """The sum is there: what took it there goes, its mean stays."""
        heap = self.heap
        for index, way in enumerate(self.sizes[unit].trained):
            name = f"{unit}.{index}"
            heap.free(f"{name}.received")
            with heap.passing("communication", 0 if self.sharding.on_gpu else way.again):
                pass
            heap.free(f"{name}.kept")
            heap.free(f"{name}.send")
            absent = name in self.absent
            self.absent.discard(name)
            if self.sharding.on_host(unit):
                if not self.sharding.away(unit):
                    # On the CPU the "host" is the device: the copy is memory here, and the gradient
                    # only after the backward.
                    landing = LandedMean(name, f"{name}.landing.{len(self.landing)}", absent)
                    self.landing.append(landing)
                    heap.take(landing.copy, "gradient", way.segment.share_bytes)
                with heap.passing("gradient", way.mean):
                    heap.free(f"{name}.row")
                continue
            # of an earlier microbatch or call, to which it is added
            if absent or heap.holds(f"{name}.gradient"):
                with heap.passing("gradient", way.mean):
                    heap.free(f"{name}.row")
                continue
            # The mean in another dtype is a new tensor beside the sum. In the same dtype the sum
            # itself, divided in place, is the gradient, and only its name changes.
            if way.mean:
                heap.take(f"{name}.gradient", "gradient", way.mean)
                heap.free(f"{name}.row")
            else:
                heap.free(f"{name}.row")
                heap.take(f"{name}.gradient", "gradient", way.row)

    def _land(self) -> None:
        """After a backward: means that went to host memory are the gradients there, or are added
        to those of an earlier microbatch."""
        for name, copy, absent in self.landing:
            landed = self.heap.free(copy)
            if not (absent or self.heap.holds(f"{name}.gradient")):
                self.heap.take(f"{name}.gradient", "gradient", landed)
        self.landing.clear()


class LandedMean(NamedTuple):
    """The ``copy`` of a mean gradient in host memory, of the segment ``name``; ``absent``: there is
    no gradient in it."""

    name: str
    copy: str
    absent: bool


def _flat_tensors(name: str, segment: Segment, layout: UnitLayout) -> Iterable[TensorSpec]:
    """What an optimizer is given of a segment."""
    if segment.block == 1:
        yield TensorSpec(name, (segment.share,), segment.dtype)
        return
    # An optimizer that quantizes blocks gets its share in two stretches, blocks and what is kept in
    # full. How they are cut differs from rank to rank; the fullest rank's are counted, but which of
    # them exist at all is the same on every rank.
    every = [segment.stretches(rank) for rank in segment.telling(layout.world_size)]
    own = segment.stretches(layout.trained.fullest())
    there = (segment.quantized > 0, segment.quantized < len(segment.slots))
    for place, lengths in enumerate(zip(*every, strict=True)):
        if there[place]:
            how = {"quantized": place == 0, "longest": max(lengths)}
            yield ShardStretch(name, (own[place],), segment.dtype, **how)
