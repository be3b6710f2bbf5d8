"""A group's route as tensors, and the order in which its values travel.

Ids that their owner sums are a *segment*, which travels back as one row. A bag whose ids go to
several ranks is a segment on each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardwright.runtime.embeddings.bags import Bags
from shardwright.runtime.embeddings.route import TableGroup
from shardwright.runtime.embeddings.update import Distinct, Looked

Rows = torch.Tensor | Sequence[torch.Tensor]  # [F, B, D], or [results, dim] of each feature


def each_of(rows: Rows) -> Sequence[torch.Tensor]:
    """Those of every feature."""
    return rows.unbind() if isinstance(rows, torch.Tensor) else rows


@dataclass(slots=True)
class RowRequest:
    """What a rank asks of a group, by owner.

    ``rows`` are row numbers, ``counts`` how many go to each rank. Segment k has ``lengths[k]`` of
    them (None: one) and adds to result ``slots[k]`` of the group (None: to result k); ``segments``
    are how many go to each rank. ``weights`` are those of the rows, if any. Where a row travels
    once for several ids, ``once`` says for which results it is.
    """

    rows: torch.Tensor
    counts: list[int]
    slots: torch.Tensor | None
    lengths: torch.Tensor | None
    segments: list[int]
    weights: torch.Tensor | None
    once: Distinct | None = None

    @property
    def looked(self) -> Looked:
        """What is looked up, where this rank is the owner of all."""
        return Looked(self.rows, self.lengths, self.weights)

    @property
    def places(self) -> torch.Tensor | None:
        """Which of the rows that come back each result is; None where it is that of its number, or
        a sum."""
        if self.once is not None:
            return self.once.places
        if self.slots is None or self.lengths is not None:
            return None
        inverse = torch.empty_like(self.slots)
        numbers = torch.arange(len(inverse), device=inverse.device)
        return inverse.scatter_(0, self.slots, numbers)  # several times as fast as an index

    def without_rows(self) -> RowRequest:
        """What is left to do once they are sent."""
        return replace(self, rows=self.rows.new_empty(0), weights=None)


@dataclass(slots=True)
class GroupRouting:
    """One group of P pieces; the first ``fixed`` of them have one part, in the order of owners."""

    width: int
    fixed: int
    features: list[int]  # of each piece
    feature_index: torch.Tensor
    columns: list[int]  # the first of each piece
    fixed_pieces: list[int]  # per rank: how many of the fixed pieces it owns
    fixed_base: torch.Tensor  # [fixed, 1]
    chunk: torch.Tensor  # of the other pieces [P - fixed, 1], if their parts are equal
    first_part: torch.Tensor  # [P - fixed, 1]
    bounds: torch.Tensor  # else: where parts start if pieces lay one after the other
    first_row: torch.Tensor  # [P - fixed, 1], in the same count
    part_owner: torch.Tensor  # of the other pieces' parts, in few bytes, for these are sorted
    part_shift: torch.Tensor  # from an id to its owner's row
    span: int  # rows of the fullest rank where each travels once, else 0
    first_keys: torch.Tensor  # of ranks' rows, if these lay one after the other, and the end of all
    fixed_key: torch.Tensor  # [fixed, 1], of the owner

    @staticmethod
    def of(group: TableGroup, ranks: int, device: torch.device) -> GroupRouting:
        """The routing of ``group`` on ``device``."""
        whole, cut = group.pieces[: group.fixed], group.pieces[group.fixed :]
        owned = [piece.owners[0] for piece in whole]
        chunks = [piece.starts[1] for piece in cut]
        even = all(
            piece.starts == tuple(range(0, piece.rows, chunk))
            for piece, chunk in zip(cut, chunks, strict=True)
        )
        first = [0, *itertools.accumulate(len(piece.starts) for piece in cut)][: len(cut)]
        ends = [0, *itertools.accumulate(piece.rows for piece in cut)][: len(cut)]
        parts = [
            (start, owner, base, end)
            for piece, end in zip(cut, ends, strict=True)
            for start, owner, base in zip(piece.starts, piece.owners, piece.bases, strict=True)
        ]
        held = [sum(item.rows for item in items) for items in group.held.values()]
        span = max([1, *held]) if group.key.dedup else 0
        return GroupRouting(
            group.key.width,
            group.fixed,
            [piece.feature for piece in group.pieces],
            integers([piece.feature for piece in group.pieces], device),
            [piece.column for piece in group.pieces],
            [owned.count(rank) for rank in range(ranks)],
            integers([piece.bases[0] for piece in whole], device).unsqueeze(1),
            integers(chunks if even else [], device).unsqueeze(1),
            integers(first, device).unsqueeze(1),
            integers([] if even else [start + end for start, _, _, end in parts], device),
            integers(ends, device).unsqueeze(1),
            integers([owner for _, owner, _, _ in parts], device).to(_owner_dtype(ranks)),
            integers([base - start for start, _, base, _ in parts], device),
            span,
            integers([span * rank for rank in range(ranks + 1)], device),
            integers([span * owner for owner in owned], device).unsqueeze(1),
        )

    @property
    def is_steady(self) -> bool:
        """Whether as many ids go to each rank as long as bags and batches are as large."""
        return self.fixed == len(self.features) and not self.span

    def request(self, bags: Bags) -> RowRequest:
        """Ids as row numbers at their owners."""
        counts = [bags.sizes[f] for f in self.features]
        ids = self._picked(bags.ids, counts)
        first = self.fixed if ids.dim() == 2 else sum(counts[: self.fixed])
        # In place, as ids were copied to piece order above; a caller's tensor must not change.
        ids[:first] += _along(ids, self.fixed_base, counts[: self.fixed])
        lengths, weights = bags.lengths_of(self.features), bags.weights_of(self.features)
        if self.span and lengths is None and weights is None:
            return self._once(ids, first, counts)
        whole = self._by_owner(counts)
        if self.fixed == len(self.features):
            results = [bags.results[f] for f in self.features]
            segments = whole if lengths is None else self._by_owner(results)
            return RowRequest(ids.view(-1), whole, None, lengths, segments, weights)
        owner = self._to_owners(ids[first:], counts[self.fixed :])
        # Stable: the ids of a bag stay neighbours within an owner, which makes them one segment
        # there.
        order = torch.argsort(owner, stable=True)
        asked = torch.bincount(owner, minlength=len(whole)).tolist()
        # Fixed pieces are sorted as they are, so positions of both kinds are merged rank by rank.
        if self.fixed:
            fixed = sum(counts[: self.fixed])
            positions = torch.arange(fixed, device=ids.device).split(whole)
            moved = order.add_(fixed).split(asked)
            order = torch.cat([t for pair in zip(positions, moved, strict=True) for t in pair])
            asked = [a + b for a, b in zip(whole, asked, strict=True)]
        rows = ids.view(-1).index_select(0, order)
        weights = None if weights is None else weights.index_select(0, order)
        if lengths is None:
            return RowRequest(rows, asked, order, None, asked, weights)
        slots, lengths, segments = _segments(lengths, order, asked)
        return RowRequest(rows, asked, slots, lengths, segments, weights)

    def _once(self, ids: torch.Tensor, first: int, counts: list[int]) -> RowRequest:
        """Every row once, of ``ids`` of which those up to ``first`` are row numbers; they become
        numbers of the rows of all ranks, one after the other."""
        # Counted through the rows of all ranks, ids sort by owner and row at once, and those that
        # repeat are found by the same sort.
        ids[:first] += _along(ids, self.fixed_key, counts[: self.fixed])
        owner = self._to_owners(ids[first:], counts[self.fixed :])
        ids[first:].view(-1).add_(self.first_keys.index_select(0, owner.int()))
        del owner
        once = Distinct.of(ids.view(-1), self.span * len(self.fixed_pieces))
        rows = once.values
        asked: list[int] = torch.searchsorted(rows, self.first_keys).diff().tolist()
        # In place, so the values of ``once``, which share this memory, are let go below.
        rows.remainder_(self.span)
        once = once._replace(values=rows.new_empty(0))
        return RowRequest(rows, asked, None, None, asked, None, once)

    def _picked(self, ids: Rows, counts: list[int]) -> torch.Tensor:
        """Ids in piece order, [P, B] where all features have B, else [N]; memory of their own."""
        if isinstance(ids, torch.Tensor):
            return ids.index_select(0, self.feature_index)
        picked = torch.cat([ids[f] for f in self.features])
        return picked.view(len(counts), -1) if len(set(counts)) == 1 and counts[0] else picked

    def _by_owner(self, counts: list[int]) -> list[int]:
        """What ``counts`` of fixed pieces add up to on each rank."""
        rest = iter(counts)
        return [sum(itertools.islice(rest, pieces)) for pieces in self.fixed_pieces]

    def _to_owners(self, ids: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The owner [N] of every id of pieces with several parts; ids become its row numbers."""
        # Equal parts are found by a division; a search among all parts takes several steps an id.
        if len(self.chunk):
            part = ids // _along(ids, self.chunk, counts)
            part += _along(ids, self.first_part, counts)
        else:
            part = ids + _along(ids, self.first_row, counts)
            part = torch.searchsorted(self.bounds, part, right=True).sub_(1)
        part = part.view(-1)
        ids.view(-1).add_(self.part_shift.index_select(0, part))
        return self.part_owner.index_select(0, part)

    def put(self, out: Rows, rows: torch.Tensor, asked: RowRequest) -> None:
        """Write the rows that came back to their features and columns."""
        sizes = [_results(out, f) for f in self.features]
        whole = isinstance(out, torch.Tensor) and self.width == out.shape[2]
        places = asked.places
        if places is not None and whole and self.fixed == 0 and len(out) == len(sizes):
            torch.index_select(rows, 0, places, out=out.view(-1, self.width))  # all of it, in order
            return
        if places is not None:
            rows = rows.index_select(0, places)
        elif asked.slots is not None:
            # A bag comes back as a sum from each rank that had some of its ids.
            summed = rows.new_zeros(sum(sizes), self.width)
            rows = summed.scatter_add_(0, asked.slots.unsqueeze(1).expand_as(rows), rows)
        if whole:
            pieces = rows.view(len(sizes), out.shape[1], self.width)
            out.index_copy_(0, self.feature_index, pieces)
            return
        for f, column, piece in zip(self.features, self.columns, rows.split(sizes), strict=True):
            out[f][:, column : column + self.width] = piece

    def take(self, gradient: Rows, asked: RowRequest) -> torch.Tensor:
        """The gradient [segments, width] of each row that came back."""
        if isinstance(gradient, torch.Tensor) and gradient.shape[2] == self.width:
            rows = gradient.index_select(0, self.feature_index).view(-1, self.width)
        else:
            pairs = zip(self.features, self.columns, strict=True)
            rows = torch.cat([self._own_columns(gradient[f], c) for f, c in pairs])
        if asked.once is not None:
            return asked.once.summed(rows)
        return rows if asked.slots is None else rows.index_select(0, asked.slots)

    def _own_columns(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Those of a piece, of all columns of its feature."""
        if rows.shape[1] == self.width:
            return rows
        return rows[:, first : first + self.width]


def _results(out: Rows, feature: int) -> int:
    return out.shape[1] if isinstance(out, torch.Tensor) else len(out[feature])


def _along(ids: torch.Tensor, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """``values`` [P, 1] of pieces, for each of their ids [P, B] or [N]."""
    if ids.dim() == 2:
        return values
    return values.view(-1).repeat_interleave(integers(counts, ids.device))


def _segments(
    lengths: torch.Tensor, order: torch.Tensor, asked: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The result of every segment, its ids, and how many go to each rank, of bags with ``lengths``
    whose ids travel in ``order``, ``asked`` of them to each rank."""
    device = lengths.device
    slots = torch.repeat_interleave(lengths).index_select(0, order)
    owner = torch.repeat_interleave(integers(asked, device))
    # A bag is one segment on each owner. Ids lie by owner and then by bag, so equal pairs of both
    # are neighbours and need no sort.
    key = slots.add_(owner.mul_(len(lengths)))
    key, found = torch.unique_consecutive(key, return_counts=True)
    owner = key // max(len(lengths), 1)
    segments: list[int] = torch.bincount(owner, minlength=len(asked)).tolist()
    # memory of their own size: those two have room for every id
    return key - owner.mul_(len(lengths)), found.clone(), segments


def _owner_dtype(ranks: int) -> torch.dtype:
    """The smallest that has all ranks."""
    kinds = (torch.uint8, torch.int16, torch.int32)
    return next(kind for kind in kinds if ranks <= torch.iinfo(kind).max + 1)


def integers(values: list[int], device: torch.device) -> torch.Tensor:
    """An index tensor."""
    return torch.tensor(values, dtype=torch.int64, device=device)
