"""Operators that memory or launches bound: entries of ``gpu/ceilings.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gpu.entries import BF16, FLOAT8, FP32, MIB, Case, Draw, Operands, name_of

ROWS, ONE_EACH = 1_000_000, 26 * 2048  # of a table; ids of the study's batch
Tensor = torch.Tensor


def copies(draw: Draw) -> Iterator[Case]:
    """On the device."""
    for mib in (256, 1, 4, 16, 64, 2048):
        count = draw.size(mib * MIB)

        def two(count: int = count) -> Operands:
            return draw.bytes(count), draw.bytes(count)

        yield Case("copy", "uint8", (count,), two, lambda to, x: to.copy_(x), 2 * count)
    shape = (draw.size(8192), draw.size(8192))
    for dtype in (BF16, FP32):
        nbytes = 2 * shape[0] * shape[1] * dtype.itemsize
        make = partial(draw.all, shape, dtype)
        yield Case("transpose", name_of(dtype), shape, make, lambda x: x.t().contiguous(), nbytes)
        yield Case("fill", name_of(dtype), shape, make, lambda x: x.fill_(0.5), nbytes // 2)
    for count, numel in ((8, 2**24), (300, 4096)):
        many = (draw.few(count), draw.size(numel))
        nbytes = 2 * many[0] * many[1] * BF16.itemsize

        def lists(many: tuple[int, int] = many) -> Operands:
            return tuple(list(x.unbind()) for x in draw.all(many, BF16, BF16))

        yield Case("cat", "bfloat16", many, lists, lambda x, _: torch.cat(x), nbytes)
        yield Case("foreach_copy", "bfloat16", many, lists, torch._foreach_copy_, nbytes)


def host_copies(draw: Draw) -> Iterator[Case]:
    """Between device and host, whose memory is pinned or not, and the same again in every call."""
    for mib, pinned in itertools.product((64, 1, 256, 16, 4), (True, False)):
        count = draw.size(mib * MIB)

        def make(count: int = count, pinned: bool = pinned) -> Operands:
            host, device = (
                torch.empty(count, dtype=torch.uint8, pin_memory=pinned),
                draw.bytes(count),
            )
            return host.copy_(device), device

        more = {"pinned": pinned}
        for op, run in (
            ("to device", lambda host, device: device.copy_(host, non_blocking=True)),
            ("to host", lambda host, device: host.copy_(device, non_blocking=True)),
        ):
            yield Case(op, "uint8", (count,), make, run, count, on_cuda=True, turns=1, more=more)


def launches(draw: Draw) -> Iterator[Case]:
    """What an operator takes that has next to nothing to do."""

    def wait(x: Tensor, y: Tensor) -> None:
        x.add_(y)
        draw.setting.synchronize()

    tiny = partial(draw.all, (16,), FP32, FP32)
    yield Case("add", "float32", (16,), tiny, lambda x, y: x.add_(y))
    yield Case("add and wait", "float32", (16,), tiny, wait)
    yield Case("add and read", "float32", (16,), tiny, lambda x, y: x.add_(y)[0].item())
    square = partial(draw.all, (64, 64), BF16, BF16)
    yield Case("product", "bfloat16", (64, 64, 64), square, torch.mm)
    yield Case(
        "empty", "uint8", (MIB,), partial(draw.all, (1,), FP32), partial(_empty, draw.device)
    )


def _empty(device: str, _: Tensor) -> Tensor:
    return torch.empty(MIB, dtype=torch.uint8, device=device)


def graphs(draw: Draw) -> Iterator[Case]:
    """A hundred additions, captured once and replayed."""

    def captured() -> Operands:
        x, y = draw.all((16,), FP32, FP32)
        aside = torch.cuda.Stream()  # what is captured has to have run before, not where it waits
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                x.add_(y)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                x.add_(y)
        return graph, x, y  # it reads their memory

    more = {"kernels": 100}
    run = lambda graph, *_: graph.replay()  # noqa: E731
    yield Case("replay of add", "float32", (16,), captured, run, on_cuda=True, more=more)


def norms(draw: Draw) -> Iterator[Case]:
    """Of 8,192 rows of 4,096 and 8,192, weights without biases."""
    kinds = {"rms_norm": functional.rms_norm, "layer_norm": functional.layer_norm}
    for dtype, dim, (name, norm) in itertools.product((BF16, FP32), (4096, 8192), kinds.items()):
        shape = (draw.size(8192), draw.size(dim))
        own = shape[1:]

        def forward(x: Tensor, weight: Tensor, _: Tensor, norm: Any = norm) -> Tensor:
            with torch.no_grad():
                return norm(x, weight.shape, weight)

        def both(x: Tensor, weight: Tensor, gradient: Tensor, norm: Any = norm) -> object:
            return torch.autograd.grad(norm(x, weight.shape, weight), (x, weight), gradient)

        def make(shape: Any = shape, own: Any = own, dtype: Any = dtype) -> Operands:
            x, weight, gradient = (draw.normal(*s, dtype=dtype) for s in (shape, own, shape))
            return x.requires_grad_(), weight.requires_grad_(), gradient

        nbytes = shape[0] * shape[1] * dtype.itemsize
        yield Case(name, name_of(dtype), shape, make, forward, 2 * nbytes)
        yield Case(f"{name} and backward", name_of(dtype), shape, make, both, 5 * nbytes)


def softmaxes(draw: Draw) -> Iterator[Case]:
    """Over scores, and over a vocabulary."""
    for dtype, sizes in itertools.product((BF16, FP32), ((16384, 4096), (4096, 32000))):
        count, dim = map(draw.size, sizes)
        make = partial(draw.all, (count, dim), dtype, dtype)
        nbytes = count * dim * dtype.itemsize
        for op, run, passes in (
            ("softmax", lambda x, _: torch.softmax(x, -1), 2),
            ("softmax and backward", partial(_back, lambda x: torch.softmax(x, -1)), 5),
        ):
            yield Case(op, name_of(dtype), (count, dim), make, run, passes * nbytes)


def _back(run: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The gradients of what ``run`` takes; the last of ``given`` is that of its result."""
    *operands, gradient = given
    operands = [each.detach().requires_grad_() for each in operands]
    return torch.autograd.grad(run(*operands), operands, gradient)


