"""The lowering against a GPU, where there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.models.llama import Block
from shardwright.trace.lowering import lowering
from shardwright.trace.recorder import Recorder

SHAPE = LlamaShape(layers=1, dim=1024, heads=8, kv_heads=2, head_dim=128, ffn_dim=2816, vocab=32000)
SEQUENCE = 4096
SMALL = 2**16  # bytes: rounding, and what a kernel keeps of its random state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def made(device: str | None) -> tuple[Block, tuple[torch.Tensor, ...]]:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    angles = torch.zeros(SEQUENCE, SHAPE.head_dim // 2, **options)
    x = torch.zeros(1, SEQUENCE, SHAPE.dim, requires_grad=True, **options)
    return Block(SHAPE, LocalShape(), 0, **options), (x, angles, angles.clone())


def test_a_block_saves_on_the_gpu_what_the_lowering_says(saved: Any) -> None:
    with FakeTensorMode(), lowering("cuda"):
        block, inputs = made(None)
        modelled = saved(partial(block, *inputs), tuple(block.parameters()))
    block, inputs = made("cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measured = saved(partial(block, *inputs), tuple(block.parameters()))
    assert abs(measured - modelled) < SMALL


def test_a_step_takes_on_the_gpu_what_the_lowering_says() -> None:
    recorder = Recorder()
    with FakeTensorMode(), recorder, lowering("cuda"):
        block, inputs = made(None)
        recorder.mark("", "begin")
        block(*inputs).sum().backward()
    recorder.storages.release()
    live = modelled = 0
    for touch in recorder.touches:
        live += touch.nbytes * {"take": 1, "free": -1}.get(touch.what, 0)
        modelled = max(modelled, live)
    block, inputs = made("cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(2):  # the first takes the workspaces of products, which stay
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            block(*inputs).sum().backward()
            measured = torch.cuda.max_memory_allocated() - before
            for tensor in (*block.parameters(), *inputs):
                tensor.grad = None
    assert measured == pytest.approx(modelled, rel=0.02)
