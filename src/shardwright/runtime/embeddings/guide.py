"""A group's route as tensors, and the order in which its values travel.

Values on the wire lie by rank and then by group. Within a group a requester's values are in piece
order (piece by piece, sample by sample) unless an *order* says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.runtime.embeddings.route import Group


@dataclass(slots=True)
class Request:
    """What a rank asks of a group: row numbers by owner [P*B], the order that made them so (None:
    piece order), and how many go to each rank."""

    rows: torch.Tensor
    order: torch.Tensor | None
    counts: list[int]


@dataclass(slots=True)
class Guide:
    """One group of P pieces; the first ``fixed`` of them have one part, in the order of owners."""

    width: int
    fixed: int
    features: torch.Tensor  # [P]
    columns: list[tuple[int, int]]  # per piece: feature, first column
    fixed_pieces: list[int]  # per rank: how many of the fixed pieces it owns
    fixed_base: torch.Tensor  # [fixed, 1]
    chunk: torch.Tensor  # of the other pieces [P - fixed, 1]
    first_part: torch.Tensor  # [P - fixed, 1]
    part_owner: torch.Tensor  # of the other pieces' parts
    part_base: torch.Tensor

    @staticmethod
    def of(group: Group, ranks: int, device: torch.device) -> Guide:
        """The guide of ``group`` on ``device``."""
        whole, cut = group.pieces[: group.fixed], group.pieces[group.fixed :]
        owned = [piece.owners[0] for piece in whole]
        first, parts = [], 0
        for piece in cut:
            first.append(parts)
            parts += len(piece.owners)
        return Guide(
            group.width,
            group.fixed,
            integers([piece.feature for piece in group.pieces], device),
            [(piece.feature, piece.column) for piece in group.pieces],
            [owned.count(rank) for rank in range(ranks)],
            integers([piece.bases[0] for piece in whole], device).unsqueeze(1),
            integers([piece.chunk for piece in cut], device).unsqueeze(1),
            integers(first, device).unsqueeze(1),
            integers([owner for piece in cut for owner in piece.owners], device),
            integers([base for piece in cut for base in piece.bases], device),
        )

    def request(self, by_feature: torch.Tensor) -> Request:
        """Ids [F, B] as row numbers at their owners."""
        batch = by_feature.shape[1]
        ids = by_feature.index_select(0, self.features)
        ids[: self.fixed] += self.fixed_base
        whole = [count * batch for count in self.fixed_pieces]
        if self.fixed == len(self.columns):
            return Request(ids.view(-1), None, whole)
        cut = ids[self.fixed :]
        part = cut // self.chunk
        cut.sub_(part * self.chunk)
        part = part.add_(self.first_part).view(-1)
        cut.view(-1).add_(self.part_base[part])
        owner = self.part_owner[part]
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=len(whole)).tolist()
        if self.fixed:
            first = self.fixed * batch
            positions = torch.arange(first, device=ids.device).split(whole)
            moved = order.add_(first).split(counts)
            order = torch.cat([t for pair in zip(positions, moved, strict=True) for t in pair])
            counts = [a + b for a, b in zip(whole, counts, strict=True)]
        return Request(ids.view(-1)[order], order, counts)

    def put(self, out: torch.Tensor, rows: torch.Tensor, order: torch.Tensor | None) -> None:
        """Write rows that came back in ``order`` to their features and columns of [F, B, D]."""
        if order is not None:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            rows = rows.index_select(0, inverse)
        pieces = rows.view(len(self.columns), out.shape[1], self.width)
        if self.width == out.shape[2]:
            out.index_copy_(0, self.features, pieces)
            return
        for (feature, column), piece in zip(self.columns, pieces, strict=True):
            out[feature, :, column : column + self.width] = piece

    def take(self, gradient: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """The rows [P*B, width] of ``gradient`` [F, B, D] in ``order``."""
        if gradient.shape[2] == self.width:
            rows = gradient.index_select(0, self.features).view(-1, self.width)
        else:
            parts = [gradient[f, :, c : c + self.width] for f, c in self.columns]
            rows = torch.stack(parts).view(-1, self.width)
        return rows if order is None else rows.index_select(0, order)


def integers(values: list[int], device: torch.device) -> torch.Tensor:
    """An index tensor."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def interleave(groups: list[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
    """Values that lie group by group, each by rank, put by rank and then group [rank][group]."""
    if len(groups) == 1:
        return groups[0]
    parts = [values.split([row[index] for row in counts]) for index, values in enumerate(groups)]
    return torch.cat([part[rank] for rank in range(len(counts)) for part in parts])


def regroup(values: torch.Tensor, counts: list[list[int]]) -> list[torch.Tensor]:
    """The inverse: values that lie by rank and then group, gathered group by group."""
    groups = len(counts[0])
    if groups == 1:
        return [values]
    parts = values.split([n for row in counts for n in row])
    return [torch.cat(parts[group::groups]) for group in range(groups)]
