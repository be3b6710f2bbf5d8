"""How ranks ask each other for rows: how many, and which; or that their ids are no rows."""

from __future__ import annotations

import torch

from shardwright.core.errors import PeerError
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

    def ask(self, asked: list[Request]) -> tuple[wire.Counts, wire.Counts, torch.Tensor]:
        """Send what is ``asked`` of each group, which keep what is left to do then: counts sent to
        each rank, received from each, and what came with these (collective).

        PeerError where another rank refuses its ids.
        """
        sent, counts = wire.pack(asked, self.comm.size)
        asked[:] = [each.without_rows() for each in asked]
        if self.steady is not None:
            message, (rest, left) = self.steady.pack(sent, counts), self.steady.rest(sent, counts)
            del sent
            received = self._exchange(self.steady, message)
            del message
            served, came, more = self.steady.unpack(received)
            self._check_refused(served)
            if more:
                missing = [sum(row) - len(part) for row, part in zip(served, came, strict=True)]
                others = received.new_empty(sum(missing))
                self.comm.all_to_all("exchange more ids", others, rest, missing, left)
                pairs = zip(came, others.split(missing), strict=True)
                came = [part for pair in pairs for part in pair]
            self.steady.learn(counts, served)
            return counts, served, torch.cat(came)
        served = self._announced(torch.tensor(counts, device=self.device).view(-1))
        into, out = [*map(sum, served)], [*map(sum, counts)]
        received = sent.new_empty(sum(into))
        self.comm.all_to_all("exchange ids", received, sent, into, out)
        return counts, served, received

    def refuse(self, fault: str) -> None:
        """Announce a ``fault`` in this rank's ids in place of counts, so that all ranks raise."""
        with self.comm.probe.phase("exchange_ids"):
            if self.steady is None:
                size = self.comm.size * self.sections
                refusal = torch.full((size,), -1, device=self.device)
                self.comm.all_to_all("exchange counts", torch.empty_like(refusal), refusal)
            else:
                _, out = self.steady.sizes()
                self._exchange(self.steady, torch.full((sum(out),), -1, device=self.device))
            _words_of_all(self.comm, fault)

    def _exchange(self, steady: _Steady, message: torch.Tensor) -> torch.Tensor:
        into, out = steady.sizes()
        received = message.new_empty(sum(into))
        self.comm.all_to_all("exchange ids", received, message, into, out)
        return received

    def _announced(self, counts: torch.Tensor) -> wire.Counts:
        """Exchange how much of each section every rank will send to every other."""
        heard = torch.empty_like(counts)
        self.comm.all_to_all("exchange counts", heard, counts)
        served: wire.Counts = heard.view(self.comm.size, -1).tolist()
        self._check_refused(served)
        return served

    def _check_refused(self, served: wire.Counts) -> None:
        """PeerError where a rank announced a fault in place of counts (collective then)."""
        refused = [rank for rank, row in enumerate(served) if min(row) < 0]
        if refused:
            raise _refused(refused, _words_of_all(self.comm, ""))


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
        more = int(any(size > room for size, room in zip(sizes, self.out, strict=True)))
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

    def unpack(self, received: torch.Tensor) -> tuple[wire.Counts, list[torch.Tensor], bool]:
        """Counts of every rank, what of its values came with them, and whether there is more."""
        parts = received.split(self.sizes()[0])
        heads = torch.stack([part[: self.head] for part in parts]).tolist()
        counts = [row[:-1] for row in heads]
        ends = [self.head + max(sum(row), 0) for row in counts]
        came = [part[self.head : end] for part, end in zip(parts, ends, strict=True)]
        return counts, came, any(row[-1] for row in heads)

    def rest(self, values: torch.Tensor, counts: wire.Counts) -> tuple[torch.Tensor, list[int]]:
        """What of ``values`` did not go with their counts, and how many for each rank."""
        parts = values.split([*map(sum, counts)])
        left = [part[room:] for part, room in zip(parts, self.out, strict=True)]
        return torch.cat(left), [*map(len, left)]

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
        raise _refused([rank for rank, said in enumerate(words) if said], words)


def _refused(ranks: list[int], words: list[str]) -> PeerError:
    """What ranks hear whose own ids are fine; ``words`` are those of every rank."""
    named = ", ".join(map(str, ranks))
    return PeerError(f"ids were refused on rank {named}, no rows were moved: {words[ranks[0]]}")


def _words_of_all(comm: Comm, own: str) -> list[str]:
    """What every rank has to say, the first bytes of it (collective)."""
    raw = own.encode()[:_WORDS].ljust(_WORDS, b"\0")
    said = torch.tensor(list(raw), dtype=torch.uint8, device=comm.mesh.device_type)
    every = said.new_empty(comm.size * _WORDS)
    comm.all_gather("why ids were refused", every, said)
    rows = every.view(comm.size, _WORDS).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]
