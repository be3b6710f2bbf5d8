"""Unusual steps of sharded modules, and the gradients after them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gradient_tasks import Net, errors, inputs, loss_of, net, shard
from probe_tasks import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.torch_private import C_GRAD
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.runtime.units.unit import State, Unit

Loss = Callable[[Net, torch.Tensor], torch.Tensor]


@functools.cache
def true_gradients(size: int, loss: Loss = loss_of, times: int = 1) -> dict[str, torch.Tensor]:
    """The mean over ranks of the unsharded gradients, ``times`` over."""
    reference = net()
    for rank in range(size):
        (loss(reference, inputs(rank)) * (times / size)).backward()
    return {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}


def resting(units: list[Unit]) -> bool:
    """Whether every unit has its shard only, and no more memory than that."""
    return all(
        unit.keeps_whole
        or (
            unit.state is State.SHARDED
            and unit.buffers.whole.storage.nbytes() == 0
            and unit.buffers.stage.storage.nbytes() == 0
            and all(g.send.storage.nbytes() == 0 for g in unit.gradients.segments)
            and all(C_GRAD.__get__(whole) is None for whole in unit.buffers.parameters)
        )
        for unit in units
    )


def worst(found: dict[str, tuple[float, bool]]) -> float:
    return max(error for error, _ in found.values())


# ---- recomputation ------------------------------------------------------------------------------


def each_block(reentrant: bool) -> Loss:
    """Every block recomputed on its own."""

    def loss(model: Net, x: torch.Tensor) -> torch.Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.last(x).square().sum()

    return loss


def all_blocks(reentrant: bool) -> Loss:
    """All blocks, which are several units, recomputed at once."""

    def loss(model: Net, x: torch.Tensor) -> torch.Tensor:
        return (
            model.last(
                checkpoint(nn.Sequential(*model.blocks), model.first(x), use_reentrant=reentrant)
            )
            .square()
            .sum()
        )

    return loss


LOSSES: dict[str, Loss] = {
    "each block, reentrant": each_block(True),
    "each block, not reentrant": each_block(False),
    "all blocks, reentrant": all_blocks(True),
    "all blocks, not reentrant": all_blocks(False),
}


class Under(nn.Module):
    """A root whose forward is one of the losses above."""

    def __init__(self, model: Net, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, x)


def recomputed(mesh: DeviceMesh, what: str, half: int | None) -> list[tuple[float, bool]]:
    """The largest error of a step and whether the units rest after, per way of sharding."""
    rank, size = mesh.get_local_rank(), mesh.size()
    true = true_gradients(size)
    found = []
    grid = itertools.product(("flat", "per_param"), (True, False), (0, 1))
    for number, (strategy, reshard, prefetch) in enumerate(grid):
        if half is not None and (number + number // 2 + number // 4) % 2 != half:
            continue
        model = net()
        root = Under(model, LOSSES[what])
        options: dict[str, Any] = {"prefetch": prefetch, "reshard_after_forward": reshard}
        options["shard_strategy"] = strategy
        for block in model.blocks:
            fully_shard_flat(block, mesh, **options)
        fully_shard_flat(root, mesh, **options)
        units = list(units_in(root))
        for _ in range(3):
            for parameter in root.parameters():
                parameter.grad = None
            root(inputs(rank)).backward()
        found.append((worst(errors(units, model, true)), resting(units)))
    return found


# ---- several forwards and backwards -------------------------------------------------------------


def two_forwards(model: Net, x: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x) + model(2 * x).sum()


def forward_only(model: Net, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return loss_of(model, x)


def forward_without_gradients(model: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model(x)
    return loss_of(model, x)


def evaluated_between(model: Net, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    with torch.no_grad():
        model(x)
    return loss


def in_inference_mode(model: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        model(x)
    return loss_of(model, x)


def under_autocast(model: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, x)


def a_block_twice(model: Net, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for block in (*model.blocks, model.blocks[1], model.blocks[0]):
        x = block(x)
    return model.last(x).square().sum()


def a_block_skipped(model: Net, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    return model.last(model.blocks[2](model.blocks[0](x))).square().sum()


class Rooted(nn.Module):
    """A module that computes a loss of a net, as root of its units."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = net()
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net, x)


FORWARDS: dict[str, Loss] = {
    "two forwards": two_forwards,
    "a forward without backward": forward_only,
    "a forward without gradients": forward_without_gradients,
    "an evaluation between": evaluated_between,
    "a forward in inference mode": in_inference_mode,
    "under autocast": under_autocast,
    "a block twice": a_block_twice,
    "a block skipped": a_block_skipped,
}
INSIDE = ("a block twice", "a block skipped")


