"""Bytes of a dense unit on a rank: of what it keeps, gathers, computes with, and sums.

The runtime's buffers, the heap's allocations and the planner's prices are read off these values, so
that a buffer is changed in one place. What measures never reads them: that predicted bytes are
those measured must stay a finding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from shardwright.core.amount import ceil_div
from shardwright.core.layout import Segment, UnitLayout
from shardwright.core.tensor import TensorSpec, element_bytes


class Dtypes(msgspec.Struct, frozen=True, kw_only=True):
    """Units compute in ``param_dtype`` and sum gradients in ``reduce_dtype``; each tensor in its
    own, or as it computes, where that is empty."""

    param_dtype: str = ""
    reduce_dtype: str = ""

    def casts(self, dtype: str) -> bool:
        """Whether what is kept in ``dtype`` is computed with in another one."""
        return self.param_dtype not in ("", dtype)

    def copied(self, tensors: Iterable[TensorSpec], *, on_host: bool) -> set[str]:
        """Dtypes of ``tensors``, whose shares may be in host memory, that are cast before they are
        sent: from there all are copied, so all count as cast."""
        return {d for d in {t.dtype for t in tensors} if on_host or self.casts(d)}

    def computed(self, dtype: str) -> int:
        """Bytes of an element that is computed with."""
        return element_bytes(self.param_dtype or dtype)

    def reduced(self, dtype: str) -> int:
        """Bytes of an element of a gradient that is summed."""
        return element_bytes(self.reduce_dtype or self.param_dtype or dtype)


class SegmentBytes(msgspec.Struct, frozen=True):
    """A segment whose elements have ``computed`` bytes where its unit computes and ``reduced`` ones
    where gradients are summed. ``copied``: what a rank keeps of it is cast, or brought from host
    memory, before it is sent or computed with."""

    segment: Segment
    computed: int
    reduced: int
    copied: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether the whole segment is other memory than what a rank keeps of it."""
        return not self.segment.stays and (self.copied or self.segment.cut != "replicated")

    @property
    def gathered(self) -> int:
        """The whole segment as it is computed with, padding included."""
        return self.segment.whole * self.computed

    @property
    def room(self) -> int:
        """The same where it is other memory."""
        return self.gathered if self.is_apart else 0

    @property
    def sent(self) -> int:
        """What a rank gives to a gather."""
        return self.segment.kept * self.segment.share * self.computed

    @property
    def held(self) -> int:
        """A gradient held back in the dtype of sums; 0 where autograd leaves it so."""
        payload = sum(slot.tensor.numel for slot in self.segment.slots)
        return payload * self.reduced if self.computed != self.reduced else 0

    @property
    def note(self) -> int:
        """What travels with a rank's share of the gradient."""
        return self.segment.note * self.reduced

    @property
    def row(self) -> int:
        """A rank's share of the gradient as it is summed, with the note."""
        return self.segment.sent * self.reduced

    @property
    def again(self) -> int:
        """The rows of a shard's replicas, where these cut its sum once more."""
        rows = 1 if self.segment.stays else self.segment.kept
        return rows * self.row if rows > 1 else 0

    @property
    def mean(self) -> int:
        """The share where what is kept has another dtype than sums."""
        share = self.segment.share_bytes
        return share if share != self.segment.share * self.reduced else 0


@dataclass(frozen=True)
class UnitBytes:
    """A unit's buffers on a rank; what it keeps is told by the ``layout`` alone."""

    layout: UnitLayout
    segments: tuple[SegmentBytes, ...]

    @classmethod
    def of(cls, layout: UnitLayout, dtypes: Dtypes, copied: Collection[str]) -> UnitBytes:
        """Those of a unit of which what is kept in ``copied`` dtypes is copied to be sent."""
        segments = (
            SegmentBytes(s, dtypes.computed(s.dtype), dtypes.reduced(s.dtype), s.dtype in copied)
            for s in layout.segments
        )
        return cls(layout, tuple(segments))

    @cached_property
    def trained(self) -> tuple[SegmentBytes, ...]:
        """The segments whose gradients are summed."""
        return tuple(each for each in self.segments if each.segment.trainable)

    @cached_property
    def gathered(self) -> int:
        """The whole unit as it is computed with."""
        return sum(each.gathered for each in self.segments)

    @cached_property
    def cleared(self) -> int:
        """The whole gradient before it is summed."""
        return sum(each.gathered for each in self.trained)

    @cached_property
    def reduced(self) -> int:
        """The whole gradient as it is summed."""
        return sum(each.segment.whole * each.reduced for each in self.trained)

    @cached_property
    def room(self) -> int:
        """Memory for the whole unit beside what a rank keeps of it, a multiple of the ranks."""
        ranks = self.layout.world_size
        share: int = ceil_div(sum(each.room for each in self.segments), ranks)
        return share * ranks

    @cached_property
    def row(self) -> int:
        """A rank's chunks as they are gathered."""
        return sum(each.segment.share * each.computed for each in self._chunked)

    @cached_property
    def stage(self) -> int:
        """Chunks of all ranks, before they are put together."""
        return self.row * self.layout.world_size

    @cached_property
    def parts(self) -> int:
        """Copies of chunks, segment by segment, before they are joined to be sent."""
        return sum(each.sent for each in self._chunked if each.copied)

    @cached_property
    def cast(self) -> int:
        """Copies that are sent, those of chunks joined: if one is a copy, all of them are."""
        joined = sum(each.sent for each in self._chunked) if self.parts else 0
        direct = [e.sent for e in self.segments if e.copied and e.segment.in_rank_order]
        # One rank sends nothing: each is let go before the next.
        alone = self.layout.world_size == 1
        return joined + (max(direct, default=0) if alone else sum(direct))

    @property
    def _chunked(self) -> list[SegmentBytes]:
        return [each for each in self.segments if each.segment.cut == "chunks"]
