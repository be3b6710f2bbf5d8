"""The memory of a unit on one rank, and every view of it, made once.

Nothing here is allocated or sliced after construction: storages are resized to nothing and back,
which keeps every view of them valid, so a step only walks lists that exist already.
"""

# Views must stay valid because others hold them: autograd has saved them in graphs, modules show
# them. Freed by ``resize_(0)`` a storage stays the same object, so no view has to be made again,
# which would cost more than many a collective. Two rules follow. A refill writes through ``alias``,
# which has a version counter of its own, for autograd would refuse a backward whose saved weights
# were "changed" by being gathered again. And nothing but what ranks have agreed on decides what is
# made here: ranks that make other buffers would send each other bytes of other tensors.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from shardwright.core.arrange import Slot
from shardwright.core.errors import InputError
from shardwright.core.layout import Segment, ShardPiece, UnitLayout
from shardwright.core.unit_bytes import SegmentBytes, UnitBytes
from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.torch_private import storage_of
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.runtime.units.linked import LinkedParameter
from shardwright.runtime.units.regroup import Together
from shardwright.tracker.tensors import DTYPES


class CopyStream:
    """What copies of one direction are queued on, apart from what an accelerator computes.

    Memory that is taken inside of ``beside_computing`` may be freed once computing waits for what
    was queued there: whoever takes it again comes from there too, behind that.
    """

    def __init__(self, device: torch.device) -> None:
        self._of: Any = torch.get_device_module(device)
        self.stream: Any = self._of.Stream()

    @contextmanager
    def beside_computing(self) -> Iterator[None]:
        """Copies and collectives inside follow what was computed so far; what is computed from now
        on does not wait for them."""
        self.stream.wait_stream(self._of.current_stream())
        with self._of.stream(self.stream):
            yield

    def event(self) -> torch.Event | None:
        """What happens when all that was queued so far is done: computing (``wait``) or the host
        (``synchronize``) waits for it. None where nothing is to wait for."""
        return self.stream.record_event()

    def uses(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor`` is not given to others before what was queued so far is done."""
        tensor.record_stream(self.stream)


class _InOrder(CopyStream):
    """A CPU does everything in turn: a copy is done when the call returns."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def beside_computing(self) -> Iterator[None]:
        yield

    def event(self) -> None:
        return None

    def uses(self, tensor: torch.Tensor) -> None:
        pass


IN_ORDER = _InOrder()


def copy_stream(device: torch.device, to: Literal["device", "host"]) -> CopyStream:
    """The stream for copies from host memory ``to`` an accelerator or back, one of each for every
    device, as both directions have their own engine."""
    if device.type in ("cpu", "meta"):
        return IN_ORDER
    index = device.index
    if index is None:
        index = torch.get_device_module(device).current_device()
    return _stream(device.type, index, to)


@cache
def _stream(kind: str, index: int, to: str) -> CopyStream:
    del to  # one of each
    return CopyStream(torch.device(kind, index))


def shard_room(nbytes: int, device: torch.device, *, offloaded: bool) -> torch.Tensor:
    """Zeros for a shard beside what ``device`` computes with: there, or in host memory, from where
    it is copied without waiting."""
    if not offloaded or device.type in ("cpu", "meta"):
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    # Only pinned memory is copied while the host goes on.
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


Span = tuple[int, int, tuple[int, ...]]  # begin, end, sizes
Awaited = Pending | torch.Event  # what computing waits for
Cached = tuple[str, torch.Tensor, torch.Tensor]  # what it shows, a view, and the buffer it is of
VIEW_BYTES = 592  # of one more view, Python and C++, as benchmarks/buckets.py measures


class CachedViews(NamedTuple):
    """The views that a unit made once and uses in every step.

    ``nbytes`` is what they take beside the memory they show. ``invalidations`` counts how often all
    of them were made anew, because the unit's memory was replaced. ``outside`` names those that do
    not lie in their buffer; there are none.
    """

    entries: int
    nbytes: int
    invalidations: int
    outside: tuple[str, ...]

    @classmethod
    def of(cls, cached: Iterable[Cached], invalidations: int) -> CachedViews:
        """What there is of ``cached``, each view once."""
        found = {id(view): (name, view, buffer) for name, view, buffer in cached}
        outside = tuple(n for n, view, buffer in found.values() if not _lies_in(view, buffer))
        return cls(len(found), len(found) * VIEW_BYTES, invalidations, outside)


def _lies_in(view: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether all elements of ``view`` are bytes of ``buffer``, which may have no memory now."""
    # Not by address, which is 0 for all that is freed.
    if storage_of(view) != storage_of(buffer):
        return False
    begin = view.storage_offset() * view.itemsize - buffer.storage_offset() * buffer.itemsize
    extents = zip(view.shape, view.stride(), strict=True)
    last = sum((n - 1) * stride for n, stride in extents) + 1 if view.numel() else 0
    return begin >= 0 and begin + last * view.itemsize <= buffer.nbytes


class Elastic:
    """A byte tensor whose memory comes and goes while its views stay.

    ``alias`` shows the same bytes with a version counter of its own: autograd does not take a
    write through it for a change of what it saved, which a refill is not. Views are made while
    there is memory: at first there is.
    """

    __slots__ = ("alias", "nbytes", "place", "storage", "tensor")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # ``data`` and not ``detach()``, which would share the version counter.
        self.alias = self.tensor.data
        self.storage = self.tensor.untyped_storage()
        self.place = storage_of(self.tensor)  # which never changes
        self.nbytes = nbytes

    @property
    def is_present(self) -> bool:
        """Whether there is memory behind the views; true for no bytes at all."""
        return self.storage.nbytes() == self.nbytes

    def take(self) -> None:
        """Have memory, of any content."""
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)

    def give(self) -> None:
        """Let the memory go."""
        self.storage.resize_(0)


class SegmentViews:
    """A segment's typed views of its unit's buffers.

    ``share`` is this rank's part, ``kept`` what it gives to a gather: that, or, of a segment that
    does not stay, all neighbouring parts that it keeps. ``whole`` is the unsharded segment in the
    dtype it computes in, to read, and ``refill`` the same to write. A segment that stays, or is
    replicated and computes in its own dtype where it lies, has no other memory than the unit's own,
    of which ``replica`` is an alias.
    """

    def __init__(
        self,
        segment: Segment,
        share: torch.Tensor,
        replica: torch.Tensor,
        precision: MixedPrecision,
        offloaded: bool,
    ) -> None:
        self.segment = segment
        self.dtype = DTYPES[segment.dtype]
        self.computed = precision.computed(self.dtype)
        self.reduced = precision.reduced(self.dtype)
        sizes = self.computed.itemsize, self.reduced.itemsize
        self.bytes = SegmentBytes(segment, *sizes, offloaded or self.computed != self.dtype)
        self.share = share
        self.kept = share if segment.stays else replica
        self.whole = replica
        self.refill = replica

    def slice_of(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """A tensor's elements in a buffer of the whole segment, in its shape."""
        part = buffer[slot.start : slot.start + slot.tensor.numel]
        return part.view(slot.tensor.shape)


class Buffers:
    """A unit's shard, its whole parameters, and what gathering them takes.

    Segments cut in rank order are gathered straight into place, those that stay around this rank's
    share. Those cut in chunks are gathered together, as bytes, into a stage and put together from
    there. ``offloaded`` shards are in host memory, whatever ``device`` computes: what a gather
    sends is copied from there first, beside what an accelerator computes.
    """

    def __init__(
        self,
        layout: UnitLayout,
        comm: Comm,
        device: torch.device,
        precision: MixedPrecision,
        shard: torch.Tensor | None = None,
        *,
        offloaded: bool = False,
    ) -> None:
        self.layout = layout
        self.pieces = layout.pieces(comm.rank)  # what this rank holds, in layout order
        self.comm = comm
        self.device = device
        self.offloaded = offloaded
        self.copies = copy_stream(device, "device") if offloaded else IN_ORDER
        self._copied: torch.Event | None = None
        if shard is None:
            shard = shard_room(layout.stored_bytes, device, offloaded=offloaded)
        self.shard = shard  # never requires grad: safe to view whatever the grad mode
        self.replica = shard.data  # what is computed with where it lies; its own version counter
        self.segments = [
            SegmentViews(
                s, _share(s, shard, comm.rank), _stored(s, self.replica), precision, offloaded
            )
            for s in layout.segments
        ]
        self.bytes = UnitBytes(layout, tuple(views.bytes for views in self.segments))
        self.whole = Elastic(self.bytes.room, device)
        offset = 0
        for views in self.segments:
            if views.bytes.is_apart:
                end = offset + views.bytes.room
                views.whole = self.whole.tensor[offset:end].view(views.computed)
                views.refill = self.whole.alias[offset:end].view(views.computed)
                offset = end
        # A stage is left out wherever the order in the collective is that of the whole segment: it
        # would take as much memory again and a copy.
        self.direct = [
            (views, views.refill.view(torch.uint8), views.kept.view(torch.uint8))
            for views in self.segments
            if views.segment.in_rank_order and views.segment.share
        ]
        self.chunked = [v for v in self.segments if v.segment.cut == "chunks" and v.segment.share]
        self.cast = [v for v in self.segments if v.segment.cut == "replicated" and v.bytes.is_apart]
        self._make_stage(device)
        # One of each for every tensor, in layout order: its place in the whole unit, whether that
        # is other memory than the share, where this rank's part is in the share of the segment, and
        # that part.
        slots = [(views, slot) for views in self.segments for slot in views.segment.slots]
        self.parameters = [
            LinkedParameter(
                views.slice_of(views.whole, slot), requires_grad=views.segment.trainable
            )
            for views, slot in slots
        ]
        self.apart = [views.bytes.is_apart for views, _ in slots]
        self.spans = [_span(views.segment, slot, comm.rank) for views, slot in slots]
        self.locals = [
            views.share[begin:end].view(sizes)
            for (views, _), (begin, end, sizes) in zip(slots, self.spans, strict=True)
        ]
        self.beside = self._beside()
        # Last, for torch makes no view that reaches beyond the end of its storage.
        self.whole.give()
        self.stage.give()

    def _make_stage(self, device: torch.device) -> None:
        row = self.bytes.row
        self.stage = Elastic(self.bytes.stage, device)
        rows = self.stage.tensor.view(self.comm.size, row)
        sizes = [views.segment.share * views.computed.itemsize for views in self.chunked]
        starts = [0, *itertools.accumulate(sizes)]
        self.assemblies = [
            Together(
                views.segment,
                [views.slice_of(views.refill, slot) for slot in views.segment.slots],
                rows[:, begin:end].view(views.computed),
            )
            for views, begin, end in zip(self.chunked, starts, starts[1:], strict=False)
        ]
        # What lies in the shard can be sent as it is if it is one stretch in the right order. With
        # parts of neighbours in several segments it is not: the shard has all parts of a segment
        # together, a gather wants all segments of a part.
        one = self.comm.kept == 1 or len(self.chunked) == 1
        self.as_they_are = one and not self.bytes.parts
        self.chunk_bytes = self.shard[:0]
        if self.chunked:
            begin = self.chunked[0].segment.shard_offset
            self.chunk_bytes = self.shard[begin : begin + self.comm.kept * row]

    def _beside(self) -> list[tuple[torch.Tensor, ShardPiece, torch.Tensor]]:
        """What is kept of other ranks' parts apart from the whole parameters: each, where it lies
        in its tensor, and that in whole."""
        found = []
        places = itertools.count()
        for views in self.segments:
            segment = views.segment
            for slot in segment.slots:
                whole = self.parameters[next(places)]
                others = () if segment.stays else segment.keepers(self.comm.rank)
                for row, rank in enumerate(others):
                    if rank != self.comm.rank:
                        begin, end, sizes = _span(segment, slot, rank)
                        local = views.kept[row * segment.share :][begin:end].view(sizes)
                        found.append((local, segment.piece(slot, rank), whole))
        return found

    def cached(self) -> Iterator[Cached]:
        """Every view, and the buffer that it is a view of."""
        for index, views in enumerate(self.segments):
            home = self.whole.tensor if views.bytes.is_apart else self.shard
            yield f"share of segment {index}", views.share, self.shard
            yield f"segment {index}", views.whole, home
            yield f"segment {index} to write", views.refill, home
        for views, target, source in self.direct:
            home = self.whole.tensor if views.bytes.is_apart else self.shard
            yield "a gather's target", target, home
            yield "a gather's source", source, self.shard
        for together in self.assemblies:
            yield "chunks of all ranks", together.shares, self.stage.tensor
            for source in together.sources:
                yield "a chunk", source, self.stage.tensor
            for part in (*together.targets, *together.rows):
                yield "room of a chunk", part, self.whole.tensor
        rows = zip(self.pieces, self.locals, self.parameters, self.apart, strict=True)
        for piece, local, whole, apart in rows:
            yield f"part of {piece.tensor.fqn}", local, self.shard
            yield piece.tensor.fqn, whole, self.whole.tensor if apart else self.shard

    # ---- gathering -----------------------------------------------------------------------------

    def start_gather(self, label: str, *, changed: bool = True) -> list[Awaited]:
        """Take room for the whole unit and begin to fill it (collective); first what a rank keeps
        beside its own shares, if these have ``changed``."""
        for views in self.segments if changed else ():
            if views.segment.kept > 1 and not views.segment.stays:
                self.comm.gather_kept(label, views.kept, views.share)
        self.whole.take()
        if self.copies is IN_ORDER:
            return self._fill(label)
        with self.copies.beside_computing():
            pending = self._fill(label)
            # Copies read host memory while the host goes on; an optimizer waits for this before it
            # writes there (``let_change``).
            self._copied = self.copies.event()
        return pending if self._copied is None else [*pending, self._copied]

    def _fill(self, label: str) -> list[Awaited]:
        """Begin to fill the whole unit (collective); what is under way."""
        under_way: list[Awaited] = []
        for views, target, source in self.direct:
            if views.bytes.copied:
                source = self._sent(views)
            pending = self.comm.shards.all_gather(label, target, source, wait=False)
            if pending is not None:
                under_way.append(pending)
        if self.chunked:
            self.stage.take()
            self.comm.probe.holds(self.stage.tensor, "all_gather")
            source = self.chunk_bytes
            if not self.as_they_are:
                parts = [self._sent(views).view(self.comm.kept, -1) for views in self.chunked]
                source = torch.cat(parts, 1).view(-1)
            pending = self.comm.shards.all_gather(label, self.stage.alias, source, wait=False)
            if pending is not None:
                under_way.append(pending)
        # After the collectives began: what has to be cast only is done while they are under way.
        for views in self.cast:
            views.refill.copy_(views.share, non_blocking=True)
        return under_way

    def _sent(self, views: SegmentViews) -> torch.Tensor:
        """A copy of what a rank gives to a gather, in the dtype and the memory of computing."""
        sent = views.kept.to(self.device, views.computed, non_blocking=True, copy=True)
        return sent.view(torch.uint8)

    def let_change(self) -> None:
        """Host memory may be written from now on: wait until what it gave is copied."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def finish_gather(self, pending: Sequence[Awaited]) -> None:
        """Wait, and put together what came in chunks."""
        for work in pending:
            work.wait()
        if self.chunked:
            for together in self.assemblies:
                together()
            self.stage.give()


def _share(segment: Segment, shard: torch.Tensor, rank: int) -> torch.Tensor:
    begin = segment.own_offset(rank)
    return shard[begin : begin + segment.share_bytes].view(DTYPES[segment.dtype])


def _stored(segment: Segment, shard: torch.Tensor) -> torch.Tensor:
    begin = segment.shard_offset
    return shard[begin : begin + segment.stored_bytes].view(DTYPES[segment.dtype])


def shard_buffer(buffer: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Equal slices of a 1-D ``buffer`` [W*n], one per rank: views of its storage, never copies.

    InputError unless ``world_size`` divides it.
    """
    if buffer.dim() != 1 or world_size < 1 or buffer.numel() % world_size:
        wanted = f"one dimension, of a multiple of {world_size} elements"
        raise InputError("buffer", wanted, str(tuple(buffer.shape)), "Pad it at its end.")
    return list(buffer.detach().split(buffer.numel() // world_size or 1))[:world_size]


def _span(segment: Segment, slot: Slot, rank: int) -> Span:
    """What ``rank`` holds of a tensor, in its share of the segment."""
    piece = segment.piece(slot, rank)
    begin = segment.begin(piece)
    return begin, begin + piece.numel, piece.sizes
