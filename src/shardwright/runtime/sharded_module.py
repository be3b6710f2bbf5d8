"""What can be said to a sharded module: the methods that FSDP2 gives its modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.runtime.units.dstorage import (
    divide_factor,
    get_dstorage,
    register,
    storages_of,
    units_in,
    units_of,
)
from shardwright.runtime.units.rebind import start_gather
from shardwright.runtime.units.unit import Unit
from shardwright.tracker.private import own_buffers


class ShardedModule:
    """Mixed into the class of every module that ``fully_shard_flat`` or ``apply`` has sharded.

    ``isinstance(module, ShardedModule)`` finds such modules. Settings with ``recurse`` hold for all
    units below; :class:`DStorage` has those that hold for the whole model. A copy (``deepcopy``) is
    a sharded model of its own, on the same ranks.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit (collective); with ``async_op`` only begin to."""
        for storage in storages_of(self):  # type: ignore[arg-type]
            if not async_op:
                storage.unshard()
            elif not storage.unit.is_present:
                start_gather(storage.unit)
        return UnshardHandle(_own(self)) if async_op else None

    def reshard(self) -> None:
        """Free this module's own unit; driven by hand also reduce gradients."""
        for storage in storages_of(self):  # type: ignore[arg-type]
            storage.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce gradients; else they are held, whole, until one does."""
        for unit in _units(self, recurse):
            unit.take_settings(bool(requires_gradient_sync))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside hold the gradients of all units of the model back, as DDP's do."""
        return _own(self)[0].flow.no_sync()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards sum gradients over replicas, too; else their sums over shards are kept
        until one does. What is cut over replicas as well, or whole on all ranks, is held whole."""
        for unit in _units(self, recurse):
            unit.over_replicas = bool(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted and not needed: a backward leaves nothing that a later one would have to end."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters go after a forward and are gathered again in the backward."""
        for unit in _units(self, recurse):
            unit.reshard_after_forward = bool(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full parameters go after a backward. Kept ones serve the next forward, until the
        weights change."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: this unit's backward does without its parameters, as that of an embedding."""
        for unit in _own(self):
            unit.unshard_in_backward = bool(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The sharded modules to gather while this one computes its forward, instead of those that
        came next last time."""
        _own(self)[0].set_ahead("forward", _sharded(modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The same for its backward."""
        _own(self)[0].set_ahead("backward", _sharded(modules))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of all units below by ``factor`` instead of the number of
        ranks."""
        for unit in _units(self, recurse=True):
            unit.take_settings(divisor=divide_factor(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted and not needed: reductions are sums on every backend."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted; buffers stay those of the unit, which are resized and never allocated anew."""

    def set_post_optim_event(self, event: Any) -> None:
        """Wait for ``event`` of an optimizer on another stream before the next forward."""
        _own(self)[0].flow.after = event

    def set_all_reduce_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: sums over replicas are part of the reduction."""
        raise _refused("set_all_reduce_hook")

    def set_custom_all_gather(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the ways of a collective are chosen by measurement."""
        raise _refused("set_custom_all_gather")

    def set_custom_reduce_scatter(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the ways of a collective are chosen by measurement."""
        raise _refused("set_custom_reduce_scatter")

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """What torch's ``to``, ``to_empty`` and casts do with a module and those inside of it."""
        with _own(self)[0].structure.following_buffers():
            return super()._apply(*arguments, **keywords)  # type: ignore[misc]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """A new module of the class, as a slice of a container is, is not sharded."""
        # The class that the module had: model[1:] makes a container of type(model), which would be
        # one without a unit.
        plain = cls.__mro__[2]
        made = plain.__new__(plain)
        made.__init__(*arguments, **keywords)  # type: ignore[misc]
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        units = _own(self)
        # What a pass has left is of this model, and no copy is in that pass.
        units[0].flow.recover()
        made = object.__new__(self.__class__)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        copies = [copy.deepcopy(unit, memo) for unit in units]
        for copied in copies:
            register(made, copied)  # type: ignore[arg-type]
        copies[0].structure.add(made, "", lambda m: m is not made and get_dstorage(m) is not None)  # type: ignore[arg-type]
        return made

    def __reduce__(self) -> NoReturn:
        storages_of(self)[0].__reduce__()  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__reduce__()


class UnshardHandle:
    """A gather under way."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Until the unit is there."""
        for unit in self._units:
            unit.finish_gather()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Let buffers be where the ranks compute, as parameters are; those on the meta device stay."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, buffer in own_buffers(part).items():
            if buffer is None or buffer.device.type in (device.type, "meta"):
                continue
            # One that two modules share stays one.
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            own_buffers(part)[name] = moved[id(buffer)]


def as_sharded(module: nn.Module) -> None:
    """Mix ``ShardedModule`` into the class of ``module``, whose name gets 'Sharded' before it."""
    mix_in(module, ShardedModule, f"Sharded{type(module).__name__}")


def class_name(module: nn.Module) -> str:
    """The name of the class that the module had before it was sharded."""
    kind = type(module)
    return (kind.__mro__[2] if isinstance(module, ShardedModule) else kind).__name__


def mix_in(module: nn.Module, methods: type, name: str, **more: Any) -> None:
    """Put ``methods`` before those of the class of ``module``, unless it has them: one class
    called ``name``, with ``more`` in it, for all modules of a class."""
    kind = type(module)
    if not isinstance(module, methods):
        # One class for all modules of a class: isinstance and type comparisons among them hold, and
        # torch.compile guards on types.
        if (methods, kind) not in _CLASSES:
            _CLASSES[methods, kind] = type(name, (methods, kind), more)
        module.__class__ = _CLASSES[methods, kind]


_CLASSES: dict[tuple[type, type], type] = {}


def _own(module: Any) -> list[Unit]:
    found = units_of(module)
    assert found, "a sharded module has a unit"
    return found


def _sharded(modules: Sequence[nn.Module]) -> list[Unit]:
    for module in modules:
        if not storages_of(module):
            raise InputError("modules to prefetch", "sharded modules", f"a {type(module).__name__}")
    return [unit for module in modules for unit in units_of(module)]


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
    yield from units_in(module) if recurse else _own(module)


def _refused(name: str) -> UnsupportedError:
    wanted = "no such hook; storage.comm.paths has the ways of collectives"
    return UnsupportedError(name, wanted, "one")
