"""Moves that help one rank: a block elsewhere, two blocks swapped, a host's block elsewhere.

Each function returns the best move of its kind with the change of the summed cost (negative is
better), or None.
"""

# Changes are worked out for all pairs of a rank's blocks and their places at once, as arrays: a
# search is mostly this. What was worked out before is not kept: to look only at ranks that changed
# since nothing helped saves next to nothing, for 26 as for 1,000 tables. A move must gain more
# than ``EPSILON`` of all costs: at power 64 sums lose digits, and a search that follows rounding
# never ends.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.space import Floats, Ints, OptionBlock, open_slots
from shardwright.planner.search.state import (
    MANY_RANKS,
    MAX_RATIO,
    NEAR_SLOTS,
    SearchState,
    least_first,
)

SWAP_PARTNERS = 64  # ranks of lowest cost whose blocks are looked at
EPSILON = 1e-12
MANY_HOSTS = 256  # of which the least busy ones are looked at first
PAIRS_AT_ONCE = 2**11  # of blocks, or of a block and a rank, that are looked at in one go
MOST_PAIRS = 2**22  # of blocks that are all looked at, in 1/2 GiB
NEIGHBOURS = 3  # of more, those of each rank on each side of what evens two ranks out


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks (item, number, new first rank) to be moved, and what that changes."""

    change: float
    blocks: tuple[tuple[int, int, int], ...]

    def apply(self, state: SearchState) -> None:
        """Carry it out."""
        for item, number, slot in self.blocks:
            state.move(item, number, slot)


def helping_move(
    state: SearchState, ranks: list[int], costs: Floats, near: Ints, enough: float
) -> Move | None:
    """For the first of the ``ranks`` that any helps, the best move of a block off it, or swap with
    one of those ``near``; None if none changes the cost by less than ``enough``, which is
    negative."""
    for some in _together(state, ranks, near):
        for best in best_moves(state, some, costs, near):
            if best is not None and best.change < enough:
                return best
    return None


def _together(state: SearchState, ranks: list[int], near: Ints) -> Iterator[list[int]]:
    """Ranks that are looked at in one go: one after the other where there is much to look at."""
    # The first rank that any move helps ends the round. With many ranks each look is large, so they
    # are looked at one after the other; with few numpy's calls cost more than what they compute, so
    # several ranks share them.
    if state.space.ranks > SWAP_PARTNERS:
        yield from ([rank] for rank in ranks)
        return
    partners = sum(len(state.singles(other).items) for other in near.tolist())
    some: list[int] = []
    left = PAIRS_AT_ONCE
    for rank in ranks:
        left -= len(state.singles(rank).items) * max(partners, state.space.ranks)
        if some and left < 0:
            yield some
            some, left = [], PAIRS_AT_ONCE
        some.append(rank)
    yield some


def best_moves(
    state: SearchState, ranks: list[int], costs: Floats, near: Ints
) -> Iterator[Move | None]:
    """For each rank the best move of a block of its own, swap with one of those ``near``, or move
    of a host's block."""
    every = np.arange(state.space.ranks)
    moved, swapped = relocations(state, ranks, costs, every), exchanges(state, ranks, costs, near)
    for rank, *kinds in zip(ranks, moved, swapped, strict=True):
        kinds.append(host_relocation(state, rank, costs))
        found = [move for move in kinds if move is not None]
        yield min(found, key=lambda move: move.change, default=None)


def relocation(state: SearchState, rank: int, costs: Floats, others: Ints) -> Move | None:
    """The best place for one of the rank's single blocks among ``others``."""
    return relocations(state, [rank], costs, others)[0]


def relocations(
    state: SearchState, ranks: list[int], costs: Floats, others: Ints
) -> list[Move | None]:
    """``relocation`` for each of several ranks."""
    if len(others) < MANY_RANKS or state.space.constrained:
        return _relocations(state, ranks, costs, others)[0]
    # Moving to a rank outside of the idle ones costs at least `least`. So if the best move among
    # the idle ones is no dearer, it is the best of all, and only else all ranks are looked at: the
    # result is the same, not an approximation.
    idle, busy = state.idle
    moves, least = _relocations(state, ranks, costs, idle, busy)
    if all(move is not None and move.change <= least for move in moves):
        return moves
    return _relocations(state, ranks, costs, others)[0]


def _relocations(
    state: SearchState, ranks: list[int], costs: Floats, others: Ints, busy: float = np.inf
) -> tuple[list[Move | None], float]:
    """``relocations``, and what any changes at least if a block goes to a rank that is ``busy``."""
    own = singles_of(state, ranks)
    if not own.items or not len(others):
        return [None] * len(ranks), -np.inf
    left = state.cost(state.load[own.ranks] - own.seconds, state.memory[own.ranks] - own.storage)
    left -= costs[own.ranks]
    joined = state.cost(
        state.load[others] + own.seconds[:, None], state.memory[others] + own.storage[:, None, :]
    )
    change = left[:, None] + joined - costs[others]
    change[own.ranks[:, None] == others] = np.inf
    if state.space.constrained:
        for row, item in enumerate(own.items):
            mask = state.allowed(item)
            if mask is not None:
                change[row, ~mask[others]] = np.inf

    def move(row: int, column: int, rank: int) -> Move:
        moved = _moved(state, own.items[row], rank, int(others[column]))
        return Move(float(change[row, column]), (moved,))

    return _best_of(change, own, ranks, move), _least_added(state, left, own.seconds, busy)


