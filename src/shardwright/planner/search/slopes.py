"""What another second or byte costs on the ranks, and so what another option costs at least."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.space import Floats, ItemOption
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
        if not option.is_uniform:
            return found
        for ranks, seconds, storage in option.stretches:
            found += seconds * _within(self.seconds, ranks)
            for tier, sums in self.storage:
                found += storage[tier] * _within(sums, ranks)
        return found


def _within(sums: Floats, ranks: slice) -> float:
    """What the values of some ranks sum to."""
    return float(sums[ranks.stop] - sums[ranks.start])


def _summed(values: Floats) -> Floats:
    """The sums of all values before each place, and of all."""
    return np.concatenate([[0.0], values.cumsum()])


def hopeful(state: State, ways: Sequence[tuple[int, int]], below: float) -> list[Hope]:
    """The ways after which all ranks may cost less than ``below``, and what they cost then at
    least, the least first.

    What ranks cost is convex: a block on all of them changes it by its seconds and bytes times
    the slopes there, or by more, and one elsewhere by what it adds to the least busy rank.
    """
    options = [state.space.items[item].options[number] for item, number in ways]
    costs, busy = np.zeros(len(ways)), np.zeros(len(ways))
    slopes = _slopes(state)
    for item, own in itertools.groupby(range(len(ways)), key=lambda index: ways[index][0]):
        option = state.space.items[item].options[state.options[item]]
        some = list(own)
        if option.is_uniform:
            bare, total = slopes, float(state.rank_costs().sum()) - slopes.of(option)
            least = float(state.load.min()) - option.largest
        else:
            with state.without(item):
                bare, total = _slopes(state), float(state.rank_costs().sum())
                least = float(state.load.min())
        costs[some] = [total + bare.of(options[index]) for index in some]
        busy[some] = max(least, 0.0)
    costs += _joined(state, options, busy)
    return sorted(map(Hope, costs[costs < below].tolist(), itertools.compress(ways, costs < below)))


def _slopes(state: State) -> Slopes:
    """What another second costs on the ranks, and another byte."""
    ratio = state.load / state.target
    seconds = np.zeros(state.space.ranks)
    np.divide(
        state.time_cost(state.load) * (state.power / state.target),
        ratio,
        out=seconds,
        where=(ratio > 0) & (ratio < MAX_RATIO),
    )
    storage = []
    for tier, scale in state.space.used_tiers:
        over = state.memory[:, tier] > state.limits[tier]
        if over.any():
            storage.append((tier, _summed(over * (state.penalty * scale))))
    return Slopes(_summed(seconds), tuple(storage))


def _joined(state: State, options: Sequence[ItemOption], busy: Floats) -> Floats:
    """What the blocks of each option add at least to ranks of which the least busy one takes
    ``busy`` [options] seconds; 0 where they are not alike, or lie on all ranks."""
    added = np.zeros(len(options))
    alike, first = [], []
    for index, option in enumerate(options):
        if not option.is_uniform and option.widths[0] < state.space.ranks:
            blocks = option.blocks
            if blocks[0] is blocks[-1]:
                alike.append(index)
                first.append(blocks[0])
    if not alike:
        return added
    some = [options[index] for index in alike]
    widths = np.array([block.width for block in first])
    before = busy[alike] + [option.everywhere for option in some]
    seconds = np.concatenate([block.seconds for block in first])
    more = state.time_cost(np.repeat(before, widths) + seconds)
    more -= np.repeat(state.time_cost(before), widths)
    sums = np.add.reduceat(more, widths.cumsum() - widths)
    added[alike] = sums * [len(option.widths) for option in some]
    return added
