"""``fully_shard_flat`` on its own: states, views, what a unit may be, and what it refuses."""

from __future__ import annotations

import pytest
import unit_tasks as tasks
from pool import Pool, Threads

TOLERANCE = 1e-6

on_two_or_three = pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("mixture", 2), ("flat", 2)),
        *(
            pytest.param(strategy, 3, marks=pytest.mark.slow)
            for strategy in ("per_param", "param_boundary", "mixture")
        ),
    ],
)
strategies = pytest.mark.parametrize("strategy", tasks.STRATEGIES)


@on_two_or_three
def test_states_show_what_they_own(pool: Pool, strategy: str, ranks: int) -> None:
    kinds = {"ShardTensor"} if strategy == "flat" else {"ShardTensor", "Tensor"}  # scalars
    for seen, equal, late, equal_again in pool.run(ranks, tasks.states, strategy=strategy):
        first, second, third = seen
        assert first == third == ("sharded", kinds, {0, 1, 2}, 0)
        assert second[:3] == ("unsharded", {"Tensor"}, {0, 1, 2})
        assert second[3] > 0
        assert equal
        assert late.startswith("InputError: first.weight of unit 'Net': expected state UNSHARDED")
        assert late.endswith("Call unshard() first.")
        assert equal_again


@on_two_or_three
def test_views_lie_in_the_byte_storage_where_the_infos_say(
    pool: Pool, strategy: str, ranks: int
) -> None:
    for inside, equal, writes in pool.run(ranks, tasks.views, strategy=strategy):
        assert inside
        assert equal
        assert writes


@strategies
def test_a_step_makes_no_view_anew(pool: Pool, strategy: str) -> None:
    for same, shared in pool.run(2, tasks.nothing_new_in_a_step, strategy=strategy):
        assert same
        assert shared


def test_a_reduction_that_is_dropped_has_its_buffer_until_it_is_over(threads: Threads) -> None:
    for during, after in threads.run(1, tasks.dropped_on_its_way):
        assert during > after == 0


def test_shards_of_a_buffer_are_views_of_it(pool: Pool) -> None:
    (found,) = pool.run(1, tasks.shards_of_a_buffer)
    numels, values, refused = found
    assert numels == [3, 3, 3, 3]
    assert values == [0, 1, 2, 3, 4, 5, -1, -1, -1, 9, 10, 11]
    assert refused.startswith("InputError: buffer: expected one dimension, of a multiple of 5")


REFUSALS = {
    "strategy": "InputError: shard_strategy: expected one of per_param, param_boundary,",
    "offload of nothing": "InputError: cpu_offload: expected True or False, got 'states'",
    "offload beside NCCL alone": "InputError: cpu_offload: expected a process group that also "
    "moves tensors in host memory, got one of cuda:nccl. Begin with init_process_group('cpu:gloo,",
    "two placements": "InputError: placements: expected one placement",
    "no such dim": "InputError: 0.weight: expected a dim from 0 to 1 of shape (7, 5)",
    "no such owner": "InputError: 0.weight: expected an owner from 0 to 1, got Owned(2)",
    "blocks of nothing": "InputError: 0.weight: expected blocks of 1 or more, got 0",
    "tied to another unit": "the same parameter as weight of unit 'Linear'",
    "inside a unit": "that no other unit has, got one that is part of unit 'Sequential'",
    "twice": "InputError: unit 'Sequential': expected modules that are not sharded yet",
    "nothing to shard": "InputError: unit 'ReLU': expected at least one parameter of its own",
    "a list of no modules": "InputError: module: expected a module, or several",
    "a container": "InputError: module: expected modules with a forward",
    "a DTensor": "UnsupportedError: 0.weight: expected tensor parallelism on another dimension",
    "sparse": "UnsupportedError: 0.weight: expected a dense tensor",
    "a dtype": "UnsupportedError: still: expected one of the dtypes",
    "inference": "InputError: weight: expected a tensor made outside of inference mode",
    "half meta": "2.weight of unit 'Sequential': expected a real tensor, as 0.weight is",
    "meta forward": "InputError: weight of unit 'Linear': expected a real tensor, got one on the",
    "sub-mesh": "a number of ranks that divides 2: 1, 2",
    "prefetch": "InputError: prefetch: expected 0 or more units, or None, got -1",
    "precision": "InputError: precision: expected a MixedPrecision, got str",
    "precision of integers": "InputError: precision.param_dtype: expected a floating-point dtype",
    "hidden output": "UnsupportedError: output of unit '_Hides': expected tensors, alone, in",
    "no such name": "InputError: unit 'Sequential': expected one of 0.weight, 2.weight, 0.bias",
    "pickled": "InputError: a pickle of unit 'Sequential': expected a module that is not sharded",
    "divide by nothing": "InputError: gradient divide factor: expected a number above 0",
    "another strategy on rank 1": "MismatchError: fully_shard_flat: expected the same options",
}


