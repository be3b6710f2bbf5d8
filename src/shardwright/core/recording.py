"""What a module takes and frees in one forward and backward, piece by piece, free of torch.

A recording is cut where units are entered and left: there a runtime gathers, frees and reduces.
BlockNames that repeat are recorded three times, as the first, one between, and the last; the one
between stands for all that lie between. :func:`moments` unfolds it to every block.
"""

# A recording is made once and read by everything after it, so what it leaves out nobody sees. It
# has to be exact at the places where a runtime acts (units entered and left, gradients that
# arrive), and balanced: what is taken is freed or alive at the end, under one number. Blocks that
# repeat are recorded three times, for the first and the last differ from those between (what is
# alive before, which gradients are kept); the names of the others are made by exchanging the
# block's part of a path.

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import Kind
from shardwright.core.work import OperatorShapes, Work

Pooling = Literal["sum", "mean", "none"]
# Of a unit's forward and backward, of the whole module's, and of a module of tables, whose path is
# the piece's unit: rows are looked up (``lookup``) and put in place (``rows``), and their gradients
# go back (``row_gradients``).
Point = Literal[
    "begin",
    "enter",
    "leave",
    "lookup",
    "rows",
    "finish",
    "loss",
    "backward",
    "enter_backward",
    "leave_backward",
    "row_gradients",
]


# The bulk of a recording, and so of a plan: arrays without names, as blocks are. Fields may only be
# added at the end.
class Touch(msgspec.Struct, frozen=True, array_like=True):
    """A storage is taken, freed, or becomes the gradient of the parameter ``name``.

    ``slot`` numbers storages within a recording. ``name`` of a taken one is the operation that
    made it, ``module`` the path of the module that ran.
    """

    what: Literal["take", "free", "gradient"]
    slot: int
    nbytes: int
    kind: Kind = "activation"
    name: str = ""
    module: str = ""


class Piece(msgspec.Struct, frozen=True):
    """What happens from where ``unit`` gets to ``point`` until the next such moment."""

    point: Point
    unit: str
    touches: tuple[Touch, ...]
    work: Work = Work()
    operators: OperatorShapes | UnsetType = UNSET  # where any of them is told by its shape


class RecordedUnit(msgspec.Struct, frozen=True):
    """Parameters that are gathered together; ``series`` names the repeated blocks it is one of,
    ``modules`` are the paths of the modules it is entered and left with, ``frozen`` names tensors
    without gradients. ``checkpointing`` is the policy that they ran under, if they did, or those of
    them that are ``checkpointed``."""

    name: str
    tensors: tuple[TensorSpec, ...]
    series: str = ""
    modules: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    checkpointing: str | UnsetType = UNSET
    checkpointed: tuple[str, ...] | UnsetType = UNSET


class Series(msgspec.Struct, frozen=True):
    """Blocks that repeat with a ``period``; ``names`` of all, ``recorded`` of those in the
    recording: three periods and what is over."""

    name: str
    names: tuple[str, ...]
    recorded: tuple[str, ...]
    period: int = 1

    @property
    def extra(self) -> int:
        """Blocks that are not recorded: those between stand for them, too."""
        return len(self.names) - len(self.recorded)

    def template(self, index: int) -> int:
        """Which recorded block stands for block ``index``."""
        # What is before and behind the middle period was recorded block by block; only the middle
        # one stands for others.
        if index < self.period or not self.extra:
            return index
        last = len(self.recorded) - 2 * self.period  # blocks after the middle ones
        if index >= len(self.names) - last:
            return index - self.extra
        return self.period + (index - self.period) % self.period

    def block(self, recorded: int) -> int:
        """The block that a recorded one stands for; the last, where there are several."""
        # The last one, because a middle block is asked for from outside of its series: by what runs
        # behind it, which sees the last of those that it stands for.
        return recorded if recorded < self.period else recorded + self.extra


class Collected(msgspec.Struct, frozen=True):
    """What a table in a collection is looked up for: ``features`` with the ids of a bag on average,
    ``lengths``, in ``bags`` bags of each; its weight is ``weight`` of the collection."""

    weight: str
    features: tuple[str, ...]
    lengths: tuple[float, ...]
    bags: int
    pooling: Pooling = "sum"
    weighted: bool = False


