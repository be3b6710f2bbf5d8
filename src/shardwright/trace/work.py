"""What an operator computes and moves: FLOPs of products, bytes of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from shardwright.core.recording import Work
from shardwright.tracker.private import key_of, schema_of

aten = torch.ops.aten
NOTHING = Work()
# Operators that touch no element: they make, alias or describe memory.
_FREE = frozenset(
    packet
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
    if (packet := getattr(aten, name, None)) is not None
) | {aten.lift_fresh, aten._local_scalar_dense}


def work_of(function: Any, arguments: Any, keywords: Any, result: Any) -> Work:
    """The work of one call of an operator, as it was dispatched."""
    packet = function.overloadpacket
    if function.namespace == "prim" or packet in _FREE or _is_view(function, arguments, result):
        return NOTHING
    attention = _ATTENTION.get(packet)
    if attention is not None:
        return Work(1, attention(arguments), 0)
    if packet in _GROUPED:
        return Work(1, _grouped(*arguments[:2]), 0)
    counted = flop_registry.get(packet)
    if counted is not None:
        return Work(1, int(counted(*arguments, **keywords, out_val=result)), 0)
    return Work(1, 0, sum(_bytes(arguments)) + sum(_bytes(result)))


def _is_view(function: Any, arguments: Any, result: Any) -> bool:
    """Whether an operator gives memory back that it was given, and changes none of it."""
    if function.is_view:
        return True
    if schema_of(function).is_mutable or not isinstance(result, torch.Tensor):
        return False
    own = key_of(result.untyped_storage())
    given = (a for a in arguments if isinstance(a, torch.Tensor))
    return any(key_of(tensor.untyped_storage()) == own for tensor in given)


# Products of experts, each with rows of its own, which torch's counter does not know.
_GROUPED = (aten._grouped_mm, aten._scaled_grouped_mm)


def _grouped(one: torch.Tensor, other: torch.Tensor) -> int:
    """Of a matrix whose rows or columns are dealt to experts every one is used once; matrices of
    three dimensions on both sides are an expert's each."""
    experts = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return 2 * experts * one.shape[-2] * one.shape[-1] * other.shape[-1]


def _attention(arguments: Any) -> int:
    query, key, value = (part.shape for part in arguments[:3])
    return int(sdpa_flop_count(query, *_of_every_head(query, key, value)))


def _attention_backward(arguments: Any) -> int:
    gradient, query, key, value = (part.shape for part in arguments[:4])
    return int(sdpa_backward_flop_count(gradient, query, *_of_every_head(query, key, value)))


def _of_every_head(query: torch.Size, *shapes: torch.Size) -> Iterator[tuple[int, ...]]:
    """Keys and values as every head of the queries sees them; groups of heads may share them."""
    return ((*shape[:1], *query[1:2], *shape[2:]) for shape in shapes)


# Torch's own counter knows none of a CPU's attention, and torch 2.11's no shared keys.
_ATTENTION = {
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _bytes(value: Any) -> Iterable[int]:
    if isinstance(value, torch.Tensor):
        yield value.numel() * value.element_size()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _bytes(item)
