"""Two steps of a small llama on this machine under the tracker: what an estimate is held against.

One process holds everything, so the job is compared as one rank: whole fp32 parameters, kernels of
the CPU, the job's checkpointing, batch and optimizer.
"""

from __future__ import annotations

import os

import msgspec
import torch

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.footprint import Footprint, Tracked
from shardwright.core.job import Job, memory_of
from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.core.memory_section import MemorySection
from shardwright.core.parallel import ParallelSection
from shardwright.core.quantities import format_bytes
from shardwright.lab.footprint.machines import optimizer_of
from shardwright.models.llama import Llama
from shardwright.runtime.optimizer import make_optimizer
from shardwright.trace.checkpointing import policy, treated
from shardwright.trace.treatment import Treatment
from shardwright.tracker.memory import MemoryTracker

STEPS = 2  # the second has the states of the first
SHARE = 0.8  # of the memory that is free now: more is not tried
RATE = 1e-3


def alone(job: Job) -> Job:
    """The job as one rank that shards nothing."""
    if job.model.kind != "llama":
        raise UnsupportedError(
            expected(
                "--real",
                "model.kind 'llama'",
                f"'{job.model.kind}'",
                "What is planned is measured by 'shardwright train' and 'shardwright compare'.",
            )
        )
    asked = memory_of(job)
    section = MemorySection(
        checkpointing=asked.checkpointing,
        lowering="cpu",
        runtime="ddp",
        param_dtype="fp32",
        reduce_dtype="fp32",
        implementation=asked.implementation,
        loss=asked.loss,
    )
    cluster = msgspec.structs.replace(
        job.cluster, world_size=1, local_world_size=None, compute_device=None
    )
    return msgspec.structs.replace(
        job, memory=section, cluster=cluster, parallel=ParallelSection(data_shard=1)
    )


def rehearse(job: Job, predicted: Footprint) -> Tracked:
    """Run what :func:`alone` gave; InputError where it is too large for this machine."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    if predicted.worst.peak_bytes > SHARE * free:
        raise InputError(
            expected(
                "--real",
                f"a step of at most {format_bytes(SHARE * free)}, which this machine has left",
                f"one of {format_bytes(predicted.worst.peak_bytes)}",
                "Make it smaller: --set model.layers=2, batch.sequence=512.",
            )
        )
    section, shape = memory_of(job), job.model.shape
    assert isinstance(shape, LlamaShape)
    model = Llama(shape, LocalShape(loss=section.loss), sequence=job.batch.sequence)
    how = optimizer_of(job)
    implementation = how.implementation or how.first
    optimizer = make_optimizer(how.name, model.parameters(), RATE, implementation)
    size = (job.batch.size, job.batch.sequence)
    tokens, targets = (torch.randint(shape.vocab, size) for _ in range(2))
    every = policy(section.policy).every
    blocks = list(model.layers.values())
    picked = treated(range(len(blocks)), every)
    with Treatment("cpu", section.policy).applied(model, blocks, picked) as treatment:
        _step(model, optimizer, tokens, targets)
        with (
            MemoryTracker(model, optimizer, inputs=(tokens, targets)) as tracker,
            treatment.around(),
        ):
            for _ in range(STEPS):
                _step(model, optimizer, tokens, targets)
    return tracker.result()


def _step(
    model: Llama, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor
) -> None:
    model.loss(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
