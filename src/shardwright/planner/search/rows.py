"""The options of a space in one row each, as arrays; an item's are filled when first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardwright.planner.search.space import Bools, Floats, Ints, Item


class Rows:
    """What a search asks of many options at once; blocks count only where they are alike and do
    not lie on all ranks.

    ``everywhere`` [options] seconds that an option adds to every rank; ``counts`` how many blocks
    it has, ``seconds`` those of a block of one rank, ``wide`` the row of ``blocks`` [wide, group]
    of one that lies on more ranks of a group, 0 where it does not.
    """

    def __init__(self, items: Sequence[Item], ranks: int, group: int) -> None:
        self._items, self._ranks = items, ranks
        sizes = [len(item.options) for item in items]
        self._first: Ints = np.concatenate([[0], np.cumsum(sizes)])
        total = int(self._first[-1])
        self._known = [False] * len(items)
        self.everywhere: Floats = np.zeros(total)
        self.is_uniform: Bools = np.zeros(total, bool)
        self.counts: Ints = np.zeros(total, np.int64)
        self.seconds: Floats = np.zeros(total)
        self.wide: Ints = np.zeros(total, np.int64)
        self.blocks: Floats = np.zeros((64, group))
        self._used = 1  # rows of ``blocks``

    def numbers(self, ways: Sequence[tuple[int, int]]) -> Ints:
        """The rows of items' options."""
        known, first = self._known, self._first
        for item in {item for item, _ in ways if not known[item]}:
            self._fill(item)
        found: Ints = np.array([first[item] + option for item, option in ways])
        return found

    def _fill(self, item: int) -> None:
        for row, option in enumerate(self._items[item].options, int(self._first[item])):
            self.everywhere[row] = option.everywhere
            self.is_uniform[row] = option.is_uniform
            width = option.widths[0]
            if option.is_uniform or width >= self._ranks:
                continue
            blocks = option.blocks
            if blocks[0] is not blocks[-1]:
                continue
            self.counts[row] = len(blocks)
            if width == 1:
                self.seconds[row] = blocks[0].seconds[0]
            else:
                if self._used == len(self.blocks):
                    self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
                self.blocks[self._used, :width] = blocks[0].seconds
                self.wide[row] = self._used
                self._used += 1
        self._known[item] = True
