"""What travels between ranks for tables, packed by rank, and the exchange of ids: how many, which,
or that some are no rows.

To the owners of rows go, of each group, row numbers, lengths of segments and weights of rows, the
last two where a rank has any; all as int64. Rows and gradients go as fp32, or rounded to what has
half the bytes. By rank there is one section after the other.
"""

# Two things must stay true. Every rank makes the same exchanges in the same order, whatever its ids
# are: an error in its own must not be raised before all have heard of it, or the others would wait
# for its rows. So a rank with bad ids sends -1 in place of counts, all of them then say why in one
# gather, and nobody moves a row. And what is sent has no memory once it has arrived
# (``Travelling``): plans count on it.

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.core.errors import PeerError, ShardwrightError
from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.embeddings.routing import GroupRouting, RowRequest
from shardwright.runtime.embeddings.update import Looked

_WORDS = 512  # bytes of what a rank says
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


def pack(asked: Sequence[RowRequest], ranks: int) -> tuple[torch.Tensor, Counts]:
    """Requests of groups as one tensor, and the counts [rank][3 x groups] of its sections."""
    none = [0] * ranks
    sections = [(each.rows, each.counts) for each in asked]
    for each in asked:
        lengths = each.lengths
        sections.append((each.rows[:0], none) if lengths is None else (lengths, each.segments))
    for each in asked:
        weights = each.weights
        # As bits among the ids: one exchange brings everything, where a message of floats would be
        # another collective to wait for.
        bits = None if weights is None else weights.double().view(torch.int64)
        sections.append((each.rows[:0], none) if bits is None else (bits, each.counts))
    counts = [list(row) for row in zip(*(counts for _, counts in sections), strict=True)]
    # Empty sections send nothing, but counts of all of them travel. So a rank that has no weights
    # needs no other message than one that has, and the receiver learns which came.
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


def _segments(counts: Counts, groups: int) -> Counts:
    """How many rows of each group [rank][group] come back for ``counts`` of sections."""
    return [[row[groups + g] or row[g] for g in range(groups)] for row in counts]


def floats(widths: Sequence[int], counts: Counts) -> Counts:
    """Floats [rank][group] of the rows, so wide in each group, that come back for ``counts``."""
    rows = _segments(counts, len(widths))
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
    # In the values themselves, for ranks would otherwise need a collective of their own to say so.
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


def send(
    comm: Comm,
    label: str,
    values: torch.Tensor,
    into: list[int],
    out: list[int],
    received: torch.Tensor | None = None,
) -> Travelling:
    """Begin the all-to-all of ``values`` that lie by rank, ``out`` to and ``into`` from each;
    ``received`` is new memory unless it is given."""
    received = values.new_empty(sum(into)) if received is None else received
    pending = comm.shards.all_to_all(label, received, values, into, out, wait=False)
    return Travelling(received, values, pending)


