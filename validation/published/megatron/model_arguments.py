"""The model of a Megatron-LM run: sizes, layers, vocabulary, experts.

Defaults are Megatron-LM's own (``megatron/training/arguments.py`` and ``TransformerConfig``,
commit d98e8a64); a vocabulary that the arguments do not give is assumed and listed.
"""

from __future__ import annotations

from typing import cast

from published.megatron.description import (
    Delta,
    Dispatcher,
    Experts,
    Indexer,
    Latent,
    Mamba,
    Shape,
)
from published.megatron.flags import Flags, layer_pattern
from published.megatron.layout import Block, Layer, hybrid_layers
from shardwright.core.errors import InputError, expected

GPT2_VOCABULARY = 50257
NEMOTRON_256K_VOCABULARY = 256000
VOCABULARIES: tuple[tuple[str, int], ...] = (
    ("nemotron_2_256k", NEMOTRON_256K_VOCABULARY),
    ("gpt2", GPT2_VOCABULARY),
    ("llama-3", 128256),
    ("llama3", 128256),
    ("llama-2", 32000),
    ("llama2", 32000),
    ("mixtral", 32000),
    ("mistral-nemo", 131072),
    ("mistral", 32000),
    ("deepseek", 129280),
    ("qwen", 151936),
    ("nemotron", 131072),
    ("multimixv8", 131072),
    ("tiktoken", 131072),
)
"""Words of a tokenizer by a part of its name, from the tokenizers' own published sizes."""

VOCABULARY_MULTIPLE = 128


