"""What the card gives at best, operator by operator: the raw table that prices are fitted to.

A row is a class of operators in one dtype, with entries (``gpu/entries.py``). The shape of a
product is [M, N, K]: rows and columns of the result, and what is summed over. What memory and
launches bound is in ``gpu/traffic.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import traffic
from gpu.entries import BF16, FLOAT8, FP16, FP32, Case, Draw, Operands, measured
from gpu.rows import Row, Setting

# Matrices of a block: outputs, inputs.
LLAMA = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
WIDE = ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672))
HEAD = (128256, 4096)
DTYPES = {"bfloat16": BF16, "float16": FP16, "tf32": FP32, "float32": FP32}
Matrices = tuple[tuple[int, int], ...]
Product = tuple[str, int, int, int]  # how it is asked for, M, N, K
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": functional.linear,  # [M, K] and [N, K]: a layer's forward
    "input gradient": torch.mm,  # [M, K] and [K, N]
    "weight gradient": lambda a, b: torch.mm(a.t(), b),  # [K, M] and [K, N]
}
Cases = Callable[[Draw], Iterable[Case]]
Within = Callable[[], AbstractContextManager[object]]


def rows(setting: Setting) -> list[Row]:
    """All classes, those of most worth first."""

    def row(name: str, seconds: float, cases: Cases, within: Within = nullcontext) -> Row:
        kind = "products" if name.startswith("products") else name

        def run() -> dict[str, Any]:
            with within():
                return measured(setting, kind, cases(Draw(setting)), seconds)

        return Row(name, run, seconds)

    def product(dtype: str, shapes: Iterable[Product]) -> Cases:
        return lambda draw: products(draw, dtype, shapes)

    flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    cudnn = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    return [
        row("products bfloat16 llama", 5, product("bfloat16", [*of_block(LLAMA), *of_head()])),
        row("attention flash", 4, lambda draw: attention(draw, (4096, 8192, 1024)), flash),
        row("copies", 2, traffic.copies),
        row("products bfloat16 square", 2, product("bfloat16", squares())),
        row("products bfloat16 thin", 2, product("bfloat16", thin())),
        row("launches", 1, traffic.launches),
        row("norms", 2, traffic.norms),
        row("elementwise", 2, traffic.elementwise),
        row("cross entropy", 2, traffic.cross_entropies),
        row("lookups", 2, traffic.lookups),
        row("row updates", 2, traffic.row_updates),
        row("host copies", 4, traffic.host_copies),
        row("optimizers", 6, traffic.optimizers),  # the first step imports half of torch
        row("products float8", 2, float8),
        row("products bfloat16 wide", 3, product("bfloat16", of_block(WIDE))),
        row("products tf32", 2, product("tf32", some()), partial(precision, "tf32")),
        row("products float32", 2, product("float32", some()), partial(precision, "ieee")),
        row("products float16", 2, product("float16", some())),
        row("attention as torch chooses", 1, lambda draw: attention(draw, (4096,), chosen=True)),
        row("softmax", 1, traffic.softmaxes),
        row("attention cudnn", 5, lambda draw: attention(draw, (4096, 8192), only=True), cudnn),
        row("products bfloat16 sustained", 3, sustained),
        row("graph", 1, traffic.graphs),  # the last, for a capture that fails may spoil the process
    ]


@contextmanager
def precision(wanted: str) -> Iterator[None]:
    """What fp32 products of CUDA are computed in: "tf32" or "ieee". Torch has two ways to say so,
    and refuses to read one after the other was written: one alone is used here."""
    of, name, asked = torch.backends.cuda.matmul, "fp32_precision", wanted
    if not hasattr(of, name):
        name, asked = "allow_tf32", wanted == "tf32"
    before = getattr(of, name)
    setattr(of, name, asked)
    try:
        yield
    finally:
        setattr(of, name, before)


def products(draw: Draw, dtype: str, shapes: Iterable[Product]) -> Iterator[Case]:
    """Products of matrices in a row's dtype."""
    own = DTYPES[dtype]
    for op, *sizes in shapes:
        m, n, k = map(draw.size, sizes)
        first = (k, m) if op == "weight gradient" else (m, k)
        second = (n, k) if op == "linear" else (k, n)

        def make(first: Iterable[int] = first, second: Iterable[int] = second) -> Operands:
            return draw.normal(*first, dtype=own), draw.normal(*second, dtype=own)

        nbytes = (m * k + n * k + m * n) * own.itemsize
        yield Case(op, dtype, (m, n, k), make, PRODUCTS[op], nbytes, 2 * m * n * k)


