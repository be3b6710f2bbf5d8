"""What the pool's workers save, load and train on; each takes its mesh first."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from reference import batches, loss_of
from tasks import share
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import shardwright as sw
from shardwright.job.checkpoint import CheckpointSection
from shardwright.job.plan import Plan
from shardwright.models.dlrm import DLRM
from shardwright.runtime.checkpoint import read_full
from shardwright.runtime.checkpoint.write import SaveWork
from shardwright.runtime.guard import Guard
from shardwright.runtime.optimizer import make_optimizer
from shardwright.runtime.saves import Saves

DECAYED = ("first.0.weight", "first.2.weight", "last.weight")


class Case(NamedTuple):
    """How a model is cut and who optimizes it."""

    kind: str = "adamw"
    strategy: str = "flat"
    form: str = "flat"  # flat or parameters, either in two groups
    one_unit: bool = False
    zero: Any = 3
    offloaded: bool = False


class Net(nn.Module):
    """Tied, scalar and empty parameters in units; a parameter and buffers outside of any."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.first.scale = nn.Parameter(torch.rand(()) + 1.0)
        self.first.empty = nn.Parameter(torch.zeros(0, 4))
        self.first.add_module("again", nn.Linear(5, 7))
        self.first.again.weight = self.first[0].weight  # type: ignore[union-attr]
        self.last = nn.Linear(5, 3)
        self.offset = nn.Parameter(torch.rand(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(self.first(x)) + self.offset


def _twice(module: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.linear(torch.tanh(x), module[0].weight, module.again.bias)
    return module[2](module[1](module[0](x) + hidden)) * module.scale


class First(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _twice(self, x)


def network(seed: int) -> Net:
    net = Net(seed)
    net.first.__class__ = First
    return net


def shard(model: Net, mesh: DeviceMesh, case: Case) -> Net:
    options: dict[str, Any] = {"shard_strategy": case.strategy, "zero": case.zero}
    if case.strategy == "replicated":
        options = {"placements": (sw.Replicate(),)}
    elif case.strategy == "mixed":
        options = {"shard_placement_fn": _mixed(mesh.size())}
    options["cpu_offload"] = case.offloaded
    if case.one_unit:
        sw.fully_shard_flat([model.first, model.last], mesh, **options)
    else:
        sw.fully_shard_flat(model.first, mesh, **options)
        sw.fully_shard_flat(model.last, mesh, **options)
    return model


def _mixed(ranks: int) -> Any:
    def choose(fqn: str, parameter: nn.Parameter) -> Any:
        if fqn == "0.weight":
            return sw.Shard(1)
        if fqn == "2.weight":
            return sw.BlockShard(2, 0)
        return sw.Owned(ranks - 1) if fqn == "weight" else None

    return choose


def optimizers(model: Net, case: Case, rate: float) -> list[Optimizer]:
    """Flat tensors have no parameter outside of units: that one has an optimizer of its own."""
    split = case.form.endswith("groups")
    if case.form.startswith("flat"):
        rest = [n for n, _ in model.named_parameters() if n not in DECAYED and n != "offset"]
        groups = [{"params": list(DECAYED), "weight_decay": 0.2}, {"params": rest}]
        flat = sw.optimizer_parameters(model, groups if split else None, per_unit=split)
        return [
            _optimizer(case.kind, flat, rate, True),
            _optimizer(case.kind, [model.offset], rate),
        ]
    if not split:
        return [_optimizer(case.kind, list(model.parameters()), rate)]
    named = dict(model.named_parameters())
    decayed = [named.pop(name) for name in DECAYED]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": list(named.values())}]
    return [_optimizer(case.kind, groups, rate)]


def _optimizer(kind: str, given: Any, rate: float, fused: bool = False) -> Optimizer:
    if kind == "sgd":
        return SGD(given, lr=rate, momentum=0.9, dampening=0.1, weight_decay=0.01)
    if kind == "adagrad":
        return Adagrad(given, lr=rate, initial_accumulator_value=0.1)
    return AdamW(given, lr=rate, betas=(0.8, 0.95), fused=fused)


def train(model: nn.Module, chosen: Sequence[Optimizer], steps: int, first: int = 0) -> list[float]:
    """Losses; every rank has the same batch, so that all world sizes train alike."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        x, y = torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)
        loss = (model(x) - y).square().mean()
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: Net) -> dict[str, torch.Tensor]:
    """Whole weights and what no unit has, after training."""
    named = {n: t.clone() for n, t in sw.full_state_dict(model).items()}
    return {**named, "seen": model.seen.clone()}


def begin(mesh: DeviceMesh, folder: str, case: Case) -> Any:
    """Train 3 steps, save, train 2 more: their losses and the weights at the end."""
    model = shard(network(1), mesh, case)
    chosen = optimizers(model, case, 0.05)
    train(model, chosen, 3)
    rank = mesh.get_local_rank()
    sw.save_checkpoint(folder, model, chosen, step=3, extra={"rank": rank}, mesh=mesh)
    return train(model, chosen, 2, 3), weights(model)


def resume(mesh: DeviceMesh, folder: str, case: Case, stepped: bool = False) -> Any:
    """Load into another model and train 2 steps: their losses and the weights at the end."""
    model = shard(network(2), mesh, case)
    chosen = optimizers(model, case, 0.7)
    if stepped:
        train(model, chosen, 1)
    found = sw.load_checkpoint(folder, model, chosen, mesh=mesh)
    assert found.step == 3
    assert found.extra == {"rank": mesh.get_rank() % found.world_size}
    return train(model, chosen, 2, 3), weights(model)


def begin_on_grid(mesh: DeviceMesh, folder: str, case: Case) -> Any:
    """As ``begin``, on 2 replicas x 2 shards; the units tell the mesh."""
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    model = shard(network(1), grid, case)
    chosen = optimizers(model, case, 0.05)
    train(model, chosen, 3)
    sw.save_checkpoint(folder, model, chosen, step=3, extra={"rank": mesh.get_local_rank()})
    return train(model, chosen, 2, 3), weights(model)


def resume_on_grid(mesh: DeviceMesh, folder: str, case: Case) -> Any:
    return resume(DeviceMesh("cpu", [[0, 1], [2, 3]]), folder, case)


def save_untrained(mesh: DeviceMesh, folder: str, case: Case) -> list[str]:
    """Names of what differs between a checkpoint and the unsharded model's state dict."""
    model, reference = shard(network(1), mesh, case), network(1)
    sw.save_checkpoint(folder, model, optimizers(model, case, 0.05), step=0, keep=1)
    saved, true = read_full(folder), reference.state_dict()
    true.pop("first.again.weight")
    return sorted(
        {n for n in saved.keys() | true.keys() if n not in saved or n not in true}
        | {n for n in saved.keys() & true.keys() if not torch.equal(saved[n], true[n])}
    )


def load_on_meta(mesh: DeviceMesh, folder: str, case: Case) -> Any:
    """A refusal before ``to_empty``, and the weights after."""
    with torch.device("meta"):
        model = network(2)
    shard(model, mesh, case)
    refusal = _error(lambda: sw.load_checkpoint(folder, model, mesh=mesh))
    model.to_empty(device="cpu")
    sw.load_checkpoint(folder, model, mesh=mesh)
    return refusal, weights(model), read_full(folder, skip=("optimizer/",))


def load_while_unsharded(mesh: DeviceMesh, folder: str) -> Any:
    """What views, flat parameters and modules show after loading into a gathered unit."""
    model = shard(network(2), mesh, Case())
    (flat,) = sw.optimizer_parameters(model, per_unit=False)
    unit = sw.get_dstorage(model.last)
    assert unit is not None
    view, address = unit.get_local_view("weight"), flat.to_local().data_ptr()
    unit.unshard()
    sw.load_checkpoint(folder, model, mesh=mesh)
    state = unit.state.value
    true = read_full(folder)["last.weight"]
    piece = next(p for p in unit.layout.pieces(mesh.get_local_rank()) if p.tensor.fqn == "weight")
    own = true.view(-1)[piece.offsets[0] : piece.offsets[0] + piece.numel]
    same = [torch.equal(t.view(-1), own) for t in (view, model.last.weight.to_local(), view)]
    unit.unshard()
    return state, same, torch.equal(model.last.weight, true), flat.to_local().data_ptr() == address


def refusal(mesh: DeviceMesh, folder: str, what: str) -> Any:
    """The error of a load that cannot be, and whether anything has changed."""
    case = Case(form="flat groups" if what == "groups" else "flat")
    model = network(2)
    if what == "another model":
        model.last = nn.Linear(5, 4)
    if what == "more layers":
        model.first.add_module("extra", nn.Linear(2, 2))
    shard(model, mesh, case)
    if what == "optimizer":
        case = case._replace(kind="adagrad")
    chosen = optimizers(model, case, 0.05)
    if what == "fewer parameters":
        chosen = chosen[:1]
    if what == "stale optimizer":
        chosen = optimizers(network(2), Case(form="parameters"), 0.05)
    before = {n: t.clone() for n, t in sw.full_state_dict(model).items()}
    text = _error(lambda: sw.load_checkpoint(folder, model, chosen, mesh=mesh))
    after = sw.full_state_dict(model)
    kept = all(torch.equal(before[name], after[name]) for name in before)
    return text, kept and not any(o.state for o in chosen if not isinstance(o, Adagrad))


def merged_groups(mesh: DeviceMesh, folder: str) -> str:
    """The error of loading two groups that differ into one."""
    grouped = Case(form="flat groups")
    model = shard(network(1), mesh, grouped)
    chosen = optimizers(model, grouped, 0.05)
    train(model, chosen, 1)
    sw.save_checkpoint(folder, model, chosen, step=1)
    other = shard(network(2), mesh, Case())
    return _error(lambda: sw.load_checkpoint(folder, other, optimizers(other, Case(), 0.05)))


def without_optimizer(mesh: DeviceMesh, folder: str) -> str:
    model = shard(network(1), mesh, Case())
    sw.save_checkpoint(folder, model, step=1)
    return _error(lambda: sw.load_checkpoint(folder, model, optimizers(model, Case(), 0.1)))


def unknown_ranks(mesh: DeviceMesh, folder: str, what: str) -> Any:
    """The error where a model does not tell which ranks have it, and what is saved if told."""
    model: nn.Module = network(1)
    if what == "several meshes":
        sw.fully_shard_flat(model.first, mesh)
        pairs = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
        sw.fully_shard_flat(model.last, pairs["shard"])
    text = _error(lambda: sw.save_checkpoint(folder, model, step=1))
    sw.save_checkpoint(folder, model, step=1, mesh=mesh)
    return text, sorted(read_full(folder))


def survives_a_failed_save(mesh: DeviceMesh, folder: str, how: str, rank: int) -> Any:
    """The error of a save that ``rank`` cannot write, and training that goes on regardless."""
    model, twin = shard(network(1), mesh, Case()), shard(network(1), mesh, Case())
    chosen, others = optimizers(model, Case(), 0.05), optimizers(twin, Case(), 0.05)
    train(model, chosen, 2)
    train(twin, others, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    place = Path(folder)
    if mesh.get_local_rank() == rank:
        if how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        else:
            place = place / "file"
            place.write_text("not a folder")
    try:
        text = _error(lambda: sw.save_checkpoint(place, model, chosen, step=2, mesh=mesh))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    same = train(model, chosen, 2, 2) == train(twin, others, 2, 2)
    found = sw.save_checkpoint(folder, model, chosen, step=4, mesh=mesh)
    return text, same, found.name


def random_numbers(mesh: DeviceMesh, folder: str, ranks: int) -> Any:
    """Whether random numbers after loading are those after saving, where ``ranks`` saved."""
    model = shard(network(1), mesh, Case())
    torch.manual_seed(50 + mesh.get_local_rank())
    if mesh.size() == ranks:
        sw.save_checkpoint(folder, model, step=1)
        after = torch.rand(4)
    torch.manual_seed(9)
    found = sw.load_checkpoint(folder, model, random_state=True)
    return found.random_state, mesh.size() == ranks and torch.equal(after, torch.rand(4))


def _error(act: Any) -> str:
    try:
        act()
    except sw.ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- tables --------------------------------------------------------------------------------------


def train_planned(mesh: DeviceMesh, folder: str, made: Plan, steps: int, per_unit: bool) -> Any:
    """Load what is in ``folder``, train up to ``steps`` and save: losses and whole weights."""
    rank, size = mesh.get_local_rank(), mesh.size()
    job = made.job
    model = sw.apply(DLRM(job, device="meta"), made, mesh)
    flat = sw.optimizer_parameters(model, per_unit=per_unit)
    optimizer = make_optimizer(job.train.optimizer, flat, job.train.learning_rate)
    first = 0
    if any(Path(folder).iterdir()):
        found = sw.load_checkpoint(folder, model, optimizer)
        assert found.facts["plan"] != made.fingerprint
        first = found.step
    losses = []
    for batch in batches(job)[first:steps]:
        loss = loss_of(model, share(batch, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / size
        torch.distributed.all_reduce(total, group=mesh.get_group())
        losses.append(total.item())
    facts = {"plan": made.fingerprint}
    sw.save_checkpoint(folder, model, optimizer, step=steps, facts=facts, keep=1)
    return losses, sw.full_state_dict(model)


def load_tables_alone(mesh: DeviceMesh, folder: str, made: Plan) -> Any:
    """Weights of a model loaded without its optimizer, and whether row sums came along."""
    model = sw.apply(DLRM(made.job, device="meta"), made, mesh)
    sw.load_checkpoint(folder, model)
    saved = read_full(folder)
    found = sw.full_state_dict(model)
    sums = []
    for store, held in model.tables.holdings():  # type: ignore[union-attr, operator]
        true, first = saved[f"optimizer/{held.block.tensor}/sum"], held.block.offsets[0]
        sums.append(torch.equal(store.state_views(held)["sum"], true[first : first + held.rows]))
    return {n: t for n, t in saved.items() if not n.startswith("optimizer/")}, found, sums


# ---- state dicts ---------------------------------------------------------------------------------


def dcp_save(mesh: DeviceMesh, folder: str, case: Case) -> Any:
    """As ``begin``, through torch.distributed.checkpoint."""
    model = shard(network(1), mesh, case)
    chosen = optimizers(model, case, 0.05)
    train(model, chosen, 3)
    state = {"model": model.state_dict(), "optim": sw.optimizer_state_dict(model, chosen)}
    dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())
    return train(model, chosen, 2, 3), weights(model)


def dcp_load(mesh: DeviceMesh, folder: str, case: Case) -> Any:
    """As ``resume``, through torch.distributed.checkpoint."""
    model = shard(network(2), mesh, case)
    chosen = optimizers(model, case, 0.7)
    state = {"model": model.state_dict(), "optim": sw.optimizer_state_dict(model, chosen)}
    try:
        dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    except CheckpointException as error:  # no Exception: it would end the worker
        raise AssertionError(str(error)) from None
    model.load_state_dict(state["model"])
    sw.load_optimizer_state_dict(model, chosen, state["optim"])
    return train(model, chosen, 2, 3), weights(model)


def take_over(mesh: DeviceMesh, source: Case, target: Case, cloned: bool) -> Any:
    """Losses of a model and of another one that took over its state dicts."""
    first, second = shard(network(1), mesh, source), shard(network(2), mesh, target)
    chosen, others = optimizers(first, source, 0.05), optimizers(second, target, 0.7)
    train(first, chosen, 2)
    model, optim = first.state_dict(), sw.optimizer_state_dict(first, chosen)
    if cloned:
        model = {name: tensor.clone() for name, tensor in model.items()}
        for names in optim["state"].values():
            names.update({name: tensor.clone() for name, tensor in names.items()})
    second.load_state_dict(model)
    sw.load_optimizer_state_dict(second, others, optim)
    return train(second, others, 2, 2), train(first, chosen, 2, 2)


def beside_torch(mesh: DeviceMesh, case: Case) -> Any:
    """Our optimizer state dict beside torch's of the unsharded model, both whole."""
    alone = case._replace(form=case.form.replace("flat", "parameters"))
    reference, model = network(1), shard(network(1), mesh, case)
    chosen, others = optimizers(model, case, 0.05), optimizers(reference, alone, 0.05)
    train(model, chosen, 3)
    train(reference, others, 3)
    return whole(sw.optimizer_state_dict(model, chosen)), torchs(reference, others)


def take_torchs(mesh: DeviceMesh, case: Case) -> Any:
    """Losses of a sharded and of the unsharded model, after the one took the other's state."""
    alone = case._replace(form=case.form.replace("flat", "parameters"))
    reference, model = network(1), shard(network(2), mesh, case)
    chosen, others = optimizers(model, case, 0.7), optimizers(reference, alone, 0.05)
    train(reference, others, 3)
    model.load_state_dict(reference.state_dict())
    sw.load_optimizer_state_dict(model, chosen, torchs(reference, others))
    return train(model, chosen, 2, 3), train(reference, others, 2, 3)


def held_back(mesh: DeviceMesh, folder: str, guarded: bool) -> tuple[bool, bool, int]:
    """Whether a save goes on after a step in which rank 1 still writes and after the next one, and
    which step it then is of. All ranks agree in a guard, or in what saves."""
    model = nn.Linear(3, 3)
    sw.fully_shard_flat(model, mesh)
    section = CheckpointSection(every="1 steps")
    options: dict[str, Any] = {"extra": lambda: None, "facts": {}, "say": lambda text: None}
    saves, guard = Saves(Path(folder), model, None, section, **options), Guard(mesh)

    def step(number: int) -> SaveWork | None:
        agreed = guard.settle(saves.words(number)) if guarded else saves.agreed(number)
        saves.after(number, agreed)
        return saves._work

    begun = step(1)
    assert begun is not None
    begun.done.wait()
    if mesh.get_local_rank() == 1:
        begun.done.clear()  # a slower disk
    held = step(2)
    begun.done.set()
    found = held is not begun, step(3) is not begun
    saves.finish(1)
    return *found, saves.saved


def refused_state(mesh: DeviceMesh, what: str) -> Any:
    """The error of taking back a state dict that was spoiled, and whether state has changed."""
    model = shard(network(1), mesh, Case())
    chosen = optimizers(model, Case(), 0.05)
    train(model, chosen, 1)
    state = whole(sw.optimizer_state_dict(model, chosen))
    names = state["state"]
    if what == "name":
        names["first.9.weight"] = names.pop("first.0.weight")
    elif what == "shape":
        names["first.0.weight"]["exp_avg"] = torch.zeros(7, 4)
    elif what == "kind":
        names["last.bias"]["momentum_buffer"] = names["last.bias"].pop("exp_avg")
    elif what == "step":
        names["last.bias"]["step"] = torch.tensor(7.0)
    elif what == "keys":
        state = names
    before = whole(sw.optimizer_state_dict(model, chosen))
    text = _error(lambda: sw.load_optimizer_state_dict(model, chosen, state))
    return text, different(before, whole(sw.optimizer_state_dict(model, chosen)), 0.0) == []


def torchs(model: nn.Module, chosen: list[Optimizer]) -> dict[str, Any]:
    """torch's own optimizer state dict, with tensors of its own."""
    return whole(get_optimizer_state_dict(model, tuple(chosen)))


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The same with whole tensors."""
    return {
        "state": {
            fqn: {
                name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone()
                for name, v in names.items()
            }
            for fqn, names in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


def different(one: dict[str, Any], two: dict[str, Any], tolerance: float) -> list[str]:
    """What two whole state dicts do not have in common."""
    first, second = _entries(one), _entries(two)
    found = sorted(first.keys() ^ second.keys())
    for key in first.keys() & second.keys():
        a, b = first[key], second[key]
        if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, 0.0, tolerance):
            found.append(key)
    return found


def _entries(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{f}/{n}": t for f, names in state["state"].items() for n, t in names.items()}
