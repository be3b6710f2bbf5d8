"""The 27 behaviour probes: each works, with numbers, or is refused by name with the way out."""

from __future__ import annotations

import math

import probe_tasks as tasks
import pytest
from pool import Pool

TOLERANCE = 1e-6

sizes = pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.product)],
)
uneven = pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])


def hold(errors: dict[str, float], tolerance: float = TOLERANCE, scale: float = 1.0) -> None:
    """Every gradient within the tolerance, told by name."""
    assert errors
    for name, error in errors.items():
        assert error <= tolerance * scale, f"{name} is {error} off"


@sizes
def test_1_two_dtypes_share_a_unit(pool: Pool, world_size: int) -> None:
    for errors, dtypes, is_bytes in pool.run(world_size, tasks.mixed_dtype_one_group):
        assert dtypes == ["torch.float32", "torch.bfloat16"]
        assert is_bytes
        assert errors["a"] <= TOLERANCE
        assert errors["b"] <= (0.0 if world_size <= 2 else 2**-6)


@sizes
def test_2_a_scalar_parameter_trains(pool: Pool, world_size: int) -> None:
    for found in pool.run(world_size, tasks.scalar_param):
        for error, kept in found:
            assert error <= TOLERANCE
            assert kept == 1.5


@uneven
def test_3_rows_that_do_not_divide_are_cut_in_ceiling_chunks(pool: Pool, world_size: int) -> None:
    chunk = math.ceil(5 / world_size)
    for rank, (errors, local, full) in enumerate(pool.run(world_size, tasks.uneven_dim0)):
        hold(errors, scale=10)
        assert local == (max(0, min(chunk, 5 - rank * chunk)), 8)
        assert full == (5, 8)


@uneven
def test_4_columns_that_do_not_divide_are_cut_in_ceiling_chunks(
    pool: Pool, world_size: int
) -> None:
    chunk = math.ceil(5 / world_size)
    for rank, (errors, local, same) in enumerate(pool.run(world_size, tasks.uneven_dim1)):
        hold(errors, scale=10)
        assert local == (8, max(0, min(chunk, 5 - rank * chunk)))
        assert same


@sizes
def test_5_a_parameter_tied_across_units_is_refused_with_both_names(
    pool: Pool, world_size: int
) -> None:
    for text in pool.run(world_size, tasks.tied_across_groups):
        assert text.startswith("InputError: weight of unit 'Linear': expected a parameter that")
        assert "the same parameter as weight of unit 'Embedding'" in text
        assert "Put both in one unit, such as their common ancestor" in text


@sizes
def test_6_a_parameter_tied_inside_a_unit_is_kept_once(pool: Pool, world_size: int) -> None:
    for errors, same, payload, names in pool.run(world_size, tasks.tied_same_group):
        hold(errors, scale=100)
        assert same
        assert payload == 10 * 8 * 4
        assert names == ["embed.weight"]


@sizes
def test_7_a_frozen_parameter_has_no_gradient(pool: Pool, world_size: int) -> None:
    for errors, none, trained in pool.run(world_size, tasks.frozen_weight_in_group):
        hold(errors)
        assert none
        assert trained == 5


@sizes
def test_8_a_parameter_that_some_ranks_use_has_a_gradient_and_one_that_none_uses_has_none(
    pool: Pool, world_size: int
) -> None:
    for errors, without in pool.run(world_size, tasks.unused_param_in_group):
        hold(errors, scale=10)
        assert without == ["b.weight", "b.bias"]


@sizes
def test_9_ignored_parameters_stay_and_the_table_says_that_they_are_not_reduced(
    pool: Pool, world_size: int
) -> None:
    for errors, local, plain, table in pool.run(world_size, tasks.ignored_params):
        hold(errors)
        assert len(errors) == 5
        assert local <= TOLERANCE
        assert plain
        assert "0.weight ignored, not reduced" in table


@sizes
def test_10_two_forwards_before_a_backward(pool: Pool, world_size: int) -> None:
    for errors in pool.run(world_size, tasks.two_forwards_one_backward):
        hold(errors, scale=10)


@sizes
def test_11_the_second_of_two_backwards_adds_exactly_once(pool: Pool, world_size: int) -> None:
    for first, second in pool.run(world_size, tasks.backward_twice_retain):
        hold(first)
        hold(second)


@sizes
def test_12_gradients_held_back_are_reduced_with_the_next(pool: Pool, world_size: int) -> None:
    for errors, nothing in pool.run(world_size, tasks.no_sync_accumulate):
        hold(errors, scale=10)
        assert nothing


@sizes
@pytest.mark.parametrize("reset", [False, True], ids=["13", "14 after reset"])
def test_13_14_after_an_exception_in_a_forward_the_next_step_is_exact(
    pool: Pool, world_size: int, reset: bool
) -> None:
    for errors, broke, before, after in pool.run(
        world_size, tasks.exception_mid_forward, reset=reset
    ):
        assert broke == "ValueError: asked to break"
        hold(errors)
        assert before or not reset
        assert after


