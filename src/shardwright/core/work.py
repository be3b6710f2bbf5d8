"""What a recorded piece computes: sums of its operators, and the shapes of products."""

from __future__ import annotations

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
        # One by one, though some are alike: which are may change with the size of a batch, and a
        # recording between two others is drawn number by number.
        products = self.products + other.products
        return OperatorShapes(products, self.attention + other.attention, self.sent + other.sent)
