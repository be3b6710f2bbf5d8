"""Two steps of a small model on this machine under the tracker: what an estimate is held against.

Either in this process, which holds everything: a llama as one rank with whole fp32 parameters; or
on ranks that torchrun starts, which share parameters as FSDP2 or our runtime does. Both with
kernels of the CPU, the job's checkpointing, batch and optimizer. ``torchrun ... -m
shardwright.estimate.rehearsal DIR`` is one of those ranks.
"""

# What is measured has to be what was estimated: units, the cut of parameters and the checkpointed
# blocks are read from the estimate's own recording and ``sharding``, not decided again. The first
# step makes what stays (states of an optimizer, buffers of a runtime) and is not followed.

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwright.core.document import decode_json, read_document, write_document
from shardwright.core.errors import InputError, RunError, UnsupportedError, expected
from shardwright.core.footprint import TRACKED_SCHEMA, Footprint, Tracked
from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.optimizers import MADE, optimizer_named
from shardwright.core.quantities import format_bytes
from shardwright.core.recording import BlockNames, RecordedUnit
from shardwright.estimate.own_model import FunctionCall, built_of, importable, make, python_function
from shardwright.estimate.stages import ModelStage
from shardwright.estimate.unplanned import optimizer_of, recorded_model, sharding
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.job.memory import ComputeDtype, Fsdp2Section, MemorySection, ReduceDtype, Runtime
from shardwright.job.model import KINDS
from shardwright.job.parallel import ParallelSection
from shardwright.launcher.folder import store_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.launch import Launch, launch
from shardwright.launcher.worker import run_worker
from shardwright.models.llama import Llama
from shardwright.runtime import comm
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.trace.checkpointing import policy
from shardwright.trace.treatment import AppliedTreatment, Treatment
from shardwright.tracker.memory import MemoryTracker
from shardwright.tracker.private import fsdp2_holds_all_reduced
from shardwright.tracker.tensors import DTYPES

Loss = Callable[[], torch.Tensor]
STEPS = 2  # the second has the states of the first
SHARE = 0.8  # of the memory that is free now: more is not tried
RATE = 1e-3
MOST_RANKS = 64
NOT_RUN = ("compile", "float8", "offload")  # of [memory], by CPU ranks
JOB, TIMEOUT = "job.json", 300.0  # what the ranks read, and the seconds they wait for one another


def among(job: Job, ranks: int) -> Job:
    """The job as ``ranks`` CPU ranks of this machine that share its parameters."""
    asked = memory_of(job)
    remedy = "What is planned is measured by 'shardwright train'."
    if not job.model.traits.is_estimated:
        names = " or ".join(repr(kind) for kind, of in KINDS.items() if of.is_estimated)
        found = repr(job.model.kind)
        raise UnsupportedError(expected("--real: model.kind", names, found, remedy))
    if asked.runtime not in ("fsdp2", "shardwright"):
        names, found = "'fsdp2' or 'shardwright'", repr(asked.runtime)
        raise UnsupportedError(expected("--real: memory.runtime", names, found, remedy))
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
    if job.model.shape is UNSET:
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
    return followed(job, None)


