"""Sharded tables: one module, one exchange of ids and one of rows for all of them together.

Forward: every rank sorts its ids by owner, sends row numbers, serves the rows it is asked for, sums
of them where ids of a bag go to the same rank, and puts what comes back in order. Backward retraces
the same route with gradients, and the owner updates its rows at once, or by all that has arrived
when a guard over the step is settled. A table never has a dense gradient unless it is replicated.
Gradients that are not finite update nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.planning import IN_FULL, Communication
from shardwright.core.schedule import Action
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings import wire
from shardwright.runtime.embeddings.asking import Asking, agree_on_ids
from shardwright.runtime.embeddings.bags import (
    Bags,
    cat,
    check_columns,
    features_of,
    one_each,
    read_bags,
)
from shardwright.runtime.embeddings.disk import make_store
from shardwright.runtime.embeddings.guide import Guide, Request, Rows
from shardwright.runtime.embeddings.replicas import Learnt, Replicas
from shardwright.runtime.embeddings.route import Held, Route, Table
from shardwright.runtime.embeddings.store import InitialBlock, Store
from shardwright.runtime.embeddings.strips import Strips
from shardwright.runtime.embeddings.update import Touched, check_rule
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import outside_graphs
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.parameter import DTYPES


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Trip:
    """What one forward leaves for its backward: how ids were sent and which rows were served."""

    shares: Sequence[torch.Tensor | None]  # of each feature's pooled rows
    asked: list[Request]  # per group, without its rows
    counts: wire.Counts  # sent to each rank
    served: wire.Counts  # received from each rank
    rows: torch.Tensor  # what was served, as it came
    replicas: list[Request]  # per group of replicas
    adds: bool  # whether units had gradients then, of a backward that no step came after


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What a backward brought to the owners of rows, summed over ranks."""

    rows: torch.Tensor  # what was served, as it came
    served: wire.Counts
    gradients: list[torch.Tensor]  # by group, flat
    learnt: Learnt | None  # of replicas


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
    """Tables whose rows lie as a route says.

    Features as ``read_bags`` takes them -> a mapping of each to rows [B, dim], pooled, or [values,
    dim]. Ids [B, F] of tables of one dim -> rows [B, F, dim]. ``learning_rate`` is that of the next
    update; set it to follow a schedule. Tables on disk lie in ``folder``. Rows travel in the first
    of the dtypes of ``communication``, their gradients in the second; sums are made in fp32.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        route: Route,
        comm: Comm,
        initial: InitialBlock,
        learning_rate: float,
        flow: Flow,
        *,
        path: str,
        folder: Path,
        communication: Communication = IN_FULL,
    ) -> None:
        super().__init__()
        for table in tables:
            check_rule(table.optimizer, table.fqn)
        self.row_dtype, self.gradient_dtype = (DTYPES[kind] for kind in communication)
        self.path = path
        self.tables = tuple(tables)
        self.features = features_of(tables)
        self.outputs = [feature.output for feature in self.features]
        self.dtypes = [DTYPES[feature.table.output_dtype] for feature in self.features]
        self.comm = comm
        self.learning_rate = learning_rate
        self.flow = flow  # of the units beside them
        self._waiting: weakref.ref[_Waiting] | None = None
        self._updated = -1  # steps of optimizers before the last update
        self.updates = torch.zeros(())  # how many were made, for optimizers that use it
        _follow_steps()
        dims = {table.dim for table in tables}
        self.dim = dims.pop() if len(dims) == 1 else None
        self.gradient_names = [f"gradient of {feature.table.fqn}" for feature in self.features]
        device = torch.device(comm.mesh.device_type)
        self.device = device
        self.limits = torch.tensor([f.table.rows for f in self.features], device=device)
        self.stores = [make_store(group, comm, initial, folder) for group in route.groups]
        self.guides = [Guide.of(group, comm.size, device) for group in route.groups]
        self.asking = Asking(comm, self.guides, device) if self.guides else None
        self.replicas = Replicas(route.replicas, comm, initial, bool(self.stores))
        self.strips = Strips(route.strips, comm)
        self.comes_as_asked = (
            not route.replicas
            and len(self.guides) == 1
            and self.guides[0].is_steady
            and self.guides[0].width == self.dim
        )
        self._open: weakref.WeakSet[_Trip] = weakref.WeakSet()  # lookups that wait for backward
        self.anchor = torch.empty(0, device=device, requires_grad=True)  # makes backward run

    @property
    def guard(self) -> Guard | None:
        """What updates wait for; without one they are made in the backward."""
        return self.flow.guard

    @property
    def _meets_in_backward(self) -> bool:
        """Whether all ranks look up, even where nothing is exchanged: they learn from it."""
        return self.comm.size > 1 and torch.is_grad_enabled()

    @outside_graphs
    def forward(self, given: Any) -> Any:
        """Look up what is ``given``; InputError, and PeerError on the other ranks, that name the
        first id that is no row, before any row moves."""
        try:
            if isinstance(given, torch.Tensor):
                if self.dim is None:
                    wanted = "a mapping of features, for their tables have different dims"
                    raise InputError(expected("ids", wanted, "a tensor"))
                check_columns(given, self.features, self.limits)
                bags, pools = one_each(given.t().long()), {}
            else:
                bags, pools = read_bags(given, self.features, self.limits)
        except InputError as error:
            if self.asking is not None:
                self.asking.refuse(str(error))
            elif self._meets_in_backward:
                agree_on_ids(self.comm, str(error))
            raise
        if self.asking is None and self._meets_in_backward:
            agree_on_ids(self.comm)
        self._refuse_scaling()
        whole = isinstance(given, torch.Tensor)
        found = _Lookup.apply(self.anchor, bags, self, whole)
        if whole:
            return found.to(self.dtypes[0]).transpose(0, 1)
        rows = {}
        named = zip(self.outputs, self.dtypes, found, strict=True)
        for number, (name, dtype, part) in enumerate(named):
            pooled = pools[number](part) if number in pools else part
            rows[name] = pooled if pooled.dtype == dtype else pooled.to(dtype)
        return rows

    def holdings(self) -> list[tuple[Store, Held]]:
        """Every block this rank keeps, with the store it lies in."""
        stores = (*self.stores, *self.replicas.stores)
        return [(store, held) for store in stores for held in store.held]

    # ---- forward -------------------------------------------------------------------------------

    def look_up(self, bags: Bags, whole: bool) -> tuple[Rows, _Trip]:
        """Rows of every feature, one tensor if they are ``whole``, and the trip that its backward
        retraces."""
        probe = self.comm.probe
        adds = self._updated == _steps.made and self.flow.has_gradients
        trip = _Trip(bags.shares, [], [], [], self.limits[:0], [], adds)
        back = None
        with probe.phase("exchange_ids" if self.stores else "lookup"):
            self._request(bags, trip)
        if self.stores:
            probe.did(Action("exchange", "ids", "exchange_ids"))
        with probe.phase("lookup"):
            rows = self._serve(trip) if self.stores else None
            pairs = zip(self.replicas.stores, trip.replicas, strict=True)
            found = [store.look_up(request.looked) for store, request in pairs]
        probe.did(Action("lookup", self.path, "lookup"))
        with probe.phase("exchange_rows"):
            if rows is not None:
                served, came = self._floats(trip.served), self._floats(trip.counts)
                rows = rows.to(self.row_dtype)
                back = self._exchange("exchange rows", rows, served, came)
                del rows
                probe.did(Action("exchange", "rows", "exchange_rows"))
            if back is not None and self.comes_as_asked and not whole:
                out = self._views(bags.results, back)
            else:
                out = self._out(bags.results)
                self._assemble(out, back, found, trip)
            for place, share in enumerate(trip.shares):
                if share is not None:
                    out[place].mul_(share)
        probe.did(Action("assemble", self.path, "exchange_rows"))
        return out, trip

    def _request(self, bags: Bags, trip: _Trip) -> None:
        """Sort ids by owner and send every owner its row numbers; nothing else needs ``bags``."""
        trip.asked = [guide.request(bags) for guide in self.guides]
        trip.replicas = [guide.request(bags) for guide in self.replicas.guides]
        bags.forget()
        if self.asking is not None:
            trip.counts, trip.served, trip.rows = self.asking.ask(trip.asked)

    def _serve(self, trip: _Trip) -> torch.Tensor:
        """The rows asked for, flat, by rank then group."""
        groups = len(self.stores)
        if groups == 1:
            (looked,) = wire.unpack(trip.rows, trip.served, 1)
            return self.stores[0].look_up(looked).view(-1)
        parts = trip.rows.split([*map(sum, trip.served)])
        found = [
            store.look_up(looked).view(-1)
            for part, row in zip(parts, trip.served, strict=True)
            for store, looked in zip(self.stores, wire.unpack(part, [row], groups), strict=True)
        ]
        return torch.cat(found)

    def _assemble(
        self, out: Rows, back: torch.Tensor | None, found: list[torch.Tensor], trip: _Trip
    ) -> None:
        """Put everything found into ``out``, in feature order."""
        for guide, rows, asked in zip(self.replicas.guides, found, trip.replicas, strict=True):
            guide.put(out, rows, asked)
        if back is not None:
            groups = wire.regroup(back, self._floats(trip.counts))
            for guide, asked, rows in zip(self.guides, trip.asked, groups, strict=True):
                guide.put(out, rows.view(-1, guide.width).float(), asked)

    def _views(self, results: Sequence[int], back: torch.Tensor) -> Rows:
        """What came back, feature by feature, where it lies."""
        (guide,) = self.guides
        rows = back.view(-1, guide.width).float()
        parts = rows.split([results[f] for f in guide.features])
        found = sorted(zip(guide.features, parts, strict=True), key=itemgetter(0))
        return [part for _, part in found]

    def _out(self, results: Sequence[int]) -> Rows:
        """Room for what comes back: [F, B, D] where it is as much of every feature."""
        if self.dim is not None and len(set(results)) == 1:
            return torch.empty(len(results), results[0], self.dim, device=self.device)
        pairs = zip(results, self.features, strict=True)
        return [torch.empty(rows, f.table.dim, device=self.device) for rows, f in pairs]

    # ---- backward ------------------------------------------------------------------------------

    def retrace(self, gradient: Rows, trip: _Trip) -> None:
        """Send gradients of rows back along ``trip`` and update the rows they belong to.

        RunError on every rank, before any row is updated, where there is no guard to wait for and
        one of them is not finite.
        """
        self._refuse_accumulation(trip)
        if any(share is not None for share in trip.shares):
            pairs = zip(gradient, trip.shares, strict=True)
            gradient = [rows if share is None else rows * share for rows, share in pairs]
        probe = self.comm.probe
        guard = self.guard or Guard(self.comm)
        learnt, parts = None, []
        with probe.phase("reduce"):
            if trip.replicas:
                learnt = self._learnt(gradient, trip, guard)
            if self.stores:
                rides = learnt is not None and self.replicas.rides
                parts = self._return(gradient, trip, learnt.dense if rides else None, guard)
                probe.did(Action("exchange", "row_gradients", "reduce", "backward"))
            elif self.guard is None:
                guard.settle()
            if learnt is not None:
                self.replicas.reduce(learnt)
                probe.did(Action("reduce", self.path, "reduce", "backward"))
        arrived = _Arrived(trip.rows, trip.served, parts, learnt)
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
        probe, backwards = self.comm.probe, waiting.backwards
        self.updates += 1
        number = int(self.updates)
        with probe.phase("step"):
            if self.stores:
                self._update_routed(backwards, number)
            if learnt := [a.learnt for a in backwards if a.learnt is not None]:
                self.replicas.update(learnt, self.learning_rate, number)
        probe.did(Action("update", self.path, "step", "backward"))

    def _update_routed(self, backwards: Sequence[_Arrived], number: int) -> None:
        groups, scale = len(self.stores), 1.0 / self.comm.size  # of each rank's own mean loss
        looked = [wire.unpack(a.rows, a.served, groups) for a in backwards]
        touched: dict[int, Touched] = {}
        for place, store in enumerate(self.stores):
            rows = wire.joined([each[place] for each in looked])
            gradient = cat([a.gradients[place].view(-1, store.width) for a in backwards]).float()
            rate = self.learning_rate
            if store.optimizer == "sgd":
                rate *= scale
            elif scale < 1:
                gradient.mul_(scale)
            if place in self.strips.groups:
                touched[place] = rows.summed(gradient, len(store.weight))
            else:
                store.update(rows, gradient, rate, number)
        if touched:
            squares = {place: self.stores[place].squares(t) for place, t in touched.items()}
            self.strips.add_up({place: t.rows for place, t in touched.items()}, squares)
            for place, each in touched.items():
                self.stores[place].step(each, squares[place], self.learning_rate, number)

    def _refuse_accumulation(self, trip: _Trip) -> None:
        """Rows have no gradient that a later backward could add to, and what is not linear is exact
        on a step's whole gradient only: without a guard there is one backward to an optimizer's
        step, and one lookup to a backward."""
        if self.guard is not None:
            return
        others = [other for other in self._open if other is not trip]
        optimizer = next((t.optimizer for t in self.tables if t.optimizer != "sgd"), "")
        if others and optimizer:
            raise UnsupportedError(
                expected(
                    f"lookups before a backward of {optimizer} tables",
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
        self, gradient: Rows, trip: _Trip, dense: torch.Tensor | None, guard: Guard
    ) -> list[torch.Tensor]:
        """Row gradients at the rows' owners, group by group; ``dense`` rides and is summed."""
        dtype = self.gradient_dtype
        ordered = [
            guide.take(gradient, asked).view(-1).to(dtype)
            for guide, asked in zip(self.guides, trip.asked, strict=True)
        ]
        guard.look(ordered, self.gradient_names, partial(_each, gradient))
        out, into = self._floats(trip.counts), self._floats(trip.served)
        if self.guard is None and (dense is None or dtype != dense.dtype):
            if heads := sum(not any(row) for row in out):
                ordered.append(ordered[0].new_zeros(heads))
            out, into = wire.without_empty(out), wire.without_empty(into)
        if dense is not None:  # in full, whatever rows travel in
            ordered.append(dense.repeat(self.comm.size).view(dtype))
            size = len(ordered[-1]) // self.comm.size
            out, into = ([[*row, size] for row in counts] for counts in (out, into))
        sent = wire.interleave(ordered, out)
        if self.guard is None and not guard.is_fine:
            wire.spoil(sent, out)
        received = self._exchange("exchange row gradients", sent, out, into)
        del ordered, sent
        if self.guard is None and wire.is_spoilt(received, into):
            guard.settle()
        arrived = wire.regroup(received, into)
        if dense is not None:
            every = arrived[-1] if dtype == dense.dtype else arrived[-1].clone().view(dense.dtype)
            torch.sum(every.view(self.comm.size, -1), 0, out=dense)
        return arrived[: len(self.stores)]

    def _learnt(self, gradient: Rows, trip: _Trip, guard: Guard) -> Learnt:
        """What this rank's backward brings to the replicas."""
        pairs = zip(self.replicas.guides, trip.replicas, strict=True)
        own = [guide.take(gradient, asked) for guide, asked in pairs]
        guard.look(own, self.gradient_names, partial(_each, gradient))
        return self.replicas.learnt(own, trip.replicas)

    # ---- shared --------------------------------------------------------------------------------

    def _exchange(
        self, label: str, sent: torch.Tensor, out: wire.Counts, into: wire.Counts
    ) -> torch.Tensor:
        """All-to-all of values that lie by rank, ``out`` and ``into`` [rank][section] of them; one
        rank gets what it sent, where it lies."""
        received = sent if self.comm.size == 1 else sent.new_empty(sum(map(sum, into)))
        self.comm.all_to_all(label, received, sent, [*map(sum, into)], [*map(sum, out)])
        return received

    def _floats(self, counts: wire.Counts) -> wire.Counts:
        """Floats [rank][group] of the rows that come back for ``counts`` of sections."""
        widths = [store.width for store in self.stores]
        rows = wire.segments(counts, len(widths))
        return [[n * w for n, w in zip(row, widths, strict=True)] for row in rows]


def _each(gradient: Rows) -> Sequence[torch.Tensor]:
    return gradient.unbind() if isinstance(gradient, torch.Tensor) else gradient


class _Lookup(torch.autograd.Function):
    """Joins the route to autograd; table weights themselves never carry a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, bags: Bags, tables: ShardedTables, whole: bool
    ) -> Any:
        out, trip = tables.look_up(bags, whole)
        tables._open.add(trip)  # until its graph is gone
        ctx.trip, ctx.tables, ctx.whole = trip, tables, whole
        # tensors of their own for autograd, which may be changed in place
        return out if whole else tuple(rows.data for rows in _each(out))

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
        ctx.tables.retrace(gradients[0] if ctx.whole else gradients, trip)
        return None, None, None, None
