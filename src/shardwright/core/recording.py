"""What a module takes and frees in one forward and backward, piece by piece, free of torch.

A recording is cut where units are entered and left: there a runtime gathers, frees and reduces.
Blocks that repeat are recorded three times, as the first, one between, and the last; the one
between stands for all that lie between.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.tensor import TensorSpec
from shardwright.core.timeline import Kind

Point = Literal[
    "begin", "enter", "leave", "finish", "loss", "backward", "enter_backward", "leave_backward"
]


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


class RecordedUnit(msgspec.Struct, frozen=True):
    """Parameters that are gathered together; ``series`` names the repeated blocks it is one of."""

    name: str
    tensors: tuple[TensorSpec, ...]
    series: str = ""


class Series(msgspec.Struct, frozen=True):
    """Blocks that repeat with a ``period``; ``names`` of all, ``recorded`` of those in the
    recording: three periods and what is over."""

    name: str
    names: tuple[str, ...]
    recorded: tuple[str, ...]
    period: int = 1

    def template(self, index: int) -> int:
        """Which recorded block stands for block ``index``."""
        extra = len(self.names) - len(self.recorded)
        if index < self.period or not extra:
            return index
        last = len(self.recorded) - 2 * self.period  # blocks after the middle ones
        if index >= len(self.names) - last:
            return index - extra
        return self.period + (index - self.period) % self.period


class Recording(msgspec.Struct, frozen=True):
    """The pieces in order, the units in the order of their forward, and what was there before.

    ``buffers`` and ``inputs`` are bytes, and ``result`` those that a stage sends on. ``frozen``
    names parameters without gradients, ``operators`` what ran; ``notes`` say what is not exact.
    """

    pieces: tuple[Piece, ...]
    units: tuple[RecordedUnit, ...]
    series: tuple[Series, ...] = ()
    buffers: int = 0
    inputs: int = 0
    result: int = 0
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
