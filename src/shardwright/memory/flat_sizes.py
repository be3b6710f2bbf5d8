"""Bytes of a unit of our own runtime on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.amount import ceil_div
from shardwright.core.layout import Segment, UnitLayout
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.memory.machine import Sharding


@dataclass(frozen=True, slots=True)
class Reduced:
    """A segment of a unit while its gradient is summed: what autograd left, the same ``held`` back
    in the dtype of sums (0 where that is the same), what is sent with the ``note`` in it, the
    ``row`` that comes back, the parts ``received`` where the rank itself sums them, and the
    ``mean`` where its dtype is another one."""

    gradient: int
    held: int
    send: int
    note: int
    row: int
    received: int
    mean: int


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Of gathering: the whole unit, the ``stage`` that chunks arrive in, shares ``cast`` to be sent
    and the ``parts`` that those are put together from, and what ``few`` ranks keep after a forward.
    Of reducing: its segments. ``stored`` is what the rank keeps."""

    whole: int
    stage: int
    cast: int
    parts: int
    few: int
    reduced: tuple[Reduced, ...]
    stored: int


def unit_sizes(layout: UnitLayout, sharding: Sharding, shards: int) -> UnitSizes:
    """Bytes that a unit has on a rank."""
    whole = sum(segment.whole * _computed(segment, sharding) for segment in layout.segments)
    chunked = [segment for segment in layout.segments if segment.cut == "chunks"]
    others = [segment for segment in layout.segments if segment.cut != "chunks"]
    sent = sum(_sent(segment, sharding) for segment in chunked)
    parts = sum(_cast(segment, sharding) for segment in chunked)
    # chunks are put together first: if one is cast, the buffer of all is one more
    joined = sent if parts else 0
    after = sharding.ranks_after_forward
    return UnitSizes(
        whole=ceil_div(whole, shards) * shards,
        stage=sent * shards,
        cast=sum(_cast(segment, sharding) for segment in others) + joined,
        parts=parts,
        few=whole // after if after else 0,
        reduced=tuple(_reduced(s, sharding, shards) for s in layout.segments if s.trainable),
        stored=layout.shard_bytes,
    )


def _computed(segment: Segment, sharding: Sharding) -> int:
    """Bytes of an element as the unit computes with it."""
    return sharding.computed(_element(segment))


def _sent(segment: Segment, sharding: Sharding) -> int:
    """A rank's share as it is sent."""
    return segment.share * _computed(segment, sharding)


def _cast(segment: Segment, sharding: Sharding) -> int:
    """The same where it has to be cast before."""
    return _sent(segment, sharding) if sharding.casts(_element(segment)) else 0


def _reduced(segment: Segment, sharding: Sharding, shards: int) -> Reduced:
    """The way of a segment's gradient."""
    computed, reduced = _computed(segment, sharding), sharding.reduced(_element(segment))
    stored = element_bytes(segment.dtype)
    payload = sum(slot.tensor.numel for slot in segment.slots)
    row = segment.sent * reduced
    sums_itself = not sharding.on_gpu and shards > 1  # gloo: an all-to-all, and a sum of what came
    return Reduced(
        gradient=payload * computed,
        held=payload * reduced if computed != reduced else 0,
        send=row * shards,
        note=segment.note * reduced,
        row=row,
        received=row * shards if sums_itself else 0,
        mean=segment.share * stored if reduced != stored else 0,
    )


def _element(segment: Segment) -> TensorSpec:
    return TensorSpec("", (1,), segment.dtype)
