"""Rectangles and ranges, against counting every element."""

from __future__ import annotations

import math
import random

import checkpoint_cases as cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.runtime.checkpoint.region import (
    Box,
    boxes_of_range,
    check_region,
    is_range,
    shared,
    tiles,
)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def count(shape: tuple[int, ...], region: Box) -> np.ndarray:
    """1 where the region is, 0 elsewhere."""
    mark = np.zeros(shape, dtype=np.int64)
    if is_range(shape, region.offsets):
        mark.reshape(-1)[region.offsets[0] : region.offsets[0] + region.sizes[0]] = 1
    else:
        mark[tuple(slice(o, o + s) for o, s in zip(*region, strict=True))] = 1
    return mark


@given(shapes, st.data())
def test_a_range_is_at_most_2n_minus_1_rectangles_in_its_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = list(boxes_of_range(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    numbers = np.arange(numel).reshape(shape)
    read = [numbers[tuple(slice(o, o + s) for o, s in zip(*b, strict=True))] for b in boxes]
    assert [n for part in read for n in part.reshape(-1).tolist()] == list(range(start, stop))


@given(shapes, st.integers(0, 2**20))
def test_what_two_regions_share_is_found_exactly_once(shape: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    first, second = (
        chance.choice(chance.choice(cases.CUTS)(shape, 1 + chance.randrange(4), chance))
        for _ in range(2)
    )
    for one in first:
        for other in second:
            found = np.zeros(shape, dtype=np.int64)
            for box, _, _ in shared(shape, one, other):
                found += count(shape, box)
            assert (found == count(shape, one) * count(shape, other)).all()


@given(shapes, st.integers(0, 2**20), st.booleans())
def test_tiles_counts_every_element(shape: tuple[int, ...], seed: int, spoil: bool) -> None:
    chance = random.Random(seed)
    cut = chance.choice(cases.CUTS)(shape, 1 + chance.randrange(4), chance)
    regions = [region for rank in cut for region in rank if 0 not in region.sizes]
    if spoil:  # one part moved, doubled or lost: sums of sizes may still be right
        spoiled = regions.pop(chance.randrange(len(regions)))
        others = chance.choice(cases.CUTS)(shape, 2, chance)
        regions += chance.choice([[], [spoiled, spoiled], *others])
        regions = [region for region in regions if 0 not in region.sizes]
    counted = sum((count(shape, region) for region in regions), np.zeros(shape, dtype=np.int64))
    assert tiles(shape, regions) == bool((counted == 1).all())


def test_parts_that_overlap_and_leave_a_gap_of_the_same_size_do_not_tile() -> None:
    pinwheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert tiles((3, 3), pinwheel)
    assert not tiles((3, 3), [*pinwheel[:-1], Box((0, 0), (1, 1))])


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((4, 4), (0, 0), (5, 4)),
        ((4, 4), (-1, 0), (2, 4)),
        ((4, 4), (10,), (7,)),
        ((4, 4), (0, 0, 0), (1, 1, 1)),
        ((4,), (0,), ()),
        ((2,) * 13, (0,), (1,)),
        ((2**40, 2**40), (0,), (1,)),
    ],
)
def test_a_region_outside_its_tensor_is_refused(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match="weight: expected"):
        check_region("weight", shape, offsets, sizes)
