"""What another second or byte costs on the ranks, and so what another option costs at least."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.space import Floats, ItemOption


class Hope(NamedTuple):
    """What all ranks cost ``least`` after an item has another option."""

    least: float
    way: tuple[int, int]


class Slopes(NamedTuple):
    """What another second costs on all ranks before one [ranks + 1], and another byte of each tier
    that is exceeded anywhere."""

    seconds: Floats
    storage: tuple[tuple[int, Floats], ...]

    def of(self, option: ItemOption) -> float:
        """What the only block of an option on all ranks costs at these slopes."""
        choice = option.choices[0]
        ends = [0, *itertools.accumulate(run.count for run in choice.option.runs)]
        found = option.everywhere * float(self.seconds[-1])
        steps = np.diff(self.seconds[ends]).tolist()
        for cost, step in zip(choice.costs, steps, strict=True):
            found += cost.total_seconds * step
        for tier, sums in self.storage:
            steps = np.diff(sums[ends]).tolist()
            for cost, step in zip(choice.costs, steps, strict=True):
                found += cost.storage[tier] * step
        return found


def summed(values: Floats) -> Floats:
    """The sums of all values before each place, and of all."""
    return np.concatenate([[0.0], values.cumsum()])
