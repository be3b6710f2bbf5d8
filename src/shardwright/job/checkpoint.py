"""When and where a run is saved: the ``[checkpoint]`` section of a job."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import msgspec

from shardwright.core.errors import InputError, expected

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_EVERY = re.compile(r"([1-9][0-9]{0,8}) (step|s|min|h)s?")
GRACE = 30.0  # seconds that torchrun gives its workers after a signal


class Every(NamedTuple):
    """So many steps or seconds between two checkpoints: one of the two is None."""

    steps: int | None
    seconds: float | None


def every(text: str | int, where: str = "checkpoint.every") -> Every:
    """``20 steps``, or 20, ``30 s``, ``10 min`` or ``2 h``; InputError for anything else."""
    if isinstance(text, int):
        return Every(text, None)
    found = _EVERY.fullmatch(text)
    if not found:
        wanted = "a time between checkpoints such as '20 steps', '30 s', '10 min' or '2 h'"
        raise InputError(expected(where, wanted, f"'{text}'"))
    count, unit = int(found[1]), found[2]
    return Every(count, None) if unit == "step" else Every(None, count * _UNITS[unit])


class CheckpointSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run with this section is saved ``every`` so many steps or minutes, at its end, and where a
    signal ends it.

    ``folder`` is in the run folder by default. With ``overlap`` ranks train on while files are
    written, from a copy in host memory. ``grace`` are the seconds a run has to save and end after a
    signal; ``restarts`` is how often ``train`` goes on by itself after a failure.
    """

    every: str | Annotated[int, msgspec.Meta(ge=1, le=10**9)] = "10 min"
    keep: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 2
    folder: str = ""
    overlap: bool = True
    grace: Annotated[float, msgspec.Meta(gt=0, le=GRACE)] = GRACE
    restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
