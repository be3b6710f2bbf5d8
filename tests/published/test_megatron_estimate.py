from __future__ import annotations

from typing import Any

import pytest
from gpt import GPT
from published.megatron.arguments import describe
from published.megatron.attention import attention
from published.megatron.blocks import chunk_blocks
from published.megatron.description import Device, Run
from published.megatron.estimate import estimate
from published.megatron.feedforward import mlp, moe
from published.megatron.kept import BlockMemory
from published.megatron.lasting import lasting_parts

H100 = Device("H100", 80 * 2**30, "hopper")
A100 = Device("A100", 80 * 2**30, "ampere")
ARGUMENTS = {**GPT, "vocab-size": 50304}
TOKENS, HIDDEN = 4 * 1024, 512


def _run(device: Device = H100, **more: Any) -> Run:
    given = {name.replace("_", "-"): value for name, value in more.items()}
    return describe({**ARGUMENTS, **given}, world=8, device=device)


def _layer(run: Run) -> int:
    """Bytes of a layer without the statistics of its norms and of its softmax."""
    blocks = (attention(run, False), mlp(run, False))
    return sum(block.saved - _statistics(block) for block in blocks)


def _statistics(block: BlockMemory) -> int:
    return sum(tensor.bytes for tensor in block.kept if "statistics" in tensor.name)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_a_layer_keeps_34_bytes_for_each_value_of_its_share_of_the_sequence(tensor: int) -> None:
    run = _run(tensor_model_parallel_size=tensor, sequence_parallel=True)
    assert _layer(run) == 34 * TOKENS * HIDDEN // tensor


def test_without_a_cut_sequence_10_of_the_34_bytes_stay_whole() -> None:
    run = _run(tensor_model_parallel_size=2)
    assert _layer(run) == (10 + 24 // 2) * TOKENS * HIDDEN


def test_the_unfused_core_keeps_5_bytes_for_each_score() -> None:
    extra = _layer(_run(attention_backend="unfused")) - _layer(_run())
    assert extra == 5 * 8 * 4 * 1024**2


def test_without_dropout_the_unfused_core_keeps_its_probabilities_once() -> None:
    flags = {"attention_dropout": 0.0}
    extra = _layer(_run(attention_backend="unfused", **flags)) - _layer(_run(**flags))
    assert extra == 2 * 8 * 4 * 1024**2


def test_flash_attention_keeps_one_more_output_than_the_fused_one() -> None:
    extra = _layer(_run(attention_backend="flash")) - _layer(_run(attention_backend="fused"))
    assert extra == 2 * TOKENS * HIDDEN


def test_the_backend_follows_the_device_and_determinism() -> None:
    blackwell = Device("GB200", 184 * 2**30, "blackwell")
    assert _run(A100).kernels.attention == "flash"
    assert _run(H100).kernels.attention == "fused"
    assert _run(blackwell).kernels.attention == "fused"
    assert _run(blackwell, deterministic_mode=True).kernels.attention == "flash"
    assert _run(transformer_impl="local").kernels.attention == "local"


def test_an_even_router_gives_the_experts_topk_times_the_tokens() -> None:
    run = _run(num_experts=8, expert_model_parallel_size=4, moe_router_topk=2, swiglu=True)
    kept = {tensor.name: tensor.bytes for tensor in moe(run, False).kept}
    assert kept["tokens of the experts"] == 2 * TOKENS * HIDDEN * 2


def _peak(**flags: Any) -> int:
    return estimate(_run(**flags)).peak


def test_recomputing_more_never_needs_more() -> None:
    flags = {"attention_backend": "unfused", "micro_batch_size": 16}
    none = _peak(**flags)
    selective = _peak(**flags, recompute_granularity="selective")
    full = _peak(**flags, recompute_granularity="full", recompute_num_layers=1)
    assert full < selective < none


def test_full_recomputation_keeps_the_input_of_each_group() -> None:
    run = _run(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    blocks = [b for b in chunk_blocks(run, run.chunks[0]) if b.block == "checkpoint"]
    assert [block.saved for block in blocks] == [2 * TOKENS * HIDDEN] * 4


@pytest.mark.parametrize("module", ["layernorm", "mlp", "core_attn"])
def test_a_module_that_is_recomputed_is_not_kept(module: str) -> None:
    backend = "unfused" if module == "core_attn" else "fused"
    whole = _peak(attention_backend=backend)
    less = _peak(
        attention_backend=backend, recompute_granularity="selective", recompute_modules=[module]
    )
    assert less < whole


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"use_distributed_optimizer": True},
    ],
)
def test_more_parallelism_needs_less(flags: dict[str, Any]) -> None:
    assert _peak(**flags) < _peak()


