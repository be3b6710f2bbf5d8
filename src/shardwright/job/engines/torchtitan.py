"""A layout as TorchTitan's flags, those of its main branch, and as the TOML of its releases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from shardwright.core.document import encode_toml, to_kind
from shardwright.core.errors import expected
from shardwright.core.llama import LlamaShape
from shardwright.job.asked import DTYPES
from shardwright.job.engines.layout import (
    ANY,
    NO_WIDTH,
    Engine,
    EngineLayout,
    flag_lines,
    started,
    the_other_way,
    torchrun,
)
from shardwright.job.model import ModelSection, completed
from shardwright.job.parallel import ENDS_WEIGH
from shardwright.job.pipelining import SCHEDULES
from shardwright.job.torchtitan import CONFIGS, DEGREES, FLAVORS, OPTIMIZERS, RESHARDS

# Of torch.distributed.pipelining, which ZB-H1 and ZB-H2 are not in.
ORDERS = tuple(name for name in SCHEDULES if not name.startswith("zbh"))
_BOTH: dict[str, tuple[Any, ...]] = {
    **{f"parallel.{key}": (ANY,) for key in DEGREES},
    "parallel.sequence": (ANY,),
    "parallel.schedule": ORDERS,
    "parallel.microbatches": (ANY,),
    "parallel.chunks": (ANY,),
    "memory.runtime": ("fsdp2",),
    "memory.param_dtype": ("bf16", "fp32"),
    "memory.reduce_dtype": ("fp32",),
    "memory.implementation": ("fused", "foreach", "for_loop"),
    "memory.reshard_after_forward": (ANY,),
    "memory.compile": (ANY,),
    "memory.offload": ("none", "all"),
    "model": (ANY,),
    "model.kind": ("llama",),
}


@cache
def _flavors() -> dict[LlamaShape, tuple[str, str]]:
    """Family and flavor by their widths."""
    return {
        _plain(completed(to_kind({"kind": "llama"} | sizes, ModelSection), "", None).shape): (
            family,
            flavor,
        )
        for family, flavors in FLAVORS.items()
        for flavor, sizes in flavors.items()
    }


def _plain(shape: Any) -> LlamaShape:
    """Its widths alone."""
    usual = {
        field.name: field.default
        for field in msgspec.structs.fields(LlamaShape)
        if field.name in NO_WIDTH
    }
    plain: LlamaShape = msgspec.structs.replace(shape, **usual)
    return plain


def _flavor(layout: EngineLayout) -> tuple[str, str] | None:
    return _flavors().get(_plain(layout.shape))


def _config(layout: EngineLayout) -> str | None:
    found = _flavor(layout)
    return next((name for name, c in CONFIGS.items() if (c.module, c.flavor) == found), None)


def _float8_of(name: str) -> str | bool:
    found: str | bool = CONFIGS[name].more.get("float8", {}).get("recipe_name", False)
    return found


def _per_stage(layout: EngineLayout) -> int | None:
    """Layers that make so many stages, where they are not the schedule's usual ones; 0 where none
    do."""
    degrees = layout.degrees
    if degrees.pipeline == 1 or degrees.chunks == SCHEDULES[degrees.schedule].usual_chunks:
        return None
    weight, count = layout.shape.layers + sum(ENDS_WEIGH), degrees.pipeline * degrees.chunks
    each = math.ceil(weight / count)
    return each if math.ceil(weight / each) == count else 0


def _of_both(layout: EngineLayout) -> Iterator[str]:
    degrees = layout.degrees
    if _flavor(layout) is None:
        known = ", ".join(f"{family} {' '.join(FLAVORS[family])}" for family in FLAVORS)
        shape = layout.shape
        found = f"{shape.layers} layers of {shape.dim}, {shape.vocab} words"
        yield expected("model", f"one of TorchTitan's: {known}", found)
    if _per_stage(layout) == 0:
        wanted = f"stages that {layout.shape.layers} layers and both ends come to in equal parts"
        found = f"{degrees.pipeline} x {degrees.chunks}"
        yield expected("parallel.chunks", wanted, found)


def _of_releases(layout: EngineLayout) -> Iterator[str]:
    yield from _of_both(layout)
    degrees, tensor = layout.degrees, layout.degrees.tensor
    if tensor > 1 and not degrees.sequence:
        yield expected("parallel.sequence", "true beside parallel.tensor in releases", "false")
    if tensor == 1 and layout.memory.loss == "parallel":
        yield expected("memory.loss", "'gathered' without parallel.tensor", "'parallel'")
    if degrees.shards == 1 and layout.memory.param_dtype != "fp32":
        # Without FSDP nothing casts parameters there: autocast does, or nothing.
        wanted = "at least 2, times parallel.context, for releases compute in bf16 by FSDP alone"
        yield expected("parallel.data_shard", wanted, "1")
    elif degrees.shards == 1 and degrees.data_replicate > 1:
        yield expected("parallel.data_shard", "at least 2 beside data_replicate, else DDP", "1")
    parts = tensor * (2 * degrees.context if degrees.context > 1 else 1)
    if layout.job.batch.sequence % parts:
        yield expected("batch.sequence", f"a multiple of {parts}", str(layout.job.batch.sequence))


def _of_main(layout: EngineLayout) -> Iterator[str]:
    yield from _of_both(layout)
    name, degrees = _config(layout), layout.degrees
    if name is None and _flavor(layout):
        wanted = f"a model that main has a configuration of ({', '.join(CONFIGS)})"
        yield expected("model", wanted, " ".join(_flavor(layout) or ()))
    if name and (given := layout.said["memory.float8"]) != _float8_of(name):
        wanted = f"{str(_float8_of(name)).lower()}, which --config {name} sets and no flag changes"
        yield expected("memory.float8", wanted, str(given).lower())
    tokens = layout.samples * layout.job.batch.sequence
    parts = degrees.tensor if degrees.sequence else 1
    parts *= 2 * degrees.context if degrees.context > 1 else 1
    if tokens % parts:
        yield expected("batch", f"a multiple of {parts} tokens to a microbatch", str(tokens))


def _same(layout: EngineLayout) -> dict[str, dict[str, Any]]:
    """Sections that both forms have."""
    degrees, memory = layout.degrees, layout.memory
    parallelism = {theirs: getattr(degrees, ours) for ours, theirs in DEGREES.items()}
    parallelism["fsdp_reshard_after_forward"] = next(
        name for name, ours in RESHARDS.items() if ours == memory.reshard_after_forward
    )
    if degrees.pipeline > 1:
        parallelism["pipeline_parallel_schedule"] = SCHEDULES[degrees.schedule].title
        parallelism["pipeline_parallel_layers_per_stage"] = _per_stage(layout)
    parts = ["model"] if memory.compile == "blocks" else ["model", "loss"]
    return {
        "training": {
            "mixed_precision_param": the_other_way(DTYPES)[memory.param_dtype],
            "mixed_precision_reduce": the_other_way(DTYPES)[memory.reduce_dtype],
            "enable_cpu_offload": memory.offload == "all",
        },
        "parallelism": parallelism,
        "compile": {"enable": memory.compile is not False, "components": parts},
        "optimizer": {
            "implementation": layout.said["memory.implementation"].replace("_", "-"),
        },
    }


def _toml(layout: EngineLayout) -> str:
    family, flavor = _flavor(layout) or ("", "")
    degrees, said = layout.degrees, layout.said
    sections = _same(layout)
    pipelined = degrees.pipeline > 1
    sections["training"] |= {
        "local_batch_size": layout.samples * (degrees.microbatches if pipelined else 1),
        "global_batch_size": layout.job.batch.size * layout.data,
        "seq_len": layout.job.batch.sequence,
    }
    if pipelined:
        sections["parallelism"]["pipeline_parallel_microbatch_size"] = layout.samples
    if degrees.schedule == "dualpipev" and degrees.expert > 1:
        # An exchange of its own way, which no checkpointing goes with.
        sections["parallelism"]["pipeline_parallel_expert_parallel_overlap"] = False
    if degrees.tensor > 1:
        gathered = layout.memory.loss == "gathered"
        sections["parallelism"]["disable_loss_parallel"] = gathered
    mode, _, every = said["memory.checkpointing"].partition(":")
    policy = {"mode": "selective" if every else mode}
    if policy["mode"] == "selective":
        policy["selective_ac_option"] = every or "op"
    sections["optimizer"]["name"] = the_other_way(OPTIMIZERS)[layout.job.train.optimizer]
    model: dict[str, Any] = {"name": family, "flavor": flavor}
    found: dict[str, Any] = {"model": model, **sections, "activation_checkpoint": policy}
    if said["memory.float8"]:
        model["converters"] = ["quantize.linear.float8"]
        found["quantize"] = {"linear": {"float8": {"recipe_name": said["memory.float8"]}}}
    return started(layout, "-m torchtitan.train --job.config_file FILE") + encode_toml(found)


def _flags(layout: EngineLayout) -> str:
    name, degrees = _config(layout) or "", layout.degrees
    sections = _same(layout)
    tokens = layout.samples * layout.job.batch.sequence
    sections["training"] |= {
        "num_tokens_per_microbatch_per_dp_rank": tokens,
        "num_tokens_per_train_step": tokens * degrees.microbatches * layout.data,
        "max_context_length": layout.job.batch.sequence,
        # An estimate has none, and a pipeline cannot have any.
        "disable_cuda_graphs": True,
    }
    if degrees.pipeline > 1:
        sections["parallelism"]["num_pp_microbatches"] = degrees.microbatches
    if degrees.tensor > 1:
        sections["parallelism"]["enable_sequence_parallel"] = degrees.sequence
    # A configuration may have it on, and then refuses to be compiled in part or not at all.
    sections["compile"]["enable_async_tensor_parallel"] = False
    policy = f"activation-checkpoint:{layout.said['memory.checkpointing']}"
    head = f"{torchrun(layout)} -m torchtitan.train --module {CONFIGS[name].module}"
    flags = (
        _flag(f"{section}.", key, value)
        for section, keys in sections.items()
        for key, value in keys.items()
        if value is not None
    )
    return flag_lines(f"{head} --config {name}", iter([*flags, policy]))


def _flag(section: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{section}{'' if value else 'no_'}{key}"
    return f"--{section}{key} {','.join(value) if isinstance(value, list) else value}"


MAIN = Engine(
    "TorchTitan's main branch",
    "b5bcd76, 2026-08-21",
    _BOTH
    | {
        "memory.checkpointing": ("none", "selective", "full"),
        "memory.float8": (ANY,),
        "memory.loss": ("chunked",),
        "train.optimizer": ("adamw",),
    },
    _of_main,
    _flags,
)
RELEASES = Engine(
    "TorchTitan's releases",
    "0.2.2",
    _BOTH
    | {
        "memory.checkpointing": ("none", "selective", "full", "layers:*"),
        "memory.float8": (ANY,),
        "memory.loss": ("gathered", "parallel"),
        "train.optimizer": ("adamw", "adam"),
    },
    _of_releases,
    _toml,
)
