"""Training with parameters, gradients and optimizer states cut or whole, role by role."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from gradient_tasks import Net, inputs, loss_of, mixture, net
from probe_tasks import MESHES
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.core.placement import Replicate
from shardwright.runtime.probe import Probe
from shardwright.runtime.torch_private import C_GRAD
from shardwright.runtime.units import buffers, gradients
from shardwright.runtime.units.buffers import CopyStream
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.runtime.units.unit import State, Unit

CUT = {"shard_strategy": "flat"}
OFFLOADED = {"cpu_offload": True}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"placements": (Replicate(),)},
    "zero1": {"zero": 1, **CUT},
    "zero2": {"zero": 2, **CUT},
    "zero2 owned": {"zero": 2, "shard_strategy": "param_boundary"},
    "zero2 rows": {"zero": 2},
    "zero2 mixture": {"zero": 2, "shard_placement_fn": mixture},
    "zero2 ahead": {"zero": 2, "prefetch": 1, **CUT},
    "zero3": {"reshard_after_forward": True, **CUT},
    "zero3 kept": {"reshard_after_forward": False, **CUT},
    "ddp offloaded": {"placements": (Replicate(),), **OFFLOADED},
    "zero1 offloaded": {"zero": 1, **CUT, **OFFLOADED},
    "zero2 offloaded": {"zero": 2, "prefetch": 1, **CUT, **OFFLOADED},
    "zero3 offloaded": {"reshard_after_forward": True, **CUT, **OFFLOADED},
    "zero3 offloaded rows": {"prefetch": 1, **OFFLOADED},
    "zero3 offloaded mixture": {"shard_placement_fn": mixture, **OFFLOADED},
}
CUTS: dict[str, dict[str, Any]] = {
    "flat": CUT,
    "rows": {},
    "owned": {"shard_strategy": "param_boundary"},
    "mixture": {"shard_placement_fn": mixture},
    "bf16": {"precision": MixedPrecision(torch.bfloat16, torch.float32), **CUT},
}
STEPS, BACKWARDS = 3, 3
RATE, MOMENTUM = 0.05, 0.9


class Calls(Probe):
    """Collectives by what they do."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def collective(self, label: str, nbytes: int) -> None:
        known = ("gather", "reduce", "over", "replicas")
        what = " ".join(word for word in label.split() if word in known)
        if what != "replicas":  # looked at once, whether they start alike
            self.found[what] += 1
            self.nbytes[what] += nbytes


def sharded(mesh: DeviceMesh, **options: Any) -> tuple[Net, list[Unit], Calls]:
    """A net of a unit a block and the root's, and who counts their collectives."""
    model, calls = net(), Calls()
    for block in model.blocks:
        sw.fully_shard_flat(block, mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)
    units = list(units_in(model))
    for unit in units:
        for peers in (unit.comm, unit.comm.shards, unit.comm.twins):
            if peers is not None:
                peers.probe = calls
    return model, units, calls


