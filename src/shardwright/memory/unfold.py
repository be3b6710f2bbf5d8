"""A recording unfolded to its full depth: every piece in order, for every block that repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from shardwright.core.recording import Piece, RecordedUnit, Recording, Series


@dataclass(frozen=True, slots=True)
class Moment:
    """A piece where it happens: for ``unit`` by its own name, which is block ``block`` of a
    series; -1 outside of one."""

    piece: Piece
    unit: str
    block: int = -1


class Blocks:
    """Which recorded units belong to which blocks, and what they are called when unfolded."""

    def __init__(self, recording: Recording) -> None:
        self.series = recording.series
        self.units = recording.units
        self._home: dict[str, tuple[Series, int]] = {}
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
            extra = len(series.names) - len(series.recorded)
            block = recorded if recorded < series.period else recorded + extra
        else:
            block = moment.block + recorded - here[1]
        return self.renamed(unit, series, recorded, block)

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

    def is_middle(self, unit: str) -> bool:
        """Whether a recorded unit is of the blocks that stand for several."""
        home = self._home.get(unit)
        if home is None or len(home[0].names) == len(home[0].recorded):
            return False
        return home[0].period <= home[1] < 2 * home[0].period


def moments(recording: Recording, blocks: Blocks) -> Iterator[Moment]:
    """Every piece of a step, in order."""
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
            extra = len(series.names) - len(series.recorded)
            block = recorded if recorded < series.period else recorded + extra
            yield Moment(piece, blocks.renamed(piece.unit, series, recorded, block), block)


def _repeated(pieces: tuple[Piece, ...], blocks: Blocks) -> Iterator[Moment]:
    """Middle blocks, forward or backward, as often as it takes; those of several series take turns
    if they have as many rounds."""
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


def _rounds(blocks: Blocks, unit: str) -> int:
    """How often the middle block of a unit comes."""
    home = blocks.home(unit)
    assert home is not None
    extra = len(home[0].names) - len(home[0].recorded)
    return extra // home[0].period + 1
