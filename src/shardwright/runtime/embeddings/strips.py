"""Sums over all columns of a row whose columns lie in several blocks.

A batch touches the same rows of a table in every one of its column ranges, so the ranks of a strip
have sums for the same rows in the same order, and exchange them without a word about which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.route import Strip


@dataclass(frozen=True, slots=True)
class Own:
    """Rows of a table from ``row`` on that this rank has columns of: the ``ranks`` that have some,
    and where they are in this one's groups."""

    fqn: str
    row: int
    ranks: list[int]
    places: list[tuple[int, slice]]


class Strips:
    """The strips of which a rank has rows; ``groups`` are those whose sums it adds up."""

    def __init__(self, strips: Sequence[Strip], comm: Comm) -> None:
        self.comm = comm
        self.groups = {group for strip in strips for _, group, _ in strip.members}
        self.own = [
            Own(
                strip.fqn,
                strip.row,
                sorted({rank for rank, _, _ in strip.members}),
                [
                    (group, slice(base, base + strip.rows))
                    for rank, group, base in strip.members
                    if rank == comm.rank
                ],
            )
            for strip in strips
            if any(rank == comm.rank for rank, _, _ in strip.members)
        ]

    def add_up(self, rows: Mapping[int, torch.Tensor], sums: Mapping[int, torch.Tensor]) -> None:
        """Let ``sums`` [M] of each group, for its ``rows`` [M] in ascending order, be over all
        columns (collective)."""
        parts = self._parts(rows, sums)
        empty = next(iter(sums.values())).new_empty(0)
        own = [torch.stack(views).sum(0) for views in parts]
        sent: dict[int, list[torch.Tensor]] = defaultdict(list)
        for strip, part in zip(self.own, own, strict=True):
            for rank in strip.ranks:
                sent[rank].append(part)
        sent[self.comm.rank] = []
        sizes = [sum(map(len, sent[rank])) for rank in range(self.comm.size)]
        out = torch.cat([empty, *(part for rank in range(self.comm.size) for part in sent[rank])])
        received = torch.empty_like(out)
        self.comm.all_to_all("exchange sums over columns", received, out, sizes, sizes)
        came = {
            rank: iter(values.split([len(part) for part in sent[rank]]))
            for rank, values in enumerate(received.split(sizes))
        }
        for strip, part, views in zip(self.own, own, parts, strict=True):
            # in the order of ranks, so that all of them come to the same bits
            total = torch.zeros_like(part)
            for rank in strip.ranks:
                total += part if rank == self.comm.rank else next(came[rank])
            for view in views:
                view.copy_(total)

    def _parts(
        self, rows: Mapping[int, torch.Tensor], sums: Mapping[int, torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Of every strip the parts of ``sums`` that are its rows', one for each of its blocks."""
        ends: dict[int, list[int]] = defaultdict(list)
        for strip in self.own:
            for group, rows_of in strip.places:
                ends[group] += [rows_of.start, rows_of.stop]
        found = {
            group: iter(torch.searchsorted(rows[group], rows[group].new_tensor(at)).tolist())
            for group, at in ends.items()
        }
        return [
            [sums[group][next(found[group]) : next(found[group])] for group, _ in strip.places]
            for strip in self.own
        ]
