"""What attention keeps: the projections, and the core by the kernel that computes it.

Sources, Megatron-LM d98e8a64 and Transformer Engine: ``core/transformer/attention.py``,
``multi_latent_attention.py``, ``dot_product_attention.py``; ``dot_product_attention/backends.py``,
``module/layernorm_linear.py``. The unfused core keeps the probabilities, the mask of the dropout
and the probabilities after it; flash attention keeps its output beside the copy in the layout that
the projection takes; cuDNN's keeps one output.
"""

from __future__ import annotations

import msgspec

from published.megatron.description import Run
from published.megatron.kept import BlockMemory, Kept, size

FP32 = 4
MASK = 1
STATISTICS = 2
"""fp32 values that a LayerNorm keeps for each token: mean and reciprocal deviation (an RMSNorm
keeps one)."""
DELTA_CHUNK = 64
DELTA_SQUARES = 10
DELTA_VECTORS = 12
"""A chunk of the torch recurrence of the gated delta rule, the fp32 matrices of a chunk's size and
the fp32 vectors that it keeps for each token and head; counted by hand, from memory of
``torch_chunk_gated_delta_rule``, and met by no measurement yet."""
INDEXER_COPIES = 3
"""fp32 matrices of the indexer's scores of all its heads that are alive at once, after
``_compute_index_scores`` in Megatron-LM's ``dsa.py``; met by no measurement yet."""


class Core(msgspec.Struct, frozen=True):
    """The core of the attention: tensors kept and bytes needed for a moment."""

    kept: tuple[Kept, ...]
    forward_extra: int
    backward_extra: int