def of_block(matrices: Matrices) -> Iterator[Product]:
    """Forward of a block's matrices by tokens, and gradients of 8,192."""
    for tokens in (8192, 4096, 16384) if matrices is LLAMA else (8192, 4096):
        yield from (("linear", tokens, n, k) for n, k in matrices)
    for n, k in matrices:
        yield "input gradient", 8192, k, n
        yield "weight gradient", n, k, 8192


def of_head() -> Iterator[Product]:
    """The vocabulary's."""
    n, k = HEAD
    yield "linear", 4096, n, k
    yield "input gradient", 4096, k, n
    yield "weight gradient", n, k, 4096


def squares() -> Iterator[Product]:
    """From what a launch takes to what takes a long time."""
    for size in (4096, 8192, 2048, 1024, 512, 256, 16384):
        yield "linear", size, size, size


def thin() -> Iterator[Product]:
    """Few rows: the weights' bytes are all."""
    for tokens in (1, 16, 64, 256):
        yield from (("linear", tokens, n, k) for n, k in (LLAMA[0], LLAMA[2]))


def some() -> Iterator[Product]:
    """Enough to see the rates of a dtype."""
    for tokens in (4096, 64):
        yield from (("linear", tokens, n, k) for n, k in LLAMA)
    yield from (("linear", size, size, size) for size in (8192, 1024))
    yield "input gradient", 4096, 4096, 14336
    yield "weight gradient", 14336, 4096, 4096


def float8(draw: Draw) -> Iterator[Case]:
    """Rows by columns, the one layout there is, with a scale of each operand and bf16 results."""
    shapes = [sizes for op, *sizes in some() if op == "linear"]
    for fast, sizes in itertools.product((True, False), shapes):
        m, n, k = map(draw.size, sizes)

        def make(m: int = m, n: int = n, k: int = k) -> Operands:
            scales = (torch.rand((), device=draw.device) + 0.5 for _ in range(2))
            two = draw.normal(m, k, dtype=FLOAT8), draw.normal(n, k, dtype=FLOAT8)
            return (*two, *scales)

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            one: torch.Tensor,
            two: torch.Tensor,
            fast: bool = fast,
        ) -> torch.Tensor:
            return torch._scaled_mm(
                a, b.t(), scale_a=one, scale_b=two, out_dtype=BF16, use_fast_accum=fast
            )

        more = {"fast_accumulation": fast}
        nbytes = m * k + n * k + 2 * m * n
        flops = 2 * m * n * k
        yield Case("linear", "float8_e4m3fn", (m, n, k), make, run, nbytes, flops, True, more=more)


def sustained(draw: Draw) -> Iterator[Case]:
    """So long that the card comes to the clock that its power allows."""
    for case in products(draw, "bfloat16", [("linear", 8192, 8192, 8192)]):
        yield replace(case, seconds=0.4)


def attention(
    draw: Draw, lengths: Iterable[int], *, only: bool = False, chosen: bool = False
) -> Iterator[Case]:
    """Causal, in bf16, of 8,192 tokens and 32 heads, plain and with four heads a key; shapes are
    [batch, heads, length, dim] of queries. ``only`` on CUDA; with ``chosen`` entries say which
    implementation torch takes."""
    for length, dim, grouped in itertools.product(lengths, (128, 64), (False, True)):
        tokens, length = draw.size(8192), draw.size(length)
        batch, heads = tokens // length, 4 if draw.setting.small else 32
        kept = heads // 4 if grouped else heads
        sizes = [(batch, length, each, dim) for each in (heads, kept, kept, heads)]

        def make(sizes: Iterable[tuple[int, ...]] = sizes) -> Operands:
            *given, gradient = (draw.normal(*s, dtype=BF16).transpose(1, 2) for s in sizes)
            return (*(each.requires_grad_() for each in given), gradient)

        one = batch * heads * length * length * dim  # of a product's twice as much, half is masked
        head = batch * length * dim * BF16.itemsize
        more: dict[str, Any] = {"kv_heads": kept, "causal": True}
        if chosen:
            more["chosen"] = _chosen(*make())
        shape = (batch, heads, length, dim)
        for op, run, products_, parts in (
            ("forward", _attended, 2, 2 * heads + 2 * kept),
            ("forward and backward", _attended_back, 7, 6 * heads + 6 * kept),
        ):
            flops = products_ * one
            yield Case(op, "bfloat16", shape, make, run, parts * head, flops, only, more=more)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _sdpa(q, k, v)


def _attended_back(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(_sdpa(q, k, v), (q, k, v), gradient)


def _chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> str:
    try:
        grouped = q.shape[1] != k.shape[1]
        number = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
    except Exception as error:  # a private name, whose answer is worth less than the times
        return f"not known: {error}"
    return SDPBackend(number).name
