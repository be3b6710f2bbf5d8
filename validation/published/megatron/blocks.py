"""The blocks of a rank's chunks in the order they run, with what recomputation leaves of them."""

from __future__ import annotations

import msgspec

from published.megatron.attention import attention, linear_attention
from published.megatron.description import Run
from published.megatron.feedforward import mlp, moe
from published.megatron.head import embedding, head, prediction_input
from published.megatron.kept import BlockMemory
from published.megatron.layout import Block, Chunk
from published.megatron.mamba import mamba


def chunk_blocks(run: Run, chunk: Chunk) -> list[BlockMemory]:
    """The blocks of a chunk in the order they run, recomputation applied."""
    blocks = [embedding(run)] if chunk.embedding else []
    layers = [
        _layer(run, layer, _quantized(run, chunk.first + index))
        for index, layer in enumerate(chunk.layers)
    ]
    blocks += _recomputed(run, layers)
    for predictor in chunk.predictors:
        blocks.append(prediction_input(run))
        for layer in predictor:
            blocks += _layer(run, layer, not any(run.precision.plain_ends))
    if chunk.loss:
        blocks.append(head(run, len(chunk.predictors)))
    if run.kernels.overlap_experts and layers:
        last = blocks[-1]
        extra = sum(block.saved for block in layers[-1])
        blocks[-1] = msgspec.structs.replace(last, forward_extra=last.forward_extra + extra)
    return blocks


def _quantized(run: Run, layer: int) -> bool:
    """Whether a layer of the model is not among those at its ends that stay in bf16."""
    start, end = run.precision.plain_ends
    return start <= layer < len(run.shape.layers) - end


def _layer(run: Run, layer: tuple[Block, ...], quantized: bool) -> list[BlockMemory]:
    kinds = {
        "attention": attention,
        "mlp": mlp,
        "moe": moe,
        "mamba": mamba,
        "linear_attention": linear_attention,
    }
    return [kinds[block](run, quantized) for block in layer]


def _recomputed(run: Run, layers: list[list[BlockMemory]]) -> list[BlockMemory]:
    plan = run.recompute
    dropped = plan.modules | plan.offloaded
    if plan.granularity == "selective" or plan.offloaded:
        layers = [[_selective(block, dropped) for block in layer] for layer in layers]
    if plan.granularity != "full":
        return [block for layer in layers for block in layer]
    out: list[BlockMemory] = []
    again = layers if plan.method == "uniform" else layers[: plan.layers]
    step = max(1, plan.layers) if plan.method == "uniform" else 1
    for start in range(0, len(again), step):
        group = [block for layer in again[start : start + step] for block in layer]
        out.append(_checkpoint(run, group))
    return out + [block for layer in layers[len(again) :] for block in layer]


_MODULES = {
    "core_attn": ("core_attn",),
    "layernorm": ("layernorm",),
    "mla_up_proj": ("mla_up_proj",),
    "mlp": ("mlp",),
    "moe_act": ("moe_act",),
    "shared_experts": ("shared_experts",),
    "moe": ("expert_fc1", "moe_act", "shared_experts"),
    "expert_fc1": ("expert_fc1",),
    "attn_norm": ("layernorm",),
    "mlp_norm": ("layernorm",),
    "qkv_linear": ("qkv",),
    "attn_proj": ("attn_proj",),
}


def _selective(block: BlockMemory, names: frozenset[str]) -> BlockMemory:
    return block.without(module for name in names for module in _MODULES.get(name, ()))


def _checkpoint(run: Run, group: list[BlockMemory]) -> BlockMemory:
    """Several blocks of which only the first input stays."""
    entry = group[0].input
    if run.recompute.distribute:
        entry //= run.parallel.tensor
    inside = sum(block.saved for block in group) - group[0].input
    forward = max(block.saved - block.input + block.forward_extra for block in group)
    backward = inside + max(block.backward_extra for block in group)
    return BlockMemory("checkpoint", entry, (), forward, backward)
