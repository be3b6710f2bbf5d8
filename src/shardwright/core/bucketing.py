"""A recorded step whose units are buckets: parameters as their gradients come, whatever modules
they are of."""

# Buckets follow the order in which gradients come, not modules, as DDP's do: a bucket is reduced
# when its last gradient is there, whatever is under way. The result is an ordinary recording whose
# units are buckets, so planner, heap and clock need to know nothing of it. That holds only because
# every storage keeps one number from the piece that takes it to the piece that frees it, across
# blocks that were recorded once (Slots): a step is unfolded here, since a bucket may span several
# blocks.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from shardwright.core.recording import (
    OF_UNITS,
    Moment,
    Piece,
    Point,
    RecordedUnit,
    Recording,
    Unfolded,
)
from shardwright.core.slots import Slots
from shardwright.core.tensor import TensorSpec
from shardwright.core.work import Work

ROOT_MODULE = ("",)  # buckets are entered and left with the whole model


def in_buckets(recording: Recording, size: int) -> Recording:
    """The same step at its full depth with buckets instead of units: parameters in the order in
    which their gradients come, ``size`` elements to a bucket or the parameter that reaches them.
    What gets no gradient is in the last one.

    A bucket is entered with the first unit that has parameters in it, a forward leaves all of them
    at its end, and pieces of the backward are cut where a bucket's last gradient is there.
    """
    return _Buckets(recording, size).recording()


def _filled(tensors: Iterable[TensorSpec], size: int) -> list[list[TensorSpec]]:
    found: list[list[TensorSpec]] = []
    room = 0
    for tensor in tensors:
        if room <= 0:
            found.append([])
            room = size
        found[-1].append(tensor)
        room -= tensor.numel
    return found


class _Buckets:
    """What is known of a step's buckets, by number."""

    def __init__(self, recording: Recording, size: int) -> None:
        self.recorded = recording
        self.step = Unfolded(recording)
        units = self.step.units.values()
        frozen = {name for unit in units for name in unit.frozen}
        self.tensors = {tensor.fqn: tensor for unit in units for tensor in unit.tensors}
        come = dict.fromkeys(
            self.step.blocks.parameter(touch.name, moment)
            for moment in self.step.backward
            for touch in moment.piece.touches
            if touch.what == "gradient"
        )
        arriving = [self.tensors[fqn] for fqn in come if fqn not in frozen]
        buckets = _filled(arriving, size)
        self.closing = {its[-1].fqn: number for number, its in enumerate(buckets)}
        rest = [t for fqn, t in self.tensors.items() if fqn not in come or fqn in frozen]
        if rest and not buckets:
            buckets.append([])
        if rest:
            buckets[-1].extend(rest)
        self.home = {t.fqn: number for number, its in enumerate(buckets) for t in its}
        self.units = [
            RecordedUnit(
                f"bucket-{number}",
                tuple(its),
                modules=ROOT_MODULE,
                frozen=tuple(t.fqn for t in its if t.fqn in frozen),
            )
            for number, its in enumerate(buckets)
        ]
        self._check_pointed()
        self._slots = Slots(recording, self.step.blocks)
        self._numbers: dict[object, int] = {}

    def _check_pointed(self) -> None:
        """Modules that run again in a backward go with the bucket of their first parameter."""
        for unit in self.step.units.values():
            if unit.checkpointing and unit.tensors:
                number = self.home[unit.tensors[0].fqn]
                its = self.units[number]
                self.units[number] = msgspec.structs.replace(
                    its,
                    checkpointing=unit.checkpointing,
                    checkpointed=(*(its.checkpointed or ()), *unit.modules),
                )

    def recording(self) -> Recording:
        """The step, unfolded and cut."""
        pieces, units = (*self._forward(), *self._backward()), tuple(self.units)
        return msgspec.structs.replace(self.recorded, pieces=pieces, units=units, series=())

    def _at(self, point: Point, numbers: Iterable[int]) -> Iterator[Piece]:
        """Buckets get to a point: of several those that a forward needs first."""
        for number in sorted(numbers, reverse=True):
            yield Piece(point, self.units[number].name, ())

    # A gather is asked for with the first unit that has a parameter in the bucket: nothing else
    # says when, for a bucket is no module. All are left at the end, since a later layer may share
    # one.
    def _forward(self) -> Iterator[Piece]:
        waiting = set(range(len(self.units)))
        for moment in self.step.forward:
            if moment.piece.point == "enter" and moment.unit in self.step.units:
                its = {self.home[t.fqn] for t in self.step.units[moment.unit].tensors}
                yield from self._at("enter", its & waiting)
                waiting -= its
            yield self._plain(moment)
        yield from self._at("enter", waiting)
        yield from self._at("leave", range(len(self.units)))

    def _backward(self) -> Iterator[Piece]:
        points = [moment.piece.point for moment in self.step.backward]
        first = points.index("enter_backward") if "enter_backward" in points else 1
        for place, moment in enumerate(self.step.backward):
            if place == first:
                yield from self._at("enter_backward", range(len(self.units)))
            yield from self._cut(self._plain(moment))

    def _plain(self, moment: Moment) -> Piece:
        """A piece by the names of its block, at a point of no unit."""
        piece = moment.piece
        touches = []
        for touch in piece.touches:
            slot = self._numbers.setdefault(self._slots.key(touch.slot, moment), len(self._numbers))
            changes = {"slot": slot, "module": self._slots.folded(touch.module)}
            if touch.what == "gradient":
                changes["name"] = self.step.blocks.parameter(touch.name, moment)
            touches.append(msgspec.structs.replace(touch, **changes))
        # Units are not entered any more, buckets are: the module's own point would gather twice.
        point: Point = "begin" if piece.point in OF_UNITS else piece.point
        return Piece(point, moment.unit, tuple(touches), piece.work, piece.operators)

    def _cut(self, piece: Piece) -> Iterator[Piece]:
        """A piece of a backward, cut where buckets are complete."""
        ends = [
            place
            for place, touch in enumerate(piece.touches)
            if touch.what == "gradient" and touch.name in self.closing
        ]
        marks = [0, *(end + 1 for end in ends), len(piece.touches)]
        point = piece.point
        for (begin, end), work in zip(pairwise(marks), _shared(piece.work, marks), strict=True):
            touches = piece.touches[begin:end]
            if touches or point != "begin":
                yield Piece(point, piece.unit, touches, work)
            point = "begin"
            if touches and end - 1 in ends:
                yield Piece("leave_backward", self.units[self.closing[touches[-1].name]].name, ())


def _shared(work: Work, marks: Sequence[int]) -> list[Work]:
    """Work of a piece for its parts between ``marks``, by how much each touches."""
    whole, numbers = max(marks[-1], 1), (work.calls, work.flops, work.moved)
    # Counted from the start and taken apart again, so that rounding loses no operator and no FLOP.
    until = [tuple(n * mark // whole for n in numbers) for mark in marks[:-1]]
    until.append(numbers)
    return [
        Work(*(after - before for before, after in zip(*pair, strict=True)))
        for pair in pairwise(until)
    ]