def rehearse_among(job: Job, predicted: Footprint, stream: TextIO) -> list[Tracked]:
    """Run what :func:`among` gave; what each rank took. InputError where it is too large for this
    machine, RunError where the ranks fail; what they say goes to ``stream``, and a log that the
    error names stays."""
    _check_size(predicted)
    world_size = predicted.world_size
    folder = Path(tempfile.mkdtemp(prefix="shardwright-memory-"))
    request = Launch(
        module="shardwright.estimate.rehearsal",
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
    # All ranks run on this machine: what one of them needs is there as often as there are ranks.
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


def tracked(job: Job, run: Rehearsed) -> Tracked:
    """Steps under the tracker, after one that makes what stays."""
    optimizer = optimizer_for(job, run.model)

    def step() -> None:
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemoryTracker(run.model, optimizer, inputs=run.batch)
    with tracker, run.treatment.around():
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


def followed(job: Job, mesh: DeviceMesh | None) -> Tracked:
    """What this rank takes in steps of ``job``, sharded as its estimate was; of the whole job where
    there is no ``mesh``."""
    with rehearsed(job, "cpu", mesh) as run:
        return tracked(job, run)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A job's model on one rank, sharded as its estimate was, with its batch and its loss."""

    model: nn.Module
    batch: Any
    loss: Loss
    treatment: AppliedTreatment


@contextmanager
def rehearsed(
    job: Job,
    device: str,
    mesh: DeviceMesh | None,
    units: Sequence[RecordedUnit] = (),
    before: Callable[[nn.Module], None] = lambda _: None,
) -> Iterator[Rehearsed]:
    """The job on ``device``, checkpointed inside as it says, on the data ranks of ``mesh``; without
    one as a single rank, all parameters in the job's dtype. ``units`` are those of
    :func:`units_of`, if they are known; ``before`` is called with the model that is to be sharded.
    """
    units = units or units_of(job)
    with importable(), torch.device(device):
        model, batch, loss = _built(job)
    section = memory_of(job)
    again = [model.get_submodule(unit.modules[0]) for unit in units if unit.checkpointing]
    treatment = Treatment("cpu", section.policy if again else policy("none").name)
    with treatment.applied(model, again, range(len(again))) as applied:
        before(model)
        if mesh is None:
            model.to(dtype=DTYPES.get(section.param_dtype or ""))
        else:
            _shard(model, units, job, mesh)
        yield Rehearsed(model, batch, loss, applied)


def units_of(job: Job) -> list[RecordedUnit]:
    """The units of the estimate, those inside of others first."""
    degrees = degrees_of(job, job.cluster.world_size or 1)
    model = recorded_model(job, degrees, Treatment("cpu", memory_of(job).policy))
    whole = ModelStage((0, model.layers), True, True)
    blocks = BlockNames(model.recorded(parallel_of(job), whole).recording)
    found = [blocks.own(name, unit) for name, unit in blocks.unfolded()]
    # Units inside of others first, as both runtimes want it: what is sharded already is left out of
    # the unit around it.
    return sorted(found, key=lambda unit: unit.name == "")


def _built(job: Job) -> tuple[nn.Module, Any, Loss]:
    """The model on this CPU, its batch, and the loss of a step."""
    if job.model.traits.is_function:
        call = FunctionCall.of(job)
        built = built_of(make(call, python_function(call.name, call.where)), call.where)
        batch = (built.inputs, built.keywords, built.targets)
        return (
            built.module,
            batch,
            lambda: built.loss_of(built.module(*built.inputs, **built.keywords), built.targets),
        )
    shape, size = job.model.shape, (job.batch.size, job.batch.sequence)
    assert isinstance(shape, LlamaShape)
    section = memory_of(job)
    local = LocalShape(loss=section.loss, fp32_logits=bool(section.fp32_logits))
    if torch.get_default_device().type == "cpu":
        model = Llama(shape, local, sequence=job.batch.sequence)
    else:
        model = _drawn_there(Llama(shape, local, sequence=job.batch.sequence, device="meta"))
    if section.param_dtype:
        model.store_frozen(DTYPES[section.param_dtype])
    tokens, targets = (torch.randint(shape.vocab, size) for _ in range(2))
    return model, (tokens, targets), lambda: model.loss(model(tokens), targets)


@torch.no_grad()
def _drawn_there(model: Llama) -> Llama:
    """A model on the meta device, on the default one with values that mean nothing: those of a run
    are drawn on the CPU, a billion in ten seconds."""
    model.to_empty(device=torch.get_default_device())
    if model.shape.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight
    model.set_positions(None)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    return model


def _shard(model: nn.Module, units: Sequence[RecordedUnit], job: Job, mesh: DeviceMesh) -> None:
    section = memory_of(job)
    how = sharding(section, degrees_of(job, job.cluster.world_size or 1), on_gpu=False)
    precision = MixedPrecisionPolicy(
        DTYPES.get(section.param_dtype or ""), DTYPES.get(section.reduce_dtype or "")
    )
    for fqn in (name for unit in units for name in unit.frozen):
        model.get_parameter(fqn).requires_grad_(False)  # what gets no gradient, as a plan runs it
    for unit in units:
        modules = [model.get_submodule(path) for path in unit.modules]
        frees = how.reshard_after_forward and unit.name not in how.kept
        if section.runtime == "fsdp2":
            one = modules if modules[1:] else modules[0]
            fully_shard(one, mesh=mesh, mp_policy=precision, reshard_after_forward=frees)
        else:
            fully_shard_flat(
                modules,
                mesh,
                reshard_after_forward=frees and section.stage == 3,
                zero=section.stage if section.zero == "auto" else section.zero,
                shard_strategy="flat",
                precision=precision,
                block_size=optimizer_of(job).block,
            )
    rootless = all(unit.name for unit in units)
    if section.runtime == "fsdp2":
        if rootless:
            fully_shard(model, mesh=mesh, mp_policy=precision)
        _set_fsdp2(model, section.fsdp2_settings)
    elif rootless:  # which has its units follow one another, as those of a plan do
        fully_shard_flat(model, mesh, precision=precision)


def _set_fsdp2(model: nn.Module, its: Fsdp2Section) -> None:
    """Have FSDP2 do what the job says of it; UnsupportedError where the torch here cannot."""
    here = fsdp2_holds_all_reduced()
    if its.holds_all_reduced not in (UNSET, here):
        key, found = "memory.fsdp2.holds_all_reduced", str(its.holds_all_reduced).lower()
        wanted = f"{str(here).lower()}, as torch {torch.__version__} does"
        raise UnsupportedError(expected(f"--real-ranks: {key}", wanted, found))
    for name in ("reduce_scatter_max_input_buffers", "separate_reduce_scatter_group"):
        value = getattr(its, name)
        if value == getattr(Fsdp2Section(), name):
            continue
        setter = getattr(model, f"set_{name}", None)
        if setter is None:
            wanted = f"a torch whose FSDPModule has set_{name}"
            where = f"--real-ranks: memory.fsdp2.{name}"
            raise UnsupportedError(expected(where, wanted, f"torch {torch.__version__}"))
        setter(value)


def main() -> int:
    """One rank of ``memory --real N``: follow two steps as torchrun's environment says; the status
    file says how it ended."""
    folder = Path(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def body(heartbeat: Heartbeat) -> None:
        job = decode_json((folder / JOB).read_bytes(), Job)
        store = comm.meet(TIMEOUT, rank, world_size, store_file(folder))
        comm.start("gloo", TIMEOUT, rank, world_size, store)
        try:
            replicas = parallel_of(job).data_replicate
            several = replicas > 1
            sizes = (replicas, world_size // replicas) if several else (world_size,)
            names = ("replicate", "shard") if several else ("shard",)
            found = followed(job, init_device_mesh("cpu", sizes, mesh_dim_names=names))
            write_document(found, tracked_file(folder, rank))
            heartbeat.mark("done")
        finally:
            comm.stop()

    return run_worker(folder, rank, body)


if __name__ == "__main__":
    sys.exit(main())
