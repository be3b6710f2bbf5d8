"""What ranks add up beside the exchange of rows: what rows of replicated tables learn, and sums
over the columns of rows that are cut.

Tables that every rank keeps whole have a dense gradient, together; of those that learn by rows
ranks exchange the rows that they looked up, each once with the sum of its gradients. A batch
touches the same rows of a table in every one of its column ranges, so ranks that have columns of
the same rows have sums for them in the same order, and exchange these without a word about which.
"""

# All ranks must come to the same bits, or what they keep whole drifts apart: sums are made in the
# order of ranks on every one of them, never in that in which parts arrive, or by one all-reduce,
# whose result is the same everywhere.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.core.schedule import replicas_ride
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.bags import cat
from shardwright.runtime.embeddings.initial import InitialBlock
from shardwright.runtime.embeddings.route import Strip, TableGroup
from shardwright.runtime.embeddings.routing import GroupRouting, RowRequest
from shardwright.runtime.embeddings.store import Store
from shardwright.runtime.embeddings.update import Looked, Touched


@dataclass(slots=True)
class Learnt:
    """What a backward brought to replicas: of those with a ``dense`` gradient one of all, flat, and
    of each other group, by its place, the rows that were looked up."""

    dense: torch.Tensor | None
    touched: dict[int, Touched]


class ReplicatedStores:
    """The replicated tables of a module, a store to each group; ``rides``: their dense gradient
    travels with the row gradients of ``routed`` tables."""

    def __init__(
        self, groups: Sequence[TableGroup], comm: Comm, initial: InitialBlock, routed: bool
    ) -> None:
        self.comm = comm
        self.device = torch.device(comm.mesh.device_type)
        self.stores = [Store(g, comm.rank, initial, comm.probe, self.device) for g in groups]
        self.routings = [GroupRouting.of(group, 1, self.device) for group in groups]
        self.whole = [k for k, group in enumerate(groups) if not group.key.by_rows]
        self.by_rows = [k for k, group in enumerate(groups) if group.key.by_rows]
        # One gradient of all, so that one collective sums them.
        kept = [self.stores[k] for k in self.whole]
        self.sizes = [s.weight.numel() + s.moving_rows for s in kept]
        nbytes = torch.float32.itemsize * sum(self.sizes)
        self.rides = replicas_ride(routed, comm.size, nbytes)

    def learnt(self, gradients: Sequence[torch.Tensor], asked: Sequence[RowRequest]) -> Learnt:
        """This rank's share: of each group the gradient [S, width] of what was asked."""
        dense = self._dense(gradients, asked) if self.whole else None
        touched = {
            place: asked[place].looked.summed(gradients[place], len(self.stores[place].weight))
            for place in self.by_rows
        }
        return Learnt(dense, touched)

    def reduce(self, learnt: Learnt) -> None:
        """Sum over ranks what did not ride (collective). Rows come in the order of ranks, so that
        all of them come to the same bits."""
        if learnt.dense is not None and not self.rides:
            self.comm.all_reduce("reduce replicated tables", learnt.dense)
        if learnt.touched and self.comm.size > 1:
            self._gather(learnt.touched)

    def _gather(self, touched: dict[int, Touched]) -> None:
        """How many rows of each group every rank has; then row numbers of every group and their
        gradients, of all ranks."""
        own = torch.tensor([len(rows) for rows, _ in touched.values()], device=self.device)
        every = own.new_empty(self.comm.size * len(own))
        self.comm.all_gather("count rows of replicated tables", every, own)
        # Row numbers as the bits of floats, so that one gather brings them and their gradients.
        # Nobody computes with them on the way.
        parts = [rows.view(torch.float32) for rows, _ in touched.values()]
        parts += [gradient.view(-1) for _, gradient in touched.values()]
        numbers = torch.int64.itemsize // torch.float32.itemsize
        widths = [numbers] * len(touched) + [self.stores[place].width for place in touched]
        # Every rank needs all sizes before the gather, which is uneven.
        counts = every.view(self.comm.size, -1).tolist()
        sizes = [[n * w for n, w in zip(row * 2, widths, strict=True)] for row in counts]
        flat = self.comm.gather_uneven(
            "gather rows of replicated tables", torch.cat(parts), [*map(sum, sizes)]
        )
        found = flat.split([size for row in sizes for size in row])
        for number, place in enumerate(touched):
            ends = (number, number + len(touched))
            rows, gradients = (torch.cat(found[end :: len(widths)]) for end in ends)
            width = self.stores[place].width
            touched[place] = Touched(rows.view(torch.int64), gradients.view(-1, width))

    def _dense(
        self, gradients: Sequence[torch.Tensor], asked: Sequence[RowRequest]
    ) -> torch.Tensor:
        """The gradients of rows as one of all replicas that have one, flat, each group's with how
        often its rows were looked up where that counts."""
        # Zeros for rows that were not looked up here: another rank has looked up others.
        dense = torch.zeros(sum(self.sizes), device=self.device)
        self.comm.probe.holds(dense, "gradient")
        for place, part in zip(self.whole, dense.split(self.sizes), strict=True):
            store, rows = self.stores[place], asked[place].rows
            gradient = asked[place].looked.spread(gradients[place])
            index = rows.unsqueeze(1).expand_as(gradient)
            size = store.weight.numel()
            # Rows may repeat, and scatter_add_ adds each.
            part[:size].view_as(store.weight).scatter_add_(0, index, gradient)
            # The sum of gradients does not say which rows were looked up, and some rules move these
            # without a gradient.
            if store.moving_rows:
                part[size:].scatter_add_(0, rows, torch.ones(len(rows), device=self.device))
        return dense

    def update(self, backwards: Sequence[Learnt], rate: float, number: int) -> None:
        """Change rows by the mean over ranks of what all backwards brought."""
        scale = 1.0 / self.comm.size
        for place in self.by_rows:
            rows = cat([each.touched[place].rows for each in backwards])
            gradient = cat([each.touched[place].gradient for each in backwards])
            self.stores[place].update(Looked(rows), gradient.mul_(scale), rate, number)
        dense = [each.dense for each in backwards if each.dense is not None]
        if dense:
            self._update_whole(dense, scale, rate, number)

    def _update_whole(
        self, dense: Sequence[torch.Tensor], scale: float, rate: float, number: int
    ) -> None:
        # In the order of backwards, which is the same on every rank.
        first, *others = dense
        for other in others:
            first += other
        for place, part in zip(self.whole, first.split(self.sizes), strict=True):
            store = self.stores[place]
            store.gradient_bytes = part.nbytes
            size = store.weight.numel()
            looked = part[size:] if store.moving_rows else None
            gradient = part[:size].view_as(store.weight).mul_(scale)
            store.update_all(gradient, looked, rate, number)


