"""Where every element of a unit lives: pure arithmetic, no data.

A unit's tensors fall into segments of one dtype and one way of being cut, each divided on its own,
so a rank's share of a segment is one stretch of one dtype:

* ``flat``: the tensors one after the other, the whole cut evenly across tensor boundaries. What
  all ranks' shares form in rank order is the tensors themselves.
* ``owned``: each tensor whole on one rank, the tensors of a rank together, every rank's stretch
  as long as the longest. All shares in rank order hold every tensor whole.
* ``chunks``: each tensor cut along a dimension in chunks of rows, or of blocks of rows, which are
  never divided. A rank's share has a chunk of every tensor, so shares must be put together.
* ``replicated``: every rank keeps the whole.

Under ZeRO-1 and 2 a rank keeps whole parameters too. Of a segment whose shares in rank order are
the tensors it keeps these, of which its share is a stretch, and frozen tensors are replicated.
Between the two, ranks may keep parameters of a few neighbouring shares, their own among them.

Matrices come before vectors and scalars, so the usual groups of an optimizer (with and without
weight decay) are one stretch each. Everything starts at a multiple of ``ALIGNMENT`` bytes; padding
never depends on a common multiple of row sizes.

Where an optimizer quantizes blocks of elements, tensors that are large enough come first, begin at
multiples of a block and are cut between blocks alone, counted from their first element.
"""

# Where every element of a unit lives: the runtime's buffers, the heap's bytes, the planner's
# prices and the blocks of a plan are all read off this one object. What breaks if one of them had
# its own arithmetic: measured bytes would differ from predicted ones, or a checkpoint would put a
# row into the wrong place. Nothing here may depend on the rank that asks, only on the rank asked
# for.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from shardwright.core.amount import ceil_div
from shardwright.core.arrange import ALIGNMENT, ARRANGE, CUT_ORDER, CUTS, Cut, Members, Slot, place
from shardwright.core.block import Block, Role
from shardwright.core.optimizer_states import Elements, is_large
from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard, Zero
from shardwright.core.tensor import TensorSpec, element_bytes

CHECK_BITS = 16  # of what a rank did so far, which travel twice, once turned around


class ShardPiece(msgspec.Struct, frozen=True):
    """What one rank holds of a tensor: a rectangle, or under a flat cut a range of its elements.

    ``shard_offset`` counts bytes from the start of the rank's buffer.
    """

    tensor: TensorSpec
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard_offset: int

    @property
    def numel(self) -> int:
        """Elements of the tensor on this rank, possibly 0."""
        return math.prod(self.sizes)


