"""The shape of a Llama-style decoder: every tensor of it and the part of it that one rank holds.
Free of torch.

Names of tensors are Meta's, which TorchTitan keeps too: ``layers.0.attention.wq.weight``,
``layers.0.feed_forward.w1.weight``, ``layers.0.moe.experts.w1``. Parts are those of tensor,
pipeline, context and expert parallelism; sharding over data ranks (FSDP, ZeRO) is not described
here: it cuts whatever the rank holds by bytes.
"""

# Tensors are named and counted here without torch, since planner and reports need them where torch
# is not; tests hold the list to the modules of models/llama. What one rank holds (LocalShape) is
# said as divisors and not as another model: nothing of a shape is ever copied into a smaller one.

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, expected
from shardwright.core.megatron import MegatronSettings

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
LARGEST_DEPTH = 4096

NamedShape = tuple[str, tuple[int, ...]]
Activation = Literal["silu", "gelu_tanh", "squared_relu", "clipped_silu"]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
LLAMA_EXPERTS = ("layers.*.moe.experts", "mtp.*.moe.experts")  # of which a rank may have some
LORA = "lora_"  # what the names of adapters begin with
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")  # of latent attention


class LlamaShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Widths and counts of a decoder of ``layers`` blocks: attention, then a SwiGLU. What a GPT
    has otherwise is named, so a llama is a decoder that names nothing.

    ``kv_heads`` are the heads of keys and values that the ``heads`` of queries share. Layers in
    ``moe_layers`` have ``experts`` of width ``expert_ffn_dim`` instead of a SwiGLU of ``ffn_dim``,
    ``experts_per_token`` of which see a token, and beside them one that sees every token where
    ``shared_ffn_dim`` is not 0 (``shared_gate``: scaled by a gate of its own). ``qk_norm`` is an
    RMSNorm over each head of queries and keys. A ``sliding_window`` is what attention looks back
    at most; a kernel needs no more memory for it.

    With a ``kv_lora_rank`` attention is latent (DeepSeek-V2, arXiv 2405.04434): keys and values are
    made of so many numbers for all heads, and of ``qk_rope_head_dim`` more, which alone are turned;
    queries of ``q_lora_rank`` numbers, or at once where it is 0. ``v_head_dim`` is the width of a
    head of values where it is not ``head_dim``.

    As Gemma 2 has them: ``activation`` of the gate, a norm after each sublayer (``post_norms``), an
    embedding times the root of ``dim`` (``scaled_embedding``), and logits and scores of attention
    that a tanh keeps below ``logit_cap`` and ``attention_cap``.

    As gpt-oss has them: a learned score of each head that tokens share with what they look at
    (``sinks``), a gate that is clipped as what it scales is (``clipped_silu``), and biases of
    router and experts (``expert_bias``).

    As GPTs have them: ``layer_norm`` with a bias in place of an RMSNorm, MLPs of two matrices whose
    ``activation`` has no gate (``ungated``), and ``positions`` that are not turned: rows of a
    learned table, so many, or none. ``dropout`` is of the embedding and of what is added to the
    stream, ``attention_dropout`` of shares of attention. ``mtp_layers`` each predict one token more
    (DeepSeek-V3, arXiv 2412.19437): a block as the last one is, of the stream before it and of the
    embedding of the token that follows, before the same head.

    With ``lora`` all is frozen but adapters of so many inner numbers (LoRA, arXiv 2106.09685)
    beside the linear layers of attention and of MLPs, not of experts, router and head.

    ``dtype`` is what it computes in, where its configuration says so; ``unread`` are keys of that
    which may make another model and which nothing here reads.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_DEPTH)]
    dim: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn_dim: Number
    vocab: Size
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    tied_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    experts: Number = 0
    experts_per_token: Number = 0
    expert_ffn_dim: Number = 0
    shared_ffn_dim: Number = 0
    shared_gate: bool = False
    moe_layers: tuple[int, ...] = ()
    q_lora_rank: Number = 0
    kv_lora_rank: Number = 0
    qk_rope_head_dim: Number = 0
    v_head_dim: Number = 0
    activation: Activation = "silu"
    post_norms: bool = False
    scaled_embedding: bool = False
    logit_cap: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    attention_cap: Annotated[float, msgspec.Meta(gt=0)] | UnsetType = UNSET
    dtype: Literal["bf16", "fp16", "fp32"] | UnsetType = UNSET
    unread: tuple[str, ...] | UnsetType = UNSET
    layer_norm: bool | UnsetType = UNSET
    ungated: bool | UnsetType = UNSET
    positions: Size | Literal["none"] | UnsetType = UNSET
    dropout: Share | UnsetType = UNSET
    attention_dropout: Share | UnsetType = UNSET
    mtp_layers: Number | UnsetType = UNSET
    lora: Number | UnsetType = UNSET
    sinks: bool | UnsetType = UNSET
    expert_bias: bool | UnsetType = UNSET

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; those behind the last are as it is."""
        behind = layer >= self.layers and self.layers - 1 in self.moe_layers
        return behind or layer in self.moe_layers

    @property
    def further(self) -> int:
        """Tokens that it predicts beyond the next one."""
        return self.mtp_layers or 0

    @property
    def value_dim(self) -> int:
        """The width of a head of values."""
        return self.v_head_dim or self.head_dim

    @property
    def turned_dim(self) -> int:
        """The part of a head that rotary positions turn."""
        return self.qk_rope_head_dim or self.head_dim

    @property
    def learned_positions(self) -> int:
        """Rows of the table of positions; 0 where there is none."""
        return self.positions if isinstance(self.positions, int) else 0

    @property
    def tensors(self) -> tuple[NamedShape, ...]:
        """Name and shape of every parameter, in the order of a step; a tied head has none."""
        found: list[NamedShape] = [("tok_embeddings.weight", (self.vocab, self.dim))]
        if self.learned_positions:
            found.append(("tok_embeddings.positions", (self.learned_positions, self.dim)))
        for layer in range(self.layers):
            found += block_tensors(self, layer)
        found += _norm(self, "norm", self.dim)
        for layer in range(self.layers, self.layers + self.further):
            found += block_tensors(self, layer)
        if not self.tied_embeddings:
            found.append(("output.weight", (self.vocab, self.dim)))
        return tuple(found)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters; tied weights count once."""
        return sum(math.prod(shape) for _, shape in self.tensors)

    @property
    def trained_count(self) -> int:
        """Elements of those that are not frozen."""
        return sum(math.prod(shape) for name, shape in self.tensors if is_trained(self, name))