def read_shape(flags: Flags, tensor: int, assumed: list[str]) -> Shape:
    """The model, whole; its vocabulary is padded to multiples that ``tensor`` ranks share."""
    hidden = flags.integer("hidden-size", 0)
    heads = flags.integer("num-attention-heads", 1)
    gated = flags.on("swiglu") or flags.text("activation-func", "") in ("silu", "swiglu")
    ffn = flags.integer("ffn-hidden-size", _default_ffn(hidden, flags.on("swiglu")))
    layers, predictors = _layers(flags)
    position = flags.text("position-embedding-type", "learned_absolute")
    return Shape(
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=_kv_heads(flags, heads),
        head_dim=flags.integer("kv-channels", hidden // heads),
        layers=layers,
        predictors=predictors,
        repeated_predictor=flags.on("mtp-use-repeated-layer"),
        vocab=_vocabulary(flags, tensor, assumed),
        tied=not flags.on("untie-embeddings-and-output-weights"),
        positions=_positions(flags) if position == "learned_absolute" else 0,
        rope=position in ("rope", "yarn", "mrope") or flags.on("use-rotary-position-embeddings"),
        rms=flags.text("normalization", "LayerNorm") == "RMSNorm",
        bias=not flags.on("disable-bias-linear"),
        qkv_bias=flags.on("add-qkv-bias"),
        gated=gated,
        qk_norm=flags.on("qk-layernorm"),
        latent=_latent(flags) if flags.on("multi-latent-attention") else None,
        experts=_experts(flags, ffn, assumed) if "num-experts" in flags else None,
        mamba=_mamba(flags, hidden) if any("mamba" in layer for layer in layers) else None,
        delta=_delta(flags, heads) if any("linear_attention" in lay for lay in layers) else None,
        indexer=_indexer(flags),
        output_gate=flags.on("attention-output-gate"),
    )


def _positions(flags: Flags) -> int:
    return flags.integer("max-position-embeddings", flags.integer("seq-length", 0))


def _default_ffn(hidden: int, swiglu: bool) -> int:
    """Four times the hidden size; with SwiGLU 2/3 of that, rounded to multiples of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def _kv_heads(flags: Flags, heads: int) -> int:
    groups = flags.integer("num-query-groups", heads)
    return groups if flags.on("group-query-attention") else heads


def _vocabulary(flags: Flags, tensor: int, assumed: list[str]) -> int:
    multiple = flags.integer("make-vocab-size-divisible-by", VOCABULARY_MULTIPLE) * tensor
    if "vocab-size" in flags:
        words = flags.integer("vocab-size", 0)
        words += flags.text("tokenizer-type", "") == "NullTokenizer"
    else:
        name = f"{flags.text('tokenizer-type', '')} {flags.text('tokenizer-model', '')}".lower()
        words = next((size for part, size in VOCABULARIES if part in name), 0)
        if not words:
            words = _unnamed(flags, name)
        assumed.append(f"vocabulary of {words} words: the arguments do not give its size")
    return -(-words // multiple) * multiple


def _unnamed(flags: Flags, name: str) -> int:
    if "${tokenizer" in name:
        return 131072
    return GPT2_VOCABULARY if "vocab-file" in flags or not name.strip() else 128256


def _latent(flags: Flags) -> Latent:
    return Latent(
        q_rank=flags.integer("q-lora-rank", 0),
        kv_rank=flags.integer("kv-lora-rank", 32),
        qk_dim=flags.integer("qk-head-dim", 128),
        position_dim=flags.integer("qk-pos-emb-head-dim", 64),
        v_dim=flags.integer("v-head-dim", 128),
    )


def _experts(flags: Flags, ffn: int, assumed: list[str]) -> Experts:
    capacity = flags.raw("moe-expert-capacity-factor")
    return Experts(
        count=flags.integer("num-experts", 1),
        topk=flags.integer("moe-router-topk", 2),
        width=flags.integer("moe-ffn-hidden-size", ffn),
        shared_width=flags.integer("moe-shared-expert-intermediate-size", 0),
        latent=flags.integer("moe-latent-size", 0),
        dispatcher=_dispatcher(flags, assumed),
        grouped=flags.on("moe-grouped-gemm"),
        fp32_router=flags.text("moe-router-dtype", "") in ("fp32", "fp64"),
        capacity=None if capacity is None else flags.number("moe-expert-capacity-factor", 0.0),
        padded=flags.on("moe-pad-expert-input-to-capacity"),
    )


def _dispatcher(flags: Flags, assumed: list[str]) -> Dispatcher:
    """How tokens reach the experts; an unknown way is taken for an all-to-all."""
    name = flags.text("moe-token-dispatcher-type", "allgather")
    if name in ("allgather", "alltoall", "flex"):
        return cast(Dispatcher, name)
    if name != "alltoall_seq":
        assumed.append(f"tokens move by all-to-all: the dispatcher {name} is not known")
    return "alltoall"


def _mamba(flags: Flags, hidden: int) -> Mamba:
    head_dim = flags.integer("mamba-head-dim", 64)
    return Mamba(
        heads=flags.integer("mamba-num-heads", 2 * hidden // head_dim),
        head_dim=head_dim,
        state=flags.integer("mamba-state-dim", 128),
        groups=flags.integer("mamba-num-groups", 8),
        conv=4,
    )


def _delta(flags: Flags, heads: int) -> Delta:
    return Delta(
        key_heads=flags.integer("linear-num-key-heads", heads),
        value_heads=flags.integer("linear-num-value-heads", heads),
        key_dim=flags.integer("linear-key-head-dim", 128),
        value_dim=flags.integer("linear-value-head-dim", 128),
        conv=flags.integer("linear-conv-kernel-dim", 4),
    )


def _indexer(flags: Flags) -> Indexer | None:
    if flags.text("experimental-attention-variant", "") != "dsa":
        return None
    return Indexer(
        heads=flags.integer("dsa-indexer-n-heads", 64),
        head_dim=flags.integer("dsa-indexer-head-dim", 128),
    )


def _layers(flags: Flags) -> tuple[tuple[Layer, ...], tuple[tuple[Layer, ...], ...]]:
    pattern = flags.text("hybrid-layer-pattern", flags.text("hybrid-override-pattern", ""))
    depth, count = flags.integer("mtp-num-layers", 0), flags.integer("num-layers", 0)
    if pattern:
        layers, predictors = hybrid_layers(flags.where, pattern)
        own = flags.text("mtp-hybrid-override-pattern", "")
        if own and not predictors:
            predictors = (hybrid_layers(flags.where, own)[0],) * depth
        return layers, predictors
    if "hybrid-attention-ratio" in flags or "hybrid-mlp-ratio" in flags:
        return _by_ratio(flags, count), ()
    if not count:
        raise InputError(expected(flags.where, "the argument num-layers", "none"))
    sparse = (False,) * count
    if "num-experts" in flags:
        sparse = layer_pattern(
            f"{flags.where}: moe-layer-freq", flags.text("moe-layer-freq", "1"), count
        )
    linear = _linear(flags, count)
    blocks: tuple[Layer, ...] = tuple(
        ("linear_attention" if lin else "attention", "moe" if is_sparse else "mlp")
        for lin, is_sparse in zip(linear, sparse, strict=True)
    )
    return blocks, ((blocks[-1],),) * depth


def _by_ratio(flags: Flags, count: int) -> tuple[Layer, ...]:
    """A hybrid model whose layers are given by their shares, each kind spread evenly."""
    attention = round(count * flags.number("hybrid-attention-ratio", 0.0))
    mlp = round(count * flags.number("hybrid-mlp-ratio", 0.0))
    numbers: dict[Block, int] = {
        "attention": attention,
        "mlp": mlp,
        "mamba": count - attention - mlp,
    }
    places = [
        ((index + 0.5) / number, block)
        for block, number in numbers.items()
        for index in range(number)
    ]
    return tuple((block,) for _, block in sorted(places))


def _linear(flags: Flags, count: int) -> tuple[bool, ...]:
    """Layers with linear attention: all but every n-th, or as a list says."""
    freq = flags.text("linear-attention-freq", "")
    if not freq or flags.text("experimental-attention-variant", "") != "gated_delta_net":
        return (False,) * count
    if freq.isdigit():
        return tuple((index + 1) % int(freq) != 0 for index in range(count))
    return layer_pattern(f"{flags.where}: linear-attention-freq", freq, count)
