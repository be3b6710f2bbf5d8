"""Operators on both devices: what CUDA takes and frees inside one, and which nobody has looked at.

No dispatch mode sees what an operator takes inside. A rule gives the bytes of the buffers that are
alive together at the operator's own peak. Sources are files of pytorch/pytorch as of 2026; a
kernel's shared memory and registers are not memory here.
"""

# Why a list of names that are equal: an operator that no rule names is either known to take
# nothing inside, or nobody has looked. The two must not be mixed up, so what is equal stands here
# by name, and an estimate lists the operators of a model that are in neither table among its
# assumptions.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.tracker.private import OpOverload, operator_name

FLASH_ROWS = 128  # rows of a query are rounded up, .../cuda/flash_attn/flash_api.cpp, mha_bwd
FLASH_NARROW, FLASH_WIDE, FLASH_WIDE_ABOVE = 32, 64, 128  # head sizes are rounded up, same place
EMBEDDING_SMALL = 3072  # indices that need no sorting, aten/src/ATen/native/cuda/Embedding.cu
EMBEDDING_ROWS = 10  # NROWS_PER_THREAD, aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu
NORM_ROWS, NORM_ROWS_PER_BLOCK, NORM_COLUMNS = 64 * 1024, 32, 32  # layer_norm_kernel.cu
NORM_MAX_GRID = 64 * 1024 // 2  # the same
NORM_PROCESSORS = 132  # streaming multiprocessors of an H100 SXM
FLOAT, LONG = 4, 8  # bytes

Rule = Callable[[Sequence[Any]], int]


def workspace(function: OpOverload, arguments: Sequence[Any]) -> int:
    """Bytes that CUDA's kernel of an operator takes beyond its results, 0 where none is known."""
    rule = RULES.get(operator_name(function))
    return rule(arguments) if rule else 0


def flash_backward(arguments: Sequence[Any]) -> int:
    """The fp32 sum of the query's gradient, a row statistic, and with grouped heads the gradients
    of key and value of every query head."""
    query, key = arguments[1], arguments[2]
    batch, heads, rows, width = query.shape
    rows = _up(rows, FLASH_ROWS)
    wide = _up(width, FLASH_NARROW if width <= FLASH_WIDE_ABOVE else FLASH_WIDE)
    accumulated = batch * heads * rows * (wide + 1) * FLOAT
    if key.size(1) == heads:
        return int(accumulated)
    expanded = batch * heads * key.size(2) * width * key.element_size()
    return int(accumulated + 2 * expanded)


def efficient_backward(arguments: Sequence[Any]) -> int:
    """The fp32 sum of the query's gradient and the row products of result and gradient."""
    query = arguments[1]
    batch, heads, rows, width = query.shape
    sums = batch * heads * _up(rows, FLASH_ROWS) * _up(width, FLASH_NARROW) * FLOAT
    return int((sums if query.element_size() < FLOAT else 0) + batch * heads * rows * FLOAT)


def softmax_backward(arguments: Sequence[Any]) -> int:
    """The product of gradient and result, aten/src/ATen/native/cuda/SoftMax.cu."""
    return int(arguments[0].nbytes)


def embedding_backward(arguments: Sequence[Any]) -> int:
    """Sorted indices with where they came from, then a partial sum in fp32 for every ten rows and
    every distinct row; how many are distinct is not known before, so the kernel takes the most."""
    grad, indices, rows = arguments[0], arguments[1], int(arguments[2])
    count, width = indices.numel(), grad.size(-1)
    if count <= EMBEDDING_SMALL and not arguments[4]:
        return 0
    index = indices.element_size()
    segments = min(count, rows)
    partial = count // EMBEDDING_ROWS + segments
    kept = 2 * count * index
    sorting = 3 * count * index  # the places, and a second buffer of both for the radix sort
    summing = (count + 2 * segments + partial) * index + partial * width * max(
        grad.element_size(), FLOAT
    )
    return int(kept + max(sorting, summing))


