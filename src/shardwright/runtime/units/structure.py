"""Which modules a unit has, so that a later one with parameters of its own is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.runtime.units.linked import LinkedParameter
from shardwright.runtime.units.parameter import own_modules, plain_name
from shardwright.runtime.units.shard_tensor import ShardTensor
from shardwright.tracker.private import own_children, own_parameters


class _Row(NamedTuple):
    """A module, and what it had. Nothing is kept alive by it."""

    path: str
    module: weakref.ref[nn.Module]
    children: tuple[weakref.ref[nn.Module] | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, path: str, module: nn.Module) -> _Row:
        children = tuple(c if c is None else weakref.ref(c) for c in own_children(module).values())
        return cls(path, weakref.ref(module), children, tuple(own_parameters(module)))

    def is_as_before(self, module: nn.Module) -> bool:
        children = own_children(module)
        if len(children) != len(self.children) or len(own_parameters(module)) != len(self.names):
            return False
        pairs = zip(children.values(), self.children, strict=True)
        return all(now is (then and then()) for now, then in pairs)


class Structure:
    """The modules of a unit when it was sharded."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(self, module: nn.Module, path: str, is_taken: Callable[[nn.Module], bool]) -> None:
        """One more module, with what is below it and not of an inner unit."""
        self._rows.extend(_Row.of(p, m) for p, m in own_modules(module, path, is_taken))

    def check(self, unit: str) -> None:
        """Raise InputError for parameters that train and that nothing would shard or reduce: those
        of modules that were added or replaced."""
        for index, row in enumerate(self._rows):
            module = row.module()
            if module is not None and not row.is_as_before(module):
                _refuse_new(module, row, unit)
                self._rows[index] = _Row.of(row.path, module)


def _refuse_new(module: nn.Module, before: _Row, unit: str) -> None:
    found: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in own_parameters(module).items()
        if parameter is not None and name not in before.names
    }
    for name, child in own_children(module).items():
        if child is not None:
            found.update(child.named_parameters(name))
    for name, parameter in found.items():
        if parameter.requires_grad and not isinstance(parameter, ShardTensor | LinkedParameter):
            path = plain_name(f"{before.path}.{name}" if before.path else name)
            raise InputError(
                expected(
                    f"{path} of unit '{unit}'",
                    "a parameter that was there when the unit was sharded",
                    "a new one that trains, which nothing would shard or reduce",
                    "Change modules before sharding them; freeze what shall not train.",
                )
            )
