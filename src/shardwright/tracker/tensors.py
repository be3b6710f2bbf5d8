"""Tensors in what modules take and return; dtypes by the names of ``core/tensor.py``, and back."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.core.tensor import ELEMENT_BYTES, TORCH_NAMES

DEPTH = 4  # of objects in objects, in which tensors are looked for
_NO_CARRIERS = (int, float, complex, str, bytes, type(None), type, nn.Module, ModuleType)


def map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor], value: Any, depth: int = DEPTH
) -> Any:
    """``value`` with every tensor changed: in containers that torch knows, in mappings of any type,
    and in the attributes of objects, dataclasses among them, which are changed in place."""
    if isinstance(value, torch.Tensor):
        return change(value)
    leaves, shape = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        if depth and not isinstance(value, _NO_CARRIERS):
            _map_inside(change, value, depth - 1)
        return value
    return tree_unflatten([map_tensors(change, leaf, depth) for leaf in leaves], shape)


def _map_inside(change: Callable[[torch.Tensor], torch.Tensor], value: Any, depth: int) -> None:
    if isinstance(value, MutableMapping):
        for key in list(value):
            value[key] = map_tensors(change, value[key], depth)
    for name, before in _attributes(value):
        after = map_tensors(change, before, depth)
        if after is not before:
            try:
                setattr(value, name, after)
            except AttributeError:  # frozen
                object.__setattr__(value, name, after)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object has, in a dictionary or in slots."""
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    slots = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).items(), *slots]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor that :func:`map_tensors` would change, in its order."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(take, value)
    return found


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, TORCH_NAMES.get(name, name)) for name in ELEMENT_BYTES
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