class RecordedTable(msgspec.Struct, frozen=True):
    """A table of ``rows`` x ``dim`` whose rows are routed: the embedding at ``path``, or one of the
    collection there; a step looks ``ids`` of its rows up. Its weight is of ``dtype``."""

    path: str
    rows: int
    dim: int
    ids: int
    collected: Collected | UnsetType = UNSET
    dtype: str = "fp32"

    @property
    def fqn(self) -> str:
        """Its weight's name."""
        return f"{self.path}.{self.collected.weight if self.collected else 'weight'}"

    @property
    def name(self) -> str:
        """How a job calls it: the path of what has the weight."""
        return self.fqn.removesuffix(".weight")


class Recording(msgspec.Struct, frozen=True):
    """The pieces in order, the units in the order of their forward, and what was there before.

    ``buffers`` and ``inputs`` are bytes, and ``result`` those that a stage sends on. ``operators``
    are what ran; ``notes`` say what is not exact. ``tables`` are embeddings of the user's own that
    are routed; those of a DLRM stand in its job. ``early`` are the paths of those that are asked
    for what the module itself is given.
    """

    pieces: tuple[Piece, ...]
    units: tuple[RecordedUnit, ...]
    series: tuple[Series, ...] = ()
    buffers: int = 0
    inputs: int = 0
    result: int = 0
    notes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    tables: tuple[RecordedTable, ...] | UnsetType = UNSET
    early: tuple[str, ...] | UnsetType = UNSET


def without_shapes(recording: Recording) -> Recording:
    """A recording whose seconds follow from sums alone: every number in a plan is one that
    something in it follows from."""
    pieces = (msgspec.structs.replace(piece, operators=UNSET) for piece in recording.pieces)
    return msgspec.structs.replace(recording, pieces=tuple(pieces))


def check_recording(recording: Recording) -> None:
    """InputError where it speaks of a unit, a storage, a parameter or a dtype that there is not."""
    units = {unit.name for unit in recording.units}
    tensors = {tensor.fqn: tensor for unit in recording.units for tensor in unit.tensors}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        element_bytes(dtype)
    series = {"", *(series.name for series in recording.series)}
    blocks = {name for series in recording.series for name in series.names}
    for unit in recording.units:
        _one_of("recording: unit of series", unit.series, series)
    for name in (name for each in recording.series for name in each.recorded):
        _one_of("recording: block", name, blocks)
    reached = {piece.unit for piece in recording.pieces if piece.point == "lookup"}
    for path in (*(table.path for table in recording.tables or ()), *(recording.early or ())):
        _one_of("recording: table", path, reached)
    policies = {unit.checkpointing for unit in recording.units if unit.checkpointing}
    if len(policies) > 1:
        found = " and ".join(sorted(map(str, policies)))
        raise InputError("recording: checkpointing", "one policy", found)
    # Plans travel with their recording, and what `explain` recomputes rests on it: a recording that
    # was edited is refused here and not found out by a heap below zero.
    held: dict[int, int] = {}
    gradients: set[tuple[str, int]] = set()
    for place, piece in enumerate(recording.pieces):
        where = f"recording: piece {place}"
        if piece.point in OF_UNITS:
            _one_of(f"{where}: unit", piece.unit, units)
        for touch in piece.touches:
            if touch.what == "take":
                if touch.slot in held:
                    raise InputError(where, "a storage that is not there", f"storage {touch.slot}")
                held[touch.slot] = touch.nbytes
            elif held.get(touch.slot) != touch.nbytes or (touch.what, touch.slot) in gradients:
                wanted = f"a storage of {touch.nbytes} B that is there"
                raise InputError(where, wanted, f"storage {touch.slot}")
            if touch.what == "free":
                del held[touch.slot]
            elif touch.what == "gradient":
                gradients.add((touch.what, touch.slot))
                _one_of(f"{where}: gradient", touch.name, tensors)


def _one_of(where: str, name: str, known: Container[str]) -> None:
    if name not in known:
        raise InputError(where, "one that is recorded", f"'{name}'")


@dataclass(frozen=True, slots=True)
class Moment:
    """A piece where it happens: for ``unit`` by its own name, which is block ``block`` of a
    series; -1 outside of one."""

    piece: Piece
    unit: str
    block: int = -1


