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
        """What the only block of an option on all ranks costs at these slopes."""
        found = option.everywhere * float(self.seconds[-1])
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
    found = []
    slopes = _slopes(state)
    for item, own in itertools.groupby(ways, key=lambda way: way[0]):
        option = state.space.items[item].options[state.options[item]]
        if option.is_uniform:
            total = float(state.rank_costs().sum()) - slopes.of(option)
            least = float(state.load.min()) - option.largest
            found += [Hope(total + _adds(state, way, slopes, least), way) for way in own]
            continue
        with state.without(item):
            total, bare = float(state.rank_costs().sum()), _slopes(state)
            least = float(state.load.min())
            found += [Hope(total + _adds(state, way, bare, least), way) for way in own]
    return sorted(hope for hope in found if hope.least < below)


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


def _adds(state: State, way: tuple[int, int], slopes: Slopes, least: float) -> float:
    """What an option adds at least to ranks of which the least busy one takes ``least``."""
    option = state.space.items[way[0]].options[way[1]]
    if option.is_uniform:
        return slopes.of(option)
    added = option.everywhere * float(slopes.seconds[-1])
    blocks = option.blocks
    if blocks[0] is not blocks[-1] or option.widths[0] == state.space.ranks:
        return added
    before = np.full(1, max(least, 0.0) + option.everywhere)
    more = state.time_cost(before + blocks[0].seconds) - state.time_cost(before)
    return added + len(blocks) * float(more.sum())
