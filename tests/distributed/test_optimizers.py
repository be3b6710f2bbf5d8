"""Any torch optimizer over sharded parameters does what it does over unsharded ones."""

from __future__ import annotations

import optimizer_tasks as tasks
import probe_tasks
import pytest
from gradient_tasks import STRATEGIES
from pool import Pool

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
TOLERANCE = {1: 1e-6, 2: 1e-6, 3: 2e-5}  # three terms are summed in another order; Adam divides


@strategies
@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_over_the_models_parameters(pool: Pool, strategy: str, world_size: int) -> None:
    for found in pool.run(world_size, tasks.over_model_parameters, strategy=strategy):
        for name, error in found.items():
            assert error <= TOLERANCE[world_size], name


@strategies
@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizers_over_few_flat_tensors_with_and_without_groups(
    pool: Pool, strategy: str, world_size: int
) -> None:
    for found in pool.run(world_size, tasks.over_flat_parameters, strategy=strategy):
        for name, (error, tensors) in found.items():
            assert error <= TOLERANCE[world_size], name
            if strategy == "flat" and "no groups" in name:
                assert tensors == (4 if "True" in name else 1), name


@strategies
def test_flat_gradients_add_up_over_backwards(pool: Pool, strategy: str) -> None:
    assert max(pool.run(2, tasks.accumulated, strategy=strategy)) <= 1e-6


@strategies
@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_scales_as_the_unsharded_norm_says(
    pool: Pool, strategy: str, world_size: int
) -> None:
    for found in pool.run(world_size, tasks.clipped, strategy=strategy):
        for ours, true, error in found:
            assert ours == pytest.approx(true, rel=1e-5)
            assert error <= 1e-6


@strategies
def test_torchs_clipping_works_on_sharded_parameters(pool: Pool, strategy: str) -> None:
    for found, true in pool.run(2, tasks.clipped_by_torch, strategy=strategy):
        assert found == pytest.approx(true, rel=1e-5)


@strategies
@pytest.mark.parametrize("flat", [False, True])
def test_replicas_of_a_gradient_count_once_in_its_norm(
    pool: Pool, strategy: str, flat: bool
) -> None:
    pool.run(4, probe_tasks.make_grids)
    for found, true in pool.run(4, tasks.clipped_on_a_grid, strategy=strategy, flat=flat):
        assert found == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("strategy", ["flat", "per_param"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(
    pool: Pool, strategy: str, flat: bool
) -> None:
    for text, norm in pool.run(2, tasks.not_finite, strategy=strategy, flat=flat):
        assert text.startswith("RunError: gradient of ")
        assert "in unit 'blocks.1' on rank 1: expected finite numbers" in text
        assert "Nothing was updated" in text
        assert norm != norm


REFUSALS = {
    "not sharded": "InputError: model: expected units made by apply or fully_shard_flat, got none",
    "taken": "expected a parameter that no other flat tensor has, got one of an earlier",
    "partly frozen": "expected to be frozen or unfrozen with all of its flat optimizer tensor",
    "twice in groups": "InputError: groups[0]: expected each parameter in one group",
    "a stranger": "InputError: groups[0]: expected sharded parameters of the model",
    "no such name": "InputError: groups[0]: expected sharded parameters of the model, or their",
    "max_norm": "InputError: clip_grad_norm_: expected max_norm >= 0 and norm_type > 0",
    "moved after": "expected its memory, dtype and device as when optimizer_parameters was called",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_an_optimizer_cannot_take_is_refused_by_name(pool: Pool, what: str) -> None:
    for found in pool.run(2, tasks.refusals, what=what):
        assert REFUSALS[what] in found


def test_one_flat_tensor_is_the_memory_of_all_units(pool: Pool) -> None:
    assert pool.run(2, tasks.flat_tensor) == [(True,) * 5] * 2
