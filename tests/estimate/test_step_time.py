"""Seconds of a step without a run: what they are made of, and how they follow from a job."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.core.errors import InputError
from shardwright.core.footprint import StepTime
from shardwright.cost.presets import HARDWARE
from shardwright.estimate.footprint import footprint
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import parse_job
from shardwright.job.pipelining import SCHEDULES

LAYERS, DIM, HEADS, FFN, VOCAB, SEQUENCE = 4, 512, 8, 1536, 1000, 256
MODEL = {
    "kind": "llama",
    "layers": LAYERS,
    "dim": DIM,
    "heads": HEADS,
    "ffn_dim": FFN,
    "vocab": VOCAB,
}


def time_of(preset: str = "h100-8", ranks: int = 8, size: int = 8, **sections: Any) -> StepTime:
    document = {
        "model": MODEL | sections.pop("model", {}),
        "cluster": {"preset": preset, "world_size": ranks},
        "batch": {"size": size, "sequence": SEQUENCE},
        "parallel": {"data_shard": -1} | sections.pop("parallel", {}),
        "memory": {"runtime": "fsdp2", "checkpointing": "none"} | sections.pop("memory", {}),
    }
    found = estimated(parse_job(document)).time
    assert found
    return found


def forward_flops(tokens: int, causal: bool = False) -> int:
    """Of the products and attention of a forward, by hand."""
    per_token = LAYERS * (4 * DIM * DIM + 3 * DIM * FFN) + DIM * VOCAB
    pairs = SEQUENCE // 2 if causal else SEQUENCE
    return 2 * tokens * (per_token + LAYERS * 2 * DIM * pairs)


def test_parts_add_up_and_the_range_holds_them() -> None:
    found = time_of()
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.low < found.seconds < found.high
    assert found.tokens == 8 * 8 * SEQUENCE


def test_the_models_flops_are_three_forwards_by_hand() -> None:
    assert time_of().model_flops == 3 * forward_flops(8 * 8 * SEQUENCE)
    again = time_of(memory={"checkpointing": "full"})
    assert again.model_flops == time_of().model_flops


MEGATRON = {"runtime": "megatron", "zero": 1}
IN_8_BITS = {"megatron": {"fp8_format": "hybrid"}}
EVERY_RANK_S = [
    {},
    {"memory": {"compile": True}},
    {"memory": {"compile": True, "checkpointing": "selective"}},
    {"memory": {"float8": "rowwise"}},
    {"memory": {"loss": "chunked"}},
    {"memory": MEGATRON},
    {"memory": MEGATRON | IN_8_BITS, "parallel": {"tensor": 2, "sequence": True}},
    {"parallel": {"tensor": 2, "sequence": True}},
    {"parallel": {"context": 2}},
    {"parallel": {"context": 4}, "memory": {"compile": True}},
    {"parallel": {"context": 2}, "memory": {"checkpointing": "selective"}},
    {"parallel": {"context": 2}, "memory": MEGATRON},
    {"parallel": {"context": 2, "tensor": 2, "sequence": True}, "memory": {"compile": True}},
    {"parallel": {"pipeline": 2, "microbatches": 4}},
]


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("sections", EVERY_RANK_S)
def test_whatever_ranks_share_and_kernels_do_a_models_flops_are_the_same(
    sections: dict[str, Any], experts: int
) -> None:
    """What a stand-in for a kernel forgets to say would be free: here all of it is by hand."""
    memory, parallel = sections.get("memory", {}), sections.get("parallel", {})
    if experts and (memory.get("compile") or memory.get("float8")):
        pytest.skip("experts are refused there")
    model = {"experts": experts, "experts_per_token": 2, "expert_ffn_dim": FFN} if experts else {}
    shared = math.prod(parallel.get(name, 1) for name in ("tensor", "context", "pipeline"))
    expert = {"expert": 2} if experts and "pipeline" not in parallel else {}
    found = time_of(memory=memory, parallel=parallel | expert, model=model, size=8 * shared)
    by_hand = forward_flops(found.tokens)
    if experts:  # every token goes to two, and to the router
        by_hand += 2 * found.tokens * LAYERS * (3 * DIM * FFN + DIM * experts)
    # Tensor ranks may have a router each.
    assert found.model_flops == pytest.approx(3 * by_hand, rel=1e-3)
    # None of it takes less than it would at the peak of its dtype.
    attention = 3 * 2 * found.tokens * LAYERS * 2 * DIM * SEQUENCE
    is_narrow = memory.get("float8") or "megatron" in memory
    least = (found.model_flops - attention) / found.peak_flops / (2 if is_narrow else 1)
    assert found.parts["products"] > least
    assert found.parts["attention"] > attention / 2 / found.peak_flops


def test_frozen_weights_have_no_gradients_among_a_models_flops() -> None:
    """Of adapters there are few: a backward takes about as much as a forward, attention apart."""
    found = time_of(model={"lora": 4}).model_flops / 3 / forward_flops(8 * 8 * SEQUENCE)
    assert 2 / 3 < found < 0.75


def test_a_head_that_is_the_embedding_counts_as_another() -> None:
    assert time_of(model={"tied_embeddings": True}).model_flops == time_of().model_flops


def test_products_take_their_flops_at_the_peak_with_what_fits_their_size() -> None:
    """With the constants of size taken out, what is left are FLOPs over a rate."""
    wide = time_of(model={"dim": 8192, "heads": 64, "ffn_dim": 28672, "vocab": 128256, "layers": 1})
    h100 = HARDWARE["h100-8"]
    c = {name: each.value for name, each in (h100.constants | h100.clock).items()}
    tokens = 8 * SEQUENCE
    products = 4 * 8192 * 8192 + 3 * 8192 * 28672 + 8192 * 128256
    least = 3 * 2 * tokens * products / (c["bf16_compute_rate"] * c["product_efficiency"])
    assert least < wide.parts["products"] < 1.3 * least


def test_what_is_computed_again_costs_a_forward_of_the_blocks() -> None:
    none, full = time_of(), time_of(memory={"checkpointing": "full"})
    assert 1.2 < full.parts["products"] / none.parts["products"] < 1.34
    assert full.parts["attention"] > none.parts["attention"]


def test_fp32_takes_many_times_as_long_as_bf16() -> None:
    many = {"dim": 4096, "heads": 32, "ffn_dim": 14336}
    narrow, wide = time_of(model=many), time_of(model=many, memory={"param_dtype": "fp32"})
    assert 8 < wide.parts["products"] / narrow.parts["products"] < 16


LLAMA_8B = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
LLAMA_8B |= {"vocab": 128256}


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_plans_step_takes_as_long_as_one_without_a_plan(policy: str) -> None:
    """Walked action by action, with two ends that nothing hides, and told pass by pass."""
    document = {
        "model": {"kind": "llama", **LLAMA_8B},
        "cluster": {"preset": "h100-8", "hbm_cap": "200 GB"},
        "batch": {"size": 1, "sequence": 8192},
        "memory": {"param_dtype": "bf16", "checkpointing": policy},
        "planner": {"dense": {"checkpointing": [policy]}},
        "train": {"optimizer": "adamw"},
    }
    job = parse_job(document)
    planned, told = footprint(job).time, estimated(job).time
    assert planned
    assert told
    assert planned.seconds == pytest.approx(told.seconds, rel=0.02)
    assert planned.model_flops == told.model_flops
    assert planned.tokens == told.tokens
    for part in ("products", "attention", "elementwise", "launches", "fixed"):
        assert planned.parts[part] == pytest.approx(told.parts[part])


def test_what_is_on_the_host_crosses_its_link() -> None:
    here, away, states = (
        time_of(model=LLAMA_8B | {"layers": 2}, memory={"offload": offload})
        for offload in ("none", "all", "states")
    )
    assert away.parts["sharded parameters"] > here.parts["sharded parameters"]
    assert away.parts["optimizer"] > 10 * here.parts["optimizer"]  # of HBM and DDR
    assert states.parts["optimizer"] > away.parts["optimizer"]


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_tensor_ranks_share_products_and_pay_for_what_they_send(ranks: int) -> None:
    alone = time_of(ranks=ranks)
    shared = time_of(ranks=ranks, parallel={"tensor": 2})
    assert "tensor parallel" not in alone.parts
    assert shared.parts["tensor parallel"] > 0
    assert shared.parts["attention"] == pytest.approx(alone.parts["attention"] / 2)
    # Half of the tokens at once, of which each rank computes half.
    assert shared.model_flops == alone.model_flops / 2


def test_more_microbatches_make_a_pipelines_bubble_a_smaller_share() -> None:
    def bubble(microbatches: int) -> float:
        parallel = {"pipeline": 4, "microbatches": microbatches, "schedule": "1f1b"}
        found = time_of(size=microbatches, model={"layers": 14}, parallel=parallel)
        return found.parts["pipeline bubble"] / (found.seconds - found.parts["fixed"])

    few, many = bubble(4), bubble(32)
    assert few > many > 0
    # Three of seven turns where all stages are alike; here the ends have less to do.
    assert 0.25 < few < 3 / 7


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_and_no_part_is_below_nothing(schedule: str) -> None:
    parallel = {"pipeline": 2, "microbatches": 8, "schedule": schedule}
    found = time_of(size=8, model={"layers": 14}, parallel=parallel)
    assert all(seconds > 0 for seconds in found.parts.values())
    assert found.seconds == pytest.approx(sum(found.parts.values()))


def test_across_hosts_shards_take_longer_to_come() -> None:
    wide = {"dim": 4096, "heads": 32, "ffn_dim": 14336}
    one, many = time_of(ranks=8, size=1, model=wide), time_of(ranks=64, size=1, model=wide)
    assert many.parts["sharded parameters"] > one.parts["sharded parameters"]
    assert many.parts["products"] == one.parts["products"]


def test_a_sequence_that_is_divided_attends_as_much_in_all() -> None:
    alone = time_of(parallel={"data_shard": 4, "data_replicate": 2}, size=8)
    divided = time_of(parallel={"data_shard": 4, "context": 2}, size=8)
    # Half of the replicas, each with as many tokens on two ranks.
    assert divided.parts["attention"] == pytest.approx(alone.parts["attention"] / 2, rel=0.02)
    assert divided.parts["context parallel"] > 0


def test_replicas_that_keep_all_move_gradients_twice_as_an_all_reduce_does() -> None:
    whole = {"dim": 4096, "heads": 32, "ffn_dim": 14336}
    ddp = time_of(model=whole, size=1, memory={"runtime": "ddp", "reduce_dtype": "bf16"})
    h100 = HARDWARE["h100-8"]
    c = {name: each.value for name, each in (h100.constants | h100.clock).items()}
    elements = LAYERS * (4 * 4096 * 4096 + 3 * 4096 * 14336) + 2 * 4096 * VOCAB
    moved = 2 * (2 * elements) * 7 / 8 / (c["all_gather_rate"] * c["link_efficiency"])
    moved += (LAYERS + 2) * c["collective_latency"]
    # Hidden behind what computes as far as it may be.
    computing = sum(ddp.parts[name] for name in ("products", "attention", "elementwise"))
    computing += ddp.parts["launches"]
    hides = min(moved, c["hides"] * computing)
    shown = moved - hides + c["slows"] * hides
    assert ddp.parts["gradients"] == pytest.approx(shown, rel=0.05)


def test_stage_2_sums_gradients_of_every_microbatch_and_stage_1_those_of_all() -> None:
    def sharded(zero: int, microbatches: int) -> float:
        memory = {"runtime": "shardwright", "zero": zero}
        model = {"dim": 2048, "heads": 16, "ffn_dim": 8192}
        parallel = {"microbatches": microbatches}
        found = time_of(size=microbatches, model=model, memory=memory, parallel=parallel)
        return found.parts["sharded parameters"]

    assert sharded(2, 4) > 2 * sharded(2, 1)
    assert sharded(1, 4) == pytest.approx(sharded(1, 1), rel=0.6)


def net(batch: int, convolves: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """Of the mean of the result."""
    if convolves:
        return nn.Conv2d(32, 64, 3, padding=1), torch.randn(batch, 32, 16, 16)
    return nn.Linear(32, 64), torch.randn(batch, 32)


def time_of_net(**arguments: Any) -> StepTime:
    document = {
        "model": {"python": f"{__name__}:net", "arguments": arguments},
        "cluster": {"preset": "h100-8", "world_size": 2},
        "batch": {"size": 64},
        "memory": {"runtime": "fsdp2", "param_dtype": "bf16"},
    }
    found = estimated(parse_job(document)).time
    assert found
    return found


def test_a_step_without_sequences_counts_samples() -> None:
    assert (time_of().counted, time_of_net().counted) == ("tokens", "samples")
    assert time_of_net().tokens == 2 * 64


def test_a_convolution_is_a_product_in_its_own_dtype() -> None:
    """In bf16 one takes as long as the product that it comes to, not as long as in fp32."""
    h100 = HARDWARE["h100-8"]
    c = {name: each.value for name, each in (h100.constants | h100.clock).items()}
    m, n, k = 64 * 16 * 16, 64, 32 * 9
    once = 2 * m * n * k / (c["bf16_compute_rate"] * c["product_efficiency"])
    once *= 1 + c["product_half_size"] * (1 / m + 1 / n + 1 / k)
    # Forward, and backward the gradient of the weight; nothing asks for that of the input.
    assert time_of_net(convolves=True).parts["products"] == pytest.approx(2 * once)


@pytest.mark.parametrize("runtime", ["fsdp2", "ddp", "megatron", "shardwright"])
def test_every_runtime_has_seconds(runtime: str) -> None:
    found = time_of(memory={"runtime": runtime})
    assert found.seconds > 0
    assert found.parts["optimizer"] > 0


def test_a_cpu_and_a_job_without_a_preset_have_no_seconds() -> None:
    document = {
        "model": MODEL,
        "cluster": {"world_size": 2},
        "batch": {"size": 2, "sequence": 64},
        "memory": {"runtime": "fsdp2"},
    }
    assert not estimated(parse_job(document)).time


@pytest.mark.parametrize("preset", [n for n, p in HARDWARE.items() if p.compute_device == "cuda"])
def test_every_accelerator_has_a_clock_with_sources(preset: str) -> None:
    assert HARDWARE[preset].clock
    assert all(each.source and each.unit for each in HARDWARE[preset].clock.values())
    assert time_of(preset).seconds > 0


def test_what_a_compiler_fuses_is_products_as_before_and_fewer_passes() -> None:
    eager, compiled = time_of(), time_of(memory={"compile": True})
    assert compiled.parts["products"] == pytest.approx(eager.parts["products"], rel=1e-6)
    assert compiled.parts["attention"] == pytest.approx(eager.parts["attention"], rel=1e-6)
    assert 0 < compiled.parts["elementwise"] < eager.parts["elementwise"]
    assert compiled.model_flops == eager.model_flops


def test_products_in_8_bits_go_at_their_rate_forward_and_backward() -> None:
    many = {"dim": 4096, "heads": 32, "ffn_dim": 14336}
    wide = time_of(model=many)
    narrow = time_of(model=many, memory={"float8": True})
    # All but the head, whose products stay in bf16.
    assert 0.5 < narrow.parts["products"] / wide.parts["products"] < 0.55


def test_norms_and_attention_operator_by_operator_take_longer() -> None:
    usual = time_of()
    apart = time_of(memory={"rms_norm": "composite"})
    assert apart.parts["elementwise"] > 1.2 * usual.parts["elementwise"]
    assert apart.parts["products"] == usual.parts["products"]
    eager = time_of(memory={"attention": "eager"})
    assert "attention" not in eager.parts
    assert eager.parts["products"] > usual.parts["products"]
    assert eager.parts["elementwise"] > usual.parts["elementwise"]


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        (
            {"memory": {"rms_norm": "composite", "lowering": "cpu"}},
            "memory.rms_norm: expected nothing beside lowering = 'cpu'",
        ),
        (
            {"memory": {"attention": "eager"}, "parallel": {"data_shard": 4, "context": 2}},
            "memory.attention: expected 'flash' where parallel.context divides",
        ),
    ],
)
def test_kernels_that_there_are_not_are_refused(sections: dict[str, Any], refused: str) -> None:
    with pytest.raises(InputError, match=re.escape(refused)):
        time_of(**sections)


def test_sums_among_replicas_wait_where_the_runtime_waits() -> None:
    """Megatron-LM's begin when all gradients are there; DDP's hide behind a backward."""
    whole = {"dim": 2048, "heads": 16, "ffn_dim": 8192}
    memory = {"reduce_dtype": "bf16", "runtime": "ddp"}
    ddp = time_of(model=whole, memory=memory)
    waits = time_of(model=whole, memory=memory | {"runtime": "megatron"})
    assert waits.parts["gradients"] > 2 * ddp.parts["gradients"]
    far = time_of(model=whole, memory=memory, ranks=16)
    assert far.parts["gradients"] > ddp.parts["gradients"]