def is_trained(shape: LlamaShape, name: str) -> bool:
    """Whether a parameter is not frozen."""
    return not shape.lora or name.split(".")[-2].startswith(LORA)


def check_shape(shape: LlamaShape, where: str = "model") -> None:
    """Refuse sizes that contradict each other; InputError names ``where`` and the key."""
    if shape.heads % shape.kv_heads:
        wanted = f"a divisor of the {shape.heads} heads"
        remedy = "Every head of keys serves equally many heads of queries."
        raise InputError(f"{where}.kv_heads", wanted, str(shape.kv_heads), remedy)
    if shape.turned_dim % 2 and not shape.positions:
        key = "qk_rope_head_dim" if shape.qk_rope_head_dim else "head_dim"
        raise InputError(
            f"{where}.{key}", "an even number", str(shape.turned_dim), "RoPE turns pairs."
        )
    _check_latent(shape, where)
    every = shape.layers + shape.further
    beyond = [layer for layer in shape.moe_layers if not 0 <= layer < every]
    if beyond:
        raise InputError(f"{where}.moe_layers", f"layers below {shape.layers}", str(beyond[0]))
    if shape.moe_layers and not 1 <= shape.experts_per_token <= shape.experts:
        raise InputError(
            f"{where}.experts_per_token",
            f"from 1 to the {shape.experts} experts",
            str(shape.experts_per_token),
        )
    if shape.moe_layers and not shape.expert_ffn_dim:
        raise InputError(f"{where}.expert_ffn_dim", "at least 1", "0")
    if len(shape.moe_layers) < shape.layers and not shape.ffn_dim:
        raise InputError(f"{where}.ffn_dim", "at least 1", "0")


