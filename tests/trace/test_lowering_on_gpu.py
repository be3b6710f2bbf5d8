"""The lowering against a GPU, where there is one; what a forward keeps against a CPU, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.models.llama import LlamaBlock
from shardwright.trace.lowering import lowering
from shardwright.trace.recorder import Recorder

SHAPE = LlamaShape(layers=1, dim=1024, heads=8, kv_heads=2, head_dim=128, ffn_dim=2816, vocab=32000)
SEQUENCE = 4096
SMALL = 2**16  # bytes: rounding, and what a kernel keeps of its random state
MIB = 2**20
BF16, FP32 = torch.bfloat16, torch.float32
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def made(device: str | None) -> tuple[LlamaBlock, tuple[torch.Tensor, ...]]:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    angles = torch.zeros(SEQUENCE, SHAPE.head_dim // 2, **options)
    x = torch.zeros(1, SEQUENCE, SHAPE.dim, requires_grad=True, **options)
    return LlamaBlock(SHAPE, LocalShape(), 0, **options), (x, angles, angles.clone())


@pytest.mark.gpu
def test_a_block_saves_on_the_gpu_what_the_lowering_says(saved: Any) -> None:
    with FakeTensorMode(), lowering("cuda"):
        block, inputs = made(None)
        modelled = saved(partial(block, *inputs), tuple(block.parameters()))
    block, inputs = made("cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measured = saved(partial(block, *inputs), tuple(block.parameters()))
    assert abs(measured - modelled) < SMALL


@pytest.mark.gpu
def test_a_step_takes_on_the_gpu_what_the_lowering_says() -> None:
    modelled = _peak_of_trace(lambda: made(None))
    block, inputs = made("cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measured = _peak_of_step(block, inputs)
    assert measured == pytest.approx(modelled, rel=0.02)


# ---- rule by rule --------------------------------------------------------------------------------

Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]  # and what it is given
Make = Callable[[str, int], Call]  # on a device, 1/n as large


def _leaf(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)


def _attention(device: str, n: int, heads: int = 4, width: int = 64, **options: Any) -> Call:
    dtype, masked = options.pop("dtype", BF16), options.pop("masked", False)
    batch, length = -(-8 // n), 512 // n  # of fewer blocks flash sums parts of the keys apart
    query, key, value = (
        _leaf(device, batch, length, each, width, dtype=dtype) for each in (4, heads, heads)
    )
    if heads != 4:
        options["enable_gqa"] = True
    if masked:
        options["attn_mask"] = torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def attend(*parts: Tensor) -> Tensor:  # laid out as projections leave them, or kernels copy
        return functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in parts), **options
        )

    return attend, (query, key, value)


def _module(module: Callable[..., nn.Module], *shape: int, dtype: torch.dtype = BF16) -> Make:
    def make(device: str, n: int) -> Call:
        leaf = _leaf(device, shape[0] // n, *shape[1:], dtype=dtype)
        return module(device=device, dtype=dtype), (leaf,)

    return make


def _function(function: Callable[[Tensor], Tensor], *shape: int) -> Make:
    return lambda device, n: (function, (_leaf(device, shape[0] // n, *shape[1:]),))


def _embedding(device: str, n: int, ids: int = 2**15) -> Call:
    words = nn.Embedding(4096, 256, device=device, dtype=BF16)
    return words, (torch.arange(ids // n, device=device) % 4096,)


def _cross_entropy(device: str, n: int) -> Call:
    words = torch.zeros(2048 // n, dtype=torch.int64, device=device)
    logits = _leaf(device, 2048 // n, 1000, dtype=FP32)
    return partial(functional.cross_entropy, target=words), (logits,)


def _loss(function: Callable[..., Tensor]) -> Make:
    def make(device: str, n: int) -> Call:
        other = torch.zeros(2**18 // n, device=device)
        return partial(function, target=other), (_leaf(device, 2**18 // n, dtype=FP32),)

    return make


def _indexing(device: str, n: int) -> Call:
    places = torch.arange(2**15 // n, device=device) % 1024
    return lambda x: x[places], (_leaf(device, 1024, 64, dtype=FP32),)


RULES: dict[str, tuple[str, Make]] = {  # the attention that is tried first
    "flash": ("flash", partial(_attention, is_causal=True)),
    "flash, grouped heads": ("flash", partial(_attention, heads=2, is_causal=True)),
    "flash, odd head size": ("flash", partial(_attention, width=60)),
    "cudnn": ("cudnn", partial(_attention, is_causal=True)),
    "efficient": ("efficient", _attention),
    "efficient, mask": ("efficient", partial(_attention, masked=True)),
    "efficient, fp32": ("efficient", partial(_attention, dtype=FP32, is_causal=True)),
    "math": ("math", _attention),
    "rms norm": ("flash", _module(partial(nn.RMSNorm, 512), 4096, 512)),
    "rms norm, fp32": ("flash", _module(partial(nn.RMSNorm, 512), 4096, 512, dtype=FP32)),
    "rms norm, many rows": ("flash", _module(partial(nn.RMSNorm, 64), 2**17, 64)),
    "layer norm": ("flash", _module(partial(nn.LayerNorm, 512), 4096, 512)),
    "layer norm, fp32": ("flash", _module(partial(nn.LayerNorm, 512), 4096, 512, dtype=FP32)),
    "layer norm, many rows": ("flash", _module(partial(nn.LayerNorm, 64), 2**17, 64)),
    "group norm": ("flash", _module(partial(nn.GroupNorm, 8, 64), 16, 64, 32, 32, dtype=FP32)),
    "batch norm": ("flash", _module(partial(nn.BatchNorm2d, 64), 16, 64, 32, 32, dtype=FP32)),
    "convolution": (
        "flash",
        _module(partial(nn.Conv2d, 16, 32, 3, padding=1), 16, 16, 32, 32, dtype=FP32),
    ),
    "linear": ("flash", _module(partial(nn.Linear, 512, 1024, bias=False), 4096, 512)),
    "dropout": ("flash", _function(partial(functional.dropout, p=0.1), 4096, 512)),
    "gelu": ("flash", _function(functional.gelu, 4096, 512)),
    "silu": ("flash", _function(functional.silu, 4096, 512)),
    "relu": ("flash", _function(functional.relu, 4096, 512)),
    "softmax": ("flash", _function(partial(functional.softmax, dim=-1), 4096, 512)),
    "cross entropy": ("flash", _cross_entropy),
    "binary cross entropy": ("flash", _loss(functional.binary_cross_entropy_with_logits)),
    "mean squared error": ("flash", _loss(functional.mse_loss)),
    "embedding": ("flash", _embedding),
    "embedding, few ids": ("flash", partial(_embedding, ids=2048)),
    "indexing": ("flash", _indexing),
}


NOT_TO_THE_BYTE = {"flash, odd head size"}  # the slice's gradient is copied, for it lies otherwise


def _kernel(wanted: str, device: str) -> AbstractContextManager[None]:
    attention = device == "cuda" and wanted in KERNELS
    return sdpa_kernel(KERNELS[wanted]) if attention else nullcontext()


def _trained(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*function.parameters(), *inputs) if isinstance(function, nn.Module) else inputs


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("rule", RULES)
def test_a_forward_keeps_what_the_lowering_says(saved: Any, rule: str, device: str) -> None:
    (attention, make), n = RULES[rule], 16 if device == "cpu" else 1
    with FakeTensorMode(), lowering(device, attention=attention):
        function, inputs = make("cpu", n)
        modelled = saved(partial(function, *inputs), _trained(function, inputs))
    function, inputs = make(device, n)
    with _kernel(attention, device):
        measured = saved(partial(function, *inputs), _trained(function, inputs))
    assert abs(measured - modelled) <= max(1024, 0.01 * modelled), (measured, modelled)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in NOT_TO_THE_BYTE])
def test_forward_and_backward_take_on_the_gpu_what_the_lowering_says(rule: str) -> None:
    attention, make = RULES[rule]
    modelled = _peak_of_trace(lambda: make("cpu", 1), attention)
    with _kernel(attention, "cuda"):
        measured = _peak_of_step(*make("cuda", 1))
    assert abs(measured - modelled) <= max(MIB, 0.05 * modelled), (measured, modelled)


def _passes(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Forward and backward, with a gradient in memory: kernels copy the one of a sum, which has
    none."""
    result = function(*inputs)
    result.backward(torch.zeros_like(result))


def _peak_of_trace(make: Callable[[], Any], attention: str = "flash") -> int:
    """The most bytes of a forward and backward over what is there before."""
    recorder = Recorder()
    with FakeTensorMode(), recorder, lowering("cuda", attention=attention):
        function, inputs = make()
        recorder.mark("", "begin")
        begin = len(recorder.touches)
        _passes(function, inputs)
    recorder.storages.release()
    live, kept = 0, []
    for touch in recorder.touches:
        live += touch.nbytes * {"take": 1, "free": -1}.get(touch.what, 0)
        kept.append(live)
    return max(kept[begin:]) - (kept[begin - 1] if begin else 0)


def _peak_of_step(function: Any, inputs: tuple[Tensor, ...]) -> int:
    """The same as the allocator says; a first step takes the workspaces of products, which stay."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _passes(function, inputs)
        measured = torch.cuda.max_memory_allocated() - before
        for tensor in _trained(function, inputs):
            tensor.grad = None
    return measured
