"""A rank's part of a llama allocates what the whole one does when DTensor divides it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import Live
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.models.llama import Llama, loss

SHAPE = LlamaShape(layers=1, dim=64, heads=8, kv_heads=4, head_dim=8, ffn_dim=192, vocab=256)
TENSOR, BATCH, LENGTH = 4, 2, 32
IDS = BATCH * LENGTH * 8  # DTensor keeps a masked copy of the tokens, of int64


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TENSOR)
    yield init_device_mesh("cpu", (TENSOR,))
    dist.destroy_process_group()


def _divided(mesh: DeviceMesh, sequence: bool) -> Llama:
    """The whole model as TorchTitan divides it."""
    model = Llama(SHAPE, sequence=LENGTH, dtype=torch.bfloat16)
    table = nn.Embedding(SHAPE.vocab, SHAPE.dim, dtype=torch.bfloat16)
    model.tok_embeddings = table  # type: ignore[assignment]
    part = Shard(1) if sequence else Replicate()
    outer: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "output": ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
    }
    inner: dict[str, Any] = {}
    for name in ("attention.wq", "attention.wk", "attention.wv"):
        inner[name] = ColwiseParallel()
    for name in ("feed_forward.w1", "feed_forward.w3"):
        inner[name] = ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        inner[name] = RowwiseParallel(output_layouts=part)
    if sequence:
        outer["norm"] = inner["attention_norm"] = inner["ffn_norm"] = SequenceParallel()
        for name, inputs in (("attention", 3), ("feed_forward", 1)):
            inner[name] = PrepareModuleInput(
                input_layouts=(part, None, None)[:inputs],
                desired_input_layouts=(Replicate(), None, None)[:inputs],
            )
    parallelize_module(model, mesh, outer)
    for block in model.layers.values():
        block.attention.heads //= TENSOR
        block.attention.kv_heads //= TENSOR
        parallelize_module(block, mesh, inner)
    return model


def _measured(model: Llama) -> tuple[int, int, int]:
    """Bytes after forward, at the peak up to the loss, and at the peak of the second step; the
    first one fills DTensor's caches."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for _ in range(2):
        model.zero_grad()
        with Live() as live:
            logits = model(tokens)
            kept = live.now
            value = loss(logits, tokens)
            forward = live.peak
            del logits
            value.backward()
    return kept, forward, live.peak


@pytest.mark.parametrize("sequence", [True, False])
def test_a_tensor_rank_allocates_what_dtensor_does(mesh: DeviceMesh, sequence: bool) -> None:
    local = LocalShape(tensor=TENSOR, sequence_parallel=sequence)
    kept, forward, peak = _measured(Llama(SHAPE, local, sequence=LENGTH, dtype=torch.bfloat16))
    assert (kept + IDS, forward, peak) == _measured(_divided(mesh, sequence))
