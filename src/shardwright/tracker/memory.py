"""Every live storage of this process's tensors, its kind, and the peak of each phase.

A dispatch mode sees each new tensor below autograd; a storage counts once however many views it
has, from its first tensor until it is freed or resized to nothing. Memory inside one kernel, the
interpreter and the allocator's own are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwright.core.timeline import Kind, Phase

_DEFAULT: dict[str, Kind] = {
    "exchange_ids": "communication",
    "lookup": "communication",
    "exchange_rows": "communication",
    "forward": "activation",
    "load": "input",
}


class MemoryTracker(TorchDispatchMode):
    """Use as a context; ``adopt`` what was there before, ``phase`` what follows.

    ``peaks`` maps a phase to live bytes by kind at the moment its total was largest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "setup"  # also what happens between phases
        self.live: dict[Kind, int] = {}
        self.total = 0
        self.peaks: dict[Phase, dict[Kind, int]] = {}
        self.highest: dict[Phase, int] = {}
        self._known: dict[int, tuple[Kind, int]] = {}
        self._finalizers: dict[int, weakref.finalize] = {}
        self._resize: Callable[..., Any] | None = None

    def adopt(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Count the storage of ``tensor`` as ``kind``, whatever it counted as before."""
        self._note(tensor.untyped_storage(), kind)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """New storages and peaks belong to ``phase`` inside."""
        outer, self.phase = self.phase, phase
        self._mark_peak()
        try:
            yield
        finally:
            self.phase = outer
            self._mark_peak()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Run the operation and count the storages of what it returns."""
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                kind, size = self._known.get(storage._cdata, (None, -1))
                if size != storage.nbytes():  # new, or grown by an out= argument
                    self._note(storage, kind or _DEFAULT.get(self.phase, "temporary"))
        return result

    def __enter__(self) -> MemoryTracker:
        original = torch.UntypedStorage.resize_
        self._resize = original

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._known:
                self._note(storage, self._known[storage._cdata][0])
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        super().__exit__(*exception)

    def close(self) -> None:
        """Stop following storages; the tracker is not used again."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()

    def _note(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            self._change(key, -self._known[key][1])
        else:
            self._finalizers[key] = weakref.finalize(storage, self._freed, key)
        self._known[key] = (kind, size)
        self._change(key, size)

    def _freed(self, key: int) -> None:
        self._change(key, -self._known[key][1])
        del self._known[key]
        self._finalizers.pop(key, None)

    def _change(self, key: int, size: int) -> None:
        kind = self._known[key][0]
        self.live[kind] = self.live.get(kind, 0) + size
        self.total += size
        if size > 0:
            self._mark_peak()

    def _mark_peak(self) -> None:
        if self.total > self.highest.get(self.phase, -1):
            self.highest[self.phase] = self.total
            self.peaks[self.phase] = {kind: n for kind, n in self.live.items() if n}
