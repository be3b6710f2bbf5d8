"""Which kernels a device runs where it has a choice, and the table of what CUDA's keep and take.

The table is for people: each row names what a replaced function does and where that is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.core.cluster import Device
from shardwright.core.errors import InputError
from shardwright.core.footprint import Certainty
from shardwright.job.memory import NormKernel

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
