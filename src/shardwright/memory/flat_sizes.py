"""Bytes of a unit of our own runtime on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.amount import ceil_div
from shardwright.core.layout import Segment, UnitLayout
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.memory.machine import Sharding


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Of gathering: the whole unit, the ``stage`` that chunks arrive in, shares ``cast`` to be sent
    and the ``parts`` that those are put together from, and what ``few`` ranks keep after a forward.
    Of reducing: the ``gradient`` that autograd adds to, the same ``held`` back in the dtype of sums
    (0 where that is the same), the same ``summed`` and ``scattered`` by rank, the ``received`` of
    an all-to-all, the ``share`` of the sum, and the ``mean`` where its dtype is another one."""

    whole: int
    stage: int
    cast: int
    parts: int
    few: int
    gradient: int
    held: int
    summed: int
    scattered: int
    received: int
    share: int
    mean: int
    stored: int


def unit_sizes(layout: UnitLayout, sharding: Sharding, shards: int) -> UnitSizes:
    """Bytes that a unit has on a rank."""
    ways = [_Way(segment, sharding, shards) for segment in layout.segments]
    chunked = [way for way in ways if way.segment.cut == "chunks"]
    recast = any(way.cast for way in chunked)
    whole = sum(way.whole for way in ways)
    trained = [way for way in ways if way.segment.trainable]
    sends = not sharding.on_gpu and shards > 1  # gloo: an all-to-all, and a sum of what came
    return UnitSizes(
        whole=ceil_div(whole, shards) * shards,
        stage=sum(way.sent * shards for way in chunked),
        cast=sum(w.cast for w in ways if w not in chunked) + recast * sum(w.sent for w in chunked),
        parts=sum(way.cast for way in chunked),
        few=whole // sharding.ranks_after_forward if sharding.ranks_after_forward else 0,
        gradient=sum(way.whole for way in trained),
        held=sum(way.summed for way in trained) if any(w.is_summed_apart for w in trained) else 0,
        summed=sum(w.summed for w in trained if w not in chunked and w.is_summed_apart),
        scattered=sum(w.share * shards for w in trained if w in chunked),
        received=sum(way.share * shards for way in trained) if sends else 0,
        share=sum(way.share for way in trained),
        mean=sum(w.stored for w in trained) if any(w.share != w.stored for w in trained) else 0,
        stored=layout.shard_bytes,
    )


class _Way:
    """A segment on its way to ranks and back, in bytes."""

    def __init__(self, segment: Segment, sharding: Sharding, shards: int) -> None:
        self.segment = segment
        of = TensorSpec("", (1,), segment.dtype)
        computed, reduced = sharding.computed(of), sharding.reduced(of)
        self.whole = segment.whole * computed
        self.sent = segment.share * computed
        self.cast = self.sent if sharding.casts(of) else 0
        self.summed = segment.whole * reduced
        self.share = segment.share * reduced
        self.stored = segment.share * element_bytes(segment.dtype)
        self.is_summed_apart = computed != reduced
