"""``fully_shard_flat`` on its own: gradients, states, and what it refuses by name."""

from __future__ import annotations

import pytest
import torch
import unit_tasks as tasks
from pool import Pool


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("grad", [False, True], ids=["leaf input", "input with gradient"])
@pytest.mark.parametrize("mode", ["resharded", "kept", "replicated"])
def test_raw_gradients_are_the_mean_over_ranks_added_up_over_backwards(
    pool: Pool, world_size: int, steps: int, grad: bool, mode: str
) -> None:
    results = pool.run(
        world_size,
        tasks.raw_gradients,
        reshard=mode == "resharded",
        replicate=mode == "replicated",
        grad=grad,
        steps=steps,
    )
    for found, sharded in results:
        assert sharded is (mode != "replicated")
        assert sum(len(true) for _, true in found.values()) > 0
        for name, (got, true) in found.items():
            torch.testing.assert_close(got, true, atol=2e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_states_show_what_they_own(pool: Pool, world_size: int) -> None:
    for seen, equal, bytes_equal, shares, whole_again in pool.run(world_size, tasks.states):
        (first, shapes, nothing), (second, full_shapes, something), third = seen
        assert (first, second, third[0]) == ("sharded", "unsharded", "sharded")
        assert nothing == 0
        assert third[2] == 0
        assert something > 0
        assert all(len(shape) == 1 for shape in shapes.values())
        assert full_shapes["0.weight"] == (7, 5)
        assert equal
        assert bytes_equal
        assert shares
        assert whole_again


REFUSALS = {
    "strategy": ("UnsupportedError", "shard_strategy='flat'"),
    "owned": ("UnsupportedError", "'param_boundary'"),
    "placement function": ("UnsupportedError", "shard_placement_fn"),
    "shard 1": ("UnsupportedError", "placements"),
    "dtype": ("UnsupportedError", "0.weight: expected fp32, got bfloat16"),
    "frozen": ("UnsupportedError", "0.weight: expected a parameter that requires grad"),
    "tied": ("UnsupportedError", "1.weight: expected parameters of its own, got one tied to 0."),
    "empty": ("InputError", "expected at least one parameter"),
    "tied to another unit": ("UnsupportedError", "one tied to unit 'Linear'"),
    "inside a unit": ("UnsupportedError", "some of unit 'Sequential'"),
    "nested": ("UnsupportedError", "Nested units"),
    "meta": ("InputError", "weight: expected a real tensor"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_this_version_does_not_do_is_refused_by_name(pool: Pool, what: str) -> None:
    kind, text = REFUSALS[what]
    for found in pool.run(2, tasks.refusal, what=what):
        assert found.startswith(kind)
        assert text in found


def test_a_unit_driven_by_hand_reduces_when_it_reshards(pool: Pool) -> None:
    for found in pool.run(3, tasks.by_hand):
        assert max(found.values()) < 2e-6


UNUSUAL = (
    "backward twice",
    "create graph",
    "eval between",
    "failed backward",
    "forward only",
    "kept",
    "two forwards",
)


@pytest.mark.parametrize("what", UNUSUAL)
def test_gradients_are_right_in_and_after_unusual_steps(pool: Pool, what: str) -> None:
    for found in pool.run(2, tasks.odd_backward, what=what):
        assert max(found.values()) < 5e-6, found


def test_in_place_operations_around_a_unit_work(pool: Pool) -> None:
    for error in pool.run(2, tasks.in_place_around):
        assert error < 2e-6


def test_whole_weights_have_the_names_of_the_model(pool: Pool) -> None:
    names = [f"{unit}.{kind}" for unit in "abc" for kind in ("bias", "weight")]
    assert pool.run(2, tasks.whole_names) == [names, names]


def test_optimizer_parameters_come_before_the_first_backward(pool: Pool) -> None:
    for found in pool.run(2, tasks.late_optimizer):
        assert found.startswith("InputError: optimizer_parameters: expected to be called before")


def test_an_exception_in_the_forward_leaves_a_module_that_works(pool: Pool) -> None:
    for after, later, has_gradients in pool.run(2, tasks.survives):
        assert after == "sharded"
        assert later == "sharded"
        assert has_gradients


def test_an_output_that_is_a_view_of_a_parameter_is_refused(pool: Pool) -> None:
    for found in pool.run(2, tasks.returns_a_view):
        assert "a view of a parameter" in found


def test_deleting_the_module_frees_its_memory_at_once(pool: Pool) -> None:
    assert pool.run(2, tasks.freed) == [True, True]


def test_a_forward_without_gradients_leaves_the_unit_sharded(pool: Pool) -> None:
    for state, gradients, attached in pool.run(2, tasks.no_grad_leaves_no_trace):
        assert state == "sharded"
        assert gradients == [None] * 4
        assert attached


def test_the_optimizer_sees_one_flat_parameter_that_is_the_shard(pool: Pool) -> None:
    for same_storage, same_shape, numel in pool.run(2, tasks.flat_parameters):
        assert same_storage
        assert same_shape
        assert numel == 36  # 35 + 7 + 21 + 3 elements with padding, cut in two
