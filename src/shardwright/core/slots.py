"""Names for the storages that the pieces of a recording touch, in whichever block."""

# A block that is recorded once stands for many, and what one block takes the next may free
# (residual streams, gradients of outputs). So a storage cannot be known by its number in the
# recording. It is known by who takes it: the piece, which of its takes it is, and the block,
# counted from the block in which it is touched. Two storages under one name would be freed twice
# and the heap go below zero.

from __future__ import annotations

from collections.abc import Hashable, Iterator

from shardwright.core.recording import BlockNames, Moment, Piece, Recording, Touch

MOST_BLOCKS = 2**20  # numbers from one kind of storage to the next


class Slots:
    """Names for storages: the same one has one name wherever it is taken and freed, in whichever
    block that stands for others. Who takes a slot: the piece, and which of its takes it is."""

    def __init__(self, recording: Recording, blocks: BlockNames) -> None:
        self.blocks = blocks
        # By the order of takes inside of a piece and not by size or name: two tensors of one layer
        # may agree in both.
        self._taken: dict[int, tuple[str, str, int, int]] = {}
        visits: dict[tuple[str, str], int] = {}  # a unit that runs again in a backward comes twice
        self._folded: dict[str, str] = {}
        self._firsts: dict[tuple[Hashable, ...], int] = {}
        self._touched: dict[int, list[tuple[int, int, Touch, str]]] = {}
        for piece in recording.pieces:
            takes = 0
            visit = visits[piece.unit, piece.point] = visits.get((piece.unit, piece.point), 0) + 1
            for touch in piece.touches:
                if touch.what == "take":
                    self._taken.setdefault(touch.slot, (piece.unit, piece.point, visit, takes))
                    takes += 1

    def touched(self, piece: Piece) -> list[tuple[int, int, Touch, str]]:
        """Every touch of a piece, with what the number of its storage is in block 0, how much more
        it is in each further one, and the folded path of the module that it is told of; worked out
        once, however often and in however many blocks it is run."""
        # By identity: pieces are structs of thousands of touches, whose hash would cost more than
        # the work that is saved. The recording outlives this object, so an id is not given to
        # another piece.
        found = self._touched.get(id(piece))
        if found is None:
            found = self._touched[id(piece)] = [
                (
                    *self._number(touch.slot, piece),
                    touch,
                    self.folded(touch.name if touch.what == "gradient" else touch.module),
                )
                for touch in piece.touches
            ]
        return found

    def _number(self, slot: int, piece: Piece) -> tuple[int, int]:
        """Of block 0, and how much more in each further one; storages of one kind, block after
        block, have numbers that follow one another."""
        kind, block, moves = self._place(slot, piece)
        first = self._firsts.setdefault(kind, len(self._firsts) * MOST_BLOCKS)
        return first + block, int(moves)

    def key(self, slot: int, moment: Moment) -> tuple[Hashable, ...]:
        """A slot where ``moment`` touches it."""
        kind, block, moves = self._place(slot, moment.piece)
        return (*kind, block + moment.block * moves)

    def _place(self, slot: int, piece: Piece) -> tuple[tuple[Hashable, ...], int, bool]:
        """Who takes a slot, whichever block it is, and its block, counted from that in which
        ``piece`` touches it where it ``moves`` with this."""
        unit, point, visit, place = self._taken[slot]
        home, here = self.blocks.home(unit), self.blocks.home(piece.unit)
        mine = (point, visit, place)
        if home is None:
            return (*mine, "", unit), 0, False
        series, recorded = home
        kind = (*mine, series.name, unit[len(series.recorded[recorded]) :])
        # Touched from a neighbour in the same series: the block is counted from there. Touched from
        # outside (the loss, another series): the one that the recorded block stands for last.
        distance = recorded - here[1] if here is not None and here[0] is series else None
        # No further than a neighbour: what lives on beyond the next block is of the block that the
        # recorded one stands for, and not of one that many blocks have between them.
        if distance is not None and abs(distance) <= series.period:
            return kind, distance, True
        return kind, series.block(recorded), False

    def units(self) -> Iterator[tuple[str, str]]:
        """Every unit by its own name, and the module that it is; the root's where it is several."""
        for name, unit in self.blocks.unfolded():
            whole = all(tensor.fqn.startswith(f"{unit.name}.") for tensor in unit.tensors)
            yield name, self.folded(unit.name) if whole else ""

    def folded(self, module: str) -> str:
        """A module's path with a star for the number of its block."""
        found = self._folded.get(module)
        if found is None:
            found = self._folded[module] = self._fold(module)
        return found

    def _fold(self, module: str) -> str:
        for series in self.blocks.series:
            for block in series.recorded:
                if module == block or module.startswith(f"{block}."):
                    return f"{block.rpartition('.')[0]}.*{module[len(block) :]}".lstrip(".")
        return module