def _check_latent(shape: LlamaShape, where: str) -> None:
    given = [key for key in LATENT if getattr(shape, key)]
    if not given:
        return
    if not shape.kv_lora_rank:
        raise InputError(f"{where}.kv_lora_rank", f"at least 1 beside {given[0]}", "none")
    if not 0 < shape.qk_rope_head_dim < shape.head_dim:
        wanted = f"a part of head_dim {shape.head_dim} beside kv_lora_rank"
        raise InputError(expected(f"{where}.qk_rope_head_dim", wanted, str(shape.qk_rope_head_dim)))
    usual = {"kv_heads": shape.heads, "qk_norm": False, "attention_bias": False, "lora": UNSET}
    for key, value in usual.items():
        if getattr(shape, key) != value:
            found = repr(getattr(shape, key))
            wanted = f"{'none' if value is UNSET else value} beside kv_lora_rank"
            raise InputError(expected(f"{where}.{key}", wanted, found))


def block_tensors(shape: LlamaShape, layer: int) -> list[NamedShape]:
    """Name and shape of every parameter of one block; behind the last are those of ``mtp``."""
    ahead = layer - shape.layers
    prefix = f"layers.{layer}." if ahead < 0 else f"mtp.{ahead}."
    attention = _latent_attention(shape) if shape.kv_lora_rank else _attention(shape)
    inner = attention + (_moe(shape) if shape.is_moe(layer) else _dense(shape))
    norms = ["attention_norm", "ffn_norm"]
    norms += ["post_attention_norm", "post_ffn_norm"] if shape.post_norms else []
    for name in norms if ahead < 0 else (*norms, "enorm", "hnorm", "norm"):
        inner += _norm(shape, name, shape.dim)
    if ahead >= 0:
        inner.append(("eh_proj.weight", (shape.dim, 2 * shape.dim)))
    return [(prefix + name, size) for name, size in inner]


def _norm(shape: LlamaShape, name: str, width: int) -> list[NamedShape]:
    parts = ("weight", "bias") if shape.layer_norm else ("weight",)
    return [(f"{name}.{part}", (width,)) for part in parts]


def _attention(shape: LlamaShape) -> list[NamedShape]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: list[NamedShape] = []
    for name, width in (("wq", queries), ("wk", keys), ("wv", keys)):
        found += _linear(shape, f"attention.{name}", (width, shape.dim), shape.attention_bias)
    found += _linear(shape, "attention.wo", (shape.dim, queries), shape.output_bias)
    if shape.sinks:
        found.append(("attention.sinks", (shape.heads,)))
    if shape.qk_norm:
        found += _norm(shape, "attention.q_norm", shape.head_dim)
        found += _norm(shape, "attention.k_norm", shape.head_dim)
    return found


def _latent_attention(shape: LlamaShape) -> list[NamedShape]:
    """Names as in TorchTitan's ``deepseek_v3``."""
    dim, queries = shape.dim, shape.heads * shape.head_dim
    found: list[NamedShape] = [("attention.wq.weight", (queries, dim))]
    if shape.q_lora_rank:
        found = [
            ("attention.wq_a.weight", (shape.q_lora_rank, dim)),
            *_norm(shape, "attention.q_norm", shape.q_lora_rank),
            ("attention.wq_b.weight", (queries, shape.q_lora_rank)),
        ]
    unturned = shape.head_dim - shape.qk_rope_head_dim
    return [
        *found,
        ("attention.wkv_a.weight", (shape.kv_lora_rank + shape.qk_rope_head_dim, dim)),
        *_norm(shape, "attention.kv_norm", shape.kv_lora_rank),
        (
            "attention.wkv_b.weight",
            (shape.heads * (unturned + shape.value_dim), shape.kv_lora_rank),
        ),
        ("attention.wo.weight", (dim, shape.heads * shape.value_dim)),
        *([("attention.wo.bias", (dim,))] if shape.output_bias else []),
    ]


def _dense(shape: LlamaShape) -> list[NamedShape]:
    return _mlp("feed_forward", shape, shape.ffn_dim, shape.mlp_bias)


