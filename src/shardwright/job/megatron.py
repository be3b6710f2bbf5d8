"""The arguments of a Megatron-LM training as a job whose memory is estimated.

Defaults are Megatron's own (``megatron/training/arguments.py``, 0.14). An argument that changes
memory is followed or refused by name; which ones were not read, is said.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from typing import Any

from shardwright.core.errors import InputError, expected
from shardwright.job.imported import Document, Imported, Keys
from shardwright.job.parallel import dealt

ALL = ""  # arguments have no sections
HARMLESS = re.compile(
    "--("
    r"(log|tensorboard|wandb|timing|profile|straggler|one-logger|lr|min-lr|adam|sgd|weight-decay)\b.*|"
    r"(start-weight|clip|init-method|seed|ckpt|save|load|no-load|no-save|dist-ckpt|async|eval)\b.*|"
    r"(exit|auto-detect|train|split|data|mock|num-workers|tokenizer|no-mmap|manual-gc|rerun)\b.*|"
    r"(distributed|nproc|nnodes|node-rank|master|rdzv|tee|nccl|num-dataset|check-for-nan)\b.*|"
    r"(norm|rotary|loss-scale|initial-loss|hysteresis|finetune|override|use-checkpoint)\b.*|"
    r"(moe-router-(load|dtype|score|pre|enable)|moe-(aux|z-loss|token-dispatcher)|max-position).*|"
    r"overlap-(grad|param)-.*|use-mcore-models|no-initialization|transformer-impl|vocab-file|merge-file|no-create.*|"
    r"attention-(softmax-in-fp32|backend)|use-flash-attn|moe-grouped-gemm|no-async.*"
    ")"
)
"""Arguments that change no memory of a step."""

# What Megatron has otherwise without these switches, and only then.
NEEDED = {
    "swiglu": "an MLP of three matrices",
    "disable-bias-linear": "linear layers without biases",
}
# Arguments that change memory and that no estimate follows, and what they bring.
REFUSED = {
    "mtp-num-layers": "heads for further tokens",
    "moe-shared-expert-gate": "a gate of the shared expert",
    "fp8-format": "products of Transformer Engine in 8 bits",
    "fp4-format": "products of Transformer Engine in 4 bits",
    "use-precision-aware-optimizer": "states in other dtypes",
    "cpu-offloading": "activations on the host",
    "fine-grained-activation-offloading": "activations on the host",
    "distribute-saved-activations": "activations shared by tensor ranks",
    "encoder-num-layers": "an encoder",
    "decoder-first-pipeline-num-layers": "stages of unequal depth",
    "decoder-last-pipeline-num-layers": "stages of unequal depth",
    "spec": "a model of its own",
    "hybrid-override-pattern": "a hybrid model",
}
# What degrees, and layers of every stage in order (E the embedding, t a layer, L the head), are
# called: engines/megatron.py writes by the same names.
DEGREES = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "context": "context-parallel-size",
    "expert": "expert-model-parallel-size",
}
LAYOUT = "pipeline-model-parallel-layout"
REPLICAS = "num-distributed-optimizer-instances"
DTYPES = {"bf16": "bf16", "fp16": "fp16"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd_momentum"}


def job_of(text: str, world_size: int | None) -> Imported:
    """The job of the arguments in ``text``, a shell script or the words alone, on ``world_size``
    ranks, or on those of one replica.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    keys = Keys({ALL: arguments(text)}, HARMLESS)
    for name, brings in NEEDED.items():
        # Without the switch Megatron builds an MLP of two matrices, or biases, and that is another
        # model than the one that is estimated: an absent switch is as wrong as one that is refused.
        if not keys.value(ALL, name, False):
            raise keys.refused(ALL, name, f"the switch, for {brings}")
    for name, brings in REFUSED.items():
        if keys.value(ALL, name, False):
            raise keys.refused(ALL, name, f"none, for no estimate follows {brings}")
    parallel, ranks = _parallel(keys, world_size)
    # Degrees before the model: the vocabulary is padded to a multiple of the tensor ranks.
    document: Document = {
        "model": _model(keys, parallel["tensor"]),
        "cluster": {"compute_device": "cuda", "world_size": ranks},
        "batch": {"size": 1, "sequence": _needed(keys, "seq-length")},
        "parallel": parallel,
        "memory": _memory(keys),
        "train": {"optimizer": keys.one_of(ALL, "optimizer", OPTIMIZERS, "adam")},
    }
    _batch(keys, document)
    return keys.imported(document)


