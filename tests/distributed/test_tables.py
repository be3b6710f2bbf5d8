"""Sharded tables are whole tables, whatever the cut, the pooling and the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import table_tasks as tasks
import torch
from combinations import in_turn
from pool import Pool, Threads

from shardwright.core.sharding import TYPES, ShardingType, traits
from shardwright.job.planner import Communication
from shardwright.runtime.embeddings.update import RULES
from shardwright.runtime.units.parameter import DTYPES

CLOSE = 1e-6
ON = [(kind, 4 if traits(kind).within_hosts else 2) for kind in TYPES]  # ranks, two on a host


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("optimizer", "world_size"), in_turn([*RULES][::-1], [2, 3, 1, 4], count=8)
)
def test_tables_under_random_cuts_train_as_whole_ones(
    pool: Pool, optimizer: str, world_size: int
) -> None:
    for found in pool.run(world_size, tasks.random_cuts, optimizer=optimizer, seeds=range(6)):
        assert max(found) <= CLOSE, found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("optimizer", "overlap", "world_size"), in_turn([*RULES][::-1], ["ids", "rows"], [2, 3, 1])
)
def test_tables_whose_rows_travel_ahead_train_as_whole_ones(
    pool: Pool, optimizer: str, overlap: str, world_size: int
) -> None:
    options = {"optimizer": optimizer, "seeds": range(6), "overlap": overlap}
    for found in pool.run(world_size, tasks.random_cuts, **options):
        assert max(found) <= CLOSE, found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("on", "overlap", "dedup"), in_turn(ON[::-1], ["ids", "rows"], [True, False])
)
def test_rows_of_every_sharding_type_travel_ahead(
    pool: Pool, on: tuple[ShardingType, int], overlap: str, dedup: bool
) -> None:
    kind, world_size = on
    options = {"optimizer": "rowwise_adagrad", "kind": kind, "local": 2}
    assert (
        max(pool.run(world_size, tasks.typed_cuts, **options, overlap=overlap, dedup=dedup))
        <= CLOSE
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("optimizer", "world_size"), in_turn([*RULES][::-1], [2, 3, 1]))
def test_tables_on_disk_train_as_whole_ones_in_memory(
    pool: Pool, optimizer: str, world_size: int
) -> None:
    options = {"optimizer": optimizer, "seeds": range(20, 26), "disk": True}
    for found in pool.run(world_size, tasks.random_cuts, **options):
        assert max(found) <= CLOSE, found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ids_travel_beside_their_counts_while_they_stay_as_many(
    pool: Pool, world_size: int
) -> None:
    seeds = [8, 8, 8, 8, 2, 5, 5, 5, 3, 1, 4]
    for apart, beside, said in pool.run(world_size, tasks.batches_that_change, seeds=seeds):
        assert apart <= CLOSE
        assert (
            "ids of table 't1', feature 'f1', position 1: expected ids from 0 to 8, got 9" in said
        )
        assert beside[:2] == [0, 0]
        assert beside[2] == beside[3]  # and then there are more or fewer
        assert any(beside) == (world_size > 1)


HALF: list[Communication] = [("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("dtypes", "world_size"), in_turn(HALF, [2, 3]))
def test_rows_that_travel_in_half_precision_are_rounded_and_nothing_else(
    pool: Pool, dtypes: Communication, world_size: int
) -> None:
    step = max(torch.finfo(DTYPES[dtype]).eps for dtype in dtypes)
    options = {"optimizer": "sgd", "seeds": range(6), "communication": dtypes}
    for found in pool.run(world_size, tasks.random_cuts, **options):
        assert CLOSE < max(found) <= 4 * step, found  # a row is the sum of several that were


@pytest.mark.parametrize(("replicated", "world_size"), in_turn([False, True], [2, 1]))
def test_a_gradient_that_half_precision_has_no_number_for_updates_nothing(
    pool: Pool, world_size: int, replicated: bool
) -> None:
    for said, moved in pool.run(world_size, tasks.too_large_for_half, replicated=replicated):
        assert said.startswith("gradient of t0 on rank 0: expected finite numbers"), said
        assert moved == 0


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", RULES)
def test_tables_under_many_random_cuts_train_as_whole_ones(
    pool: Pool, optimizer: str, world_size: int
) -> None:
    seeds = range(10, 50)
    for found in pool.run(world_size, tasks.random_cuts, optimizer=optimizer, seeds=seeds):
        far = {seed: apart for seed, apart in zip(seeds, found, strict=True) if apart > CLOSE}
        assert not far


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("on", "optimizer"), in_turn(ON, RULES))
def test_rows_that_travel_once_train_as_whole_tables(
    pool: Pool, optimizer: str, on: tuple[ShardingType, int]
) -> None:
    kind, world_size = on
    options = {"optimizer": optimizer, "kind": kind, "local": 2, "dedup": True}
    assert max(pool.run(world_size, tasks.typed_cuts, **options)) <= CLOSE


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("on", "optimizer"), in_turn(ON[::-1], ["partial_rowwise_adam", "rowwise_adagrad", "sgd"])
)
def test_every_sharding_type_trains_as_whole_tables(
    pool: Pool, optimizer: str, on: tuple[ShardingType, int]
) -> None:
    kind, world_size = on
    options = {"optimizer": optimizer, "kind": kind, "local": 2}
    assert max(pool.run(world_size, tasks.typed_cuts, **options)) <= CLOSE


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("optimizer", "world_size"), in_turn([*RULES][::-1], [2, 1, 3]))
def test_replicas_learn_by_the_rows_that_were_looked_up_beside_dense_ones(
    pool: Pool, optimizer: str, world_size: int
) -> None:
    few, many = ((5, 4), (7, 4), (9, 1)), ((8, 4), (12, 20_000), (13, 4))
    for pooling, asked, wanted in (("sum", few, [True, False, False]), ("none", many, [False])):
        options = {"optimizer": optimizer, "pooling": pooling, "asked": asked}
        for apart, dense in pool.run(world_size, tasks.large_replicas, **options):
            assert apart <= CLOSE
            assert dense == wanted


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("optimizer", "world_size", "disk"), in_turn([*RULES][::-1], [2, 3], [True, False])
)
def test_a_checkpoint_goes_on_under_other_cuts_and_ranks(
    pool: Pool, tmp_path: Path, optimizer: str, world_size: int, disk: bool
) -> None:
    options = {"optimizer": optimizer, "folder": tmp_path, "disk": disk}
    pool.run(world_size, tasks.saved, seed=1, **options)
    for ranks, seed in ((world_size, 2), (1, 3)):
        found = pool.run(ranks, tasks.resumed, seed=seed, ranks=world_size, **options)
        assert max(found) <= CLOSE


def test_ids_may_come_in_any_form(pool: Pool) -> None:
    for found in pool.run(2, tasks.forms):
        first = found[0]
        assert {name: list(rows.shape) for name, rows in first.items()} == {
            "t0": [3, 4],
            "f1": [6, 2],
            "g1": [6, 2],
        }
        for other in found[1:]:
            assert all(torch.equal(other[name], rows) for name, rows in first.items())


WRONG = {
    "too large": "ids of table 't1', feature 'f1', position 2: expected ids from 0 to 4",
    "negative": "ids of table 't0', position 1: expected ids from 0 to 6, got -1",
    "float": "ids of table 't0': expected int64 or int32, got float32",
    "offsets": "ids of table 't0': expected offsets [B + 1] from 0 to its 2 values",
    "none": "ids of table 't0': expected ids [B] or [B, L], or (values, offsets [B + 1])",
    "weights": "ids of table 't0': expected 1 weights, got [2]",
    "no weights": "weights of ids of table 't0': expected a tensor, got list",
    "float offsets": "offsets of ids of table 't0': expected int64 or int32, got float32",
    "cube": "ids of table 't0': expected ids [B] or [B, L], or (values, offsets [B + 1])",
    "meta": "ids of 'tables': expected tensors that can be looked up, got 'Tensor on device ",
}


@pytest.mark.parametrize(
    ("replicated", "dtype"), [(False, "fp32"), (True, "fp32"), (False, "fp16"), (True, "bf16")]
)
def test_what_is_no_id_is_named_on_every_rank(pool: Pool, replicated: bool, dtype: str) -> None:
    options = {"wrongs": list(WRONG), "replicated": replicated, "dtype": dtype}
    first, second = pool.run(2, tasks.refused, **options)
    for wrong, text in WRONG.items():
        start = "PeerError: ids were refused on rank 1, no rows were moved: "
        assert first[wrong].startswith(start + text), wrong
        assert second[wrong].startswith(f"InputError: {text}"), wrong


def test_where_tables_are_on_some_ranks_the_rank_of_the_job_is_named(threads: Threads) -> None:
    found = threads.run(4, tasks.refused_in_halves)
    for place, other in ((0, 1), (2, 3)):
        for said in found[place]:
            assert said.startswith(f"PeerError: ids were refused on rank {other}, no rows were")


def test_what_is_no_id_of_a_batch_to_come_is_named_when_that_is_looked_up(pool: Pool) -> None:
    one, other = pool.run(2, tasks.refused_ahead, wrongs=list(WRONG))
    for wrong, text in WRONG.items():
        (before, first), (same, second) = one[wrong], other[wrong]
        assert before == same, wrong
        assert any(before), wrong
        start = "PeerError: ids were refused on rank 1, no rows were moved: "
        assert first.startswith(start + text), wrong
        assert second.startswith(f"InputError: {text}"), wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_of_ids_learn_as_in_torch(pool: Pool, world_size: int) -> None:
    for found in pool.run(world_size, tasks.learning_weights):
        assert max(found) <= CLOSE


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_half_weights_keep_their_dtype_and_round_once(
    pool: Pool, optimizer: str, dtype: str
) -> None:
    name, eps = {"fp16": ("torch.float16", 2**-11), "bf16": ("torch.bfloat16", 2**-8)}[dtype]
    for found in pool.run(2, tasks.half, dtype=dtype, optimizer=optimizer):
        weight, rows, apart = found
        assert (weight, rows) == (name, "torch.bfloat16")
        assert apart <= eps


@pytest.mark.parametrize("optimizer", RULES)
def test_gradients_accumulate_under_a_guard(pool: Pool, optimizer: str) -> None:
    assert max(pool.run(2, tasks.accumulated, optimizer=optimizer)) <= CLOSE


def test_a_learning_rate_follows_a_schedule(pool: Pool) -> None:
    for moved in pool.run(2, tasks.scheduled):
        rates = [0.05, 0.1, 0.1, 0.1 * 4 / 9, 0.1 / 9, 0.0]
        assert moved == pytest.approx(rates, abs=CLOSE)


@pytest.mark.parametrize(("world_size", "hosts"), [(2, 1), (4, 2)])
def test_the_tables_of_the_benchmark_take_every_type_on_hosts_and_devices(
    pool: Pool, world_size: int, hosts: int
) -> None:
    for found in pool.run(world_size, tasks.beside_peers, hosts=hosts):
        assert max(found.values()) <= CLOSE, found