def _moe(shape: LlamaShape) -> list[NamedShape]:
    dim, wide, experts = shape.dim, shape.expert_ffn_dim, shape.experts
    found: list[NamedShape] = [
        ("moe.router.weight", (experts, dim)),
        ("moe.experts.w1", (experts, wide, dim)),
        ("moe.experts.w2", (experts, dim, wide)),
    ]
    if not shape.ungated:
        found.append(("moe.experts.w3", (experts, wide, dim)))
    if shape.expert_bias:
        found.append(("moe.router.bias", (experts,)))
        for part, width in (("b1", wide), ("b2", dim), ("b3", wide))[: 2 if shape.ungated else 3]:
            found.append((f"moe.experts.{part}", (experts, width)))
    if shape.shared_ffn_dim:
        found += _mlp("moe.shared_experts", shape, shape.shared_ffn_dim, False)
        if shape.shared_gate:
            found.append(("moe.shared_gate.weight", (1, dim)))
    return found


def _mlp(name: str, shape: LlamaShape, wide: int, bias: bool) -> list[NamedShape]:
    found: list[NamedShape] = []
    parts = (("w1", wide, shape.dim), ("w2", shape.dim, wide), ("w3", wide, shape.dim))
    for part, out, inside in parts[: 2 if shape.ungated else 3]:
        found += _linear(shape, f"{name}.{part}", (out, inside), bias)
    return found


def _linear(shape: LlamaShape, name: str, size: tuple[int, int], bias: bool) -> list[NamedShape]:
    """Of a layer that may have an adapter."""
    found: list[NamedShape] = [(f"{name}.weight", size)]
    if bias:
        found.append((f"{name}.bias", size[:1]))
    if shape.lora:
        found.append((f"{name}.lora_a.weight", (shape.lora, size[1])))
        found.append((f"{name}.lora_b.weight", (size[0], shape.lora)))
    return found


MAX_WORLD = 2**20  # ranks in a job whose memory is estimated
Degree = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
LossKind = Literal["gathered", "parallel", "chunked"]


class LocalShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees that divide a decoder, and which of its layers are here.

    ``tensor`` divides heads, widths and the vocabulary, ``context`` the sequence, ``expert`` the
    experts; with ``sequence_parallel`` the stream between attention and SwiGLU is divided by
    ``tensor`` too. Experts are then whole where ``expert`` is more than 1 and cut in width where it
    is 1, as TorchTitan does, or as ``expert_tensor`` says. ``layers`` are the first and one past
    the last; ``first`` has the embedding, ``last`` the norm and the head.

    ``expert_load`` is how many rows this rank's experts receive, relative to even routing; with a
    ``capacity_factor`` every expert takes exactly its even share times that factor, padded or cut.
    Layers are TorchTitan's, or those of ``megatron``.
    With ``fp32_logits`` what the loss is computed from is a copy in fp32, which stays until the
    backward is over.
    """

    tensor: Degree = 1
    sequence_parallel: bool = False
    context: Degree = 1
    expert: Degree = 1
    expert_tensor: Degree | None = None
    first: bool = True
    last: bool = True
    layers: tuple[int, int] | None = None
    expert_load: Annotated[float, msgspec.Meta(gt=0, le=1e4)] = 1.0
    capacity_factor: Annotated[float, msgspec.Meta(gt=0, le=1e4)] | None = None
    loss: LossKind = "gathered"
    fp32_logits: bool = False
    megatron: MegatronSettings | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is divided, so that no collective stands in for another rank."""
        return self.tensor == self.context == self.expert == 1

    def layer_range(self, shape: LlamaShape) -> range:
        """The layers that are here."""
        return range(*(self.layers or (0, shape.layers)))

    def heads(self, shape: LlamaShape) -> int:
        """Heads of queries on this rank."""
        return shape.heads // self.tensor

    def kv_heads(self, shape: LlamaShape) -> int:
        """Heads of keys on this rank; where there are fewer than ranks, several hold the same."""
        return max(1, shape.kv_heads // self.tensor)

    def vocab(self, shape: LlamaShape) -> int:
        """Rows of the embedding and of the head on this rank; the last rank may have fewer."""
        return math.ceil(shape.vocab / self.tensor)

    def experts(self, shape: LlamaShape) -> int:
        """Experts on this rank."""
        return shape.experts // self.expert

    @property
    def expert_width_degree(self) -> int:
        """By what the width of an expert is divided."""
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)

    @property
    def own_words(self) -> bool:
        """Whether logits of each tensor rank's words are never gathered."""
        return self.megatron.parallel_output if self.megatron else self.loss == "parallel"

    @property
    def stream_degree(self) -> int:
        """By what the tokens of the stream between two sublayers are divided, beside context."""
        return self.tensor if self.sequence_parallel else 1

    def routed_rows(self, shape: LlamaShape, tokens: int) -> int:
        """Rows that this rank sends to experts, of ``tokens`` that its router sees."""
        sliced = self.tensor if self.expert > 1 and not self.megatron else 1
        return math.ceil(tokens / sliced) * shape.experts_per_token

    def received_rows(self, shape: LlamaShape, rows: int) -> int:
        """Rows that this rank's experts work on where every rank sends ``rows``."""
        return received_rows(
            rows, shape.experts, self.expert, self.expert_load, self.capacity_factor
        )