def _best_of(
    change: Floats, own: SinglesOf, ranks: list[int], move: Callable[[int, int, int], Move]
) -> list[Move | None]:
    """For each rank the ``move`` of the row of its ``own``, and column, that changes least."""
    found: list[Move | None] = []
    end = 0
    for rank, count in zip(ranks, own.counts, strict=True):
        start, end = end, end + count
        if not count:
            found.append(None)
            continue
        row, column = divmod(int(change[start:end].argmin()), change.shape[1])
        found.append(move(start + row, column, rank))
    return found


class SinglesOf(NamedTuple):
    """The ``singles`` of several ranks, ``counts`` of each: items and ``ranks`` [blocks], what one
    takes: ``seconds`` [blocks] and ``storage`` [blocks, 3]."""

    counts: list[int]
    items: list[int]
    ranks: Ints
    seconds: Floats
    storage: Floats


def singles_of(state: SearchState, ranks: list[int]) -> SinglesOf:
    """Those of ``ranks``, rank after rank."""
    singles = [state.singles(rank) for rank in ranks]
    counts = [len(own.items) for own in singles]
    if len(ranks) == 1:
        ((items, seconds, storage),) = singles
        return SinglesOf(counts, items, np.full(len(items), ranks[0]), seconds, storage)
    return SinglesOf(
        counts,
        [item for own in singles for item in own.items],
        np.repeat(ranks, counts),
        np.concatenate([own.seconds for own in singles]),
        np.concatenate([own.storage for own in singles]),
    )


def _least_added(
    state: SearchState, left: Floats, seconds: Floats, busy: float, ranks: int = 1
) -> float:
    """The least of what is ``left`` with what ``seconds`` add to ranks that are ``busy``: costs are
    convex, so none that are busier, or that are as busy on average, take them for less."""
    # Costs are cut at MAX_RATIO and flat above it. A rank that is beyond the cut would take a block
    # for nothing, so there is no bound to be had there.
    if busy + seconds.max() >= MAX_RATIO * state.target:
        return -np.inf
    # Seconds alone: the penalty for bytes can only add to what a block costs a rank that it joins,
    # so a bound without it still holds.
    there = np.array([busy])
    added = state.time_cost(there + seconds) - state.time_cost(there)
    return float((left + added * ranks).min())


def _moved(state: SearchState, item: int, rank: int, slot: int) -> tuple[int, int, int]:
    """The first of an item's blocks on a rank, and its new rank."""
    return item, state.slots[item].index(rank), slot


def exchanges(
    state: SearchState, ranks: list[int], costs: Floats, others: Ints
) -> list[Move | None]:
    """The best swap of one of each rank's single blocks with one of ``others``."""
    if not len(others):
        return [None] * len(ranks)
    own, there = singles_of(state, ranks), singles_of(state, others.tolist())
    if not own.items or not there.items:
        return [None] * len(ranks)
    at = partners(state, own, there, others)
    # The indices `at` are [own blocks, partners]. Without them (None) numpy adds an axis of one, so
    # that the same lines below serve both: every own block beside every other one.
    seconds, storage, ranks_there = there.seconds[at], there.storage[at], there.ranks[at]
    gain = seconds - own.seconds[:, None]
    bytes_ = storage - own.storage[:, None, :]
    mine = state.cost(state.load[own.ranks, None] + gain, state.memory[own.ranks, None] + bytes_)
    theirs = state.cost(state.load[ranks_there] - gain, state.memory[ranks_there] - bytes_)
    change = mine + theirs - costs[own.ranks, None] - costs[ranks_there]
    # Ranks of lowest cost may be among the worst ones where there are few. Two blocks of one rank
    # that trade places would count what they change twice.
    change[own.ranks[:, None] == ranks_there] = np.inf
    if state.space.constrained:
        _forbid_swaps(state, own, there, at, change)

    def move(row: int, column: int, rank: int) -> Move:
        number = column if at is None else int(at[row, column])
        other = int(there.ranks[number])
        blocks = (
            _moved(state, own.items[row], rank, other),
            _moved(state, there.items[number], other, rank),
        )
        return Move(float(change[row, column]), blocks)

    return _best_of(change, own, ranks, move)


