"""What happens on a rank, predicted or measured: one event type for both, and the changes of its
storages that events add up; what people call the kinds of bytes.

Bytes are signed: positive when they come to life, negative when they are freed. Seconds are
floats from the beginning of a step. Predicted and measured timelines are compared by a join on
``(rank, phase, kind, name)``.
"""

# One type for what is predicted and what is measured, so that comparing is a join and no adapter
# can be wrong. Events are stored in runs over ranks: 2,048 ranks that do the same are one line of
# a plan. Peaks are events, too, by kind at the moment of the phase's peak, for peaks of kinds do
# not add.

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from shardwright.core.block import MAX_RUN
from shardwright.core.errors import InputError

Phase = Literal[
    "setup",
    "load",
    "exchange_ids",
    "lookup",
    "exchange_rows",
    "forward",
    "backward",
    "reduce",
    "step",
    "checkpoint",
]
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]

Kind = Literal[
    "weight",
    "gradient",
    "optimizer_state",
    "gathered_weight",
    "unreduced_gradient",
    "communication",
    "all_gather",
    "reduce_scatter",
    "activation",
    "temporary",
    "input",
    "output",
    "cache",
    "buffer",
    "padding",
    "time",
    "hidden",
    "exposed",
]
# Of exchanges beside compute, seconds that cost a step nothing, and those that it was held.
BESIDE: tuple[Kind, ...] = ("hidden", "exposed")
EXACT_KINDS: tuple[Kind, ...] = ("weight", "gradient", "optimizer_state", "padding")

MAX_EVENTS = 2**21  # of a timeline: a thousand on each of 2,048 ranks
PEAK = "peak"  # the name of an event with a kind's live bytes at a phase's peak


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened to one rank. ``step`` 0 is set-up, 1 the steady training step."""

    rank: int
    step: int
    phase: Phase
    kind: Kind
    name: str
    bytes: int = 0
    start: float = 0.0
    duration: float = 0.0


class StorageChange(NamedTuple):
    """Bytes of one ``storage`` come (above 0) or go (below 0): ``name`` says what they are,
    ``module`` what made them, the others where in a step that is."""

    storage: Hashable
    bytes: int
    kind: Kind = "temporary"
    name: str = ""
    module: str = ""
    phase: Phase = "setup"
    unit: str = ""
    microbatch: int = 0


class EventRun(msgspec.Struct, frozen=True, array_like=True):
    """The same event on ``count`` consecutive ranks from ``event.rank``."""

    event: Event
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RUN)] = 1


def check_runs(runs: Sequence[EventRun], world_size: int, where: str) -> None:
    """Raise InputError for ranks that there are not, and for more events than memory is for."""
    for run in runs:
        if run.event.rank + run.count > world_size:
            found = f"rank {run.event.rank + run.count - 1}"
            raise InputError(f"{where}: timeline", f"{world_size} ranks", found)
    total = sum(run.count for run in runs)
    if total > MAX_EVENTS:
        raise InputError(f"{where}: timeline", f"at most {MAX_EVENTS} events", str(total))


def encode(events: Iterable[Event]) -> tuple[EventRun, ...]:
    """Merge events that differ only in rank; ranks must be consecutive."""
    # Keyed by the whole event but its rank: what differs in a byte or a second is a line of its
    # own, so that decoding gives back what was encoded.
    order: dict[Event, list[int]] = {}
    for event in events:
        rankless = msgspec.structs.replace(event, rank=0)
        order.setdefault(rankless, []).append(event.rank)
    runs: list[EventRun] = []
    for rankless, ranks in order.items():
        for first, count in stretches(ranks):
            runs.append(EventRun(msgspec.structs.replace(rankless, rank=first), count))
    return tuple(runs)


def stretches(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranks that follow one another: the first of them, and how many."""
    if isinstance(ranks, range) and ranks.step == 1:
        yield ranks.start, len(ranks)
        return
    first, count = ranks[0], 1
    for rank in ranks[1:]:
        if rank == first + count:
            count += 1
        else:
            yield first, count
            first, count = rank, 1
    yield first, count


def decode(runs: Iterable[EventRun]) -> list[Event]:
    """Events rank by rank; within a rank in the order of the runs."""
    events = [
        msgspec.structs.replace(run.event, rank=run.event.rank + k)
        for run in runs
        for k in range(run.count)
    ]
    return sorted(events, key=lambda event: event.rank)


def exact_bytes(events: Iterable[Event]) -> dict[tuple[int, str, str, str], int]:
    """Bytes of weights, gradients, optimizer states and padding by (rank, phase, kind, name)."""
    totals: dict[tuple[int, str, str, str], int] = {}
    for e in events:
        if e.kind in EXACT_KINDS and e.name != PEAK:
            key = (e.rank, e.phase, e.kind, e.name)
            totals[key] = totals.get(key, 0) + e.bytes
    return totals


def phase_peaks(events: Iterable[Event]) -> dict[tuple[int, str], dict[str, int]]:
    """Live bytes by kind at the peak of each (rank, phase)."""
    peaks: dict[tuple[int, str], dict[str, int]] = {}
    for e in events:
        if e.name == PEAK:
            peaks.setdefault((e.rank, e.phase), {})[e.kind] = e.bytes
    return peaks


def phase_seconds(events: Iterable[Event]) -> dict[tuple[int, str], float]:
    """Seconds by (rank, phase)."""
    seconds: dict[tuple[int, str], float] = {}
    for e in events:
        if e.kind == "time":
            key = (e.rank, e.phase)
            seconds[key] = seconds.get(key, 0.0) + e.duration
    return seconds


def exchange_seconds(events: Iterable[Event]) -> dict[tuple[int, str, str, str], float]:
    """Seconds of exchanges beside compute, hidden and exposed, by (rank, phase, name, kind)."""
    return {(e.rank, e.phase, e.name, e.kind): e.duration for e in events if e.kind in BESIDE}


CATEGORIES: dict[str, str] = {
    "weight": "weights",
    "optimizer_state": "optimizer states",
    "gradient": "gradients",
    "buffer": "buffers",
    "input": "inputs",
    "cache": "caches",
    "padding": "padding",
    "activation": "activations",
    "gathered_weight": "gathered weights",
    "unreduced_gradient": "unreduced gradients",
    "all_gather": "all-gather buffers",
    "reduce_scatter": "reduce-scatter buffers",
    "communication": "exchange buffers",
    "output": "outputs",
    "temporary": "temporaries",
}
_PLACES = {kind: place for place, kind in enumerate(CATEGORIES)}


def category(kind: str) -> str:
    """A kind in words."""
    return CATEGORIES.get(kind, kind)


def in_order(kinds: Iterable[Kind]) -> list[Kind]:
    """Distinct kinds in the order of ``CATEGORIES``."""
    return sorted(set(kinds), key=lambda kind: (_PLACES.get(kind, len(_PLACES)), kind))