def _silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return functional.silu(a) * b


def elementwise(draw: Draw) -> Iterator[Case]:
    """Of a block's activations; bytes are by what each of their operators moves."""
    ops: tuple[tuple[str, torch.dtype, int, Callable[..., object], int], ...] = (
        ("silu_mul", BF16, 2, _silu_mul, 10),
        ("silu_mul and backward", BF16, 3, partial(_back, _silu_mul), 28),
        ("add", BF16, 2, torch.add, 6),
        ("add", FP32, 2, torch.add, 12),
        ("cast to bfloat16", FP32, 1, lambda a: a.to(BF16), 6),
        ("cast to float32", BF16, 1, lambda a: a.to(FP32), 6),
        ("cast to float8_e4m3fn", BF16, 1, lambda a: a.to(FLOAT8), 3),
        ("largest", BF16, 1, lambda a: a.abs().max(), 6),
    )
    for sizes in ((8192, 14336), (8192, 4096), (64, 4096)):
        shape = tuple(map(draw.size, sizes))
        for op, dtype, given, run, width in ops:
            make = partial(draw.all, shape, *[dtype] * given)
            yield Case(op, name_of(dtype), shape, make, run, width * shape[0] * shape[1])


def cross_entropies(draw: Draw) -> Iterator[Case]:
    """The mean over 4,096 tokens, and the gradient of their logits."""
    for vocab, dtype in itertools.product((128256, 32000), (FP32, BF16)):
        count, vocab = draw.size(4096), draw.size(vocab)

        def make(count: int = count, vocab: int = vocab, dtype: Any = dtype) -> Operands:
            logits = draw.normal(count, vocab, dtype=dtype).requires_grad_()
            return logits, draw.ids(count, vocab)

        def run(logits: Tensor, targets: Tensor) -> object:
            return torch.autograd.grad(functional.cross_entropy(logits, targets), logits)

        # logarithms read and write them, so do their gradients, which read those of the loss, too
        nbytes = 6 * count * vocab * dtype.itemsize
        op = "cross_entropy and backward"
        yield Case(op, name_of(dtype), (count, vocab), make, run, nbytes, turns=1)