def received_rows(
    rows: int, experts: int, degree: int, load: float, capacity_factor: float | None
) -> int:
    """Rows that the experts of one of ``degree`` ranks work on where every rank sends ``rows``."""
    if capacity_factor is not None:
        each = math.ceil(rows / experts * capacity_factor)
        return each * degree * (experts // degree)
    return math.ceil(rows * load)


def check_local(shape: LlamaShape, local: LocalShape, where: str = "parallel") -> None:
    """Refuse degrees that do not divide the model; InputError names the degree and the size."""
    if shape.lora and (local.tensor > 1 or local.megatron):
        wanted = "none beside memory.runtime 'megatron' or parallel.tensor, which have no adapters"
        raise InputError(expected("model.lora", wanted, str(shape.lora)))
    if local.tensor > 1:
        _divides(shape.heads, local.tensor, f"{where}.tensor", "heads")
        most, least = max(shape.kv_heads, local.tensor), min(shape.kv_heads, local.tensor)
        _divides(most, least, f"{where}.tensor", "heads of keys, or a multiple of them")
        dense = shape.ffn_dim if len(shape.moe_layers) < shape.layers else 0
        for wide in (dense, shape.shared_ffn_dim):
            _divides(wide, local.tensor, f"{where}.tensor", "columns of the MLP")
    if shape.moe_layers and local.expert_width_degree > 1:
        key, wide = "expert_tensor" if local.expert_tensor else "tensor", shape.expert_ffn_dim
        _divides(wide, local.expert_width_degree, f"{where}.{key}", "columns of an expert")
    if local.expert > 1:
        if not shape.moe_layers:
            raise InputError(f"{where}.expert", "1 for a model without experts", str(local.expert))
        _divides(shape.experts, local.expert, f"{where}.expert", "experts")
    elif local.capacity_factor is not None or local.expert_load != 1.0:
        remedy = "One rank's experts get exactly the rows of its tokens."
        raise InputError(
            f"{where}.expert", "more than 1 where experts have a capacity or a load", "1", remedy
        )
    if local.megatron and (shape.sinks or shape.expert_bias):
        wanted = "another for a model with sinks of attention or biases of experts"
        raise InputError(expected("memory.runtime", wanted, "'megatron'"))
    if local.context > 1 and (shape.attention_cap or shape.sinks):
        wanted = "1 for a model with caps or sinks of attention, as no kernel over a ring has them"
        raise InputError(expected(f"{where}.context", wanted, str(local.context)))
    first, stop = local.layers or (0, shape.layers)
    if not 0 <= first <= stop <= shape.layers:
        raise InputError("layers", f"a range of the {shape.layers} layers", f"{first} to {stop}")


def _divides(size: int, degree: int, where: str, what: str) -> None:
    if size % degree:
        raise InputError(expected(where, f"a divisor of the {size} {what}", str(degree)))
