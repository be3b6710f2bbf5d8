"""The shape of a decoder from the ``config.json`` of a Hugging Face model, without its weights.

A key that is missing has the default of the model's configuration class (transformers 4.57), for
such files leave defaults out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.document import read_bytes
from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.llama import LlamaShape, check_shape


class Defaults(msgspec.Struct, frozen=True):
    """What a configuration class says where the file says nothing, and what it never asks.

    ``kv_heads`` and ``head_dim`` of 0 follow from the heads. ``biased`` is a bias of queries, keys
    and values whatever the file says; ``bias_key`` is the key that decides, for the output
    projection too where ``output_follows``.
    """

    vocab: int
    dim: int
    ffn_dim: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    window: int | None = None
    window_key: str = ""
    qk_norm: bool = False
    biased: bool = False
    bias_key: str = ""
    output_follows: bool = False
    mlp_bias_key: str = ""
    experts_key: str = ""
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_dim: int = 0
    shared_ffn_dim: int = 0


_QWEN2 = Defaults(151936, 4096, 22016, 32, 32, 32, window_key="use_sliding_window", biased=True)
FAMILIES: dict[str, Defaults] = {
    "llama": Defaults(
        32000,
        4096,
        11008,
        32,
        32,
        bias_key="attention_bias",
        output_follows=True,
        mlp_bias_key="mlp_bias",
    ),
    "mistral": Defaults(32000, 4096, 14336, 32, 32, 8, window=4096),
    "mixtral": Defaults(
        32000,
        4096,
        14336,
        32,
        32,
        8,
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
        experts_key="num_local_experts",
        experts=8,
        experts_per_token=2,
    ),
    "qwen2": _QWEN2,
    "qwen3": Defaults(
        151936,
        4096,
        22016,
        32,
        32,
        32,
        head_dim=128,
        window_key="use_sliding_window",
        qk_norm=True,
        bias_key="attention_bias",
        output_follows=True,
    ),
    "qwen2_moe": Defaults(
        151936,
        2048,
        5632,
        24,
        16,
        16,
        window_key="use_sliding_window",
        biased=True,
        bias_key="qkv_bias",
        experts_key="num_experts",
        experts=60,
        experts_per_token=4,
        expert_ffn_dim=1408,
        shared_ffn_dim=5632,
    ),
    "qwen3_moe": Defaults(
        151936,
        2048,
        6144,
        24,
        32,
        4,
        window_key="use_sliding_window",
        qk_norm=True,
        bias_key="attention_bias",
        output_follows=True,
        experts_key="num_experts",
        experts=128,
        experts_per_token=8,
        expert_ffn_dim=768,
    ),
}


def read_hf_config(path: Path | str) -> LlamaShape:
    """The decoder that a ``config.json`` describes.

    InputError names the file and the key; UnsupportedError a model that is not of these families.
    """
    raw = read_bytes(path, "model configuration", "Name the config.json of a model.")
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(expected(str(path), "a config.json", f"'{error}'")) from None
    if not isinstance(document, dict):
        raise InputError(expected(str(path), "a JSON object", type(document).__name__))
    return hf_shape(document, str(path))


def hf_shape(document: dict[str, Any], where: str = "config.json") -> LlamaShape:
    """The decoder of a decoded configuration."""
    if "model_type" not in document:
        raise InputError(expected(f"{where}: model_type", "a value", "none"))
    family = document["model_type"]
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedError(
            expected(
                f"{where}: model_type",
                f"one of {', '.join(FAMILIES)}",
                repr(family),
                "Give the model as model.python = 'package.module:function'.",
            )
        )
    shape = _shape(_Reader(document, where), FAMILIES[family])
    check_shape(shape, where)
    return shape


class _Reader:
    """Values of a configuration by key, with a default for what is missing or null."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.document = document
        self.where = where

    def size(self, key: str, default: int) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise InputError(expected(f"{self.where}: {key}", "a whole number from 1", repr(value)))
        return value

    def real(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(expected(f"{self.where}: {key}", "a number above 0", repr(value)))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise InputError(expected(f"{self.where}: {key}", "true or false", repr(value)))
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self._value(key, [])
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise InputError(expected(f"{self.where}: {key}", "a list of layers", repr(value)))
        return tuple(value)

    def theta(self, default: float) -> float:
        """The base of rotary positions: a key of its own, or of ``rope_parameters`` (5.0)."""
        nested = self.document.get("rope_parameters")
        if isinstance(nested, dict) and "rope_theta" in nested:
            return _Reader(nested, f"{self.where}: rope_parameters").real("rope_theta", default)
        return self.real("rope_theta", default)

    def _value(self, key: str, default: Any) -> Any:
        value = self.document.get(key)
        return default if value is None else value


def _shape(read: _Reader, family: Defaults) -> LlamaShape:
    dim = read.size("hidden_size", family.dim)
    heads = read.size("num_attention_heads", family.heads)
    layers = read.size("num_hidden_layers", family.layers)
    if dim % heads and not family.head_dim and read.document.get("head_dim") is None:
        raise InputError(
            expected(
                f"{read.where}: num_attention_heads",
                f"a divisor of hidden_size {dim}, or head_dim beside it",
                str(heads),
            )
        )
    bias = read.flag(family.bias_key, family.biased) if family.bias_key else family.biased
    wide = read.size("intermediate_size", family.ffn_dim)
    dense = LlamaShape(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=read.size("num_key_value_heads", family.kv_heads or heads),
        head_dim=read.size("head_dim", family.head_dim or dim // heads),
        ffn_dim=wide,
        vocab=read.size("vocab_size", family.vocab),
        norm_eps=read.real("rms_norm_eps", family.norm_eps),
        rope_theta=read.theta(family.rope_theta),
        tied_embeddings=read.flag("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        attention_bias=bias,
        output_bias=bias and family.output_follows,
        mlp_bias=bool(family.mlp_bias_key) and read.flag(family.mlp_bias_key, False),
        sliding_window=_window(read, family),
    )
    return _with_experts(read, family, dense) if family.experts_key else dense


def _window(read: _Reader, family: Defaults) -> int | None:
    """What attention looks back at most: null in a Mistral's file means everything."""
    if family.window_key:
        return read.size("sliding_window", 4096) if read.flag(family.window_key, False) else None
    if "sliding_window" in read.document and read.document["sliding_window"] is None:
        return None
    found = read.document.get("sliding_window", family.window)
    return None if found is None else read.size("sliding_window", family.window or 0)


def _with_experts(read: _Reader, family: Defaults, dense: LlamaShape) -> LlamaShape:
    """The layers with experts: every ``decoder_sparse_step``-th but those that are named."""
    step = read.size("decoder_sparse_step", 1)
    plain = read.numbers("mlp_only_layers")
    layers = [i for i in range(dense.layers) if (i + 1) % step == 0 and i not in plain]
    wide = read.size("moe_intermediate_size", family.expert_ffn_dim or dense.ffn_dim)
    shared = 0
    if family.shared_ffn_dim:
        shared = read.size("shared_expert_intermediate_size", family.shared_ffn_dim)
    return msgspec.structs.replace(
        dense,
        experts=read.size(family.experts_key, family.experts),
        experts_per_token=read.size("num_experts_per_tok", family.experts_per_token),
        expert_ffn_dim=wide,
        shared_ffn_dim=shared,
        shared_gate=shared > 0,
        moe_layers=tuple(layers),
    )
