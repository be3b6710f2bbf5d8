"""Two steps of a small model on this machine under the tracker: what an estimate is held against.

Either in this process, which holds everything: a llama as one rank with whole fp32 parameters; or
on ranks that torchrun starts, which share parameters as FSDP2 or our runtime does. Both with
kernels of the CPU, the job's checkpointing, batch and optimizer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from msgspec import UnsetType
from torch import nn

from shardwright.core.document import read_document
from shardwright.core.errors import InputError, RunError, UnsupportedError, expected
from shardwright.core.footprint import TRACKED_SCHEMA, Footprint, Tracked
from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.core.optimizers import MADE, optimizer_named
from shardwright.core.quantities import format_bytes
from shardwright.estimate.machines import optimizer_of
from shardwright.job.job import Job, memory_of, parallel_of
from shardwright.job.memory import ComputeDtype, MemorySection, ReduceDtype, Runtime
from shardwright.job.model import ESTIMATED
from shardwright.job.parallel import ParallelSection
from shardwright.launcher.launch import Launch, launch
from shardwright.models.llama import Llama
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.trace.checkpointing import policy, treated
from shardwright.trace.treatment import Applied, Treatment
from shardwright.tracker.memory import MemoryTracker

STEPS = 2  # the second has the states of the first
SHARE = 0.8  # of the memory that is free now: more is not tried
RATE = 1e-3
MOST_RANKS = 64
NOT_RUN = ("compile", "float8", "offload")  # of [memory], by CPU ranks
JOB, TIMEOUT = "job.json", 300.0  # what the ranks read, and the seconds they wait for one another


def among(job: Job, ranks: int) -> Job:
    """The job as ``ranks`` CPU ranks of this machine that share its parameters."""
    asked = memory_of(job)
    for where, value, known in (
        ("--real: model.kind", job.model.kind, ESTIMATED),
        ("--real: memory.runtime", asked.runtime, ("fsdp2", "shardwright")),
    ):
        if value not in known:
            remedy = "What is planned is measured by 'shardwright train'."
            names = " or ".join(map(repr, known))
            raise UnsupportedError(expected(where, names, repr(value), remedy))
    for name in NOT_RUN:
        value, usual = getattr(asked, name), getattr(MemorySection(), name)
        if value != usual:
            remedy = "What is measured runs without it: leave it out of both."
            where = f"--real-ranks: memory.{name}"
            raise UnsupportedError(expected(where, repr(usual), repr(value), remedy))
    if not 2 <= ranks <= MOST_RANKS:
        raise InputError(expected("--real", f"from 1 to {MOST_RANKS} ranks", str(ranks)))
    return _as_run(job, asked.runtime, asked.param_dtype, asked.reduce_dtype, ranks)


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
    return _as_run(job, "ddp", "fp32", "fp32", 1)


def _as_run(
    job: Job,
    runtime: Runtime,
    param_dtype: ComputeDtype | UnsetType,
    reduce_dtype: ReduceDtype | UnsetType,
    ranks: int,
) -> Job:
    """The job on so many CPU ranks, without what no rehearsal runs; with its replicas where that
    many ranks are whole ones."""
    asked, ours = memory_of(job), runtime == "shardwright"
    replicas = parallel_of(job).data_replicate
    replicas = 1 if ranks % replicas else replicas
    zero = asked.zero if asked.twice and replicas > 1 else asked.stage if ours else 3
    section = MemorySection(
        checkpointing=asked.checkpointing,
        lowering="cpu",
        runtime=runtime,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        zero=zero,
        implementation=asked.implementation,
        loss=asked.loss,
        fp32_logits=asked.fp32_logits,
        fsdp2=asked.fsdp2 if runtime == "fsdp2" else MemorySection().fsdp2,
    )
    cluster = msgspec.structs.replace(
        job.cluster, world_size=ranks, local_world_size=None, compute_device=None
    )
    parallel = ParallelSection(data_replicate=replicas, data_shard=ranks // replicas)
    run = msgspec.structs.replace(job, memory=section, cluster=cluster, parallel=parallel)
    if optimizer_of(run).name not in MADE:
        others = (optimizer_named(name).beside_others.name for name in MADE)
        known = MADE if ours else [name for name in others if name in MADE]
        remedy = ""
        if job.train.optimizer in MADE:
            remedy = "It updates units of our own runtime, on --real-ranks of 2 or more."
        where = "--real: train.optimizer"
        raise UnsupportedError(
            expected(where, f"one of {', '.join(known)}", repr(job.train.optimizer), remedy)
        )
    return run


def rehearse(job: Job, predicted: Footprint) -> Tracked:
    """Run what :func:`alone` gave; InputError where it is too large for this machine."""
    _check_size(predicted)
    section, shape = memory_of(job), job.model.shape
    assert isinstance(shape, LlamaShape)
    model = Llama(
        shape,
        LocalShape(loss=section.loss, fp32_logits=bool(section.fp32_logits)),
        sequence=job.batch.sequence,
    )
    size = (job.batch.size, job.batch.sequence)
    tokens, targets = (torch.randint(shape.vocab, size) for _ in range(2))
    every = policy(section.policy).every
    blocks = list(model.layers.values())
    picked = treated(range(len(blocks)), every)
    with Treatment("cpu", section.policy).applied(model, blocks, picked) as treatment:

        def loss() -> torch.Tensor:
            return model.loss(model(tokens), targets)

        return tracked(model, job, (tokens, targets), loss, treatment)


def rehearse_among(job: Job, predicted: Footprint, stream: TextIO) -> list[Tracked]:
    """Run what :func:`among` gave; what each rank took. InputError where it is too large for this
    machine, RunError where the ranks fail; what they say goes to ``stream``, and a log that the
    error names stays."""
    _check_size(predicted)
    world_size = predicted.world_size
    folder = Path(tempfile.mkdtemp(prefix="shardwright-memory-"))
    request = Launch(
        module="shardwright.estimate.rehearsal_rank",
        arguments=(str(folder),),
        world_size=world_size,
        folder=folder,
        stop_grace=2.0,
    )
    named = False
    try:
        (folder / JOB).write_bytes(msgspec.json.encode(job))
        outcome = launch(request, stream)
        if outcome.code:
            named = str(folder) in outcome.reason
            raise RunError(expected("--real", "ranks that finish", outcome.reason.rstrip(".")))
        files = [tracked_file(folder, rank) for rank in range(world_size)]
        return [
            read_document(file, Tracked, TRACKED_SCHEMA, "shardwright memory") for file in files
        ]
    finally:
        if not named:
            shutil.rmtree(folder, ignore_errors=True)


def tracked_file(folder: Path, rank: int) -> Path:
    """What a rank's tracker saw."""
    return folder / f"rank-{rank}.tracked.json"


def _check_size(predicted: Footprint) -> None:
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    needs = predicted.worst.peak_bytes * predicted.world_size
    if needs > SHARE * free:
        raise InputError(
            expected(
                "--real",
                f"a step of at most {format_bytes(SHARE * free)}, which this machine has left",
                f"one of {format_bytes(needs)}",
                "Make it smaller: --set model.layers=2, batch.sequence=512.",
            )
        )


def tracked(
    model: nn.Module, job: Job, batch: Any, loss: Callable[[], torch.Tensor], treatment: Applied
) -> Tracked:
    """Steps under the tracker, after one that makes what stays."""
    optimizer = optimizer_for(job, model)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryTracker(model, optimizer, inputs=batch) as tracker, treatment.around():
        for _ in range(STEPS):
            step()
    return tracker.result()


def optimizer_for(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer of what a run of ours gives it, of another runtime of the model's
    parameters."""
    how = optimizer_of(job)
    implementation = how.implementation or how.first
    ours = memory_of(job).runtime == "shardwright"
    parameters = optimizer_parameters(model) if ours else model.parameters()
    return make_optimizer(how.name, parameters, RATE, implementation)
