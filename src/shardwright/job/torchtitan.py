"""A TorchTitan configuration as a job whose memory is estimated: the TOML files of its releases, or
the flags of its main branch, which has no files any more.

A key that changes memory is followed or refused by name. Sections that do not are left out, and so
are single keys of the others; which, is said. What a key is called stands in tables that the export
(``engines/torchtitan.py``) reads the other way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from shardwright.core.document import parse_toml
from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.job.asked import DTYPES
from shardwright.job.imported import Document, Imported, Keys
from shardwright.job.megatron import arguments
from shardwright.job.parallel import ENDS_WEIGH
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

OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
RESHARDS: dict[str, bool | str] = {"default": "default", "always": True, "never": False}
DEGREES = {
    "data_replicate": "data_parallel_replicate_degree",
    "data_shard": "data_parallel_shard_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
    "context": "context_parallel_degree",
    "expert": "expert_parallel_degree",
}
"""Degrees of ``[parallel]`` and what ``[parallelism]`` calls them."""

HARMLESS = re.compile(
    "job|profiling|metrics|lr_scheduler|checkpoint|comm|validation|debug|fault_tolerance|experimental|"
    # of the main branch, and what starts it
    "profiler|validator|dataloader|tokenizer|hf_assets_path|dump_folder|"
    "nproc.*|nnodes|node_rank|rdzv.*|role|tee|local_ranks_filter|master.*"
)
"""Sections that change no memory of a step."""


class Configuration(NamedTuple):
    """A function of the main branch's ``config_registry`` files, as far as memory knows of it: its
    ``tokens`` are those of a microbatch on a data rank."""

    module: str
    flavor: str
    tokens: int
    sequence: int
    checkpointing: str
    more: Mapping[str, dict[str, Any]] = MappingProxyType({})

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """What it sets, in the sections that flags are of."""
        training = {"num_tokens_per_microbatch_per_dp_rank": self.tokens}
        policy = {"mode": self.checkpointing, "selective_ac_option": "op"}
        return {
            "training": training | {"max_context_length": self.sequence},
            "activation_checkpoint": policy,
            **self.more,
        }


_COMPILED_LOSS = {"compile": {"enable": True, "components": ["loss"]}}
_INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
CONFIGS = {
    "llama3_8b": Configuration("llama3", "8B", 8192, 8192, "selective"),
    "llama3_70b": Configuration(
        "llama3", "70B", 65_536, 8192, "full", {"parallelism": {"tensor_parallel_degree": 8}}
    ),
    "llama3_405b": Configuration(
        "llama3",
        "405B",
        16_384,
        8192,
        "full",
        {
            "parallelism": {"tensor_parallel_degree": 8},
            "compile": {"enable": True, "enable_async_tensor_parallel": True},
            "model": {"converters": ["float8"]},
            "float8": {"recipe_name": "rowwise"},
        },
    ),
    "qwen3_0_6b": Configuration("qwen3", "0.6B", 16_384, 4096, "selective"),
    "qwen3_1_7b": Configuration("qwen3", "1.7B", 16_384, 4096, "selective"),
    "qwen3_14b": Configuration("qwen3", "14B", 16_384, 4096, "full"),
    "qwen3_32b": Configuration("qwen3", "32B", 8192, 4096, "full"),
    "qwen3_30b_a3b": Configuration("qwen3", "30B-A3B", 8192, 4096, "full"),
    "deepseek_v3_16b": Configuration(
        "deepseek_v3",
        "16B",
        16_384,
        4096,
        "selective",
        {"parallelism": _INTERLEAVED | {"expert_parallel_degree": 8}, **_COMPILED_LOSS},
    ),
    "deepseek_v3_671b": Configuration(
        "deepseek_v3",
        "671B",
        16_384,
        4096,
        "selective",
        {"parallelism": _INTERLEAVED | {"expert_parallel_degree": 2}, **_COMPILED_LOSS},
    ),
}
"""Those of pytorch/torchtitan b5bcd76 (2026-08-21) whose models are published ones; all compute a
loss by chunks of tokens."""


def job_of(config: Mapping[str, Any], world_size: int | None) -> Imported:
    """The job of a parsed configuration on ``world_size`` ranks, or as many as its degrees make.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    keys = Keys(config, HARMLESS)
    return keys.imported(lambda: _of_releases(keys, world_size))


