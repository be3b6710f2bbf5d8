"""``fully_shard_flat``: wrap a module so that its parameters live as one flat, sharded buffer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.placement import Placement, Replicate, Shard
from shardwright.core.schedule import Action
from shardwright.runtime.comm import Comm
from shardwright.runtime.dstorage import DStorage, Initial, State, placement_of
from shardwright.runtime.probe import Probe
from shardwright.runtime.torch_private import after_backward

_STORAGES: weakref.WeakKeyDictionary[nn.Module, DStorage] = weakref.WeakKeyDictionary()


def get_dstorage(module: nn.Module) -> DStorage | None:
    """The storage attached to ``module`` itself, or None."""
    return _STORAGES.get(module)


def fully_shard_flat(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: tuple[Placement | TorchPlacement, ...] = (Shard(0),),
    reshard_after_forward: bool = True,
    register_hooks: bool = True,
    shard_strategy: str = "per_param",
    shard_placement_fn: Callable[[str, nn.Parameter], Placement] | None = None,
) -> DStorage:
    """Shard all parameters of ``module`` over a 1-D ``mesh`` as one flat buffer.

    This version carries out ``shard_strategy="flat"`` in fp32, and ``(Replicate(),)``; every other
    request raises :class:`UnsupportedError` naming what is supported. torch's own placements are
    accepted. With ``register_hooks=False`` the caller drives ``unshard()`` and ``reshard()``.
    """
    if shard_placement_fn is not None:
        raise UnsupportedError(
            expected("shard_placement_fn", "None", "a function", "Use shard_strategy='flat'.")
        )
    wanted = tuple(_ours(placement) for placement in placements)
    if wanted not in ((Shard(0),), (Replicate(),)):
        raise UnsupportedError(
            expected("placements", "(Shard(0),) or (Replicate(),)", repr(placements))
        )
    placement = wanted[0] if wanted == (Replicate(),) else placement_of(shard_strategy)
    return attach(
        module,
        Comm(mesh),
        placement,
        name="",
        reshard_after_forward=reshard_after_forward,
        register_hooks=register_hooks,
    )


def _ours(placement: Placement | TorchPlacement) -> Placement:
    """torch's placement as the torch-free one of the same name."""
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    if isinstance(placement, TorchPlacement):
        raise UnsupportedError(expected("placements", "Shard or Replicate", repr(placement)))
    return placement


def attach(
    module: nn.Module,
    comm: Comm,
    placement: Placement,
    *,
    name: str,
    reshard_after_forward: bool = True,
    register_hooks: bool = True,
    initial: Initial | None = None,
) -> DStorage:
    """What ``fully_shard_flat`` and ``apply`` share: build the storage and its hooks."""
    for inner in module.modules():
        if inner in _STORAGES:
            raise UnsupportedError(
                expected(
                    f"unit '{name or type(module).__name__}'",
                    "a module with no sharded unit inside",
                    f"'{_STORAGES[inner].name or type(inner).__name__}' inside it",
                    "Nested units come with a later version: wrap disjoint modules.",
                )
            )
    storage = DStorage(
        module,
        comm,
        placement,
        name=name,
        reshard_after_forward=reshard_after_forward,
        initial=initial,
    )
    _STORAGES[module] = storage
    if register_hooks:
        hooks = _Hooks(storage)
        module.register_forward_pre_hook(hooks.before_forward)
        module.register_forward_hook(hooks.after_forward, always_call=True)
    return storage


class _Hooks:
    """When a unit is gathered, reduced and freed. Holds the storage, never the module."""

    def __init__(self, storage: DStorage) -> None:
        self.storage = storage

    @property
    def probe(self) -> Probe:
        return self.storage.comm.probe

    def before_forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        storage = self.storage
        if not storage.is_replicated:
            storage.unshard()
            self.probe.did(Action("gather", storage.name, "forward"))
        leaves, shape = tree_flatten(arguments)
        spots = [i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.requires_grad]
        if not (torch.is_grad_enabled() and spots):
            return None
        marked = _AfterBackward.apply(self, *(leaves[i] for i in spots))
        for i, tensor in zip(spots, marked, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, shape)

    def after_forward(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        storage = self.storage
        if output is None:  # the forward raised: leave the unit as it is found between steps
            storage.free()
            return None

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if storage.shares_full_buffer(tensor):
                raise InputError(
                    expected(
                        f"output of unit '{storage.name or type(module).__name__}'",
                        "tensors of its own",
                        "a view of a parameter",
                        "Return a clone, for the parameter's memory is freed after forward.",
                    )
                )
            if not tensor.requires_grad:
                return tensor
            marked: torch.Tensor = _BeforeBackward.apply(tensor, self)
            return marked

        self.probe.did(Action("compute", storage.name, "forward"))
        output = tree_map_only(torch.Tensor, mark, output)
        training = torch.is_grad_enabled()
        if not storage.is_replicated and (storage.reshard_after_forward or not training):
            storage.free()
            self.probe.did(Action("free", storage.name, "forward"))
        return output

    def before_backward(self) -> None:
        storage = self.storage
        if storage.state is State.SHARDED:
            storage.unshard()
            self.probe.did(Action("gather", storage.name, "backward", "backward"))
        storage.prepare_gradient()
        after_backward(self.after_backward)

    def after_backward(self) -> None:
        storage = self.storage
        if storage._full_gradient is None:
            return
        self.probe.did(Action("compute", storage.name, "backward", "backward"))
        storage.reduce()
        if not storage.is_replicated:
            storage.free()
            self.probe.did(Action("free", storage.name, "reduce", "backward"))


class _BeforeBackward(torch.autograd.Function):
    """Identity on an output; its backward is the first thing a unit sees of a backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, hooks: _Hooks) -> torch.Tensor:
        ctx.hooks = hooks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hooks.before_backward()
        return gradients[0], None


class _AfterBackward(torch.autograd.Function):
    """Identity on all inputs at once: its backward runs when the unit's gradients are complete."""

    @staticmethod
    def forward(ctx: Any, hooks: _Hooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hooks.after_backward()
        return None, *gradients
