"""Many like blocks, dealt as if one after the other were placed where it then costs least."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.search.space import Block, Bools, Floats

MANY = 64  # blocks; of more, whole rows of ranks are worked out at once
ROWS = 4  # blocks of a slot that are looked at first

# What ranks cost at their seconds and bytes, as arrays; and one rank, as numbers.
Costs = Callable[[Floats, Floats], Floats]
Cost = Callable[[float, Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Dealt:
    """The first ranks of the blocks, and what all ranks together cost with them."""

    slots: tuple[int, ...]
    cost: float


def deal(
    block: Block, count: int, load: Floats, memory: Floats, closed: Bools, costs: Costs, cost: Cost
) -> Dealt:
    """Deal ``count`` of ``block`` to ranks with ``load`` [ranks] seconds and ``memory`` [ranks, 3]
    bytes; none to a slot, such as a host, that is ``closed`` [ranks / width]."""
    if block.width == 1 and count <= MANY:
        return _one_by_one(block, count, load, memory, closed, costs, cost)
    return _by_rows(block, count, load, memory, closed, costs)


def _one_by_one(
    block: Block, count: int, load: Floats, memory: Floats, closed: Bools, costs: Costs, cost: Cost
) -> Dealt:
    """Only the rank that got the last block is worked out anew."""
    before = costs(load, memory)
    added = costs(load + block.seconds[0], memory + block.storage[0]) - before
    added[closed] = np.inf
    seconds, storage = float(block.seconds[0]), block.storage[0].tolist()
    order = np.argsort(added, kind="stable")[:count]
    fresh = list(zip(added[order].tolist(), order.tolist(), strict=True))[::-1]
    again: list[tuple[float, int]] = []
    held: dict[int, tuple[float, list[float], float]] = {}
    slots = []
    for _ in range(count):
        if again and (not fresh or again[0] < fresh[-1]):
            rank = heapq.heappop(again)[1]
            own, sizes, _ = held[rank]
        else:
            rank = fresh.pop()[1]
            own, sizes = float(load[rank]), memory[rank].tolist()
        own, sizes = own + seconds, _plus(sizes, storage)
        held[rank] = own, sizes, cost(own, sizes)
        more = cost(own + seconds, _plus(sizes, storage))
        heapq.heappush(again, (more - held[rank][2], rank))
        slots.append(rank)
    for rank, (_, _, after) in held.items():
        before[rank] = after
    return Dealt(tuple(slots), float(before.sum()))


def _plus(sizes: Sequence[float], more: Sequence[float]) -> list[float]:
    return [sizes[0] + more[0], sizes[1] + more[1], sizes[2] + more[2]]


def _by_rows(
    block: Block, count: int, load: Floats, memory: Floats, closed: Bools, costs: Costs
) -> Dealt:
    """A block costs its ranks more than the one before it: the cheapest of all steps are taken."""
    width, places = block.width, len(closed)
    load, memory = load.reshape(places, width), memory.reshape(places, width, 3)
    steps, rows = [costs(load, memory).sum(axis=1)], ROWS
    while True:
        while len(steps) <= min(rows, count):
            load, memory = load + block.seconds, memory + block.storage
            steps.append(costs(load, memory).sum(axis=1))
        reached = np.array(steps)
        added = np.maximum.accumulate(np.diff(reached, axis=0), axis=0)
        added[:, closed] = np.inf
        chosen = np.argsort(added, axis=None, kind="stable")[:count]
        enough = len(chosen) == count and np.isfinite(added.flat[chosen[-1]])
        if rows >= count or (enough and chosen.max() < added.size - places):
            break  # nothing of the last row is taken: none after it is
        rows *= 2
    slots = chosen % places
    counts = np.bincount(slots, minlength=places)
    total = float(reached[counts, np.arange(places)].sum())
    return Dealt(tuple((slots * width).tolist()), total)
