"""Blocks on fake tensors: what a forward saves, and what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.models.llama import LlamaBlock
from shardwright.trace.recorder import Recorder

LARGE = LlamaShape(  # Llama 3 8B
    layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ffn_dim=14336, vocab=128256
)
SMALL = LlamaShape(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, ffn_dim=128, vocab=256)
Make = Callable[..., nn.Module]


@pytest.fixture
def saved() -> Callable[..., int]:
    """Bytes of the storages that a call saves for its backward, without those of ``but``."""

    def measure(run: Callable[[], Any], but: Sequence[Tensor] = ()) -> int:
        sizes: dict[int, int] = {}
        held: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()
        for tensor in but:
            sizes.pop(tensor.untyped_storage()._cdata, None)
        del result
        return sum(sizes.values())

    return measure


@pytest.fixture
def block() -> Make:
    """A bf16 block of Llama 3 8B, or a small one, with unset weights."""

    def make(small: bool = False, local: LocalShape | None = None, **options: Any) -> nn.Module:
        options.setdefault("dtype", torch.bfloat16)
        return LlamaBlock(SMALL if small else LARGE, local or LocalShape(), 0, **options)

    return make


@pytest.fixture
def stream() -> Callable[..., tuple[Tensor, ...]]:
    """The input of a block, and cosines and sines of its positions."""

    def make(sequence: int = 8192, batch: int = 1, small: bool = False) -> tuple[Tensor, ...]:
        shape, dtype = SMALL if small else LARGE, torch.bfloat16
        x = torch.empty(batch, sequence, shape.dim, dtype=dtype, requires_grad=True)
        angles = torch.empty(sequence, shape.head_dim // 2, dtype=dtype)
        return x, angles, torch.empty_like(angles)

    return make


@pytest.fixture
def step(block: Make, stream: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Blocks forward and backward under a treatment: bytes after the forward, bytes at the peak,
    and the operators."""

    def run(
        treat: Callable[[list[nn.Module]], Any],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        count: int = 2,
        local: LocalShape | None = None,
    ) -> tuple[int, int, set[str]]:
        recorder = Recorder()
        with FakeTensorMode(), recorder, around():
            blocks = [block(local=local) for _ in range(count)]
            x, cosine, sine = stream(8192 // (local.tensor if local else 1))
            if local:
                cosine, sine = stream()[1:]
            recorder.mark("", "begin")
            with treat(blocks):
                for each in blocks:
                    x = each(x, cosine, sine)
                after, _ = _totals(recorder)
                x.backward(torch.empty_like(x))
        _, peak = _totals(recorder)
        recorder.storages.release()
        return after, peak, recorder.operators

    return run


def _totals(recorder: Recorder) -> tuple[int, int]:
    """Bytes alive now, and at most."""
    live = most = 0
    for touch in recorder.touches:
        live += touch.nbytes * {"take": 1, "free": -1}.get(touch.what, 0)
        most = max(most, live)
    return live, most