@sizes
def test_15_clipping_sees_the_norm_of_the_unsharded_model(pool: Pool, world_size: int) -> None:
    for ours, theirs, true, clipped, torch_clipped in pool.run(world_size, tasks.clip_grad_norm):
        assert ours == pytest.approx(true, rel=1e-6)
        assert theirs == pytest.approx(true, rel=1e-6)
        hold(clipped)
        hold(torch_clipped)


@sizes
def test_16_a_model_on_the_meta_device_gets_memory_and_values(pool: Pool, world_size: int) -> None:
    for errors, within, spread in pool.run(world_size, tasks.meta_init):
        hold(errors)
        assert within
        assert spread > 0.05


@sizes
def test_17_computing_in_bf16_and_reducing_in_fp32(pool: Pool, world_size: int) -> None:
    for out, grads, errors in pool.run(world_size, tasks.mixed_precision_bf16_reduce_fp32):
        assert out == "torch.bfloat16"
        assert grads == ["torch.float32"] * 6
        hold(errors, scale=10)


@sizes
@pytest.mark.parametrize("on_root_only", [False, True], ids=["18", "19 on the root only"])
def test_18_19_a_divide_factor_reaches_all_units(
    pool: Pool, world_size: int, on_root_only: bool
) -> None:
    for errors in pool.run(world_size, tasks.gradient_divide_factor, on_root_only=on_root_only):
        hold(errors)


@sizes
def test_20_cpu_offload_changes_no_number_and_says_where_shards_are(
    pool: Pool, world_size: int
) -> None:
    for errors, table in pool.run(world_size, tasks.cpu_offload_on_cpu):
        hold(errors)
        assert "Shard(0), on the host" in table


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("ranks", "rows", "strategy"),
    [
        *((4, 2, "per_param"), (4, 2, "flat"), (4, 2, "param_boundary")),
        *((4, 4, "flat"), (2, 1, "per_param"), (1, 1, "param_boundary")),
    ],
)
def test_21_a_mesh_of_replicas_and_shards(pool: Pool, ranks: int, rows: int, strategy: str) -> None:
    pool.run(4, tasks.make_grids)
    results = pool.run(ranks, tasks.hsdp, rows=rows, strategy=strategy)
    for errors, placements in results:
        hold(errors)
        shown = "(Replicate(), Shard(dim=0))"
        assert placements == shown


@sizes
def test_22_layers_called_under_a_checkpoint_without_their_root(
    pool: Pool, world_size: int
) -> None:
    for errors, resting in pool.run(world_size, tasks.checkpoint_nonreentrant):
        hold(errors)
        assert resting


@sizes
def test_23_owned_and_replicated_parameters_train_and_other_words_are_refused(
    pool: Pool, world_size: int
) -> None:
    for rank, (found, wrong) in enumerate(pool.run(world_size, tasks.owned_or_replicate_placement)):
        (owned, local, owner), (replicated, full, none), (from_torch, again, _) = found
        hold(owned)
        hold(replicated)
        hold(from_torch)
        assert (owner, none) == (world_size - 1, None)
        assert local == ((5, 8) if rank == world_size - 1 else (0, 8))
        assert full == again == (5, 8)
        assert wrong.startswith("UnsupportedError: shard_placement_fn for weight: expected Shard,")


@sizes
def test_24_a_view_that_a_unit_returns_may_be_changed_in_place(pool: Pool, world_size: int) -> None:
    for errors in pool.run(world_size, tasks.view_output_inplace):
        hold(errors, scale=100)


@sizes
def test_25_torch_reads_the_state_of_model_and_optimizer(pool: Pool, world_size: int) -> None:
    names = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]
    for keys, kinds, moments, error, moment in pool.run(world_size, tasks.state_dict_dcp):
        assert keys == names
        assert kinds == {"ShardTensor"}
        assert moments == sorted(names)
        assert error <= TOLERANCE
        assert moment <= TOLERANCE


@sizes
def test_26_a_copy_is_a_sharded_model_of_its_own(pool: Pool, world_size: int) -> None:
    for found in pool.run(world_size, tasks.deepcopy):
        for errors in found:
            hold(errors)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        *(("units", 2), ("model", 2)),
        *(
            pytest.param(what, ranks, marks=pytest.mark.product)
            for what, ranks in (("model", 1), ("units", 1), ("units", 4))
        ),
    ],
)
def test_27_compiled_models_and_compiled_units_have_the_same_gradients(
    pool: Pool, ranks: int, what: str
) -> None:
    for found, resting, breaks in pool.run(ranks, tasks.compile_explain, what=what):
        for errors in found:
            hold(errors)
        assert resting
        assert breaks == (1 if what == "model" else 0)
