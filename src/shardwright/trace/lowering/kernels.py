"""Which kernels a device runs where it has a choice, and the table of what CUDA's keep and take.

The table is for people: each row names what a replaced function does and where that is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shardwright.core.cluster import Device
from shardwright.core.errors import InputError
from shardwright.core.footprint import Certainty
from shardwright.job.memory import NormKernel
from shardwright.tracker.private import OpOverload, operator_name

Attention = Literal["flash", "cudnn", "efficient", "math", "eager"]
CrossEntropy = Literal["composite", "fused"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """``attention`` is what is tried first: torch takes the next of flash, efficient and math where
    it cannot be used; ``eager`` is none of torch's. ``rms_norm`` is composite before torch 2.9 and
    where a compiler takes it apart; ``cross_entropy`` is fused where the loss is Liger's."""

    device: Device = "cuda"
    attention: Attention = "flash"
    rms_norm: NormKernel = "fused"
    cross_entropy: CrossEntropy = "composite"


def kernels(
    device: str = "cuda",
    attention: str = "flash",
    rms_norm: str = "fused",
    cross_entropy: str = "composite",
) -> Kernels:
    """The kernels of a device by name; an unknown name is the user's error."""
    choices = (
        ("device", device, get_args(Device)),
        ("attention", attention, get_args(Attention)),
        ("rms_norm", rms_norm, get_args(NormKernel)),
        ("cross_entropy", cross_entropy, get_args(CrossEntropy)),
    )
    for name, value, names in choices:
        if value not in names:
            remedy = "Choose one of them." if name != "device" else "Use the nearest of them."
            raise InputError(f"lowering.{name}", " or ".join(names), f"'{value}'", remedy)
    return Kernels(device, attention, rms_norm, cross_entropy)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """``when`` is the condition on device and inputs; ``saved`` what stays for the backward,
    ``returned`` what is allocated for the result, ``forward`` and ``backward`` what a kernel takes
    and frees inside; ``source`` names files of pytorch/pytorch unless it says otherwise."""

    function: str
    when: str
    saved: str
    returned: str
    forward: str
    backward: str
    source: str
    certainty: Certainty = "modelled"


_SDP = "aten/src/ATen/native/transformers/cuda"
_FORMULAS = "tools/autograd/derivatives.yaml (2.13)"
KIB, MIB = 2**10, 2**20

CUBLAS_HOPPER = 32 * MIB  # aten/src/ATen/cuda/CublasHandlePool.cpp; newer: Blackwell as well
CUBLAS_OTHER = 2 * 4096 * KIB + 8 * 16 * KIB  # the same: ':4096:2:16:8'
CUBLAS_HANDLES = 2  # one for the thread of the forward, one for the backward's

