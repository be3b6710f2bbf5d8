"""Recommenders of one's own: on ranks under a plan, and on one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
from own_tasks import CPU, STEPS, built, kept, measured, on_ranks
from recommenders import Recommender, wrong_keyed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils._pytree import tree_map
from worlds import apart

from shardwright.core.errors import InputError, MismatchError, RunError, UnsupportedError
from shardwright.core.timeline import Event
from shardwright.estimate.own_model import as_tensors
from shardwright.job.job import Job, parse_job, table_optimizer
from shardwright.job.model_of_job import step_dtypes
from shardwright.job.plan import Plan
from shardwright.runtime.apply import apply
from shardwright.runtime.embeddings.modules import RoutedEmbedding
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.guard import Guard
from shardwright.runtime.model_parts import average_weights
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.saving import load_checkpoint, save_checkpoint
from shardwright.runtime.state import full_state_dict
from shardwright.runtime.units.dstorage import units_in
from shardwright.tracker.memory import MemoryTracker
from shardwright.train.sources import task_of
from shardwright.train.sources.python import OwnTask

BATCH, RATE, EPSILON = 6, 0.3, 1e-8
CLOSE = 1e-6


def job_of(world_size: int, function: str = "build", **sections: Any) -> Job:
    """A job of a recommender; ``train`` may say how its tables learn."""
    given: dict[str, Any] = {"optimizer": "sgd", "steps": STEPS, "learning_rate": RATE}
    document = {
        "model": {"python": f"recommenders:{function}"},
        "cluster": {"preset": "local", "world_size": world_size},
        "batch": {"size": BATCH},
        "data": {"python": f"recommenders:{function}_batches"},
        **sections,
    }
    return parse_job({**document, "train": given | sections.get("train", {})})


def trained(mesh: DeviceMesh, job: Job, made: Plan) -> tuple[dict[str, float], list[Event]]:
    """What differs from one process by more than rounding, and by how much; the bytes of a
    steady step."""
    by_rows = _updated_by_rows(job, made)
    true = kept(job, mesh, by_rows, make=lambda: alone(job, by_rows, mesh))
    found = on_ranks(job, made, mesh)
    assert set(true) == set(found)
    # adaptive updates of gradients near zero are steps of full length, whose sign is rounding's
    close = CLOSE if job.train.optimizer == table_optimizer(job) == "sgd" else 10 * CLOSE
    differing = {key: d for key in true if not (d := apart(found[key], true[key])) <= close}
    return differing, measured(job, made, mesh)


def _updated_by_rows(job: Job, made: Plan) -> frozenset[str]:
    """The tables whose rows have a state each."""
    return frozenset(t.fqn for t in made.tables if table_optimizer(job) == "rowwise_adagrad")


def alone(job: Job, by_rows: Set[str], mesh: DeviceMesh) -> dict[str, Any]:
    """One process with the batches of all ranks, some tables updated row by row."""
    task, size = OwnTask(job, built(job)), mesh.size()
    model = task.model(CPU)
    rows = {name: p for name, p in model.named_parameters() if name in by_rows}
    sums = {name: torch.zeros(len(p)) for name, p in rows.items()}
    others = [p for n, p in model.named_parameters() if p.requires_grad and n not in by_rows]
    optimizer = make_optimizer(job.train.optimizer, others, job.train.learning_rate)
    batches = [task.batches(rank, size) for rank in range(size)]
    found: dict[str, Any] = {}
    for step in range(job.train.steps):
        for rank in range(size):
            loss = task.loss(model, as_tensors(next(batches[rank])))
            (loss / size).backward()
            if rank == mesh.get_local_rank():
                found[f"loss {step}"] = loss.item()
        for name, p in rows.items():
            assert p.grad is not None
            sums[name] += p.grad.square().mean(1)
            rate = job.train.table_learning_rate or job.train.learning_rate
            p.data -= rate * p.grad / (sums[name].sqrt() + EPSILON).unsqueeze(1)
            p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return {**found, **{key: p.detach() for key, p in model.named_parameters()}}


def bytes_measured(mesh: DeviceMesh, job: Job, made: Plan) -> list[Event]:
    """Of a steady step."""
    return measured(job, made, mesh)


def bytes_of_applying(mesh: DeviceMesh, job: Job, made: Plan) -> tuple[int, int]:
    """Bytes alive at most while a plan is applied, and those of the rows that stay."""
    model = task_of(job).model(CPU)
    with MemoryTracker() as seen:
        model = apply(model, made, mesh)
    most = max(sum(kinds.values()) for kinds in seen.peaks.values())
    tables = [module for module in model.modules() if isinstance(module, ShardedTables)]
    return most, sum(s.block_view(h).numel() * 4 for t in tables for s, h in t.holdings())


def saved_and_loaded(mesh: DeviceMesh, job: Job, plans: list[Plan], folder: Path) -> list[float]:
    """Train under the first plan, save, load under the second: how far apart weights are then, and
    after another step of each."""
    task, models, optimizers = task_of(job), [], []
    for made in plans:
        model = apply(task_of(job).model(CPU), made, mesh)
        parameters = optimizer_parameters(model)
        optimizers.append(make_optimizer(job.train.optimizer, parameters, RATE))
        models.append(model)
    batches = task.batches(mesh.get_local_rank(), mesh.size())
    found = []

    def step(which: int, batch: Any) -> None:
        task.loss(models[which], batch).backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    step(0, as_tensors(next(batches)))
    save_checkpoint(folder, models[0], optimizers[0], step=1)
    load_checkpoint(folder, models[1], optimizers[1])
    batch = as_tensors(next(batches))
    for _ in range(2):
        states = [full_state_dict(model) for model in models]
        assert set(states[0]) == set(states[1])
        found.append(max(apart(states[0][name], states[1][name]) for name in states[0]))
        for which in (0, 1):
            step(which, batch)
    return found


def refused(mesh: DeviceMesh, job: Job, made: Plan) -> list[str]:
    """What is said to calls that the plan has not seen."""
    model = apply(task_of(job).model(CPU), made, mesh)
    users = model.get_submodule("users")
    calls = {
        "weight": lambda: users.weight,
        "offsets": lambda: model.get_submodule("seen")(
            torch.zeros(4).long(), torch.zeros(1).long()
        ),
        "ids": lambda: users(torch.tensor([10**6])),
    }
    said = []
    for call in calls.values():
        try:
            call()
        except Exception as error:
            said.append(str(error))
    return said


def wrong_collections(mesh: DeviceMesh, job: Job, made: Plan) -> tuple[dict[str, str], float]:
    """What every rank says where the last one's bags are none, case by case, and how far a lookup
    after all of them is from one before."""
    task = task_of(job)
    model = apply(task.model(CPU), made, mesh)
    batches = task.batches(mesh.get_local_rank(), mesh.size())
    bags, *others = as_tensors(next(batches))[0]
    said: dict[str, str] = {}
    with torch.no_grad():
        before = model(bags, *others)
        for case, wrong in wrong_keyed(bags).items():
            given = wrong if mesh.get_rank() == mesh.size() - 1 else bags
            try:
                model(given, *others)
                said[case] = "accepted"
            except Exception as error:
                said[case] = f"{type(error).__name__}: {error}"
        return said, apart(model(bags, *others), before)


def accumulated(
    mesh: DeviceMesh, job: Job, made: Plan, *, guarded: bool, holds: bool
) -> float | str:
    """How far two steps whose gradients come in two backwards each are from those of whole batches,
    or why there are none."""
    task, found = task_of(job), []
    batches = task.batches(mesh.get_local_rank(), mesh.size())
    steps = [as_tensors(next(batches)) for _ in range(2)]
    for parts in (1, 2):
        guard = Guard(mesh) if guarded else None
        model = apply(task_of(job).model(CPU), made, mesh, guard=guard)
        optimizer = make_optimizer("sgd", optimizer_parameters(model), RATE)
        try:
            for batch in steps:
                for number in range(parts):
                    for storage in units_in(model):
                        storage.take_settings(not holds or number == parts - 1)
                    part = tree_map(lambda rows, at=number, of=parts: rows.chunk(of)[at], batch)
                    (task.loss(model, part) / parts).backward()
                if guard is not None:
                    guard.settle()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        except UnsupportedError as error:
            return str(error)
        found.append(full_state_dict(model))
    return max(apart(found[0][name], found[1][name]) for name in found[0])


def goes_on(mesh: DeviceMesh, job: Job, made: Plan) -> float:
    """How far tables move in a step after one that a guard refused."""
    task, guard = task_of(job), Guard(mesh)
    model = apply(task.model(CPU), made, mesh, guard=guard)
    batch = as_tensors(next(task.batches(mesh.get_local_rank(), mesh.size())))
    (task.loss(model, batch) * float("inf")).backward()
    kept: list[RunError] = []
    try:
        guard.settle()
    except RunError as error:
        kept.append(error)
    before = full_state_dict(model)
    task.loss(model, batch).backward()
    guard.settle()
    after = full_state_dict(model)
    return min(apart(before[table.fqn], after[table.fqn]) for table in made.tables) * len(kept)


def empty_bags(mesh: DeviceMesh, job: Job, made: Plan) -> torch.Tensor:
    """What bags without ids come to."""
    seen = apply(task_of(job).model(CPU), made, mesh).get_submodule("seen")
    return seen(torch.zeros(3, 0, dtype=torch.int64)).detach()


def under_autocast(mesh: DeviceMesh, job: Job, made: Plan, dtype: torch.dtype) -> str:
    """What is said to a forward under autocast."""
    task = task_of(job)
    model = apply(task.model(CPU), made, mesh)
    batch = as_tensors(next(task.batches(mesh.get_local_rank(), mesh.size())))
    try:
        with torch.autocast("cpu", dtype):
            task.loss(model, batch).backward()
    except UnsupportedError as error:
        return str(error)
    return ""


def scheduled(mesh: DeviceMesh, job: Job, made: Plan) -> dict[str, float]:
    """How far tables move in a step for which the users' rate is 0, and a forward that does not
    train is from that of the whole model."""
    task = task_of(job)
    model = apply(task.model(CPU), made, mesh)
    model.get_submodule("users").learning_rate = 0.0
    before = full_state_dict(model)
    batch = as_tensors(next(task.batches(mesh.get_local_rank(), mesh.size())))
    task.loss(model, batch).backward()
    after = full_state_dict(model)
    whole = built(job).module
    whole.load_state_dict(after)
    with torch.no_grad():
        said = apart(model.eval()(*batch[0]), whole.eval()(*batch[0]))
    moved = {table.name: apart(before[table.fqn], after[table.fqn]) for table in made.tables}
    return {**moved, "forward": said}


class RowsOf(nn.Module):
    """All rows of an embedding: ids -> rows in ``dtype``, whose gradients are summed in fp32."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.whole, self.dtype = weight.detach().float().requires_grad_(), dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """In the shape of the ids."""
        return nn.functional.embedding(ids, self.whole).to(self.dtype)


def alone_in_half(job: Job, made: Plan, mesh: DeviceMesh) -> dict[str, Any]:
    """One process with the batches of all ranks: units compute in bf16 where the job has it, rows
    are given in bf16 and updated in fp32, by SGD."""
    task, size, rate = OwnTask(job, built(job)), mesh.size(), job.train.learning_rate
    model, half = task.model(CPU), torch.bfloat16
    computed = half if step_dtypes(job)[0] else torch.float32
    kept = {t.fqn: dict(model.named_parameters())[t.fqn].dtype for t in made.tables}
    tables: dict[str, RowsOf] = {}
    for fqn in kept:
        path = fqn.removesuffix(".weight")
        parent, _, name = path.rpartition(".")
        own = model.get_submodule(path)
        tables[fqn] = RowsOf(own.weight, half)
        setattr(model.get_submodule(parent), name, RoutedEmbedding(path, own, tables[fqn]))
    units = dict(model.named_parameters())
    optimizer = make_optimizer("sgd", [p for p in units.values() if p.requires_grad], rate)
    batches = [task.batches(rank, size) for rank in range(size)]
    found: dict[str, Any] = {}
    for step in range(job.train.steps):
        for rank in range(size):
            inputs, _, clicks = as_tensors(next(batches[rank]))
            inputs = tree_map(lambda x: x.to(computed) if x.is_floating_point() else x, inputs)
            cast = {name: p.to(computed) for name, p in units.items()}
            loss = task.built.loss_of(functional_call(model, cast, tuple(inputs)), clicks)
            (loss / size).backward()
            if rank == mesh.get_local_rank():
                found[f"loss {step}"] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        for fqn, rows in tables.items():
            assert rows.whole.grad is not None
            rows.whole.data -= rate * rows.whole.grad
            rows.whole.data.copy_(rows.whole.data.to(kept[fqn]))
            rows.whole.grad = None
    weights = {fqn: rows.whole.detach().to(kept[fqn]) for fqn, rows in tables.items()}
    return {**found, **weights, **{key: p.detach() for key, p in units.items()}}


def trained_in_half(mesh: DeviceMesh, job: Job, made: Plan) -> tuple[dict[str, float], list[Event]]:
    """What differs from one process, and the bytes of a steady step."""
    tables = frozenset(table.fqn for table in made.tables)
    true = kept(job, mesh, tables, make=lambda: alone_in_half(job, made, mesh))
    found = on_ranks(job, made, mesh)
    assert set(true) == set(found)
    differing = {key: d for key in true if not (d := apart(found[key], true[key])) <= CLOSE}
    return differing, measured(job, made, mesh)


def _step(model: torch.nn.Module, task: Any, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """All weights after a step on the first batch of this rank."""
    batch = as_tensors(next(task.batches(mesh.get_local_rank(), mesh.size())))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    try:
        task.loss(model, batch).backward()
        optimizer.step()
    finally:
        optimizer.zero_grad()
    return full_state_dict(model)


def table_frozen(mesh: DeviceMesh, job: Job, made: Plan) -> dict[str, list[float]]:
    """How far each table moves in a step in which the users are frozen, from there in one in which
    they learn again, and whether others move as beside users that learn."""
    task = task_of(job)
    model, other = (apply(task_of(job).model(CPU), made, mesh) for _ in range(2))
    users: Any = model.get_submodule("users")
    users.requires_grad_(False)
    start = full_state_dict(model)
    frozen, beside = _step(model, task, mesh), _step(other, task, mesh)
    users.requires_grad_(True)
    after = _step(model, task, mesh)
    return {
        table.name: [
            apart(start[table.fqn], frozen[table.fqn]),
            apart(frozen[table.fqn], after[table.fqn]),
            apart(frozen[table.fqn], beside[table.fqn]),
        ]
        for table in made.tables
    }


def frozen_but_a_part(
    mesh: DeviceMesh, job: Job, made: Plan, part: str
) -> tuple[set[str], set[str]]:
    """What moves in a step of a model that was frozen, all but a ``part``, and in the next one,
    after all was thawed."""
    task = task_of(job)
    model = apply(task.model(CPU), made, mesh)
    moved = []
    for trains in (False, True):
        model.requires_grad_(trains)
        model.get_submodule("old").requires_grad_(False)  # as planned
        model.get_submodule(part).requires_grad_(True)
        before = full_state_dict(model)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        _step(model, task, mesh)
        optimizer.step()
        after = full_state_dict(model)
        moved.append({name for name, value in after.items() if not value.equal(before[name])})
    return moved[0], moved[1]


def loaded_whole(
    mesh: DeviceMesh, job: Job, made: Plan
) -> tuple[dict[str, float], dict[str, float], str]:
    """How far a model is from the whole one whose state it loads, then after it has loaded its own;
    what is said of a whole table of another shape."""
    model, other = apply(task_of(job).model(CPU), made, mesh), Recommender()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))
    state = other.state_dict()
    model.load_state_dict(state)
    first = full_state_dict(model)
    model.load_state_dict(model.state_dict())
    second = full_state_dict(model)
    said = ""
    try:
        model.load_state_dict({**state, "users.weight": state["users.weight"][1:]})
    except RuntimeError as error:
        said = str(error)
    return *({name: apart(f[name], state[name]) for name in state} for f in (first, second)), said


def all_frozen(mesh: DeviceMesh, job: Job, made: Plan, part: str) -> tuple[str, str, float]:
    """What is said of a backward after all parameters of a ``part`` were frozen, and of one after
    its tables were, too; how far its tables have moved until then."""
    task = task_of(job)
    model = apply(task.model(CPU), made, mesh)
    for parameter in model.get_submodule(part).parameters():
        parameter.requires_grad_(False)
    start = full_state_dict(model)
    said = []
    for _ in range(2):
        try:
            _step(model, task, mesh)
            said.append("")
        except InputError as error:
            said.append(str(error))
        for path, module in model.named_modules():
            if isinstance(module, ShardedTables) and path.startswith(part):
                module.requires_grad_(False)
    after = full_state_dict(model)
    names = (t.fqn for t in made.tables if t.fqn.startswith(part))
    return said[0], said[1], max(apart(start[name], after[name]) for name in names)


def frozen_before(mesh: DeviceMesh, job: Job, made: Plan, name: str) -> str:
    """What is said to a model whose parameter was frozen since it was planned."""
    model = task_of(job).model(CPU)
    model.get_parameter(name).requires_grad_(False)
    try:
        apply(model, made, mesh)
    except MismatchError as error:
        return str(error)
    return ""


def averaged(mesh: DeviceMesh, job: Job, made: Plan) -> tuple[str, dict[str, float]]:
    """What is said of a copy; how far an average of weights is from the one of one process."""
    task = task_of(job)
    model, average = (apply(task_of(job).model(CPU), made, mesh) for _ in range(2))
    said = ""
    try:
        copy.deepcopy(model)
    except UnsupportedError as error:
        said = str(error)
    for part in (model, model.get_submodule("users")):
        with pytest.raises(InputError, match=r"^a pickle of tables '.*Pickle full_state_dict\(\)"):
            pickle.dumps(part)
    average_weights(average, model, 0.0)
    means = full_state_dict(model)
    for _ in range(2):
        now = _step(model, task, mesh)
        average_weights(average, model, 0.75)
        means = {name: 0.75 * mean + 0.25 * now[name] for name, mean in means.items()}
    found = full_state_dict(average)
    return said, {name: apart(found[name], mean) for name, mean in means.items()}
