"""Sizes of the cases that ranks time side by side, and what they timed, as values."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from shardwright.core.cluster import Device
from shardwright.cost.network import Collective
from shardwright.runtime.comm import Comm

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


SAMPLE_SECONDS = 4e-3  # a run that is shorter is repeated, for clocks and barriers are coarse
MOST_REPEATS = 200
MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """Something to time: ``work`` does ``amount`` of it; ``together`` with the other ranks."""

    amount: float
    work: Callable[[], object]
    together: bool = False


class Bench:
    """All ranks make the same calls in the same order; ``tick`` is called before every sample."""

    def __init__(self, comm: Comm, synchronize: Callable[[], None], tick: Callable[[], None]):
        self.comm = comm
        self.cases: dict[str, Case] = {}
        self._synchronize = synchronize
        self._tick = tick

    def agreed(self, value: float) -> float:
        """The mean of all ranks' values; no rank goes on before every rank is here."""
        mean = torch.tensor([value], device=self.comm.mesh.device_type)
        if self.comm.size > 1:
            self.comm.all_reduce("calibrate", mean)
        return mean.item() / self.comm.size

    def measure(self, runs: Mapping[str, Run], seconds: float, least: int) -> None:
        """Time ``runs`` for about ``seconds``, in ``least`` rounds at least."""
        repeats = {name: self.repeats(run.work) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        began = time.perf_counter()
        for done in range(MOST_ROUNDS):
            if self.agreed(time.perf_counter() - began) > seconds and done >= least:
                break
            for name, run in runs.items():
                found[name].append(self._sample(run.work, repeats[name]))
        for name, run in runs.items():
            self.cases[name] = Case(run.amount, run.together, tuple(found[name]))

    def seconds(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes about, on every rank alike."""
        repeats = self.repeats(work)
        return self.agreed(statistics.median(self._sample(work, repeats) for _ in range(5)))

    def repeats(self, work: Callable[[], object]) -> int:
        """How often ``work`` is repeated in a sample, on every rank alike; it has run then."""
        self._sample(work, 1)
        once = self.agreed(self._sample(work, 1))
        return max(1, min(MOST_REPEATS, math.ceil(SAMPLE_SECONDS / max(once, 1e-9))))

    def _sample(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds of one run: the median where runs can be timed one by one, for a run that another
        process interrupts is the exception; else the mean of runs that follow one another."""
        self._tick()
        self.agreed(0.0)
        self._synchronize()
        ends = [time.perf_counter()]
        for _ in range(repeats):
            work()
            ends.append(time.perf_counter())
        if self.comm.mesh.device_type == "cpu":
            return statistics.median(b - a for a, b in itertools.pairwise(ends))
        self._synchronize()
        return (time.perf_counter() - ends[0]) / repeats
