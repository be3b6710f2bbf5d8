"""``torchrun ... -m shardwright.estimate.rehearsal_rank DIR``: one rank of ``memory --real N``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwright.core.document import decode_json, write_document
from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.footprint import Tracked
from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.core.recording import Blocks, RecordedUnit
from shardwright.estimate.machines import optimizer_of, sharding
from shardwright.estimate.models import recorded_model
from shardwright.estimate.own_model import Call, built_of, importable, make, python_function
from shardwright.estimate.rehearsal import JOB, TIMEOUT, tracked, tracked_file
from shardwright.estimate.stages import Stage
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.job.memory import Fsdp2Section
from shardwright.launcher.folder import store_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.worker import run_worker
from shardwright.models.llama import Llama
from shardwright.runtime import comm
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.trace.checkpointing import policy
from shardwright.trace.treatment import Applied, Treatment
from shardwright.tracker.private import fsdp2_holds_all_reduced
from shardwright.tracker.tensors import DTYPES

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A job's model on one rank, sharded as its estimate was, with its batch and its loss."""

    model: nn.Module
    batch: Any
    loss: Loss
    blocks: Sequence[nn.Module]
    treatment: Applied


def followed(job: Job, mesh: DeviceMesh) -> Tracked:
    """What this rank takes in steps of ``job``, sharded as its estimate was."""
    with rehearsed(job, "cpu", mesh) as run:
        return tracked(run.model, job, run.batch, run.loss, run.treatment)


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
    blocks = [model.get_submodule(unit.modules[0]) for unit in units if unit.series]
    again = [model.get_submodule(unit.modules[0]) for unit in units if unit.checkpointing]
    treatment = Treatment("cpu", section.policy if again else policy("none").name)
    with treatment.applied(model, again, range(len(again))) as applied:
        before(model)
        if mesh is None:
            model.to(dtype=DTYPES.get(section.param_dtype or ""))
        else:
            _shard(model, units, job, mesh)
        yield Rehearsed(model, batch, loss, blocks, applied)


def units_of(job: Job) -> list[RecordedUnit]:
    """The units of the estimate, those inside of others first."""
    degrees = degrees_of(job, job.cluster.world_size or 1)
    model = recorded_model(job, degrees, Treatment("cpu", memory_of(job).policy))
    whole = Stage((0, model.layers), True, True)
    blocks = Blocks(model.recorded(parallel_of(job), whole).recording)
    found = [blocks.own(name, unit) for name, unit in blocks.unfolded()]
    return sorted(found, key=lambda unit: unit.name == "")


def _built(job: Job) -> tuple[nn.Module, Any, Loss]:
    """The model on this CPU, its batch, and the loss of a step."""
    if job.model.kind == "python":
        call = Call.of(job)
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
    """Follow two steps as torchrun's environment says; the status file says how it ended."""
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
