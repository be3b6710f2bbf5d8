"""Which module has which storage. Neither keeps the other alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from shardwright.runtime.units.dstorage import DStorage

_STORAGES: weakref.WeakKeyDictionary[nn.Module, DStorage] = weakref.WeakKeyDictionary()
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, DStorage] = weakref.WeakKeyDictionary()


def get_dstorage(module: nn.Module) -> DStorage | None:
    """The storage attached to ``module`` itself, or None."""
    return _STORAGES.get(module)


def register(module: nn.Module, storage: DStorage) -> None:
    """Attach ``storage`` to ``module``."""
    _STORAGES[module] = storage
    for inner in module.modules():
        _HOLDERS.setdefault(inner, storage)


def holder_of(module: nn.Module) -> DStorage | None:
    """The storage whose unit ``module`` is a part of, the innermost one, or None."""
    return _HOLDERS.get(module)


def storages_in(module: nn.Module) -> Iterator[DStorage]:
    """The storages of ``module`` and of every module below it, each once, in module order."""
    seen: set[int] = set()
    for inner in module.modules():
        storage = _STORAGES.get(inner)
        if storage is not None and id(storage) not in seen:
            seen.add(id(storage))
            yield storage