def optimizer_over(model: nn.Module, *, flat: bool) -> torch.optim.SGD:
    parameters = sw.optimizer_parameters(model) if flat else list(model.parameters())
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def bytes_of(tensors: Any) -> int:
    """Bytes of distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    storages.pop(0, None)
    return sum(storages.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank by role: what a step leaves, before the gradients go."""
    states = [local(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    given = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameter": bytes_of(t for u in units for t in (u.buffers.shard, u.buffers.whole.tensor)),
        "gradient": sum(local(p.grad).nbytes for p in given if p.grad is not None),
        "optimizer_state": sum(state.nbytes for state in states),
    }


def whole_gradients(units: list[Unit]) -> int:
    """Bytes of gradients that nothing has summed yet."""
    found = 0
    for unit in units:
        for segment in unit.gradients.segments:
            kept = [g for g in segment.held if g is not None]
            left = map(C_GRAD.__get__, segment.wholes)
            kept += [g for g in left if g is not None]
            found += sum(g.nbytes for g in kept)
    return found


@cache
def weights_alone(size: int) -> dict[str, torch.Tensor]:
    """What one process makes of the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(BACKWARDS):
            for rank in range(size):
                (loss_of(model, inputs(rank, step * BACKWARDS + number)) / size).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(
    mesh: DeviceMesh, way: str, *, flat: bool, holds: bool, again: bool = False
) -> dict[str, Any]:
    """Weights beside those of one process after steps of several backwards, collectives of each
    step and bytes by role. ``holds`` sums the gradients of a step once; forwards of blocks, inside
    of their hooks, run ``again`` in a backward."""
    model, units, calls = sharded(mesh, **WAYS[way])
    for block in model.blocks if again else ():
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = optimizer_over(model, flat=flat)
    rank, by_step, between = mesh.get_local_rank(), [], []
    for step in range(STEPS):
        calls.found.clear()
        calls.nbytes.clear()
        optimizer.zero_grad()
        for number in range(BACKWARDS):
            waits = holds and number < BACKWARDS - 1
            with DStorage(units[0]).no_sync() if waits else contextlib.nullcontext():
                loss_of(model, inputs(rank, step * BACKWARDS + number)).backward()
            between.append(whole_gradients(units))
        optimizer.step()
        by_step.append((dict(calls.found), dict(calls.nbytes)))
    kept = held(model, units, optimizer)
    found = sw.full_state_dict(model)
    true = weights_alone(mesh.size())
    apart = max((found[name].to("cpu") - true[name]).abs().max().item() for name in true)
    return {"apart": apart, "calls": by_step, "bytes": kept, "between": between}


def sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Bytes of a flat net's units, all whole and of one rank's shares."""
    _, units, _ = sharded(mesh, **CUT)
    return {
        "whole": sum(unit.layout.nbytes for unit in units),
        "share": sum(unit.layout.shard_bytes for unit in units),
        "units": len(units),
    }


def looks(mesh: DeviceMesh, way: str) -> list[dict[str, int]]:
    """Collectives of: a forward, the same again, one after new weights, one after an eval."""
    model, units, calls = sharded(mesh, **WAYS[way])
    x, found = inputs(mesh.get_local_rank()), []

    def forward() -> torch.Tensor:
        calls.found.clear()
        with torch.no_grad():
            out = model(x)
        found.append(dict(calls.found))
        return out

    first = forward()
    assert torch.equal(first, forward())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    reference = net()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2.0)
    assert torch.allclose(forward(), reference(x), atol=1e-6)
    assert torch.allclose(forward(), reference(x), atol=1e-6)
    assert all(unit.state is State.SHARDED for unit in units)
    return found


def shares_are_views(mesh: DeviceMesh) -> list[bool]:
    """Whether this rank's shares lie in the whole parameters, and all there is lies there."""
    model, units, _ = sharded(mesh, **WAYS["zero2"])
    model(inputs(0)).sum().backward()
    found = []
    for unit in units:
        storage = DStorage(unit).byte_storage.untyped_storage().data_ptr()
        parts = [*unit.buffers.locals, *(p.detach() for p in unit.buffers.parameters)]
        found.append(all(part.untyped_storage().data_ptr() == storage for part in parts))
        found.append(unit.buffers.whole.nbytes == 0)
    return found


def half(mesh: DeviceMesh) -> tuple[float, dict[str, int], int]:
    """Computed in bf16 from shares of fp32, beside ZeRO-3: weights apart, bytes by role, bytes of
    the whole in bf16."""
    found = []
    for way in ("zero2", "zero3"):
        precision = MixedPrecision(torch.bfloat16, torch.float32)
        model, units, _ = sharded(mesh, precision=precision, **WAYS[way])
        optimizer = optimizer_over(model, flat=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, inputs(mesh.get_local_rank(), step)).backward()
            optimizer.step()
        found.append((sw.full_state_dict(model), held(model, units, optimizer), units))
    (mine, kept, units), (other, _, _) = found
    apart = max((mine[name] - other[name]).abs().max().item() for name in mine)
    return apart, kept, sum(unit.buffers.whole.nbytes for unit in units)


