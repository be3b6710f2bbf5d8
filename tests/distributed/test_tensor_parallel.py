"""``fully_shard_flat`` after ``parallelize_module``, beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_parallel_tasks as tasks
from pool import Pool


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("strategy", "sequence", "optimizer"),
    [
        *(("per_param", True, "adamw"), ("flat", True, "sgd")),
        *(("owned", False, "muon"), ("flat", False, "adamw"), ("per_param", False, "muon")),
    ],
)
def test_a_llama_on_two_shards_by_two_tensor_parallel_ranks(
    pool: Pool, strategy: str, sequence: bool, optimizer: str
) -> None:
    _hold(pool, strategy, sequence, optimizer)


@pytest.mark.product
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("strategy", tasks.STRATEGIES)
def test_so_it_is_in_every_case(pool: Pool, strategy: str, sequence: bool, optimizer: str) -> None:
    _hold(pool, strategy, sequence, optimizer)


def _hold(pool: Pool, strategy: str, sequence: bool, optimizer: str) -> None:
    given = {"strategy": strategy, "sequence": sequence, "optimizer": optimizer}
    for losses, norms, weights in pool.run(4, tasks.trained, sizes=(2, 2), **given):
        assert losses <= 1e-5
        assert norms <= 1e-5
        assert weights <= (2e-5 if optimizer == "adamw" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [(1, 4), (2, 1, 2), (1, 2, 2), pytest.param((4, 1), marks=pytest.mark.product)],
)
def test_other_grids(pool: Pool, sizes: tuple[int, ...]) -> None:
    for found in pool.run(
        4, tasks.trained, strategy="flat", sequence=True, optimizer="sgd", sizes=sizes
    ):
        assert max(found) <= 1e-5


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("habit", "strategy"),
    [(habit, ("flat", "per_param")[i % 2]) for i, habit in enumerate(tasks.HABITS)],
)
def test_habits_of_users(pool: Pool, habit: str, strategy: str) -> None:
    found = pool.run(4, tasks.habitual, habit=habit, strategy=strategy)
    assert max(found) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("bfloat16", "flat"),
        pytest.param("compiled", "per_param", marks=pytest.mark.product),  # four ranks compile
    ],
)
def test_what_torch_rounds_is_rounded_as_under_fsdp2(pool: Pool, how: str, strategy: str) -> None:
    for ours, theirs, weights in pool.run(4, tasks.beside_fsdp2, how=how, strategy=strategy):
        assert ours == theirs
        assert weights == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("strategy", ["per_param", "flat"])
def test_from_the_meta_device_values_are_those_of_one_process(pool: Pool, strategy: str) -> None:
    assert pool.run(4, tasks.from_meta, strategy=strategy) == [[]] * 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("sizes", "strategy"), [((2, 2, 1), "flat"), ((2, 1, 2), "per_param")])
def test_stages_that_torch_pipelines(
    pool: Pool, sizes: tuple[int, int, int], strategy: str
) -> None:
    for losses, weights in pool.run(4, tasks.piped, sizes=sizes, strategy=strategy):
        assert losses <= 1e-5
        assert weights <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["flat", *(pytest.param(each, marks=pytest.mark.product) for each in tasks.STRATEGIES[1:])],
)
def test_states_and_checkpoints_are_those_of_the_whole(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    found = pool.run(4, tasks.saved, strategy=strategy, folder=str(tmp_path))
    assert found == [(True, True, True)] * 4


def test_what_is_not_taken_is_named(pool: Pool) -> None:
    uneven, replicated, flat, frozen = pool.run(4, tasks.refused)[0]
    assert (
        "weight: expected a DTensor on a mesh of one dimension, replicated or cut evenly" in uneven
    )
    assert "weight: expected a placement that cuts it" in replicated
    assert "optimizer_parameters: expected units that nothing else has cut" in flat
    assert frozen == (
        "weight: expected zero=3 beside a frozen parameter that tensor parallelism has cut, got "
        "zero=1. Pass zero=3."
    )
