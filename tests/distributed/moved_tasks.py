"""Sharded parameters that are moved, cast, loaded, replaced, frozen or saved by torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from gradient_tasks import Net, errors, inputs, loss_of, net, shard
from probe_tasks import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.state import full_state_dict
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.runtime.units.dstorage import DStorage
from shardwright.runtime.units.unit import Unit


def worst(units: list[Unit], model: nn.Module, true: dict[str, torch.Tensor]) -> float:
    return max(error for error, _ in errors(units, model, true).values())


def true_gradients(reference: nn.Module, size: int) -> dict[str, torch.Tensor]:
    dtype = next(reference.parameters()).dtype
    for rank in range(size):
        (loss_of(reference, inputs(rank).to(dtype)) / size).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in reference.named_parameters()
    }


def step_error(model: Net, units: list[Unit], mesh: DeviceMesh, reference: Net) -> float:
    """The largest gradient error of one step."""
    dtype = next(reference.parameters()).dtype
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, inputs(mesh.get_local_rank()).to(dtype)).backward()
    return worst(units, model, true_gradients(reference, mesh.size()))


def inside(units: list[Unit]) -> bool:
    """Whether every local view lies in its unit's byte storage."""
    return all(
        DStorage(unit).get_local_view(fqn).untyped_storage()._cdata
        == DStorage(unit).byte_storage.untyped_storage()._cdata
        for unit in units
        for fqn in unit.param_infos
    )


def other_values() -> Net:
    return net(seed=77)


def moved(mesh: DeviceMesh, strategy: str, what: str) -> Any:
    """(gradient error of the step after, whether views lie in the shard, same parameters)."""
    model, reference = net(), net()
    units = shard(model, mesh, strategy)
    held = list(model.parameters())
    same_objects = True
    match what:
        case "to float64":
            model.to(torch.float64)
            reference.to(torch.float64)
        case "to bfloat16 and back":
            model.to(torch.bfloat16).to(torch.float32)
            reference.to(torch.bfloat16).to(torch.float32)
        case "to float64 after a step":
            loss_of(model, inputs(mesh.get_local_rank())).backward()
            for parameter in model.parameters():
                parameter.grad = None
            model.to(torch.float64)
            reference.to(torch.float64)
        case "load":
            model.load_state_dict(other_values().state_dict())
            reference = other_values()
        case "load, assigning":
            model.load_state_dict(other_values().state_dict(), assign=True)
            reference = other_values()
            held = list(model.parameters())
        case "load a sharded state":
            other = other_values()
            shard(other, mesh, "per_param" if strategy == "flat" else "flat")
            model.load_state_dict(other.state_dict())
            reference = other_values()
        case "load while kept whole":
            del model, units
            model = net()
            units = shard(model, mesh, strategy, reshard_after_forward=False)
            held = list(model.parameters())
            loss_of(model, inputs(0))
            model.load_state_dict(other_values().state_dict())
            reference = other_values()
        case "a whole one as data":
            whole = torch.full((5, 3), 0.25)
            model.first.weight.data = whole.clone()
            reference.first.weight.data.copy_(whole)
        case "written through data":
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
            for parameter in reference.parameters():
                parameter.data.mul_(0.5)
        case "data replaced":
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            for parameter in reference.parameters():
                parameter.data.mul_(0.5)
        case "written whole":
            for unit in units:
                with DStorage(unit).unsharded(write=True), torch.no_grad():
                    for fqn in unit.param_infos:
                        DStorage(unit).get_unsharded_view(fqn).mul_(0.5)
            for parameter in reference.parameters():
                parameter.data.mul_(0.5)
        case "double then half the steps":
            model.double().float()
    error = step_error(model, units, mesh, reference)
    values = full_state_dict(model)
    equal = all(
        torch.equal(values[n], p) and values[n].dtype == p.dtype
        for n, p in reference.named_parameters()
    )
    now = list(model.parameters())
    same_objects &= all(a is b for a, b in zip(held, now, strict=True))
    return error, equal, inside(units), same_objects