class Segment(msgspec.Struct, frozen=True):
    """Tensors of one dtype that are cut alike; ``share`` of a rank and ``whole`` in elements.

    The segment begins at byte ``offset`` of the unsharded buffer and at byte ``shard_offset`` of
    each rank's own, which has ``kept`` neighbouring shares, the rank's among them. Where it
    ``stays`` these are all, and are computed with where they lie. Large tensors are cut between
    blocks of ``block`` elements.
    """

    dtype: str
    cut: Cut
    trainable: bool
    slots: tuple[Slot, ...]
    share: int
    whole: int
    offset: int
    shard_offset: int
    kept: int = 1
    stays: bool = False
    block: int = 1

    @property
    def share_bytes(self) -> int:
        """Bytes of one rank's share, padding included; the same on every rank."""
        return self.share * element_bytes(self.dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of it that a rank keeps, padding included."""
        return self.kept * self.share_bytes

    def own_offset(self, rank: int) -> int:
        """The byte of the buffer of ``rank`` at which its share begins."""
        return self.shard_offset + rank % self.kept * self.share_bytes

    @property
    def note(self) -> int:
        """Elements that travel with every rank's share when gradients are summed: what ranks did
        so far, and which tensors have a gradient."""
        return -(-(2 * CHECK_BITS + len(self.slots)) // ALIGNMENT) * ALIGNMENT

    @property
    def sent(self) -> int:
        """Elements for one rank when gradients are summed: its share and the note."""
        return self.share + self.note

    @property
    def whole_bytes(self) -> int:
        """Bytes of the unsharded segment, padding included."""
        return self.whole * element_bytes(self.dtype)

    def keepers(self, rank: int) -> range:
        """The ranks whose shares ``rank`` keeps."""
        first = rank - rank % self.kept
        return range(first, first + self.kept)

    @property
    def in_rank_order(self) -> bool:
        """Whether the shares of all ranks, one after the other, are the unsharded segment."""
        return self.cut in ("flat", "owned")

    def begin(self, piece: ShardPiece) -> int:
        """The element of its rank's share at which ``piece`` begins."""
        at = (piece.shard_offset - self.shard_offset) // element_bytes(self.dtype)
        return at % self.share if self.kept > 1 and self.share else at

    def piece(self, slot: Slot, rank: int) -> ShardPiece:
        """What ``rank`` holds of a tensor of this segment."""
        size = element_bytes(self.dtype)
        own = self.own_offset(rank)
        shape = slot.tensor.shape
        match slot.placement:
            case Flat():
                # Clamped to the tensor at both ends: a rank's share may lie before it, behind it,
                # or inside of it.
                low = rank * self.share
                begin = min(max(low, slot.start), slot.start + slot.tensor.numel)
                end = min(max(low + self.share, slot.start), slot.start + slot.tensor.numel)
                if begin >= end:
                    return ShardPiece(slot.tensor, (0,), (0,), own)
                at = own + (begin - low) * size
                return ShardPiece(slot.tensor, (begin - slot.start,), (end - begin,), at)
            case Shard(dim) | BlockShard(_, dim):
                first = min(rank * slot.chunk, shape[dim])
                last = min(first + slot.chunk, shape[dim])
                offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
                sizes = (*shape[:dim], last - first, *shape[dim + 1 :])
            case Owned(owner):
                mine = rank == owner
                # Empty by its first dimension alone: the others keep the shape, so that a rank's
                # local tensor has as many dimensions as its owner's.
                offsets = (0,) * len(shape)
                sizes = shape if mine else (0, *shape[1:])
            case Replicate():
                offsets, sizes = (0,) * len(shape), shape
        return ShardPiece(slot.tensor, offsets, sizes, own + slot.inner * size)

    def holders(self, slot: Slot, ranks: range) -> range:
        """Those of ``ranks`` that may hold something of a tensor of this segment."""
        first, end = ranks.start, ranks.stop
        match slot.placement:
            case Flat() if self.share:
                first = slot.start // self.share
                end = -(-(slot.start + slot.tensor.numel) // self.share)
            case Shard(dim) | BlockShard(_, dim) if slot.chunk:
                end = -(-slot.tensor.shape[dim] // slot.chunk)
            case Owned(owner):
                first, end = owner, owner + 1
        return range(max(first, ranks.start), min(end, ranks.stop))

    def starts(self, heads: Sequence[int], rank: int) -> list[int]:
        """Where in the share of ``rank`` the runs of neighbours begin whose first slots are at
        ``heads``, and the share's end."""
        # A run of neighbours begins where its first piece on this rank does, and where it has none,
        # where the next run begins. Padding behind a run belongs to it, so that runs tile the
        # share.
        if len(heads) == 1:
            return [0, self.share]
        starts = [self.share]
        for head, end in zip(reversed(heads), [len(self.slots), *reversed(heads[1:])], strict=True):
            pieces = (self.piece(slot, rank) for slot in self.slots[head:end])
            begins = [self.begin(piece) for piece in pieces if piece.numel]
            starts.append(min(begins, default=starts[-1]))
        starts[-1] = 0
        return starts[::-1]

    @property
    def quantized(self) -> int:
        """How many of its tensors, the first ones, are cut between blocks alone."""
        return 0 if self.block == 1 else sum(is_large(slot.tensor.numel) for slot in self.slots)

    def stretches(self, rank: int) -> tuple[int, int]:
        """Elements of the share of ``rank`` that an optimizer quantizes, and the others; padding
        after each included."""
        first = self.quantized
        if first in (0, len(self.slots)):
            return (self.share, 0) if first else (0, self.share)
        begin = self.starts([0, first], rank)[1]
        return begin, self.share - begin

    def telling(self, world_size: int) -> Collection[int]:
        """Ranks among whom are those that have most, and least, of what is quantized."""
        first = self.quantized
        if self.cut == "replicated" or first in (0, len(self.slots)) or not self.share:
            return (0,)
        if self.cut != "flat":
            return range(world_size)
        # Of a flat cut ranks before the border have nothing but what is quantized, those behind
        # nothing of it: only the border's two neighbours and the ends can be extreme.
        border = min(self.slots[first].start // self.share, world_size - 1)
        return {0, border, min(border + 1, world_size - 1), world_size - 1}

    def held(self, ranks: range) -> list[int]:
        """Bytes of the share of each of ``ranks`` that belong to tensors."""
        found = [0] * len(ranks)
        for slot in self.slots:
            for rank in self.holders(slot, ranks):
                found[rank - ranks.start] += self.piece(slot, rank).numel
        return [elements * element_bytes(self.dtype) for elements in found]


class UnitLayout(msgspec.Struct, frozen=True):
    """The segments of a unit's buffer for ``world_size`` ranks."""

    world_size: int
    segments: tuple[Segment, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every tensor's slot, in buffer order."""
        return tuple(slot for segment in self.segments for slot in segment.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded buffer, padding included."""
        return sum(segment.whole_bytes for segment in self.segments)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shares, padding included; equal on every rank."""
        return sum(segment.share_bytes for segment in self.segments)

    @property
    def stored_bytes(self) -> int:
        """Bytes of one rank's buffer, padding included: all shares that it keeps."""
        return sum(segment.stored_bytes for segment in self.segments)

    @property
    def stays(self) -> bool:
        """Whether anything of it is whole between steps where shares are parts of it."""
        return any(segment.stays for segment in self.segments)

    @property
    def note_bytes(self) -> int:
        """Bytes that travel with one rank's gradients, in the layout's own dtypes."""
        return sum(s.note * element_bytes(s.dtype) for s in self.segments if s.trainable)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(slot.tensor.nbytes for slot in self.slots)

    def pieces(self, rank: int) -> tuple[ShardPiece, ...]:
        """What ``rank`` holds of every tensor, in buffer order; empty pieces included."""
        return tuple(
            segment.piece(slot, rank) for segment in self.segments for slot in segment.slots
        )

    @property
    def trained(self) -> UnitLayout:
        """The segments that get a gradient."""
        if all(segment.trainable for segment in self.segments):
            return self
        return UnitLayout(self.world_size, tuple(s for s in self.segments if s.trainable))

    @property
    def trains(self) -> bool:
        """Whether anything gets a gradient."""
        return any(segment.trainable for segment in self.segments)

    def paddings(self, *, stored: bool) -> tuple[int, ...]:
        """Bytes of every rank's share that belong to no tensor, or of all shares that are
        ``stored`` there; ranks that keep the same ones are counted once."""
        held = [0] * self.world_size
        for segment in self.segments:
            shares = segment.held(range(self.world_size))
            kept = segment.kept if stored else 1
            for first in range(0, self.world_size, kept):
                its = sum(shares[first : first + kept])
                for rank in range(first, first + kept):
                    held[rank] += its
        whole = self.stored_bytes if stored else self.shard_bytes
        return tuple(whole - its for its in held)

    def elements(self, rank: int) -> tuple[Elements, Elements]:
        """What an optimizer of blocks keeps states for on ``rank``, and padding beside it."""
        found = Counter[str]()
        for segment in self.segments:
            large = segment.quantized
            for index, slot in enumerate(segment.slots):
                numel = segment.piece(slot, rank).numel
                found["quantized" if index < large else "whole"] += numel
                found["blocks"] += ceil_div(numel, segment.block) if index < large else 0
            quantized, rest = segment.stretches(rank)
            found["all quantized"] += quantized
            found["all whole"] += rest
            found["all blocks"] += quantized // segment.block if large else 0
        own = Elements(*(found[each] for each in Elements._fields))
        both = zip(Elements._fields, own, strict=True)
        return own, Elements(*(found[f"all {each}"] - held for each, held in both))

    @property
    def flat_tensors(self) -> int:
        """How many of them an optimizer is given: one of each segment, or of what it quantizes and
        of what it does not."""
        several = (0 < s.quantized < len(s.slots) for s in self.segments)
        return sum(map(bool, (s.slots for s in self.segments))) + sum(several)

    def fullest(self) -> int:
        """A rank that has least of what is quantized."""
        every = {rank for segment in self.segments for rank in segment.telling(self.world_size)}
        return min(every or {0}, key=lambda r: (sum(s.stretches(r)[0] for s in self.segments), r))

    def blocks(self, role: Role, placement: Placement | None = None) -> Iterable[Block]:
        """The layout as blocks, tensor by tensor, rank by rank; frozen tensors are parameters
        alone. The ``placement`` of a role may be Replicate, whatever the layout cuts."""
        for segment in self.segments:
            if role != "parameter" and not segment.trainable:
                continue
            for slot in segment.slots:
                shape, whole = slot.tensor.shape, isinstance(placement, Replicate)
                everyone = range(self.world_size)
                for rank in everyone if whole else segment.holders(slot, everyone):
                    piece = segment.piece(slot, rank)
                    offsets = (0,) * len(shape) if whole else piece.offsets
                    sizes = shape if whole else piece.sizes
                    if math.prod(sizes):
                        yield Block(slot.tensor.fqn, role, offsets, sizes, rank)


def unit_layout(
    tensors: Iterable[TensorSpec],
    placement: Placement | Mapping[str, Placement],
    world_size: int,
    frozen: Collection[str] = (),
    *,
    zero: Zero = 3,
    kept: int = 1,
    cast: Collection[str] = (),
    block: int = 1,
) -> UnitLayout:
    """Lay ``tensors`` out under one placement, or under each tensor's own by fqn.

    Segments come cut by cut, widest element first; ``frozen`` tensors, which get no gradient, have
    segments of their own. A scalar is replicated unless the cut is flat. Below stage 3 of ``zero``
    segments stay whole, but for those of ``cast`` dtypes, which are computed with in another one.
    Others are kept in ``kept`` neighbouring shares on a rank, a divisor of ``world_size``. Large
    tensors are cut between blocks of ``block`` elements: InputError where their
    placement does not.
    """
    grouped: dict[tuple[int, int, str, bool], Members] = {}
    for tensor in tensors:
        wanted = placement if isinstance(placement, Placement) else placement[tensor.fqn]
        # Below stage 3 parameters are whole anyway and a frozen one has nothing else that could be
        # cut.
        still = zero < 3 and tensor.fqn in frozen
        if still or (not tensor.shape and not isinstance(wanted, Flat)):
            wanted = Replicate()
        order = CUT_ORDER.index(CUTS[type(wanted)])
        key = (order, -element_bytes(tensor.dtype), tensor.dtype, tensor.fqn in frozen)
        grouped.setdefault(key, []).append((tensor, wanted))
    segments: list[Segment] = []
    offset = shard_offset = 0
    for (order, _, dtype, still), members in sorted(grouped.items(), key=lambda item: item[0]):
        cut = CUT_ORDER[order]
        members.sort(key=lambda member: place(member[0], block))
        slots, share, whole = ARRANGE[cut](members, dtype, world_size, block)
        stays = zero < 3 and cut in ("flat", "owned") and dtype not in cast
        shares = world_size if stays else 1 if cut == "replicated" else kept
        segment = Segment(
            dtype, cut, not still, slots, share, whole, offset, shard_offset, shares, stays, block
        )
        segments.append(segment)
        offset += segment.whole_bytes
        shard_offset += segment.stored_bytes
    return UnitLayout(world_size, tuple(segments))


def balanced_owners(tensors: Iterable[TensorSpec], world_size: int) -> dict[str, Placement]:
    """Every tensor whole on one rank: the largest first, each to the rank that holds least."""
    filled = [0] * world_size
    owners: dict[str, Placement] = {}
    for tensor in sorted(tensors, key=lambda t: -t.nbytes):
        rank = filled.index(min(filled))
        filled[rank] += ceil_div(tensor.nbytes, ALIGNMENT) * ALIGNMENT
        owners[tensor.fqn] = Owned(rank)
    return owners


class ReplicaGrid(msgspec.Struct, frozen=True):
    """Rank r * ``shards`` + s is replica r of shard s.

    Each shard's parameters are on all of its replicas, and so are gradients and optimizer states
    (HSDP), unless these are cut ``twice``, over replicas too (HFSDP): part s * ``replicas`` + r is
    then that rank's.
    """

    replicas: int = 1
    shards: int = 1
    twice: bool = False

    @property
    def parts(self) -> int:
        """In how many optimizer states are cut."""
        return self.replicas * self.shards if self.twice else self.shards

    @property
    def kept(self) -> int:
        """Neighbouring parts of parameters that a rank keeps."""
        return self.replicas if self.twice else 1

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.replicas * self.shards)

    def part(self, rank: int) -> int:
        """The part whose states ``rank`` has."""
        replica, shard = divmod(rank, self.shards)
        return shard * self.replicas + replica if self.twice else shard

    def blocks(
        self, layout: UnitLayout, role: Role, placement: Placement | None = None
    ) -> Iterable[Block]:
        """The ``layout`` of all parts as blocks of all ranks, as :meth:`UnitLayout.blocks` has
        those of one part each."""
        if self.replicas == 1:
            return layout.blocks(role, placement)
        if role == "parameter" and self.twice:
            return self._kept(layout)
        return self._spread(layout.blocks(role, placement), whole=isinstance(placement, Replicate))

    def _spread(self, blocks: Iterable[Block], *, whole: bool) -> Iterator[Block]:
        """Blocks of parts on the ranks that have these."""
        holders: dict[int, list[int]] = {}
        for rank in self.ranks:
            holders.setdefault(self.part(rank), []).append(rank)
        for _, its in groupby(blocks, lambda block: block.tensor):
            found = [(rank, block) for block in its for rank in holders[block.rank]]
            for rank, block in sorted(found, key=lambda pair: pair[0]):
                yield msgspec.structs.replace(block, rank=rank)

    def _kept(self, layout: UnitLayout) -> Iterator[Block]:
        """Parameters of shards whose parts are neighbours of a flat cut."""
        for segment in layout.segments:
            for slot in segment.slots:
                for rank in self.ranks:
                    begin, end = self._range(segment, slot, rank)
                    if begin < end:
                        yield Block(slot.tensor.fqn, "parameter", (begin,), (end - begin,), rank)

    def _range(self, segment: Segment, slot: Slot, rank: int) -> tuple[int, int]:
        """The elements of a tensor that ``rank`` keeps."""
        share = segment.share * self.replicas
        low = rank % self.shards * share - slot.start
        return max(low, 0), min(low + share, slot.tensor.numel)
