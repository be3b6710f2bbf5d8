"""Moves that help one rank: a block elsewhere, two blocks swapped, another option for an item.

Each function returns the best move of its kind with the change of the summed cost (negative is
better), or None.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.planner.search.space import Floats, Ints
from shardwright.planner.search.state import Singles, State

FOLLOWED = 40  # cheapest changes of option that are tried with a relocation after them
MAX_FOLLOWED_ITEMS = 400
MAX_WORK, WORK_SLACK = 1.5, 0.5  # times an option's cheapest work, and of the target
SWAP_PARTNERS = 64  # ranks of lowest cost whose blocks are looked at
FEW_BLOCKS = 100
EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks (item, number, new first rank) to be moved, and what that changes."""

    change: float
    blocks: tuple[tuple[int, int, int], ...]

    def apply(self, state: State) -> None:
        """Carry it out."""
        for item, number, slot in self.blocks:
            state.move(item, number, slot)


def relocation(state: State, rank: int, costs: Floats) -> Move | None:
    """The best place for one of the rank's single blocks."""
    singles = state.singles()
    own = _one_of_each(singles, np.flatnonzero(singles.rank == rank))
    if not len(own) or state.space.ranks == 1:
        return None
    seconds, storage = singles.seconds[own], singles.storage[own]
    left = state.cost(state.load[rank] - seconds, state.memory[rank] - storage)
    joined = state.cost(
        state.load[None, :] + seconds[:, None], state.memory[None, :, :] + storage[:, None, :]
    )
    change = left[:, None] - costs[rank] + joined - costs[None, :]
    change[:, rank] = np.inf
    if state.space.constrained:
        for row, index in enumerate(own):
            mask = state.allowed(int(singles.item[index]))
            if mask is not None:
                change[row, ~mask] = np.inf
    best = int(change.argmin())
    row, slot = divmod(best, state.space.ranks)
    index = own[row]
    block = (int(singles.item[index]), int(singles.number[index]), slot)
    return Move(float(change.flat[best]), (block,))


def _one_of_each(singles: Singles, numbers: Ints) -> Ints:
    """Of the blocks of an item that lie on one rank, and are alike, the first; all of a few."""
    if len(numbers) <= FEW_BLOCKS:
        return numbers
    place = singles.item[numbers] * (int(singles.rank.max(initial=0)) + 1) + singles.rank[numbers]
    first = np.sort(np.unique(place, return_index=True)[1])
    kept: Ints = numbers[first]
    return kept


def exchange(state: State, rank: int, costs: Floats) -> Move | None:
    """The best swap of one of the rank's single blocks with one of another rank."""
    singles = state.singles()
    own = _one_of_each(singles, np.flatnonzero(singles.rank == rank))
    if not len(own) or state.space.ranks == 1:
        return None
    others = np.flatnonzero(singles.rank != rank)
    if state.space.ranks > SWAP_PARTNERS:
        near = np.zeros(state.space.ranks, bool)
        near[np.argpartition(costs, SWAP_PARTNERS)[:SWAP_PARTNERS]] = True
        others = _one_of_each(singles, others[near[singles.rank[others]]])
    if not len(others):
        return None
    there = singles.rank[others]
    gain = singles.seconds[others][None, :] - singles.seconds[own][:, None]
    bytes_ = singles.storage[others][None, :, :] - singles.storage[own][:, None, :]
    mine = state.cost(state.load[rank] + gain, state.memory[rank] + bytes_)
    theirs = state.cost(state.load[there][None, :] - gain, state.memory[there][None] - bytes_)
    change = mine + theirs - costs[rank] - costs[there][None, :]
    if state.space.constrained:
        _forbid_swaps(state, rank, own, others, change)
    best = int(change.argmin())
    row, column = divmod(best, len(others))
    a, b = own[row], others[column]
    blocks = (
        (int(singles.item[a]), int(singles.number[a]), int(singles.rank[b])),
        (int(singles.item[b]), int(singles.number[b]), rank),
    )
    return Move(float(change.flat[best]), blocks)


def _forbid_swaps(state: State, rank: int, own: Ints, others: Ints, change: Floats) -> None:
    """Rule out swaps that break a constraint; two tables kept apart never trade places."""
    singles = state.singles()
    there = singles.rank[others]
    for row, index in enumerate(own):
        mask = state.allowed(int(singles.item[index]))
        if mask is not None:
            change[row, ~mask[there]] = np.inf
    for column, index in enumerate(others):
        mask = state.allowed(int(singles.item[index]))
        if mask is not None and not mask[rank]:
            change[:, column] = np.inf


