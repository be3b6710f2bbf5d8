"""Moves that give an item another option: weighed many at once, and the best of them made.

A way is an item and an option. Its exact cost asks for a placement of every block, so what each
costs at least is looked at before.
"""

# What all ranks cost is a sum of convex functions of their seconds and bytes (see state.py). So
# blocks that are alike cost each rank more from one to the next, all of them at least as many
# times what the cheapest rank takes for the first (``at_least``), and of many ways few have to be
# dealt. The same bounds the move that follows a change of option (``promising``). A bound here
# must never be above the cost that is found in the end: a test holds it against that, for a way
# that is wrongly dropped would be missed silently.
#
# A bound by the slopes of all ranks would sort ways out before any is weighed. It changes no plan
# of benchmarks/planner_random.py, nor of 10,000 tables on 4,096 ranks, and saves at most 9 % of
# their time: too little for what it takes to follow it.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.planner.search.moves import EPSILON, Move, relocation
from shardwright.planner.search.placing import Lots, at_least, deal, spread
from shardwright.planner.search.space import Floats
from shardwright.planner.search.state import MANY_RANKS, SearchState

FOLLOWED = 40  # cheapest changes of option that are tried with a relocation after them
MAX_FOLLOWED_ITEMS = 400
MAX_WORK, WORK_SLACK = 1.5, 0.5  # times an option's cheapest work, and of the target
AT_ONCE = 2**15  # ranks, each as often as there are ways that are weighed together
Way = tuple[int, int]  # an item, and an option of it
Ways = list[Way]


def reoption_best(state: SearchState, items: list[int]) -> bool:
    """Give the item that gains most from it another option, placed anew; False if none gains."""
    best = float(state.rank_costs().sum()) * (1 - EPSILON)
    fits = state.fits
    ways = [(item, option) for item in items for option in _affordable(state, item, fits)]
    found = None
    for some in _batches(state, ways):
        costs = weigh(state, some, best)[1].sum(axis=1)
        if costs.min() < best:
            best, found = float(costs.min()), some[int(costs.argmin())]
    if found is None:
        return False
    item, option = found
    state.take(item)
    slots = spread(state, item, option)
    assert slots is not None
    state.put(item, option, slots)
    return True


def _affordable(state: SearchState, item: int, fits: bool) -> list[int]:
    """Options whose work is not far above the cheapest one's; all while something does not fit."""
    options = state.space.items[item].options
    if not fits:
        return list(range(len(options)))
    most = state.space.least_work[item] * MAX_WORK + WORK_SLACK * state.target
    return [number for number, option in enumerate(options) if option.total_seconds <= most]


def reoption_and_relocate(state: SearchState) -> bool:
    """The best of the cheapest changes of option anywhere, each followed by moving a block of the
    rank that is then worst: the pair helps where neither does alone. False if none gains."""
    if len(state.space.items) > MAX_FOLLOWED_ITEMS:
        return False
    best = float(state.rank_costs().sum()) * (1 - EPSILON)
    found: tuple[int, int, tuple[int, ...], Move] | None = None
    # A change is made and taken back on a copy, for sums of doubles do not come back to what they
    # were; the state itself is touched once, by what is chosen.
    trial = state.copy()
    # By their bounds: as soon as a bound is no better than what was found, all that follow are
    # worse, and none of them has to be placed.
    for least, (item, option) in sorted(promising(state, cheapest_changes(state), best)):
        if least >= best:
            break
        trial.take(item)
        slots = spread(trial, item, option)
        if slots is not None:
            trial.put(item, option, slots)
            ranks = trial.rank_costs()
            move = relocation(trial, int(ranks.argmax()), ranks, np.arange(len(ranks)))
            if move is not None and move.change < 0:
                after = _cost_after(trial, move)  # not costs + change: huge terms would cancel
                if after < best:
                    best, found = after, (item, option, slots, move)
            trial.take(item)
        trial.put(item, state.options[item], state.slots[item])
    if found is None:
        return False
    item, option, slots, move = found
    state.take(item)
    state.put(item, option, slots)
    move.apply(state)
    return True


def promising(state: SearchState, ways: Ways, best: float) -> Iterator[tuple[float, Way]]:
    """Those after which the move of a block off the worst rank may cost less than ``best``, and
    what all ranks cost then at least."""
    for some in _batches(state, ways):
        load, costs = weigh(state, some)
        worst, total = costs.argmax(axis=1), costs.sum(axis=1)
        least = np.full(len(some), np.inf)
        for rank in sorted(set(worst.tolist())):
            own = np.flatnonzero((worst == rank) & np.isfinite(total))
            if len(own):
                moved = _least_after_move(state, rank, [some[way] for way in own], load[own])
                least[own] = total[own] - costs[own, rank] + moved
        for index in np.flatnonzero(least < best).tolist():
            yield float(least[index]), some[index]


