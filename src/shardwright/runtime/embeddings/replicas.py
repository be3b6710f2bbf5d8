"""Tables that every rank keeps whole: what their rows learn is summed over ranks.

Small ones have a dense gradient. Of larger ones ranks exchange the rows that they looked up, each
once with the sum of its gradients, as long as these are few beside the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shardwright.core.schedule import replicas_ride, rows_are_few
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.bags import cat
from shardwright.runtime.embeddings.guide import Guide, Request
from shardwright.runtime.embeddings.route import Group
from shardwright.runtime.embeddings.store import InitialBlock, Store
from shardwright.runtime.embeddings.update import Looked, Touched

_DENSE = -1  # a rank's word that it has a dense gradient


@dataclass(slots=True)
class Learnt:
    """What a backward brought to replicas: a ``dense`` gradient of all, flat, or of each group the
    rows that were looked up; one of the two."""

    dense: torch.Tensor | None
    touched: list[Touched]


class Replicas:
    """The replicated tables of a module, a store to each group; ``rides``: their dense gradient
    travels with the row gradients of ``routed`` tables."""

    def __init__(
        self,
        groups: Sequence[Group],
        comm: Comm,
        initial: InitialBlock,
        routed: bool,
    ) -> None:
        self.comm = comm
        self.device = torch.device(comm.mesh.device_type)
        self.stores = [Store(g, comm.rank, initial, comm.probe, self.device) for g in groups]
        self.guides = [Guide.of(group, 1, self.device) for group in groups]
        self.sizes = [s.weight.numel() + s.moving_rows for s in self.stores]
        self.nbytes = torch.float32.itemsize * sum(self.sizes)
        self.rides = bool(groups) and replicas_ride(routed, comm.size, self.nbytes)

    def learnt(self, gradients: Sequence[torch.Tensor], asked: Sequence[Request]) -> Learnt:
        """This rank's share: of each group the gradient [S, width] of what was asked."""
        pairs = list(zip(asked, gradients, strict=True))
        row = torch.int64.itemsize
        nbytes = sum(len(a.rows) * (row + g.shape[1] * g.itemsize) for a, g in pairs)
        if rows_are_few(self.comm.size, self.nbytes, nbytes):
            return Learnt(None, [each.looked.summed(own) for each, own in pairs])
        spread = (Touched(each.rows, each.looked.spread(own)) for each, own in pairs)
        return Learnt(self._dense(spread), [])

    def reduce(self, learnt: Learnt) -> None:
        """Sum over ranks (collective). Rows come in the order of ranks, so that all of them come to
        the same bits."""
        if rows_are_few(self.comm.size, self.nbytes, 0):  # else nobody has rows
            ends = self._announce(learnt)
            if min(map(min, ends)) != _DENSE:
                self._gather(learnt, ends)
                return
        if learnt.dense is None:
            learnt.dense = self._dense(learnt.touched)
            learnt.touched = []
        self.comm.all_reduce("reduce replicated tables", learnt.dense)

    def _announce(self, learnt: Learnt) -> list[list[int]]:
        """How many rows of each group every rank has [rank][group]."""
        words = [_DENSE] * len(self.stores)
        if learnt.dense is None:
            words = [len(each.rows) for each in learnt.touched]
        own = torch.tensor(words, device=self.device)
        every = own.new_empty(self.comm.size * len(words))
        self.comm.all_gather("count rows of replicated tables", every, own)
        counts: list[list[int]] = every.view(self.comm.size, -1).tolist()
        return counts

    def _gather(self, learnt: Learnt, counts: list[list[int]]) -> None:
        """Row numbers of every group, then their gradients, of all ranks."""
        if self.comm.size == 1:
            return
        parts = [each.rows.view(torch.float32) for each in learnt.touched]
        parts += [each.gradient.view(-1) for each in learnt.touched]
        numbers = torch.int64.itemsize // torch.float32.itemsize
        widths = [store.width for store in self.stores]
        sizes = [
            [n * numbers for n in row] + [n * width for n, width in zip(row, widths, strict=True)]
            for row in counts
        ]
        flat = self.comm.gather_uneven(
            "gather rows of replicated tables", torch.cat(parts), [*map(sum, sizes)]
        )
        found = flat.split([size for row in sizes for size in row])
        groups = len(self.stores)
        for place, store in enumerate(self.stores):
            rows, gradients = (torch.cat(found[k :: 2 * groups]) for k in (place, place + groups))
            learnt.touched[place] = Touched(rows.view(torch.int64), gradients.view(-1, store.width))

    def _dense(self, touched: Iterable[Touched]) -> torch.Tensor:
        """The gradients of rows as one of all replicas, flat, each group's with how often its rows
        were looked up where that counts."""
        dense = torch.zeros(sum(self.sizes), device=self.device)
        self.comm.probe.holds(dense, "gradient")
        for store, (rows, gradient), part in zip(
            self.stores, touched, dense.split(self.sizes), strict=True
        ):
            index = rows.unsqueeze(1).expand_as(gradient)
            size = store.weight.numel()
            part[:size].view_as(store.weight).scatter_add_(0, index, gradient)
            if store.moving_rows:
                part[size:].scatter_add_(0, rows, torch.ones(len(rows), device=self.device))
        return dense

    def update(self, backwards: Sequence[Learnt], rate: float, number: int) -> None:
        """Change rows by the mean over ranks of what all backwards brought."""
        scale = 1.0 / self.comm.size
        whole = [each.dense for each in backwards if each.dense is not None]
        if not whole:
            for place, store in enumerate(self.stores):
                rows = cat([each.touched[place].rows for each in backwards])
                gradient = cat([each.touched[place].gradient for each in backwards])
                store.gradient_bytes = 0
                store.update(Looked(rows), gradient.mul_(scale), rate, number)
            return
        whole += [self._dense(each.touched) for each in backwards if each.dense is None]
        first, *others = whole
        for other in others:
            first += other
        for store, part in zip(self.stores, first.split(self.sizes), strict=True):
            store.gradient_bytes = part.nbytes
            size = store.weight.numel()
            looked = part[size:] if store.moving_rows else None
            gradient = part[:size].view_as(store.weight).mul_(scale)
            store.update_all(gradient, looked, rate, number)
