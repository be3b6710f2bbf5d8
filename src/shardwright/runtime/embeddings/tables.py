"""Sharded tables: one module, one exchange of ids and one of rows for all of them together.

Forward: every rank sorts its ids by owner, sends row numbers, serves the rows it is asked for, and
puts what comes back in order. Backward retraces the same route with gradients, and the owner
updates its rows at once: a table never has a dense gradient unless it is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.core.plan import TablePlan
from shardwright.core.schedule import Action
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.route import Group, Held, Route
from shardwright.runtime.embeddings.store import InitialBlock, Store


@dataclass(slots=True)
class _Trip:
    """What one forward leaves for its backward: how ids were sent and which rows were served."""

    batch: int
    orders: list[torch.Tensor | None]  # per group: request order by owner [P*B]; None: as it is
    counts: list[list[int]]  # [rank][group]: ids sent to each rank
    served: list[list[int]]  # [rank][group]: ids received from each rank
    rows: torch.Tensor  # row numbers served, by rank then group
    replica_rows: torch.Tensor | None  # rows of the replicated store [F_dp * B]


class ShardedTables(nn.Module):
    """Stands in for a module of tables: ids [B, F] int64 -> embeddings [B, F, D] fp32."""

    def __init__(
        self,
        tables: tuple[TablePlan, ...],
        route: Route,
        comm: Comm,
        initial: InitialBlock,
        learning_rate: float,
    ) -> None:
        super().__init__()
        self.tables = tables
        self.route = route
        self.comm = comm
        self.learning_rate = learning_rate
        self.dim = tables[0].dim
        device = torch.device(comm.mesh.device_type)
        self.device = device
        self.stores = [
            Store(group.held.get(comm.rank, ()), group.width, tables, initial, comm.probe, device)
            for group in route.groups
        ]
        self.replicas = Store(route.replicated, self.dim, tables, initial, comm.probe, device)
        self.guides = [_Guide.of(group, device) for group in route.groups]
        self.limits = torch.tensor([table.rows for table in tables], device=device)
        self.replica_features = _long([held.feature for held in route.replicated], device)
        self.replica_bases = _long([held.base for held in route.replicated], device).unsqueeze(1)
        self.replica_gradient_bytes = 0  # of the last backward
        self.anchor = torch.empty(0, device=device, requires_grad=True)  # makes backward run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look ``ids`` up; rows of feature f come from table f."""
        self._check(ids)
        found: torch.Tensor = _Lookup.apply(self.anchor, ids, self)
        return found

    def holdings(self) -> list[tuple[Store, Held]]:
        """Every block this rank keeps, with the store it lies in."""
        pairs = [(store, held) for store in self.stores for held in store.held]
        return pairs + [(self.replicas, held) for held in self.replicas.held]

    def _check(self, ids: torch.Tensor) -> None:
        if ids.dim() != 2 or ids.shape[1] != len(self.tables):
            raise InputError(
                expected("ids", f"shape [batch, {len(self.tables)}]", str(list(ids.shape)))
            )
        wrong = (ids < 0) | (ids >= self.limits)
        if bool(wrong.any()):
            sample, feature = (int(x) for x in wrong.nonzero()[0])
            table = self.tables[feature]
            raise InputError(
                expected(
                    f"ids of table '{table.name}', sample {sample}",
                    f"ids from 0 to {table.rows - 1}",
                    str(int(ids[sample, feature])),
                    "Reduce ids modulo the table's rows.",
                )
            )

    # ---- forward -------------------------------------------------------------------------------

    def look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, _Trip]:
        """Embeddings [F, B, D] and the trip that its backward retraces."""
        probe = self.comm.probe
        by_feature = ids.t()
        trip = _Trip(ids.shape[0], [], [], [], ids.new_empty(0), None)
        back = None
        if self.stores:
            with probe.phase("exchange_ids"):
                self._request(by_feature, trip)
            probe.did(Action("exchange", "ids", "exchange_ids"))
        with probe.phase("lookup"):
            rows = self._serve(trip) if self.stores else None
            found = self._look_up_replicas(by_feature, trip)
        probe.did(Action("lookup", "tables", "lookup"))
        with probe.phase("exchange_rows"):
            if rows is not None:
                back = self._exchange("exchange rows", rows, trip.served, trip.counts)
                del rows
                probe.did(Action("exchange", "rows", "exchange_rows"))
            out = self._assemble(back, found, trip)
        probe.did(Action("assemble", "tables", "exchange_rows"))
        return out, trip

    def _request(self, by_feature: torch.Tensor, trip: _Trip) -> None:
        """Sort ids by owner and send every owner its row numbers."""
        size = self.comm.size
        ordered, counts = [], []
        for guide in self.guides:
            rows, order, per_rank = guide.request(by_feature, size)
            ordered.append(rows)
            counts.append(per_rank)
            trip.orders.append(order)
        trip.counts = [list(row) for row in zip(*counts, strict=True)]
        sent = _interleave(ordered, trip.counts)
        announced = torch.tensor(trip.counts, device=self.device).view(-1)
        heard = torch.empty_like(announced)
        self.comm.all_to_all("exchange counts", heard, announced)
        trip.served = heard.view(size, -1).tolist()
        trip.rows = sent.new_empty(sum(map(sum, trip.served)))
        self.comm.all_to_all(
            "exchange ids",
            trip.rows,
            sent,
            [sum(counts) for counts in trip.served],
            [sum(counts) for counts in trip.counts],
        )

    def _serve(self, trip: _Trip) -> torch.Tensor:
        """The rows asked for, flat, by rank then group."""
        if len(self.stores) == 1:
            return self.stores[0].weight.index_select(0, trip.rows).view(-1)
        found = []
        for counts, rows in zip(trip.served, _by_rank(trip.rows, trip.served), strict=True):
            for store, part in zip(self.stores, rows.split(counts), strict=True):
                found.append(store.weight.index_select(0, part).view(-1))
        return torch.cat(found)

    def _look_up_replicas(self, by_feature: torch.Tensor, trip: _Trip) -> torch.Tensor | None:
        if not self.replicas.held:
            return None
        ids = by_feature.index_select(0, self.replica_features)
        trip.replica_rows = ids.add_(self.replica_bases).view(-1)
        return self.replicas.weight.index_select(0, trip.replica_rows)

    def _assemble(
        self, back: torch.Tensor | None, found: torch.Tensor | None, trip: _Trip
    ) -> torch.Tensor:
        """Everything found, in feature order: [F, B, D]."""
        batch, dim = trip.batch, self.dim
        out = torch.empty(len(self.tables), batch, dim, device=self.device)
        if found is not None:
            out.index_copy_(
                0, self.replica_features, found.view(len(self.replica_features), batch, dim)
            )
        if back is None:
            return out
        for guide, order, rows in zip(
            self.guides, trip.orders, _regroup(back, self._floats(trip.counts)), strict=True
        ):
            pieces = rows.view(-1, guide.width)
            if order is not None:
                inverse = torch.empty_like(order)
                inverse[order] = torch.arange(len(order), device=self.device)
                pieces = pieces.index_select(0, inverse)
            guide.put(out, pieces.view(len(guide.columns), batch, guide.width))
        return out

    # ---- backward ------------------------------------------------------------------------------

    def retrace(self, gradient: torch.Tensor, trip: _Trip) -> None:
        """Send gradients [F, B, D] back along ``trip`` and update the rows they belong to."""
        probe = self.comm.probe
        rate = self.learning_rate
        scale = 1.0 / self.comm.size  # gradients are of each rank's own mean loss
        if self.stores:
            with probe.phase("reduce"):
                arrived = self._return(gradient, trip)
            probe.did(Action("exchange", "row_gradients", "reduce", "backward"))
        if self.replicas.held:
            with probe.phase("reduce"):
                dense = self._reduce_replicas(gradient, trip)
            probe.did(Action("reduce", "tables", "reduce", "backward"))
        with probe.phase("step"):
            if self.stores:
                arrived.mul_(scale)
                rows = _regroup(trip.rows, trip.served)
                parts = _regroup(arrived, self._floats(trip.served))
                for store, numbers, part in zip(self.stores, rows, parts, strict=True):
                    store.update(numbers, part.view(-1, store.width), rate)
            if self.replicas.held:
                self.replicas.update_all(dense.mul_(scale), rate)
        probe.did(Action("update", "tables", "step", "backward"))

    def _return(self, gradient: torch.Tensor, trip: _Trip) -> torch.Tensor:
        """Row gradients at the rows' owners, flat, by rank then group."""
        ordered = [
            _in_order(guide.take(gradient), order).view(-1)
            for guide, order in zip(self.guides, trip.orders, strict=True)
        ]
        sent = _interleave(ordered, self._floats(trip.counts))
        return self._exchange("exchange row gradients", sent, trip.counts, trip.served)

    def _reduce_replicas(self, gradient: torch.Tensor, trip: _Trip) -> torch.Tensor:
        assert trip.replica_rows is not None
        dense = torch.zeros_like(self.replicas.weight)
        self.comm.probe.holds(dense, "gradient")
        self.replica_gradient_bytes = dense.untyped_storage().nbytes()
        own = gradient.index_select(0, self.replica_features).reshape(-1, self.dim)
        dense.scatter_add_(0, trip.replica_rows.unsqueeze(1).expand_as(own), own)
        self.comm.all_reduce("reduce replicated tables", dense)
        return dense

    # ---- shared --------------------------------------------------------------------------------

    def _exchange(
        self,
        label: str,
        sent: torch.Tensor,
        sent_counts: list[list[int]],
        received_counts: list[list[int]],
    ) -> torch.Tensor:
        out = [sum(row) for row in self._floats(sent_counts)]
        into = [sum(row) for row in self._floats(received_counts)]
        received = sent.new_empty(sum(into))
        self.comm.all_to_all(label, received, sent, into, out)
        return received

    def _floats(self, counts: list[list[int]]) -> list[list[int]]:
        """Floats that ``counts`` [rank][group] rows of each group's width hold."""
        widths = [store.width for store in self.stores]
        return [[n * w for n, w in zip(row, widths, strict=True)] for row in counts]


