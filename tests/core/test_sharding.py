from __future__ import annotations

from typing import get_args

from shardwright.core.sharding import FREE, TYPES, ShardingType, traits


def test_every_sharding_type_has_its_traits() -> None:
    assert get_args(ShardingType) == TYPES == tuple(traits(t).name for t in TYPES)


def test_types_have_letters_of_their_own() -> None:
    assert len({traits(t).letters for t in TYPES}) == len(TYPES)


def test_one_type_holds_a_table_whole_on_one_rank_and_one_on_every_rank() -> None:
    assert [t for t in TYPES if traits(t).whole] == ["table_wise"]
    assert [t for t in TYPES if traits(t).replicated] == ["data_parallel"]


def test_rows_are_shared_by_all_ranks_or_by_those_of_a_host() -> None:
    parts = {t: traits(t).row_parts(16, 8) for t in TYPES if traits(t).cuts_rows}
    assert parts == {"row_wise": 16, "table_row_wise": 8, "grid_shard": 8}


def test_types_are_free_that_do_not_need_hosts() -> None:
    assert [t for t in TYPES if not traits(t).within_hosts] == list(FREE)
