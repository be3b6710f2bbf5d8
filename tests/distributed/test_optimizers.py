"""Any torch optimizer over sharded parameters does what it does over unsharded ones."""

from __future__ import annotations

import math
from typing import Any

import optimizer_tasks as tasks
import probe_tasks
import pytest
import torch
from gradient_tasks import STRATEGIES
from pool import Pool, Threads

from shardwright.core.errors import InputError
from shardwright.runtime.muon import Muon

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
TOLERANCE = {1: 1e-6, 2: 1e-6, 3: 2e-5}  # three terms are summed in another order; Adam divides


on_two_or_alone = pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("mixture", 2), ("flat", 2), ("per_param", 2), ("param_boundary", 2), ("per_param", 1)],
)


@pytest.mark.slow_after(1)
@on_two_or_alone
def test_optimizers_over_the_models_parameters(pool: Pool, strategy: str, ranks: int) -> None:
    for found in pool.run(ranks, tasks.over_model_parameters, strategy=strategy):
        for name, error in found.items():
            assert error <= TOLERANCE[ranks], name


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("flat", 2), ("mixture", 3), ("per_param", 2), ("param_boundary", 1)],
)
def test_optimizers_over_few_flat_tensors_with_and_without_groups(
    pool: Pool, strategy: str, ranks: int
) -> None:
    for found in pool.run(ranks, tasks.over_flat_parameters, strategy=strategy):
        for name, (error, tensors) in found.items():
            assert error <= TOLERANCE[ranks], name
            if strategy == "flat" and "no groups" in name:
                assert tensors == (4 if "True" in name else 1), name


@strategies
def test_flat_gradients_add_up_over_backwards(pool: Pool, strategy: str) -> None:
    assert max(pool.run(2, tasks.accumulated, strategy=strategy)) <= 1e-6


@pytest.mark.slow_after(1)
@on_two_or_alone
def test_clipping_scales_as_the_unsharded_norm_says(pool: Pool, strategy: str, ranks: int) -> None:
    for found in pool.run(ranks, tasks.clipped, strategy=strategy):
        for ours, true, error in found:
            assert ours == pytest.approx(true, rel=1e-5)
            assert error <= 1e-6


