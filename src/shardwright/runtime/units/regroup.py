"""Between whole tensors and all ranks' chunks of them: views made once, one operation each way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.core.layout import Segment, Slot
from shardwright.core.placement import BlockShard, Shard
from shardwright.runtime.torch_private import chunk_cat


class Regroup:
    """A segment's whole tensors beside ``shares`` [W, n], the shares of all ranks in rank order.

    Where every tensor is cut by rows and divides evenly, both ways are one kernel; else they are
    copies of at most two strips of each tensor.
    """

    def __init__(
        self, segment: Segment, wholes: Sequence[torch.Tensor], shares: torch.Tensor
    ) -> None:
        self.shares = shares
        self.wholes = list(wholes)
        ranks = shares.shape[0]
        self.sizes = [whole.numel() // ranks for whole in wholes]
        self.even = sum(self.sizes) == segment.share and all(
            slot.placement == Shard(0) and slot.tensor.shape[0] == ranks * slot.chunk
            for slot in segment.slots
        )
        self.rows = [whole.view(ranks, -1) for whole in wholes] if self.even else []
        pairs = [
            pair
            for slot, whole in zip(segment.slots, wholes, strict=True)
            for pair in strips(slot, whole, shares)
        ]
        self.in_wholes = [whole for whole, _ in pairs]
        self.in_shares = [share for _, share in pairs]

    def together(self) -> None:
        """Write the whole tensors from the shares."""
        if self.even:
            torch.split_with_sizes_copy(self.shares, self.sizes, dim=1, out=self.rows)
        else:
            torch._foreach_copy_(self.in_wholes, self.in_shares)

    def apart(self) -> None:
        """Write the shares from the whole tensors, in the shares' dtype."""
        if self.even and self.wholes[0].dtype is self.shares.dtype:
            chunk_cat(self.wholes, self.shares)
        else:
            torch._foreach_copy_(self.in_shares, self.in_wholes)


def strips(
    slot: Slot, whole: torch.Tensor, shares: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a tensor beside views of all ranks' shares [W, n] that hold the same elements.

    Ranks with a full chunk make one pair, the rank with the rest another: two at most, whatever
    the number of ranks and the dimension that is cut.
    """
    placement = slot.placement
    assert isinstance(placement, Shard | BlockShard)
    dim, chunk = placement.dim, slot.chunk
    extent = whole.shape[dim]
    if not whole.numel():
        return []
    before, after = whole.shape[:dim].numel(), whole.shape[dim + 1 :].numel()
    flat = whole.reshape(before, extent, after)
    full, rest = divmod(extent, chunk)
    pairs = []
    if full:
        target = flat[:, : full * chunk].unflatten(1, (full, chunk)).transpose(0, 1)
        size = before * chunk * after
        source = shares[:full, slot.inner : slot.inner + size]
        pairs.append((target, source.view(full, before, chunk, after)))
    if rest:
        size = before * rest * after
        source = shares[full, slot.inner : slot.inner + size]
        pairs.append((flat[:, full * chunk :], source.view(before, rest, after)))
    return pairs
