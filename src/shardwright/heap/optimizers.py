"""What an optimizer keeps for a tensor, and what its step takes on the device and gives back.

Every allocation of a step is listed in the order of ``torch.optim`` (torch 2.13), with the lifetime
that its Python names give it: a name that is bound anew still holds its old tensor while the new
one is made, so the loop over tensors and the loop over groups of one dtype both carry one tensor
(or list) over. Kernels allocate nothing more; fused steps nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Literal

import msgspec

from shardwright.core.optimizers import Optimizer
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import StorageChange

Place = Literal["device", "host"]


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of state: an allocation of its own."""

    name: str
    bytes: int
    place: Place = "device"


def states(optimizer: Optimizer, tensor: TensorSpec) -> Iterator[Kept]:
    """Every tensor that is kept for ``tensor``, as the first step makes them."""
    optimizer = optimizer.of(tensor)
    for state in optimizer.kept:
        elements = state.elements(tensor)
        if elements is None:
            continue
        nbytes = elements * element_bytes(state.dtype or optimizer.value_dtype(tensor))
        waits = state.place == "kernel" and not optimizer.fused
        on_host = optimizer.offload or state.place == "host" or waits
        yield Kept(state.name, nbytes, "host" if on_host else "device")


def state_bytes(optimizer: Optimizer, tensor: TensorSpec, place: Place = "device") -> int:
    """Bytes that are kept for ``tensor`` in one place."""
    return sum(each.bytes for each in states(optimizer, tensor) if each.place == place)


def step_temporaries(
    optimizer: Optimizer, tensors: Iterable[TensorSpec]
) -> tuple[StorageChange, ...]:
    """What a step over ``tensors`` takes and frees, in order; all of it is freed in the end.

    ``tensors`` have their local shapes. Muon orthogonalizes whole matrices: give it the shapes of
    what a rank orthogonalizes.
    """
    if optimizer.offload:
        return ()
    parts: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        parts.setdefault(optimizer.of(tensor).name, []).append(tensor)
    changes: list[StorageChange] = []
    for its in parts.values():
        names = _Names()
        part = optimizer.of(its[0])
        part.step(part, its, names)
        changes += names.closed()
    return tuple(changes)


def peak_bytes(changes: Iterable[StorageChange]) -> int:
    """The most that is alive at once."""
    return max(accumulate((change.bytes for change in changes), initial=0))


class _Names:
    """The local names of a step (``core.optimizers.Names``), and what they took and freed."""

    def __init__(self) -> None:
        self._changes: list[StorageChange] = []
        self._held: dict[str, list[StorageChange]] = {}
        self._made = 0

    def bind(self, name: str, *sizes: int) -> None:
        """Make tensors, then let the name hold them instead of what it held."""
        made = self._take(name, sizes)
        self.drop(name)
        self._held[name] = made

    def drop(self, name: str) -> None:
        """The name holds nothing any more."""
        self._free(self._held.pop(name, []))

    def move(self, name: str, to: str) -> None:
        """What ``name`` holds is held by ``to`` instead of what that held."""
        self.drop(to)
        self._held[to] = self._held.pop(name)

    def passing(self, name: str, size: int) -> None:
        """A tensor that an expression makes and no name holds."""
        self._free(self._take(name, (size,)))

    def closed(self) -> list[StorageChange]:
        """Every change, after all names have gone."""
        for name in list(self._held):
            self.drop(name)
        return self._changes

    def _take(self, name: str, sizes: Iterable[int]) -> list[StorageChange]:
        made = []
        for size in sizes:
            self._made += 1
            made.append(StorageChange(f"{name}.{self._made}", size))
        self._changes += made
        return made

    def _free(self, made: list[StorageChange]) -> None:
        self._changes += [each._replace(bytes=-each.bytes) for each in made]
