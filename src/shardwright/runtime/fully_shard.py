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
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.core.errors import InputError, ShardwrightError, UnsupportedError, expected
from shardwright.core.placement import Placement, Replicate, Shard
from shardwright.core.schedule import Action
from shardwright.runtime.comm import Comm
from shardwright.runtime.dstorage import DStorage, Initial, State, placement_of
from shardwright.runtime.probe import Probe
from shardwright.runtime.torch_private import after_backward, in_backward

_STORAGES: weakref.WeakKeyDictionary[nn.Module, DStorage] = weakref.WeakKeyDictionary()
_OWNERS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_TAKEN: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original parameter -> unit


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
    _refuse_what_is_taken(module, "")
    comm = Comm(mesh)
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    options = (placement, reshard_after_forward, register_hooks)
    comm.agree("fully_shard_flat", {"module": repr(shapes), "options": repr(options)})
    return attach(
        module,
        comm,
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
    _refuse_what_is_taken(module, name)
    originals = list(module.parameters())
    storage = DStorage(
        module,
        comm,
        placement,
        name=name,
        reshard_after_forward=reshard_after_forward,
        driven_by_hand=not register_hooks,
        initial=initial,
    )
    _STORAGES[module] = storage
    unit = name or type(module).__name__
    _OWNERS.update((inner, unit) for inner in _owners_in(module))
    for parameter in originals:
        _TAKEN[parameter] = unit
    if register_hooks:
        hooks = _Hooks(storage)
        module.register_forward_pre_hook(hooks.before_forward)
        module.register_forward_hook(hooks.after_forward, always_call=True)
    return storage


def _refuse_what_is_taken(module: nn.Module, name: str) -> None:
    """A parameter belongs to one unit: no nesting either way, no tying across units."""
    unit = name or type(module).__name__
    owners = _owners_in(module)
    taken = next((_OWNERS[inner] for inner in owners if inner in _OWNERS), None)
    if taken is not None:
        raise UnsupportedError(
            expected(
                f"unit '{unit}'",
                "parameters that are in no other unit",
                f"some of unit '{taken}'",
                "Nested units come with a later version: wrap disjoint modules.",
            )
        )
    for fqn, parameter in module.named_parameters():
        if parameter in _TAKEN:
            raise UnsupportedError(
                expected(
                    f"{fqn} of unit '{unit}'",
                    "a parameter of its own",
                    f"one tied to unit '{_TAKEN[parameter]}'",
                    "Put both in one module and shard that, or untie them.",
                )
            )


def _owners_in(module: nn.Module) -> list[nn.Module]:
    """The modules that have parameters of their own."""
    return [
        inner
        for inner in module.modules()
        if next(inner.parameters(recurse=False), None) is not None
    ]


class _Hooks:
    """When a unit is gathered, reduced and freed. Holds the storage, never the module."""

    def __init__(self, storage: DStorage) -> None:
        self.storage = storage

    @property
    def probe(self) -> Probe:
        return self.storage.comm.probe

    def before_forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        storage = self.storage
        if not in_backward():  # a recomputed forward works on what its backward gathered
            storage.recover()
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
        recomputed = in_backward()
        if output is None:  # the forward raised: leave the unit as it is found between steps
            if not recomputed:
                storage.free()
            return None
        try:
            output = self._marked(output, storage.name or type(module).__name__)
        except ShardwrightError:
            storage.free()
            raise
        self.probe.did(Action("compute", storage.name, "forward"))
        kept = torch.is_grad_enabled() and not storage.reshard_after_forward
        if not (storage.is_replicated or recomputed or kept):
            storage.free()
            self.probe.did(Action("free", storage.name, "forward"))
        return output

    def _marked(self, output: Any, unit: str) -> Any:
        """The output with every tensor of the graph announcing its backward to this unit."""
        found = 0

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            if self.storage.shares_full_buffer(tensor):
                raise InputError(
                    expected(
                        f"output of unit '{unit}'",
                        "tensors of its own",
                        "a view of a parameter",
                        "Return a clone, for the parameter's memory is freed after forward.",
                    )
                )
            if not tensor.requires_grad:
                return tensor
            found += 1
            marked: torch.Tensor = _BeforeBackward.apply(tensor, self)
            return marked

        output = tree_map_only(torch.Tensor, mark, output)
        if torch.is_grad_enabled() and not found:
            raise UnsupportedError(
                expected(
                    f"output of unit '{unit}'",
                    "tensors with gradient, alone or in tuples, lists and dicts",
                    f"a {type(output).__name__} without any",
                    "Return tensors, or run under torch.no_grad().",
                )
            )
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
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hooks.before_backward()
        return gradients[0], None


class _AfterBackward(torch.autograd.Function):
    """Identity on all inputs at once: its backward runs when the unit's gradients are complete."""

    @staticmethod
    def forward(ctx: Any, hooks: _Hooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hooks.after_backward()
        return None, *gradients
