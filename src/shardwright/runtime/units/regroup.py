"""Between whole tensors and all ranks' shares of them: views made once, one operation each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardwright.core.layout import Segment, Slot
from shardwright.core.placement import BlockShard, Shard
from shardwright.runtime.torch_private import chunk_cat


class Strip(NamedTuple):
    """Elements of a whole tensor in all ranks' shares: a view of the shares, and ``of`` takes the
    same elements of a whole tensor in the same shape."""

    share: torch.Tensor
    of: Callable[[torch.Tensor], torch.Tensor]


def strips_of(segment: Segment, shares: torch.Tensor) -> list[list[Strip]]:
    """For every tensor of a segment its strips in ``shares`` [W, n]; whatever the number of ranks
    three at most."""
    if segment.cut == "chunks":
        return [list(_chunks(slot, shares)) for slot in segment.slots]
    return [list(_ranges(slot, shares)) for slot in segment.slots]


def pads_of(segment: Segment, shares: torch.Tensor) -> list[torch.Tensor]:
    """What of ``shares`` [W, n] belongs to no tensor of a segment that is not cut in chunks."""
    end, found = 0, []
    bounds = sorted((slot.start, slot.start + slot.tensor.numel) for slot in segment.slots)
    for start, stop in [*bounds, (shares.numel(), shares.numel())]:
        found.extend(view for view, _ in _rows(shares, end, start))
        end = stop
    return found


def _rows(shares: torch.Tensor, start: int, stop: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Elements ``start`` to ``stop`` of all shares in rank order, as views, and which they are."""
    width = shares.shape[1]
    at = start
    while at < stop:
        row, column = divmod(at, width)
        if column or stop - at < width:
            end = min(stop, (row + 1) * width)
            view = shares[row, column : column + end - at]
        else:
            rows = (stop - at) // width
            end = at + rows * width
            view = shares[row : row + rows]
        yield view, slice(at - start, end - start)
        at = end


def _ranges(slot: Slot, shares: torch.Tensor) -> Iterator[Strip]:
    numel, shape = slot.tensor.numel, slot.tensor.shape
    for view, part in _rows(shares, slot.start, slot.start + numel):
        if part.stop - part.start == numel and view.dim() == 1:
            yield Strip(view.view(shape), lambda whole: whole)
        else:
            yield Strip(view, _range_of(part, view.shape))


def _range_of(part: slice, shape: torch.Size) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: whole.reshape(-1)[part].view(shape)


def _chunks(slot: Slot, shares: torch.Tensor) -> Iterator[Strip]:
    """Ranks with a full chunk make one strip, the rank with the rest another."""
    placement, shape = slot.placement, slot.tensor.shape
    assert isinstance(placement, Shard | BlockShard)
    dim, chunk = placement.dim, slot.chunk
    if not slot.tensor.numel:
        return
    extent = shape[dim]
    before, after = torch.Size(shape[:dim]).numel(), torch.Size(shape[dim + 1 :]).numel()
    full, rest = divmod(extent, chunk)

    def flat(whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(before, extent, after)

    def full_of(whole: torch.Tensor) -> torch.Tensor:
        return flat(whole)[:, : full * chunk].unflatten(1, (full, chunk)).transpose(0, 1)

    def rest_of(whole: torch.Tensor) -> torch.Tensor:
        return flat(whole)[:, full * chunk :]

    if full:
        share = shares[:full, slot.inner : slot.inner + before * chunk * after]
        yield Strip(share.unflatten(1, (before, chunk, after)), full_of)
    if rest:
        share = shares[full, slot.inner : slot.inner + before * rest * after]
        yield Strip(share.view(before, rest, after), rest_of)


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
        self.sources = [strip.share for strips, _ in pairs for strip in strips]
        self.targets = [strip.of(whole) for strips, whole in pairs for strip in strips]

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
        self.even = segment.cut == "chunks" and is_even(segment, len(rows))
        payload = sum(slot.tensor.numel for slot in segment.slots)
        padded = segment.cut == "chunks" and payload != shares.numel()
        self.pads = [rows] if padded else []
        if segment.cut != "chunks":
            self.pads = pads_of(segment, shares)

    def __call__(self, wholes: Sequence[torch.Tensor | None], rest: torch.Tensor) -> None:
        """Write the shares, zero where there is no tensor, and ``rest`` [W, m] after them."""
        given = [whole for whole in wholes if whole is not None]
        same = all(whole.dtype is self.rows.dtype for whole in given)
        if self.even and same and len(given) == len(wholes):
            chunk_cat([*given, rest], self.rows)
            return
        targets, sources, empty = [], [], list(self.pads)
        for strips, whole in zip(self.strips, wholes, strict=True):
            if whole is None:
                empty.extend(strip.share for strip in strips)
            else:
                targets.extend(strip.share for strip in strips)
                sources.extend(strip.of(whole) for strip in strips)
        if empty:
            torch._foreach_zero_(empty)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.rest.copy_(rest)
