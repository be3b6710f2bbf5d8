"""Bytes of a unit under FSDP2 on one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.memory.machine import Sharding


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Buffers: ``gathered`` from ``cast`` shares and copied out to ``unsharded``, beside which
    ``copied`` more are alive meanwhile; ``reduced`` to ``scattered``, the share where its dtype is
    not the parameters', and to ``gradient``. ``stored`` is the share of the parameters, ``narrow``
    what a rank keeps of the whole ones where few share them after their forward, and ``narrowing``
    what is there beside while it is copied. ``accumulated`` are gradients in the dtype they are
    reduced in, 0 where autograd makes them in it, and ``accumulating`` what is there beside while
    they are cast. ``last`` and ``last_accumulated`` are gradients of the last parameter, ``turned``
    the same where it is copied before, for it is cut along another dimension."""

    gathered: int
    cast: int
    unsharded: int
    copied: int
    reduced: int
    scattered: int
    gradient: int
    stored: int
    narrow: int
    narrowing: int
    accumulated: int
    accumulating: int
    last: int
    last_accumulated: int
    turned: int


def cut_dim(tensor: TensorSpec, shards: int, *, experts: bool = False) -> int:
    """The dimension that is cut: the first, but the second of stacked matrices that are fewer than
    the ranks where a unit has nothing but ``experts``, as TorchTitan does it beside expert
    parallelism (its ``apply_fsdp``)."""
    return int(experts and len(tensor.shape) > 2 and tensor.shape[0] < shards)


def local_chunk(tensor: TensorSpec, shards: int, *, experts: bool = False) -> TensorSpec:
    """What the first of ``shards`` ranks holds of a tensor, which is cut in ceiling chunks."""
    if not tensor.shape or shards == 1:
        return tensor
    dim, shape = cut_dim(tensor, shards, experts=experts), list(tensor.shape)
    shape[dim] = -(-shape[dim] // shards)
    return msgspec.structs.replace(tensor, shape=tuple(shape))


def unit_sizes(
    tensors: Sequence[TensorSpec],
    sharding: Sharding,
    shards: int,
    *,
    experts: bool = False,
    frozen: Collection[str] = (),
) -> UnitSizes:
    """Bytes that a unit of ``tensors`` has on a rank; ``experts``: it has nothing else."""
    sized = [(tensor, local_chunk(tensor, shards, experts=experts).numel) for tensor in tensors]
    whole = [n * shards * sharding.computed(t) for t, n in sized]
    casts = [n * sharding.computed(t) if sharding.casts(t) else 0 for t, n in sized]
    if sharding.offload:  # on its way from the host in the dtype it is stored in
        casts = [
            cast or n * element_bytes(t.dtype) for cast, (t, n) in zip(casts, sized, strict=True)
        ]
    trained = [(t, n) for t, n in sized if t.fqn not in frozen]
    shared = sum(n * sharding.reduced(t) for t, n in trained)
    kept = sum(n * element_bytes(t.dtype) for t, n in trained)
    grads = [t.numel * sharding.computed(t) for t, _ in trained]
    sums = [t.numel * sharding.reduced(t) for t, _ in trained]
    accumulates = grads != sums
    several = shards > 1 and bool(tensors)
    # what is not cut along its first dimension is put together from a copy
    turned = [cut_dim(tensor, shards, experts=experts) for tensor in tensors]
    moved = sum(size for size, dim in zip(whole, turned, strict=True) if dim)
    few = sharding.ranks_after_forward
    narrow = [size // few for size in whole] if few else []
    return UnitSizes(
        gathered=sum(whole) if several else 0,
        cast=sum(casts) if several else 0,
        unsharded=sum(whole),
        copied=moved if several else _beside(casts, whole),
        reduced=shared * shards,
        scattered=shared if shared != kept else 0,
        gradient=kept,
        stored=sum(n * element_bytes(t.dtype) for t, n in sized),
        narrow=sum(narrow),
        narrowing=_beside_new(whole, narrow) if few else 0,
        accumulated=sum(sums) if accumulates else 0,
        accumulating=_beside_new(grads, sums) if accumulates else 0,
        # a loop variable of foreach_reduce keeps the last gradient until it returns
        last=grads[-1] if several and trained else 0,
        last_accumulated=sums[-1] if several and trained else 0,
        turned=grads[-1] if several and trained and turned[-1] else 0,
    )


def _beside(casts: Sequence[int], whole: Sequence[int]) -> int:
    """What is alive at most beside all of ``whole`` while one after the other is copied from its
    cast, whose name is bound anew before the one before goes."""
    most = before = done = 0
    for cast, copy in zip(casts, whole, strict=True):
        most = max(most, done + before + cast - sum(whole), done + copy + cast - sum(whole))
        done, before = done + copy, cast
    return most


def _beside_new(old: Sequence[int], new: Sequence[int]) -> int:
    """What is alive at most beside all of ``new`` while they are made of ``old``, each of which
    goes before the next is made."""
    live, most = sum(old), 0
    for gone, made in zip(old, new, strict=True):
        live += made
        most = max(most, live - sum(new))
        live -= gone
    return most
