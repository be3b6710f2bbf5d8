"""The parameters of a rank: every tensor of the modules that stand on it.

Sizes are those of Megatron-LM's modules (``megatron/core/models``, ``megatron/core/transformer``,
``megatron/core/ssm``, commit d98e8a64) after tensor and expert parallelism cut them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from published.megatron.description import Experts, Run, Shape
from published.megatron.layout import Block, Chunk


class Weight(msgspec.Struct, frozen=True):
    """Elements of one parameter on the rank. ``expert``: its gradient is reduced over the ranks
    that hold the same expert; ``quantized``: a matrix that fp8 recipes keep in fp8; ``lookup``: an
    embedding or output matrix, which Muon leaves to Adam."""

    name: str
    elements: int
    expert: bool = False
    matrix: bool = False
    quantized: bool = False
    lookup: bool = False


def rank_weights(run: Run) -> tuple[Weight, ...]:
    """Every parameter of the last rank of the pipeline."""
    layer = 0
    weights: list[Weight] = []
    for chunk in run.chunks:
        for blocks in chunk.layers:
            for block in blocks:
                weights += block_weights(run, block, f"layers.{layer}")
            layer += 1
        weights += _ends(run, chunk)
    return tuple(weights)


def _norm(shape: Shape, name: str, size: int) -> Weight:
    return Weight(name, size if shape.rms else 2 * size)


def _matrix(name: str, rows: int, columns: int, **kind: bool) -> Weight:
    return Weight(name, rows * columns, matrix=True, **kind)


def _ends(run: Run, chunk: Chunk) -> Iterator[Weight]:
    """Embedding, final norm, output layer and prediction layers of a chunk. A tied output layer
    on another stage than the embedding is a copy; prediction layers embed their tokens again."""
    shape, tensor = run.shape, run.parallel.tensor
    words = shape.vocab // tensor
    if chunk.embedding:
        yield _matrix("embedding.word_embeddings", words, shape.hidden, lookup=True)
        if shape.positions:
            yield _matrix(
                "embedding.position_embeddings", shape.positions, shape.hidden, lookup=True
            )
    if not chunk.loss:
        return
    yield _norm(shape, "decoder.final_layernorm", shape.hidden)
    apart = not any(other.embedding for other in run.chunks)
    if not shape.tied or apart:
        yield _matrix("output_layer", words, shape.hidden, lookup=True)
    if chunk.predictors and apart and not shape.tied:
        yield _matrix("embedding.word_embeddings", words, shape.hidden, lookup=True)
    depths = chunk.predictors[:1] if shape.repeated_predictor else chunk.predictors
    for depth, layers in enumerate(depths):
        yield from _predictor(run, layers, f"mtp.{depth}")


def _predictor(run: Run, layers: tuple[tuple[Block, ...], ...], name: str) -> Iterator[Weight]:
    shape = run.shape
    for norm in ("enorm", "hnorm", "final_layernorm"):
        yield _norm(shape, f"{name}.{norm}", shape.hidden)
    rows = shape.hidden // run.parallel.tensor
    yield _matrix(f"{name}.eh_proj", rows, 2 * shape.hidden, quantized=True)
    for index, blocks in enumerate(layers):
        for block in blocks:
            yield from block_weights(run, block, f"{name}.layers.{index}")


def block_weights(run: Run, block: Block, name: str) -> Iterator[Weight]:
    """The parameters of one block of a layer, its norm first."""
    yield _norm(run.shape, f"{name}.{block}.norm", run.shape.hidden)
    kinds = {
        "attention": _attention if run.shape.latent is None else _latent,
        "mlp": _mlp,
        "moe": _moe,
        "mamba": _mamba,
        "linear_attention": _linear_attention,
    }
    yield from kinds[block](run, f"{name}.{block}")


def _attention(run: Run, name: str) -> Iterator[Weight]:
    shape, tensor = run.shape, run.parallel.tensor
    queries = shape.heads * shape.head_dim // tensor
    keys = max(1, shape.kv_heads // tensor) * shape.head_dim
    columns = queries * (2 if shape.output_gate else 1) + 2 * keys
    yield _matrix(f"{name}.linear_qkv", columns, shape.hidden, quantized=True)
    if shape.bias or shape.qkv_bias:
        yield Weight(f"{name}.linear_qkv.bias", columns)
    yield _matrix(f"{name}.linear_proj", shape.hidden, queries, quantized=True)
    if shape.bias:
        yield Weight(f"{name}.linear_proj.bias", shape.hidden)
    if shape.qk_norm:
        yield _norm(shape, f"{name}.q_layernorm", shape.head_dim)
        yield _norm(shape, f"{name}.k_layernorm", shape.head_dim)


def _latent(run: Run, name: str) -> Iterator[Weight]:
    shape, tensor = run.shape, run.parallel.tensor
    latent = shape.latent
    assert latent is not None
    heads = shape.heads // tensor
    queries = heads * (latent.qk_dim + latent.position_dim)
    if latent.q_rank:
        yield _matrix(f"{name}.linear_q_down_proj", latent.q_rank, shape.hidden, quantized=True)
        yield _matrix(f"{name}.linear_q_up_proj", queries, latent.q_rank, quantized=True)
    else:
        yield _matrix(f"{name}.linear_q_proj", queries, shape.hidden, quantized=True)
    down = latent.kv_rank + latent.position_dim
    yield _matrix(f"{name}.linear_kv_down_proj", down, shape.hidden, quantized=True)
    rows = heads * (latent.qk_dim + latent.v_dim)
    yield _matrix(f"{name}.linear_kv_up_proj", rows, latent.kv_rank, quantized=True)
    yield _matrix(f"{name}.linear_proj", shape.hidden, heads * latent.v_dim, quantized=True)
    if shape.bias:
        yield Weight(f"{name}.linear_proj.bias", shape.hidden)
    if shape.qk_norm:
        yield _norm(shape, f"{name}.q_layernorm", latent.q_rank)
        yield _norm(shape, f"{name}.kv_layernorm", latent.kv_rank)
    yield from _indexer(run, name)


def _mlp(run: Run, name: str) -> Iterator[Weight]:
    shape = run.shape
    yield from _two_matrices(shape, name, shape.hidden, shape.ffn // run.parallel.tensor, False)


def _two_matrices(
    shape: Shape, name: str, hidden: int, width: int, expert: bool
) -> Iterator[Weight]:
    rows = width * (2 if shape.gated else 1)
    yield _matrix(f"{name}.linear_fc1", rows, hidden, expert=expert, quantized=True)
    yield _matrix(f"{name}.linear_fc2", hidden, width, expert=expert, quantized=True)
    if shape.bias:
        yield Weight(f"{name}.linear_fc1.bias", rows, expert=expert)
        yield Weight(f"{name}.linear_fc2.bias", hidden, expert=expert)


def _moe(run: Run, name: str) -> Iterator[Weight]:
    shape, parallel = run.shape, run.parallel
    experts = shape.experts
    assert experts is not None
    yield _matrix(f"{name}.router", experts.count, shape.hidden)
    hidden = experts.latent or shape.hidden
    if experts.latent:
        yield _matrix(f"{name}.fc1_latent_proj", experts.latent, shape.hidden, quantized=True)
        yield _matrix(f"{name}.fc2_latent_proj", shape.hidden, experts.latent, quantized=True)
    for index in range(local_experts(run, experts)):
        yield from _two_matrices(
            shape,
            f"{name}.experts.{index}",
            hidden,
            experts.width // parallel.expert_tensor,
            True,
        )
    if experts.shared_width:
        yield from _two_matrices(
            shape,
            f"{name}.shared_experts",
            shape.hidden,
            experts.shared_width // parallel.tensor,
            False,
        )


def local_experts(run: Run, experts: Experts) -> int:
    """Experts that stand on a rank."""
    return max(1, experts.count // run.parallel.expert)


def _mamba(run: Run, name: str) -> Iterator[Weight]:
    shape, tensor = run.shape, run.parallel.tensor
    mamba = shape.mamba
    assert mamba is not None
    inner = mamba.heads * mamba.head_dim // tensor
    groups = 2 * mamba.groups * mamba.state // tensor
    heads = mamba.heads // tensor
    rows = 2 * inner + groups + heads
    yield _matrix(f"{name}.in_proj", rows, shape.hidden, quantized=True)
    yield Weight(f"{name}.conv1d", (inner + groups) * (mamba.conv + 1))
    yield Weight(f"{name}.A_log, D, dt_bias", 3 * heads)
    yield Weight(f"{name}.norm.weight", inner)
    yield _matrix(f"{name}.out_proj", shape.hidden, inner, quantized=True)


def _linear_attention(run: Run, name: str) -> Iterator[Weight]:
    shape, tensor, delta = run.shape, run.parallel.tensor, run.shape.delta
    assert delta is not None
    keys = delta.key_heads * delta.key_dim // tensor
    values = delta.value_heads * delta.value_dim // tensor
    rows = 2 * keys + 2 * values + 2 * delta.value_heads // tensor
    yield _matrix(f"{name}.in_proj", rows, shape.hidden, quantized=True)
    yield Weight(f"{name}.conv1d", (2 * keys + values) * delta.conv)
    yield Weight(f"{name}.A_log, dt_bias", 2 * delta.value_heads // tensor)
    yield _norm(shape, f"{name}.out_norm", delta.value_dim)
    yield _matrix(f"{name}.out_proj", shape.hidden, values, quantized=True)


def _indexer(run: Run, name: str) -> Iterator[Weight]:
    """The indexer of a sparse attention stands whole on every tensor-parallel rank."""
    shape, indexer = run.shape, run.shape.indexer
    if indexer is None or shape.latent is None:
        return
    width = indexer.heads * indexer.head_dim
    yield _matrix(f"{name}.indexer.linear_wq_b", width, shape.latent.q_rank or shape.hidden)
    yield _matrix(f"{name}.indexer.linear_wk", indexer.head_dim, shape.hidden)
    yield _matrix(f"{name}.indexer.linear_weights_proj", indexer.heads, shape.hidden)
    yield Weight(f"{name}.indexer.k_norm", 2 * indexer.head_dim)
