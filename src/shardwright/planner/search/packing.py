"""Blocks of one rank each packed so that the fullest rank holds little, one rank after the other.

A rank gets the largest block that is left and others with it that fill it up to what may stay free
on all ranks together. Where memory is tight that is little, so few fillings are worth a look.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.planner.search.space import Assignment, Space

MAX_RANKS, MAX_BLOCKS = 256, 1_000
LOOKS = 50_000  # at a block, in one attempt
ATTEMPTS = 12

Blocks = list[tuple[int, int]]  # bytes and number of each, the largest first


@dataclass
class _Attempt:
    """Packs blocks into ranks of ``capacity`` bytes, within so many ``looks``."""

    capacity: int
    looks: int = LOOKS

    def packed(self, blocks: Blocks, ranks: int) -> list[Blocks] | None:
        """The blocks of every rank; None where no packing is found."""
        spare = ranks * self.capacity - sum(size for size, _ in blocks)
        if spare < 0:
            return None
        if ranks == 1 or not blocks:
            return [blocks] + [[]] * (ranks - 1)
        first, rest = blocks[0], blocks[1:]
        left = [*itertools.accumulate((size for size, _ in reversed(rest)), initial=0)][::-1]
        room = self.capacity - first[0]
        for chosen in self._fillings(rest, left, 0, room - spare, room):
            inside = set(chosen)
            others = [block for index, block in enumerate(rest) if index not in inside]
            found = self.packed(others, ranks - 1)
            if found is not None:
                return [[first, *(rest[index] for index in chosen)], *found]
            if self.looks <= 0:
                break
        return None

    def _fillings(
        self, blocks: Blocks, left: Sequence[int], start: int, least: int, most: int
    ) -> Iterator[tuple[int, ...]]:
        """Blocks from ``start`` on of ``least`` to ``most`` bytes together, large ones first;
        ``left[i]`` are the bytes of all from ``i`` on."""
        last = -1
        for index in range(start, len(blocks)):
            self.looks -= 1
            if left[index] < least or self.looks <= 0:
                return
            size = blocks[index][0]
            if size <= most and size != last:  # of equal ones, the first that is left out
                last = size
                for more in self._fillings(blocks, left, index + 1, least - size, most - size):
                    yield (index, *more)
        if least <= 0:
            yield ()


def repacked(space: Space, found: Assignment, tier: int, enough: int) -> Assignment:
    """The same options with blocks of one rank elsewhere, where the fullest rank then holds less
    of a memory; of less than ``enough`` bytes it need not be. Others lie on all ranks."""
    blocks: Blocks = []
    base = 0
    where: list[tuple[int, int]] = []
    for item, number in enumerate(found.options):
        for index, block in enumerate(space.items[item].options[number].blocks):
            if block.width == 1:
                blocks.append((int(block.storage[0, tier]), len(where)))
                where.append((item, index))
            elif block.width == space.ranks:
                base += int(block.storage[:, tier].max())
            else:
                return found
    if space.constrained or space.ranks > MAX_RANKS or not 0 < len(blocks) <= MAX_BLOCKS:
        return found
    blocks.sort(reverse=True)
    filled = [0] * space.ranks
    for size, number in blocks:
        item, index = where[number]
        filled[found.slots[item][index]] += size
    best = _least(blocks, space.ranks, max(filled), enough - base)
    if best is None:
        return found
    slots = [list(own) for own in found.slots]
    for rank, own in enumerate(best):
        for _, number in own:
            item, index = where[number]
            slots[item][index] = rank
    return Assignment(found.options, tuple(tuple(own) for own in slots))


def _least(blocks: Blocks, ranks: int, most: int, enough: int) -> list[Blocks] | None:
    """A packing in ranks of less than ``most`` bytes, of ``enough`` if it can be; else the least
    that bisection finds."""
    low = max(blocks[0][0], -(-sum(size for size, _ in blocks) // ranks))
    best, high = None, most
    for attempt in range(ATTEMPTS):
        if low >= high:
            break
        tried = enough if attempt == 0 and low <= enough < high else (low + high) // 2
        found = _Attempt(tried).packed(blocks, ranks)
        if found is None:
            low = tried + 1
        else:
            best, high = found, max(sum(size for size, _ in own) for own in found)
            if high <= enough:
                break
    return best