def host_relocation(state: State, rank: int, costs: Floats) -> Move | None:
    """The best host for one of the blocks that lie on all ranks of this rank's host."""
    space = state.space
    width = space.group
    if width in (1, space.ranks):
        return None
    home, hosts = rank // width, space.ranks // width
    found = [
        (item, number, block)
        for item in sorted(state.on_rank[rank])
        for number, (block, slot) in enumerate(
            zip(state.blocks(item), state.slots[item], strict=True)
        )
        if block.width == width and slot == home * width
    ]
    if not found:
        return None
    load = state.load.reshape(hosts, width)
    memory = state.memory.reshape(hosts, width, 3)
    host_costs = costs.reshape(hosts, width).sum(axis=1)
    seconds = np.array([block.seconds for _, _, block in found])
    storage = np.array([block.storage for _, _, block in found])
    left = state.cost(load[home] - seconds, memory[home] - storage).sum(axis=1)
    joined = state.cost(load + seconds[:, None], memory + storage[:, None]).sum(axis=2)
    change = (left - host_costs[home])[:, None] + joined - host_costs
    change[:, home] = np.inf
    if space.constrained:
        for row, (item, _, _) in enumerate(found):
            mask = state.allowed(item)
            if mask is not None:
                change[row, ~mask.reshape(hosts, width).all(axis=1)] = np.inf
    best = int(change.argmin())
    row, host = divmod(best, hosts)
    item, number, _ = found[row]
    return Move(float(change.flat[best]), ((item, number, host * width),))


def reoption(state: State, items: list[int]) -> bool:
    """Give the item that gains most from it another option, placed anew; False if none gains."""
    before = float(state.rank_costs().sum())
    best = before * (1 - EPSILON)
    fits = state.fits
    found: tuple[int, int, tuple[int, ...]] | None = None
    for item in items:
        old_option, old_slots = state.options[item], state.slots[item]
        state.take(item)
        for option in _affordable(state, item, fits):
            spread = state.spread(item, option)
            if spread is not None and spread[1] < best:
                best, found = spread[1], (item, option, spread[0])
        state.put(item, old_option, old_slots)
    if found is None:
        return False
    item, option, slots = found
    state.take(item)
    state.put(item, option, slots)
    return True


def _affordable(state: State, item: int, fits: bool) -> list[int]:
    """Options whose work is not far above the cheapest one's; all while something does not fit."""
    options = state.space.items[item].options
    if not fits:
        return list(range(len(options)))
    most = min(option.total_seconds for option in options) * MAX_WORK + WORK_SLACK * state.target
    return [number for number, option in enumerate(options) if option.total_seconds <= most]


def reoption_and_relocate(state: State) -> bool:
    """The best of the cheapest changes of option anywhere, each followed by moving a block of the
    rank that is then worst: the pair helps where neither does alone. False if none gains."""
    if len(state.space.items) > MAX_FOLLOWED_ITEMS:
        return False
    best = float(state.rank_costs().sum()) * (1 - EPSILON)
    found: tuple[int, int, tuple[int, ...], Move] | None = None
    for item, option in _cheapest_changes(state):
        old_option, old_slots = state.options[item], state.slots[item]
        state.take(item)
        spread = state.spread(item, option)
        if spread is not None:
            state.put(item, option, spread[0])
            costs = state.rank_costs()
            move = relocation(state, int(costs.argmax()), costs)
            if move is not None and move.change < 0:
                after = _cost_after(state, move)  # not costs + change: huge terms would cancel
                if after < best:
                    best, found = after, (item, option, spread[0], move)
            state.take(item)
        state.put(item, old_option, old_slots)
    if found is None:
        return False
    item, option, slots, move = found
    state.take(item)
    state.put(item, option, slots)
    move.apply(state)
    return True


def _cost_after(state: State, move: Move) -> float:
    """What all ranks would cost after moving one block; the state stays as it is."""
    ((item, number, slot),) = move.blocks
    before = state.slots[item][number]
    state.move(item, number, slot)
    after = float(state.rank_costs().sum())
    state.move(item, number, before)
    return after


def _cheapest_changes(state: State) -> list[tuple[int, int]]:
    """Items and options that add least work in all."""
    changes = [
        (option.total_seconds - options[state.options[item]].total_seconds, item, number)
        for item, options in enumerate(entry.options for entry in state.space.items)
        for number, option in enumerate(options)
        if number != state.options[item] >= 0
    ]
    return [(item, number) for _, item, number in sorted(changes)[:FOLLOWED]]
