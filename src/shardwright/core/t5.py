"""The shape of a T5, free of torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.llama import Size


class T5Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``layers`` of the encoder and ``decoder_layers``; ``gated`` feed-forwards are GeGLUs.
    Distances beyond ``farthest`` share the last of ``buckets``. Parameters are of ``dtype``."""

    vocab: Size = 32128
    dim: Size = 512
    head_dim: Size = 64
    ffn_dim: Size = 2048
    layers: Size = 6
    decoder_layers: Size = 6
    heads: Size = 8
    buckets: Size = 32
    farthest: Size = 128
    dropout: float = 0.1
    norm_eps: float = 1e-6
    gated: bool = False
    tied: bool = True
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
