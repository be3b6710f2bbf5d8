"""Models of a user's own trained through their task: on ranks under a plan, and on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import metering
import msgspec
import torch
from hand_plans import plan_by_hand
from metering import steps_measured
from msgspec import UNSET
from public_models import MODELS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from worlds import apart

from shardwright.core.schedule import Action
from shardwright.core.timeline import Event, phase_peaks
from shardwright.estimate.own_model import Built, FunctionCall, Task, as_tensors, python_function
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.runtime.apply import apply
from shardwright.runtime.embeddings.shard import start_sparse_data_dist
from shardwright.runtime.guard import Guard
from shardwright.runtime.meter import Meter, exact_events
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.state import full_state_dict
from shardwright.runtime.units.dstorage import units_in
from shardwright.tracker.memory import MemoryTracker
from shardwright.train.sources import task_of
from shardwright.train.sources.python import OwnTask, really

CPU = torch.device("cpu")
STEPS = 3
OF_UNITS = ("gather", "free", "reduce", "collect")
REFERENCES: dict[tuple[Any, ...], dict[str, Any]] = {}  # of this process, by what they depend on


def own_job(name: str, optimizer: str = "sgd", **sections: Any) -> Job:
    """A job of the public model ``name``, with batches of its own function."""
    return parse_job(
        {
            "model": {"python": "own_models:build", "arguments": {"name": name}},
            "data": {"python": f"own_models:batches_of_{name}"},
            "train": {"steps": STEPS, "optimizer": optimizer, "learning_rate": 0.01},
            **sections,
        }
    )


def planned_apart(
    mesh: DeviceMesh, name: str, optimizer: str, options: dict[str, Any]
) -> dict[str, float]:
    """What differs from one process by more than 1e-9, and by how much."""
    job = own_job(name, optimizer)
    model = task_of(job).model(CPU)
    made = plan_by_hand(job, model, mesh.size(), _units(name, model), **options)
    return differing(job, made, mesh)


def bytes_of_applying(mesh: DeviceMesh) -> tuple[int, int, int]:
    """Bytes alive at most while a plan is applied, those that stay, and those of the whole."""
    job = parse_job({"model": {"python": "own_models:deep"}})
    model = task_of(job).model(CPU)
    whole = sum(4 * p.numel() for p in model.parameters())
    units = {path: [path] for path, _ in model.named_children()}
    made = plan_by_hand(job, model, mesh.size(), units)
    with MemoryTracker() as seen:
        model = apply(model, made, mesh)
    most = max(sum(kinds.values()) for kinds in seen.peaks.values())
    return most, sum(unit.buffers.shard.nbytes for unit in units_in(model)), whole


def exact_bytes(mesh: DeviceMesh, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind that a model under a plan has after a step, and those of its pieces."""
    job = own_job(name, "adam")
    task = task_of(job)
    model = task.model(CPU)
    made = plan_by_hand(job, model, mesh.size(), _units(name, model))
    model = apply(model, made, mesh)
    optimizer = make_optimizer("adam", optimizer_parameters(model, per_unit=True), 0.01)
    batches = task.batches(mesh.get_local_rank(), mesh.size())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        task.loss(model, as_tensors(next(batches))).backward()
    measured: dict[str, int] = {}
    for event in exact_events(mesh.get_local_rank(), model, optimizer):
        measured[event.kind] = measured.get(event.kind, 0) + event.bytes
    true = {"weight": 0, "gradient": 0, "padding": 0}
    for unit in units_in(model):
        for segment in unit.layout.segments:
            held = [segment.piece(slot, mesh.get_local_rank()).numel for slot in segment.slots]
            share, size = segment.share_bytes, segment.share_bytes // max(segment.share, 1)
            true["weight"] += sum(held) * size
            true["gradient"] += sum(held) * size * segment.trainable
            true["padding"] += (share - sum(held) * size) * (4 if segment.trainable else 1)
    return measured, true


def built(job: Job) -> Built:
    """What the job's function gives, with all numbers at once."""
    call = FunctionCall.of(job)
    made = really(call, python_function(call.name, call.where), job.train.seed)
    assert isinstance(made, Built)
    return made


def _units(name: str, model: nn.Module) -> dict[str, list[str]]:
    """The outermost modules that are units, and what is left."""
    kinds, found = MODELS[name].units, []
    for path, module in model.named_modules():
        if isinstance(module, kinds) and not any(path.startswith(f"{p}.") for p in found):
            found.append(path)
    units = {path: [path] for path in found}
    inside = tuple(f"{path}." for path in found)
    if any(not n.startswith(inside) for n, _ in model.named_parameters()):
        units["rest"] = [""]
    return units


