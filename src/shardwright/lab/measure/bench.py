"""Times cases side by side on all ranks: one run of each per round, round after round."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shardwright.lab.measure.samples import Case
from shardwright.runtime.comm import Comm

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