def frozen(mesh: DeviceMesh) -> tuple[float, dict[str, int]]:
    """A frozen layer is whole on every rank and never travels."""
    model, reference = net(), net()
    for made in (model, reference):
        made.blocks[1].up.requires_grad_(False)
    calls = Calls()
    for module in (*model.blocks, model):
        sw.fully_shard_flat(module, mesh, **WAYS["zero2"]).comm.probe = calls
    optimizer = optimizer_over(model, flat=True)
    alone = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        calls.found.clear()
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(model, inputs(mesh.get_local_rank(), step)).backward()
        for rank in range(mesh.size()):
            (loss_of(reference, inputs(rank, step)) / mesh.size()).backward()
        optimizer.step()
        alone.step()
    last = dict(calls.found)
    found, true = sw.full_state_dict(model), reference.state_dict()
    return max((found[name] - true[name]).abs().max().item() for name in true), last


def changed_between(mesh: DeviceMesh) -> str:
    """What is said of weights that change between a forward and its backward."""
    model, _, _ = sharded(mesh, **WAYS["zero2"])
    loss = loss_of(model, inputs(mesh.get_local_rank()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    try:
        loss.backward()
    except Exception as error:
        return str(error)
    return ""


def refusals(mesh: DeviceMesh) -> list[str]:
    """What is said of options that do not go together."""
    found = []
    given: tuple[dict[str, Any], ...]
    given = ({"zero": 0}, {"zero": True}, {"zero": 2, "reshard_after_forward": True})
    for options in (*given, {"zero": (2, 3)}):
        try:
            sw.fully_shard_flat(nn.Linear(2, 2), mesh, **options)
        except sw.InputError as error:
            found.append(str(error))
    return found


def train_on_grid(
    mesh: DeviceMesh, rows: int, cut: str, zero: Any, *, flat: bool, narrow: bool = False
) -> dict[str, Any]:
    """HSDP at a stage of ZeRO: weights apart, collectives of a step, bytes by role, and those of
    one rank's part where parameters are cut over all."""
    size = mesh.size()
    options = {**CUTS[cut], "zero": zero} | ({"reshard_after_forward": 1} if narrow else {})
    model, units, calls = sharded(MESHES[rows, size // rows], **options)
    optimizer = optimizer_over(model, flat=flat)
    for step in range(STEPS):
        calls.found.clear()
        optimizer.zero_grad()
        for number in range(BACKWARDS):
            loss_of(model, inputs(mesh.get_local_rank(), step * BACKWARDS + number)).backward()
        optimizer.step()
    kept, last = held(model, units, optimizer), dict(calls.found)
    found, true = sw.full_state_dict(model), weights_alone(size)
    return {
        "apart": max((found[n] - true[n]).abs().max().item() for n in true),
        "calls": last,
        "bytes": kept,
        "share": sum(unit.layout.shard_bytes for unit in units),
        "alone": sum(s.share_bytes for u in units for s in u.layout.segments if s.kept == 1),
    }


def asked_on_grid(mesh: DeviceMesh, cut: str) -> dict[str, Any]:
    """What users ask of a model whose first block is frozen, and whose last one keeps the states of
    its shards on all replicas; all differences from the unsharded model."""
    grid, rank = MESHES[2, 2], mesh.get_local_rank()
    model, reference = net(), net()
    for made in (model, reference):
        made.blocks[0].requires_grad_(False)
    for block in model.blocks:
        zero = 3 if block is model.blocks[-1] else (2, 3)
        sw.fully_shard_flat(block, grid, **{**CUTS[cut], "zero": zero})
    sw.fully_shard_flat(model, grid, **{**CUTS[cut], "zero": (2, 3)})
    loss_of(model, inputs(rank)).backward()
    for each in range(4):
        (loss_of(reference, inputs(each)) / 4).backward()
    true = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    first, other = model.first.weight, reference.first.weight
    found = {
        "norm": abs(local(norm).item() - true.item()),
        "sum": abs(local(first.sum()).item() - other.sum().item()),
        "largest": abs(local(first.max()).item() - other.max().item()),
        "whole": (first.full_tensor() - other).abs().max().item(),
        "gradient": (first.grad.full_tensor() - other.grad).abs().max().item(),
    }
    for each in (model, reference):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=RATE).step()
    x = inputs(0)
    found["stepped"] = (model(x) - reference(x)).abs().max().item()
    alone = cut != "flat"  # torch has no word for ranges of elements
    given = {} if alone and rank else net(seed=7).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=alone)
    set_model_state_dict(model, given, options=options)
    found["given"] = (model(x) - net(seed=7)(x)).abs().max().item()
    buffer = io.BytesIO()
    torch.save(first, buffer)
    buffer.seek(0)
    found["loaded"] = (torch.load(buffer).full_tensor() - first.full_tensor()).abs().max().item()
    twin = copy.deepcopy(model)
    found["copied"] = (twin(x) - model(x)).abs().max().item()
    return found


def written_on_grid(mesh: DeviceMesh, cut: str) -> tuple[float, float]:
    """Whole parameters written at once, and by loading a state: outputs beside the unsharded."""
    model, units, _ = sharded(MESHES[2, 2], **{**CUTS[cut], "zero": (2, 3)})
    other, x = net(seed=6), inputs(0)
    with contextlib.ExitStack() as stack, torch.no_grad():
        for unit in units:
            stack.enter_context(DStorage(unit).unsharded(write=True))
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    first = (model(x) - other(x)).abs().max().item()
    model.load_state_dict(net().state_dict())
    return first, (model(x) - net()(x)).abs().max().item()


# ---- copies beside computing ---------------------------------------------------------------------


class Copied:
    """Copies of a stream up to here, and a note of who waits for them."""

    def __init__(self, log: list[str], copies: str) -> None:
        self.log, self.copies = log, copies

    def wait(self) -> None:
        self.log.append(f"computing waits for {self.copies}")

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.copies}")


class Noted(CopyStream):
    """A stream on a CPU that notes what an accelerator's would do beside computing."""

    def __init__(self, log: list[str], to: str) -> None:
        self.log, self.to = log, to
        self.count = 0

    @contextlib.contextmanager
    def beside_computing(self) -> Iterator[None]:
        self.log.append(f"{self.to} {self.count}")
        yield
        self.log.append("")

    def event(self) -> Any:
        self.count += 1
        return Copied(self.log, f"{self.to} {self.count - 1}")

    def uses(self, tensor: torch.Tensor) -> None:
        self.log.append(f"{self.to} {self.count} uses {tensor.numel()}")


class Layer(nn.Module):
    """Notes when it computes."""

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.log, self.number = log, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(f"forward {self.number}")
        y: torch.Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.log.append(f"backward {self.number}"))
        return y