def kept(job: Job, mesh: DeviceMesh, *more: Any, make: Callable[[], dict[str, Any]]) -> Any:
    """A run on one process beside ranks of a mesh, made once for all plans of the same steps."""
    steps = (job.model, job.data, job.train, job.batch, job.memory)
    of = msgspec.json.encode([part for part in steps if part is not UNSET], order="deterministic")
    key = (of, mesh.size(), mesh.get_local_rank(), *more)
    if key not in REFERENCES:
        REFERENCES[key] = make()
    return REFERENCES[key]


def true_of(job: Job, mesh: DeviceMesh) -> dict[str, Any]:
    """What one process comes to."""
    return kept(job, mesh, make=lambda: alone(OwnTask(job, built(job)), job, mesh))


def alone(task: Task, job: Job, mesh: DeviceMesh) -> dict[str, Any]:
    """One process with the batches of all ranks; each rank has buffers of its own."""
    size, mine = mesh.size(), mesh.get_local_rank()
    model = task.model(CPU)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(job.train.optimizer, trained, job.train.learning_rate)
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(size)]
    batches = [task.batches(rank, size) for rank in range(size)]
    found: dict[str, Any] = {}
    for step in range(job.train.steps):
        for rank in range(size):
            for key, buffer in model.named_buffers():
                buffer.copy_(buffers[rank][key])
            loss = task.loss(model, as_tensors(next(batches[rank])))
            (loss / size).backward()
            buffers[rank] = {n: b.clone() for n, b in model.named_buffers()}
            if rank == mine:
                found[f"loss {step}"] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
    found.update({key: p.detach() for key, p in model.named_parameters()})
    return {**found, **buffers[mine]}


def differing(job: Job, made: Plan, mesh: DeviceMesh) -> dict[str, float]:
    """What differs from one process by more than 1e-9 under a plan, and by how much."""
    true, found = true_of(job, mesh), on_ranks(job, made, mesh)
    return {key: d for key in true if not (d := apart(found.get(key), true[key])) <= 1e-9}


def planned(mesh: DeviceMesh, job: Job, made: Plan) -> tuple[dict[str, float], list[Event]]:
    """What differs from one process by more than 1e-9 under a plan, and by how much; the bytes of
    a steady step."""
    return differing(job, made, mesh), measured(job, made, mesh)


def in_order(
    mesh: DeviceMesh, job: Job, made: Plan, *, compares: bool
) -> tuple[dict[str, float], list[Event], list[Action]]:
    """The same, compared where that is asked for, and what the runtime did with units in a steady
    step."""
    apart_by = differing(job, made, mesh) if compares else {}
    meter = Meter(mesh.get_local_rank())
    events = measured(job, made, mesh, meter)
    return apart_by, events, [action for action in meter.actions if action.verb in OF_UNITS]


def apart_by_plan(mesh: DeviceMesh, job: Job, plans: list[Plan]) -> dict[str, float]:
    """By how much training with each plan differs from that with the first, where it does."""
    found = []
    for made in plans:
        torch.manual_seed(mesh.get_local_rank())
        found.append(on_ranks(job, made, mesh))
    return {
        key: by
        for other in found[1:]
        for key, value in found[0].items()
        if (by := apart(other.get(key), value)) > 0
    }


def measured(job: Job, made: Plan, mesh: DeviceMesh, meter: Meter | None = None) -> list[Event]:
    """Exact bytes, and peaks by phase of the step that showed least."""
    train = msgspec.structs.replace(job.train, steps=metering.STEPS + 1)
    task, rank = task_of(msgspec.structs.replace(job, train=train)), mesh.get_local_rank()
    meter, guard = meter or Meter(rank), Guard(mesh)
    model = apply(task.model(CPU), made, mesh, probe=meter, guard=guard)
    optimizer = make_optimizer(train.optimizer, optimizer_parameters(model), train.learning_rate)
    batches = map(as_tensors, task.batches(rank, mesh.size()))

    def ask(model: nn.Module, batch: Any) -> None:
        arguments, keywords = task.inputs(batch)  # type: ignore[attr-defined]
        start_sparse_data_dist(model, *arguments, **keywords)

    asks = ask if made.modes.asked else None
    exact, steps = steps_measured(meter, guard, model, optimizer, batches, task.loss, asks)
    return exact + min(steps, key=_highest)


def bytes_of_steps(mesh: DeviceMesh, job: Job, made: Plan) -> list[Event]:
    """The same for a pool."""
    return measured(job, made, mesh)


def _highest(events: list[Event]) -> int:
    return max(sum(kinds.values()) for kinds in phase_peaks(events).values())


def on_ranks(job: Job, made: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """The same under a plan."""
    task = task_of(job)
    model = apply(task.model(CPU), made, mesh)
    parameters = optimizer_parameters(model, per_unit=True)
    optimizer = make_optimizer(job.train.optimizer, parameters, job.train.learning_rate)
    batches = task.batches(mesh.get_local_rank(), mesh.size())
    found: dict[str, Any] = {}
    for step in range(job.train.steps):
        loss = task.loss(model, as_tensors(next(batches)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.item()
    return {**found, **full_state_dict(model), **dict(model.named_buffers())}