def optimizers(draw: Draw) -> Iterator[Case]:
    """Steps of fp32 parameters: one that is large, and 300 of 4,096 numbers."""
    for name, how, (count, numel) in itertools.product(
        ("AdamW", "SGD"), ("fused", "foreach"), ((1, 2**26), (300, 4096))
    ):
        shape = (draw.few(count), draw.size(numel))

        def make(shape: tuple[int, int] = shape, name: str = name, how: str = how) -> Operands:
            own = [x.clone().requires_grad_() for x in draw.normal(*shape)]
            for each, gradient in zip(own, draw.normal(*shape), strict=True):
                each.grad = gradient.clone()
            return (getattr(torch.optim, name)(own, lr=1e-4, **{how: True}),)

        nbytes = (28 if name == "AdamW" else 12) * shape[0] * shape[1]
        op = f"{name} {how}"
        yield Case(op, "float32", shape, make, lambda own: own.step(), nbytes, turns=1)


def _tables(draw: Draw) -> Iterator[tuple[Tensor, int]]:
    """Tables, and how many of their rows are asked for."""
    for dim in (16, 128):
        table = draw.normal(draw.size(ROWS), dim)
        yield from ((table, draw.size(asked)) for asked in (ONE_EACH, 2**19))


def lookups(draw: Draw) -> Iterator[Case]:
    """Rows by uniform ids, which are others in every turn; shapes are rows, columns, ids."""
    for table, asked in _tables(draw):
        count, dim = table.shape
        for op, of_bag in (
            ("index_select", 0),
            ("embedding", 0),
            ("embedding_bag", 1),
            ("embedding_bag of 16", 16),
        ):
            bags = asked // (of_bag or 1)

            def make(count: int = count, bags: int = bags, of: int = of_bag) -> Operands:
                ids = draw.ids(bags * (of or 1), count)
                return ids, torch.arange(bags, device=draw.device) * of

            run = partial(_looked, op.split()[0], table)
            nbytes = bags * (of_bag or 1) * (dim * 4 + 8) + bags * (dim * 4 + (8 if of_bag else 0))
            yield Case(op, "float32", (count, dim, asked), make, run, nbytes, turns=8)


def _looked(op: str, table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    if op == "index_select":
        return table.index_select(0, ids)
    if op == "embedding":
        return functional.embedding(ids, table)
    return functional.embedding_bag(ids, table, offsets, mode="sum")


def row_updates(draw: Draw) -> Iterator[Case]:
    """Rows changed by uniform ids, some of which repeat; shapes are rows, columns, ids."""
    updates: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
        "index_add": lambda table, ids, change: table.index_add_(0, ids, change),
        "scatter_add": lambda table, ids, change: table.scatter_add_(
            0, ids.unsqueeze(1).expand_as(change), change
        ),
        "embedding_bag and sparse backward": _sparse,
    }
    for table, asked in _tables(draw):
        count, dim = table.shape

        def make(count: int = count, dim: int = dim, asked: int = asked) -> Operands:
            return draw.ids(asked, count), draw.normal(asked, dim)

        for op, update in updates.items():
            # three of rows: of the sparse one a lookup's two, and the gradient's copy
            width = 3 * dim * 4 + 8 if op != "embedding_bag and sparse backward" else None
            nbytes = None if width is None else asked * width
            run = partial(update, table)
            yield Case(op, "float32", (count, dim, asked), make, run, nbytes, turns=8)


def _sparse(table: Tensor, ids: Tensor, gradient: Tensor) -> object:
    own = table.detach().requires_grad_()
    offsets = torch.arange(len(ids), device=ids.device)
    found = functional.embedding_bag(ids, own, offsets, mode="sum", sparse=True)
    return torch.autograd.grad(found, own, gradient)
