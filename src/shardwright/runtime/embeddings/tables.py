"""Sharded tables: one module, one exchange of ids and one of rows for all of them together.

Forward: every rank sorts its ids by owner, sends row numbers, serves the rows it is asked for, and
puts what comes back in order. Backward retraces the same route with gradients, and the owner
updates its rows at once, or by all that has arrived when a guard over the step is settled. A table
never has a dense gradient unless it is replicated. Gradients that are not finite update nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.core.errors import InputError, PeerError, UnsupportedError, expected
from shardwright.core.plan import TablePlan
from shardwright.core.schedule import Action, replicas_ride
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.guide import Guide, integers, interleave, regroup
from shardwright.runtime.embeddings.route import Held, Route
from shardwright.runtime.embeddings.store import InitialBlock, Store
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import outside_graphs
from shardwright.runtime.units.flow import Flow


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Trip:
    """What one forward leaves for its backward: how ids were sent and which rows were served."""

    batch: int
    orders: list[torch.Tensor | None]  # per group: request order by owner [P*B]; None: as it is
    counts: list[list[int]]  # [rank][group]: ids sent to each rank
    served: list[list[int]]  # [rank][group]: ids received from each rank
    rows: torch.Tensor  # row numbers served, by rank then group
    replica_rows: torch.Tensor | None  # rows of the replicated store [F_dp * B]
    adds: bool  # whether units had gradients then, of a backward that no step came after


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What a backward brought to the owners of rows, summed over ranks."""

    rows: torch.Tensor  # row numbers served, by rank then group
    served: list[list[int]]  # [rank][group]
    gradients: list[torch.Tensor]  # by group, flat
    dense: torch.Tensor | None  # of replicas [rows, D]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Waiting:
    """Backwards whose rows are updated when a guard is settled, which alone keeps them."""

    backwards: list[_Arrived]