ENTRIES: tuple[KernelEntry, ...] = (
    KernelEntry(
        "scaled_dot_product_attention",
        "attention=flash: fp16 or bf16, no mask, head size at most 256",
        "query, key, value (grouped heads as they are), result, log-sum-exp fp32"
        " [batch, heads, sequence], random state 24 B",
        "result, laid out as the query",
        "copies padded to a multiple of 8 where the head size is not one",
        "fp32 sum of the query's gradient, row statistic fp32; grouped heads: gradients of key and"
        " value for every query head",
        f"{_FORMULAS}; {_SDP}/flash_attn/flash_api.cpp mha_fwd, mha_bwd",
    ),
    KernelEntry(
        "scaled_dot_product_attention",
        "attention=cudnn: fp16 or bf16, head size at most 128; torch's first choice on Hopper and"
        " Blackwell with cuDNN above 9.15",
        "as flash, with the mask; random state 16 B",
        "result, laid out as the query",
        "none",
        "as flash (cuDNN asks for its workspace at run time)",
        f"{_FORMULAS}; {_SDP}/sdp_utils.cpp check_prefer_cudnn_attention",
        "assumed",
    ),
    KernelEntry(
        "scaled_dot_product_attention",
        "attention=efficient: a mask, or fp32; equal heads",
        "query, key, value, mask as an additive bias of its own size, result, log-sum-exp fp32"
        " rounded up to 32, random state 16 B",
        "result [batch, sequence, heads, width]",
        "a boolean mask made additive, its rows padded to 16",
        "fp32 sum of the query's gradient for half types, row products fp32",
        f"{_FORMULAS}; {_SDP}/attention_backward.cu; torch/_meta_registrations.py (2.13)",
        "assumed",
    ),
    KernelEntry(
        "scaled_dot_product_attention",
        "attention=math, or no other kernel takes the inputs",
        "scaled query and key, softmax [batch, heads, sequence, sequence] and what its dtype needs,"
        " value; grouped key and value repeated",
        "result",
        "mask, products and softmax in fp32 for half types",
        "those of its parts",
        "aten/src/ATen/native/transformers/attention.cpp (traced)",
    ),
    KernelEntry(
        "scaled_dot_product_attention",
        "attention=eager: operator by operator, softmax in fp32",
        "query, key, value, softmax in fp32 and in the dtype of values",
        "result",
        "those of its parts",
        "those of its parts",
        "huggingface/transformers eager_attention_forward (traced)",
        "assumed",
    ),
    KernelEntry(
        "rms_norm",
        "torch >= 2.9, weight in the input's dtype, not channels-last",
        "input, weight, 1/rms fp32 one a row (CPU: two fp32 copies of the input)",
        "result in the input's dtype",
        "none",
        "none; beyond 65,536 rows of under 2,112 elements partial sums of the weight's gradient",
        f"{_FORMULAS} _fused_rms_norm; aten/src/ATen/native/layer_norm.cpp rms_norm_symint;"
        " aten/src/ATen/native/cuda/layer_norm_kernel.cu",
    ),
    KernelEntry(
        "layer_norm",
        "fp16 and bf16",
        "input, weight, bias, mean and 1/deviation in fp32 (CPU: in the input's dtype)",
        "result",
        "none",
        "as rms_norm, for weight and bias",
        f"{_FORMULAS} native_layer_norm; aten/src/ATen/native/cuda/layer_norm_kernel.cu",
    ),
    KernelEntry(
        "dropout",
        "training, 0 < p < 1, not in place",
        "mask, 1 B an element (CPU: noise in the input's dtype)",
        "result",
        "none",
        "none",
        "aten/src/ATen/native/Dropout.cpp is_fused_kernel_acceptable; " + _FORMULAS,
    ),
    KernelEntry(
        "embedding",
        "backward of more than 3,072 indices",
        "indices",
        "result",
        "none",
        "sorted indices and their places; fp32 partial sums of indices/10 + min(indices, rows)",
        "aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu",
    ),
    KernelEntry(
        "index_put with accumulation",
        "backward of indexing",
        "indices",
        "result",
        "none",
        "five int64 lists of the indices' length",
        "aten/src/ATen/native/cuda/Indexing.cu",
        "assumed",
    ),
    KernelEntry(
        "cross_entropy",
        "cross_entropy=composite: log_softmax and nll_loss, as on the CPU",
        "log-softmax in the logits' dtype, targets",
        "loss",
        "none",
        "gradient of the log-softmax, then of the logits",
        _FORMULAS,
    ),
    KernelEntry(
        "cross_entropy",
        "cross_entropy=fused: rows of logits, class numbers, no weights",
        "the logits, which hold their gradient",
        "loss fp32",
        "none",
        "none",
        "linkedin/Liger-Kernel src/liger_kernel/ops/cross_entropy.py",
    ),
    KernelEntry(
        "matrix products",
        "any; taken once for a handle and stream, not in a trace",
        "-",
        "-",
        f"cuBLAS workspace {CUBLAS_HOPPER // MIB} MiB on Hopper, {CUBLAS_OTHER / MIB:.3f} MiB else",
        f"the same again: {CUBLAS_HANDLES} handles",
        "aten/src/ATen/cuda/CublasHandlePool.cpp parseChosenWorkspaceSize",
        "assumed",
    ),
)

HEADER = (
    "function",
    "when",
    "keeps",
    "takes inside (forward)",
    "(backward)",
    "source",
    "certainty",
)


def table() -> str:
    """The entries as a Markdown table."""
    rows = [
        (e.function, e.when, e.saved, e.forward, e.backward, e.source, e.certainty) for e in ENTRIES
    ]
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# What CUDA takes and frees inside one operator, which no dispatch mode sees: a rule gives the bytes
# of the buffers that are alive together at the operator's own peak. Sources are files of
# pytorch/pytorch as of 2026; a kernel's shared memory and registers are not memory here.
#
# Why a list of names that are equal: an operator that no rule names is either known to take
# nothing inside, or nobody has looked. The two must not be mixed up, so what is equal stands here
# by name, and an estimate lists the operators of a model that are in neither table among its
# assumptions.


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
    # the product of gradient and result, aten/src/ATen/native/cuda/SoftMax.cu
    "aten::_softmax_backward_data": lambda arguments: int(arguments[0].nbytes),
    "aten::embedding_dense_backward": embedding_backward,
    # of weight and bias
    "aten::native_layer_norm_backward": lambda arguments: 2 * norm_backward(arguments),
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