def test_what_cannot_be_is_refused_by_name(pool: Pool) -> None:
    for found in pool.run(2, tasks.refusals, names=list(REFUSALS)):
        assert {what: said for what, said in found.items() if REFUSALS[what] not in said} == {}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", tasks.MODULES)
def test_modules_of_all_kinds_have_the_gradients_of_unsharded_ones(
    pool: Pool, kind: str, world_size: int
) -> None:
    for found in pool.run(world_size, tasks.gradients_of, kind=kind):
        for strategy, error in zip(tasks.STRATEGIES, found, strict=True):
            assert error <= TOLERANCE, strategy


@on_two_or_three
def test_a_unit_driven_by_hand_reduces_when_it_reshards(
    pool: Pool, strategy: str, ranks: int
) -> None:
    for found, resting in pool.run(ranks, tasks.by_hand, strategy=strategy):
        assert max(found) <= TOLERANCE
        assert resting


def test_the_next_unit_is_on_its_way_while_one_computes(pool: Pool) -> None:
    alone = ["gather u1", "free u1", "gather u2", "free u2", "gather u3", "free u3"]
    alone += ["gather u3", "free u3", "reduce u3", "gather u2", "free u2", "reduce u2"]
    alone += ["gather u1", "free u1", "reduce u1"]
    ahead = ["gather u1", "gather u2", "free u1", "gather u3", "free u2", "free u3"]
    ahead += ["gather u3", "gather u2", "free u3", "reduce u3", "gather u1", "collect u3"]
    ahead += ["free u2", "reduce u2", "collect u2", "free u1", "reduce u1", "collect u1"]
    for found in pool.run(2, tasks.traced_order):
        assert found == [alone, ahead]


@pytest.mark.slow_after(1)
@strategies
def test_deleting_the_model_frees_its_memory_at_once(pool: Pool, strategy: str) -> None:
    for gone, without_gradients in pool.run(2, tasks.freed, strategy=strategy):
        assert all(gone)
        assert all(without_gradients)


def test_a_forward_without_gradients_leaves_the_unit_sharded(pool: Pool) -> None:
    for state, gradients, attached in pool.run(2, tasks.no_grad_leaves_no_trace):
        assert state == "sharded"
        assert gradients == [None] * len(gradients)
        assert attached


def test_a_unit_may_return_nothing(pool: Pool) -> None:
    assert pool.run(2, tasks.returns_nothing) == [(None, "sharded")] * 2


def test_whole_weights_have_the_names_of_the_model(pool: Pool) -> None:
    names = [f"{unit}.{kind}" for unit in "abc" for kind in ("bias", "weight")]
    assert pool.run(2, tasks.whole_names) == [names, names]


def test_a_root_without_parameters_of_its_own_has_whole_weights_below(pool: Pool) -> None:
    names = [f"{layer}.{kind}" for layer in "01" for kind in ("bias", "weight")]
    assert pool.run(2, tasks.whole_names_below) == [(names, 0), (names, 0)]


def test_the_table_says_what_a_unit_takes_and_moves(pool: Pool) -> None:
    """8 x 8 + 8 elements: 288 B, 320 B with padding to two aligned halves."""
    for text in pool.run(2, tasks.table_of):
        header, row = text.splitlines()
        assert header.split()[:4] == ["unit", "cut", "params", "per"]
        assert row.split()[:3] == ["Linear", "Flat()", "2"]
        assert row.split()[-1] == "fp32"
