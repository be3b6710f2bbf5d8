"""A layout as the arguments of Megatron-LM's ``pretrain_gpt.py``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shardwright.core.errors import expected
from shardwright.core.llama import LlamaShape
from shardwright.core.megatron import MegatronSettings
from shardwright.job.engines.layout import (
    ANY,
    Engine,
    EngineLayout,
    flag_lines,
    the_other_way,
    torchrun,
)
from shardwright.job.megatron import DEGREES, LAYOUT, OPTIMIZERS, REPLICAS, layout_of
from shardwright.job.megatron_model import FUSIONS, GATES, SQUARES
from shardwright.job.model import MLPS

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
    "mtp_layers": "mtp-num-layers",
}
OTHERS = (
    *("kv_heads", "head_dim", "v_head_dim", "vocab", "tied_embeddings", "moe_layers", "qk_norm"),
    *("attention_bias", "output_bias", "mlp_bias", "activation", "ungated", "layer_norm"),
    *("positions", "dropout", "attention_dropout"),
)
KERNELS = MegatronSettings.__struct_fields__
SWITCHES = (
    *("masked_softmax_fusion", "gradient_accumulation_fusion"),
    *("create_attention_mask_in_dataloader", "fp8_param_gather", "deterministic_mode"),
)


def _more(layout: EngineLayout) -> Iterator[str]:
    yield from _of_model(layout.shape)
    yield from _of_kernels(layout)
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
    fused = _implementation(layout.job.train.optimizer)
    if layout.said["memory.implementation"] != fused:
        yield expected("memory.implementation", fused, layout.said["memory.implementation"])
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


def _implementation(optimizer: str) -> str:
    return "foreach" if optimizer == "muon" else "fused"  # of which none is


def _of_model(shape: LlamaShape) -> Iterator[str]:
    """What its layers cannot be."""
    if not _mlp(shape):
        gate = "without a gate" if shape.ungated else "of a gate"
        yield expected("model.mlp", " or ".join(MLPS), f"{shape.activation} {gate}")
    every = (shape.attention_bias or bool(shape.kv_lora_rank), shape.output_bias, shape.mlp_bias)
    if any(every[1:]) and not all(every):
        yield expected("model.bias", "biases of all linear layers, or of queries alone", "some")
    if shape.moe_layers and shape.mlp_bias:
        yield expected("model.bias", "false beside experts, which would have some", "true")
    if shape.further and shape.learned_positions:
        yield expected("model.positions", "'rope' or 'none' beside mtp_layers", "learned ones")


def _of_kernels(layout: EngineLayout) -> Iterator[str]:
    """What its kernels cannot do."""
    kernels, where = _kernels(layout), "memory.megatron."
    if kernels.bias_activation_fusion and _adds_bias(layout.shape) and not layout.shape.mlp_bias:
        wanted = "false without model.bias, which its kernel adds"
        yield expected(f"{where}bias_activation_fusion", wanted, "true")
    if kernels.fp8_param_gather and (kernels.fp8_format == "none" or layout.memory.zero != 1):
        wanted = "false without fp8_format and memory.zero = 1"
        yield expected(f"{where}fp8_param_gather", wanted, "true")
    if kernels.deterministic_mode and kernels.cross_entropy_loss_fusion != "none":
        fused = kernels.cross_entropy_loss_fusion
        yield expected(f"{where}cross_entropy_loss_fusion", "none beside deterministic_mode", fused)
    if kernels.attention_backend == "local":
        beside = "beside attention_backend 'local'"
        if kernels.fp8_format != "none":
            yield expected(f"{where}fp8_format", f"none {beside}", kernels.fp8_format)
        if layout.degrees.context > 1:
            yield expected("parallel.context", f"1 {beside}", str(layout.degrees.context))


def _adds_bias(shape: LlamaShape) -> bool:
    """Whether what activates in one kernel adds a bias before."""
    return _mlp(shape) in ("gelu", "geglu")


def _mlp(shape: LlamaShape) -> str:
    """The name of its MLP; empty where there is none."""
    its = (shape.activation, not shape.ungated)
    return next((name for name, known in MLPS.items() if known == its), "")


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
    return flag_lines(f"{one}{torchrun(layout)} pretrain_gpt.py", iter(words))


Flags = Iterator[tuple[str, Any]]


def _model(layout: EngineLayout) -> Flags:
    shape = layout.shape
    for key, name in WIDTHS.items():
        if value := getattr(shape, key):
            yield name, value
    # Megatron-LM norms what it makes latent heads of where it is told to; ours always does.
    yield "qk-layernorm", shape.qk_norm or shape.kv_lora_rank > 0
    if shape.kv_lora_rank:
        yield "multi-latent-attention", True
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
    yield from ((name, ours == _mlp(shape)) for name, ours in GATES.items())
    yield "disable-bias-linear", not shape.mlp_bias
    yield "add-qkv-bias", shape.attention_bias and not shape.mlp_bias
    yield "normalization", "LayerNorm" if shape.layer_norm else "RMSNorm"
    yield "norm-epsilon", shape.norm_eps
    turned = "none" if shape.positions else "rope"
    yield "position-embedding-type", "learned_absolute" if shape.learned_positions else turned
    yield "rotary-base", False if shape.positions else int(shape.rope_theta)
    yield "max-position-embeddings", shape.learned_positions or layout.job.batch.sequence
    yield "attention-dropout", shape.attention_dropout or 0.0
    yield "hidden-dropout", shape.dropout or 0.0


def _pattern(shape: LlamaShape) -> str:
    runs = groupby(shape.is_moe(layer) for layer in range(shape.layers))
    return "'" + "+".join(f"[{int(moe)}]*{len([*group])}" for moe, group in runs) + "'"


def _parallel(layout: EngineLayout) -> Flags:
    degrees = layout.degrees
    for key, name in DEGREES.items():
        yield name, getattr(degrees, key)
    yield "sequence-parallel", degrees.sequence
    if degrees.expert > 1 or degrees.expert_tensor:
        # else that of other layers
        yield "expert-tensor-parallel-size", degrees.expert_tensor or 1
    if factor := layout.said["parallel.capacity_factor"]:
        yield "moe-expert-capacity-factor", factor
        yield "moe-pad-expert-input-to-capacity", True  # as it is estimated
    if degrees.pipeline > 1:
        stages, shape = degrees.pipeline * degrees.chunks, layout.shape
        ends = _kernels(layout).ends
        yield LAYOUT, f"'{layout_of(shape.layers, stages, ends, shape.further)}'"
    yield "micro-batch-size", layout.samples
    yield "global-batch-size", layout.job.batch.size * layout.data
    yield "seq-length", layout.job.batch.sequence


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
    elif policy != "none":
        first = policy.removeprefix("first:")
        yield "recompute-granularity", "full"
        yield "recompute-method", "uniform" if policy == "full" else "block"
        yield "recompute-num-layers", 1 if policy == "full" else first
    yield from _switched(_kernels(layout), _mlp(layout.shape))


def _kernels(layout: EngineLayout) -> MegatronSettings:
    return layout.memory.megatron_settings or MegatronSettings()


def _switched(kernels: MegatronSettings, mlp: str) -> Flags:
    """What is not by default; what the ends weigh stands in the layout of stages."""
    backend, loss = kernels.attention_backend, kernels.cross_entropy_loss_fusion
    if backend == "local":
        yield "transformer-impl", "local"
    elif backend != "fused":
        yield "attention-backend", backend
    squares, fuses = mlp == "squared_relu", kernels.bias_activation_fusion
    yield FUSIONS.get(mlp, FUSIONS["gelu"]), squares or not fuses
    yield SQUARES, squares and fuses
    yield "cross-entropy-loss-fusion", loss != "none"
    yield "cross-entropy-fusion-impl", loss if loss != "none" else False
    yield "fp8-format", kernels.fp8_format if kernels.fp8_format != "none" else False
    for key in SWITCHES:
        name = key.replace("_", "-")
        usual = getattr(MegatronSettings(), key)
        yield f"no-{name}" if usual else name, getattr(kernels, key) is not usual


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
        "parallel.expert_tensor": (ANY,),
        "memory.runtime": ("megatron",),
        "memory.zero": (3, 1),
        "memory.checkpointing": ("none", "full", "core_attention", "first:*"),
        "memory.param_dtype": (ANY,),
        "memory.reduce_dtype": (ANY,),
        "memory.implementation": ("fused", "foreach"),
        "memory.loss": ("parallel",),
        "train.optimizer": tuple(OPTIMIZERS.values()),
        "model.kind": ("llama",),
        **{f"model.{key}": (ANY,) for key in (*WIDTHS, *OTHERS)},
        **{f"memory.megatron.{key}": (ANY,) for key in KERNELS},
        "memory.megatron.rms_norm_fusion": (True,),
        "memory.megatron.cross_entropy_loss_fusion": ("none", "native"),  # not Engine's own
    },
    _more,
    _written,
    {
        "memory.zero": lambda _: 1,  # without it every rank has all states
        "memory.implementation": lambda job: _implementation(job.train.optimizer),
    },
)
