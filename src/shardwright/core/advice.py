"""Which layout of a model on a cluster is fastest and fits: what was looked at and found."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import Shown
from shardwright.core.footprint import StepTime, Verdict
from shardwright.core.quantities import counted

SCHEMA = "shardwright.advice/1"


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a model is divided over ranks and its batch over time. ``zero`` is 0 where the runtime
    has no stages, ``micro_batch`` are samples of a data rank that run at once: 0 where all of them
    do, as in a plan; without ``checkpointing`` the model has nothing to checkpoint."""

    data_replicate: int = 1
    data_shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = ""
    chunks: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    micro_batch: int = 1
    checkpointing: str = "none"
    compile: bool = False

    @property
    def words(self) -> str:
        """What is not left at one, in a line."""
        return f"{self.ranks}, micro {self.micro_batch}, checkpointing {self.checkpointing}"

    @property
    def ranks(self) -> str:
        """What each rank has and how it runs, in a line."""
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        for name in ("tensor", "pipeline", "context", "expert"):
            if getattr(self, name) > 1:
                yield f"{name} {getattr(self, name)}"
        if self.pipeline > 1:
            yield self.schedule + (f" x{self.chunks}" if self.chunks > 1 else "")
        shard = f"shard {self.data_shard}"
        yield f"{shard} x {self.data_replicate}" if self.data_replicate > 1 else shard
        if self.zero:
            yield f"zero {self.zero}"
        if self.compile:
            yield "compiled"


class Advised(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout and what it comes to: its step, and the least and the most bytes that its fullest
    rank needs."""

    layout: Layout
    time: StepTime
    least_bytes: int
    most_bytes: int
    verdict: Verdict


class OfEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest of an engine's layouts that fits, if any does; of an engine that runs none what
    it ``lacks``."""

    engine: str
    layouts: int
    best: Advised | UnsetType = UNSET
    lacks: str = ""


class Priced(msgspec.Struct, frozen=True, array_like=True):
    """A point of the picture: seconds of a step, bytes that are needed at least, and how the layout
    was judged (empty where nobody asked)."""

    seconds: float
    nbytes: int
    verdict: Verdict | str


class Advice(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest layout that fits, first of ``rows``, with the next ones that do; ``faster`` are
    those that a step would take less time with, and that do not fit or only perhaps.

    ``space`` has the values of every axis, ``layouts`` is how many of their combinations there are;
    all were priced. ``bounded`` were refused by a bound of their memory, ``exact`` had theirs
    worked out, and ``unable`` are what the engine does not run. ``engines``, fastest first, are all
    that were asked where nobody named one and several answer; the first is this. ``proven``: every
    layout that is faster than the answer was refused. Samples of all ranks are the
    ``global_batch``, bytes of a device's ``capacity`` that stay free its ``headroom``.

    Of a job whose layouts are planned ``exact`` were, and the others cannot be faster; no plan of
    any that may fit takes less than ``lower_bound_seconds``, which is 0 where nothing is known;
    ``proven`` is then that the answer takes no longer.
    """

    model: str
    engine: str
    runtime: str
    world_size: int
    device: str
    capacity: int
    global_batch: int
    sequence: int
    dtype: str
    space: dict[str, tuple[str, ...]]
    layouts: int
    rows: tuple[Advised, ...]
    faster: tuple[Advised, ...]
    bounded: int
    exact: int
    unable: int
    proven: bool
    nearest: Advised | UnsetType = UNSET
    fewest_ranks: int | UnsetType = UNSET
    headroom: int = 0
    lower_bound_seconds: float | UnsetType = UNSET
    points: tuple[Priced, ...] = ()
    assumptions: tuple[str, ...] = ()
    engines: tuple[OfEngine, ...] = ()
    seconds: float = 0.0
    schema: str = SCHEMA

    def __repr__(self) -> str:
        found = self.answer.layout.words if self.answer else "no layout fits"
        return f"<Advice for {self.model} on {counted(self.world_size, 'rank')}: {found}>"

    @property
    def answer(self) -> Advised | None:
        """The fastest that fits."""
        return self.rows[0] if self.rows else None

    @property
    def fits(self) -> bool:
        """Whether any layout fits for sure."""
        return bool(self.rows)

    @property
    def planned(self) -> bool:
        """Whether seconds are those of plans."""
        return self.lower_bound_seconds is not UNSET

    @property
    def gap(self) -> float:
        """The share by which the answer is above the lower bound, where there are both."""
        if not self.lower_bound_seconds or self.answer is None:
            return 0.0
        return self.answer.time.seconds / self.lower_bound_seconds - 1

    def lack(self, row: Advised) -> int:
        """Bytes that a layout needs beyond what it may fill."""
        return row.most_bytes + self.headroom - self.capacity

    def days(self, tokens: float) -> float:
        """How long so many tokens take with the answer."""
        assert self.answer is not None
        return self.answer.time.days(tokens)