def scores(run: Run) -> int:
    """Elements of the matrix of scores of all heads on this rank."""
    rows = run.sequence // run.parallel.context
    return run.micro_batch * (run.shape.heads // run.parallel.tensor) * rows * run.sequence


def linear_input(run: Run, quantized: bool) -> int:
    """Bytes per element of what a linear layer keeps of its input: one under fp8."""
    return 1 if quantized and run.precision.fp8 else run.precision.parameter


def norm_kept(run: Run, tokens: int, hidden: int, quantized: bool, name: str) -> tuple[Kept, ...]:
    """The output of a norm and its statistics, where the input is counted elsewhere."""
    statistics = 1 if run.shape.rms else STATISTICS
    return (
        Kept(f"{name} output", size(tokens * hidden, linear_input(run, quantized)), "layernorm"),
        Kept(f"{name} statistics", size(tokens, statistics * FP32), ""),
    )


def hidden_dropout(run: Run, tokens: int) -> tuple[Kept, ...]:
    """The mask of the dropout before the residual sum."""
    if not run.kernels.hidden_dropout:
        return ()
    return (Kept("hidden dropout mask", size(tokens * run.shape.hidden, MASK)),)


def attention(run: Run, quantized: bool) -> BlockMemory:
    """Self attention with its norm, its projections and the residual sum."""
    shape = run.shape
    heads = shape.heads // run.parallel.tensor
    groups = max(1, shape.kv_heads // run.parallel.tensor)
    if shape.latent is not None:
        return _latent(run, quantized)
    width = run.precision.parameter
    tokens = run.tokens
    queries, keys = heads * shape.head_dim, groups * shape.head_dim
    expanded = queries if run.kernels.attention in ("unfused", "local") else keys
    projections = queries + 2 * expanded
    kept = [Kept("query, key and value", size(tokens * projections, width), "qkv")]
    if run.kernels.attention == "local" and shape.rope:
        kept.append(
            Kept("projection that value is a view of", size(tokens * (queries + keys), width))
        )
    if shape.output_gate:
        kept.append(Kept("gate and gated context", size(2 * tokens * queries, width)))
    if shape.qk_norm:
        kept.append(
            Kept("query and key before their norms", size(tokens * (queries + keys), width))
        )
    core = _core(run, queries, queries)
    kept += core.kept
    kept += _projection_input(run, queries, quantized)
    residual = size(run.sequence_tokens * shape.hidden, width)
    moving = size(tokens * (queries + 2 * keys), width) + size(tokens * shape.hidden, width)
    return BlockMemory(
        "attention",
        residual,
        (
            *norm_kept(run, run.sequence_tokens, shape.hidden, quantized, "input norm"),
            *kept,
            *hidden_dropout(run, run.sequence_tokens),
        ),
        forward_extra=max(core.forward_extra, size(2 * tokens * shape.hidden, width)),
        backward_extra=2 * residual + max(core.backward_extra, moving),
    )


def _projection_input(run: Run, columns: int, quantized: bool) -> tuple[Kept, ...]:
    width = run.precision.parameter
    kept = [Kept("context", size(run.tokens * columns, width), "attn_proj")]
    if quantized and run.precision.fp8:
        kept.append(Kept("context in fp8", size(run.tokens * columns, 1)))
    return tuple(kept)


def _latent(run: Run, quantized: bool) -> BlockMemory:
    """Multi-latent attention: low-rank projections, then keys and values for every head."""
    shape = run.shape
    latent = shape.latent
    assert latent is not None
    heads = shape.heads // run.parallel.tensor
    width, tokens = run.precision.parameter, run.tokens
    local = run.sequence_tokens
    low = linear_input(run, quantized)
    queries = heads * (latent.qk_dim + latent.position_dim)
    values = heads * latent.v_dim
    ranks = latent.q_rank + latent.kv_rank
    kept = [
        Kept("compressed query and key-value", size(local * ranks, width)),
        Kept("position part of the key", size(tokens * latent.position_dim, width)),
    ]
    if shape.qk_norm:
        kept.append(Kept("norms of the compressed", size(local * ranks, low), "mla_up_proj"))
    kept.append(
        Kept("query, key and value", size(tokens * (2 * queries + values), width), "mla_up_proj")
    )
    core = _core(run, queries, values)
    kept += core.kept
    kept += _projection_input(run, values, quantized)
    residual = size(local * shape.hidden, width)
    index = 0
    if shape.indexer is not None:
        pairs = run.micro_batch * run.sequence * run.sequence // run.parallel.context
        index = INDEXER_COPIES * size(pairs * shape.indexer.heads, FP32)
    up = size(tokens * (queries + heads * latent.qk_dim + values), width)
    return BlockMemory(
        "attention",
        residual,
        (
            *norm_kept(run, local, shape.hidden, quantized, "input norm"),
            *kept,
            *hidden_dropout(run, local),
        ),
        forward_extra=max(core.forward_extra, index, up, size(2 * tokens * shape.hidden, width)),
        backward_extra=2 * residual
        + max(core.backward_extra, index, up + size(tokens * (2 * queries + values), width)),
    )


def _core(run: Run, queries: int, values: int) -> Core:
    if run.kernels.attention in ("flash", "fused"):
        return _fused_core(run, queries, values)
    return _unfused_core(run)


def _fused_core(run: Run, queries: int, values: int) -> Core:
    width, context = run.precision.parameter, run.parallel.context
    out = size(run.tokens * values, width)
    heads = run.shape.heads // run.parallel.tensor
    kept = [Kept("softmax statistics", size(run.tokens * heads, FP32), "core_attn")]
    if run.kernels.attention == "flash":
        kept.append(Kept("output of flash attention", out, "core_attn"))
    exchanged = 0
    if context > 1:
        kept.append(
            Kept(
                "output before the exchange", out * (run.kernels.attention == "fused"), "core_attn"
            )
        )
        exchanged = 2 * size(run.tokens * (queries + values), width) + context * out
    backward = size(run.tokens * (2 * queries + 2 * values), width)
    return Core(tuple(kept), out + exchanged, backward + exchanged)


def _unfused_core(run: Run) -> Core:
    """Probabilities and dropout as tensors of their own.

    Forward, the product of query and key is there beside its softmax. Backward, one gradient of
    the scores is there, two where it passes a dropout: the fused softmax overwrites it. Without
    the fused softmax the scores and their gradients pass through fp32.
    """
    elements, width = scores(run), run.precision.parameter
    product = size(elements, width)
    dropout = run.kernels.attention_dropout > 0
    backward = 2 * product if dropout else product
    kept = []
    if run.kernels.fused_softmax and width < FP32:
        kept.append(Kept("attention probabilities", product, "core_attn"))
        forward = 0 if dropout else product
    else:
        wide = size(elements, FP32)
        kept.append(Kept("attention probabilities in fp32", wide, "core_attn"))
        if not dropout and width < FP32:
            kept.append(Kept("attention probabilities", product, "core_attn"))
        forward, backward = wide, backward + (2 * wide if width < FP32 else 0)
    if dropout:
        kept.append(Kept("attention dropout mask", size(elements, MASK), "core_attn"))
        kept.append(Kept("probabilities after dropout", product, "core_attn"))
    return Core(tuple(kept), forward, backward)


def linear_attention(run: Run, quantized: bool) -> BlockMemory:
    """A gated delta rule: projections, a short convolution, and a recurrence over chunks. In
    deterministic runs the recurrence is plain torch, which keeps every step within a chunk."""
    shape, width, tokens, delta = run.shape, run.precision.parameter, run.tokens, run.shape.delta
    assert delta is not None
    tensor = run.parallel.tensor
    keys = delta.key_heads * delta.key_dim // tensor
    values = delta.value_heads * delta.value_dim // tensor
    heads = delta.value_heads // tensor
    residual = size(run.sequence_tokens * shape.hidden, width)
    kept = [
        *norm_kept(run, run.sequence_tokens, shape.hidden, quantized, "input norm"),
        Kept("projection", size(tokens * (2 * keys + 2 * values), width)),
        Kept("after the convolution", size(tokens * (2 * keys + values), width)),
        Kept("normalized query and key", size(tokens * 2 * heads * delta.key_dim, width)),
        Kept("output, its norm and gate", size(tokens * 3 * values, width)),
        *hidden_dropout(run, run.sequence_tokens),
    ]
    if run.kernels.deterministic:
        steps = DELTA_CHUNK * DELTA_CHUNK // 3 + DELTA_SQUARES * DELTA_CHUNK
        wide = DELTA_VECTORS * max(delta.key_dim, delta.value_dim)
        kept.append(Kept("steps of the recurrence", size(tokens * heads * (steps + wide), FP32)))
    extra = size(tokens * (4 * keys + 4 * values), width)
    return BlockMemory("linear_attention", residual, tuple(kept), extra, 2 * residual + extra)
