"""The arguments of a Megatron-LM training as a job whose memory is estimated.

Defaults are Megatron's own (``megatron/training/arguments.py``, 0.14). An argument that changes
memory is followed or refused by name; which ones were not read, is said.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.megatron import MegatronSettings
from shardwright.job.imported import Document, Imported, Keys
from shardwright.job.megatron_model import ALL, further_of, model, needed, settings
from shardwright.job.parallel import dealt

HARMLESS = re.compile(
    "--("
    r"(log|logging|tensorboard|wandb|timing|profile|straggler|one-logger|mlflow|exp|run-workload"
    r"|lr|min-lr|decoupled|adam|sgd|muon|weight-decay|start-weight|clip|init|seed|ckpt|save|load"
    r"|no-load|no-save|no-ckpt|dist-ckpt|async|eval|exit|auto-detect|auto-tune|train|rampup|split"
    r"|test|valid|data|dataloader|dataset|mock|num-workers|tokenizer|tiktoken|vocab-extra|no-mmap"
    r"|mmap|merge-file|manual-gc|rerun|error-injection|verify|check|no-check|override|finetune"
    r"|use-checkpoint|use-persistent|use-dist-ckpt|distributed|nproc|nnodes|node-rank|master|rdzv"
    r"|tee|disable-gloo|nccl|no-create|reset|eod|fim|num-dataset|no-initialization|perform-init"
    r"|norm|apply|rotary|rope|no-rope|use-rope|yarn|mscale|beta|original-max|loss-scale"
    r"|initial-loss|min-loss|hysteresis|te-rng|deterministic|use-mcore|use-legacy|bert-no-binary"
    r"|enable-experimental|enable-ft|empty-unused|high-priority|local-rank|use-tp-pp|align"
    r"|overlap-(grad|param|p2p)|ddp|no-overlap|average|calculate|export-te|attention-softmax"
    r"|softmax-type|no-persist|no-bias-(dropout|swiglu)|no-async|tunable|microbatch-group"
    r"|fp8-(amax|margin|interval|wgrad)|cp-comm|hierarchical"
    r"|moe-(router|aux|z-loss|input-jitter|per-layer|token-dispatcher|flex|hybridep|deepep|permute|use|grouped|enable)|expert-tensor|mtp-loss|window-size"
    r"|window-attn|openai-gelu|onnx-safe|no-query-key|use-cpu-init"
    r"|use-ring-exchange|iterations-to-skip|result-rejected|num-virtual-stages"
    r"|sft|legacy-tokenizer|encoder-seq|vocab-file|outer-dp|dump|inference|trust-remote"
    r"|torch-fsdp2-reshard|step-batch|skip-train|rl-|no-weight-decay|per-split|multiple-valid"
    r"|make-vocab|max-position|sequence-parallel|recompute-(granularity|modules|method|num))(-.*)?|"
    r".*-(dir|path|cfg|prefix|interval)"
    ")"
)
"""Arguments that change no memory of a step, or that others, which are read, give a meaning."""

# Arguments that change memory or time and that no estimate follows, and what they bring.
REFUSED = {
    "mtp-use-repeated-layer": "one block for several further tokens",
    "moe-shared-expert-gate": "a gate of the shared expert",
    "moe-latent-size": "experts of another width than the stream",
    "fp4-format": "products of Transformer Engine in 4 bits",
    "use-precision-aware-optimizer": "states in other dtypes",
    "cpu-offloading-num-layers": "activations on the host",
    "fine-grained-activation-offloading": "activations on the host",
    "distribute-saved-activations": "activations shared by tensor ranks",
    "encoder-num-layers": "an encoder",
    "decoder-seq-length": "an encoder",
    "decoder-first-pipeline-num-layers": "stages of unequal depth",
    "decoder-last-pipeline-num-layers": "stages of unequal depth",
    "spec": "a model of its own",
    "model-provider": "a model of its own",
    "heterogeneous-layers-config-path": "layers that are each of their own",
    "hybrid-override-pattern": "a hybrid model",
    "hybrid-layer-pattern": "a hybrid model",
    "hybrid-attention-ratio": "a hybrid model",
    "is-hybrid-model": "a hybrid model",
    "experimental-attention-variant": "another attention",
    "attention-output-gate": "a gate of attention",
    "linear-attention-freq": "linear attention",
    "img-h": "a model that sees",
    "export-kd-teacher-load": "a teacher beside the model",
    "perform-rl-step": "an engine of inference beside the training",
    "retro-project-dir": "a model that retrieves",
    "lora-rank": "adapters",
}
# What degrees, and layers of every stage in order (E the embedding, t a layer, m a block for a
# further token, L the head), are called: engines/megatron.py writes by the same names.
DEGREES = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "context": "context-parallel-size",
    "expert": "expert-model-parallel-size",
}
LAYOUT = "pipeline-model-parallel-layout"
ENDS = tuple(f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss"))
REPLICAS = "num-distributed-optimizer-instances"
OTHERS = re.compile(r"pretrain_(?!gpt)\w+\.py|train_(t5|bert|retro|vlm)\.py")  # programs
NONE = (None, 0, "", "none", "None")  # of one of these: none
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd_momentum", "muon": "muon"}


def job_of(text: str | Mapping[str, Any], world_size: int | None) -> Imported:
    """The job of the arguments in ``text``, a shell script or the words alone, or values by name,
    on ``world_size`` ranks, or on those of one replica.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    if isinstance(text, str) and (other := OTHERS.search(text)):
        raise UnsupportedError(expected("the arguments", "those of a GPT", other[0]))
    given = arguments(text) if isinstance(text, str) else _named(text)
    # A switch that is false in YAML is none.
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    keys = Keys({ALL: given}, HARMLESS)
    for name, brings in REFUSED.items():
        if keys.value(ALL, name, None) not in NONE:
            keys.refuse(ALL, name, f"none, for no estimate follows {brings}")
    if str(keys.value(ALL, "tokenizer-type", "")).startswith("Bert"):
        keys.refuse(ALL, "tokenizer-type", "one of a GPT")
    return keys.imported(lambda: _document(keys, world_size))