MOVES = (
    "to float64",
    "to bfloat16 and back",
    "to float64 after a step",
    "load",
    "load, assigning",
    "load a sharded state",
    "load while kept whole",
    "a whole one as data",
    "written through data",
    "data replaced",
    "written whole",
    "double then half the steps",
)


def blocks_with_their_own(model: Net) -> Iterator[nn.Module]:
    """The layers of all blocks, in the order in which they are built; a block's own parameters are
    drawn after those of its layers."""
    for block in model.blocks:
        yield from (block.norm, block.up, block.down, _Own(block))


class _Own:
    def __init__(self, block: nn.Module) -> None:
        self.block = block

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.block.gate.copy_(torch.randn_like(self.block.gate) * 0.3)
        self.block.scale.fill_(0.7)


def from_meta(mesh: DeviceMesh, strategy: str, how: str) -> Any:
    """A model built on the meta device and given its values afterwards."""
    with torch.device("meta"):
        model = Net()
    units = shard(model, mesh, strategy)
    if how == "assigning load":
        model.load_state_dict(net().state_dict(), assign=True)
    else:
        model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "load":
        model.load_state_dict(net().state_dict())
    elif how == "reset":
        torch.manual_seed(5)  # as the reference is built
        for module in (model.first, *blocks_with_their_own(model), model.last):
            module.reset_parameters()
    elif how == "written whole":
        source = dict(net().named_parameters())
        assert all(DStorage(unit).byte_storage.device.type == "cpu" for unit in units)
        named = {id(p): n for n, p in model.named_parameters()}
        names = {(i, m.fqn): named[id(m.parameter)] for i, u in enumerate(units) for m in u.members}
        for index, unit in enumerate(units):
            with DStorage(unit).unsharded(write=True), torch.no_grad():
                for fqn in unit.param_infos:
                    DStorage(unit).get_unsharded_view(fqn).copy_(source[names[index, fqn]])
    reference = net()
    error = step_error(model, units, mesh, reference)
    values = full_state_dict(model)
    equal = all(torch.equal(values[n], p) for n, p in reference.named_parameters())
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    after = full_state_dict(model)
    rest = max((after[n] - p).abs().max().item() for n, p in reference.named_parameters())
    return max(error, rest), equal, inside(units)


def whole_units_frozen(mesh: DeviceMesh, strategy: str) -> list[float]:
    """The largest gradient error where the first, a middle or all blocks do not train."""
    rank, size = mesh.get_local_rank(), mesh.size()
    found = []
    for frozen in ((0,), (1,), (0, 1, 2)):
        model, reference = net(), net()
        for each in (model, reference):
            for index in frozen:
                each.blocks[index].requires_grad_(False)
        units = shard(model, mesh, strategy)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, inputs(rank)).backward()
        true = true_gradients(reference, size)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None
                parameter.grad = torch.zeros_like(parameter)
        found.append(worst(units, model, true))
    return found


def written_in_half(mesh: DeviceMesh, strategy: str) -> tuple[bool, bool]:
    """Whether writing whole parameters that compute in bf16 keeps what nobody changed, and takes
    what someone did."""
    model, reference = net(), net()
    units = shard(model, mesh, strategy, precision=MixedPrecision(torch.bfloat16, torch.float32))
    for unit in units:
        with DStorage(unit).unsharded(write=True), torch.no_grad():
            for fqn in unit.param_infos:
                if fqn.endswith("up.bias"):
                    DStorage(unit).get_unsharded_view(fqn)[1] = 7.0
    values = full_state_dict(model)
    kept = changed = True
    for name, parameter in reference.named_parameters():
        if name.endswith("up.bias"):
            changed &= values[name][1].item() == 7.0
            parameter.data[1] = 7.0
        kept &= torch.equal(values[name], parameter)
    return kept, changed


