"""Recordings of other batches of a module of the user's own, from two that were made.

A trace takes most of the time of an estimate. Where two batches left the same pieces, with numbers
between which those of a third lie on a line of whole numbers, the third is not traced. What an
answer rests on is traced all the same, and compared.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from shardwright.core.document import to_kind
from shardwright.core.recording import Recording
from shardwright.estimate.with_tables import Paths, Recorded
from shardwright.job.job import Job

Family = tuple[bytes, Paths | None]  # a job whatever its batch, and what of it is routed


class _UnevenError(Exception):
    """Two recordings do not say of a third what it is."""


class Scaled:
    """``record`` with fewer traces: ``made`` are those of each family by the size of the batch,
    ``drawn`` what was found without one, with its job."""

    def __init__(self, record: Recorded) -> None:
        self.record = record
        self.made: dict[Family, dict[int, Recording]] = {}
        self.drawn: dict[Family, dict[int, tuple[Job, Recording]]] = {}

    def __call__(self, job: Job, routed: Paths | None = ()) -> Recording:
        """The step of a job, as ``record`` gives it."""
        size = job.batch.size
        bare = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=1))
        family = msgspec.json.encode(bare), routed
        made, drawn = (known.setdefault(family, {}) for known in (self.made, self.drawn))
        if job.model.traits.is_function and size not in made and len(made) > 1:
            try:
                found = _drawn(made, size)
                drawn[size] = job, found
                return found
            except _UnevenError:
                pass
        if size not in made:
            made[size] = self.record(job, routed)
        return made[size]

    def agree(self, sizes: Collection[int]) -> bool:
        """Whether what was drawn for batches of these ``sizes`` is what a trace gives."""
        return all(
            self.record(job, routed) == found
            for (_, routed), its in self.drawn.items()
            for size, (job, found) in its.items()
            if size in sizes
        )


def _drawn(made: dict[int, Recording], size: int) -> Recording:
    """What lies on the line through the smallest and the largest batch."""
    near, far = min(made), max(made)
    ends = (msgspec.to_builtins(made[each]) for each in (near, far))
    found = _on_line(*ends, size - near, far - near)
    return to_kind(found, Recording)


def _on_line(near: Any, far: Any, part: int, whole: int) -> Any:
    """``near`` and ``part`` of ``whole`` of the way to ``far``, number by number."""
    if type(near) is not type(far):
        raise _UnevenError
    if isinstance(near, list | tuple) and len(near) == len(far):
        return [_on_line(*pair, part, whole) for pair in zip(near, far, strict=True)]
    if isinstance(near, dict) and near.keys() == far.keys():
        return {key: _on_line(near[key], far[key], part, whole) for key in near}
    if near == far:
        return near
    if type(near) is not int:
        raise _UnevenError
    way, rest = divmod((far - near) * part, whole)
    if rest or near + way < 0:
        raise _UnevenError
    return near + way