def _document(keys: Keys, world_size: int | None) -> Document:
    parallel, ranks = _parallel(keys, world_size)
    # Degrees before the model: the vocabulary is padded to a multiple of the tensor ranks.
    document: Document = {
        "model": model(keys, parallel["tensor"]),
        "cluster": {"compute_device": "cuda", "world_size": ranks},
        "batch": {"size": 1, "sequence": needed(keys, "seq-length")},
        "parallel": parallel,
        "memory": _memory(keys, parallel["pipeline"]),
        "train": {"optimizer": keys.one_of(ALL, "optimizer", OPTIMIZERS, "adam")},
    }
    _batch(keys, document)
    return document


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their arguments, as a configuration in YAML has them."""
    named = {name.lstrip("-").replace("_", "-"): value for name, value in values.items()}
    return {key: _value([each]) if isinstance(each, str) else each for key, each in named.items()}


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
    """With the values of ``$NAME`` and ``${NAME}`` that are known, or ``${NAME:-usual}``."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1], found[2] or found[0])

    return re.sub(r"\$\{?(\w+)(?::-([^}\s]*))?[^}\s]*\}?", value, word)


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


def _parallel(keys: Keys, world_size: int | None) -> tuple[dict[str, Any], int]:
    """Degrees, and the ranks that they come to."""
    section: dict[str, Any] = {
        ours: keys.number(ALL, theirs, default=1) for ours, theirs in DEGREES.items()
    }
    tensor, pipeline = section["tensor"], section["pipeline"]
    cut = keys.number(ALL, "expert-tensor-parallel-size", default=tensor)
    if keys.value(ALL, "num-experts", None) is None:
        section["expert"], cut = 1, tensor
    if cut != (tensor if section["expert"] == 1 else 1):
        section["expert_tensor"] = cut
    others = tensor * pipeline * section["context"]
    # The fewest on which every degree fits, which is one replica.
    ranks = world_size or math.lcm(others, pipeline * section["expert"] * cut)
    if ranks % others:
        raise InputError(expected("-n", f"a multiple of {others} ranks", f"{ranks}"))
    # Only a distributed optimizer is shared, and so has ranks that share and ranks that do not.
    copies = keys.number(ALL, REPLICAS, default=1)
    if (ranks // others) % copies:
        wanted = f"a divisor of the {ranks // others} data ranks"
        raise InputError(expected(f"--{REPLICAS}", wanted, str(copies)))
    shards = ranks // others // copies
    # Experts are shared by the ranks of an instance, or all is one instance.
    if shards * tensor * section["context"] % (section["expert"] * section.get("expert_tensor", 1)):
        shards, copies = shards * copies, 1
    section |= {"data_replicate": copies, "data_shard": shards}
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
    if laid_out := _laid_out(keys, pipeline)[0]:
        return laid_out
    if keys.value(ALL, "num-virtual-stages-per-pipeline-rank", None) is not None:
        return keys.number(ALL, "num-virtual-stages-per-pipeline-rank", default=1)
    if keys.value(ALL, "num-layers-per-virtual-pipeline-stage", None) is None:
        return 1
    each = keys.number(ALL, "num-layers-per-virtual-pipeline-stage", default=1)
    return max(1, needed(keys, "num-layers") // pipeline // each)


def layout_of(layers: int, count: int, ends: tuple[int, int], further: int = 0) -> str:
    """``count`` stages as the layout of their layers, as an estimate deals them out; ``further``
    blocks stand before the head (m)."""
    inner = "|".join(f"t*{size}" if size else "" for size in dealt(layers, count, ends))
    return f"E{inner}{'m' * further}L"


def _laid_out(keys: Keys, pipeline: int) -> tuple[int, tuple[int, int]]:
    """Stages of a rank, and what the ends weigh, where a layout gives them; refused unless its
    stages are as deep as an estimate's."""
    given, text = MegatronSettings(**settings(keys)).ends, keys.value(ALL, LAYOUT, None)
    if text is None:
        return 0, given
    plain = _written_out(str(text))
    layers, count, further = needed(keys, "num-layers"), plain.count("|") + 1, further_of(keys)
    for ends in (given, (0, 0), (1, 0), (0, 1), (1, 1)) if count % pipeline == 0 else ():
        with suppress(InputError):  # more stages than there are layers for
            if plain == _written_out(layout_of(layers, count, ends, further)):
                return count // pipeline, ends
    found = layout_of(layers, pipeline, given, further)
    keys.refuse(ALL, LAYOUT, f"'{found}', as stages are estimated")
    return 0, given


def _written_out(layout: str) -> str:
    """A letter for each layer; backslashes are those of a shell."""
    plain = re.sub(r"[,\s\\]", "", layout)
    for one in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(one, lambda found: found[1] * int(found[2]), plain)
    return plain


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


def _memory(keys: Keys, pipeline: int) -> dict[str, Any]:
    dtype = next((name for name in ("bf16", "fp16") if keys.value(ALL, name, False)), "fp32")
    # Megatron turns it on by itself for bf16, unless grad-reduce-in-bf16 is given.
    summed = keys.value(ALL, "accumulate-allreduce-grads-in-fp32", False) or dtype == "bf16"
    narrow = keys.value(ALL, "grad-reduce-in-bf16", False) or not summed
    found = {
        **_runtime(keys),
        "lowering": "cuda",
        "checkpointing": _checkpointing(keys),
        "param_dtype": dtype,
        "reduce_dtype": dtype if narrow else "fp32",
        "offload": "states" if keys.value(ALL, "optimizer-cpu-offload", False) else "none",
    }
    if keys.value(ALL, "optimizer", "adam") != "muon":  # of which no kernel is fused
        found["implementation"] = "fused"
    found["loss"] = "parallel"
    ends = zip(ENDS, _laid_out(keys, pipeline)[1], strict=True)
    kernels = {key: its for key, its in settings(keys).items() if key not in ENDS}
    kernels |= {key: True for key, weighs in ends if weighs}
    return found | ({"megatron": kernels} if kernels and found["runtime"] == "megatron" else {})


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
        named = str(keys.value(ALL, "recompute-modules", "core_attn"))
        if set(re.findall(r"\w+", named)) != {"core_attn"}:
            keys.refuse(ALL, "recompute-modules", "core_attn")
        return "core_attention"
    if granularity == "full":
        method = keys.value(ALL, "recompute-method", "uniform")
        several = keys.number(ALL, "recompute-num-layers", default=1)
        # The first so many of a stage: all of them, where it has no more.
        if method == "block" and several < needed(keys, "num-layers"):
            return f"first:{several}"
        if method != "block" and several != 1:
            keys.refuse(ALL, "recompute-num-layers", "1, each block by itself")
    return keys.one_of(ALL, "recompute-granularity", {"none": "none", "full": "full"}, "none")