def test_parts_add_up_to_the_peak_and_phases_hold_it() -> None:
    told = estimate(_run(pipeline_model_parallel_size=2))
    assert sum(part.bytes for part in told.parts) == told.peak
    assert max(phase.bytes for phase in told.phases) == told.peak
    assert told.steady < told.peak


def _lasting(device: Device, **flags: Any) -> dict[str, int]:
    return {part.name: part.bytes for part in lasting_parts(_run(device, **flags))}


def test_workspaces_follow_the_device_and_what_runs_on_several_streams() -> None:
    assert _lasting(A100)["cuBLAS workspace of Transformer Engine"] == 4 * MIB
    assert _lasting(H100)["cuBLAS workspace of Transformer Engine"] == 32 * MIB + 1024
    grouped = _lasting(A100, num_experts=8, moe_grouped_gemm=True)
    assert grouped["workspaces of grouped matrix products"] == 16 * MIB
    overlapped = _lasting(A100, tensor_model_parallel_size=2, tp_comm_overlap=True)
    assert overlapped["workspaces of overlapped communication"] == 12 * MIB


def test_a_plain_local_model_has_no_workspace_of_the_engine_but_a_buffer_for_its_scores() -> None:
    parts = _lasting(A100, transformer_impl="local")
    assert "cuBLAS workspace of Transformer Engine" not in parts
    assert parts["shared buffer of tensor parallelism"] == 2 * 4 * 8 * 1024**2


MIB = 2**20
TESTED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": 0}
MEASURED: list[tuple[str, Device, dict[str, Any], float]] = [
    ("engine, fused", H100, {"use_distributed_optimizer": True, "deterministic_mode": True}, 2566),
    ("engine, flash", A100, {"use_distributed_optimizer": True, "deterministic_mode": True}, 2586),
    (
        "local, fp16",
        A100,
        {
            "bf16": False,
            "fp16": True,
            "use_distributed_optimizer": True,
            "transformer_impl": "local",
            "apply_query_key_layer_scaling": True,
        },
        4394,
    ),
    (
        "three virtual stages",
        A100,
        {
            "pipeline_model_parallel_size": 4,
            "num_layers_per_virtual_pipeline_stage": 1,
            "use_distributed_optimizer": True,
            "attention_backend": "unfused",
        },
        3731,
    ),
]


@pytest.mark.parametrize(
    ("device", "flags", "measured"), [case[1:] for case in MEASURED], ids=[c[0] for c in MEASURED]
)
def test_peaks_that_were_measured_are_met_to_one_percent(
    device: Device, flags: dict[str, Any], measured: float
) -> None:
    """Figures of Megatron-LM's tests at d98e8a64 (tp1 pp1, and tp1 pp4 vp1), in MiB."""
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    run = describe(
        {
            **ARGUMENTS,
            "no-gradient-accumulation-fusion": True,
            "max-position-embeddings": 1024,
            **given,
        },
        world=8,
        device=device,
        environment=TESTED,
    )
    assert estimate(run).peak / MIB == pytest.approx(measured, rel=0.01)
