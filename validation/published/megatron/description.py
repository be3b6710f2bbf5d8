"""What of a Megatron-LM run decides its memory, checked and in one place."""

from __future__ import annotations

from typing import Literal

import msgspec

from published.megatron.layout import Chunk, Layer

Attention = Literal["flash", "fused", "unfused", "local"]
Dispatcher = Literal["allgather", "alltoall", "flex"]


class Latent(msgspec.Struct, frozen=True):
    """Multi-latent attention: ranks of the low-rank projections (0 = none) and sizes of a head."""

    q_rank: int
    kv_rank: int
    qk_dim: int
    position_dim: int
    v_dim: int


class Experts(msgspec.Struct, frozen=True):
    """A mixture of experts; ``width`` and ``shared_width`` are hidden sizes of an expert and of
    the shared expert (0 = none), ``latent`` the size tokens are projected to (0 = none)."""

    count: int
    topk: int
    width: int
    shared_width: int
    latent: int
    dispatcher: Dispatcher
    grouped: bool
    fp32_router: bool
    capacity: float | None
    padded: bool


class Mamba(msgspec.Struct, frozen=True):
    """A Mamba-2 mixer."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int


class Delta(msgspec.Struct, frozen=True):
    """A gated delta rule in place of attention."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int


class Indexer(msgspec.Struct, frozen=True):
    """The indexer of a sparse attention, which scores every pair of tokens."""

    heads: int
    head_dim: int


class Shape(msgspec.Struct, frozen=True):
    """The model, whole."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    predictors: tuple[tuple[Layer, ...], ...]
    repeated_predictor: bool
    vocab: int
    tied: bool
    positions: int
    rope: bool
    rms: bool
    bias: bool
    qkv_bias: bool
    gated: bool
    qk_norm: bool
    latent: Latent | None
    experts: Experts | None
    mamba: Mamba | None
    delta: Delta | None
    indexer: Indexer | None
    output_gate: bool


class Parallel(msgspec.Struct, frozen=True):
    """Degrees of parallelism; ``expert_tensor`` splits an expert's matrices."""

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    sequence: bool
    chunks: int

    @property
    def data(self) -> int:
        """Replicas of the model, the context ranks of each counted once."""
        return max(1, self.world // (self.tensor * self.pipeline * self.context))

    @property
    def dense_shards(self) -> int:
        """Ranks that share the gradients of a dense parameter: data times context."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that share the gradients of an expert."""
        return max(1, self.world // (self.pipeline * self.expert * self.expert_tensor))


class Precision(msgspec.Struct, frozen=True):
    """Bytes per element of what is kept, and how matrices are quantized; ``plain_ends`` are the
    layers at the model's beginning and end that are not."""

    compute: Literal["bf16", "fp16", "fp32"]
    gradient: int
    main_parameter: int
    main_gradient: int
    moments: tuple[int, int]
    fp8: str
    fp8_parameters: bool
    plain_ends: tuple[int, int]

    @property
    def parameter(self) -> int:
        """Bytes of a parameter as the layers use it."""
        return 4 if self.compute == "fp32" else 2


class Optimizer(msgspec.Struct, frozen=True):
    """How optimizer states are kept. ``sharded``: over the data-parallel ranks, divided by
    ``instances``; ``fsdp``: which states are cut by a fully sharded runtime (empty = none)."""

    kind: str
    sharded: bool
    instances: int
    precision_aware: bool
    offloaded: float
    fsdp: Literal["", "optim", "optim_grads", "optim_grads_params"]
    reuses_gradients: bool


class Recompute(msgspec.Struct, frozen=True):
    """What is computed again in the backward: ``layers`` of a chunk as a whole (``group`` at a
    time, the first or all), or the named modules of every layer."""

    granularity: Literal["none", "full", "selective"]
    method: str
    layers: int
    modules: frozenset[str]
    distribute: bool
    offloaded: frozenset[str]


class Kernels(msgspec.Struct, frozen=True):
    """Which implementation runs, as far as it decides what is kept or allocated."""

    engine: bool
    attention: Attention
    fused_softmax: bool
    softmax_fp32: bool
    fused_rope: bool
    fused_activation: bool
    fused_loss: str
    fused_weight_gradient: bool
    fused_permute: bool
    attention_dropout: float
    hidden_dropout: float
    deferred_embedding: bool
    overlap_experts: bool
    attention_mask: bool
    deterministic: bool
    user_buffers: bool


class Device(msgspec.Struct, frozen=True):
    """The device: its name, its bytes, and its generation."""

    name: str
    capacity: int
    generation: Literal["ampere", "hopper", "blackwell"]

    @property
    def hopper(self) -> bool:
        """Whether it is Hopper or newer."""
        return self.generation != "ampere"

    @property
    def blackwell(self) -> bool:
        """Whether it is Blackwell."""
        return self.generation == "blackwell"


class Run(msgspec.Struct, frozen=True):
    """A run: everything that its memory follows from. ``assumed`` lists what was not given and
    ``ignored`` the flags that nothing here depends on or knows."""

    shape: Shape
    parallel: Parallel
    precision: Precision
    optimizer: Optimizer
    recompute: Recompute
    kernels: Kernels
    device: Device
    chunks: tuple[Chunk, ...]
    micro_batch: int
    microbatches: int
    sequence: int
    cublas_workspace: int
    assumed: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank, before sequence parallelism."""
        return self.micro_batch * self.sequence // self.parallel.context

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a micro-batch on this rank where the sequence is also cut."""
        return self.tokens // (self.parallel.tensor if self.parallel.sequence else 1)
