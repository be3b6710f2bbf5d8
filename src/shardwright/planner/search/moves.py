"""Moves that help one rank: a block elsewhere, two blocks swapped, another option for an item.

Each function returns the best move of its kind with the change of the summed cost (negative is
better), or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.slopes import Hope, hopeful
from shardwright.planner.search.space import Block, Bools, Floats, Ints
from shardwright.planner.search.state import MANY_RANKS, MAX_RATIO, NEAR_SLOTS, State, least_first
from shardwright.planner.search.weighing import weigh

FOLLOWED = 40  # cheapest changes of option that are tried with a relocation after them
MAX_FOLLOWED_ITEMS = 400
MAX_WORK, WORK_SLACK = 1.5, 0.5  # times an option's cheapest work, and of the target
SWAP_PARTNERS = 64  # ranks of lowest cost whose blocks are looked at
EPSILON = 1e-12
MANY_HOSTS = 256  # of which the least busy ones are looked at first
PAIRS_AT_ONCE = 2**11  # of blocks, or of a block and a rank, that are looked at in one go
MOST_PAIRS = 2**22  # of blocks that are all looked at, in 1/2 GiB
NEIGHBOURS = 3  # of more, those of each rank on each side of what evens two ranks out
AT_ONCE = 2**15  # ranks, each as often as there are ways that are weighed together

Ways = list[tuple[int, int]]  # items, and an option of each


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks (item, number, new first rank) to be moved, and what that changes."""

    change: float
    blocks: tuple[tuple[int, int, int], ...]

    def apply(self, state: State) -> None:
        """Carry it out."""
        for item, number, slot in self.blocks:
            state.move(item, number, slot)


@dataclass
class Stuck:
    """Ranks that no move of a block helped, so that only ranks that changed since then are looked
    at again.

    ``since``: the number of the state's last change then, ``change``: that of the best move;
    ``met`` [ranks]: those with which swaps were tried.
    """

    since: dict[int, int] = field(default_factory=dict)
    change: dict[int, float] = field(default_factory=dict)
    met: dict[int, Bools] = field(default_factory=dict)

    def helped(
        self, state: State, ranks: list[int], costs: Floats, near: Ints, enough: float
    ) -> Move | None:
        """For the first of the ``ranks`` that any helps, the best move of a block off it, or swap
        with one of those ``near``; None if none changes the cost by less than ``enough``, which is
        negative."""
        every = np.arange(state.space.ranks)
        for some in _together(state, ranks, near):
            if len(some) == 1:
                best = self._best(state, some[0], costs, near, enough)
                if best is not None:
                    return best
                continue
            for best in best_moves(state, some, costs, every, near, every):
                if best is not None and best.change < enough:
                    return best
        return None

    def _best(
        self, state: State, rank: int, costs: Floats, near: Ints, enough: float
    ) -> Move | None:
        since, width = self.since.get(rank, -1), state.space.group
        every, first = np.arange(state.space.ranks), rank - rank % width
        if state.changes[rank] > since or self.change[rank] < enough:
            others, met, known = every, np.zeros(len(every), bool), np.inf
        else:
            others, met = np.flatnonzero(state.changes > since), self.met[rank]
            met[others] = False
            near, known = near[~met[near]], self.change[rank]
        is_home_same = state.changes[first : first + width].max() <= since
        hosts = others if is_home_same else every
        (best,) = best_moves(state, [rank], costs, others, near, hosts)
        if best is not None and best.change < enough:
            return best
        met[near] = True
        self.since[rank], self.met[rank] = state.change, met
        self.change[rank] = known if best is None else min(known, best.change)
        return None


def _together(state: State, ranks: list[int], near: Ints) -> Iterator[list[int]]:
    """Ranks that are looked at in one go: one after the other where there is much to look at."""
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
    state: State, ranks: list[int], costs: Floats, others: Ints, near: Ints, hosts: Ints
) -> Iterator[Move | None]:
    """For each rank the best move of a block of its own to one of ``others``, swap with one of
    those ``near``, or move of a host's block to one of ``hosts``."""
    moved, swapped = relocations(state, ranks, costs, others), exchanges(state, ranks, costs, near)
    for rank, *kinds in zip(ranks, moved, swapped, strict=True):
        kinds.append(host_relocation(state, rank, costs, hosts))
        found = [move for move in kinds if move is not None]
        yield min(found, key=lambda move: move.change, default=None)


def swap_partners(costs: Floats) -> Ints:
    """The ranks of lowest cost, in order of their numbers."""
    return least_first(costs, min(SWAP_PARTNERS, len(costs)))


def relocation(state: State, rank: int, costs: Floats, others: Ints) -> Move | None:
    """The best place for one of the rank's single blocks among ``others``."""
    return relocations(state, [rank], costs, others)[0]


