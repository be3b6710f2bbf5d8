"""What a recorded piece computes: sums of its operators, and the shapes of products."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import msgspec


class Product(msgspec.Struct, frozen=True, array_like=True):
    """``calls`` of a product of matrices [m, k] x [k, n] in ``dtype``."""

    dtype: str
    m: int
    n: int
    k: int
    calls: int = 1

    @property
    def flops(self) -> int:
        """Of all calls: a multiplication and an addition each."""
        return 2 * self.m * self.n * self.k * self.calls


class AttentionCalls(msgspec.Struct, frozen=True, array_like=True):
    """``calls`` of an attention kernel in ``dtype``, each of ``flops`` that are not masked."""

    dtype: str
    head_dim: int
    flops: int
    calls: int = 1


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """``calls`` of a collective among the ranks of a degree of parallelism, ``group``; ``nbytes``
    is what one rank's full buffer holds, as in :mod:`shardwright.cost.network`."""

    collective: str
    group: str
    nbytes: int
    calls: int = 1


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Operators that run: how many, the FLOPs of products, and the bytes that all others read and
    write."""

    calls: int = 0
    flops: int = 0
    moved: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.calls + other.calls, self.flops + other.flops, self.moved + other.moved)


class OperatorShapes(msgspec.Struct, frozen=True, array_like=True):
    """Of a piece's work what its seconds depend on beyond sums: products and attention by shape and
    dtype, and what is ``sent`` to ranks that compute the same layers."""

    products: tuple[Product, ...] = ()
    attention: tuple[AttentionCalls, ...] = ()
    sent: tuple[Sent, ...] = ()

    def __add__(self, other: OperatorShapes) -> OperatorShapes:
        return OperatorShapes(
            _counted(self.products, other.products),
            _counted(self.attention, other.attention),
            _counted(self.sent, other.sent),
        )


_Call = TypeVar("_Call", bound=Product | AttentionCalls | Sent)


def _counted(some: tuple[_Call, ...], more: tuple[_Call, ...]) -> tuple[_Call, ...]:
    """Calls of both; those that are alike but for how many they are stand there once."""
    if not some or not more:
        return some or more
    found: Counter[_Call] = Counter()
    for each in (*some, *more):
        found[msgspec.structs.replace(each, calls=1)] += each.calls
    return tuple(msgspec.structs.replace(each, calls=calls) for each, calls in found.items())