def _least_after_move(state: SearchState, rank: int, ways: Ways, load: Floats) -> Floats:
    """What moving one block off a rank leaves there and adds elsewhere at least, where items have
    other options and ranks that ``load`` [ways, ranks]: as if they held only what they do without
    these items."""
    # Of the blocks of the item that was changed one stands for all, since they are alike, and it
    # may be the one that moves: so it is looked at beside those that lie there.
    there, blocks = state.singles(rank), [state.blocks(*way)[0] for way in ways]
    many = (len(ways), len(there.items) + 1)
    seconds, storage = np.empty(many), np.empty((*many, 3))
    seconds[:, :-1], storage[:, :-1] = there.seconds, there.storage
    seconds[:, -1] = [block.seconds[0] for block in blocks]
    storage[:, -1] = [block.storage[0] for block in blocks]
    memory = np.array([state.bare(item)[1] for item, _ in ways])
    joined = state.cost(load[:, None] + seconds[..., None], memory[:, None] + storage[:, :, None])
    joined -= state.cost(load, memory)[:, None]
    joined[..., rank] = np.inf
    # Without the penalty for bytes that stay on the rank: it only adds, so the bound holds without.
    left = state.time_cost(load[:, rank, None] - seconds)
    least: Floats = (left + joined.min(axis=2)).min(axis=1)
    return least


def _batches(state: SearchState, ways: Ways) -> Iterator[Ways]:
    """As many at a time as are weighed in one go."""
    many = max(AT_ONCE // state.space.ranks, 1)
    return (ways[start : start + many] for start in range(0, len(ways), many))


def _cost_after(state: SearchState, move: Move) -> float:
    """What all ranks would cost after moving one block; the state stays as it is."""
    ((item, number, slot),) = move.blocks
    before = state.slots[item][number]
    state.move(item, number, slot)
    after = float(state.rank_costs().sum())
    state.move(item, number, before)
    return after


def cheapest_changes(state: SearchState) -> Ways:
    """Items and options that add least work in all."""
    changes = [
        (option.total_seconds - options[state.options[item]].total_seconds, item, number)
        for item, options in enumerate(entry.options for entry in state.space.items)
        for number, option in enumerate(options)
        if number != state.options[item] >= 0
    ]
    return [(item, number) for _, item, number in sorted(changes)[:FOLLOWED]]


def weigh(
    state: SearchState, ways: Sequence[Way], below: float = float("inf")
) -> tuple[Floats, Floats]:
    """What each rank takes, and costs, with one item after the other given another option [ways,
    ranks]; costs are without end where the rules leave no place, or all ranks would not cost less
    than ``below``."""
    ranks = state.space.ranks
    found_load, found_costs = np.zeros((len(ways), ranks)), np.full((len(ways), ranks), np.inf)
    # To deal many ways together looks at every rank for each of them. Of thousands of ranks a
    # placement of one way alone looks at the idle ones first, which is far less.
    if ranks >= MANY_RANKS:
        for index, (item, option) in enumerate(ways):
            found_load[index], found_costs[index] = _weigh_alone(state, item, option)
        return found_load, found_costs
    bare = {item: state.bare(item) for item in dict.fromkeys(item for item, _ in ways)}
    alike: dict[int, list[int]] = {}
    for index, (item, option) in enumerate(ways):
        blocks = state.blocks(item, option)
        if blocks[0] is blocks[-1]:
            alike.setdefault(blocks[0].width, []).append(index)
            continue
        found_load[index], found_costs[index] = _weigh_alone(state, item, option)
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
            found_load[some] = load.reshape(len(some), ranks)
            costs = state.cost(load, memory).reshape(len(some), ranks)
            found_costs[some[opened]] = costs[opened]
    return found_load, found_costs


def _weigh_alone(state: SearchState, item: int, option: int) -> tuple[Any, Any]:
    """``weigh`` of an option whose blocks are not alike, or that lies on few of many ranks."""
    old = state.options[item], state.slots[item]
    load: Any = 0.0
    costs: Any = np.inf
    with state.without(item):
        slots = spread(state, item, option)
        if slots is not None:
            state.options[item], state.slots[item] = option, slots
            state.add(item, 1)
            load, costs = state.load, state.rank_costs()
    state.options[item], state.slots[item] = old
    return load, costs


def _lots(
    state: SearchState, ways: Sequence[Way], width: int, bare: Mapping[int, tuple[Floats, Floats]]
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