class LabelsNoted(Probe):
    """Notes what begins to travel."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def collective(self, label: str, nbytes: int) -> None:
        self.log.append(label)


def copies_of_a_step(mesh: DeviceMesh, way: str) -> tuple[list[str], list[str]]:
    """What happens in a step of three offloaded layers, and in a forward without a backward, once
    their order is known."""
    log: list[str] = []
    streams = {to: Noted(log, to) for to in ("device", "host")}
    model = nn.Sequential(*(Layer(log, number) for number in range(3)))
    with (
        patch.object(buffers, "copy_stream", lambda _, to: streams[to]),
        patch.object(gradients, "copy_stream", lambda _, to: streams[to]),
    ):
        how = {"ddp": {"placements": (Replicate(),)}, "zero3": {"reshard_after_forward": True}}
        for layer in model:
            sw.fully_shard_flat(layer, mesh, prefetch=1, **how[way], **OFFLOADED)
        sw.fully_shard_flat(model, mesh, prefetch=1, **OFFLOADED)
        for unit in units_in(model):
            for peers in (unit.comm, unit.comm.shards):
                peers.probe = LabelsNoted(log)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            begin = len(log)
            for stream in streams.values():
                stream.count = 0
            model(torch.ones(2, 4)).sum().backward()
            log.append("step")
            optimizer.step()
            optimizer.zero_grad()
        found.append(log[begin:])
        for _ in range(2):
            begin = len(log)
            streams["device"].count = 0
            with torch.no_grad():
                model(torch.ones(2, 4))
        found.append(log[begin:])
    return found[0], found[1]
