"""What an operator computes and moves: FLOPs of products, bytes of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwright.core.document import decode_json
from shardwright.core.work import AttentionCalls, OperatorShapes, Product, Sent, Work
from shardwright.tracker.private import key_of, schema_of
from shardwright.tracker.tensors import NAMES

aten = torch.ops.aten
Counted = tuple[Work, OperatorShapes]
NO_OPERATORS = OperatorShapes()
NOTHING = Work()
# Operators that touch no element: they make, alias or describe memory.
_FREE = frozenset(
    packet
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
    if (packet := getattr(aten, name, None)) is not None
) | {aten.lift_fresh, aten._local_scalar_dense}


def work_of(function: Any, arguments: Any, keywords: Any, result: Any) -> Counted:
    """The work of one call of an operator as it was dispatched, and its shape if that counts."""
    packet = function.overloadpacket
    if function.namespace == "prim" or packet in _FREE or _is_view(function, arguments, result):
        return NOTHING, NO_OPERATORS
    if function.namespace == "shardwright" and packet.__name__ in _OF_OURS:
        given = _given(function, arguments, keywords)
        return _OF_OURS[packet.__name__](packet.__name__, given, result)
    attention = _ATTENTION.get(packet)
    if attention is not None:
        flops, query = attention(arguments), arguments[attention is _attention_backward]
        # Half of all pairs are masked, and not computed.
        unmasked = flops // 2 if _given(function, arguments, keywords)["is_causal"] else flops
        calls = AttentionCalls(_dtype(query), query.shape[-1], unmasked)
        return Work(1, flops), OperatorShapes(attention=(calls,))
    if packet in _GROUPED:
        return _grouped(*arguments[:2], result)
    counted = flop_registry.get(packet)
    if counted is not None:
        flops = int(counted(*arguments, **keywords, out_val=result))
        return Work(1, flops), OperatorShapes(_product(packet, arguments, flops))
    return Work(1, 0, _moved(packet, arguments, result)), NO_OPERATORS


# Operators that read a few rows or elements of their first tensor.
_READ_SOME = frozenset({aten.embedding, aten.gather, aten.nll_loss_forward})
_IGNORE_SECOND = frozenset({aten.nll_loss_backward})  # which asks it for its shape alone


def _moved(packet: Any, arguments: Any, result: Any) -> int:
    """Bytes that an operator reads and writes: all of what it takes and gives, but of a tensor in
    which it picks as much as it picks."""
    first, rest, back = (sum(_bytes(each)) for each in (arguments[:1], arguments[1:], result))
    if packet in _READ_SOME:
        return rest + back + min(first, back)
    ignored = sum(_bytes(arguments[1])) if packet in _IGNORE_SECOND else 0
    return first + rest + back - ignored


# Where the matrices of a product are among an operator's arguments, and a convolution's weight.
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._scaled_mm: 0}
_WEIGHTS = {aten.convolution: 1, aten._convolution: 1, aten.convolution_backward: 2}


def _product(packet: Any, arguments: Any, flops: int) -> tuple[Product, ...]:
    """A product by its shape; a convolution of so many ``flops`` as the products of what lies under
    its windows with its weight that they come to. None where no shape is known."""
    if packet in _WEIGHTS:
        weight = arguments[_WEIGHTS[packet]]
        n, k = weight.shape[0], weight.shape[1:].numel()
        # Backward one for the gradient of the input and one for the weight's, if they are wanted.
        calls = sum(arguments[-1][:2]) if packet is aten.convolution_backward else 1
        return (Product(_dtype(weight), flops // (2 * n * k * calls), n, k, calls),)
    first = _MATRICES.get(packet)
    if first is None:
        return ()
    one, other = arguments[first : first + 2]
    calls = one.shape[0] if one.dim() == 3 else 1
    return (Product(_dtype(one), one.shape[-2], other.shape[-1], one.shape[-1], calls),)


def _dtype(tensor: torch.Tensor) -> str:
    # Both formats of 8 bits go at one rate.
    return NAMES.get(tensor.dtype, "fp32").removesuffix("_e5m2")


def _given(function: Any, arguments: Any, keywords: Any) -> dict[str, Any]:
    """What an operator was called with, by name; what was left out as its schema has it."""
    named = {each.name: each.default_value for each in schema_of(function).arguments}
    return named | dict(zip(named, arguments, strict=False)) | keywords


# ---- stand-ins of a model of ours for what crosses ranks -----------------------------------------


def _sent(name: str, given: dict[str, Any], result: Any) -> Counted:
    """A collective: the larger of what is given and what comes back is a full buffer."""
    there, back = sum(_bytes(given["x"])), sum(_bytes(result))
    sent = Sent(name, given["group"], max(there, back))
    return Work(1, 0, there + back), OperatorShapes(sent=(sent,))


def _attended(name: str, given: dict[str, Any], result: Any) -> Counted:
    """Attention over a sequence that is divided among ranks, all steps of the ring at once."""
    query, width = given["query"], given["query"].shape[-1] + given["value"].shape[-1]
    # Queries by keys, and their weights by values.
    forward = 2 * query.shape[:-1].numel() * given["keys"] * width
    flops = int(forward * given["times"])
    return Work(1, 2 * flops), OperatorShapes(
        attention=(AttentionCalls(_dtype(query), query.shape[-1], flops),)
    )


@torch.library.custom_op("shardwright::computes", mutates_args=())
def _computes(like: torch.Tensor, work: str) -> None:
    """Stands for kernels that a compiler would generate, of which no operator is left."""


_computes.register_fake(lambda like, work: None)


def tell(like: torch.Tensor, work: Work, shapes: OperatorShapes = NO_OPERATORS) -> None:
    """Have it recorded that so much is computed here; ``like`` is any tensor that is there."""
    _computes(like, msgspec.json.encode((work, shapes)).decode())


def _told(name: str, given: dict[str, Any], result: Any) -> Counted:
    return decode_json(given["work"], Counted)


_OF_OURS = {
    "computes": _told,
    "all_gather": _sent,
    "all_gather_beside": lambda name, given, result: (Work(1), NO_OPERATORS),
    "reduce_scatter": _sent,
    "all_reduce": _sent,
    "all_to_all": _sent,
    "all_reduce_": lambda _, given, result: _sent("all_reduce", given, given["x"]),
    "attention": _attended,
}


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


def _grouped(one: torch.Tensor, other: torch.Tensor, result: torch.Tensor) -> Counted:
    """Of a matrix whose rows or columns are dealt to experts every one is used once; matrices of
    three dimensions on both sides are an expert's each."""
    experts = next(t.shape[0] for t in (one, other, result) if t.dim() == 3)
    m, k, n = one.shape[-2], one.shape[-1], other.shape[-1]
    flops = 2 * m * k * n * (experts if one.dim() == other.dim() == 3 else 1)
    # What is dealt is taken to be dealt evenly: rows, columns or, in the gradient of weights, what
    # both have in common.
    if one.dim() == 2 and other.dim() == 3:
        m = max(m // experts, 1)
    elif one.dim() == 3 and other.dim() == 2:
        n = max(n // experts, 1)
    elif other.dim() == 2:
        k = max(k // experts, 1)
    return Work(1, flops), OperatorShapes((Product(_dtype(one), m, n, k, experts),))


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
