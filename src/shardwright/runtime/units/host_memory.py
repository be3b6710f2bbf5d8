"""Memory of the host beside that of an accelerator, and copies between them while it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch


class CopyStream:
    """What copies of one direction are queued on, apart from what an accelerator computes.

    Memory that is taken inside of ``beside_computing`` may be freed once computing waits for what
    was queued there: whoever takes it again comes from there too, behind that.
    """

    def __init__(self, device: torch.device) -> None:
        self._of: Any = torch.get_device_module(device)
        self.stream: Any = self._of.Stream()

    @contextmanager
    def beside_computing(self) -> Iterator[None]:
        """Copies and collectives inside follow what was computed so far; what is computed from now
        on does not wait for them."""
        self.stream.wait_stream(self._of.current_stream())
        with self._of.stream(self.stream):
            yield

    def event(self) -> torch.Event | None:
        """What happens when all that was queued so far is done: computing (``wait``) or the host
        (``synchronize``) waits for it. None where nothing is to wait for."""
        event: torch.Event = self.stream.record_event()
        return event

    def uses(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor`` is not given to others before what was queued so far is done."""
        tensor.record_stream(self.stream)


class _InOrder(CopyStream):
    """A CPU does everything in turn: a copy is done when the call returns."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def beside_computing(self) -> Iterator[None]:
        yield

    def event(self) -> None:
        return None

    def uses(self, tensor: torch.Tensor) -> None:
        pass


IN_ORDER = _InOrder()


def copy_stream(device: torch.device, to: Literal["device", "host"]) -> CopyStream:
    """The stream for copies from host memory ``to`` an accelerator or back, one of each for every
    device, as both directions have their own engine."""
    if device.type in ("cpu", "meta"):
        return IN_ORDER
    index = device.index
    if index is None:
        index = torch.get_device_module(device).current_device()
    return _stream(device.type, index, to)


@cache
def _stream(kind: str, index: int, to: str) -> CopyStream:
    del to  # one of each
    return CopyStream(torch.device(kind, index))


def shard_room(nbytes: int, device: torch.device, *, offloaded: bool) -> torch.Tensor:
    """Zeros for a shard beside what ``device`` computes with: there, or in host memory, from where
    it is copied without waiting."""
    if not offloaded or device.type in ("cpu", "meta"):
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    # Only pinned memory is copied while the host goes on.
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
