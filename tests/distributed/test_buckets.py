"""Buckets: parameters that stay whole, cut from the last to the first."""

from __future__ import annotations

import bucket_tasks as tasks
import pytest
from pool import Pool

TOLERANCE = 1e-6


CASES = [  # ranks, way, one sum of a step, flat tensors
    *((2, way, i % 2 == 0, i // 2 % 2 == 0) for i, way in enumerate(tasks.WAYS)),
    *((3, way, i % 2 == 1, i // 2 % 2 == 1) for i, way in enumerate(tasks.WAYS) if i % 2),
    (1, "zero2 rows ahead", False, True),
]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("ranks", "way", "holds", "flat"), CASES)
def test_buckets_train_as_one_process_with_two_optimizers(
    pool: Pool, ranks: int, way: str, holds: bool, flat: bool
) -> None:
    _hold(pool, ranks, way, holds, flat)


@pytest.mark.product
@pytest.mark.parametrize("flat", [True, False], ids=["flat optimizer", "model.parameters"])
@pytest.mark.parametrize("holds", [True, False], ids=["one sum", "a sum each"])
@pytest.mark.parametrize("way", tasks.WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_they_train_so_in_every_case(
    pool: Pool, world_size: int, way: str, holds: bool, flat: bool
) -> None:
    _hold(pool, world_size, way, holds, flat)


def _hold(pool: Pool, world_size: int, way: str, holds: bool, flat: bool) -> None:
    given = {"way": way, "size": tasks.SIZE, "holds": holds, "flat": flat}
    for apart, buckets, by_step in pool.run(world_size, tasks.train, **given):
        assert apart <= TOLERANCE
        assert buckets == 5
        kinds = 2 if way in ("zero2 owned", "zero2 rows ahead") else 1  # scalars stay whole
        sums = 1 if holds else tasks.BACKWARDS
        for found in by_step:
            assert found.get("gather", 0) == (0 if "ddp" in way else buckets)
            assert buckets * sums <= found["reduce"] <= kinds * buckets * sums


@pytest.mark.parametrize(("world_size", "size"), [(2, 1), (3, 10**9)])
def test_any_size_of_buckets_will_do(pool: Pool, world_size: int, size: int) -> None:
    given = {"way": "zero2 ahead", "size": size, "holds": False, "flat": True}
    for apart, buckets, _ in pool.run(world_size, tasks.train, **given):
        assert apart <= TOLERANCE
        assert buckets == (1 if size > 1 else 28)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("config", "ranks"),
    [*((config, 2) for config in reversed(tasks.CONFIGS)), ("both", 3), ("nothing", 1)],
)
def test_megatrons_names_train_as_one_process(pool: Pool, ranks: int, config: str) -> None:
    given = tasks.CONFIGS[config]
    gathers = bool(given.get("use_distributed_optimizer"))
    for found in pool.run(ranks, tasks.train_as_megatron, config=config):
        apart, buckets, by_step, waited, rested = found
        assert apart <= TOLERANCE
        assert rested
        assert buckets == (5 if "bucket_size" in given else 1)
        assert waited == [not given.get("overlap_grad_reduce")] * tasks.STEPS
        assert [calls["reduce"] for calls in by_step] == [buckets] * tasks.STEPS
        # the first step's forward gathers, the second one's too, and start_param_sync after it
        # gathers for the third, and again at its end
        assert [calls.get("gather", 0) for calls in by_step] == [
            n * buckets * gathers for n in (1, 2, 1)
        ]


def test_a_bucket_is_reduced_when_its_last_gradient_is_there(pool: Pool) -> None:
    for events, names in pool.run(2, tasks.order, way="zero2 ahead"):
        assert "last.weight" in names[0]
        assert "first.weight" in names[-1]
        sums = [event for event in events if event.endswith("reduce")]
        assert sums == [f"bucket {number} reduce" for number in range(5)]
        # what block 1 computes backward comes after the sum of the bucket that has the last layer
        assert events.index("bucket 0 reduce") < events.index("block 1 backward")
        assert events.index("bucket 1 reduce") < events.index("block 0 backward")
        assert events.index("bucket 4 reduce") > events.index("block 0 backward")


def test_a_bucket_is_gathered_before_the_forward_that_needs_it(pool: Pool) -> None:
    for events, _ in pool.run(2, tasks.order, way="zero2 ahead"):
        gathers = [event for event in events if event.endswith("gather")]
        assert sorted(gathers) == [f"bucket {number} gather" for number in range(5)]
        assert events.index("bucket 4 gather") < events.index("block 0 ran")
        assert events.index("bucket 0 gather") > events.index("block 0 ran")
        assert events.index("bucket 0 gather") < events.index("block 2 ran")
    for events, _ in pool.run(2, tasks.order, way="zero2"):
        gathers = [event for event in events if event.endswith("gather")]
        assert events[:5] == gathers


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("ranks", "way", "saves"),
    [
        *((2, "zero1 ahead", ""), (2, "zero2", "kept"), (2, "ddp ahead", "reentrant")),
        *((3, "zero2", "reentrant"), (3, "ddp ahead", ""), (3, "zero1 ahead", "kept")),
    ],
)
def test_parameters_may_be_used_elsewhere_and_by_some_ranks(
    pool: Pool, ranks: int, way: str, saves: str
) -> None:
    for apart in pool.run(ranks, tasks.odd_model, way=way, saves=saves):
        assert apart <= TOLERANCE


@pytest.mark.parametrize(
    ("ranks", "way", "orders"),
    [
        *((2, "zero2 ahead", orders) for orders in tasks.ORDERS),
        (3, "zero1 ahead", "another order"),
        (3, "zero2 rows ahead", "one skips at first"),
        (1, "zero2 ahead", "all skip"),
        (2, "ddp ahead", "another order"),
    ],
)
def test_modules_may_run_in_another_order_or_not_at_all(
    pool: Pool, ranks: int, way: str, orders: str
) -> None:
    assert max(pool.run(ranks, tasks.branching, way=way, orders=orders)) <= TOLERANCE


@pytest.mark.parametrize(("ranks", "way"), [(2, "zero2 ahead"), (3, "ddp ahead")])
def test_a_checkpoint_may_be_around_the_whole_model(pool: Pool, ranks: int, way: str) -> None:
    assert max(pool.run(ranks, tasks.saved_as_a_whole, way=way)) <= TOLERANCE


@pytest.mark.parametrize("unshards", [True, False])
@pytest.mark.parametrize("way", ["ddp", "zero2 ahead"])
def test_weights_that_change_before_their_backward_are_refused(
    pool: Pool, way: str, unshards: bool
) -> None:
    given = {"way": way, "unshards": unshards}
    for found in pool.run(2, tasks.updated_before_its_backward, **given):
        assert "expected the weights of its forward" in found


def test_buckets_are_copied_saved_and_moved(pool: Pool) -> None:
    for found in pool.run(2, tasks.copies):
        assert found == (True, True, True, {1}, [])


def test_instances_of_the_distributed_optimizer(pool: Pool) -> None:
    assert max(pool.run(4, tasks.on_grid)) <= TOLERANCE


def test_gradients_may_be_summed_in_fp32(pool: Pool) -> None:
    for reduced, dtypes in pool.run(2, tasks.in_another_dtype):
        assert [str(dtype) for dtype in reduced] == ["torch.float32"]
        assert [str(dtype) for dtype in dtypes] == ["torch.bfloat16"]


REFUSALS = {
    "zero 3": "InputError: zero beside bucket_size: expected zero=1 or 2, or placements=",
    "no size": "InputError: bucket_size: expected 1 or more elements, or None, got 0",
    "by hand": "InputError: register_hooks: expected True beside bucket_size, got False",
    "unknown": "InputError: Buckets: expected a field of Megatron-LM's Dist",
    "instances": "UnsupportedError: num_distributed_optimizer_instances: expected 1, got 2. Give a",
    "nans": "UnsupportedError: check_for_nan_in_grad: expected False, got True. Clip with",
    "gather alone": "InputError: overlap_param_gather: expected use_distributed_optimizer and ",
}


def test_what_cannot_be_is_refused_in_a_line(pool: Pool) -> None:
    for found in pool.run(2, tasks.refusals):
        for what, wanted in REFUSALS.items():
            assert found[what].startswith(wanted)
            assert "\n" not in found[what]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_dropped_leaves_nothing_to_the_next_one(pool: Pool, ranks: int) -> None:
    assert max(pool.run(ranks, tasks.dropped)) <= 1e-6
