"""Sizes of the cases that ranks time, and what they timed, as values."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from shardwright.core.cluster import Device
from shardwright.cost.network import Collective

FLOAT = 4
BUFFERS = tuple(2**k for k in (12, 14, 16, 18, 20, 22, 24, 25))  # 4 KiB to 32 MiB
OVERLAPPED: tuple[tuple[Collective, int], ...] = (  # buffers of a small layer and of a large one
    ("all_gather", 2**20),
    ("reduce_scatter", 2**20),
    ("all_gather", 2**23),
    ("reduce_scatter", 2**23),
)
PARTS = ("alone", "work", "both")
WIDTHS = (16, 64)  # elements of a row that is read


def collective_case(collective: Collective, nbytes: int) -> str:
    """The case of a collective over a full buffer."""
    return f"{collective} {nbytes}"


def overlap_case(collective: Collective, nbytes: int, part: str) -> str:
    """The case of a collective alone, of work that takes as long, or of both at once."""
    return f"overlap {collective} {nbytes} {part}"


def row_case(width: int) -> str:
    """The case of reading random rows."""
    return f"rows of {width}"


SCHEMA = "shardwright.samples/1"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one run in each round; one run does ``amount`` of work (bytes, FLOPs, ids ...).

    ``together``: the ranks work on one thing, which is done when the slowest is.
    """

    amount: float
    together: bool
    seconds: tuple[float, ...]


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's cases by name, and its machine: facts as text, memory in bytes by capacity."""

    schema: str
    rank: int
    world_size: int
    device: Device
    backend: str
    machine: dict[str, str]
    memory: dict[str, int]
    cases: dict[str, Case]


def samples_file(folder: Path, rank: int) -> Path:
    """What a rank timed."""
    return folder / f"rank-{rank}.samples.json"


class Times:
    """Seconds of every case of all ranks: the median over the rounds, and round by round.

    A round's seconds are the slowest rank's where ranks work together, else the ranks' mean.
    """

    def __init__(self, ranks: Sequence[Samples]) -> None:
        self.amounts = {name: case.amount for name, case in ranks[0].cases.items()}
        self._rounds: dict[str, list[float]] = {}
        for name, case in ranks[0].cases.items():
            rounds = zip(*(rank.cases[name].seconds for rank in ranks), strict=True)
            merge = max if case.together else statistics.fmean
            self._rounds[name] = [merge(values) for values in rounds]

    def medians(self) -> dict[str, float]:
        """Every case's median over its rounds."""
        return {name: statistics.median(values) for name, values in self._rounds.items()}

    def rounds(self, names: Iterable[str]) -> Iterator[dict[str, float]]:
        """Seconds of the cases ``names`` in each round that all of them have."""
        chosen = {name: self._rounds[name] for name in names}
        for values in zip(*chosen.values(), strict=False):
            yield dict(zip(chosen, values, strict=True))


def spread(values: Sequence[float], value: float) -> float:
    """Half of the distance between the quartiles of ``values``, as a share of ``value``."""
    if len(values) < 2 or not value:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / abs(value)
