"""The least work for every amount of memory, by dynamic programming over bins of HBM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.search.watch import Watch
from shardwright.torchrec.candidate import Candidate, Offer, Proposals

MAX_CELLS = 50_000_000  # tables times bins; six bytes are kept for each

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DynamicProgramming:
    """First the smallest options, then for each amount of HBM in bins the fastest choice.

    Fast is the sum over all shards, not the busiest rank. Proposals come from the most HBM to the
    least; there are ``bins_per_device`` bins for each rank.
    """

    bins_per_device: int = 100
    name: str = "dynamic_programming"

    def proposals(self, offer: Offer) -> Proposals:
        """The smallest options first."""
        tables = _by_hbm(offer)
        yield tuple(ways[0] for ways in tables)
        bins = self.bins_per_device * len(offer.capacities)
        if offer.hbm <= 0:
            return "there is no HBM to cut into bins"
        if bins * len(tables) > MAX_CELLS:
            return f"{len(tables):,} tables by {bins:,} bins, more than {MAX_CELLS:,} cells"
        layers = _solve(tables, bins, offer.hbm / bins, offer.watch)
        if len(layers) < len(tables):
            return "out of time"
        last = layers[-1]
        for bin_ in np.flatnonzero(last.chosen >= 0)[::-1].tolist():
            yield _read(tables, layers, bin_)
        return None


@dataclass(frozen=True, slots=True)
class _Layer:
    """For each bin of HBM that the tables so far may fill: the option of the last one of them,
    -1 if none leads there, and the bin of those before it."""

    chosen: NDArray[np.int16]
    before: NDArray[np.int32]


def _by_hbm(offer: Offer) -> list[list[Candidate]]:
    """Options by total HBM; tables by their smallest option."""
    tables: dict[int, list[Candidate]] = {}
    every = [(candidate, index) for index, ways in enumerate(offer.tables) for candidate in ways]
    for candidate, index in sorted(every, key=lambda entry: entry[0].storage[0]):
        tables.setdefault(index, []).append(candidate)
    return list(tables.values())


def _solve(tables: list[list[Candidate]], bins: int, size: float, watch: Watch) -> list[_Layer]:
    """A layer for each table; fewer if time runs out. Options may use less than all bins."""
    layers: list[_Layer] = []
    time_at, fill_at = np.zeros(1), np.zeros(1)  # before the first table: nothing used
    before = np.zeros(1, dtype=np.int32)
    for ways in tables:
        if watch.over():
            break
        best, fill = np.full(bins, np.inf), np.zeros(bins)
        layer = _Layer(np.full(bins, -1, dtype=np.int16), np.full(bins, -1, dtype=np.int32))
        for number, candidate in enumerate(ways):
            filled = fill_at + candidate.storage[0] / size
            usable = int(np.searchsorted(filled, bins))
            spent = time_at[:usable] + candidate.sum_ms
            _improve(layer, best, fill, number, filled[:usable], spent, before[:usable])
        layers.append(layer)
        reached = np.flatnonzero(layer.chosen >= 0)
        time_at, fill_at = best[reached], fill[reached]
        before = reached.astype(np.int32)
    return layers


def _improve(
    layer: _Layer,
    best: Floats,
    fill: Floats,
    number: int,
    filled: Floats,
    spent: Floats,
    before: NDArray[Any],
) -> None:
    """Enter an option where it is faster than what a bin has; the first of equals stays.

    ``filled`` ascends, so states that land in one bin are neighbours.
    """
    if not len(filled):
        return
    where = filled.astype(np.int64)
    starts = np.flatnonzero(np.diff(where, prepend=-1))
    least = np.minimum.reduceat(spent, starts)
    counts = np.diff(starts, append=len(where))
    first = np.flatnonzero(spent == np.repeat(least, counts))
    first = first[np.flatnonzero(np.diff(where[first], prepend=-1))]
    winner = first[spent[first] < best[where[first]]]
    target = where[winner]
    best[target], fill[target] = spent[winner], filled[winner]
    layer.chosen[target], layer.before[target] = number, before[winner]


def _read(tables: list[list[Candidate]], layers: list[_Layer], bin_: int) -> tuple[Candidate, ...]:
    """The options that lead to a bin of the last table."""
    found = []
    for ways, layer in zip(reversed(tables), reversed(layers), strict=True):
        found.append(ways[layer.chosen[bin_]])
        bin_ = int(layer.before[bin_])
    return tuple(reversed(found))
