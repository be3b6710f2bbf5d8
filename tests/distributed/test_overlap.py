"""Ids, rows and gradients travel while a module computes, and it trains as without."""

from __future__ import annotations

import overlap_tasks as tasks
import pytest
from combinations import in_turn
from pool import Pool
from test_shard_embeddings import planned_tables as plan_of

from shardwright.core.sharding import TYPES

CLOSE = 1e-6


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("optimizer", "ids", "guarded", "world_size"),
    in_turn(["adagrad", "sgd"], [True, False], [True, False], [2, 3, 1], count=5),
)
def test_a_module_trains_as_on_one_process(
    pool: Pool, optimizer: str, ids: bool, guarded: bool, world_size: int
) -> None:
    kinds = ("row_wise",) if world_size == 3 else TYPES
    options = {"optimizer": optimizer, "ids": ids, "guarded": guarded}
    made = plan_of(world_size, kinds)
    for found, _ in pool.run(world_size, tasks.trained, made=made, **options):
        assert max(found.values()) <= CLOSE, found


@pytest.mark.parametrize("ids", [False, True])
def test_rows_are_on_their_way_while_the_dense_part_computes(pool: Pool, ids: bool) -> None:
    options = {"optimizer": "sgd", "ids": ids, "guarded": False}
    made = plan_of(2, ("row_wise",))
    for _, words in pool.run(2, tasks.trained, made=made, **options):
        first = words.index("bottom")
        before = [w for w in words[:first] if w.startswith("exchange rows")]
        assert before == ["exchange rows"] * 3  # not of the ids that the module makes itself
        assert words[first:].count("exchange rows done") == 4
        back = words.index("back")
        assert words[:back].count("exchange row gradients") == 4
        assert words[back:].count("exchange row gradients done") == 4
        asked = [place for place, w in enumerate(words) if w == "exchange counts"]
        assert sum(first < place < back for place in asked) == (4 if ids else 1)


def test_steps_of_every_kind_give_what_they_give_without(pool: Pool) -> None:
    for found in pool.run(2, tasks.odd_steps, made=plan_of(2)):
        assert max(found) <= CLOSE, found


def test_bad_ids_of_a_batch_to_come_are_named_with_that_batch(pool: Pool) -> None:
    text = "ids of table 'seen': expected ids from 0 to 10, got 11"
    found = pool.run(2, tasks.wrong_ahead, made=plan_of(2, ("row_wise",)))
    for rank, (fine, said, after) in enumerate(found):
        assert fine
        assert said.startswith("InputError: " if rank else "PeerError: ids were refused on rank 1")
        assert text.partition(":")[0] in said
        assert "got 11" in said
        assert after == "accepted"


def test_a_module_that_does_not_overlap_is_refused_by_name(pool: Pool) -> None:
    (said,) = pool.run(1, tasks.without_overlap, made=plan_of(1))
    assert said.startswith("model: expected one that overlaps its exchanges, got Late")


@pytest.mark.parametrize("guarded", [False, True])
def test_gradients_that_are_not_finite_are_named_on_every_rank_and_update_nothing(
    pool: Pool, guarded: bool
) -> None:
    for said, far in pool.run(2, tasks.not_finite, made=plan_of(2), guarded=guarded):
        assert "finite" in said
        assert "rank 1" in said
        assert far <= CLOSE