class IdExchange:
    """The exchange of ids of one module of tables, whose route are ``routings``, one at least.

    Ranks tell each other counts first, for nobody knows how many ids come. Where as many go to each
    rank in every step (``is_steady``) that is a wait too many: for pairs of ranks of which it was
    twice the same, so many travel beside their counts, as if it stayed so. Should it be more
    somewhere, all ranks hear of it and exchange the rest.
    """

    def __init__(self, comm: Comm, routings: list[GroupRouting], device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.is_steady = comm.size > 1 and all(routing.is_steady for routing in routings)
        self.sections = 3 * len(routings)
        # what a message begins with: counts, and whether there is more than it has room for
        self.head = self.sections + self.is_steady
        self.sent = self.received = [0] * comm.size  # ids in the last step, by rank
        self.out = self.into = [0] * comm.size  # room for ids beside the counts of this one

    def begin(self, asked: list[RowRequest], error: ShardwrightError | None = None) -> SentIds:
        """Send what is ``asked`` of each group, which keep what is left to do then; or an ``error``
        in this rank's ids in place of it, so that all ranks raise (collective)."""
        if error is not None:
            # As long as the message that the others wait for, or their exchange would fail before
            # they hear why. Counts are never below 0.
            nothing = torch.full((sum(self.out) + self.head * self.comm.size,), -1)
            return SentIds(self, nothing.to(self.device), [], None, error)
        values, counts = pack(asked, self.comm.size)
        if any(values is each.lengths for each in asked):  # alone, which the backward needs
            values = values.clone()
        asked[:] = [each.without_rows() for each in asked]
        message, rest = self._message(values, counts)
        del values
        return SentIds(self, message, counts, rest)

    def _message(self, values: torch.Tensor, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        """The message for all ranks, of ``values`` that lie by rank, and what has no room in it."""
        sizes = [*map(sum, counts)]
        # One rank's surplus is told to all: a second exchange is made by every rank or by none.
        more = any(size > room for size, room in zip(sizes, self.out, strict=True))
        rows = [[*row, int(more)] for row in counts] if self.is_steady else counts
        heads = torch.tensor(rows, device=self.device)
        if not any(self.out):
            return heads.view(-1), values
        parts, left = [], []
        for head, own, room in zip(heads, values.split(sizes), self.out, strict=True):
            parts += [head, own[:room]]
            if len(own) < room:
                # The receiver has made room for so many; counts say which of them are ids.
                parts.append(values.new_zeros(room - len(own)))
            left.append(own[room:])
        return torch.cat(parts), torch.cat(left) if more else values.new_empty(0)

    def read(self, message: torch.Tensor) -> tuple[Counts, list[torch.Tensor], bool]:
        """Counts of every rank, what of its ids came with them, if any can, and whether there is
        more."""
        if not any(self.into):
            heads, came = message.view(self.comm.size, -1).tolist(), []
        else:
            parts = message.split([self.head + room for room in self.into])
            heads = torch.stack([part[: self.head] for part in parts]).tolist()
            ends = [self.head + max(sum(row[: self.sections]), 0) for row in heads]
            came = [part[self.head : end] for part, end in zip(parts, ends, strict=True)]
        counts = [row[: self.sections] for row in heads]
        return counts, came, not self.is_steady or any(row[-1] for row in heads)

    def learn(self, counts: Counts, served: Counts) -> None:
        """So many were sent and received."""
        # Where the numbers of ids change anyway, room that was right twice is wrong the third time.
        if not self.is_steady:
            return
        sent, received = [*map(sum, counts)], [*map(sum, served)]
        # Both ends of a pair see the same numbers, so both come to the same room without a word.
        # That holds only because a refused step is learnt from by nobody.
        self.out = _as_before(sent, self.sent)
        self.into = _as_before(received, self.received)
        self.sent, self.received = sent, received


def _as_before(now: list[int], before: list[int]) -> list[int]:
    """What is as it was, 0 else."""
    return [n if n == m else 0 for n, m in zip(now, before, strict=True)]


class SentIds:
    """Ids on their way: a message with their ``counts`` and the ``rest``, or the ``error`` in
    them."""

    def __init__(
        self,
        exchange: IdExchange,
        message: torch.Tensor,
        counts: Counts,
        rest: torch.Tensor | None,
        error: ShardwrightError | None = None,
    ) -> None:
        self.exchange, self.counts, self.error = exchange, counts, error
        self._rest = rest
        self._served: Counts | None = None
        self._came: list[torch.Tensor] = []
        self._missing: list[int] = []
        label = "exchange ids" if exchange.is_steady else "exchange counts"
        into = out = [exchange.head] * exchange.comm.size
        self._left = [*map(sum, counts)]
        if any(exchange.into) or any(exchange.out):
            into = [exchange.head + room for room in exchange.into]
            out = [exchange.head + room for room in exchange.out]
            pairs = zip(self._left, exchange.out, strict=True)
            self._left = [max(size - room, 0) for size, room in pairs]
        self._travelling: Travelling | None = send(exchange.comm, label, message, into, out)

    def advance(self) -> None:
        """Let what has to wait for other ranks' counts be on its way."""
        if self._served is not None:
            return
        assert self._travelling is not None
        message, self._travelling = self._travelling.arrive(), None
        self._served, self._came, more = self.exchange.read(message)
        rest, self._rest = self._rest, None
        # A rank with bad ids said -1 to everyone, so all ranks leave the second exchange out
        # together.
        if not more or rest is None or any(min(row) < 0 for row in self._served):
            return
        here = [*map(len, self._came)] or [0] * len(self._served)
        self._missing = [sum(row) - n for row, n in zip(self._served, here, strict=True)]
        label = "exchange more ids" if self.exchange.is_steady else "exchange ids"
        self._travelling = send(self.exchange.comm, label, rest, self._missing, self._left)

    def finish(self) -> tuple[Counts, Counts, torch.Tensor]:
        """Wait for everything; once. Counts sent to each rank, received from each, and the ids that
        came; raises the error, or PeerError where another rank has one."""
        self.advance()
        travelling, self._travelling = self._travelling, None
        others = None if travelling is None else travelling.arrive()
        comm, served, came = self.exchange.comm, self._served, self._came
        if self.error is not None:
            _words_of_all(comm, str(self.error))
            raise self.error
        assert served is not None
        if refused := [rank for rank, row in enumerate(served) if min(row) < 0]:
            raise _refused(comm, refused, _words_of_all(comm, ""))
        # After the refusals, which end the step on all ranks before anyone learns.
        self.exchange.learn(self.counts, served)
        if came and others is not None:
            pairs = zip(came, others.split(self._missing), strict=True)
            came = [part for pair in pairs for part in pair]
            others = None
        if others is None:
            none = torch.empty(0, dtype=torch.int64, device=self.exchange.device)
            others = torch.cat(came) if came else none
        return self.counts, served, others


def agree_on_ids(comm: Comm, fault: str = "") -> None:
    """Hear whether ids are rows on all ranks where none are exchanged; a rank with a ``fault`` in
    its own only says so (collective). PeerError where another rank has one."""
    number = torch.tensor([int(bool(fault))], device=comm.mesh.device_type)
    comm.all_reduce("whether ids are rows", number, largest=True)
    if not int(number):
        return
    words = _words_of_all(comm, fault)
    if not fault:
        raise _refused(comm, [rank for rank, said in enumerate(words) if said], words)


def _refused(comm: Comm, ranks: list[int], words: list[str]) -> PeerError:
    """What ranks hear whose own ids are fine; ``words`` are those of every rank."""
    named = ", ".join(str(comm.global_rank(rank)) for rank in ranks)
    return PeerError(f"ids were refused on rank {named}, no rows were moved: {words[ranks[0]]}")


def _words_of_all(comm: Comm, own: str) -> list[str]:
    """What every rank has to say, the first bytes of it (collective)."""
    # Of one length, for a gather of texts of any length would have to ask for these first.
    raw = own.encode()[:_WORDS].ljust(_WORDS, b"\0")
    said = torch.tensor(list(raw), dtype=torch.uint8, device=comm.mesh.device_type)
    every = said.new_empty(comm.size * _WORDS)
    comm.all_gather("why ids were refused", every, said)
    rows = every.view(comm.size, _WORDS).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]
