"""The model of a Megatron-LM training by its arguments, and how its layers compute.

Defaults are Megatron's own (``megatron/training/arguments.py``, core 0.14 to 0.16): a GPT with
LayerNorms, an MLP of two matrices, biases, learned positions and dropout, unless arguments say
something else.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from shardwright.core.megatron import MegatronSettings
from shardwright.job.imported import Keys

ALL = ""  # arguments have no sections
# MLPs that are not of two matrices and a GELU, and what leaves an activation out of a kernel.
GATES = {"swiglu": "swiglu", "quick-geglu": "geglu", "squared-relu": "squared_relu"}
FUSIONS = {"gelu": "no-bias-gelu-fusion", "swiglu": "no-bias-swiglu-fusion"}
SQUARES = "use-fused-weighted-squared-relu"
DROPOUT = 0.1  # of both kinds where no argument says it
# Words that tokenizers know whose sizes are published, by what the names of tokenizer, its model or
# its file have in them; the first that fits counts.
WORDS = (
    ("nemotron_2_256k", 256_000),
    ("gpt-oss", 201_088),
    ("llama-4", 202_048),
    ("llama-3", 128_256),
    ("llama3", 128_256),
    ("llama-2", 32_000),
    ("llama2", 32_000),
    ("mixtral", 32_000),
    ("mistral-nemo", 131_072),
    ("mistral", 32_000),
    ("deepseek", 129_280),
    ("kimi", 163_840),
    ("qwen", 151_936),
    ("nemotron", 131_072),
    ("multimixv8", 131_072),
    ("tiktoken", 131_072),
    ("gpt2", 50_257),
)


def needed(keys: Keys, name: str) -> int:
    """A number that no default is known for."""
    return keys.needed(ALL, name, "Add it to the arguments.")


def model(keys: Keys, tensor: int) -> dict[str, Any]:
    """The ``[model]`` of a decoder, its vocabulary padded for ``tensor`` ranks."""
    dim, heads = needed(keys, "hidden-size"), needed(keys, "num-attention-heads")
    grouped = keys.value(ALL, "group-query-attention", False)
    groups = keys.number(ALL, "num-query-groups", default=1) if grouped else heads
    mlp = _mlp(keys)
    # Megatron's own rules, to the rounding.
    usual = int(4 * dim * 2 / 3 / 64) * 64 if mlp == "swiglu" else 4 * dim
    wide = keys.number(ALL, "ffn-hidden-size", default=usual)
    norms = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
    found = {
        "kind": "llama",
        "layers": needed(keys, "num-layers"),
        "dim": dim,
        "heads": heads,
        "kv_heads": groups,
        "head_dim": keys.number(ALL, "kv-channels", default=dim // heads),
        "ffn_dim": wide,
        "vocab": _vocab(keys, tensor),
        "tied_embeddings": not keys.value(ALL, "untie-embeddings-and-output-weights", False),
        "qk_norm": bool(keys.value(ALL, "qk-layernorm", False)),
        "attention_bias": bool(keys.value(ALL, "add-qkv-bias", False)),
        "norm": keys.one_of(ALL, "normalization", norms, "LayerNorm"),
        "mlp": mlp,
        "positions": _positions(keys),
        "bias": not keys.value(ALL, "disable-bias-linear", False),
        "dropout": keys.decimal(ALL, "hidden-dropout", DROPOUT),
        "attention_dropout": keys.decimal(ALL, "attention-dropout", DROPOUT),
        "mtp_layers": further_of(keys),
        **_latent(keys, heads),
        **_experts(keys, wide),
    }
    usual_model = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False}
    plain = usual_model | {"dropout": 0.0, "attention_dropout": 0.0, "mtp_layers": 0}
    return {key: value for key, value in found.items() if plain.get(key, UNLIKE) != value}


UNLIKE = object()


def further_of(keys: Keys) -> int:
    """Blocks for further tokens."""
    name = "mtp-num-layers"
    return keys.number(ALL, name, default=1) if keys.value(ALL, name, 0) else 0


def settings(keys: Keys) -> dict[str, Any]:
    """The ``[memory.megatron]``, what is by default left out."""
    engine = keys.value(ALL, "transformer-impl", "transformer_engine") != "local"
    named = keys.value(ALL, "attention-backend", "auto")
    backend = str(named).rpartition(".")[2]  # AttnBackend.flash
    known = {"flash": "flash", "unfused": "unfused", "local": "local", "fused": "fused"}
    usual = "flash" if keys.value(ALL, "use-flash-attn", False) else "fused"
    loss = keys.value(ALL, "cross-entropy-fusion-impl", "native")
    found = {
        "attention_backend": known.get(backend, usual) if engine else "local",
        "bias_activation_fusion": _fuses(keys),
        "cross_entropy_loss_fusion": loss
        if keys.value(ALL, "cross-entropy-loss-fusion", False)
        else "none",
        "fp8_format": keys.value(ALL, "fp8-format", "none"),
        "parallel_output": True,  # which pretrain_gpt.py writes, and has no argument for
    }
    plain = msgspec.to_builtins(MegatronSettings())
    for name in plain.keys() - found.keys():
        switch = name.replace("_", "-")
        given = bool(keys.value(ALL, f"no-{switch}" if plain[name] else switch, False))
        found[name] = given is not plain[name]
    return {key: found[key] for key in plain if found[key] != plain[key]}


def _fuses(keys: Keys) -> bool:
    """Whether one kernel activates: of which it is, depends on the activation."""
    mlp = _mlp(keys)
    split = {each: bool(keys.value(ALL, name, False)) for each, name in FUSIONS.items()}
    if mlp == "squared_relu":
        return bool(keys.value(ALL, SQUARES, False))
    # Megatron turns off by itself what would add a bias that there is not.
    unbiased = bool(keys.value(ALL, "disable-bias-linear", False))
    return not (split["swiglu"] if mlp == "swiglu" else split["gelu"] or unbiased)


def _mlp(keys: Keys) -> str:
    return next((ours for name, ours in GATES.items() if keys.value(ALL, name, False)), "gelu")


def _positions(keys: Keys) -> int | str:
    kinds = {"learned_absolute": "learned", "none": "none"} | dict.fromkeys(
        ("rope", "yarn", "mrope"), "rope"
    )
    kind = keys.one_of(ALL, "position-embedding-type", kinds, "learned_absolute")
    if keys.value(ALL, "use-rotary-position-embeddings", False):
        kind = "rope"
    if keys.value(ALL, "no-position-embedding", False) and kind == "learned":
        kind = "none"
    length = keys.number(ALL, "seq-length", default=1)
    rows = keys.number(ALL, "max-position-embeddings", default=length)
    return rows if kind == "learned" else kind


def _vocab(keys: Keys, tensor: int) -> int:
    """Words, padded so that every tensor rank has as many."""
    multiple = keys.number(ALL, "make-vocab-size-divisible-by", default=128) * tensor
    padded = keys.value(ALL, "padded-vocab-size", None)
    if padded is not None:
        return keys.number(ALL, "padded-vocab-size", default=1)
    if keys.value(ALL, "vocab-size", None) is not None:
        kind = str(keys.value(ALL, "tokenizer-type", ""))
        words = keys.number(ALL, "vocab-size", default=1) + (kind == "NullTokenizer")
    elif words := _known_words(keys):
        keys.assume(f"--vocab-size {words}, by its tokenizer")
    else:
        words = needed(keys, "vocab-size")
    return math.ceil(words / multiple) * multiple


def _known_words(keys: Keys) -> int:
    """How many words a tokenizer of a known name has; 0 of another."""
    names = ("tokenizer-type", "tokenizer-model", "tokenizer-name-or-path", "vocab-file")
    kind, *rest = (str(keys.value(ALL, name, "")) for name in names)
    text = " ".join((kind, *rest)).lower()
    words = next((words for part, words in WORDS if part in text), 0)
    # A file of words and merges is GPT-2's, whose tokenizer is Megatron's default.
    if not words and kind in ("", "GPT2BPETokenizer") and (rest[-1] or kind):
        return dict(WORDS)["gpt2"]
    return words


def _latent(keys: Keys, heads: int) -> dict[str, Any]:
    """Widths of latent attention, whose few numbers are always normed here."""
    if not keys.value(ALL, "multi-latent-attention", False):
        return {}
    turned = keys.number(ALL, "qk-pos-emb-head-dim", default=64)
    found = {
        "kv_heads": heads,
        "qk_norm": False,
        "attention_bias": False,
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
    if not keys.value(ALL, "disable-bias-linear", False):
        keys.refuse(ALL, "disable-bias-linear", "it beside --num-experts, which have no biases")
    found = {
        "experts": keys.number(ALL, "num-experts", default=1),
        "experts_per_token": keys.number(ALL, "moe-router-topk", default=2),
        "expert_ffn_dim": keys.number(ALL, "moe-ffn-hidden-size", default=wide),
    }
    if keys.value(ALL, "moe-shared-expert-intermediate-size", None) is not None:
        name = "moe-shared-expert-intermediate-size"
        found["shared_ffn_dim"] = keys.number(ALL, name, default=1)
    count, pattern = needed(keys, "num-layers"), keys.value(ALL, "moe-layer-freq", 1)
    if isinstance(pattern, int) and pattern > 0:
        kinds = [index % pattern == 0 for index in range(count)]
    else:
        parts = re.findall(r"\[([01])\]\*(\d+)|\[([01](?:,[01])*)\]", str(pattern).replace(" ", ""))
        kinds = [
            kind == "1"
            for one, times, listed in parts
            for kind in ([one] * int(times) if one else listed.split(","))
        ]
    if len(kinds) != count:
        keys.refuse(ALL, "moe-layer-freq", f"a number, or a list of {count} layers")
    return found | {"moe_layers": [layer for layer, moe in enumerate(kinds) if moe]}
