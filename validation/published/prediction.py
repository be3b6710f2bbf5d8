"""A prediction for one published row, and a row that got one."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from shardwright.core.footprint import Verdict, verdict_of

UNCERTAINTY = 0.25
"""Share of a prediction by which it may be off and still be called a fit: the error that nine rows
of ten are to stay under."""


class Prediction(msgspec.Struct, frozen=True):
    """Bytes that a framework's counter would show, what they are made of by name, and what was
    taken for granted. ``platform`` is the device as the row names it, ``capacity`` its memory
    (None = unknown), and ``configuration`` what rows that measured the same run have in common
    (empty = alone)."""

    family: str
    platform: str
    predicted: int
    measured: int
    parts: dict[str, int]
    assumptions: tuple[str, ...] = ()
    capacity: int | None = None
    phase: str = ""
    parameters: int | None = None
    configuration: str = ""

    @property
    def error(self) -> float:
        """Signed, as a share of what was measured."""
        return self.predicted / self.measured - 1.0

    @property
    def verdict(self) -> Verdict:
        """Whether the row fits its device by the prediction, with room for its uncertainty."""
        most = math.ceil(self.predicted * (1 + UNCERTAINTY))
        return verdict_of(self.predicted, most, self.capacity)


class Row(msgspec.Struct, frozen=True):
    """A published row with its prediction."""

    source: str
    framework: str
    prediction: Prediction

    def document(self) -> dict[str, Any]:
        """The row as it is printed."""
        told = self.prediction
        return {
            "source": self.source,
            "framework": self.framework,
            "family": told.family,
            "platform": told.platform,
            "predicted_bytes": told.predicted,
            "measured_bytes": told.measured,
            "error": round(told.error, 6),
            "verdict": told.verdict,
            "capacity_bytes": told.capacity,
            "phase": told.phase,
            "parameters": told.parameters,
            "parts": told.parts,
            "assumptions": list(told.assumptions),
        }


class LeftOut(msgspec.Struct, frozen=True):
    """A published row without a prediction, and why."""

    source: str
    framework: str
    reason: str
