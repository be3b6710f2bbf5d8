from __future__ import annotations

import msgspec
import pytest

from shardwright.core.placement import (
    BlockShard,
    Flat,
    Owned,
    Placement,
    Replicate,
    Shard,
    describe,
)

ALL = [
    (Replicate(), "Replicate()", b'{"placement":"replicate"}'),
    (Shard(), "Shard(0)", b'{"placement":"shard","dim":0}'),
    (Shard(1), "Shard(1)", b'{"placement":"shard","dim":1}'),
    (Owned(3), "Owned(3)", b'{"placement":"owned","rank":3}'),
    (BlockShard(32, 1), "BlockShard(32, 1)", b'{"placement":"block_shard","size":32,"dim":1}'),
    (Flat(), "Flat()", b'{"placement":"flat"}'),
]


@pytest.mark.parametrize(("placement", "text", "encoded"), ALL)
def test_a_placement_describes_itself_as_it_is_written_in_code(
    placement: Placement, text: str, encoded: bytes
) -> None:
    assert describe(placement) == text
    assert eval(text) == placement


@pytest.mark.parametrize(("placement", "text", "encoded"), ALL)
def test_a_placement_comes_back_from_json(placement: Placement, text: str, encoded: bytes) -> None:
    assert msgspec.json.encode(placement) == encoded
    assert msgspec.json.decode(encoded, type=Placement) == placement


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'somewhere'"):
        msgspec.json.decode(b'{"placement":"somewhere"}', type=Placement)