def _of_releases(keys: Keys, world_size: int | None) -> Document:
    document = _document(keys, world_size)
    batch, parallel = document["batch"], document["parallel"]
    batch["size"] = keys.number("training", "local_batch_size", "batch_size", default=8)
    batch["sequence"] = keys.number("training", "seq_len", default=2048)
    times = _backwards(keys, parallel, "global_batch_size", batch["size"])
    size = keys.number("parallelism", "pipeline_parallel_microbatch_size", default=1)
    if times > 1:
        parallel["microbatches"] = times
        # Ours is what a rank sees in a step; TorchTitan's is what it sees in one backward.
        batch["size"] *= times
    if parallel["pipeline"] > 1:
        parallel["microbatches"] = max(1, batch["size"] // size)
    return document


def job_of_text(text: str, where: str, world_size: int | None) -> Imported:
    """The job of a configuration in ``text``: TOML of the releases, or flags of the main branch,
    which name a configuration. Errors are those of the two, with ``where`` for what is no TOML."""
    if re.search(r"--(config|module)\b|\bCONFIG=", text):
        return job_of_flags(text, world_size)
    return job_of(parse_toml(text, where, "a configuration of TorchTitan"), world_size)


def job_of_flags(text: str, world_size: int | None) -> Imported:
    """The job of the flags of the main branch in ``text``, a shell script or the words alone.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    keys = Keys(_sections(text), HARMLESS)
    # Both take memory of their own, and nothing here knows how much.
    more = []
    if not keys.value("training", "disable_cuda_graphs", False):
        more.append("CUDA graphs, for training.disable_cuda_graphs is not set")
    if keys.value("compile", "enable_async_tensor_parallel", False):
        more.append("compile.enable_async_tensor_parallel")
    found = keys.imported(lambda: _of_main(keys, world_size))
    return msgspec.structs.replace(found, unread=(*found.unread, *more))


def _of_main(keys: Keys, world_size: int | None) -> Document:
    document = _document(keys, world_size)
    batch, parallel = document["batch"], document["parallel"]
    tokens = keys.number("training", "num_tokens_per_microbatch_per_dp_rank", default=16_384)
    batch["sequence"] = keys.number("training", "max_context_length", default=2048)
    if tokens % batch["sequence"]:
        where = "training.num_tokens_per_microbatch_per_dp_rank"
        wanted = f"a multiple of training.max_context_length {batch['sequence']}"
        raise InputError(expected(where, wanted, str(tokens)))
    parts = keys.number("parallelism", "num_pp_microbatches", default=1)
    parts = parts if parallel["pipeline"] > 1 else 1
    times = _backwards(keys, parallel, "num_tokens_per_train_step", tokens * parts)
    parallel["microbatches"] = parts * times
    batch["size"] = tokens // batch["sequence"] * parallel["microbatches"]
    whole = keys.value("parallelism", "enable_sequence_parallel", True)
    if parallel["tensor"] > 1:
        parallel["sequence"] = whole
    document["memory"]["loss"] = "chunked"
    return document


def _sections(text: str) -> dict[str, Any]:
    """Flags as sections, over what the configuration that they name sets."""
    # A policy is a word of its own, perhaps behind a flag that has no value.
    policies = re.findall(r"activation[-_]checkpoint:([\w-]+)", text)
    flags = arguments(re.sub(r"activation[-_]checkpoint:[\w-]+", "", text))
    named = re.search(r"\bCONFIG=(?:\$\{\w+:-)?[\"']?(\w+)", text)
    name = str(flags.pop("config", named[1] if named else "none"))
    if name not in CONFIGS:
        wanted = f"one of {', '.join(CONFIGS)}"
        raise UnsupportedError(expected("--config", wanted, name))
    found = CONFIGS[name]
    if flags.pop("module", found.module) != found.module:
        raise InputError(expected("--module", f"{found.module} of --config {name}", "another"))
    sections: dict[str, Any] = {key: dict(value) for key, value in found.sections.items()}
    sections.setdefault("model", {}).update(name=found.module, flavor=found.flavor)
    if policies:
        sections["activation_checkpoint"]["mode"] = policies[-1]
    for flag, value in flags.items():
        section, dot, key = flag.replace("-", "_").rpartition(".")
        off = key.startswith("no_")
        given = {"True": True, "False": False}.get(value, value)
        if key == "components":
            given = str(value).split(",")
        target = sections.setdefault(section, {}) if dot else sections
        target[key.removeprefix("no_")] = not given if off else given
    return sections


def _document(keys: Keys, world_size: int | None) -> Document:
    """What both forms say by the same keys."""
    parallel, ranks = _parallel(keys, world_size)
    model = _model(keys)
    document = {
        "model": model,
        "cluster": {"compute_device": "cuda", "world_size": ranks},
        "batch": {},
        "parallel": parallel | _stages(keys, parallel["pipeline"], model["layers"]),
        "memory": _memory(keys, parallel["tensor"] > 1),
        "train": {"optimizer": keys.one_of("optimizer", "name", OPTIMIZERS, "AdamW")},
    }
    if keys.value("optimizer", "early_step_in_backward", False):
        keys.refuse("optimizer", "early_step_in_backward", "false")
    _refuse_other_degrees(keys)
    return document


def _refuse_other_degrees(keys: Keys) -> None:
    """Degrees that nobody read, such as those that earlier versions have in other sections."""
    # An unknown degree would divide the model in the run and not in the estimate: that one key is
    # refused where others are told as unread.
    for section, key, value in keys.unread():
        if key.endswith("_degree") and value not in (1, -1):
            wanted = "1, for degrees are read from [parallelism] and this is none of them"
            keys.refuse(section, key, wanted)


def _model(keys: Keys) -> dict[str, Any]:
    name = keys.one_of("model", "name", {known: known for known in FLAVORS}, "llama3")
    flavors = {known: known for known in FLAVORS[name]}
    return {"kind": "llama"} | FLAVORS[name][keys.one_of("model", "flavor", flavors, "")]


def _parallel(keys: Keys, world_size: int | None) -> tuple[dict[str, Any], int]:
    """Degrees, and the ranks that they come to."""
    section = {
        ours: keys.number("parallelism", theirs, default=1)
        for ours, theirs in DEGREES.items()
        if ours != "data_shard"
    }
    shard = keys.number("parallelism", DEGREES["data_shard"], default=-1, least=-1)
    others = section["data_replicate"] * section["tensor"] * section["pipeline"]
    # Expert ranks are left out of the product: they are ranks of the others, regrouped.
    others *= section["context"]
    if shard == -1 and world_size is None:
        keys.wrong(
            expected(
                "parallelism.data_parallel_shard_degree",
                "a number, or the ranks of the job",
                "-1: all ranks that are left",
                "Say how many ranks there are with -n.",
            )
        )
        shard = 1
    ranks = world_size or others * shard
    if ranks % others or (shard != -1 and ranks != others * shard):
        degrees = " x ".join(str(n) for n in (*section.values(), shard) if n not in (1, -1)) or "1"
        wanted = f"ranks that the degrees {degrees} come to"
        raise InputError(expected("-n", wanted, f"{ranks}"))
    return section | {"data_shard": ranks // others}, ranks


def _backwards(keys: Keys, parallel: Mapping[str, int], name: str, once: int) -> int:
    """Backwards until a step, of ``once`` samples or tokens each on a data rank, where the key of
    ``[training]`` says how many there are of all ranks."""
    in_all = keys.number("training", name, default=-1, least=-1)
    data = parallel["data_replicate"] * parallel["data_shard"]
    if in_all < 0 or in_all == once * data:
        return 1
    if in_all % (once * data):
        wanted = f"a multiple of {once} x {data} data ranks"
        raise InputError(expected(f"training.{name}", wanted, f"{in_all}"))
    if parallel["pipeline"] > 1:
        keys.refuse("training", name, "one batch to a step in a pipeline")
    return in_all // (once * data)


def _stages(keys: Keys, pipeline: int, layers: int) -> dict[str, Any]:
    """The order of a pipeline, and the stages of a rank where they are not its usual ones."""
    schedule = keys.value("parallelism", "pipeline_parallel_schedule", "1F1B")
    each = keys.value("parallelism", "pipeline_parallel_layers_per_stage", None)
    for end, usual in zip(("first", "last"), ENDS_WEIGH, strict=True):
        key = f"pipeline_parallel_{end}_stage_less_layers"
        if keys.value("parallelism", key, usual) != usual:
            keys.refuse("parallelism", key, str(usual))
    if pipeline == 1:
        return {}
    found = named(str(schedule))
    if each is None:
        return {"schedule": found.name}
    each = keys.number("parallelism", "pipeline_parallel_layers_per_stage", default=1)
    count = math.ceil((layers + sum(ENDS_WEIGH)) / each)
    if count % pipeline:
        key = "parallelism.pipeline_parallel_layers_per_stage"
        wanted = f"layers of which {pipeline} ranks have equally many stages"
        raise InputError(expected(key, wanted, f"{each}, which makes {count} stages"))
    return {"schedule": found.name, "chunks": count // pipeline}


def _memory(keys: Keys, cuts_words: bool) -> dict[str, Any]:
    if keys.value("training", "dtype", "float32") != "float32":
        keys.refuse("training", "dtype", "float32")
    disabled = keys.value("parallelism", "disable_loss_parallel", False)
    reshard = keys.value("parallelism", "fsdp_reshard_after_forward", "default")
    if reshard not in RESHARDS:
        keys.refuse("parallelism", "fsdp_reshard_after_forward", "default, always or never")
    offloads = keys.value("training", "enable_cpu_offload", False)
    return {
        "runtime": "fsdp2",
        "lowering": "cuda",
        "checkpointing": _checkpointing(keys),
        "param_dtype": keys.one_of("training", "mixed_precision_param", DTYPES, "bfloat16"),
        "reduce_dtype": keys.one_of("training", "mixed_precision_reduce", DTYPES, "float32"),
        "reshard_after_forward": RESHARDS.get(reshard),
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
        keys.refuse("activation_checkpoint", "mode", "none, selective or full")
    if every != "op" and not every.isdigit():
        keys.refuse("activation_checkpoint", "selective_ac_option", "op or a number")
    return "selective_op" if every == "op" else f"layers:{every}"


def _compiled(keys: Keys) -> bool | str:
    # Where earlier versions had it. Both are read, so that a file of either is.
    old = keys.value("training", "compile", False)
    parts = keys.value("compile", "components", ["model", "loss"])
    if not isinstance(parts, list):
        keys.refuse("compile", "components", "a list of parts")
        return False
    if not (keys.value("compile", "enable", False) or old) or "model" not in parts:
        return False
    return True if "loss" in parts else "blocks"


def _float8(keys: Keys) -> bool | str:
    converters = keys.value("model", "converters", [])
    wanted = converters if isinstance(converters, list) else [converters]
    quantize = keys.value("quantize", "linear", {})
    inner = quantize.get("float8") if isinstance(quantize, Mapping) else None
    inner = inner if isinstance(inner, Mapping) else {}
    recipe = keys.value("float8", "recipe_name", None) or inner.get("recipe_name") or "tensorwise"
    for name in filter(None, wanted):
        if name not in ("float8", "quantize.linear.float8"):
            keys.refuse("model", "converters", "float8 or none")
    old = keys.value("float8", "enable_float8_linear", False)  # of earlier versions
    if not any(wanted) and not old:
        return False
    if recipe not in ("tensorwise", "rowwise"):
        keys.refuse("float8", "recipe_name", "tensorwise or rowwise")
    return str(recipe)