class BlockNames:
    """Which recorded units belong to which blocks, and what they are called when unfolded."""

    def __init__(self, recording: Recording) -> None:
        self.series = recording.series
        self.units = recording.units
        self.unit_of = {t.fqn: unit.name for unit in recording.units for t in unit.tensors}
        self._home: dict[str, tuple[Series, int]] = {}
        # Units and modules of tables inside of a block count to it too. By whole steps of a path:
        # "layers.1" must not take "layers.10".
        names = {piece.unit for piece in recording.pieces} | {u.name for u in recording.units}
        for series in recording.series:
            for index, block in enumerate(series.recorded):
                for name in names:
                    if name == block or name.startswith(f"{block}."):
                        self._home[name] = (series, index)

    def home(self, unit: str) -> tuple[Series, int] | None:
        """The series and the recorded block that a recorded unit belongs to."""
        return self._home.get(unit)

    def renamed(self, unit: str, series: Series, recorded: int, block: int) -> str:
        """A recorded unit's name in block ``block``."""
        return series.names[block] + unit[len(series.recorded[recorded]) :]

    def beside(self, unit: str, moment: Moment) -> str:
        """A recorded unit's own name, where ``moment`` happens."""
        home, here = self._home.get(unit), self._home.get(moment.piece.unit)
        if home is None:
            return unit
        series, recorded = home
        if here is None or here[0] is not series:
            block = series.block(recorded)
        else:
            # Counted from the block in which it happens, for what is touched may be of a neighbour.
            block = moment.block + recorded - here[1]
        return self.renamed(unit, series, recorded, block)

    def parameter(self, fqn: str, moment: Moment) -> str:
        """The parameter that a recorded one stands for, where ``moment`` happens."""
        unit = self.unit_of[fqn]
        home = self._home.get(unit)
        if home is None:
            return fqn
        old = home[0].recorded[home[1]]
        own = self.beside(unit, moment)
        return own[: len(own) - len(unit) + len(old)] + fqn[len(old) :]

    def unfolded(self) -> Iterator[tuple[str, RecordedUnit]]:
        """Every unit by its own name, beside the recorded one that stands for it."""
        done: set[str] = set()
        for unit in self.units:
            home = self._home.get(unit.name)
            if home is None:
                yield unit.name, unit
                continue
            series = home[0]
            if series.name in done:
                continue
            done.add(series.name)
            for block in range(len(series.names)):
                recorded = series.template(block)
                for each in self.units:
                    at = self._home.get(each.name)
                    if at is not None and at[0] is series and at[1] == recorded:
                        yield self.renamed(each.name, series, recorded, block), each

    def own(self, name: str, unit: RecordedUnit) -> RecordedUnit:
        """The unit called ``name`` that a recorded one stands for, its tensors by their names."""
        home = self._home.get(unit.name)
        if home is None or name == unit.name:
            return unit
        old = home[0].recorded[home[1]]
        new = name[: len(name) - len(unit.name) + len(old)]

        def renamed(path: str) -> str:
            return new + path[len(old) :]

        tensors = tuple(TensorSpec(renamed(t.fqn), t.shape, t.dtype) for t in unit.tensors)
        lists = (unit.modules, unit.frozen, unit.checkpointed or ())
        modules, frozen, parts = (tuple(map(renamed, names)) for names in lists)
        return RecordedUnit(
            name, tensors, unit.series, modules, frozen, unit.checkpointing, parts or UNSET
        )

    def is_middle(self, unit: str) -> bool:
        """Whether a recorded unit is of the blocks that stand for several."""
        home = self._home.get(unit)
        if home is None or not home[0].extra:
            return False
        return home[0].period <= home[1] < 2 * home[0].period


def moments(recording: Recording, blocks: BlockNames) -> Iterator[Moment]:
    """Every piece of a step, in order."""
    # Pieces of middle blocks have to stand together: one of no block among them would part them
    # into loops that run one after the other.
    for middle, pieces in groupby(recording.pieces, lambda piece: blocks.is_middle(piece.unit)):
        if middle:
            yield from _repeated(tuple(pieces), blocks)
            continue
        for piece in pieces:
            home = blocks.home(piece.unit)
            if home is None:
                yield Moment(piece, piece.unit)
                continue
            series, recorded = home
            block = series.block(recorded)
            yield Moment(piece, blocks.renamed(piece.unit, series, recorded, block), block)