def arguments(text: str) -> dict[str, Any]:
    """Every ``--name value`` of a text by name, variables of the script filled in; a switch is
    true, of several values the first counts."""
    # Only plain assignments are filled in. Arithmetic, arrays and commands are a shell's to run; a
    # word that still has a variable in it is refused where a number is wanted.
    begins = r"(?:^|;)\s*(?:export\s+)?"  # of a line, or of another command on it
    assigned = re.findall(begins + r"(\w+)=[\"']?([^\s(\"';]+)", text, re.MULTILINE)
    usual = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in assigned}
    found: dict[str, list[str]] = {}
    # Words before the first option (python, torchrun, the script) are collected here and dropped.
    values: list[str] = []
    try:
        for word in _words(text.replace("\\\n", " ")):
            name, equals, value = _filled(word, usual).partition("=")
            if re.match(r"--[A-Za-z]", name):
                values = found[name[2:].replace("_", "-")] = [value] if equals else []
            else:
                values.append(f"{name}{equals}{value}")
    except ValueError as error:
        raise InputError(expected("the arguments", "words of a shell", f"'{error}'")) from None
    return {name: _value(each) for name, each in found.items()}


def _filled(word: str, variables: dict[str, str]) -> str:
    """With the values of ``$NAME`` and ``${NAME}`` that are known."""
    return re.sub(r"\$\{?(\w+)[^}\s]*\}?", lambda found: variables.get(found[1], found[0]), word)


def _words(text: str) -> Iterator[str]:
    """Words of a script, also those of quoted lists; what ends a list or a command ends values."""
    for word in shlex.split(text, comments=True):
        inside = word.partition("=")[2] if re.match(r"\w+=\s", word) else word
        # Scripts keep arguments in variables (MODEL_ARGS="--a 1 --b 2"), which are one word of the
        # shell.
        if " --" in f" {inside}" and len(inside.split()) > 1:
            yield from _words(inside)
        elif word not in ("(", ")", "&&", "|", ";"):
            yield word.removesuffix(";")


def _value(words: list[str]) -> Any:
    if not words:
        return True
    text = words[0].rstrip(")")
    try:
        return int(text)
    except ValueError:
        return text


def _needed(keys: Keys, name: str) -> int:
    if keys.value(ALL, name, None) is None:
        raise InputError(expected(f"--{name}", "a number", "none", "Add it to the arguments."))
    return keys.number(ALL, name, default=1)


