"""What another second or byte costs on the ranks, and so what another option costs at least."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.rows import Rows
from shardwright.planner.search.space import Floats, Ints, ItemOption
from shardwright.planner.search.state import MAX_RATIO, State


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
        """What an option's seconds on all ranks cost at these slopes, and, where it has one block
        on all of them, that."""
        found = option.everywhere * float(self.seconds[-1])
        return found + self.of_stretches(option) if option.is_uniform else found

    def of_stretches(self, option: ItemOption) -> float:
        """What the only block of an option that is uniform costs at these slopes."""
        found = 0.0
        for ranks, seconds, storage in option.stretches:
            found += seconds * _within(self.seconds, ranks)
            for tier, sums in self.storage:
                found += storage[tier] * _within(sums, ranks)
        return found


def _within(sums: Floats, ranks: slice) -> float:
    """What the values of some ranks sum to."""
    return float(sums[ranks.stop] - sums[ranks.start])


def hopeful(state: State, ways: Sequence[tuple[int, int]], below: float) -> list[Hope]:
    """The ways after which all ranks may cost less than ``below``, and what they cost then at
    least, the least first; those of an item follow one another.

    What ranks cost is convex: a block on all of them changes it by its seconds and bytes times
    the slopes there, or by more, and one elsewhere by what it adds to the least busy rank.
    """
    if not ways:
        return []
    items = [item for item, _ in itertools.groupby(item for item, _ in ways)]
    place = {item: index for index, item in enumerate(items)}
    owner = np.array([place[item] for item, _ in ways])
    held = [state.space.items[item].options[state.options[item]] for item in items]
    cases = [(state.load, state.memory)]  # as they are, and without each item that is not uniform
    case = [0] * len(items)
    for index, (item, option) in enumerate(zip(items, held, strict=True)):
        if not option.is_uniform:
            case[index] = len(cases)
            cases.append(state.bare(item))
    costs_of, slopes_of = _slopes(state, cases)
    totals, slopes = costs_of[case], [slopes_of[own] for own in case]
    least = np.array([load.min() for load, _ in cases])[case]
    for index, option in enumerate(held):
        if option.is_uniform:
            totals[index] -= slopes[index].of(option)
            least[index] -= option.largest
    rows = state.space.rows
    numbers = rows.numbers(ways)
    last = np.array([own.seconds[-1] for own in slopes])
    costs = totals[owner] + rows.everywhere[numbers] * last[owner]
    for index in np.flatnonzero(rows.is_uniform[numbers]).tolist():
        item, number = ways[index]
        chosen = state.space.items[item].options[number]
        costs[index] += slopes[place[item]].of_stretches(chosen)
    costs += _joined(state, rows, numbers, np.maximum(least, 0.0)[owner])
    kept = np.flatnonzero(costs < below).tolist()
    return sorted(Hope(float(costs[index]), ways[index]) for index in kept)


def _slopes(state: State, ranks: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, list[Slopes]]:
    """What all ranks cost in several cases of their load and memory [cases], and what another
    second costs, and another byte."""
    load = np.array([own for own, _ in ranks])
    cost = state.time_cost(load)
    ratio = load / state.target
    slope = np.zeros(load.shape)
    can = (ratio > 0) & (ratio < MAX_RATIO)
    np.divide(cost * (state.power / state.target), ratio, out=slope, where=can)
    seconds = _summed(slope)
    storage: list[list[tuple[int, Floats]]] = [[] for _ in ranks]
    for tier, scale in state.space.scarce_tiers:
        if state.memory[:, tier].max() > state.limits[tier]:  # else no case has too much
            memory = np.array([own[:, tier] for _, own in ranks])
            cost += np.maximum(memory * scale - 1.0, 0.0) * state.penalty
            over = memory > state.limits[tier]
            sums = _summed(over * (state.penalty * scale))
            for case in np.flatnonzero(over.any(axis=1)).tolist():
                storage[case].append((tier, sums[case]))
    slopes = [Slopes(own, tuple(more)) for own, more in zip(seconds, storage, strict=True)]
    return cost.sum(axis=1), slopes


def _summed(values: Floats) -> Floats:
    """The sums [cases, ranks + 1] of all values [cases, ranks] before each place, and of all."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _joined(state: State, rows: Rows, numbers: Ints, busy: Floats) -> Floats:
    """What the blocks of each option add at least to ranks of which the least busy one takes
    ``busy`` [options] seconds; 0 where they are not alike, or lie on all ranks."""
    before = busy + rows.everywhere[numbers]
    added = state.time_cost(before + rows.seconds[numbers]) - state.time_cost(before)
    wide = np.flatnonzero(rows.wide[numbers])
    if len(wide):
        blocks = rows.blocks[rows.wide[numbers[wide]]]
        there = before[wide, None]
        added[wide] = (state.time_cost(there + blocks) - state.time_cost(there)).sum(axis=1)
    return added * rows.counts[numbers]
