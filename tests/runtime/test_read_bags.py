"""Bags with one id each are read in a shorter way: it gives what the longer one does."""

from __future__ import annotations

import pytest
import torch

from shardwright.core.errors import InputError
from shardwright.runtime.embeddings.bags import Bags, features_of, read_bags
from shardwright.runtime.embeddings.route import Table

TABLES = [
    Table("a", "a", 7, 4, ("f", "g")),
    Table("b", "b", 5, 2, ("h",), pooling="mean"),
    Table("c", "c", 9, 2, ("k",), pooling="none"),
]
FEATURES = features_of(TABLES)
LIMITS = torch.tensor([feature.table.rows for feature in FEATURES])


def read(given: dict[str, object]) -> Bags:
    bags, pools = read_bags(given, FEATURES, LIMITS)
    assert not pools
    return bags


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_one_id_in_each_bag_is_read_alike_whatever_says_so(batch: int, dtype: torch.dtype) -> None:
    ids = torch.arange(4 * batch, dtype=dtype).view(4, batch) % 5
    pairs = [(own, torch.arange(batch + 1, dtype=dtype)) for own in ids]
    short = read({f.name: pair for f, pair in zip(FEATURES, pairs, strict=True)})
    for long in (
        read({f.name: [*pair] for f, pair in zip(FEATURES, pairs, strict=True)}),
        read({f.name: own for f, own in zip(FEATURES, ids, strict=True)}),
    ):
        assert isinstance(long.ids, torch.Tensor)
        assert isinstance(short.ids, torch.Tensor)
        assert short.ids.dtype == long.ids.dtype == torch.int64
        assert short.ids.tolist() == long.ids.tolist() == ids.tolist()
        for name in ("sizes", "results", "lengths", "weights", "shares"):
            assert [*getattr(short, name)] == [*getattr(long, name)], name


def test_offsets_of_as_many_bags_and_ids_need_not_be_of_one_id_in_each() -> None:
    ids, even = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])
    found = read({"f": (ids, even), "g": (ids, torch.tensor([0, 0, 2, 3])), "h": (ids, even),
                  "k": (ids, even)})  # fmt: skip
    lengths = found.lengths[1]
    assert lengths is not None
    assert lengths.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([1, 1, 2, 3], "offsets from 1 to 3"),
        ([0, 1, 2, 4], "offsets from 0 to 4"),
        ([0, 2, 1, 3], "lengths from 0 that add up to its values"),
    ],
)
def test_offsets_that_are_no_bags_are_refused(offsets: list[int], words: str) -> None:
    ids, even = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])
    with pytest.raises(InputError, match=words):
        read({"f": (ids, even), "g": (ids, torch.tensor(offsets)), "h": (ids, even),
              "k": (ids, even)})  # fmt: skip


def test_a_wrong_id_in_a_bag_of_its_own_is_named() -> None:
    ids, even = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])
    given = {f.name: (ids, even) for f in FEATURES} | {"h": (torch.tensor([4, 5, 0]), even)}
    with pytest.raises(InputError, match=r"table 'b', feature 'h', position 1: .* 0 to 4, got 5"):
        read(given)
