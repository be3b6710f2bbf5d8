"""Training steps under a MemoryTracker, on ranks of the pool or on fake ones of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.tracker.memory import MemoryTracker

WORDS, WIDTH, BLOCKS, BATCH, LENGTH = 53, 24, 2, 2, 10
SETTLE_SECONDS = 0.002  # gloo's threads may hold a buffer for a moment after the wait


class Block(nn.Module):
    """A residual block; its second linear layer has an odd number of rows."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


class Language(nn.Module):
    """An embedding, blocks and a head; ``scale`` is a buffer."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale.to(x.dtype))


class Case(NamedTuple):
    """How a model is sharded and run; ``runtime`` is ``fsdp2``, ``ddp`` or a strategy of ours."""

    runtime: str
    checkpointed: bool = False
    mixed: bool = False  # bf16 parameters, fp32 sums
    microbatches: int = 1
    shares: bool = False  # DDP's gradients are its buckets


def sharded(mesh: DeviceMesh, case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = Language(checkpointed=case.checkpointed)
    units = [*model.blocks, model]
    if case.runtime == "ddp":
        return DistributedDataParallel(
            model, process_group=mesh.get_group(), gradient_as_bucket_view=case.shares
        )
    for unit in units:
        if case.runtime == "fsdp2":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            fully_shard(unit, mesh=mesh, **({"mp_policy": policy} if case.mixed else {}))
        else:
            precision = MixedPrecision(torch.bfloat16, torch.float32) if case.mixed else None
            fully_shard_flat(unit, mesh, shard_strategy=case.runtime, precision=precision)
    return model


class Step(NamedTuple):
    """Live bytes by kind at the peak of every phase, and after forward, backward and step."""

    peaks: dict[str, dict[str, int]]
    levels: tuple[dict[str, int], ...]

    @property
    def total(self) -> int:
        return max(sum(kinds.values()) for kinds in self.peaks.values())


def _levels(tracker: MemoryTracker) -> dict[str, int]:
    time.sleep(SETTLE_SECONDS)
    return {kind: size for kind, size in tracker.live.items() if size}


def tracked_steps(mesh: DeviceMesh, case: Case, steps: int) -> list[Step]:
    """Every step under a tracker of its own; the first is the cold one."""
    model = sharded(mesh, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    targets = words.flatten().clone()
    found = []
    for _ in range(steps):
        with MemoryTracker(model, optimizer, inputs=(words, targets)) as tracker:
            for _ in range(case.microbatches):
                loss = nn.functional.cross_entropy(model(words).flatten(0, 1).float(), targets)
                levels = [_levels(tracker)]
                loss.backward()
                levels.append(_levels(tracker))
            del loss
            optimizer.step()
            levels.append(_levels(tracker))
            optimizer.zero_grad()
        found.append(Step(tracker.peaks, tuple(levels)))
    return found


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[DeviceMesh]:
    """The mesh of one rank of ``size`` in this process, where nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh("cpu", list(range(size)))
    finally:
        dist.destroy_process_group()


def fake_steps(rank: int, size: int, case: Case, steps: int) -> list[Step]:
    """What a rank would have in its steps, without data and without other ranks."""
    with fake_world(rank, size) as mesh, FakeTensorMode():
        return tracked_steps(mesh, case, steps)


def ddp_kinds(mesh: DeviceMesh, shares: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    """Bytes of the parameters, and what is alive before and after the first step under DDP that is
    tracked, in which its buckets turn up; it makes new ones in its second."""
    model = sharded(mesh, Case("ddp", shares=shares))
    words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    for _ in range(2):
        model(words).sum().backward()
        model.zero_grad(set_to_none=True)
    with MemoryTracker(model, inputs=words) as tracker:
        model(words).sum().backward()
        after = _levels(tracker)
    before = next(s for s in tracker.snapshots if s.state == "before pre-forward")
    return sum(parameter.nbytes for parameter in model.parameters()), before.by_category, after
