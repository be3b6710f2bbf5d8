"""A layout as the arguments of Megatron-LM's ``pretrain_gpt.py``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shardwright.core.errors import expected
from shardwright.core.llama import LlamaShape
from shardwright.job.engines.layout import ANY, Engine, EngineLayout, flag_lines, the_other_way
from shardwright.job.megatron import DEGREES, LAYOUT, OPTIMIZERS, REPLICAS, layout_of

USUAL_DIVISOR = 128  # of words, times tensor ranks; more are made up unless it is said
# Widths that are an argument each, and those that are switches.
WIDTHS = {
    "layers": "num-layers",
    "dim": "hidden-size",
    "ffn_dim": "ffn-hidden-size",
    "heads": "num-attention-heads",
    "experts": "num-experts",
    "experts_per_token": "moe-router-topk",
    "expert_ffn_dim": "moe-ffn-hidden-size",
    "shared_ffn_dim": "moe-shared-expert-intermediate-size",
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_rope_head_dim": "qk-pos-emb-head-dim",
}
SWITCHES = {"qk_norm": "qk-layernorm", "attention_bias": "add-qkv-bias"}
OTHERS = ("kv_heads", "head_dim", "v_head_dim", "vocab", "tied_embeddings", "moe_layers")


def _more(layout: EngineLayout) -> Iterator[str]:
    degrees, memory, shape = layout.degrees, layout.memory, layout.shape
    if shape.vocab % degrees.tensor:
        wanted = f"a multiple of parallel.tensor {degrees.tensor}, or Megatron-LM makes up words"
        yield expected("model.vocab", wanted, str(shape.vocab))
    if memory.param_dtype == "fp32" and memory.reduce_dtype != "fp32":
        wanted = "fp32 beside param_dtype fp32"
        yield expected("memory.reduce_dtype", wanted, str(memory.reduce_dtype))
    elif memory.reduce_dtype not in ("fp32", memory.param_dtype):
        wanted = f"fp32 or param_dtype {memory.param_dtype}"
        yield expected("memory.reduce_dtype", wanted, str(memory.reduce_dtype))
    if degrees.data_replicate > 1 and memory.zero != 1:
        wanted = "1 beside data_shard without zero = 1, for then every data rank has all"
        yield expected("parallel.data_replicate", wanted, str(degrees.data_replicate))
    if shape.moe_layers and degrees.tensor > 1 and not degrees.sequence:
        yield expected("parallel.sequence", "true for experts beside parallel.tensor", "false")
    if degrees.chunks > 1 and degrees.microbatches % degrees.pipeline:
        wanted = f"a multiple of parallel.pipeline {degrees.pipeline} where it is interleaved"
        yield expected("parallel.microbatches", wanted, str(degrees.microbatches))
    if degrees.context > 1 and layout.job.batch.sequence % (2 * degrees.context):
        wanted = f"a multiple of {2 * degrees.context}, twice parallel.context"
        yield expected("batch.sequence", wanted, str(layout.job.batch.sequence))


def _written(layout: EngineLayout) -> str:
    flags = (*_model(layout), *_parallel(layout), *_memory(layout))
    words = (
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in flags
        if value is not False
    )
    # Without it a tensor's or a context's collectives wait for one another, and it is refused.
    degrees = layout.degrees
    one = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if degrees.tensor * degrees.context > 1 else ""
    return flag_lines(f"{one}torchrun pretrain_gpt.py", iter(words))


Flags = Iterator[tuple[str, Any]]


def _model(layout: EngineLayout) -> Flags:
    shape = layout.shape
    for key, name in WIDTHS.items():
        if value := getattr(shape, key):
            yield name, value
    for key, name in SWITCHES.items():
        yield name, bool(getattr(shape, key))
    if shape.kv_lora_rank:
        yield "multi-latent-attention", True
        # Megatron-LM norms what it makes heads of where it is told to; ours always does.
        yield "qk-layernorm", True
        yield "qk-head-dim", shape.head_dim - shape.qk_rope_head_dim
        yield "v-head-dim", shape.value_dim
    else:
        yield "group-query-attention", shape.kv_heads != shape.heads
        yield "num-query-groups", shape.kv_heads if shape.kv_heads != shape.heads else False
        yield "kv-channels", shape.head_dim
    if shape.moe_layers:
        yield "moe-layer-freq", _pattern(shape)
    tensor, divisor = layout.degrees.tensor, USUAL_DIVISOR
    while shape.vocab % (divisor * tensor):
        divisor //= 2
    yield "vocab-size", shape.vocab
    yield "make-vocab-size-divisible-by", divisor
    yield "untie-embeddings-and-output-weights", not shape.tied_embeddings
    yield from (("swiglu", True), ("disable-bias-linear", True), ("normalization", "RMSNorm"))
    yield "norm-epsilon", shape.norm_eps
    yield from (("position-embedding-type", "rope"), ("rotary-base", int(shape.rope_theta)))
    yield from (("attention-dropout", 0.0), ("hidden-dropout", 0.0))


def _pattern(shape: LlamaShape) -> str:
    runs = groupby(shape.is_moe(layer) for layer in range(shape.layers))
    return "'" + "+".join(f"[{int(moe)}]*{len([*group])}" for moe, group in runs) + "'"


def _parallel(layout: EngineLayout) -> Flags:
    degrees = layout.degrees
    for key, name in DEGREES.items():
        yield name, getattr(degrees, key)
    yield "sequence-parallel", degrees.sequence
    if degrees.expert > 1:
        yield "expert-tensor-parallel-size", 1  # else that of other layers
    if factor := layout.said["parallel.capacity_factor"]:
        yield "moe-expert-capacity-factor", factor
        yield "moe-pad-expert-input-to-capacity", True  # as it is estimated
    if degrees.pipeline > 1:
        stages = degrees.pipeline * degrees.chunks
        settings = layout.memory.megatron_settings
        ends = settings.ends if settings else (0, 0)
        yield LAYOUT, f"'{layout_of(layout.shape.layers, stages, ends)}'"
    yield "micro-batch-size", layout.samples
    yield "global-batch-size", layout.job.batch.size * layout.data
    yield "seq-length", layout.job.batch.sequence
    yield "max-position-embeddings", layout.job.batch.sequence


def _memory(layout: EngineLayout) -> Flags:
    memory = layout.memory
    if memory.param_dtype != "fp32":
        yield str(memory.param_dtype), True
        if memory.reduce_dtype == "fp32":
            yield "accumulate-allreduce-grads-in-fp32", True
        elif memory.param_dtype == "bf16":
            yield "grad-reduce-in-bf16", True
    yield "optimizer", the_other_way(OPTIMIZERS)[layout.job.train.optimizer]
    yield "use-distributed-optimizer", memory.zero == 1
    if memory.zero == 1:
        yield REPLICAS, layout.degrees.data_replicate
        yield from (("overlap-grad-reduce", True), ("overlap-param-gather", True))
    policy = layout.said["memory.checkpointing"]
    if policy == "core_attention":
        yield "recompute-granularity", "selective"
    elif policy == "full":
        yield from (("recompute-granularity", "full"), ("recompute-method", "uniform"))
        yield "recompute-num-layers", 1


MEGATRON = Engine(
    "Megatron-LM",
    "core 0.20, d98e8a6, 2026-08-22",
    {
        **{f"parallel.{key}": (ANY,) for key in DEGREES},
        "parallel.data_replicate": (ANY,),
        "parallel.data_shard": (ANY,),
        "parallel.sequence": (ANY,),
        "parallel.schedule": ("1f1b", "interleaved_1f1b"),
        "parallel.chunks": (ANY,),
        "parallel.microbatches": (ANY,),
        "parallel.capacity_factor": (ANY,),
        "memory.runtime": ("megatron",),
        "memory.zero": (3, 1),
        "memory.checkpointing": ("none", "full", "core_attention"),
        "memory.param_dtype": (ANY,),
        "memory.reduce_dtype": (ANY,),
        "memory.implementation": ("fused",),
        "memory.loss": ("parallel",),
        "train.optimizer": tuple(OPTIMIZERS.values()),
        "model.kind": ("llama",),
        **{f"model.{key}": (ANY,) for key in (*WIDTHS, *SWITCHES, *OTHERS)},
    },
    _more,
    _written,
)
