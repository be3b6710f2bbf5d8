"""What travels: sections of every group, by rank and within a rank one section after the other.

To the owners of rows go, of each group, row numbers, lengths of segments and weights of rows, the
last two where a rank has any; all as int64. Rows and gradients go as fp32, or rounded to what has
half the bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.runtime.comm import Pending
from shardwright.runtime.embeddings.guide import Request
from shardwright.runtime.embeddings.update import Looked

Counts = list[list[int]]  # [rank][section]


@dataclass(slots=True)
class Travelling:
    """Values that an exchange brings, there after ``arrive``, when those ``sent`` have no memory
    any more: gloo's thread drops its hold on them only some time after."""

    values: torch.Tensor
    sent: torch.Tensor
    pending: Pending | None

    def arrive(self) -> torch.Tensor:
        """Wait for them; once."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            if self.sent is not self.values:
                self.sent.untyped_storage().resize_(0)
        return self.values

    @property
    def under_way(self) -> list[torch.Tensor]:
        """What has memory meanwhile."""
        return [self.values, self.sent, *(self.pending.tensors if self.pending else ())]


def pack(asked: Sequence[Request], ranks: int) -> tuple[torch.Tensor, Counts]:
    """Requests of groups as one tensor, and the counts [rank][3 x groups] of its sections."""
    none = [0] * ranks
    sections = [(each.rows, each.counts) for each in asked]
    for each in asked:
        lengths = each.lengths
        sections.append((each.rows[:0], none) if lengths is None else (lengths, each.segments))
    for each in asked:
        weights = each.weights
        bits = None if weights is None else weights.double().view(torch.int64)
        sections.append((each.rows[:0], none) if bits is None else (bits, each.counts))
    counts = [list(row) for row in zip(*(counts for _, counts in sections), strict=True)]
    used = [place for place, (values, _) in enumerate(sections) if len(values)] or [0]
    values = [sections[place][0] for place in used]
    return interleave(values, [[row[place] for place in used] for row in counts]), counts


def unpack(received: torch.Tensor, counts: Counts, groups: int) -> list[Looked]:
    """What each of the groups was asked for, by ranks; the inverse of ``pack``."""
    used = [place for place in range(3 * groups) if any(row[place] for row in counts)] or [0]
    parts = regroup(received, [[row[place] for place in used] for row in counts])
    found = dict(zip(used, parts, strict=True))
    looked = []
    for group in range(groups):
        rows = found.get(group, received[:0])
        asked = [row[group] for row in counts]
        lengths = weights = None
        if groups + group in found:
            sizes = [row[groups + group] for row in counts]
            lengths = _filled(found[groups + group], sizes, asked)
        if 2 * groups + group in found:
            sizes = [row[2 * groups + group] for row in counts]
            bits = found[2 * groups + group].view(torch.float64)
            weights = _filled(bits.float(), sizes, asked)
        looked.append(Looked(rows, lengths, weights))
    return looked


def _filled(values: torch.Tensor, sizes: list[int], asked: list[int]) -> torch.Tensor:
    """``values`` with ones for the ranks that sent none and ``asked`` for some rows."""
    if all(size or not rows for size, rows in zip(sizes, asked, strict=True)):
        return values
    parts = zip(values.split(sizes), asked, strict=True)
    return torch.cat([part if len(part) else part.new_ones(rows) for part, rows in parts])


def segments(counts: Counts, groups: int) -> Counts:
    """How many rows of each group [rank][group] come back for ``counts`` of sections."""
    return [[row[groups + g] or row[g] for g in range(groups)] for row in counts]


def floats(widths: Sequence[int], counts: Counts) -> Counts:
    """Floats [rank][group] of the rows, so wide in each group, that come back for ``counts``."""
    rows = segments(counts, len(widths))
    return [[n * w for n, w in zip(row, widths, strict=True)] for row in rows]


def joined(looked: Sequence[Looked]) -> Looked:
    """What several backwards looked up, one after the other."""
    if len(looked) == 1:
        return looked[0]
    lengths = [each.lengths for each in looked]
    weights = [each.weights for each in looked]
    rows = [each.rows for each in looked]
    return Looked(torch.cat(rows), _with_ones(lengths, rows), _with_ones(weights, rows))


def _with_ones(
    given: Sequence[torch.Tensor | None], rows: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    like = next((part for part in given if part is not None), None)
    if like is None:
        return None
    pairs = zip(given, rows, strict=True)
    return torch.cat([like.new_ones(len(r)) if part is None else part for part, r in pairs])


def without_empty(counts: Counts) -> Counts:
    """``counts`` of floats, with a section of one more for ranks that have none."""
    heads = [int(not any(row)) for row in counts]
    return [[*row, head] for row, head in zip(counts, heads, strict=True)] if any(heads) else counts


def spoil(sent: torch.Tensor, counts: Counts) -> None:
    """Tell every rank that what it gets is no use: the first float for each becomes nan."""
    sent.index_fill_(0, _firsts(counts, sent.device), math.nan)


def is_spoilt(received: torch.Tensor, counts: Counts) -> bool:
    """Whether some rank said so."""
    return bool(received.index_select(0, _firsts(counts, received.device)).isnan().any())


def _firsts(counts: Counts, device: torch.device) -> torch.Tensor:
    """Where the values of each rank begin."""
    return torch.tensor([0, *itertools.accumulate(map(sum, counts[:-1]))], device=device)


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
    if len(counts) == 1:
        return list(parts)
    return [torch.cat(parts[group::groups]) for group in range(groups)]