def freezing(mesh: DeviceMesh, strategy: str) -> Any:
    """Errors while a layer is frozen and after it is not, and whether it had a gradient."""
    model, reference = net(), net()
    units = shard(model, mesh, strategy)
    model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    loss_of(model, inputs(mesh.get_local_rank())).backward()
    nothing = model.blocks[1].up.weight.grad is None  # type: ignore[union-attr]
    true = true_gradients(reference, mesh.size())
    for unit in units:
        for member in unit.members:
            if member.parameter.grad is None:
                member.parameter.grad = torch.zeros_like(member.parameter)
    found = errors(units, model, true)
    frozen = max(error for name, (error, _) in found.items() if name != "blocks.1.up.weight")
    model.zero_grad()
    model.blocks[1].up.weight.requires_grad_(True)  # type: ignore[union-attr]
    return frozen, nothing, step_error(model, units, mesh, net())


def thawing(mesh: DeviceMesh, strategy: str) -> Any:
    """A layer that was frozen when it was sharded, and is to train afterwards."""
    model = net()
    model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    units = shard(model, mesh, strategy)
    loss_of(model, inputs(mesh.get_local_rank())).backward()
    nothing = model.blocks[1].up.weight.grad is None  # type: ignore[union-attr]
    model.zero_grad()
    model.blocks[1].up.weight.requires_grad_(True)  # type: ignore[union-attr]
    found = [step_error(model, units, mesh, net()) for _ in range(2)]
    return nothing, max(found), inside(units)


# ---- torch.distributed.checkpoint ---------------------------------------------------------------


@contextmanager
def common_folder(mesh: DeviceMesh) -> Iterator[str]:
    """A folder that every rank of the mesh sees."""
    names = [tempfile.mkdtemp()] if mesh.get_local_rank() == 0 else [""]
    dist.broadcast_object_list(names, src=0, group=mesh.get_group())
    yield names[0]


def saved(mesh: DeviceMesh, strategy: str) -> str:
    """A folder with the weights of a net after a step, written by torch."""
    model = net()
    shard(model, mesh, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, inputs(0)).backward()
    optimizer.step()
    with common_folder(mesh) as folder:
        dcp.save(
            {"model": model.state_dict()},
            checkpoint_id=folder,
            process_group=mesh.get_group(),
        )
    return folder


def loaded(mesh: DeviceMesh, strategy: str, folder: str) -> Any:
    """Whether what torch reads into another cut is what was written, after one step of a whole."""
    model = other_values()
    units = shard(model, mesh, strategy)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    model.load_state_dict(state["model"])
    reference = net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    loss_of(reference, inputs(0)).backward()
    optimizer.step()
    values = full_state_dict(model)
    error = max((values[n] - p).abs().max().item() for n, p in reference.named_parameters())
    return error, inside(units)


def remove(mesh: DeviceMesh, folder: str) -> None:
    import shutil

    if mesh.get_local_rank() == 0:
        assert Path(folder).is_dir()
        shutil.rmtree(folder)


def whole_by_torch(mesh: DeviceMesh, strategy: str) -> Any:
    """torch's own whole state beside the model's, and of a DTensor's detached twin."""
    model, reference = net(), net()
    shard(model, mesh, strategy)
    options = dcp_state.StateDictOptions(full_state_dict=True)
    found = dcp_state.get_model_state_dict(model, options=options)
    equal = all(torch.equal(found[n], p) for n, p in reference.state_dict().items()) or not found
    again = True
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            again &= torch.equal(parameter.full_tensor(), reference.get_parameter(name))
            again &= torch.equal(parameter.detach().full_tensor(), reference.get_parameter(name))
    return equal, bool(found), again


def replaced(mesh: DeviceMesh, strategy: str) -> str:
    """What is said of a plain parameter in place of a sharded one."""
    model = net()
    shard(model, mesh, strategy)
    model.first.weight = nn.Parameter(torch.zeros(5, 3))
    return said(lambda: model(inputs(0)))


def a_shared_module(mesh: DeviceMesh) -> str:
    """One module in two units."""
    shared = nn.Linear(3, 3)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(3, 3))
    fully_shard_flat(first, mesh)
    return said(lambda: fully_shard_flat(second, mesh))
