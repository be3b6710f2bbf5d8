"""How ranks ask each other for rows: how many, and which; or that their ids are no rows."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.core.errors import PeerError, ShardwrightError
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings import wire
from shardwright.runtime.embeddings.guide import Guide, Request

_WORDS = 512  # bytes of what a rank says


class Asking:
    """The exchange of ids of one module of tables, whose route are ``guides``, one at least.

    Counts go first, or with the ids where as many of these go to each rank in every step.
    """

    def __init__(self, comm: Comm, guides: list[Guide], device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.sections = 3 * len(guides)
        steady = comm.size > 1 and all(guide.is_steady for guide in guides)
        self.steady = _Steady(comm.size, self.sections) if steady else None

    def begin(self, asked: list[Request], error: ShardwrightError | None = None) -> Sent:
        """Send what is ``asked`` of each group, which keep what is left to do then; or an ``error``
        in this rank's ids in place of it, so that all ranks raise (collective)."""
        if error is not None:
            sent, counts = torch.zeros(0, dtype=torch.int64, device=self.device), []
        else:
            sent, counts = wire.pack(asked, self.comm.size)
            if any(sent is each.lengths for each in asked):  # alone, which the backward needs
                sent = sent.clone()
            asked[:] = [each.without_rows() for each in asked]
        way = (_SentAlong if self.steady else _SentAfter)(self, sent, counts, error)
        del sent
        way.send()
        return way

    def heard(self, received: torch.Tensor) -> wire.Counts:
        """How much of each section every rank sends, of their announcements."""
        served: wire.Counts = received.view(self.comm.size, -1).tolist()
        return served

    def check_refused(self, served: wire.Counts) -> None:
        """PeerError where a rank announced a fault in place of counts (collective then)."""
        refused = [rank for rank, row in enumerate(served) if min(row) < 0]
        if refused:
            raise _refused(self.comm, refused, _words_of_all(self.comm, ""))


class Sent:
    """Ids on their way, or the ``error`` in them. ``finish`` gives counts sent to each rank,
    received from each, and what came with these.

    It raises the error, or PeerError where another rank has one.
    """

    def __init__(
        self,
        asking: Asking,
        sent: torch.Tensor,
        counts: wire.Counts,
        error: ShardwrightError | None,
    ) -> None:
        self.asking, self.counts, self.error = asking, counts, error
        self._sent: torch.Tensor | None = sent
        self._travelling: wire.Travelling | None = None

    def send(self) -> None:
        """Let it be on its way."""
        raise NotImplementedError

    def advance(self) -> None:
        """Let what has to wait for other ranks' counts be on its way."""

    def finish(self) -> tuple[wire.Counts, wire.Counts, torch.Tensor]:
        """Wait for everything; once."""
        raise NotImplementedError

    def _exchange(
        self, label: str, values: torch.Tensor, into: list[int] | None, out: list[int] | None
    ) -> torch.Tensor:
        received = values.new_empty(len(values) if into is None else sum(into))
        comm = self.asking.comm
        pending = comm.all_to_all(label, received, values, into or (), out or (), wait=False)
        self._travelling = wire.Travelling(received, values, pending)
        return received

    def _wait(self) -> None:
        """The message is there; the error is raised once every rank has heard of it."""
        if self._travelling is not None:
            self._travelling.arrive()
            self._travelling = None

    def _raise(self) -> None:
        if self.error is not None:
            _words_of_all(self.asking.comm, str(self.error))
            raise self.error


class _SentAfter(Sent):
    """Counts go first."""

    def send(self) -> None:
        asking = self.asking
        if self.error is None:
            counts = torch.tensor(self.counts, device=asking.device).view(-1)
        else:
            counts = torch.full((asking.comm.size * asking.sections,), -1, device=asking.device)
        self._received = self._exchange("exchange counts", counts, None, None)
        self._served: wire.Counts | None = None

    def advance(self) -> None:
        if self._served is not None:
            return
        self._wait()
        self._served = served = self.asking.heard(self._received)
        sent, self._sent = self._sent, None
        if sent is None or self.error is not None or any(min(row) < 0 for row in served):
            return
        into, out = [*map(sum, served)], [*map(sum, self.counts)]
        self._received = self._exchange("exchange ids", sent, into, out)

    def finish(self) -> tuple[wire.Counts, wire.Counts, torch.Tensor]:
        self.advance()
        self._wait()
        self._raise()
        assert self._served is not None
        self.asking.check_refused(self._served)
        return self.counts, self._served, self._received