@dataclass(frozen=True, slots=True)
class _CutRows:
    """Rows of table ``fqn``, from ``row`` on, of which this rank has columns: the ``ranks`` that
    have some, and where they are in this one's groups."""

    fqn: str
    row: int
    ranks: list[int]
    places: list[tuple[int, slice]]


class ColumnSums:
    """Sums over all columns of rows whose columns lie in several blocks; ``groups`` are those whose
    sums it adds up."""

    def __init__(self, strips: Sequence[Strip], comm: Comm) -> None:
        self.comm = comm
        self.groups = {group for strip in strips for _, group, _ in strip.members}
        self.own = [
            _CutRows(
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
        for cut, part in zip(self.own, own, strict=True):
            for rank in cut.ranks:
                sent[rank].append(part)
        # Its own part is added from where it is.
        sent[self.comm.rank] = []
        sizes = [sum(map(len, sent[rank])) for rank in range(self.comm.size)]
        # ``empty`` because cat takes no empty list, and a rank may have nothing to send.
        out = torch.cat([empty, *(part for rank in range(self.comm.size) for part in sent[rank])])
        received = torch.empty_like(out)
        self.comm.all_to_all("exchange sums over columns", received, out, sizes, sizes)
        came = {
            rank: iter(values.split([len(part) for part in sent[rank]]))
            for rank, values in enumerate(received.split(sizes))
        }
        for cut, part, views in zip(self.own, own, parts, strict=True):
            # in the order of ranks, so that all of them come to the same bits
            total = torch.zeros_like(part)
            for rank in cut.ranks:
                total += part if rank == self.comm.rank else next(came[rank])
            for view in views:
                # Back into the sums of each block, where its optimizer's step looks.
                view.copy_(total)

    def _parts(
        self, rows: Mapping[int, torch.Tensor], sums: Mapping[int, torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Of all rows that are cut those of ``sums`` that are theirs, for each of their blocks."""
        ends: dict[int, list[int]] = defaultdict(list)
        for cut in self.own:
            for group, rows_of in cut.places:
                ends[group] += [rows_of.start, rows_of.stop]
        # Where cut rows begin and end among the touched ones, by one search for each group and not
        # by a mask over all of them.
        found = {
            group: iter(torch.searchsorted(rows[group], rows[group].new_tensor(at)).tolist())
            for group, at in ends.items()
        }
        return [
            [sums[group][next(found[group]) : next(found[group])] for group, _ in cut.places]
            for cut in self.own
        ]