def _model(keys: Keys, tensor: int) -> dict[str, Any]:
    dim, heads = _needed(keys, "hidden-size"), _needed(keys, "num-attention-heads")
    multiple = keys.number(ALL, "make-vocab-size-divisible-by", default=128) * tensor
    keys.one_of(ALL, "normalization", {"RMSNorm": ""}, "LayerNorm")
    turned = keys.value(ALL, "use-rotary-position-embeddings", False)
    if not turned:
        keys.one_of(ALL, "position-embedding-type", {"rope": ""}, "learned_absolute")
    for name in ("attention-dropout", "hidden-dropout"):
        if keys.decimal(ALL, name, 0.1):
            raise keys.refused(ALL, name, "0", "0.1, its default")
    grouped = keys.value(ALL, "group-query-attention", False)
    groups = keys.number(ALL, "num-query-groups", default=1) if grouped else heads
    # Megatron's own rule with a gate, to the rounding.
    usual = int(4 * dim * 2 / 3 / 64) * 64
    wide = keys.number(ALL, "ffn-hidden-size", default=usual)
    return {
        "kind": "llama",
        "layers": _needed(keys, "num-layers"),
        "dim": dim,
        "heads": heads,
        "kv_heads": groups,
        "head_dim": keys.number(ALL, "kv-channels", default=dim // heads),
        "ffn_dim": wide,
        "vocab": math.ceil(_needed(keys, "vocab-size") / multiple) * multiple,
        "tied_embeddings": not keys.value(ALL, "untie-embeddings-and-output-weights", False),
        "qk_norm": bool(keys.value(ALL, "qk-layernorm", False)),
        "attention_bias": bool(keys.value(ALL, "add-qkv-bias", False)),
        **_latent(keys, heads),
        **_experts(keys, wide),
    }


def _latent(keys: Keys, heads: int) -> dict[str, Any]:
    """Widths of latent attention, whose few numbers are always normed here."""
    if not keys.value(ALL, "multi-latent-attention", False):
        return {}
    turned = keys.number(ALL, "qk-pos-emb-head-dim", default=64)
    found = {
        "kv_heads": heads,
        "qk_norm": False,
        "head_dim": keys.number(ALL, "qk-head-dim", default=128) + turned,
        "kv_lora_rank": keys.number(ALL, "kv-lora-rank", default=32),
        "qk_rope_head_dim": turned,
        "v_head_dim": keys.number(ALL, "v-head-dim", default=128),
    }
    if keys.value(ALL, "q-lora-rank", None) is not None:
        found["q_lora_rank"] = keys.number(ALL, "q-lora-rank", default=1)
    return found


def _experts(keys: Keys, wide: int) -> dict[str, Any]:
    if keys.value(ALL, "num-experts", None) is None:
        return {}
    found = {
        "experts": keys.number(ALL, "num-experts", default=1),
        "experts_per_token": keys.number(ALL, "moe-router-topk", default=2),
        "expert_ffn_dim": keys.number(ALL, "moe-ffn-hidden-size", default=wide),
    }
    if keys.value(ALL, "moe-shared-expert-intermediate-size", None) is not None:
        name = "moe-shared-expert-intermediate-size"
        found["shared_ffn_dim"] = keys.number(ALL, name, default=1)
    layers, pattern = _needed(keys, "num-layers"), keys.value(ALL, "moe-layer-freq", 1)
    if isinstance(pattern, int) and pattern > 0:
        kinds = [index % pattern == 0 for index in range(layers)]
    else:
        parts = re.findall(r"\[([01])\]\*(\d+)|\[([01](?:,[01])*)\]", str(pattern).replace(" ", ""))
        kinds = [
            kind == "1"
            for one, times, listed in parts
            for kind in ([one] * int(times) if one else listed.split(","))
        ]
    if len(kinds) != layers:
        raise keys.refused(ALL, "moe-layer-freq", f"a number, or a list of {layers} layers")
    return found | {"moe_layers": [layer for layer, moe in enumerate(kinds) if moe]}


def _parallel(keys: Keys, world_size: int | None) -> tuple[dict[str, Any], int]:
    """Degrees, and the ranks that they come to."""
    section: dict[str, Any] = {
        ours: keys.number(ALL, theirs, default=1) for ours, theirs in DEGREES.items()
    }
    tensor, pipeline = section["tensor"], section["pipeline"]
    cut = keys.number(ALL, "expert-tensor-parallel-size", default=tensor)
    # Experts that are cut in width as well are in no layer of ours.
    if section["expert"] > 1 and cut > 1:
        wanted = "1 beside --expert-model-parallel-size"
        raise keys.refused(ALL, "expert-tensor-parallel-size", wanted, f"{cut}, its default")
    others = tensor * pipeline * section["context"]
    # The fewest on which every degree fits, which is one replica.
    ranks = world_size or math.lcm(others, pipeline * section["expert"])
    if ranks % others:
        raise InputError(expected("-n", f"a multiple of {others} ranks", f"{ranks}"))
    # Only a distributed optimizer is shared, and so has ranks that share and ranks that do not.
    copies = keys.number(ALL, REPLICAS, default=1)
    if (ranks // others) % copies:
        wanted = f"a divisor of the {ranks // others} data ranks"
        raise InputError(expected(f"--{REPLICAS}", wanted, str(copies)))
    section |= {"data_replicate": copies, "data_shard": ranks // others // copies}
    if tensor > 1:
        section["sequence"] = bool(keys.value(ALL, "sequence-parallel", False))
    chunks = _chunks(keys, pipeline)
    if chunks > 1:
        section |= {"schedule": "interleaved_1f1b", "chunks": chunks}
    capacity = keys.decimal(ALL, "moe-expert-capacity-factor", 0.0)
    if capacity and section["expert"] > 1:
        section |= {"routing": "capacity", "capacity_factor": capacity}
    return section, ranks


def _chunks(keys: Keys, pipeline: int) -> int:
    """Stages of a rank."""
    if keys.value(ALL, LAYOUT, None) is not None:
        return _laid_out(keys, pipeline)
    if keys.value(ALL, "num-virtual-stages-per-pipeline-rank", None) is not None:
        return keys.number(ALL, "num-virtual-stages-per-pipeline-rank", default=1)
    if keys.value(ALL, "num-layers-per-virtual-pipeline-stage", None) is None:
        return 1
    each = keys.number(ALL, "num-layers-per-virtual-pipeline-stage", default=1)
    return max(1, _needed(keys, "num-layers") // pipeline // each)


def layout_of(layers: int, count: int) -> str:
    """``count`` stages as the layout of their layers, as an estimate deals them out."""
    inner = "|".join(f"t*{size}" if size else "" for size in dealt(layers, count))
    return f"E{inner}L"


def _laid_out(keys: Keys, pipeline: int) -> int:
    """Stages of a rank of a layout; refused unless its stages are as deep as an estimate's."""
    plain = str(keys.value(ALL, LAYOUT, "")).replace(",", "")
    for one in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(one, lambda found: found[1] * int(found[2]), plain)
    layers, count = _needed(keys, "num-layers"), plain.count("|") + 1
    stages = plain.removeprefix("E").removesuffix("L").split("|")
    if count % pipeline or stages != ["t" * size for size in dealt(layers, count)]:
        raise keys.refused(ALL, LAYOUT, f"'{layout_of(layers, pipeline)}', as stages are estimated")
    return count // pipeline


def _batch(keys: Keys, document: Document) -> None:
    """Samples of a rank, and the microbatches that they are run in."""
    micro, data = (
        keys.number(ALL, "micro-batch-size", default=1),
        document["parallel"]["data_replicate"] * document["parallel"]["data_shard"],
    )
    in_all = keys.number(ALL, "global-batch-size", default=micro * data)
    if in_all % (micro * data):
        wanted = f"a multiple of {micro} x {data} data ranks"
        raise InputError(expected("--global-batch-size", wanted, f"{in_all}"))
    document["batch"]["size"] = in_all // data
    document["parallel"]["microbatches"] = in_all // data // micro


def _memory(keys: Keys) -> dict[str, Any]:
    dtype = next((ours for name, ours in DTYPES.items() if keys.value(ALL, name, False)), "fp32")
    # Megatron turns it on by itself for bf16, unless grad-reduce-in-bf16 is given.
    summed = keys.value(ALL, "accumulate-allreduce-grads-in-fp32", False) or dtype == "bf16"
    narrow = keys.value(ALL, "grad-reduce-in-bf16", False) or not summed
    return {
        **_runtime(keys),
        "lowering": "cuda",
        "checkpointing": _checkpointing(keys),
        "param_dtype": dtype,
        "reduce_dtype": dtype if narrow else "fp32",
        "implementation": "fused",
        "offload": "states" if keys.value(ALL, "optimizer-cpu-offload", False) else "none",
        "loss": "parallel",
    }


def _runtime(keys: Keys) -> dict[str, Any]:
    """Torch's or Megatron's FSDP, or its own data parallel, whose optimizer may be shared."""
    sharded = keys.value(ALL, "use-distributed-optimizer", False)
    if keys.value(ALL, "use-torch-fsdp2", False):
        return {"runtime": "fsdp2"}
    if keys.value(ALL, "use-megatron-fsdp", False) or keys.value(ALL, "use-custom-fsdp", False):
        strategy = {"optim_grads_params": "fsdp2"}
        name = "data-parallel-sharding-strategy"
        return {"runtime": keys.one_of(ALL, name, strategy, "no_shard")}
    return {"runtime": "megatron"} | ({"zero": 1} if sharded else {})


def _checkpointing(keys: Keys) -> str:
    """Megatron computes core attention again, or blocks one by one."""
    if keys.value(ALL, "recompute-activations", False):
        return "core_attention"
    granularity = keys.value(ALL, "recompute-granularity", "none")
    if granularity == "selective":
        keys.one_of(ALL, "recompute-modules", {"core_attn": ""}, "core_attn")
        return "core_attention"
    if granularity == "full":
        keys.one_of(ALL, "recompute-method", {"uniform": ""}, "uniform")
        if keys.number(ALL, "recompute-num-layers", default=1) != 1:
            raise keys.refused(ALL, "recompute-num-layers", "1, each block by itself")
    return keys.one_of(ALL, "recompute-granularity", {"none": "none", "full": "full"}, "none")
