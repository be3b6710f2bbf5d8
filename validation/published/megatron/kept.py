"""What a block of a layer keeps for its backward, and what it needs for a moment."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import msgspec


class Kept(msgspec.Struct, frozen=True):
    """A tensor that lives from the forward of a block to its backward. ``module`` is the name by
    which ``recompute-modules`` and ``offload-modules`` drop it (empty = by none)."""

    name: str
    bytes: int
    module: str = ""


class BlockMemory(msgspec.Struct, frozen=True):
    """A block: its input, what it keeps beside it, and the most that is alive on top of both
    while it runs forward and backward."""

    block: str
    input: int
    kept: tuple[Kept, ...]
    forward_extra: int
    backward_extra: int

    @property
    def saved(self) -> int:
        """Bytes that stay from forward to backward, the input among them."""
        return self.input + sum(tensor.bytes for tensor in self.kept)

    def without(self, modules: Iterable[str]) -> BlockMemory:
        """The block where the tensors of ``modules`` are made again in the backward: they are
        alive then, and no longer before."""
        dropped = set(modules)
        stays = tuple(tensor for tensor in self.kept if tensor.module not in dropped)
        again = self.saved - self.input - sum(tensor.bytes for tensor in stays)
        return BlockMemory(
            self.block,
            self.input,
            stays,
            self.forward_extra + again,
            self.backward_extra + again,
        )


def size(elements: int | Fraction, width: int | Fraction) -> int:
    """Bytes of a tensor, rounded up."""
    value = Fraction(elements) * Fraction(width)
    return -(-value.numerator // value.denominator)
