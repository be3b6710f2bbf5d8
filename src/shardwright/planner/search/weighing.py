"""What the ranks take and cost with an item given another option, several ways at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.dealing import Lots, at_least, deal
from shardwright.planner.search.space import Floats
from shardwright.planner.search.state import MANY_RANKS, State


class Weighed(NamedTuple):
    """What each rank takes, and costs, in each of several ways [ways, ranks]."""

    load: Floats
    costs: Floats


def weigh(state: State, ways: Sequence[tuple[int, int]], below: float = float("inf")) -> Weighed:
    """The ranks with one item after the other given another option; costs are without end where
    the rules leave no place, or all ranks would not cost less than ``below``."""
    ranks = state.space.ranks
    found = Weighed(np.zeros((len(ways), ranks)), np.full((len(ways), ranks), np.inf))
    if ranks >= MANY_RANKS:
        for index, (item, option) in enumerate(ways):
            _weigh_alone(state, item, option, found, index)
        return found
    bare = {item: state.bare(item) for item in dict.fromkeys(item for item, _ in ways)}
    alike: dict[int, list[int]] = {}
    for index, (item, option) in enumerate(ways):
        blocks = state.blocks(item, option)
        if blocks[0] is blocks[-1]:
            alike.setdefault(blocks[0].width, []).append(index)
            continue
        _weigh_alone(state, item, option, found, index)
    for width, own in alike.items():
        some = np.array(own)
        lots = _lots(state, [ways[index] for index in own], width, bare)
        if below < float("inf"):
            kept = np.flatnonzero(at_least(lots, state.cost) < below)
            some, lots = some[kept], lots.at(kept)
        if len(some):
            counts, opened, _ = deal(lots, state.cost)
            many = counts[..., None].astype(np.float64)
            load = lots.load + many * lots.seconds[:, None]
            memory = lots.memory + many[..., None] * lots.storage[:, None]
            found.load[some] = load.reshape(len(some), ranks)
            costs = state.cost(load, memory).reshape(len(some), ranks)
            found.costs[some[opened]] = costs[opened]
    return found


def _weigh_alone(state: State, item: int, option: int, found: Weighed, index: int) -> None:
    """``weigh`` of an option whose blocks are not alike, or that lies on few of many ranks."""
    old = state.options[item], state.slots[item]
    with state.without(item):
        spread = state.spread(item, option)
        if spread is not None:
            state.options[item], state.slots[item] = option, spread
            state.add(item, 1)
            found.load[index], found.costs[index] = state.load, state.rank_costs()
    state.options[item], state.slots[item] = old


def _lots(
    state: State,
    ways: Sequence[tuple[int, int]],
    width: int,
    bare: Mapping[int, tuple[Floats, Floats]],
) -> Lots:
    """The blocks of options, and the ``bare`` ranks without the item that has them."""
    options = [state.space.items[item].options[option] for item, option in ways]
    blocks = [option.blocks[0] for option in options]
    everywhere = np.array([option.everywhere for option in options])[:, None]
    load = np.array([bare[item][0] for item, _ in ways])
    closed = np.zeros((len(ways), state.space.ranks // width), bool)
    if state.space.constrained:
        closed = np.array([state.closed(item, width) for item, _ in ways])
    return Lots(
        np.array([len(option.widths) for option in options]),
        np.array([block.seconds for block in blocks]),
        np.array([block.storage for block in blocks]),
        (load + everywhere).reshape(len(ways), -1, width),
        np.array([bare[item][1] for item, _ in ways]).reshape(len(ways), -1, width, 3),
        closed,
    )
