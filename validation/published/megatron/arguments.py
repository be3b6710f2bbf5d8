"""The arguments of a Megatron-LM run as a checked description.

Defaults are Megatron-LM's own (``megatron/training/arguments.py`` and ``TransformerConfig``,
commit d98e8a64); what neither the arguments nor those defaults say is assumed and listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from published.megatron.description import (
    Device,
    Optimizer,
    Parallel,
    Precision,
    Recompute,
    Run,
)
from published.megatron.flags import Flags
from published.megatron.kernel_arguments import cublas_workspace, read_kernels
from published.megatron.model_arguments import read_shape
from published.megatron.stages import last_rank_chunks, virtual_stages
from shardwright.core.errors import InputError, UnsupportedError, expected

UNSUPPORTED = {
    "encoder-num-layers": "a model with an encoder",
    "decoder-seq-length": "a model with an encoder",
    "export-kd-teacher-load": "a distillation run: the teacher's size stands in a file of its own",
    "perform-rl-step": "a reinforcement-learning run: an inference engine shares the memory",
    "img-h": "a model with a vision encoder",
    "model-provider": "a model given by a provider of its own",
    "bert-binary-head": "a BERT model",
    "retro-project-dir": "a retrieval model",
    "lora-rank": "adapters",
    "engram-layers": "a model with n-gram memories",
    "flextron": "an elastic model",
    "num-residual-streams": "a model with several residual streams",
    "dsv4-hybrid": "an attention variant without a table",
}
"""Flags of runs that no table here describes, and what they are."""

HARMLESS = re.compile(
    "|".join(
        (
            r"(log|logging|tensorboard|wandb|timing|profile|straggler|one-logger|mlflow)-?.*",
            r".*(-dir|-path|-file|-prefix|-cfg)$",
            r"(lr|min-lr|decoupled|adam|muon|sgd|weight-decay|start-weight|clip|init|seed)-?.*",
            r"(ckpt|save|load|no-load|no-save|no-ckpt|dist-ckpt|async|eval|exit|auto-detect).*",
            r"(use-persistent|use-dist-ckpt|use-checkpoint|finetune|no-initialization|rerun).*",
            r"(override|verify|check|no-check|error-injection|manual-gc|empty-unused).*",
            r"(train|rampup|split|data|dataloader|mock|num-workers|tokenizer|tiktoken|no-mmap).*",
            r"(distributed-backend|distributed-timeout|disable-gloo|high-priority|nccl|use-tp-pp).*",
            r"(overlap|ddp|tp-comm|delay|defer-grad|align|tunable|no-overlap|average)-.*",
            r"(moe-(aux|z-loss|input-jitter|router|per-layer|flex|hybridep|deepep|permute|use).*)",
            r"(norm|rotary|mscale|beta|attention-softmax|apply|mtp-loss|calculate|no-rope).*",
            r"(deterministic|use-mcore|use-legacy|enable-experimental|te-rng|cuda-graph|no-bias).*",
            r"(max-position|cp-comm|hierarchical|expert-|is-hybrid|spec|bf16|fp8|first-last).*",
            r"(disable|no-persist|no-async|attention-backend|use-flash|reset|eod|no-create).*",
            r"(microbatch-group|use-rotary|outer-dp|fim|hysteresis|loss-scale|initial-loss).*",
        )
    )
)
"""Flags that change no bytes here: logging, data, checkpoints, rates, and settings of modules
whose bytes follow from other flags."""


def describe(
    arguments: Mapping[str, Any],
    *,
    world: int,
    device: Device,
    environment: Mapping[str, Any] | None = None,
    old_engine: bool = False,
    where: str = "arguments",
) -> Run:
    """Read the arguments of a run on ``world`` ranks. ``old_engine`` is a Transformer Engine that
    has no deterministic flash or fused attention."""
    flags = Flags(arguments, where)
    _refuse(flags)
    assumed: list[str] = []
    parallel = _parallel(flags, world)
    shape = read_shape(flags, parallel.tensor, assumed)
    kernels = read_kernels(flags, shape, device, environment or {}, old_engine, assumed)
    micro = _micro_batch(flags, assumed)
    batch = flags.integer("global-batch-size", micro * parallel.data)
    run = Run(
        shape=shape,
        parallel=parallel,
        precision=_precision(flags),
        optimizer=_optimizer(flags),
        recompute=_recompute(flags),
        kernels=kernels,
        device=device,
        chunks=last_rank_chunks(flags, shape, parallel),
        micro_batch=micro,
        microbatches=max(1, batch // (micro * parallel.data)),
        sequence=flags.integer("seq-length", 0),
        cublas_workspace=cublas_workspace(environment or {}, device),
        assumed=tuple(assumed),
        ignored=(),
    )
    ignored = tuple(name for name in flags.unread() if not HARMLESS.fullmatch(name))
    return msgspec.structs.replace(run, ignored=ignored)


def _refuse(flags: Flags) -> None:
    for name, what in UNSUPPORTED.items():
        if name in flags and flags.on(name):
            raise UnsupportedError(
                expected(flags.where, "a GPT, MoE or hybrid language model", f"{what} ({name})")
            )
    trains = any(name in flags for name in ("train-iters", "train-samples"))
    if not trains and any(map(flags.any, ("inference-", "num-tokens-to-", "prompt"))):
        raise UnsupportedError(expected(flags.where, "a training run", "an inference run"))
    missing = [name for name in ("hidden-size", "seq-length") if name not in flags]
    if missing:
        raise InputError(expected(flags.where, f"the argument {missing[0]}", "none"))


def _parallel(flags: Flags, world: int) -> Parallel:
    tensor = flags.integer("tensor-model-parallel-size", 1)
    pipeline = flags.integer("pipeline-model-parallel-size", 1)
    context = flags.integer("context-parallel-size", 1)
    expert = flags.integer("expert-model-parallel-size", 1)
    expert_tensor = flags.integer("expert-tensor-parallel-size", tensor)
    smallest = math.lcm(tensor * pipeline * context, pipeline * expert * expert_tensor)
    if "num-experts" not in flags:
        smallest, expert, expert_tensor = tensor * pipeline * context, 1, tensor
    world = max(world, smallest)
    if world % smallest:
        raise InputError(expected(flags.where, f"a multiple of {smallest} ranks", str(world)))
    return Parallel(
        world=world,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence=flags.on("sequence-parallel") and tensor > 1,
        chunks=virtual_stages(flags, pipeline),
    )


def _micro_batch(flags: Flags, assumed: list[str]) -> int:
    if "micro-batch-size" not in flags:
        assumed.append("micro-batch of 1: the arguments do not give its size")
    return flags.integer("micro-batch-size", 1)


_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def _width(flags: Flags, name: str, default: int) -> int:
    return _DTYPES.get(flags.text(name, "").removeprefix("torch."), default)


def _precision(flags: Flags) -> Precision:
    """A bf16 run accumulates gradients in fp32 unless ``grad-reduce-in-bf16`` says otherwise; an
    fp16 run only where ``accumulate-allreduce-grads-in-fp32`` is set."""
    compute: Literal["bf16", "fp16", "fp32"] = "fp32"
    if flags.on("bf16"):
        compute = "bf16"
    elif flags.on("fp16"):
        compute = "fp16"
    main_gradient = _width(flags, "main-grads-dtype", 4)
    fp32 = flags.on("accumulate-allreduce-grads-in-fp32") or compute == "bf16"
    if flags.on("grad-reduce-in-bf16") or main_gradient < 4:
        fp32 = False
    fp8 = flags.text("fp8-recipe", "delayed") if "fp8-format" in flags else ""
    if "fp4-format" in flags:
        fp8 = flags.text("fp4-recipe", "nvfp4")
    ends = flags.on("first-last-layers-bf16")
    return Precision(
        compute=compute,
        gradient=4 if fp32 or compute == "fp32" else 2,
        main_parameter=_width(flags, "main-params-dtype", 4),
        main_gradient=main_gradient,
        moments=(_width(flags, "exp-avg-dtype", 4), _width(flags, "exp-avg-sq-dtype", 4)),
        fp8=fp8,
        fp8_parameters=flags.on("fp8-param-gather") and bool(fp8),
        plain_ends=(
            flags.integer("num-layers-at-start-in-bf16", 1) * ends,
            flags.integer("num-layers-at-end-in-bf16", 1) * ends,
        ),
    )


def _optimizer(flags: Flags) -> Optimizer:
    fsdp: Literal["", "optim", "optim_grads", "optim_grads_params"] = ""
    if flags.on("use-torch-fsdp2"):
        fsdp = "optim_grads_params"
    elif flags.on("use-megatron-fsdp") or flags.on("use-custom-fsdp"):
        strategy = flags.text("data-parallel-sharding-strategy", "no_shard")
        if strategy in ("optim", "optim_grads", "optim_grads_params"):
            fsdp = cast(Literal["optim", "optim_grads", "optim_grads_params"], strategy)
    else:
        flags.raw("data-parallel-sharding-strategy")
    kind = flags.text("optimizer", "adam")
    offloaded = flags.number("optimizer-offload-fraction", 1.0)
    return Optimizer(
        kind=kind.removeprefix("dist_"),
        sharded=flags.on("use-distributed-optimizer"),
        instances=flags.integer("num-distributed-optimizer-instances", 1),
        precision_aware=flags.on("use-precision-aware-optimizer"),
        offloaded=offloaded if flags.on("optimizer-cpu-offload") else 0.0,
        fsdp=fsdp,
        reuses_gradients=flags.on("reuse-grad-buf-for-mxfp8-param-ag"),
    )


def _recompute(flags: Flags) -> Recompute:
    granularity = flags.text("recompute-granularity", "none")
    if flags.on("recompute-activations"):
        granularity = "selective"
    if granularity not in ("none", "full", "selective"):
        raise InputError(
            expected(f"{flags.where}: recompute-granularity", "full or selective", granularity)
        )
    modules = frozenset(flags.words("recompute-modules", ("core_attn",)))
    if flags.on("moe-layer-recompute"):
        granularity = "selective" if granularity == "none" else granularity
        modules |= {"moe"}
    offloaded: frozenset[str] = frozenset()
    if flags.on("fine-grained-activation-offloading"):
        offloaded = frozenset(flags.words("offload-modules", ()))
    return Recompute(
        granularity=cast(Literal["none", "full", "selective"], granularity),
        method=flags.text("recompute-method", "uniform"),
        layers=flags.integer("recompute-num-layers", 1),
        modules=modules if granularity == "selective" else frozenset(),
        distribute=flags.on("distribute-saved-activations"),
        offloaded=offloaded,
    )
