"""A TorchTitan configuration (its TOML files) as a job whose memory is estimated.

A key that changes memory is followed or refused by name. Sections that do not are left out, and so
are single keys of the others; which, is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwright.core.errors import InputError, expected
from shardwright.job.imported import Document, Imported, Keys
from shardwright.job.pipelining import named


def _sizes(
    layers: int, dim: int, heads: int, kv_heads: int, ffn_dim: int, vocab: int, **more: Any
) -> dict[str, Any]:
    names = ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab")
    return dict(zip(names, (layers, dim, heads, kv_heads, ffn_dim, vocab), strict=True)) | more


def _qwen3(
    layers: int, dim: int, heads: int, ffn_dim: int, *, tied: bool = False
) -> dict[str, Any]:
    more = {"head_dim": 128, "qk_norm": True, "tied_embeddings": tied}
    return _sizes(layers, dim, heads, 8, ffn_dim, 151_936, **more)


def _qwen3_moe(
    layers: int, dim: int, heads: int, ffn_dim: int, expert_ffn_dim: int, kv_heads: int
) -> dict[str, Any]:
    experts = {"experts": 128, "experts_per_token": 8, "expert_ffn_dim": expert_ffn_dim}
    return _qwen3(layers, dim, heads, ffn_dim) | {"kv_heads": kv_heads} | experts


def _deepseek(
    sizes: dict[str, Any],
    experts: int,
    active: int,
    wide: int,
    shared: int,
    dense: int,
    **rank: int,
) -> dict[str, Any]:
    """Heads of 128 numbers and 64 that are turned; ``dense`` layers before those with experts."""
    return sizes | {
        "head_dim": 192,
        "experts": experts,
        "experts_per_token": active,
        "expert_ffn_dim": wide,
        "shared_ffn_dim": shared * wide,
        "moe_layers": [*range(dense, sizes["layers"])],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **rank,
    }


LLAMA_3 = 128_256  # words
FLAVORS: dict[str, dict[str, dict[str, Any]]] = {
    "llama2": {
        "7B": _sizes(32, 4096, 32, 32, 11_008, 32_000),
        "13B": _sizes(40, 5120, 40, 40, 13_824, 32_000),
        "70B": _sizes(80, 8192, 64, 8, 28_672, 32_000),
    },
    "llama3": {
        "8B": _sizes(32, 4096, 32, 8, 14_336, LLAMA_3),
        "70B": _sizes(80, 8192, 64, 8, 28_672, LLAMA_3),
        "405B": _sizes(126, 16_384, 128, 8, 53_248, LLAMA_3),
    },
    "qwen3": {
        "0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
        "1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
        "4B": _qwen3(36, 2560, 32, 9728, tied=True),
        "8B": _qwen3(36, 4096, 32, 12_288),
        "14B": _qwen3(40, 5120, 40, 17_408),
        "32B": _qwen3(64, 5120, 64, 25_600),
        "30B-A3B": _qwen3_moe(48, 2048, 32, 6144, 768, kv_heads=4),
        "235B-A22B": _qwen3_moe(94, 4096, 64, 12_288, 1536, kv_heads=4),
    },
    "deepseek_v3": {
        "16B": _deepseek(_sizes(27, 2048, 16, 16, 10_944, 102_400), 64, 6, 1408, 2, 1),
        "236B": _deepseek(
            _sizes(60, 5120, 128, 128, 12_288, 102_400), 160, 6, 1536, 2, 1, q_lora_rank=1536
        ),
        "671B": _deepseek(
            _sizes(61, 7168, 128, 128, 18_432, 129_280), 256, 8, 2048, 1, 3, q_lora_rank=1536
        ),
    },
}
"""Published sizes, by the names that TorchTitan gives models and their flavors."""

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
HARMLESS = re.compile(
    "job|profiling|metrics|lr_scheduler|checkpoint|comm|validation|debug|fault_tolerance|experimental"
)
"""Sections that change no memory of a step."""


def job_of(config: Mapping[str, Any], world_size: int | None) -> Imported:
    """The job of a parsed configuration on ``world_size`` ranks, or as many as its degrees make.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    keys = Keys(config, HARMLESS)
    parallel, ranks = _parallel(keys, world_size)
    document = {
        "model": _model(keys),
        "cluster": {"compute_device": "cuda", "world_size": ranks},
        "batch": {"size": keys.number("training", "local_batch_size", "batch_size", default=8)},
        "parallel": parallel,
        "memory": _memory(keys, parallel["tensor"] > 1),
        "train": {"optimizer": keys.one_of("optimizer", "name", OPTIMIZERS, "AdamW")},
    }
    document["batch"]["sequence"] = keys.number("training", "seq_len", default=2048)
    _microbatches(keys, document, ranks)
    if keys.value("optimizer", "early_step_in_backward", False):
        raise keys.refused("optimizer", "early_step_in_backward", "false")
    _refuse_other_degrees(keys)
    return keys.imported(document)


def _refuse_other_degrees(keys: Keys) -> None:
    """Degrees that nobody read, such as those that earlier versions have in other sections."""
    # An unknown degree would divide the model in the run and not in the estimate: that one key is
    # refused where others are told as unread.
    for section, key, value in keys.unread():
        if key.endswith("_degree") and value not in (1, -1):
            wanted = "1, for degrees are read from [parallelism] and this is none of them"
            raise keys.refused(section, key, wanted)


def _model(keys: Keys) -> dict[str, Any]:
    name = keys.one_of("model", "name", {known: known for known in FLAVORS}, "llama3")
    flavors = {known: known for known in FLAVORS[name]}
    return {"kind": "llama"} | FLAVORS[name][keys.one_of("model", "flavor", flavors, "")]


