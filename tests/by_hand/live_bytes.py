"""Bytes of plain tensors while some code runs, counted below DTensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of plain tensors on the CPU that were made and are still there, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        found = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(found):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key)

    @property
    def now(self) -> int:
        return sum(self.sizes.values())
