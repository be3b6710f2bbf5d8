"""The rows a rank keeps, with the optimizer's states beside them, and what ranks sum for them."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from shardwright.core.optimizers import BY_ROW
from shardwright.core.schedule import BAGS_OF_ONE, replicas_ride, rows_at_once
from shardwright.core.timeline import Kind
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings import update
from shardwright.runtime.embeddings.bags import cat
from shardwright.runtime.embeddings.initial import TILE, InitialBlock
from shardwright.runtime.embeddings.route import HeldBlock, Strip, TableGroup
from shardwright.runtime.embeddings.routing import GroupRouting, RowRequest
from shardwright.runtime.embeddings.update import Looked, Touched
from shardwright.runtime.probe import Probe
from shardwright.runtime.units.parameter import DTYPES

_LARGE_PAGE = 2**21
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_PIECE_BYTES = 2**22  # of starting values that are made at a time


class Store:
    """``weight`` [R, width] of all blocks of a group on this rank, each at its base row.

    ``states`` are those of the group's optimizer by torch's names, [R, width] or, of what it keeps
    by row, [R]; fp32 whatever the weight's dtype. Updates are numbered from 1.
    """

    def __init__(
        self,
        group: TableGroup,
        rank: int,
        initial: InitialBlock,
        probe: Probe,
        device: torch.device,
    ) -> None:
        self.held = group.held.get(rank, ())
        self.width, self.optimizer = group.key.width, group.key.optimizer
        self.rule = update.RULES[self.optimizer]
        # Of the whole row, although only some of its columns are here: the mean is over all of
        # them.
        self.dim = group.key.dim if self.optimizer in BY_ROW else 0
        self.device = device
        rows = sum(item.rows for item in self.held)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.rule.elements, (rows, self.width))
        shapes |= dict.fromkeys(self.rule.rows, (rows,))
        like = {"weight": ((rows, self.width), DTYPES[group.key.dtype])}
        like |= {name: (shape, torch.float32) for name, shape in shapes.items()}
        kept = self._allocate(like)
        self.weight, self.states = kept["weight"], {name: kept[name] for name in shapes}
        self._fill(initial)
        self.still: list[tuple[int, int]] = []  # ranges of rows that no step changes
        self.moving_rows = rows if self.rule.moves else 0  # change without a gradient, too
        self.gradient_bytes = 0  # of the last backward, if it is dense
        for tensor, kind in self.lasting():
            probe.holds(tensor, kind)

    def _allocate(
        self, like: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Room for the weight, and the states, which are 0."""
        found = {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in like.items()
        }
        for name, tensor in found.items():
            use_large_pages(tensor)
            if name != "weight":  # which is filled
                tensor.zero_()
        return found

    def _fill(self, initial: InitialBlock) -> None:
        """Weights start from ``initial``, piece by piece, for a block may be most of memory."""
        row_bytes = max(self.width * self.weight.element_size(), 1)
        step = max(_PIECE_BYTES // row_bytes // TILE[0], 1) * TILE[0]
        for item in self.held:
            (first, column), (rows, columns) = item.block.offsets, item.block.sizes
            cuts = [first, *range(first - first % step + step, first + rows, step), first + rows]
            # at tiles, of which none is made twice
            for low, high in itertools.pairwise(cuts if rows else ()):
                start = item.base + low - first
                self.weight[start : start + high - low] = initial(
                    item.block.tensor, (low, column), (high - low, columns)
                )

    def lasting(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        """The memory of the store, and what it is for."""
        yield self.weight, "weight"
        for state in self.states.values():
            yield state, "optimizer_state"

    def kept(self, item: HeldBlock) -> dict[Kind, int]:
        """Bytes that one block takes for as long as the store is there."""
        found: dict[Kind, int] = {"weight": self.block_view(item).nbytes}
        if self.states:
            found["optimizer_state"] = sum(s.nbytes for s in self.state_views(item).values())
        return found

    def settle(self) -> None:
        """``weight`` and ``states`` are complete, and may be changed, until the next lookup."""

    def block_view(self, item: HeldBlock) -> torch.Tensor:
        """The weights of one block, sharing storage."""
        self.settle()
        return self.weight[item.base : item.base + item.rows]

    def state_views(self, item: HeldBlock) -> dict[str, torch.Tensor]:
        """The optimizer's states of one block."""
        self.settle()
        rows = slice(item.base, item.base + item.rows)
        return {name: state[rows] for name, state in self.states.items()}

    def look_up(self, looked: Looked) -> torch.Tensor:
        """The sum [S, width] fp32 of the rows of every segment."""
        return self._summed(self.weight, looked)

    def _summed(self, table: torch.Tensor, looked: Looked) -> torch.Tensor:
        rows, lengths, weights = looked
        # Single rows by index_select; embedding_bag would make an offset for each.
        if lengths is None and weights is None and not _fetches_ahead(table, rows):
            return table.index_select(0, rows).float()
        if lengths is None:
            starts = torch.arange(len(rows), device=rows.device)
        else:
            starts = lengths.cumsum(0).sub_(lengths)
        if not len(starts):
            return table.new_zeros(0, self.width, dtype=torch.float32)
        if table.dtype != torch.float32:  # sums are made in fp32
            table = table.index_select(0, rows).float()
            rows = torch.arange(len(rows), device=rows.device)
        # Bags without any ids are zeros: there is no row to read.
        if not len(table):
            return table.new_zeros(len(starts), self.width)
        return functional.embedding_bag(rows, table, starts, mode="sum", per_sample_weights=weights)

    def update(self, looked: Looked, gradient: torch.Tensor, rate: float, number: int) -> None:
        """Apply the summed-over-ranks ``gradient`` [S, width] of segments."""
        # SGD adds the gradients of a row that repeats one by one and comes to their sum. Every
        # other rule needs the sum first, and so does a narrow dtype, which would round after each.
        in_place = self.optimizer == "sgd" and self.weight.dtype == torch.float32
        if in_place and looked.lengths is None and looked.weights is None:
            update.add_rows(self.weight, looked.rows, gradient.mul_(-rate))
            return
        # Some rows at a time, whose gradients are still in a core's cache when the rows are
        # changed. All at once would also be a second gradient in memory.
        for touched in looked.sums(gradient, len(self.weight), rows_at_once(self.width)):
            if in_place:
                update.add_rows(self.weight, touched.rows, touched.gradient.mul_(-rate))
            else:
                self.step(touched, self.squares(touched) if self.dim else None, rate, number)
            del touched  # before the next are made

    def squares(self, touched: Touched) -> torch.Tensor:
        """The share of this store's columns in the mean of the squared gradient [M]."""
        norms = torch.linalg.vector_norm(touched.gradient, dim=1)  # in one pass without a copy
        return norms.square_().div_(self.dim)

    def step(
        self, touched: Touched, squares: torch.Tensor | None, rate: float, number: int
    ) -> None:
        """Change the rows of ``touched``; ``squares`` [M] are means over all columns."""
        (rows, gradient), squares = self.moved(touched, squares)
        if not len(rows):
            return
        # Copies of the rows' states: ``rows`` are distinct, so each is written back once.
        states = [state.index_select(0, rows) for state in self.states.values()]
        change = self.rule.step(states, gradient, squares, rate, number)
        for state, changed in zip(self.states.values(), states, strict=True):
            state.index_copy_(0, rows, changed)
        if self.weight.dtype == torch.float32:
            update.add_rows(self.weight, rows, change)
        else:
            # In fp32 and rounded once, as a small change added in 16 bits would be lost whole.
            weight = self.weight.index_select(0, rows).float().add_(change)
            self.weight.index_copy_(0, rows, weight.to(self.weight.dtype))

    def moved(
        self, touched: Touched, squares: torch.Tensor | None
    ) -> tuple[Touched, torch.Tensor | None]:
        """Those of rows that a step changes."""
        if not self.still:
            return touched, squares
        rows = touched.rows
        keeps = torch.zeros_like(rows, dtype=torch.bool)
        for low, high in self.still:
            keeps |= (rows >= low) & (rows < high)
        places = keeps.logical_not_().nonzero().squeeze(1)
        left = Touched(*(part.index_select(0, places) for part in touched))
        return left, None if squares is None else squares.index_select(0, places)

    def update_all(
        self, gradient: torch.Tensor, looked: torch.Tensor | None, rate: float, number: int
    ) -> None:
        """Apply a dense gradient [R, width] of the whole store; where rows that were looked up
        change without one, ``looked`` [R] is above 0 for these."""
        # A dense gradient does not tell a row that nobody looked up from one whose gradient is 0,
        # and rules with moments move the latter.
        if looked is not None:
            rows = looked.nonzero().squeeze(1)
            touched = Touched(rows, gradient.index_select(0, rows))
            self.step(touched, self.squares(touched) if self.dim else None, rate, number)
            return
        squares = gradient.square().mean(1) if self.dim else None
        change = self.rule.step([*self.states.values()], gradient, squares, rate, number)
        self.weight.copy_(self.weight.float().add_(change))


def _fetches_ahead(table: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether bags of one row each are read faster than rows: on a CPU they are asked for from
    memory before they are needed, which many rows are worth."""
    on_cpu = table.device.type == "cpu" and table.dtype == torch.float32
    return on_cpu and len(rows) >= BAGS_OF_ONE


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask the system for large pages, whose addresses a CPU has at hand where rows are read at
    random, under a tensor that nothing was written to yet; one that has none, or no memory of its
    own, stays as it is."""
    if _ADVICE is None or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr()
    first = -(-start // _LARGE_PAGE) * _LARGE_PAGE
    # Only pages that are all of this tensor's, as the advice is for whole ones.
    size = (start + tensor.nbytes - first) // _LARGE_PAGE * _LARGE_PAGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _ADVICE)


# What ranks add up beside the exchange of rows. Tables that every rank keeps whole have a dense
# gradient, together; of those that learn by rows ranks exchange the rows that they looked up. A
# batch touches the same rows of a table in every one of its column ranges, so ranks that have
# columns of the same rows have sums for them in the same order, and exchange these without a word
# about which. All ranks must come to the same bits, or what they keep whole drifts apart: sums are
# made in the order of ranks on every one of them, never in that in which parts arrive, or by one
# all-reduce, whose result is the same everywhere.


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
