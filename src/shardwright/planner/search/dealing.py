"""Blocks that are alike dealt to the ranks, each where it adds least to what these cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.space import Bools, Floats, Ints

SPARE_ROWS = 2  # blocks of a slot that are looked at first, above twice an even share

# What ranks cost at their seconds and bytes.
Costs = Callable[[Floats, Floats], Floats]


class Lots(NamedTuple):
    """Lots of blocks; those of a lot are alike. How many there are (``counts`` [lots]), what one
    takes (``seconds`` [lots, width], ``storage`` [lots, width, 3]), and the slots, such as hosts,
    that they may go to: ``load`` [lots, slots, width] and ``memory`` [lots, slots, width, 3] there
    before, ``closed`` [lots, slots] where they may not."""

    counts: Ints
    seconds: Floats
    storage: Floats
    load: Floats
    memory: Floats
    closed: Bools

    def at(self, kept: Ints) -> Lots:
        """Some of the lots."""
        counts, seconds, storage, load, memory, closed = self
        return Lots(
            counts[kept], seconds[kept], storage[kept], load[kept], memory[kept], closed[kept]
        )


def at_least(lots: Lots, costs: Costs) -> Floats:
    """What all slots cost at least with each lot: as if every block cost what the cheapest slot
    takes for the first."""
    before = costs(lots.load, lots.memory)
    after = costs(lots.load + lots.seconds[:, None], lots.memory + lots.storage[:, None])
    added = np.add.reduce(after - before, axis=2)
    if lots.closed.any():
        added[lots.closed] = np.inf
    least: Floats = np.add.reduce(before, axis=(1, 2)) + lots.counts * added.min(axis=1)
    return least


class Dealt(NamedTuple):
    """How many blocks of each lot lie on each slot [lots, slots], whether any slot was open, and
    what the dearest of its blocks adds [lots]."""

    counts: Ints
    opened: Bools
    dearest: Floats


def deal(lots: Lots, costs: Costs) -> Dealt:
    """Deals the blocks of each lot.

    A block costs its slot more than the one before it, so the cheapest of all steps are taken, in
    as many rows as are needed.
    """
    number, places, _ = lots.load.shape
    most = int(lots.counts.max())
    rows = min(most, 2 * -(-most // places) + SPARE_ROWS)
    while True:
        step = np.arange(rows + 1.0)[:, None, None]
        reached = np.add.reduce(
            costs(
                lots.load[:, None] + step * lots.seconds[:, None, None],
                lots.memory[:, None] + step[..., None] * lots.storage[:, None, None],
            ),
            axis=3,
        )
        added = np.maximum.accumulate(reached[:, 1:] - reached[:, :-1], axis=1)
        if lots.closed.any():
            added = np.where(lots.closed[:, None], np.inf, added)
        taken, last = _cheapest(added.reshape(number, -1), lots.counts)
        taken = taken.reshape(added.shape)
        if rows == most or not (taken[:, -1].any() or np.isinf(last).any()):
            break  # nothing of the last row is taken: none after it is
        rows = min(2 * rows, most)
    counts: Ints = taken.sum(axis=1)
    opened: Bools = np.logical_or.reduce(~lots.closed, axis=1)
    return Dealt(counts, opened, last)


def _cheapest(added: Floats, counts: Ints) -> tuple[Bools, Floats]:
    """The ``counts`` [lots] cheapest of ``added`` [lots, steps], the first of equal ones; and what
    the last of them adds, without end where there are too few."""
    lots, steps = added.shape
    last = np.sort(added)[np.arange(lots), np.minimum(counts, steps) - 1]
    last[counts > steps] = np.inf
    cheaper, alike = added < last[:, None], added == last[:, None]
    left = counts - cheaper.sum(axis=1)
    return cheaper | (alike & (alike.cumsum(axis=1) <= left[:, None])), last