def _interleave(groups: list[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
    """Values that lie group by group, each by rank, put by rank and then group."""
    if len(groups) == 1:
        return groups[0]
    parts = [values.split([row[index] for row in counts]) for index, values in enumerate(groups)]
    return torch.cat([part[rank] for rank in range(len(counts)) for part in parts])


def _regroup(values: torch.Tensor, counts: list[list[int]]) -> list[torch.Tensor]:
    """The inverse: values that lie by rank and then group, gathered group by group."""
    groups = len(counts[0])
    if groups == 1:
        return [values]
    parts = values.split([n for row in counts for n in row])
    return [torch.cat(parts[group::groups]) for group in range(groups)]


def _in_order(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return rows if order is None else rows.index_select(0, order)


def _by_rank(rows: torch.Tensor, counts: list[list[int]]) -> tuple[torch.Tensor, ...]:
    return rows.split([sum(row) for row in counts])


def _long(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(slots=True)
class _Guide:
    """A group's route as tensors."""

    width: int
    fixed: bool
    features: torch.Tensor  # [P]
    columns: list[tuple[int, int]]  # per piece: feature, first column
    chunk: torch.Tensor  # [P, 1]
    first_part: torch.Tensor  # [P, 1]
    part_owner: torch.Tensor  # [parts]
    part_base: torch.Tensor  # [parts]

    @staticmethod
    def of(group: Group, device: torch.device) -> _Guide:
        pieces = group.pieces
        first, parts = [], 0
        for piece in pieces:
            first.append(parts)
            parts += len(piece.owners)
        return _Guide(
            group.width,
            group.fixed,
            _long([piece.feature for piece in pieces], device),
            [(piece.feature, piece.column) for piece in pieces],
            _long([piece.chunk for piece in pieces], device).unsqueeze(1),
            _long(first, device).unsqueeze(1),
            _long([owner for piece in pieces for owner in piece.owners], device),
            _long([base for piece in pieces for base in piece.bases], device),
        )

    def request(
        self, by_feature: torch.Tensor, ranks: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
        """Row numbers at their owners by owner [P*B], the order that made them so, and counts."""
        ids = by_feature.index_select(0, self.features)
        if self.fixed:
            counts = torch.bincount(self.part_owner, minlength=ranks) * by_feature.shape[1]
            return ids.add_(self.part_base.unsqueeze(1)).view(-1), None, counts.tolist()
        part = ids // self.chunk
        row = ids.sub_(part * self.chunk)
        part = part.add_(self.first_part).view(-1)
        row = row.view(-1).add_(self.part_base[part])
        owner = self.part_owner[part]
        order = torch.argsort(owner, stable=True)
        return row[order], order, torch.bincount(owner, minlength=ranks).tolist()

    def put(self, out: torch.Tensor, pieces: torch.Tensor) -> None:
        """Write ``pieces`` [P, B, width] to their features and columns of ``out`` [F, B, D]."""
        if pieces.shape[2] == out.shape[2]:
            out.index_copy_(0, self.features, pieces)
            return
        for (feature, column), piece in zip(self.columns, pieces, strict=True):
            out[feature, :, column : column + self.width] = piece

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        """The pieces of ``gradient`` [F, B, D] as rows [P*B, width]."""
        if gradient.shape[2] == self.width:
            return gradient.index_select(0, self.features).view(-1, self.width)
        parts = [gradient[f, :, c : c + self.width] for f, c in self.columns]
        return torch.stack(parts).view(-1, self.width)


class _Lookup(torch.autograd.Function):
    """Joins the route to autograd; table weights themselves never carry a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, tables: ShardedTables
    ) -> torch.Tensor:
        out, ctx.trip = tables.look_up(ids)
        ctx.tables = tables
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.tables.retrace(gradients[0].transpose(0, 1), ctx.trip)
        ctx.trip = None
        return None, None, None