def odd_forwards(mesh: DeviceMesh, what: str, half: int | None) -> list[tuple[float, bool]]:
    """Two equal steps, per way of sharding."""
    rank, size = mesh.get_local_rank(), mesh.size()
    loss = FORWARDS[what]
    true = dict(true_gradients(size, loss))
    if what == "a block skipped":
        for name, p in net().named_parameters():
            true.setdefault(name, torch.zeros_like(p))
    found = []
    for strategy, reshard, prefetch in ways(half):
        options: dict[str, Any] = {"prefetch": prefetch, "reshard_after_forward": reshard}
        options["shard_strategy"] = strategy
        if what in INSIDE:
            root: nn.Module = Rooted(loss)
            model: Net = root.net  # type: ignore[assignment]
            for block in model.blocks:
                fully_shard_flat(block, mesh, **options)
            fully_shard_flat(root, mesh, **options)
        else:
            model = net()
            shard(model, mesh, strategy, prefetch=prefetch, reshard_after_forward=reshard)
        units = list(units_in(root if what in INSIDE else model))
        for _ in range(2):
            model.zero_grad()
            (root(inputs(rank)) if what in INSIDE else loss(model, inputs(rank))).backward()
        if what == "a block skipped":
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    assert name.startswith("blocks.1.")
                    parameter.grad = torch.zeros_like(parameter)
        found.append((worst(errors(units, model, true)), resting(units)))
    return found


WAYS: tuple[tuple[str, bool | int, int], ...] = (  # strategy, what a forward leaves, prefetch
    ("flat", True, 1),
    ("flat", False, 0),
    ("per_param", False, 1),
    ("per_param", True, 0),
    ("param_boundary", True, 1),
    ("flat", 1, 1),
)


def ways(half: int | None) -> tuple[tuple[str, bool | int, int], ...]:
    """The ways of sharding of the first or of the second half, or all."""
    return WAYS if half is None else WAYS[half::2]


def odd_backwards(mesh: DeviceMesh, what: str, half: int | None) -> list[tuple[float, bool]]:
    """Gradients after an unusual backward, per way of sharding."""
    rank, size = mesh.get_local_rank(), mesh.size()
    times = 2 if what in ("backward twice", "two losses") else 1
    true = true_gradients(size, times=times)
    found = []
    for strategy, reshard, prefetch in ways(half):
        model = net()
        units = shard(model, mesh, strategy, prefetch=prefetch, reshard_after_forward=reshard)
        loss = loss_of(model, inputs(rank))
        if what == "backward twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif what == "two losses":
            other = loss_of(model, inputs(rank))
            loss.backward()
            other.backward()
        elif what == "create graph":
            with warned():
                loss.backward(create_graph=True)
        elif what == "input with gradient":
            model.zero_grad()
            x = inputs(rank).requires_grad_()
            loss_of(model, x).backward()
            reference = net()
            y = inputs(rank).requires_grad_()
            loss_of(reference, y).backward()
            assert x.grad is not None
            assert y.grad is not None
            assert torch.allclose(x.grad, y.grad, atol=1e-6)
        elif what == "no_sync, then another order":
            model.zero_grad()
            with DStorage(units[0]).no_sync():
                loss.backward()
            true_twice = true_gradients(size, times=2)
            loss_of(model, inputs(rank)).backward()
            found.append((worst(errors(units, model, true_twice)), resting(units)))
            continue
        found.append((worst(errors(units, model, true)), resting(units)))
    return found


@contextlib.contextmanager
def warned() -> Iterator[None]:
    """torch warns that create_graph makes cycles."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- exceptions ---------------------------------------------------------------------------------


class Trap(nn.Module):
    """Identity that raises, once, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.set = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.set == "forward":
            self.set = ""
            raise RuntimeError("asked to break")
        if self.set == "backward":
            self.set = ""
            y = x * 1
            y.register_hook(_break)
            return y
        return x


def _break(_: torch.Tensor) -> None:
    raise RuntimeError("asked to break")


PLACES = ("in the first unit", "in the last unit", "between units", "in the root")


def trapped(place: str) -> tuple[Net, Trap]:
    model, trap = net(), Trap()
    if place == "in the first unit":
        model.blocks[0].up = nn.Sequential(model.blocks[0].up, trap)  # type: ignore[assignment]
    elif place == "in the last unit":
        model.blocks[2].up = nn.Sequential(trap, model.blocks[2].up)  # type: ignore[assignment]
    elif place == "between units":
        model.blocks = nn.ModuleList([model.blocks[0], trap, *model.blocks[1:]])
    else:
        model.last = nn.Sequential(model.last, trap)  # type: ignore[assignment]
    return model, trap


