"""A job's model under torch's FSDP2 on a fake process group, and what trackers see of one step.

The tracked step comes after an untracked one: in the first, the optimizer makes its states, and
DTensor works out shapes under the fake mode, which torch's tracker takes for memory.

``FSDPMemTracker`` hooks every module of a group ``fully_shard([norm, output])`` as if it were a
group of its own, and then sees the group gathered and reduced twice. So norm and output are one
module here, which is one unit like the group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpu.rows import fake_group
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.job.job import Job, degrees_of, memory_of
from shardwright.models.llama import Llama
from shardwright.trace.checkpointing import apply_checkpointing
from shardwright.tracker.memory import MemoryTracker
from shardwright.tracker.tensors import DTYPES


class Head(nn.Module):
    """Norm and output as one module."""

    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.output = norm, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x))  # type: ignore[no-any-return]


class HeadedLlama(Llama):
    """A llama whose head is one module."""

    def __init__(self, shape: LlamaShape, local: LocalShape, sequence: int) -> None:
        super().__init__(shape, local, sequence=sequence)
        self.end = Head(self.norm, self.output)
        del self.norm, self.output

    def head(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.end(x)
        return logits.float() if self.local.fp32_logits else logits


@dataclass
class Training:
    """A model under FSDP2 with its optimizer and batch, on a fake group and fake tensors."""

    model: Any
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]
    microbatches: int = 1

    def step(self) -> None:
        """Forward, backward and update, with gradients of the step before gone first."""
        self.optimizer.zero_grad()
        tokens, targets = self.batch
        parts = zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        for part, wanted in parts:
            loss = self.model.loss(self.model(part), wanted)
            loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad()


def mesh_of(job: Job) -> DeviceMesh:
    """The job's data ranks: shards, or replicas of shards."""
    degrees = degrees_of(job, job.cluster.world_size or 1)
    if degrees.data_replicate == 1:
        return init_device_mesh("cpu", (degrees.data_shard,))
    sizes = (degrees.data_replicate, degrees.data_shard)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


@contextmanager
def training(job: Job, *, one_module: bool = True) -> Iterator[Training]:
    """The job under FSDP2, wrapped as TorchTitan does it: embedding, every block, norm with output.

    A tied head shares the root's unit with its embedding. With ``one_module`` norm and output are
    one module, otherwise two modules of one group.
    """
    section, batch = memory_of(job), job.batch
    shape = job.model.shape
    assert isinstance(shape, LlamaShape)
    degrees = degrees_of(job, job.cluster.world_size or 1)
    with fake_group(degrees.world_size):
        mesh = mesh_of(job)
        with FakeTensorMode():
            headed = one_module and not shape.tied_embeddings
            kind = HeadedLlama if headed else Llama
            local = LocalShape(fp32_logits=bool(section.fp32_logits))
            model: Any = kind(shape, local, sequence=batch.sequence)
            apply_checkpointing(list(model.layers.values()), section.policy)
            _shard(model, mesh, job)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            size = (batch.size, batch.sequence)
            tokens, targets = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
            yield Training(model, optimizer, (tokens, targets), degrees.microbatches)


def _shard(model: Any, mesh: DeviceMesh, job: Job) -> None:
    section = memory_of(job)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[section.param_dtype], reduce_dtype=DTYPES[section.reduce_dtype]
    )
    wanted = section.reshard_after_forward
    reshard = True if wanted == "default" else wanted
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if not model.shape.tied_embeddings:
        fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **common)
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=reshard, **common)
    last = wanted is True  # TorchTitan's "always" frees the head too, its default does not
    if isinstance(model, HeadedLlama):
        fully_shard(model.end, reshard_after_forward=last, **common)
    elif not model.shape.tied_embeddings:
        fully_shard([model.norm, model.output], reshard_after_forward=last, **common)
    fully_shard(model, **common)
    if section.fsdp2_settings.reduce_scatter_max_input_buffers > 1:
        model.set_reduce_scatter_max_input_buffers(
            section.fsdp2_settings.reduce_scatter_max_input_buffers
        )


@dataclass(frozen=True)
class Truth:
    """The most bytes that were alive in a step, by kind, and the seconds it took: to build the
    model, for the untracked step, and for the tracked one."""

    peak: int
    kinds: dict[str, int]
    built: float
    warm: float
    tracked: float


def fsdp_mem_tracker(job: Job) -> Truth:
    """A step as ``FSDPMemTracker`` sees it; that of torch 2.11 counts what FSDP2 freed."""
    if torch.__version__ < "2.12":
        raise SystemExit(f"FSDPMemTracker: expected torch 2.12 or later, got {torch.__version__}")
    begun = time.perf_counter()
    with training(job) as run:
        built = time.perf_counter()
        run.step()
        warm = time.perf_counter()
        tracker = FSDPMemTracker(run.model, run.optimizer)
        tracker.track_inputs(run.batch)
        with tracker:
            run.step()
        done = time.perf_counter()
        by_device = tracker.get_tracker_snapshot("peak")
        kinds = next(found for device, found in by_device.items() if device.type == "cpu")
        named = {str(kind).rpartition(".")[2]: size for kind, size in kinds.items()}
    peak = named.pop("Total")
    return Truth(peak, named, built - begun, warm - built, done - warm)


def our_tracker(job: Job, *, one_module: bool = False) -> MemoryTracker:
    """A step as our tracker sees it, the group a group."""
    with training(job, one_module=one_module) as run:
        run.step()
        tracker = MemoryTracker(run.model, run.optimizer, run.batch)
        around: AbstractContextManager[Any] = tracker
        with around:
            run.step()
    return tracker
