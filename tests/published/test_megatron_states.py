from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from gpt import GPT
from published.megatron.arguments import describe
from published.megatron.description import Device, Run
from published.megatron.states import fp8_copies, state_bytes, state_parts
from published.megatron.weights import Weight, rank_weights

A100 = Device("A100", 80 * 2**30, "ampere")
GB200 = Device("GB200", 184 * 2**30, "blackwell")
ARGUMENTS = {**GPT, "max-position-embeddings": 1024, "vocab-size": 50304}
MATRIX = Weight("w", 1000, matrix=True, quantized=True)


def _run(world: int = 8, device: Device = A100, **more: Any) -> Run:
    given = {name.replace("_", "-"): value for name, value in more.items()}
    return describe({**ARGUMENTS, **given}, world=world, device=device)


def _bytes(run: Run, weight: Weight = MATRIX) -> Fraction:
    return state_bytes(run, weight).total


def test_a_parameter_in_bf16_costs_18_bytes() -> None:
    assert _bytes(_run()) == 18


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_the_distributed_optimizer_costs_6_bytes_and_its_share_of_12(ranks: int) -> None:
    assert _bytes(_run(ranks, use_distributed_optimizer=True)) == 6 + Fraction(12, ranks)


def test_context_ranks_share_optimizer_states_too() -> None:
    run = _run(8, use_distributed_optimizer=True, context_parallel_size=2)
    assert run.parallel.data == 4
    assert _bytes(run) == 6 + Fraction(12, 8)


def test_instances_of_the_distributed_optimizer_divide_its_shards() -> None:
    run = _run(8, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    assert _bytes(run) == 6 + Fraction(12, 4)


def test_an_expert_is_shared_by_the_ranks_that_hold_it() -> None:
    run = _run(
        8,
        use_distributed_optimizer=True,
        num_experts=8,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    assert _bytes(run, Weight("e", 10, expert=True)) == 6 + Fraction(12, 2)
    assert _bytes(run) == 6 + Fraction(12, 8)


def test_fp16_keeps_gradients_in_fp16_and_copies_them_for_the_step() -> None:
    run = _run(8, bf16=False, fp16=True)
    each = state_bytes(run, MATRIX)
    assert each.total == 16
    assert each.copied == 4
    assert [part.bytes for part in state_parts(run, [MATRIX]) if not part.forward] == [4000]


def test_a_run_without_a_low_precision_keeps_one_fp32_parameter() -> None:
    assert _bytes(_run(8, bf16=False)) == 16


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"optimizer": "sgd"}, 2 + 4 + 4),
        ({"optimizer": "muon"}, 2 + 4 + 4 + 4),
        ({"use_precision_aware_optimizer": True}, 2 + 4 + 2 + 8),
        (
            {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": "bf16",
                "exp_avg_sq_dtype": "fp8",
            },
            2 + 4 + 2 + 3,
        ),
        ({"grad_reduce_in_bf16": True}, 2 + 2 + 12),
        ({"optimizer_cpu_offload": True}, 6),
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}, 18),
    ],
)
def test_other_optimizers_and_types_cost_what_their_tensors_do(
    flags: dict[str, Any], expected: int
) -> None:
    assert _bytes(_run(8, **flags)) == expected


def test_muon_leaves_embeddings_to_adam() -> None:
    run = _run(8, optimizer="muon")
    assert _bytes(run, Weight("embedding", 10, matrix=True, lookup=True)) == 18


def test_a_fully_sharded_runtime_cuts_everything() -> None:
    run = _run(8, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params")
    assert _bytes(run) == Fraction(18, 8)


def test_blackwell_keeps_one_fp8_copy_of_a_matrix_and_older_devices_two() -> None:
    flags = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    assert [part.bytes for part in fp8_copies(_run(8, **flags), [MATRIX])] == [2000]
    assert [part.bytes for part in fp8_copies(_run(8, GB200, **flags), [MATRIX])] == [1000]


def test_parameters_of_a_gpt_are_those_of_its_formula() -> None:
    hidden, layers, words = 512, 12, 50304
    layer = 12 * hidden**2 + 13 * hidden
    total = layers * layer + (words + 1024) * hidden + 2 * hidden
    assert sum(weight.elements for weight in rank_weights(_run())) == total


def test_states_of_a_rank_are_18_bytes_for_each_of_its_parameters() -> None:
    run = _run()
    weights = rank_weights(run)
    elements = sum(weight.elements for weight in weights)
    assert sum(part.bytes for part in state_parts(run, weights)) == 18 * elements


def test_tensor_ranks_together_hold_the_model_and_repeat_only_its_vectors() -> None:
    whole = sum(weight.elements for weight in rank_weights(_run(vocab_size=51200)) if weight.matrix)
    half = sum(
        weight.elements
        for weight in rank_weights(_run(tensor_model_parallel_size=2, vocab_size=51200))
        if weight.matrix and "position" not in weight.name
    )
    assert 2 * half == whole - 1024 * 512


def test_the_last_stage_holds_a_copy_of_a_tied_embedding_but_no_positions() -> None:
    names = {w.name for w in rank_weights(_run(pipeline_model_parallel_size=2))}
    assert "output_layer" in names
    assert not any("position" in name for name in names)
    assert sum(".attention.linear_qkv" in name for name in names) == 2 * 6


def test_a_prediction_layer_on_another_stage_embeds_again() -> None:
    flags = {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    plain = {w.name for w in rank_weights(_run(**flags))}
    ahead = {w.name for w in rank_weights(_run(**flags, mtp_num_layers=1))}
    assert "embedding.word_embeddings" not in plain
    assert "embedding.word_embeddings" in ahead