class _Steps:
    """Counts the steps of every optimizer in this process."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, *_: Any) -> None:
        self.made += 1


_steps = _Steps()


@cache
def _follow_steps() -> None:
    register_optimizer_step_post_hook(_steps)


class ShardedTables(nn.Module):
    """Stands in for a module of tables: ids [B, F] int64 -> embeddings [B, F, D] fp32."""

    def __init__(
        self,
        tables: tuple[TablePlan, ...],
        route: Route,
        comm: Comm,
        initial: InitialBlock,
        learning_rate: float,
        flow: Flow,
        *,
        path: str,
    ) -> None:
        super().__init__()
        self.path = path
        self.tables = tables
        self.route = route
        self.comm = comm
        self.learning_rate = learning_rate
        self.flow = flow  # of the units beside them
        self._waiting: weakref.ref[_Waiting] | None = None
        self._updated = -1  # steps of optimizers before the last update
        _follow_steps()
        self.dim = tables[0].dim
        self.gradient_names = [f"gradient of {table.fqn}" for table in tables]
        device = torch.device(comm.mesh.device_type)
        self.device = device
        self.stores = [
            Store(group.held.get(comm.rank, ()), group.width, tables, initial, comm.probe, device)
            for group in route.groups
        ]
        self.replicas = Store(route.replicated, self.dim, tables, initial, comm.probe, device)
        self.guides = [Guide.of(group, comm.size, device) for group in route.groups]
        self.limits = torch.tensor([table.rows for table in tables], device=device)
        self.replica_features = integers([held.feature for held in route.replicated], device)
        self.replica_bases = integers([held.base for held in route.replicated], device).unsqueeze(1)
        self._open: weakref.WeakSet[_Trip] = weakref.WeakSet()  # lookups that wait for backward
        self.replica_gradient_bytes = 0  # of the last backward
        replica_bytes = self.replicas.weight.numel() * self.replicas.weight.element_size()
        self.rides = replicas_ride(bool(self.stores), comm.size, replica_bytes)
        self.anchor = torch.empty(0, device=device, requires_grad=True)  # makes backward run

    @property
    def guard(self) -> Guard | None:
        """What updates wait for; without one they are made in the backward."""
        return self.flow.guard

    @outside_graphs
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look ``ids`` up; rows of feature f come from table f."""
        fault = self._fault(ids)
        if fault and not self.stores:
            raise InputError(fault)
        self._refuse_scaling()
        found: torch.Tensor = _Lookup.apply(self.anchor, ids, self, fault)
        return found.transpose(0, 1)

    def holdings(self) -> list[tuple[Store, Held]]:
        """Every block this rank keeps, with the store it lies in."""
        pairs = [(store, held) for store in self.stores for held in store.held]
        return pairs + [(self.replicas, held) for held in self.replicas.held]

    def _fault(self, ids: torch.Tensor) -> str:
        """What is wrong with ``ids``, or nothing; known to every rank before any rows move."""
        if ids.dim() != 2 or ids.shape[1] != len(self.tables):
            return expected("ids", f"shape [batch, {len(self.tables)}]", str(list(ids.shape)))
        wrong = (ids < 0) | (ids >= self.limits)
        if not bool(wrong.any()):
            return ""
        sample, feature = (int(x) for x in wrong.nonzero()[0])
        table = self.tables[feature]
        return expected(
            f"ids of table '{table.name}', sample {sample}",
            f"ids from 0 to {table.rows - 1}",
            str(int(ids[sample, feature])),
            "Reduce ids modulo the table's rows.",
        )

    # ---- forward -------------------------------------------------------------------------------

    def look_up(self, ids: torch.Tensor, fault: str) -> tuple[torch.Tensor, _Trip]:
        """Embeddings [F, B, D] and the trip that its backward retraces.

        A ``fault`` in this rank's ids is announced in place of counts and raises on every rank.
        """
        probe = self.comm.probe
        if fault:
            with probe.phase("exchange_ids"):
                self._announce([[-1] * len(self.stores)] * self.comm.size)
            raise InputError(fault)
        by_feature = ids.t()
        adds = self._updated == _steps.made and self.flow.has_gradients
        trip = _Trip(ids.shape[0], [], [], [], ids.new_empty(0), None, adds)
        back = None
        if self.stores:
            with probe.phase("exchange_ids"):
                self._request(by_feature, trip)
            probe.did(Action("exchange", "ids", "exchange_ids"))
        with probe.phase("lookup"):
            rows = self._serve(trip) if self.stores else None
            found = self._look_up_replicas(by_feature, trip)
        probe.did(Action("lookup", self.path, "lookup"))
        with probe.phase("exchange_rows"):
            if rows is not None:
                served, asked = self._floats(trip.served), self._floats(trip.counts)
                back = self._exchange("exchange rows", rows, served, asked)
                del rows
                probe.did(Action("exchange", "rows", "exchange_rows"))
            out = self._assemble(back, found, trip)
        probe.did(Action("assemble", self.path, "exchange_rows"))
        return out, trip

    def _request(self, by_feature: torch.Tensor, trip: _Trip) -> None:
        """Sort ids by owner and send every owner its row numbers."""
        ordered, counts = [], []
        for guide in self.guides:
            asked = guide.request(by_feature)
            ordered.append(asked.rows)
            counts.append(asked.counts)
            trip.orders.append(asked.order)
        trip.counts = [list(row) for row in zip(*counts, strict=True)]
        sent = interleave(ordered, trip.counts)
        trip.served = self._announce(trip.counts)
        refused = [rank for rank, counts in enumerate(trip.served) if min(counts) < 0]
        if refused:
            ranks = ", ".join(map(str, refused))
            raise PeerError(
                f"ids were refused on rank {ranks}, which says why; no rows were moved."
            )
        trip.rows = self._exchange("exchange ids", sent, trip.counts, trip.served)

    def _announce(self, counts: list[list[int]]) -> list[list[int]]:
        """Exchange how many ids of each group every rank will send to every other."""
        announced = torch.tensor(counts, device=self.device).view(-1)
        heard = torch.empty_like(announced)
        self.comm.all_to_all("exchange counts", heard, announced)
        served: list[list[int]] = heard.view(self.comm.size, -1).tolist()
        return served

    def _serve(self, trip: _Trip) -> torch.Tensor:
        """The rows asked for, flat, by rank then group."""
        if len(self.stores) == 1:
            return self.stores[0].weight.index_select(0, trip.rows).view(-1)
        stores = self.stores * self.comm.size
        parts = trip.rows.split([count for counts in trip.served for count in counts])
        found = [s.weight.index_select(0, p).view(-1) for s, p in zip(stores, parts, strict=True)]
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
        groups = regroup(back, self._floats(trip.counts))
        for guide, order, rows in zip(self.guides, trip.orders, groups, strict=True):
            guide.put(out, rows.view(-1, guide.width), order)
        return out

    # ---- backward ------------------------------------------------------------------------------

    def retrace(self, gradient: torch.Tensor, trip: _Trip) -> None:
        """Send gradients [F, B, D] back along ``trip`` and update the rows they belong to.

        RunError on every rank, before anything is sent, where there is no guard to wait for and one
        of them is not finite.
        """
        self._refuse_accumulation(trip)
        probe = self.comm.probe
        guard = self.guard or Guard(self.comm)
        dense, parts = None, []
        with probe.phase("reduce"):
            if self.replicas.held:
                dense = self._replica_gradient(gradient, trip, guard)
            if self.stores:
                parts = self._return(gradient, trip, dense if self.rides else None, guard)
                probe.did(Action("exchange", "row_gradients", "reduce", "backward"))
            elif self.guard is None:
                guard.settle()
            if dense is not None:
                if not self.rides:
                    self.comm.all_reduce("reduce replicated tables", dense)
                probe.did(Action("reduce", self.path, "reduce", "backward"))
        arrived = _Arrived(trip.rows, trip.served, parts, dense)
        waiting = None if self._waiting is None else self._waiting()
        if self.guard is None:
            self._update(_Waiting([arrived]))
            self._updated = _steps.made
        elif waiting is not None:
            waiting.backwards.append(arrived)
        else:
            waiting = _Waiting([arrived])
            self._waiting = weakref.ref(waiting)
            guard.defer(partial(self._update, waiting))

    @torch.no_grad()
    def _update(self, waiting: _Waiting) -> None:
        """Change rows by the mean over ranks of what all backwards brought."""
        probe, rate = self.comm.probe, self.learning_rate
        scale = 1.0 / self.comm.size  # gradients are of each rank's own mean loss
        backwards = waiting.backwards
        with probe.phase("step"):
            numbers = [regroup(a.rows, a.served) for a in backwards if self.stores]
            for place, store in enumerate(self.stores):
                rows = _joined([parts[place] for parts in numbers])
                gradient = _joined([a.gradients[place].view(-1, store.width) for a in backwards])
                store.update(rows, gradient.mul_(scale), rate)
            if self.replicas.held:
                first, *others = (a.dense for a in backwards if a.dense is not None)
                for other in others:
                    first += other
                self.replicas.update_all(first.mul_(scale), rate)
        probe.did(Action("update", self.path, "step", "backward"))

    def _refuse_accumulation(self, trip: _Trip) -> None:
        """Rows have no gradient that a later backward could add to, and row-wise Adagrad is exact
        on a step's whole gradient only: without a guard there is one backward to an optimizer's
        step, and one lookup to a backward."""
        if self.guard is not None:
            return
        others = [other for other in self._open if other is not trip]
        if others and any(table.optimizer != "sgd" for table in self.tables):
            raise UnsupportedError(
                expected(
                    "lookups before a backward of rowwise_adagrad tables",
                    "one",
                    f"{len(others) + 1}",
                    "Look up once per backward, under no_grad otherwise, train with sgd, or hand a "
                    "guard to apply.",
                )
            )
        if self.flow.holds_back or (trip.adds and _steps.made == self._updated):
            raise UnsupportedError(
                expected(
                    f"gradients of tables in '{self.path}'",
                    "one backward before the optimizer's step, for it updates their rows",
                    "gradients that are accumulated over several",
                    "Hand a sw.Guard to apply and settle it once, before the optimizer's step.",
                )
            )

    def _refuse_scaling(self) -> None:
        """Gradients of float16 are scaled by a factor that rows would be updated with."""
        kind = self.device.type
        if torch.is_grad_enabled() and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            if dtype == torch.float16:
                raise UnsupportedError(
                    expected(
                        f"tables in '{self.path}' under autocast",
                        "bfloat16, whose gradients need no GradScaler",
                        "float16",
                        "Keep these embeddings dense, or use bfloat16.",
                    )
                )

    def _return(
        self, gradient: torch.Tensor, trip: _Trip, dense: torch.Tensor | None, guard: Guard
    ) -> list[torch.Tensor]:
        """Row gradients at the rows' owners, group by group; ``dense`` rides and is summed."""
        ordered = [
            guide.take(gradient, order).view(-1)
            for guide, order in zip(self.guides, trip.orders, strict=True)
        ]
        guard.look(ordered, self.gradient_names, gradient.unbind)
        if self.guard is None:
            guard.settle()
        out, into = self._floats(trip.counts), self._floats(trip.served)
        if dense is None:
            sent = interleave(ordered, out)
            return regroup(self._exchange("exchange row gradients", sent, out, into), into)
        ride = dense.view(-1)
        ordered.append(ride.repeat(self.comm.size))
        out = [[*row, len(ride)] for row in out]
        into = [[*row, len(ride)] for row in into]
        received = self._exchange("exchange row gradients", interleave(ordered, out), out, into)
        *arrived, everyone = regroup(received, into)
        torch.sum(everyone.view(self.comm.size, -1), 0, out=ride)
        return arrived

    def _replica_gradient(self, gradient: torch.Tensor, trip: _Trip, guard: Guard) -> torch.Tensor:
        """This rank's dense gradient of all replicas [rows, D]."""
        assert trip.replica_rows is not None
        dense = torch.zeros_like(self.replicas.weight)
        self.comm.probe.holds(dense, "gradient")
        self.replica_gradient_bytes = dense.untyped_storage().nbytes()
        own = gradient.index_select(0, self.replica_features).reshape(-1, self.dim)
        guard.look([own], self.gradient_names, gradient.unbind)
        dense.scatter_add_(0, trip.replica_rows.unsqueeze(1).expand_as(own), own)
        return dense

    # ---- shared --------------------------------------------------------------------------------

    def _exchange(
        self,
        label: str,
        sent: torch.Tensor,
        out: list[list[int]],
        into: list[list[int]],
    ) -> torch.Tensor:
        """All-to-all of values that lie by rank, ``out`` and ``into`` [rank][group] of them."""
        received = sent.new_empty(sum(map(sum, into)))
        self.comm.all_to_all(label, received, sent, [*map(sum, into)], [*map(sum, out)])
        return received

    def _floats(self, counts: list[list[int]]) -> list[list[int]]:
        """Floats that ``counts`` [rank][group] rows of each group's width hold."""
        widths = [store.width for store in self.stores]
        return [[n * w for n, w in zip(row, widths, strict=True)] for row in counts]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Lookup(torch.autograd.Function):
    """Joins the route to autograd; table weights themselves never carry a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, tables: ShardedTables, fault: str
    ) -> torch.Tensor:
        out, trip = tables.look_up(ids, fault)
        tables._open.add(trip)  # until its graph is gone
        ctx.trip, ctx.tables = trip, tables
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        trip, ctx.trip = ctx.trip, None
        if trip is None:
            raise UnsupportedError(
                expected(
                    "backward of tables",
                    "one per lookup, for rows are updated in it",
                    "a second one",
                    "Look up again.",
                )
            )
        ctx.tables.retrace(gradients[0], trip)
        return None, None, None, None
