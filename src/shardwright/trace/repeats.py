"""Stretches of layers that repeat: alike one after the other, or in a pattern of a few."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from shardwright.core.recording import Series

LONGEST_PERIOD = 8
FEW = 3  # periods that are recorded: the first, one between, the last


class Stretch(NamedTuple):
    """``length`` layers from ``start`` on, the same again after ``period``."""

    start: int
    length: int
    period: int

    @property
    def every(self) -> range:
        """All of its layers."""
        return range(self.start, self.start + self.length)

    @property
    def recorded(self) -> list[int]:
        """The layers that a recording needs: three periods, and what is over at the end."""
        return self.kept(FEW)

    def kept(self, periods: int) -> list[int]:
        """Its layers without as many periods in the middle as leave ``periods``."""
        few = periods * self.period + self.length % self.period
        if self.length <= few:
            return list(self.every)
        head = (periods - 1) * self.period
        return [*self.every[:head], *self.every[head - few :]]

    @property
    def left_out(self) -> int:
        """Periods that a recording does without."""
        return max(0, self.length // self.period - FEW)


def stretches(signatures: Sequence[Hashable]) -> list[Stretch]:
    """Cut layers into stretches that repeat, longest first where there is a choice."""
    found, start = [], 0
    while start < len(signatures):
        best = Stretch(start, 1, 1)
        for period in range(1, LONGEST_PERIOD + 1):
            end = start + period
            while end < len(signatures) and signatures[end] == signatures[end - period]:
                end += 1
            if end > len(signatures):
                break
            length = end - start
            if length > period and length - period > best.length - best.period:
                best = Stretch(start, length, period)
        found.append(best)
        start += best.length
    return found


def series_of(
    stretch: Stretch, names: Sequence[str], recorded: Sequence[str], title: str
) -> Series:
    """The series of a stretch of layers: all their ``names``, and those in a recording."""
    return Series(title, tuple(names), tuple(recorded), stretch.period)
