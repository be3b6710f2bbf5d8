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
    ways = [_Way(segment, sharding, shards) for segment in layout.segments]
    chunked = [way for way in ways if way.segment.cut == "chunks"]
    recast = any(way.cast for way in chunked)
    whole = sum(way.whole for way in ways)
    return UnitSizes(
        whole=ceil_div(whole, shards) * shards,
        stage=sum(way.sent * shards for way in chunked),
        cast=sum(w.cast for w in ways if w not in chunked) + recast * sum(w.sent for w in chunked),
        parts=sum(way.cast for way in chunked),
        few=whole // sharding.ranks_after_forward if sharding.ranks_after_forward else 0,
        reduced=tuple(way.reduced for way in ways if way.segment.trainable),
        stored=layout.shard_bytes,
    )


class _Way:
    """A segment on its way to ranks and back, in bytes."""

    def __init__(self, segment: Segment, sharding: Sharding, shards: int) -> None:
        self.segment = segment
        of = TensorSpec("", (1,), segment.dtype)
        computed, reduced = sharding.computed(of), sharding.reduced(of)
        stored = element_bytes(segment.dtype)
        payload = sum(slot.tensor.numel for slot in segment.slots)
        sends = not sharding.on_gpu and shards > 1  # gloo: an all-to-all, and a sum of what came
        self.whole = segment.whole * computed
        self.sent = segment.share * computed
        self.cast = self.sent if sharding.casts(of) else 0
        self.reduced = Reduced(
            gradient=payload * computed,
            held=payload * reduced if computed != reduced else 0,
            send=segment.sent * reduced * shards,
            note=segment.note * reduced,
            row=segment.sent * reduced,
            received=segment.sent * reduced * shards if sends else 0,
            mean=segment.share * stored if reduced != stored else 0,
        )