def _parallel(keys: Keys, world_size: int | None) -> tuple[dict[str, Any], int]:
    """Degrees, and the ranks that they come to."""
    section = {
        ours: keys.number("parallelism", f"{theirs}_degree", default=1)
        for ours, theirs in {
            "data_replicate": "data_parallel_replicate",
            "tensor": "tensor_parallel",
            "pipeline": "pipeline_parallel",
            "context": "context_parallel",
            "expert": "expert_parallel",
        }.items()
    }
    shard = keys.number("parallelism", "data_parallel_shard_degree", default=-1, least=-1)
    others = section["data_replicate"] * section["tensor"] * section["pipeline"]
    # Expert ranks are left out of the product: they are ranks of the others, regrouped.
    others *= section["context"]
    if shard == -1 and world_size is None:
        raise InputError(
            expected(
                "parallelism.data_parallel_shard_degree",
                "a number, or the ranks of the job",
                "-1: all ranks that are left",
                "Say how many ranks there are with -n.",
            )
        )
    ranks = world_size or others * shard
    if ranks % others or (shard != -1 and ranks != others * shard):
        degrees = " x ".join(str(n) for n in (*section.values(), shard) if n not in (1, -1)) or "1"
        wanted = f"ranks that the degrees {degrees} come to"
        raise InputError(expected("-n", wanted, f"{ranks}"))
    return section | {"data_shard": ranks // others}, ranks


def _microbatches(keys: Keys, document: Document, ranks: int) -> None:
    """Parts of a rank's batch: those of a pipeline, or backwards until a step."""
    batch, parallel = document["batch"], document["parallel"]
    in_all = keys.number("training", "global_batch_size", default=-1, least=-1)
    data = parallel["data_replicate"] * parallel["data_shard"]
    if in_all > 0 and in_all != batch["size"] * data:
        if in_all % (batch["size"] * data):
            wanted = f"a multiple of {batch['size']} x {data} data ranks"
            raise InputError(expected("training.global_batch_size", wanted, f"{in_all}"))
        if parallel["pipeline"] > 1:
            raise keys.refused("training", "global_batch_size", "one batch to a step in a pipeline")
        parallel["microbatches"] = in_all // (batch["size"] * data)
        # Ours is what a rank sees in a step; TorchTitan's is what it sees in one backward.
        batch["size"] *= parallel["microbatches"]
    size = keys.number("parallelism", "pipeline_parallel_microbatch_size", default=1)
    schedule = keys.value("parallelism", "pipeline_parallel_schedule", "1F1B")
    if parallel["pipeline"] > 1:
        parallel["schedule"] = named(str(schedule)).name
        parallel["microbatches"] = max(1, batch["size"] // size)


def _memory(keys: Keys, cuts_words: bool) -> dict[str, Any]:
    if keys.value("training", "dtype", "float32") != "float32":
        raise keys.refused("training", "dtype", "float32")
    disabled = keys.value("parallelism", "disable_loss_parallel", False)
    reshard = keys.value("parallelism", "fsdp_reshard_after_forward", "default")
    resharded = {"default": "default", "always": True, "never": False}
    if reshard not in resharded:
        raise keys.refused("parallelism", "fsdp_reshard_after_forward", "default, always or never")
    offloads = keys.value("training", "enable_cpu_offload", False)
    return {
        "runtime": "fsdp2",
        "lowering": "cuda",
        "checkpointing": _checkpointing(keys),
        "param_dtype": keys.one_of("training", "mixed_precision_param", DTYPES, "bfloat16"),
        "reduce_dtype": keys.one_of("training", "mixed_precision_reduce", DTYPES, "float32"),
        "reshard_after_forward": resharded[reshard],
        "implementation": str(keys.value("optimizer", "implementation", "fused")).replace("-", "_"),
        "compile": _compiled(keys),
        "float8": _float8(keys),
        "offload": "all" if offloads else "none",
        "loss": "parallel" if cuts_words and not disabled else "gathered",
    }


def _checkpointing(keys: Keys) -> str:
    mode = keys.value("activation_checkpoint", "mode", "selective")
    every = str(keys.value("activation_checkpoint", "selective_ac_option", "2"))
    if mode in ("none", "full"):
        return str(mode)
    if mode != "selective":
        raise keys.refused("activation_checkpoint", "mode", "none, selective or full")
    if every != "op" and not every.isdigit():
        raise keys.refused("activation_checkpoint", "selective_ac_option", "op or a number")
    return "selective_op" if every == "op" else f"layers:{every}"


def _compiled(keys: Keys) -> bool | str:
    # Where earlier versions had it. Both are read, so that a file of either is.
    old = keys.value("training", "compile", False)
    parts = keys.value("compile", "components", ["model", "loss"])
    if not (keys.value("compile", "enable", False) or old) or "model" not in parts:
        return False
    return True if "loss" in parts else "blocks"


def _float8(keys: Keys) -> bool | str:
    converters = keys.value("model", "converters", [])
    wanted = [converters] if isinstance(converters, str) else list(converters)
    quantize = keys.value("quantize", "linear", {})
    inner = quantize.get("float8", {}) if isinstance(quantize, Mapping) else {}
    recipe = keys.value("float8", "recipe_name", None) or inner.get("recipe_name") or "tensorwise"
    for name in filter(None, wanted):
        if name not in ("float8", "quantize.linear.float8"):
            raise keys.refused("model", "converters", "float8 or none")
    old = keys.value("float8", "enable_float8_linear", False)  # of earlier versions
    if not any(wanted) and not old:
        return False
    if recipe not in ("tensorwise", "rowwise"):
        raise keys.refused("float8", "recipe_name", "tensorwise or rowwise")
    return str(recipe)
