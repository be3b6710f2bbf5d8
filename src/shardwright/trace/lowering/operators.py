"""Which operators do the same on both devices, and which nobody has looked at."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.trace.lowering.workspaces import RULES

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


def _plain(operator: torch._ops.OpOverload) -> bool:
    return operator.is_view or torch.Tag.pointwise in operator.tags


def _overloads(rest: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, rest, None)
    return [getattr(packet, name) for name in packet.overloads()] if packet else []
