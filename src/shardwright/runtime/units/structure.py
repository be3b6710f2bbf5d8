"""Which modules a unit has, so that a later one with parameters of its own is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.runtime.units.linked import LinkedParameter
from shardwright.runtime.units.parameter import own_modules, plain_name
from shardwright.runtime.units.shard_tensor import ShardTensor
from shardwright.tracker.private import has_still, own_buffers, own_children, own_parameters


class _Row:
    """A module, and what it had. Nothing is kept alive by it.

    Children are known by ``ids``, which are compared in one go in every forward. One that is gone
    may leave its number to another, so ``ids`` are forgotten as soon as one goes.
    """

    __slots__ = ("__weakref__", "children", "ids", "module", "names", "parameters", "path")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = weakref.ref(module)
        self.names = tuple(own_parameters(module))
        self.parameters = len(self.names)
        children = list(own_children(module).values())
        self.ids: list[int] | None = [*map(id, children)]
        gone = partial(_forget, weakref.ref(self))
        self.children = [weakref.ref(child, gone) for child in children if child is not None]


def _forget(row: weakref.ref[_Row], _: object) -> None:
    found = row()
    if found is not None:
        found.ids = None


class Structure:
    """The modules of a unit when it was sharded."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._empty: list[tuple[str, weakref.ref[torch.Tensor], int]] = []

    def add(self, module: nn.Module, path: str, is_taken: Callable[[nn.Module], bool]) -> None:
        """One more module, with what is below it and not of an inner unit."""
        self._rows.extend(_Row(p, m) for p, m in own_modules(module, path, is_taken))

    @contextmanager
    def following_buffers(self) -> Iterator[None]:
        """Modules are moved inside: buffers that leave the meta device, as by ``to_empty``, have
        memory then and no values."""
        before = {place for place, (_, buffer) in self._buffers().items() if buffer.is_meta}
        yield
        now = self._buffers() if before else {}
        for place in before & now.keys():
            path, buffer = now[place]
            if not buffer.is_meta:
                self._empty.append((path, weakref.ref(buffer), buffer._version))

    @property
    def has_empty(self) -> bool:
        """Whether there are buffers that got memory and were not looked at since."""
        return bool(self._empty)

    def without_values(self) -> list[str]:
        """Paths of the buffers that nobody has written or replaced since they got memory; each is
        told once."""
        empty, self._empty = self._empty, []
        shown = {id(buffer) for _, buffer in self._buffers().values()} if empty else ()
        found = [(path, reference(), version) for path, reference, version in empty]
        return [p for p, b, v in found if b is not None and id(b) in shown and b._version == v]

    def _buffers(self) -> dict[tuple[int, str], tuple[str, torch.Tensor]]:
        """Paths and values by module and name."""
        found = {}
        for row in self._rows:
            module = row.module()
            for name, buffer in own_buffers(module).items() if module is not None else ():
                if buffer is not None:
                    path = plain_name(f"{row.path}.{name}" if row.path else name)
                    found[id(module), name] = path, buffer
        return found

    def check(self, unit: str) -> None:
        """Raise InputError for parameters that train and that nothing would shard or reduce: those
        of modules that were added or replaced."""
        for index, row in enumerate(self._rows):
            module = row.module()
            if module is not None and not has_still(module, row.ids, row.parameters):
                _refuse_new(module, row, unit)
                self._rows[index] = _Row(row.path, module)


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
