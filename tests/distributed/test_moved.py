"""What is done to sharded parameters from outside is taken over, and views follow."""

from __future__ import annotations

import moved_tasks as tasks
import pytest
from gradient_tasks import STRATEGIES
from pool import Pool

TOLERANCE = 1e-6

strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(
    ("strategy", "what"), [(STRATEGIES[i % 4], what) for i, what in enumerate(tasks.MOVES)]
)
def test_parameters_may_be_cast_loaded_and_written_behind_a_units_back(
    pool: Pool, strategy: str, what: str
) -> None:
    for error, equal, inside, same in pool.run(2, tasks.moved, strategy=strategy, what=what):
        assert error <= TOLERANCE
        assert equal
        assert inside
        assert same


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        *(("mixture", "load"), ("flat", "reset"), ("per_param", "assigning load")),
        *(("param_boundary", "written whole"), ("mixture", "reset")),
    ],
)
def test_a_model_on_the_meta_device_gets_its_values_later(
    pool: Pool, strategy: str, how: str
) -> None:
    for error, equal, inside in pool.run(2, tasks.from_meta, strategy=strategy, how=how):
        assert error <= TOLERANCE
        assert equal
        assert inside


@pytest.mark.slow_after(1)
@strategies
def test_units_may_be_frozen_altogether(pool: Pool, strategy: str) -> None:
    for found in pool.run(2, tasks.whole_units_frozen, strategy=strategy):
        assert max(found) <= TOLERANCE


@strategies
def test_writing_whole_parameters_in_half_precision_keeps_what_nobody_changed(
    pool: Pool, strategy: str
) -> None:
    assert pool.run(2, tasks.written_in_half, strategy=strategy) == [(True, True)] * 2


@strategies
def test_parameters_may_be_frozen_and_thawed_after_sharding(pool: Pool, strategy: str) -> None:
    for frozen, nothing, thawed in pool.run(2, tasks.freezing, strategy=strategy):
        assert frozen <= TOLERANCE
        assert nothing
        assert thawed <= TOLERANCE


@strategies
def test_parameters_that_were_frozen_may_train_later(pool: Pool, strategy: str) -> None:
    for nothing, error, inside in pool.run(2, tasks.thawing, strategy=strategy):
        assert nothing
        assert inside
        assert error <= TOLERANCE


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("saver", "ranks", "loader", "others"),
    [
        ("flat", 2, "per_param", 3),
        ("per_param", 3, "flat", 1),
        ("param_boundary", 3, "mixture", 2),
        ("mixture", 2, "param_boundary", 3),
        ("flat", 1, "flat", 2),
    ],
)
def test_torch_saves_and_loads_across_world_sizes_and_cuts(
    pool: Pool, saver: str, ranks: int, loader: str, others: int
) -> None:
    folder = pool.run(ranks, tasks.saved, strategy=saver)[0]
    try:
        for error, inside in pool.run(others, tasks.loaded, strategy=loader, folder=folder):
            assert error <= TOLERANCE
            assert inside
    finally:
        pool.run(1, tasks.remove, folder=folder)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("flat", 2), ("mixture", 2), ("per_param", 3), ("param_boundary", 3)],
)
def test_torch_gathers_the_whole_state(pool: Pool, strategy: str, world_size: int) -> None:
    results = pool.run(world_size, tasks.whole_by_torch, strategy=strategy)
    for equal, _, again in results:
        assert equal
        assert again
    assert any(found for _, found, _ in results)


def test_a_module_is_part_of_one_unit(pool: Pool) -> None:
    for text in pool.run(2, tasks.a_shared_module):
        assert "part of unit 'Sequential'" in text


@strategies
def test_a_plain_parameter_in_place_of_a_sharded_one_is_refused(pool: Pool, strategy: str) -> None:
    for text in pool.run(2, tasks.replaced, strategy=strategy):
        assert text.startswith("InputError: first.weight of unit 'Net': expected the sharded para")
        assert "Copy values (p.copy_(whole) under no_grad)" in text
