"""Predicted beside measured: the result of joining two timelines."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "shardwright.comparison/1"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of both timelines; None where one side does not have it. Bytes or seconds."""

    rank: int
    phase: str
    kind: str
    name: str
    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float:
        """Measured minus predicted; a missing side counts as zero."""
        return (self.measured or 0) - (self.predicted or 0)

    @property
    def error(self) -> float | None:
        """The difference relative to the measurement; None where nothing was measured."""
        return self.difference / self.measured if self.measured else None


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``exact`` bytes must be equal, ``peaks`` (one per rank) within ``tolerance``.

    ``phase_peaks`` and ``seconds`` (per rank and phase) are shown with their error; seconds are
    gated only on a calibrated cluster. ``failures`` are the reasons why the comparison failed.
    """

    schema: Literal["shardwright.comparison/1"]
    plan_fingerprint: str
    tolerance: float
    exact: tuple[Line, ...]
    peaks: tuple[Line, ...]
    phase_peaks: tuple[Line, ...]
    seconds: tuple[Line, ...]
    failures: tuple[str, ...]