@strategies
def test_torchs_clipping_works_on_sharded_parameters(pool: Pool, strategy: str) -> None:
    for found, true in pool.run(2, tasks.clipped_by_torch, strategy=strategy):
        assert found == pytest.approx(true, rel=1e-5)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("strategy", "flat", "zero"),
    [
        *(("mixture", False, (2, 3)), ("flat", True, 3)),
        *(("per_param", True, (2, 3)), ("param_boundary", False, 3)),
    ],
    ids=str,
)
def test_replicas_of_a_gradient_count_once_in_its_norm(
    pool: Pool, strategy: str, flat: bool, zero: Any
) -> None:
    pool.run(4, probe_tasks.make_grids)
    options = {"strategy": strategy, "flat": flat, "zero": zero}
    for found, true in pool.run(4, tasks.clipped_on_a_grid, **options):
        assert found == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("strategy", ["flat", "per_param"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(
    pool: Pool, strategy: str, flat: bool
) -> None:
    for text, norms in pool.run(2, tasks.not_finite, strategy=strategy, flat=flat):
        assert text.startswith("RunError: gradient of ")
        assert "in unit 'blocks.1' on rank 1: expected finite numbers" in text
        assert "Nothing was updated" in text
        assert all(map(math.isnan, norms))


def test_on_a_grid_a_gradient_that_is_not_finite_is_named_with_the_rank_of_the_job(
    threads: Threads,
) -> None:
    for rank, found in enumerate(threads.run(4, tasks.not_finite_on_a_grid, bad=2)):
        assert len(found) == (3 if rank >= 2 else 2)
        for where, text in found.items():
            assert "unit 'Linear' on rank 2: expected finite numbers" in text, where


REFUSALS = {
    "not sharded": "InputError: model: expected units made by apply or fully_shard_flat, got none",
    "taken": "expected a parameter that no other flat tensor has, got one of an earlier",
    "partly frozen": "expected to be frozen or unfrozen with all of its flat optimizer tensor",
    "twice in groups": "InputError: groups[0]: expected each parameter in one group",
    "a stranger": "InputError: groups[0]: expected sharded parameters of the model",
    "no such name": "InputError: groups[0]: expected sharded parameters of the model, or their",
    "max_norm": "InputError: clip_grad_norm_: expected max_norm >= 0 and norm_type > 0",
    "no number": "InputError: max_norm: expected a number, got '1'.",
    "moved after": "expected its memory, dtype and device as when optimizer_parameters was called",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_an_optimizer_cannot_take_is_refused_by_name(pool: Pool, what: str) -> None:
    for found in pool.run(2, tasks.refusals, what=what):
        assert REFUSALS[what] in found


def test_one_flat_tensor_is_the_memory_of_all_units(pool: Pool) -> None:
    assert pool.run(2, tasks.flat_tensor) == [(True,) * 5] * 2


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("ranks", "kind", "head_rows"),
    [
        *((2, "mixed", 4), (2, "flat", 0), (2, "heads", 4), (2, "owned", 0)),
        *((2, "heads", 0), (2, "rows", 4), (2, "columns", 4), (2, "replicated", 0)),
        *((3, "flat", 4), (3, "mixed", 0), (3, "heads", 4), (1, "columns", 0), (1, "owned", 4)),
    ],
)
def test_muon_has_every_matrix_whole_on_one_rank(
    pool: Pool, ranks: int, kind: str, head_rows: int
) -> None:
    _hold_muon(pool, ranks, kind, head_rows)


@pytest.mark.product
@pytest.mark.parametrize("head_rows", [0, 4])
@pytest.mark.parametrize("kind", tasks.MATRICES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_muon_has_them_so_whatever_cuts_them(
    pool: Pool, world_size: int, kind: str, head_rows: int
) -> None:
    _hold_muon(pool, world_size, kind, head_rows)


def _hold_muon(pool: Pool, world_size: int, kind: str, head_rows: int) -> None:
    kind = "flat" if (kind, world_size) == ("owned", 1) else kind
    kept = kind in ("owned", "replicated") or (kind, head_rows) == ("heads", 4)
    found = pool.run(world_size, tasks.orthogonalized, kind=kind, head_rows=head_rows)
    assert max(error for error, _ in found) <= 1e-6
    assert {count for _, count in found} == {0 if kept or world_size == 1 else 2}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "zero"), [("flat", (2, 3)), ("heads", 3)], ids=str)
def test_muon_on_two_replicas_of_two_shards(pool: Pool, kind: str, zero: Any) -> None:
    pool.run(4, probe_tasks.make_grids)
    options = {"kind": kind, "head_rows": 4, "grid": True, "zero": zero}
    found = pool.run(4, tasks.orthogonalized, **options)
    assert max(error for error, _ in found) <= 1e-6


def test_states_of_muon_are_saved_and_loaded(pool: Pool) -> None:
    assert pool.run(2, tasks.muon_goes_on) == [0.0, 0.0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_matrices_may_have_gradients_in_some_steps_alone(pool: Pool, ranks: int) -> None:
    assert max(pool.run(ranks, tasks.muon_without_some)) <= 1e-6


def test_matrices_beyond_a_bucket_travel_in_several(
    pool: Pool,
) -> None:
    found = pool.run(2, tasks.in_buckets)
    assert max(error for error, _ in found) <= 1e-6
    assert [count for _, count in found] == [2 * 4] * 2


def test_muon_refuses_heads_that_do_not_divide_a_matrix() -> None:
    matrix = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(InputError, match="head_rows of Muon: expected a number that divides the 6"):
        Muon([matrix], head_rows=4)


def test_a_group_that_is_added_later_is_of_muon_s_heads_and_checked() -> None:
    first, second = (torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    optimizer = Muon([first], head_rows=3)
    with pytest.raises(InputError, match="head_rows of Muon"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, 4))]})
    optimizer = Muon([first], head_rows=3)
    optimizer.add_param_group({"params": [second]})
    first.grad = second.grad = torch.arange(24.0).view(6, 4)
    optimizer.step()
    assert torch.equal(first, second)


def test_muon_over_fsdp2_is_refused_in_one_line(pool: Pool) -> None:
    assert set(pool.run(2, tasks.muon_over_fsdp2)) == {
        "UnsupportedError: Muon: expected whole parameters, or those of fully_shard_flat, got a "
        "DTensor of another runtime, (Shard(dim=0),). Give those to torch.optim.Muon, or shard "
        "with fully_shard_flat."
    }


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "zero", "strategy"),
    [(2, 3, "flat"), (2, 1, "per_param"), (2, 2, "flat"), (3, 3, "per_param")],
)
def test_what_gets_no_gradient_and_is_not_frozen_stays_as_on_one_process(
    pool: Pool, ranks: int, zero: int, strategy: str
) -> None:
    for found in pool.run(ranks, tasks.spared_apart, zero=zero, strategy=strategy):
        for name, error in found.items():
            assert error <= TOLERANCE[ranks], name


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_flat_tensor_of_which_a_part_gets_no_gradient_is_named(pool: Pool, zero: int) -> None:
    for message in pool.run(2, tasks.flat_tensors_of_spared, zero=zero):
        assert message.startswith("InputError: other.weight of unit 'Spared': ")
        assert (
            "expected a gradient, as others of its flat optimizer tensor have, got none" in message
        )
        assert "Give it a group of its own in optimizer_parameters, freeze it" in message