def partners(state: SearchState, own: SinglesOf, there: SinglesOf, others: Ints) -> Ints | None:
    """Blocks ``there`` that may trade places with each of its ``own``, where these are too many
    pairs to look at: few of each of the ``others`` [own blocks, few]; None for all of them.

    Two blocks that differ by half of what their ranks do even these out best, whatever the power of
    the costs; and what is too much on a rank goes by two that differ by that many bytes.
    """
    if len(own.items) * len(there.items) <= MOST_PAIRS:
        return None
    ends = np.cumsum(there.counts)
    found = []
    for rank, start, end in zip(others.tolist(), ends - there.counts, ends, strict=True):
        if start == end:
            continue
        # After a swap the own rank has lost `own - there` seconds and the other one has gained
        # them: both end in the middle where that is half of what they differ by. Sorted once, the
        # partners near that are found by a search in the order, so a rank of a thousand blocks
        # costs a few looks, not a thousand.
        half = (state.load[own.ranks] - state.load[rank]) / 2
        wanted = [(there.seconds[start:end], own.seconds - half)]
        for tier, _ in state.space.scarce_tiers:
            over = np.maximum(state.memory[:, tier] - state.limits[tier], 0.0)
            size = own.storage[:, tier] - (over[own.ranks] - over[rank])
            wanted.append((there.storage[start:end, tier], size))
        for values, near in wanted:
            order = np.argsort(values, kind="stable")
            first = np.searchsorted(values[order], near)[:, None]
            # Some on each side, for the middle of the seconds need not be where the bytes fit. At
            # the ends of the list the same block is looked at several times, which costs less than
            # cutting it.
            around = np.arange(-NEIGHBOURS, NEIGHBOURS)
            found.append(start + order[np.clip(first + around, 0, end - start - 1)])
    near_ones: Ints = np.concatenate(found, axis=1)
    return near_ones


def _forbid_swaps(
    state: SearchState, own: SinglesOf, there: SinglesOf, at: Ints | None, change: Floats
) -> None:
    """Rule out swaps with those ``there`` that are ``at`` a place of a row, or at a column, that
    break a constraint; two tables kept apart never trade places."""
    rows = np.arange(len(own.items))[:, None]
    at = np.arange(len(there.items))[None] if at is None else at
    for items, ranks, blocks in (
        (own.items, there.ranks[at], rows),
        (there.items, own.ranks[:, None], at),
    ):
        allowed = np.array([state.allowed(item) for item in items])
        change[~allowed[blocks, ranks]] = np.inf


def host_relocation(state: SearchState, rank: int, costs: Floats) -> Move | None:
    """The best host for one of the blocks that lie on all ranks of this rank's host."""
    space = state.space
    width = space.group
    # Blocks as wide as a host are blocks of one rank where a host has one, and cannot go anywhere
    # where there is one host only.
    if width in (1, space.ranks):
        return None
    home = rank // width
    hosts = np.delete(np.arange(space.ranks // width), home)
    found = [
        (item, number, block)
        for item in sorted(state.on_rank[rank])
        for number, (block, slot) in enumerate(
            zip(state.blocks(item), state.slots[item], strict=True)
        )
        if block.width == width and slot == home * width
    ]
    if not found or not len(hosts):
        return None
    # As among ranks: the least busy hosts first, and the others only where the bound says that one
    # of them may be better. Where rules close hosts the best of the near ones may be forbidden, so
    # all are looked at.
    if len(hosts) >= MANY_HOSTS and not space.constrained:
        busy = state.load.reshape(-1, width).sum(axis=1)[hosts] / width
        near = least_first(busy, NEAR_SLOTS)
        least = float(np.delete(busy, near).min())
        move, others_change = _host_relocation(state, home, costs, hosts[near], found, least)
        if move.change <= others_change:
            return move
    return _host_relocation(state, home, costs, hosts, found)[0]


def _host_relocation(
    state: SearchState,
    home: int,
    costs: Floats,
    hosts: Ints,
    found: Sequence[tuple[int, int, OptionBlock]],
    busy: float = np.inf,
) -> tuple[Move, float]:
    """The best of ``hosts`` for one of the blocks that were ``found`` on the host ``home``, and
    what it changes at least on a host whose ranks are as ``busy`` on average."""
    space = state.space
    width = space.group
    load, memory = state.load.reshape(-1, width), state.memory.reshape(-1, width, 3)
    by_host = costs.reshape(-1, width)
    seconds = np.array([block.seconds for _, _, block in found])
    storage = np.array([block.storage for _, _, block in found])
    left = state.cost(load[home] - seconds, memory[home] - storage).sum(axis=1)
    left -= by_host[home].sum()
    joined = state.cost(load[hosts] + seconds[:, None], memory[hosts] + storage[:, None])
    change = left[:, None] + joined.sum(axis=2) - by_host[hosts].sum(axis=1)
    if space.constrained:
        for row, (item, _, _) in enumerate(found):
            mask = state.allowed(item)
            if mask is not None:
                change[row, ~open_slots(mask, width)[hosts]] = np.inf
    best = int(change.argmin())
    row, column = divmod(best, len(hosts))
    item, number, _ = found[row]
    move = Move(float(change.flat[best]), ((item, number, int(hosts[column]) * width),))
    return move, _least_added(state, left, seconds.min(axis=1), busy, width)