def relocations(state: State, ranks: list[int], costs: Floats, others: Ints) -> list[Move | None]:
    """``relocation`` for each of several ranks."""
    if len(others) < MANY_RANKS or state.space.constrained:
        return _relocations(state, ranks, costs, others)[0]
    idle, busy = state.idle  # of many ranks, most are too busy
    moves, least = _relocations(state, ranks, costs, idle, busy)
    if all(move is not None and move.change <= least for move in moves):
        return moves
    return _relocations(state, ranks, costs, others)[0]


def _relocations(
    state: State, ranks: list[int], costs: Floats, others: Ints, busy: float = np.inf
) -> tuple[list[Move | None], float]:
    """``relocations``, and what any changes at least if a block goes to a rank that is ``busy``."""
    own = singles_of(state, ranks)
    if not own.items or not len(others):
        return [None] * len(ranks), -np.inf
    left = state.cost(state.load[own.ranks] - own.seconds, state.memory[own.ranks] - own.storage)
    left -= costs[own.ranks]
    joined = state.cost(
        state.load[others] + own.seconds[:, None],
        state.memory[others] + own.storage[:, None, :],
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


def singles_of(state: State, ranks: list[int]) -> SinglesOf:
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


def _least_added(state: State, left: Floats, seconds: Floats, busy: float, ranks: int = 1) -> float:
    """The least of what is ``left`` with what ``seconds`` add to ranks that are ``busy``: costs are
    convex, so none that are busier, or that are as busy on average, take them for less."""
    if busy + seconds.max() >= MAX_RATIO * state.target:
        return -np.inf
    there = np.array([busy])
    added = state.time_cost(there + seconds) - state.time_cost(there)
    return float((left + added * ranks).min())


def _moved(state: State, item: int, rank: int, slot: int) -> tuple[int, int, int]:
    """The first of an item's blocks on a rank, and its new rank."""
    return item, state.slots[item].index(rank), slot


def exchanges(state: State, ranks: list[int], costs: Floats, others: Ints) -> list[Move | None]:
    """The best swap of one of each rank's single blocks with one of ``others``."""
    if not len(others):
        return [None] * len(ranks)
    own, there = singles_of(state, ranks), singles_of(state, others.tolist())
    if not own.items or not there.items:
        return [None] * len(ranks)
    at = partners(state, own, there, others)
    # of all, at None is one row of them
    seconds, storage, ranks_there = there.seconds[at], there.storage[at], there.ranks[at]
    gain = seconds - own.seconds[:, None]
    bytes_ = storage - own.storage[:, None, :]
    mine = state.cost(state.load[own.ranks, None] + gain, state.memory[own.ranks, None] + bytes_)
    theirs = state.cost(state.load[ranks_there] - gain, state.memory[ranks_there] - bytes_)
    change = mine + theirs - costs[own.ranks, None] - costs[ranks_there]
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


def partners(state: State, own: SinglesOf, there: SinglesOf, others: Ints) -> Ints | None:
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
        half = (state.load[own.ranks] - state.load[rank]) / 2
        wanted = [(there.seconds[start:end], own.seconds - half)]
        for tier, _ in state.space.scarce_tiers:
            over = np.maximum(state.memory[:, tier] - state.limits[tier], 0.0)
            size = own.storage[:, tier] - (over[own.ranks] - over[rank])
            wanted.append((there.storage[start:end, tier], size))
        for values, near in wanted:
            order = np.argsort(values, kind="stable")
            first = np.searchsorted(values[order], near)[:, None]
            around = np.arange(-NEIGHBOURS, NEIGHBOURS)
            found.append(start + order[np.clip(first + around, 0, end - start - 1)])
    near_ones: Ints = np.concatenate(found, axis=1)
    return near_ones


def _forbid_swaps(
    state: State, own: SinglesOf, there: SinglesOf, at: Ints | None, change: Floats
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


def host_relocation(state: State, rank: int, costs: Floats, others: Ints) -> Move | None:
    """The best host, of those of ``others``, for one of the blocks that lie on all ranks of this
    rank's host."""
    space = state.space
    width = space.group
    if width in (1, space.ranks):
        return None
    home = rank // width
    is_other = np.zeros(space.ranks // width, bool)
    is_other[others // width] = True
    is_other[home] = False
    hosts = np.flatnonzero(is_other)
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
    if len(hosts) >= MANY_HOSTS and not space.constrained:  # most are too busy
        busy = state.load.reshape(-1, width).sum(axis=1)[hosts] / width
        order = np.argpartition(busy, NEAR_SLOTS)
        near, least = hosts[np.sort(order[:NEAR_SLOTS])], float(busy[order[NEAR_SLOTS]])
        move, others_change = _host_relocation(state, home, costs, near, found, least)
        if move.change <= others_change:
            return move
    return _host_relocation(state, home, costs, hosts, found)[0]


def _host_relocation(
    state: State,
    home: int,
    costs: Floats,
    hosts: Ints,
    found: Sequence[tuple[int, int, Block]],
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
                change[row, ~mask.reshape(-1, width)[hosts].all(axis=1)] = np.inf
    best = int(change.argmin())
    row, column = divmod(best, len(hosts))
    item, number, _ = found[row]
    move = Move(float(change.flat[best]), ((item, number, int(hosts[column]) * width),))
    return move, _least_added(state, left, seconds.min(axis=1), busy, width)


def reoption(state: State, items: list[int]) -> bool:
    """Give the item that gains most from it another option, placed anew; False if none gains."""
    best = float(state.rank_costs().sum()) * (1 - EPSILON)
    fits = state.fits
    ways = [(item, option) for item in items for option in _affordable(state, item, fits)]
    found = None
    hopes = hopeful(state, ways, best)
    many = max(AT_ONCE // state.space.ranks, 1)
    for start in range(0, len(hopes), many):
        some = [hope.way for hope in hopes[start : start + many] if hope.least < best]
        if not some:
            break
        costs = weigh(state, some, best).costs.sum(axis=1)
        if costs.min() < best:
            best, found = float(costs.min()), some[int(costs.argmin())]
    if found is None:
        return False
    item, option = found
    state.take(item)
    spread = state.spread(item, option)
    assert spread is not None
    state.put(item, option, spread)
    return True


def _affordable(state: State, item: int, fits: bool) -> list[int]:
    """Options whose work is not far above the cheapest one's; all while something does not fit."""
    options = state.space.items[item].options
    if not fits:
        return list(range(len(options)))
    most = state.space.least_work[item] * MAX_WORK + WORK_SLACK * state.target
    return [number for number, option in enumerate(options) if option.total_seconds <= most]


def reoption_and_relocate(state: State) -> bool:
    """The best of the cheapest changes of option anywhere, each followed by moving a block of the
    rank that is then worst: the pair helps where neither does alone. False if none gains."""
    if len(state.space.items) > MAX_FOLLOWED_ITEMS:
        return False
    best = float(state.rank_costs().sum()) * (1 - EPSILON)
    found: tuple[int, int, tuple[int, ...], Move] | None = None
    trial = state.copy()
    for least, (item, option) in sorted(promising(state, cheapest_changes(state), best)):
        if least >= best:
            break
        trial.take(item)
        spread = trial.spread(item, option)
        if spread is not None:
            trial.put(item, option, spread)
            ranks = trial.rank_costs()
            move = relocation(trial, int(ranks.argmax()), ranks, np.arange(len(ranks)))
            if move is not None and move.change < 0:
                after = _cost_after(trial, move)  # not costs + change: huge terms would cancel
                if after < best:
                    best, found = after, (item, option, spread, move)
            trial.take(item)
        trial.put(item, state.options[item], state.slots[item])
    if found is None:
        return False
    item, option, slots, move = found
    state.take(item)
    state.put(item, option, slots)
    move.apply(state)
    return True


def promising(state: State, ways: Ways, best: float) -> Iterator[Hope]:
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
            yield Hope(float(least[index]), some[index])


def _least_after_move(state: State, rank: int, ways: Ways, load: Floats) -> Floats:
    """What moving one block off a rank leaves there and adds elsewhere at least, where items have
    other options and ranks that ``load`` [ways, ranks]: as if they held only what they do without
    these items."""
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
    left = state.time_cost(load[:, rank, None] - seconds)
    least: Floats = (left + joined.min(axis=2)).min(axis=1)
    return least


def _batches(state: State, ways: Ways) -> Iterator[Ways]:
    """As many at a time as are weighed in one go."""
    many = max(AT_ONCE // state.space.ranks, 1)
    return (ways[start : start + many] for start in range(0, len(ways), many))


def _cost_after(state: State, move: Move) -> float:
    """What all ranks would cost after moving one block; the state stays as it is."""
    ((item, number, slot),) = move.blocks
    before = state.slots[item][number]
    state.move(item, number, slot)
    after = float(state.rank_costs().sum())
    state.move(item, number, before)
    return after


def cheapest_changes(state: State) -> Ways:
    """Items and options that add least work in all."""
    changes = [
        (option.total_seconds - options[state.options[item]].total_seconds, item, number)
        for item, options in enumerate(entry.options for entry in state.space.items)
        for number, option in enumerate(options)
        if number != state.options[item] >= 0
    ]
    return [(item, number) for _, item, number in sorted(changes)[:FOLLOWED]]
