"""Views that a unit keeps: where they lie, what a step makes of them, what makes them stale."""

from __future__ import annotations

from typing import Any

import torch
from gradient_tasks import Net, inputs, loss_of, net, shard
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.units.buffers import VIEW_BYTES, CachedViews
from shardwright.runtime.units.dstorage import DStorage

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("flat", {}),
    "flat zero 2": ("flat", {"zero": 2}),
    "per_param": ("per_param", {}),
    "per_param zero 1": ("per_param", {"zero": 1}),
    "param_boundary": ("param_boundary", {}),
    "mixture": ("mixture", {}),
}
MOVES = ("to float64", "to_empty", "data", "assigning load", "cast and back")


class _Made(TorchDispatchMode):
    """Which operators make a view or take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        words = ("slice", "view", "split", "select", "narrow", "as_strided", "empty", "zeros")
        if any(word in name for word in words):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def kept(mesh: DeviceMesh, way: str) -> Any:
    """What ``views()`` says before and after steps, and the operators of a gather that make any."""
    strategy, options = WAYS[way]
    model = net(mixed=True)
    units = shard(model, mesh, strategy, **options)
    said = [[DStorage(unit).views() for unit in units]]
    optimizer = torch.optim.SGD(optimizer_parameters(model), lr=0.1)
    for step in range(3):
        loss_of(model, inputs(mesh.get_local_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append([DStorage(unit).views() for unit in units])
    made = _Made()
    with torch.no_grad(), made:
        for unit in units:
            DStorage(unit).unshard()
            DStorage(unit).reshard()
    sane = all(v.entries and v.nbytes == v.entries * VIEW_BYTES for row in said for v in row)
    return said, made.found, sane


def stale(mesh: DeviceMesh, what: str) -> Any:
    """``views()`` before and after the unit's memory was replaced; whether a view of before shows
    what is written now, and one of now does."""
    model = net()
    storage = fully_shard_flat(model, mesh, shard_strategy="flat")
    before, old = storage.views(), storage.get_local_view("first.weight")
    _move(model, what)
    after, new = storage.views(), storage.get_local_view("first.weight")
    storage.byte_storage.zero_()
    with torch.no_grad():
        model.first.weight.copy_(torch.full((5, 3), 3.0))
        old.fill_(7.0)
    whole = storage.all_gather()
    begin = storage.param_infos["first.weight"].unsharded_byte_offset
    shown = whole[begin : begin + 15 * new.itemsize].view(new.dtype)
    return before, after, bool((new == 3.0).all()), bool((shown == 3.0).all())


def _move(model: Net, what: str) -> None:
    match what:
        case "to float64":
            model.to(torch.float64)
        case "to_empty":
            model.to_empty(device="cpu")
        case "data":
            for parameter in model.parameters():
                local: Any = parameter
                parameter.data = local.data.clone()
        case "assigning load":
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        case "cast and back":
            model.to(torch.bfloat16).to(torch.float32)


def displaced(mesh: DeviceMesh) -> CachedViews:
    """What ``views()`` says of a view that is none of its buffer's, made by force."""
    buffers = fully_shard_flat(net(), mesh, shard_strategy="flat").unit.buffers
    buffers.locals[0] = buffers.locals[0].clone()
    return CachedViews.of(buffers.cached(), 0)
