"""AdamW in 8 bits: codes, scales and weights of any sharding are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eight_bit_tasks as tasks
import probe_tasks
import pytest
from pool import Pool

_GIVEN = list(tasks.GIVEN)
_WAYS = [way for way in tasks.WAYS if way != "alone"]
CASES = [
    *((2, way, _GIVEN[number % 4]) for number, way in enumerate(_WAYS)),
    *((3, way, _GIVEN[number % 4]) for number, way in enumerate(_WAYS[::2], 1)),
    *((2, "alone", "parameters"), (2, "flat", "parameters"), (1, "mixture", "groups")),
]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("ranks", "way", "given"), CASES)
def test_every_sharding_is_one_process_bit_for_bit(
    pool: Pool, ranks: int, way: str, given: str
) -> None:
    assert pool.run(ranks, tasks.trained, way=way, given=given) == [([], 0)] * ranks


@pytest.mark.product
@pytest.mark.parametrize("given", tasks.GIVEN)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_so_it_is_whatever_the_optimizer_is_given(
    pool: Pool, world_size: int, way: str, given: str
) -> None:
    found = pool.run(world_size, tasks.trained, way=way, given=given)
    assert found == [([], 0)] * world_size


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("zero", "given"),
    [
        ((2, 3), "flat tensors"),
        *((3, "parameters"), (2, "flat tensors"), (1, "parameters")),
        *(((2, 3), "parameters"), ((1, 3), "flat tensors")),
    ],
    ids=str,
)
def test_replicas_of_shards_are_one_process(pool: Pool, zero: object, given: str) -> None:
    pool.run(4, probe_tasks.make_grids)
    assert pool.run(4, tasks.on_a_grid, zero=zero, given=given) == [([], 0)] * 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", ["flat", "zero 1", "offloaded"])
def test_gradients_of_several_backwards_add_up(pool: Pool, way: str) -> None:
    found = pool.run(2, tasks.trained, way=way, given="flat tensors", accumulate=True)
    assert found == [([], 0)] * 2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "flat", "flat tensors"), (3, "flat", "flat tensors")),
        ((3, "flat", "one flat tensor"), (2, "owned", "parameters")),
        ((4, "zero 1", "flat tensors"), (1, "replicated", "flat tensors")),
        ((1, "alone", "parameters"), (4, "flat", "groups")),
        ((2, "mixture", "parameters"), (3, "blocks of 512", "flat tensors")),
        ((3, "offloaded", "flat tensors"), (2, "mixture", "flat tensors")),
        ((2, "buckets", "flat tensors"), (4, "zero 2", "one flat tensor")),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_under_other_ranks_and_cuts(
    pool: Pool, tmp_path: Path, before: tuple[int, str, str], after: tuple[int, str, str]
) -> None:
    ranks, way, given = before
    pool.run(ranks, tasks.saved, way=way, given=given, folder=tmp_path)
    ranks, way, given = after
    found = pool.run(ranks, tasks.resumed, way=way, given=given, folder=tmp_path)
    assert found == [[]] * ranks


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "flat", "flat tensors"), (3, "offloaded", "parameters")),
        ((3, "zero 2", "parameters"), (2, "mixture", "flat tensors")),
        ((4, "buckets", "one flat tensor"), (1, "owned", "parameters")),
    ],
    ids=str,
)
def test_frozen_parameters_have_no_states_under_any_ranks_and_cuts(
    pool: Pool, tmp_path: Path, before: tuple[int, str, str], after: tuple[int, str, str]
) -> None:
    """The whole of a unit, and large and small ones of the other."""
    frozen = [f"first.{name}" for name in tasks.SHAPES]
    frozen += ["second.up", "second.table", "second.bias"]
    ranks, way, given = before
    pool.run(ranks, tasks.saved, way=way, given=given, folder=tmp_path, frozen=frozen)
    ranks, way, given = after
    found = pool.run(ranks, tasks.resumed, way=way, given=given, folder=tmp_path, frozen=frozen)
    assert found == [[]] * ranks


@pytest.mark.parametrize(
    ("way", "given", "fresh"),
    [("owned", "parameters", False), ("flat", "one flat tensor", True)],
)
def test_states_by_name_go_on_in_another_optimizer(
    pool: Pool, way: str, given: str, fresh: bool
) -> None:
    assert pool.run(2, tasks.handed_on, way=way, given=given, fresh=fresh) == [[]] * 2


@pytest.mark.parametrize("given", ["flat tensors", "parameters"])
def test_torchs_state_dict_of_a_rank_goes_on_bit_for_bit(pool: Pool, given: str) -> None:
    assert pool.run(2, tasks.local_states, given=given) == [[]] * 2


FLAT = {"shard_strategy": "flat", "block_size": 256}
ROWS = dict.fromkeys(("up", "gate", "table", "bias"), 0) | {"norm": None, "cube": 0}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("sizes", "options", "frozen"),
    [
        ((2, 2), FLAT, ()),
        ((2, 2), FLAT, ("gate", "norm", "bias")),
        ((1, 2, 2), FLAT | {"zero": 2}, ()),
        ((2, 1, 2), {"shard_strategy": "param_boundary"}, ("up",)),
        ((1, 4), FLAT | {"cpu_offload": True}, ()),
        ((2, 2), {"block_size": 256}, ("scale",)),
    ],
    ids=str,
)
def test_parts_of_tensor_parallelism_that_are_whole_blocks_are_one_process(
    pool: Pool, tmp_path: Path, sizes: tuple[int, ...], options: dict[str, Any], frozen: tuple[str]
) -> None:
    given = {"sizes": sizes, "options": options, "shapes": tasks.JOINT, "dims": ROWS}
    found = pool.run(4, tasks.jointly, frozen=frozen, folder=tmp_path, **given)
    assert found == [[]] * 4


def test_parts_that_divide_blocks_are_refused_in_a_line(pool: Pool) -> None:
    for shape, dim in (((64, 128), 1), ((130, 64), 0)):
        for found in pool.run(4, tasks.joint_refusal, options=FLAT, shape=shape, dim=dim):
            assert "up: expected cuts between blocks of 256 elements, which AdamW8bit" in found
            assert found.endswith(
                f"of {shape} on rank {1 - dim}. Tensor parallelism cut it before: give it to "
                "another optimizer, such as AdamW."
            )


REFUSALS = {
    "cuts anywhere": (
        "InputError: {} of unit 'Sum': expected cuts between blocks of 256 elements, which "
        "AdamW8bit quantizes together, got cuts anywhere. Shard with fully_shard_flat(..., "
        "block_size=256)."
    ),
    "parameters": "expected cuts between blocks of 256 elements, which AdamW8bit quantizes",
    "another block": "blocks of 512 elements, which AdamW8bit quantizes together, got multiples of",
    "rows": "got Shard(0) of shape (",
    "columns": "up: expected cuts between blocks of 256 elements, which an optimizer quantizes "
    "together, got Shard(1) of shape (80, 64). Use shard_strategy='flat', Owned(rank) or "
    "BlockShard(4).",
    "no size": "InputError: block_size: expected 1 or more elements, got 0.",
    "FSDP2": "UnsupportedError: AdamW8bit: expected whole parameters, or those of "
    "fully_shard_flat, got a DTensor of another runtime. Shard with fully_shard_flat(..., "
    "block_size=256), or use torchao's.",
}


def test_what_divides_blocks_is_refused_in_a_line(pool: Pool) -> None:
    for found in pool.run(2, tasks.refusals):
        assert found.keys() == REFUSALS.keys()
        for name, text in REFUSALS.items():
            for part in text.split("{}"):
                assert part in found[name], name
            assert "\n" not in found[name]


def test_states_of_another_optimizer_are_refused_in_a_line(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, tasks.other_states, folder=tmp_path):
        assert "which AdamW8bit keeps, got exp_avg, exp_avg_sq, step" in found


@pytest.mark.parametrize("world_size", [1, 4])
def test_an_element_has_two_bytes_of_codes_and_a_block_two_scales(
    pool: Pool, world_size: int
) -> None:
    small, tensors = 2 * (4095 + 13 + 1), 4
    every = pool.run(world_size, tasks.kept_bytes)
    assert sum(codes for _, codes in every) >= 2 * sum((80 * 64, 17 * 257, 4099, 300 * 18))
    least = sum(nbytes - codes * 2 - codes // 256 * 8 - 4 * tensors for nbytes, codes in every)
    assert 8 * small <= least < 8 * (small + 256 * world_size * 2 + 64)