def _repeated(pieces: tuple[Piece, ...], blocks: BlockNames) -> Iterator[Moment]:
    """Middle blocks, forward or backward, as often as it takes; those of several series take turns
    if they have as many rounds."""
    # Encoder and decoder may alternate, or follow one another: pieces of series with as many rounds
    # take turns round by round, those with different numbers are separate loops.
    for rounds, same in groupby(pieces, lambda piece: _rounds(blocks, piece.unit)):
        turn = tuple(same)
        backward = turn[0].point.endswith("backward")
        for index in reversed(range(rounds)) if backward else range(rounds):
            for piece in turn:
                home = blocks.home(piece.unit)
                assert home is not None
                series, recorded = home
                block = recorded + index * series.period
                yield Moment(piece, blocks.renamed(piece.unit, series, recorded, block), block)


def _rounds(blocks: BlockNames, unit: str) -> int:
    """How often the middle block of a unit comes."""
    home = blocks.home(unit)
    assert home is not None
    return home[0].extra // home[0].period + 1


class Unfolded:
    """A recording's step at its full depth, found once: every unit and every piece in order."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.blocks = BlockNames(recording)

    @cached_property
    def units(self) -> dict[str, RecordedUnit]:
        """Every unit by its own name, in the order in which their forwards begin; one that has none
        is of no series, for it cannot wait for the others."""
        found = {name: self.blocks.own(name, unit) for name, unit in self.blocks.unfolded()}
        entered = dict.fromkeys(m.unit for m in self.forward if m.piece.point == "enter")
        for name in found.keys() - entered:
            found[name] = msgspec.structs.replace(found[name], series="")
        return {name: found[name] for name in (*entered, *found) if name in found}

    @cached_property
    def _moments(self) -> tuple[list[Moment], list[Moment]]:
        forward: list[Moment] = []
        backward: list[Moment] = []
        for moment in moments(self.recording, self.blocks):
            # Once begun, all is backward: a block that is computed again has pieces with the points
            # of a forward in between.
            begun = bool(backward) or moment.piece.point == "backward"
            (backward if begun else forward).append(moment)
        return forward, backward

    @property
    def forward(self) -> list[Moment]:
        """Up to the loss."""
        return self._moments[0]

    @property
    def backward(self) -> list[Moment]:
        """From the loss on."""
        return self._moments[1]

    @cached_property
    def lookups(self) -> tuple[str, ...]:
        """Paths of the modules of tables, as a forward gets to them."""
        return self._reaching(self.forward, "lookup")

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The same, as the gradients of their rows go back: the order of their updates."""
        return self._reaching(self.backward, "row_gradients")

    def _reaching(self, moments: list[Moment], point: Point) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.unit for m in moments if m.piece.point == point))

    def arriving(self, moment: Moment) -> Iterator[str]:
        """The units whose gradients come in a piece, each at least once."""
        for touch in moment.piece.touches:
            if touch.what == "gradient":
                yield self.blocks.beside(self.blocks.unit_of[touch.name], moment)

    @cached_property
    def arrivals(self) -> list[tuple[str, ...]]:
        """The same by place of the backward, each once: every order of a step asks for them."""
        return [tuple(dict.fromkeys(self.arriving(moment))) for moment in self.backward]

    def tables_of(self, fqn: str) -> str:
        """The module of tables that has the table ``fqn``; empty where none has it."""
        return next((path for path in self.lookups if fqn.startswith(f"{path}.")), "")

    @cached_property
    def homes(self) -> dict[str, list[str]]:
        """The unit with parameters that is at work in every piece, by direction; empty for none."""
        homes, with_parameters = {}, {name for name, unit in self.units.items() if unit.tensors}
        for direction, pieces in (("forward", self.forward), ("backward", self.backward)):
            entering, leaving = _AROUND[direction]
            inside, found = [""], []
            for moment in pieces:
                if moment.piece.point == entering and moment.unit in with_parameters:
                    # A stack, since units nest: what runs between a unit's children is its own
                    # again. It is no strict stack, for one whose modules overlap with another's is
                    # left out of order.
                    if moment.unit not in inside:  # several of its modules enter it
                        inside.append(moment.unit)
                elif moment.piece.point == leaving and moment.unit in inside[1:]:
                    inside.remove(moment.unit)
                found.append(inside[-1])
            homes[direction] = found
        return homes


_AROUND = {"forward": ("enter", "leave"), "backward": ("enter_backward", "leave_backward")}
OF_UNITS = {point for points in _AROUND.values() for point in points}