class _SentAlong(Sent):
    """Counts and ids go together, as many of these as were sent the last times."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        steady, sent = self.asking.steady, self._sent
        assert steady is not None
        assert sent is not None
        self._sizes = steady.sizes()
        if self.error is None:
            self._sent, self._rest = steady.pack(sent, self.counts), steady.rest(sent, self.counts)
        else:
            self._sent = sent.new_full((sum(self._sizes[1]),), -1)
        self._received: torch.Tensor | None = None
        self._heard: tuple[wire.Counts, list[torch.Tensor], bool] | None = None

    def send(self) -> None:
        message, self._sent = self._sent, None
        assert message is not None
        self._received = self._exchange("exchange ids", message, *self._sizes)

    def advance(self) -> None:
        if self._heard is not None:
            return
        steady, received = self.asking.steady, self._received
        assert steady is not None
        assert received is not None
        self._wait()
        served, came, more = self._heard = steady.unpack(received, self._sizes[0])
        self._received = None
        if more and self.error is None and all(min(row) >= 0 for row in served):
            rest, left = self._rest
            self._missing = [sum(row) - len(part) for row, part in zip(served, came, strict=True)]
            self._received = self._exchange("exchange more ids", rest, self._missing, left)

    def finish(self) -> tuple[wire.Counts, wire.Counts, torch.Tensor]:
        self.advance()
        assert self._heard is not None
        assert self.asking.steady is not None
        served, came, _ = self._heard
        self._wait()
        self._raise()
        self.asking.check_refused(served)
        others, self._received, self._heard = self._received, None, None
        if others is not None:
            pairs = zip(came, others.split(self._missing), strict=True)
            came = [part for pair in pairs for part in pair]
        self.asking.steady.learn(self.counts, served)
        return self.counts, served, torch.cat(came)


class _Steady:
    """How many ids ranks send each other, where it may be as many in every step.

    For pairs of ranks of which it was twice the same, so many travel beside their counts, as if it
    stayed so. Should it be more somewhere, all ranks hear of it and exchange the rest.
    """

    def __init__(self, ranks: int, sections: int) -> None:
        self.head = sections + 1  # counts, and whether there is more for any rank
        self.sent, self.received = [0] * ranks, [0] * ranks  # in the last step
        self.out, self.into = [0] * ranks, [0] * ranks  # beside the counts of this one

    def pack(self, values: torch.Tensor, counts: wire.Counts) -> torch.Tensor:
        """``values`` that lie by rank as the message for all of them."""
        sizes = [*map(sum, counts)]
        more = int(self._is_more(sizes))
        heads = values.new_tensor([[*row, more] for row in counts])
        parts = []
        for head, own, room in zip(heads, values.split(sizes), self.out, strict=True):
            parts += [head, own[:room]]
            if len(own) < room:
                parts.append(values.new_zeros(room - len(own)))
        return torch.cat(parts)

    def sizes(self) -> tuple[list[int], list[int]]:
        """Of what comes from each rank and goes to each."""
        into, out = ([self.head + room for room in rooms] for rooms in (self.into, self.out))
        return into, out

    def unpack(
        self, received: torch.Tensor, sizes: list[int]
    ) -> tuple[wire.Counts, list[torch.Tensor], bool]:
        """Counts of every rank, what of its values came with them, and whether there is more."""
        parts = received.split(sizes)
        heads = torch.stack([part[: self.head] for part in parts]).tolist()
        counts = [row[:-1] for row in heads]
        ends = [self.head + max(sum(row), 0) for row in counts]
        came = [part[self.head : end] for part, end in zip(parts, ends, strict=True)]
        return counts, came, any(row[-1] for row in heads)

    def rest(self, values: torch.Tensor, counts: wire.Counts) -> tuple[torch.Tensor, list[int]]:
        """What of ``values`` did not go with their counts, and how many for each rank."""
        sizes = [*map(sum, counts)]
        if not self._is_more(sizes):
            return values.new_empty(0), [0] * len(sizes)
        parts = values.split(sizes)
        left = [part[room:] for part, room in zip(parts, self.out, strict=True)]
        return torch.cat(left), [*map(len, left)]

    def _is_more(self, sizes: list[int]) -> bool:
        """Whether one rank gets more than has room."""
        return any(size > room for size, room in zip(sizes, self.out, strict=True))

    def learn(self, counts: wire.Counts, served: wire.Counts) -> None:
        """So many were sent and received."""
        sent, received = [*map(sum, counts)], [*map(sum, served)]
        self.out, self.into = (
            [n if n == m else 0 for n, m in zip(now, before, strict=True)]
            for now, before in ((sent, self.sent), (received, self.received))
        )
        self.sent, self.received = sent, received


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
    raw = own.encode()[:_WORDS].ljust(_WORDS, b"\0")
    said = torch.tensor(list(raw), dtype=torch.uint8, device=comm.mesh.device_type)
    every = said.new_empty(comm.size * _WORDS)
    comm.all_gather("why ids were refused", every, said)
    rows = every.view(comm.size, _WORDS).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]
