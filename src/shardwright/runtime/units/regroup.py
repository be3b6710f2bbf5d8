"""Between whole tensors and all ranks' shares of them: views made once, one operation each way."""

# A collective sends equal rows, one for each rank; a tensor cut along a dimension lies in all of
# them. One fused copy of a few large views does what slicing rank by rank would do in hundreds of
# small copies. The views of rows are made once. Those of gradients cannot be: autograd makes the
# gradients anew in every backward, so for these there is a function that takes them.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardwright.core.arrange import Slot
from shardwright.core.layout import Segment
from shardwright.core.placement import BlockShard, Shard
from shardwright.runtime.torch_private import chunk_cat


class TensorStrips(NamedTuple):
    """Where the elements of a whole tensor are in all ranks' shares: views of the shares, three at
    most whatever the number of ranks, and ``of`` takes the same elements of a whole tensor, in the
    same shapes; None where they are the tensor as it is, as most vectors are."""

    shares: list[torch.Tensor]
    of: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None

    def parts(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The elements of ``whole``, as those in ``shares``."""
        return (whole,) if self.of is None else self.of(whole)


def strips_of(segment: Segment, shares: torch.Tensor) -> list[TensorStrips]:
    """The strips of every tensor of a segment in ``shares`` [W, n]."""
    if segment.cut == "chunks":
        return [_chunks(slot, shares) for slot in segment.slots]
    return [_ranges(slot, shares) for slot in segment.slots]


def pads_of(segment: Segment, shares: torch.Tensor) -> list[torch.Tensor]:
    """What of ``shares`` [W, n] belongs to no tensor of a segment that is not cut in chunks."""
    end, found = 0, []
    bounds = sorted((slot.start, slot.start + slot.tensor.numel) for slot in segment.slots)
    for start, stop in [*bounds, (shares.numel(), shares.numel())]:
        found.extend(_rows(shares, end, start))
        end = stop
    return found


def _rows(shares: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements ``start`` to ``stop`` of all shares in rank order, as views."""
    width = shares.shape[1]
    at = start
    while at < stop:
        row, column = divmod(at, width)
        if column or stop - at < width:
            end = min(stop, (row + 1) * width)
            view = shares[row, column : column + end - at]
        else:
            # All full rows are one view. A tensor across many ranks is three copies so, and not one
            # a rank.
            rows = (stop - at) // width
            end = at + rows * width
            view = shares[row : row + rows]
        yield view
        at = end


def _ranges(slot: Slot, shares: torch.Tensor) -> TensorStrips:
    numel, shape = slot.tensor.numel, slot.tensor.shape
    found = list(_rows(shares, slot.start, slot.start + numel))
    if len(found) == 1 and found[0].dim() == 1:
        return TensorStrips([found[0].view(shape)], None)
    begins = itertools.accumulate((view.numel() for view in found), initial=0)
    places = [  # one call each makes a strip: flattening, splitting and shaping are three
        (view.shape, (width, 1) if view.dim() > 1 else (1,), begin)
        for view, begin, width in zip(found, begins, itertools.repeat(shares.shape[1]))
    ]

    def parts(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        whole = whole.contiguous()
        first = whole.storage_offset()
        return [whole.as_strided(size, stride, first + begin) for size, stride, begin in places]

    return TensorStrips(found, parts)


def _chunks(slot: Slot, shares: torch.Tensor) -> TensorStrips:
    """Ranks with a full chunk make one strip, the rank with the rest another."""
    placement, shape = slot.placement, slot.tensor.shape
    assert isinstance(placement, Shard | BlockShard)
    dim, chunk = placement.dim, slot.chunk
    if not slot.tensor.numel:
        return TensorStrips([], lambda whole: ())
    extent = shape[dim]
    before, after = torch.Size(shape[:dim]).numel(), torch.Size(shape[dim + 1 :]).numel()
    full, rest = divmod(extent, chunk)
    found = []
    if full:
        share = shares[:full, slot.inner : slot.inner + before * chunk * after]
        found.append(share.unflatten(1, (before, chunk, after)))
    if rest:
        share = shares[full, slot.inner : slot.inner + before * rest * after]
        found.append(share.view(before, rest, after))

    def parts(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        flat = whole.reshape(before, extent, after)
        taken = []
        if full:
            even = flat[:, : full * chunk] if rest else flat
            taken.append(even.unflatten(1, (full, chunk)).transpose(0, 1))
        if rest:
            taken.append(flat[:, full * chunk :])
        return taken

    return TensorStrips(found, parts)


def is_even(segment: Segment, ranks: int) -> bool:
    """Whether every tensor is cut by rows that divide evenly, and the share is nothing else."""
    rows = [slot.placement == Shard(0) for slot in segment.slots]
    return all(rows) and (
        all(slot.tensor.shape[0] == ranks * slot.chunk for slot in segment.slots)
        and sum(slot.tensor.numel for slot in segment.slots) == ranks * segment.share
    )


class Together:
    """From all ranks' chunks ``shares`` [W, n] to a segment's whole tensors ``wholes``."""

    def __init__(
        self, segment: Segment, wholes: Sequence[torch.Tensor], shares: torch.Tensor
    ) -> None:
        ranks = shares.shape[0]
        self.shares = shares
        self.sizes = [whole.numel() // ranks for whole in wholes]
        self.rows = [w.view(ranks, -1) for w in wholes] if is_even(segment, ranks) else []
        pairs = list(zip(strips_of(segment, shares), wholes, strict=True))
        self.sources = [share for strips, _ in pairs for share in strips.shares]
        self.targets = [part for strips, whole in pairs for part in strips.parts(whole)]

    def __call__(self) -> None:
        """Write the whole tensors."""
        if self.rows:
            torch.split_with_sizes_copy(self.shares, self.sizes, dim=1, out=self.rows)
        else:
            torch._foreach_copy_(self.targets, self.sources)


class Apart:
    """From whole tensors, others every time, to all ranks' shares in ``rows`` [W, n].

    A row has the share of its rank and after it room that ``rest`` shows.
    """

    def __init__(self, segment: Segment, rows: torch.Tensor) -> None:
        self.rows = rows
        shares = rows[:, : segment.share]
        self.rest = rows[:, segment.share :]
        self.strips = strips_of(segment, shares)
        self.all = [share for strips in self.strips for share in strips.shares]
        self.even = segment.cut == "chunks" and is_even(segment, len(rows))
        payload = sum(slot.tensor.numel for slot in segment.slots)
        padded = segment.cut == "chunks" and payload != shares.numel()
        self.pads = [rows] if padded else []
        if segment.cut != "chunks":
            self.pads = pads_of(segment, shares)

    def __call__(self, wholes: Sequence[torch.Tensor | None], rest: torch.Tensor) -> None:
        """Write the shares, zero where there is no tensor, and ``rest`` [m] after each of them."""
        given = [whole for whole in wholes if whole is not None]
        is_full = len(given) == len(wholes)
        dtype = self.rows.dtype
        if self.even and is_full and not [w for w in given if w.dtype is not dtype]:
            chunk_cat([*given, rest.expand(self.rest.shape)], self.rows)
            return
        targets, sources, empty = self.all, [], self.pads
        for strips, whole in zip(self.strips, wholes, strict=True):
            if whole is not None:
                of = strips.of
                sources += (whole,) if of is None else of(whole)
        if not is_full:
            pairs = list(zip(self.strips, wholes, strict=True))
            targets = [s for strips, whole in pairs if whole is not None for s in strips.shares]
            without = [s for strips, whole in pairs if whole is None for s in strips.shares]
            empty = [*empty, *without]
        # Zeros, for the other ranks sum them. Padding, too: it is memory of any content, and the
        # guard would take a NaN in it for a gradient's.
        if empty:
            torch._foreach_zero_(empty)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.rest.copy_(rest)
