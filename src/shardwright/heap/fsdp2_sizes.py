"""Bytes of a unit under FSDP2 on one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from shardwright.core.tensor import TensorSpec
from shardwright.heap.machine import Sharding


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


@dataclass(frozen=True, slots=True)
class _Parameter:
    """Bytes of a parameter: ``whole`` with the padding of equal shares, its share as it is ``cast``
    before it is sent (0 where it is not), ``stored`` and ``summed``; its full ``gradient`` as
    autograd makes it, and in the dtype of sums (``total``)."""

    whole: int
    cast: int
    stored: int
    summed: int
    gradient: int
    total: int
    turned: bool  # not cut along its first dimension, so put together from a copy
    trained: bool


def unit_sizes(
    tensors: Sequence[TensorSpec],
    sharding: Sharding,
    shards: int,
    *,
    experts: bool = False,
    frozen: Collection[str] = (),
) -> UnitSizes:
    """Bytes that a unit of ``tensors`` has on a rank; ``experts``: it has nothing else."""
    chunks = [local_chunk(tensor, shards, experts=experts) for tensor in tensors]
    parameters = [
        _Parameter(
            whole=chunk.numel * shards * sharding.computed(tensor),
            cast=_cast(chunk, sharding),
            stored=chunk.nbytes,
            summed=chunk.numel * sharding.reduced(tensor),
            gradient=tensor.numel * sharding.computed(tensor),
            total=tensor.numel * sharding.reduced(tensor),
            turned=bool(cut_dim(tensor, shards, experts=experts)),
            trained=tensor.fqn not in frozen,
        )
        for tensor, chunk in zip(tensors, chunks, strict=True)
    ]
    trained = [parameter for parameter in parameters if parameter.trained]
    several = shards > 1 and bool(tensors)
    gathered, cast, copied = _gathering(parameters, several)
    narrow, narrowing = _narrowing(parameters, sharding.ranks_after_forward)
    accumulated, accumulating = _accumulation(trained)
    scattered = sum(parameter.summed for parameter in trained)
    gradient = sum(parameter.stored for parameter in trained)
    # a loop variable of foreach_reduce keeps the last gradient until it returns
    last = trained[-1] if several and trained else None
    return UnitSizes(
        gathered=gathered,
        cast=cast,
        unsharded=sum(parameter.whole for parameter in parameters),
        copied=copied,
        reduced=scattered * shards,
        scattered=scattered if scattered != gradient else 0,
        gradient=gradient,
        stored=sum(parameter.stored for parameter in parameters),
        narrow=narrow,
        narrowing=narrowing,
        accumulated=accumulated,
        accumulating=accumulating,
        last=last.gradient if last else 0,
        last_accumulated=last.total if last else 0,
        turned=last.gradient if last and parameters[-1].turned else 0,
    )


def _cast(chunk: TensorSpec, sharding: Sharding) -> int:
    """A share as it is sent, where that is not what the rank keeps: cast, or on its way from the
    host in the dtype it is stored in."""
    if sharding.casts(chunk):
        return chunk.numel * sharding.computed(chunk)
    return chunk.nbytes if sharding.offload else 0


def _gathering(parameters: Sequence[_Parameter], several: bool) -> tuple[int, int, int]:
    """What is gathered, cast, and copied beside the whole parameters; ``several`` ranks gather."""
    whole = [parameter.whole for parameter in parameters]
    casts = [parameter.cast for parameter in parameters]
    if not several:
        return 0, 0, _beside(casts, whole)
    moved = sum(parameter.whole for parameter in parameters if parameter.turned)
    return sum(whole), sum(casts), moved


def _narrowing(parameters: Sequence[_Parameter], ranks: int) -> tuple[int, int]:
    """What a rank keeps after a forward where ``ranks`` share the parameters (0: all do), and what
    is there beside while it is copied."""
    if not ranks:
        return 0, 0
    whole = [parameter.whole for parameter in parameters]
    narrow = [size // ranks for size in whole]
    return sum(narrow), _beside_new(whole, narrow)


def _accumulation(trained: Sequence[_Parameter]) -> tuple[int, int]:
    """Gradients in the dtype of sums, and what is there beside while they are cast; 0 where
    autograd makes them in it."""
    gradients = [parameter.gradient for parameter in trained]
    totals = [parameter.total for parameter in trained]
    if gradients == totals:
        return 0, 0
    return sum(totals), _beside_new(gradients, totals)


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