def exceptions(
    mesh: DeviceMesh, place: str, when: str, half: int | None
) -> list[tuple[float, bool]]:
    """A step, a broken step, a step: the gradients of the last."""
    rank, size = mesh.get_local_rank(), mesh.size()
    reference, _ = trapped(place)
    for other in range(size):
        (loss_of(reference, inputs(other)) / size).backward()
    true = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = []
    for strategy, reshard, prefetch in ways(half):
        model, trap = trapped(place)
        units = []
        options: dict[str, Any] = {"prefetch": prefetch, "reshard_after_forward": reshard}
        for block in model.blocks:
            if block is not trap:
                fully_shard_flat(block, mesh, shard_strategy=strategy, **options)
        fully_shard_flat(model, mesh, shard_strategy=strategy, **options)
        units = list(units_in(model))
        held = list(model.parameters())
        loss_of(model, inputs(rank)).backward()
        for _ in range(2):
            trap.set = when
            broke = said(lambda: loss_of(model, inputs(rank + 1)).backward())  # noqa: B023
            assert broke == "RuntimeError: asked to break"
        if reshard is True or when == "forward":
            model.zero_grad()
        else:  # of units that were kept the model shows whole parameters: clear as optimizers do
            for parameter in held:
                parameter.grad = None
        loss_of(model, inputs(rank)).backward()
        found.append((worst(errors(units, model, true)), resting(units)))
    return found


def exception_without_root(mesh: DeviceMesh, half: int | None) -> list[tuple[float, bool]]:
    """Units called one by one, never their root: a backward fails, the next step is right."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def loss(model: Net, trap: Trap, x: torch.Tensor) -> torch.Tensor:
        x = model.blocks[0](x)
        return model.blocks[2](trap(model.blocks[1](x))).square().sum()

    reference = net()
    for other in range(size):
        (loss(reference, Trap(), inputs(other, width=5)) / size).backward()
    true = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = []
    for strategy, reshard, prefetch in ways(half):
        model, trap = net(), Trap()
        units = shard(model, mesh, strategy, prefetch=prefetch, reshard_after_forward=reshard)
        for when in ("backward", "forward"):
            trap.set = when
            broke = said(lambda: loss(model, trap, inputs(rank, width=5)).backward())  # noqa: B023
            assert broke == "RuntimeError: asked to break"
            model.zero_grad()
        loss(model, trap, inputs(rank, width=5)).backward()
        blocks = [unit for unit in units if unit is not units[0]]
        found.append((worst(errors(blocks, model, true)), resting(units)))
    return found


# ---- what goes in and comes out -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    weights: dict[str, Any]


class Named(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor


class Exposing(nn.Module):
    """Returns what it computed together with its own parameters and views of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden, weight = self.layer(x), self.layer.weight
        return {
            "parameter": lambda: weight,
            "view": lambda: weight.t()[:2],
            "tuple": lambda: (hidden, weight.view(-1)),
            "list of dict": lambda: [{"hidden": hidden, "weight": weight[1:]}],
            "namedtuple": lambda: Named(hidden, weight.t()),
            "dataclass": lambda: Frozen(hidden, {"deep": [weight.t(), {"bias": self.layer.bias}]}),
            "dict of dataclass": lambda: {"a": Frozen(hidden, {"w": weight.expand(2, 4, 3)})},
        }[self.kind]()


KINDS = ("parameter", "view", "tuple", "list of dict", "namedtuple", "dataclass")
KINDS += ("dict of dataclass",)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def exposed(mesh: DeviceMesh, kind: str) -> list[Any]:
    """Values and gradients of a loss over everything that a module returned."""
    rank, size = mesh.get_local_rank(), mesh.size()
    reference = Exposing(kind)
    for other in range(size):
        parts = tensors_in(reference(inputs(other)))
        (sum(t.square().sum() for t in parts) / size).backward()  # type: ignore[union-attr]
    true = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    wanted = [t.detach() for t in tensors_in(reference(inputs(rank)))]
    found = []
    for strategy in ("flat", "per_param", "param_boundary"):
        module = Exposing(kind)
        unit = fully_shard_flat(module, mesh, shard_strategy=strategy).unit
        returned = list(tensors_in(module(inputs(rank))))
        assert unit.state is State.SHARDED
        same = all(torch.equal(a, b) for a, b in zip(returned, wanted, strict=True))
        outside = not any(unit.shares_full_buffer(t) for t in returned)
        sum(t.square().sum() for t in returned).backward()  # type: ignore[union-attr]
        for name, parameter in module.named_parameters():
            true.setdefault(name, torch.zeros(reference.get_parameter(name).shape))
            assert (parameter.grad is None) == (reference.get_parameter(name).grad is None)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        found.append((worst(errors([unit], module, true)), same, outside))
    return found
