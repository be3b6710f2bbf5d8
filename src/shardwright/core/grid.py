"""Ranks as replicas x shards: who has which part of a unit that is shared by fewer than all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

from shardwright.core.arrange import Slot
from shardwright.core.block import Block, Role
from shardwright.core.layout import Segment, UnitLayout
from shardwright.core.placement import Placement, Replicate


class Grid(msgspec.Struct, frozen=True):
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