def norm_backward(arguments: Sequence[Any]) -> int:
    """Partial sums of the weight's gradient, only for very many short rows."""
    x, shape = arguments[1], arguments[2]
    width = 1
    for size in shape:
        width *= size
    rows = x.numel() // max(width, 1)
    # The kernel splits rows over blocks, and needs partial sums, only where columns alone do not
    # keep the processors busy.
    if rows <= NORM_ROWS or width // NORM_COLUMNS >= NORM_PROCESSORS // 2:
        return 0
    across = -(-width // NORM_COLUMNS)
    blocks = min(NORM_MAX_GRID // across, -(-rows // NORM_ROWS_PER_BLOCK))
    return int(blocks * width * x.element_size())


def layer_norm_backward(arguments: Sequence[Any]) -> int:
    """As :func:`norm_backward`, for weight and bias."""
    return 2 * norm_backward(arguments)


def index_put(arguments: Sequence[Any]) -> int:
    """Adding into indexed places sorts them: linear places, sorted, where from, and the sort's own.
    Backward of indexing is such an addition."""
    accumulate = len(arguments) > 3 and bool(arguments[3])
    if not accumulate:
        return 0
    counts = [i.numel() for i in arguments[1] if isinstance(i, Tensor)]
    return 5 * max(counts, default=0) * LONG


RULES: dict[str, Rule] = {
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_softmax_backward_data": softmax_backward,
    "aten::embedding_dense_backward": embedding_backward,
    "aten::native_layer_norm_backward": layer_norm_backward,
    "shardwright::_fused_rms_norm_backward": norm_backward,
    "aten::index_put": index_put,
    "aten::index_put_": index_put,
    "aten::_index_put_impl_": index_put,
    "aten::_unsafe_index_put": index_put,
}


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


OWN = "shardwright"
COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")  # they allocate what they return
QUESTIONS = ("prim",)  # about a tensor; they allocate nothing
PRIMITIVES = ("prims",)  # what a compiler takes operators apart into

# One autograd formula for every device in tools/autograd/derivatives.yaml, and a kernel that takes
# nothing beyond its result. Views and what torch tags as pointwise need no mention.
_EQUAL = (
    "mm addmm bmm baddbmm addbmm mv addmv dot linear matmul _grouped_mm _scaled_mm sum mean amax",
    "amin max min prod var std norm linalg_vector_norm logsumexp any all count_nonzero",
    "sum_to_size cumsum cumsum_ _softmax _safe_softmax _softmax_backward_data _log_softmax",
    "_log_softmax_backward_data nll_loss_forward nll_loss_backward nll_loss2d_forward",
    "nll_loss2d_backward mse_loss mse_loss_backward binary_cross_entropy_with_logits embedding",
    "native_dropout native_dropout_backward native_layer_norm native_group_norm",
    "native_group_norm_backward gelu gelu_backward silu silu_backward cat stack clone copy copy_",
    "_to_copy contiguous lift_fresh lift_fresh_copy empty empty_like empty_strided empty_permuted",
    "new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full",
    "full_like new_full fill fill_ zero zero_ arange linspace scalar_tensor eye tril triu tril_",
    "triu_ tril_indices triu_indices bernoulli bernoulli_ normal_ uniform_ random_ randint rand",
    "randn randint_like rand_like randn_like exponential_ where gather scatter scatter_",
    "scatter_add scatter_add_ index index_select index_add index_add_ index_fill index_copy",
    "masked_fill masked_fill_ masked_scatter select_backward slice_backward select_scatter",
    "slice_scatter unfold_backward constant_pad_nd repeat repeat_interleave roll flip outer",
    "complex polar view_as_complex view_as_real _conj _neg_view resolve_conj resolve_neg",
    "_unsafe_view _reshape_copy _local_scalar_dense item equal is_same_size set_ resize_ topk",
    "sort argsort argmax argmin one_hot histc bincount searchsorted bucketize split_with_sizes",
    "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention pow _foreach_norm log_sigmoid_forward",
    "log_sigmoid_backward floor_divide",
)
EQUAL = frozenset(name for line in _EQUAL for name in line.split())

STAND_INS = {
    "shardwright::all_gather": "_c10d_functional::all_gather_into_tensor",
    "shardwright::reduce_scatter": "_c10d_functional::reduce_scatter_tensor",
    "shardwright::all_reduce": "_c10d_functional::all_reduce",
    "shardwright::all_reduce_": "_c10d_functional::all_reduce_",
    "shardwright::all_to_all": "_c10d_functional::all_to_all_single",
}


def aten_name(name: str) -> str:
    """The name of an operator as a policy knows it: what stands in for another answers to its
    name."""
    space, _, rest = name.partition("::")
    if space != OWN or rest == "workspace":
        return name
    return STAND_INS.get(name, f"aten::{rest}")


def unknown_operators(names: Iterable[str], device: str = "cuda") -> tuple[str, ...]:
    """Operators (``aten::mm``) that no table knows; what they keep on the device is assumed to be
    what they keep on the CPU, where nothing is unknown."""
    if device == "cpu":
        return ()
    return tuple(sorted(name for name in set(names) if not _known(name)))


def _known(name: str) -> bool:
    space, _, rest = name.partition("::")
    if space == OWN or space in (*COLLECTIVES, *QUESTIONS, *PRIMITIVES) or name in RULES:
        return True
    if space != "aten":
        return False
    if rest in EQUAL or rest.rstrip("_") in EQUAL or rest.startswith("_foreach_"):
        return True
    return any(_plain(overload) for overload in _overloads(rest))


def _plain(operator: OpOverload) -> bool:
    return operator.is_view or torch.Tag.pointwise in operator.tags


def _overloads(rest: str) -> list[OpOverload]:
    packet = getattr(torch.ops.aten, rest, None)
    return [getattr(packet, name) for name in packet.overloads()] if packet else []
