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
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from shardwright.core.errors import InputError
from shardwright.core.schedule import Action
from shardwright.job.planner import IN_FULL, Communication
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings import exchange
from shardwright.runtime.embeddings.bags import (
    Bags,
    OwnPooling,
    cat,
    check_columns,
    features_of,
    one_each,
    read_bags,
    refusal,
    versions_of,
)
from shardwright.runtime.embeddings.disk import make_store
from shardwright.runtime.embeddings.exchange import Counts, IdExchange, Travelling, agree_on_ids
from shardwright.runtime.embeddings.initial import InitialBlock
from shardwright.runtime.embeddings.lookup import (
    Learning,
    LookUp,
    TableLookup,
    refuse_accumulation,
    refuse_many_lookups,
    refuse_scaling,
)
from shardwright.runtime.embeddings.modules import LookupModule
from shardwright.runtime.embeddings.route import HeldBlock, Route, Table
from shardwright.runtime.embeddings.routing import GroupRouting, Rows, each_of
from shardwright.runtime.embeddings.store import ColumnSums, Learnt, ReplicatedStores, Store
from shardwright.runtime.embeddings.update import Touched, check_rule
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import outside_graphs
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.parameter import DTYPES
from shardwright.tracker.private import after_backward


class ShardedTables(LookupModule):
    """Tables whose rows lie as a route says.

    Features as ``read_bags`` takes them -> a mapping of each to rows [B, dim], pooled, or [values,
    dim]. Ids [B, F] of tables of one dim -> rows [B, F, dim]. ``learning_rate`` is that of the next
    update; set it to follow a schedule. Tables on disk lie in ``folder``. Rows travel in the first
    of the dtypes of ``communication``, their gradients in the second; sums are made in fp32. With
    ``overlap`` a backward computes on while gradients travel.
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
        overlap: bool = False,
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
        self.learning = Learning(tables)
        self.overlap = overlap
        self.ahead: list[TableLookup] = []  # of forwards to come
        self._waiting: weakref.ref[partial[None]] | None = None  # an update, which a guard keeps
        self._updated: list[int] | None = None  # versions of weights of units at the last update
        self.adaptive = next((t.optimizer for t in tables if t.optimizer != "sgd"), "")
        self.updates = torch.zeros(())  # how many were made, for optimizers that use it
        dims = {table.dim for table in tables}
        self.dim = dims.pop() if len(dims) == 1 else None
        self.gradient_names = [f"gradient of {feature.table.fqn}" for feature in self.features]
        self.device = device = torch.device(comm.mesh.device_type)
        self.limits = torch.tensor([f.table.rows for f in self.features], device=device)
        self.stores = [make_store(group, comm, initial, folder) for group in route.groups]
        self.widths = [store.width for store in self.stores]
        self.routings = [GroupRouting.of(group, comm.size, device) for group in route.groups]
        self.ids = IdExchange(comm, self.routings, device) if self.routings else None
        self.replicas = ReplicatedStores(route.replicas, comm, initial, bool(self.stores))
        self.column_sums = ColumnSums(route.strips, comm)
        self.comes_as_asked = (
            not route.replicas
            and len(self.routings) == 1
            and self.routings[0].is_steady
            and self.routings[0].width == self.dim
        )
        # Lookups that wait for backward.
        self.open: weakref.WeakSet[TableLookup] = weakref.WeakSet()
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
        lookup = self._ahead_of(given) or self._ask(given)
        self._start(lookup)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.learning.is_off):
            found = LookUp.apply(self.anchor, lookup, self)
        pools = lookup.arrived()
        if lookup.whole:
            return found.to(self.dtypes[0]).transpose(0, 1)
        rows = {}
        named = zip(self.outputs, self.dtypes, found, strict=True)
        for number, (name, dtype, part) in enumerate(named):
            pooled = pools[number](part) if number in pools else part
            rows[name] = pooled if pooled.dtype == dtype else pooled.to(dtype)
        return rows

    @outside_graphs
    def ask(self, given: Any) -> None:
        """Let the ids of a later ``forward`` travel (collective); nothing is raised before that."""
        if self.travels:
            self._remember(given, self._ask(given, later=True))
            self.comm.probe.did(Action("ask", self.path, "exchange_ids"))

    @outside_graphs
    def start(self, given: Any) -> None:
        """Let the rows of a later ``forward`` travel, with the weights of now (collective)."""
        if self.travels:
            lookup = self._ahead_of(given) or self._ask(given)
            self._start(lookup)
            self._remember(given, lookup)

    def advance(self) -> None:
        """Let ids that were asked for follow their counts, once these are there (collective)."""
        for lookup in self.ahead:
            if lookup.sent is not None:
                with self.comm.probe.phase("exchange_ids"):
                    lookup.sent.advance()

    @property
    def travels(self) -> bool:
        """Whether anything can be on its way while this rank computes."""
        return self.ids is not None and self.comm.size > 1

    def _remember(self, given: Any, lookup: TableLookup) -> None:
        lookup.versions = versions_of(given)
        self.ahead.append(lookup)

    def _ahead_of(self, given: Any) -> TableLookup | None:
        """The lookup of what is ``given`` that is under way; those before it are forgotten."""
        for place, lookup in enumerate(self.ahead):
            if lookup.is_for(given):
                del self.ahead[: place + 1]
                return lookup
        return None

    def holdings(self) -> list[tuple[Store, HeldBlock]]:
        """Every block this rank keeps, with the store it lies in."""
        return [(store, held) for store in self.every_store for held in store.held]

    @property
    def every_store(self) -> tuple[Store, ...]:
        """Those whose ids travel, then those of tables that every rank has."""
        return (*self.stores, *self.replicas.stores)

    # ---- forward -------------------------------------------------------------------------------

    def _ask(self, given: Any, *, later: bool = False) -> TableLookup:
        """Sort ids by owner and send every owner its row numbers; of a wrong one all ranks hear,
        and ``later`` it is raised by ``_start``."""
        error = None
        whole = isinstance(given, torch.Tensor)
        try:
            bags, pools = self._read(given)
        except Exception as found:  # whatever it is, the others wait for this rank
            error = refusal(found, self.path)
        if self.ids is None and self._meets_in_backward:
            agree_on_ids(self.comm, str(error or ""))
        if error is not None and self.ids is None:
            raise error
        refuse_scaling(self.path, self.device.type)
        adds = self._no_step_since_update() and self.flow.has_gradients
        lookup = TableLookup(given, whole, self.limits[:0], adds)
        with torch.no_grad(), self.comm.probe.phase("exchange_ids" if self.stores else "lookup"):
            if error is None:
                lookup.pools, lookup.results, lookup.shares = pools, bags.results, bags.shares
                lookup.asked = [routing.request(bags) for routing in self.routings]
                lookup.replicas = [routing.request(bags) for routing in self.replicas.routings]
                bags.forget()
            if self.ids is not None:
                lookup.sent = self.ids.begin(lookup.asked, error)
                if error is not None and not later:
                    lookup.sent.finish()
        return lookup

    def _read(self, given: Any) -> tuple[Bags, dict[int, OwnPooling]]:
        """What is asked for, and how some of it is pooled here."""
        if isinstance(given, Exception):  # whoever asked found why it cannot be
            raise given
        if not isinstance(given, torch.Tensor):
            return read_bags(given, self.features, self.limits)
        if self.dim is None:
            wanted = "a mapping of features, for their tables have different dims"
            raise InputError("ids", wanted, "a tensor")
        check_columns(given, self.features, self.limits)
        return one_each(given.t().long()), {}

    @torch.no_grad()
    def _start(self, lookup: TableLookup) -> None:
        """Look rows up for the others, and let them travel."""
        if lookup.started:
            return
        lookup.started = True
        probe = self.comm.probe
        if lookup.sent is not None:
            sent, lookup.sent = lookup.sent, None
            with probe.phase("exchange_ids"):
                lookup.counts, lookup.served, lookup.rows = sent.finish()
            del sent
            probe.did(Action("exchange", "ids", "exchange_ids"))
        with probe.phase("lookup"):
            rows = self._serve(lookup) if self.stores else None
            pairs = zip(self.replicas.stores, lookup.replicas, strict=True)
            lookup.found = [store.look_up(request.looked) for store, request in pairs]
        probe.did(Action("lookup", self.path, "lookup"))
        if rows is not None:
            with probe.phase("exchange_rows"):
                served = exchange.floats(self.widths, lookup.served)
                came = exchange.floats(self.widths, lookup.counts)
                rows = rows.to(self.row_dtype)
                lookup.travelling = self._exchange("exchange rows", rows, served, came)
                del rows
            probe.did(Action("exchange", "rows", "exchange_rows"))

    def arrive(self, lookup: TableLookup) -> Rows:
        """Rows of every feature, one tensor if they are whole, once they are here."""
        probe, results = self.comm.probe, lookup.results
        with probe.phase("exchange_rows"):
            back = None if lookup.travelling is None else lookup.travelling.arrive()
            lookup.travelling, found, lookup.found = None, lookup.found, ()
            if back is not None and self.comes_as_asked and not lookup.whole:
                out = self._views(results, back)
            else:
                out = self._out(results)
                self._assemble(out, back, found, lookup)
            for place, share in enumerate(lookup.shares):
                if share is not None:
                    out[place].mul_(share)
        probe.did(Action("assemble", self.path, "exchange_rows"))
        return out

    def _serve(self, lookup: TableLookup) -> torch.Tensor:
        """The rows asked for, flat, by rank then group."""
        groups = len(self.stores)
        if groups == 1:
            (looked,) = exchange.unpack(lookup.rows, lookup.served, 1)
            return self.stores[0].look_up(looked).view(-1)
        parts = lookup.rows.split([*map(sum, lookup.served)])
        found = [
            store.look_up(looked).view(-1)
            for part, row in zip(parts, lookup.served, strict=True)
            for store, looked in zip(self.stores, exchange.unpack(part, [row], groups), strict=True)
        ]
        return torch.cat(found)

    def _assemble(
        self, out: Rows, back: torch.Tensor | None, found: list[torch.Tensor], lookup: TableLookup
    ) -> None:
        """Put everything found into ``out``, in feature order."""
        kept = zip(self.replicas.routings, found, lookup.replicas, strict=True)
        for routing, rows, asked in kept:
            routing.put(out, rows, asked)
        if back is not None:
            groups = exchange.regroup(back, exchange.floats(self.widths, lookup.counts))
            for routing, asked, rows in zip(self.routings, lookup.asked, groups, strict=True):
                routing.put(out, rows.view(-1, routing.width).float(), asked)

    def _views(self, results: Sequence[int], back: torch.Tensor) -> Rows:
        """What came back, feature by feature, where it lies: no views to autograd."""
        (routing,) = self.routings
        rows = back.view(-1, routing.width).float()
        parts = torch.unsafe_split_with_sizes(rows, [results[f] for f in routing.features])
        found = sorted(zip(routing.features, parts, strict=True), key=itemgetter(0))
        return [part for _, part in found]

    def _out(self, results: Sequence[int]) -> Rows:
        """Room for what comes back: [F, B, D] where it is as much of every feature."""
        if self.dim is not None and len(set(results)) == 1:
            return torch.empty(len(results), results[0], self.dim, device=self.device)
        pairs = zip(results, self.features, strict=True)
        return [torch.empty(rows, f.table.dim, device=self.device) for rows, f in pairs]

    # ---- backward ------------------------------------------------------------------------------

    def retrace(self, gradient: Rows, lookup: TableLookup) -> None:
        """Send gradients of rows back the way that they came and update the rows they belong to, at
        the end of the backward if they may travel until then.

        RunError on every rank, before any row is updated, where there is no guard to wait for and
        one of them is not finite.
        """
        self.learning.check(self.path)
        self._refuse_accumulation(lookup)
        gradient = self.learning.of_trained(gradient, self.features)
        # Every rank is here, at the same place in its order: ids that were asked for ahead may
        # follow their counts without a collective that others do not make.
        self.advance()
        if any(share is not None for share in lookup.shares):
            pairs = zip(gradient, lookup.shares, strict=True)
            gradient = [rows if share is None else rows * share for rows, share in pairs]
        probe = self.comm.probe
        guard = self.guard or Guard(self.comm)
        with probe.phase("reduce"):
            if lookup.replicas:
                lookup.learnt = self._learnt(gradient, lookup, guard)
            if self.stores:
                self._return(gradient, lookup, guard)
                probe.did(Action("exchange", "row_gradients", "reduce", "backward"))
            elif self.guard is None:
                guard.settle()
            if not (self.overlap and self.travels):
                self._receive(lookup)
            if lookup.learnt is not None:
                self.replicas.reduce(lookup.learnt)
                probe.did(Action("reduce", self.path, "reduce", "backward"))
        self.open.discard(lookup)
        if self.guard is None:
            self._updated = self._weights_of_units()
            update = partial(self._update, [lookup])
            update() if lookup.travelling is None else after_backward(update)
        else:
            self._defer(lookup, guard)
        lookup.returned()

    def _defer(self, lookup: TableLookup, guard: Guard) -> None:
        """Update with what other backwards brought before the guard is settled, which alone keeps
        the update: where it drops that, the next backward begins another one."""
        update = None if self._waiting is None else self._waiting()
        if update is None:
            update = partial(self._update, [])
            self._waiting = weakref.ref(update)
            guard.defer(update)
        update.args[0].append(lookup)

    @torch.no_grad()
    def _update(self, backwards: list[TableLookup]) -> None:
        """Change rows by the mean over ranks of what all backwards brought."""
        probe = self.comm.probe
        for lookup in backwards:
            if lookup.travelling is not None:
                with probe.phase("reduce"):
                    self._receive(lookup)
        self.learning.hold(self.every_store)
        self.updates += 1
        number = int(self.updates)
        with probe.phase("step"):
            if self.stores:
                self._update_routed(backwards, number)
            if learnt := [a.learnt for a in backwards if a.learnt is not None]:
                self.replicas.update(learnt, self.learning_rate, number)
        probe.did(Action("update", self.path, "step", "backward"))

    def _update_routed(self, backwards: Sequence[TableLookup], number: int) -> None:
        groups, scale = len(self.stores), 1.0 / self.comm.size  # of each rank's own mean loss
        looked = [each.parted(groups) for each in backwards]
        touched: dict[int, Touched] = {}
        for place, store in enumerate(self.stores):
            rows = exchange.joined([each[place] for each in looked])
            gradient = cat([a.gradients[place].view(-1, store.width) for a in backwards]).float()
            # SGD is linear: the mean over ranks goes into the rate, which saves a pass over the
            # gradient.
            rate = self.learning_rate * (scale if store.optimizer == "sgd" else 1.0)
            if store.optimizer != "sgd" and scale < 1:
                gradient.mul_(scale)
            # Of rows that are cut by columns no part may change before the sums over all columns
            # are there.
            if place in self.column_sums.groups:
                touched[place] = rows.summed(gradient, len(store.weight))
            else:
                store.update(rows, gradient, rate, number)
        if touched:
            squares = {place: self.stores[place].squares(t) for place, t in touched.items()}
            self.column_sums.add_up({place: t.rows for place, t in touched.items()}, squares)
            for place, each in touched.items():
                self.stores[place].step(each, squares[place], self.learning_rate, number)

    def _refuse_accumulation(self, lookup: TableLookup) -> None:
        if self.guard is not None:
            return
        others = sum(other is not lookup for other in self.open)
        refuse_many_lookups(self.adaptive, others)
        if self.flow.holds_back or (lookup.adds and self._no_step_since_update()):
            refuse_accumulation(self.path)

    def _no_step_since_update(self) -> bool:
        """Whether rows were updated in a backward without a guard, and no optimizer has stepped
        since, which would have changed weights of the units beside."""
        # Whoever else writes such weights in between is taken for one: versions do not tell who it
        # was, nor whether all are done, for of several optimizers each changes some.
        return self._updated is not None and self._updated == self._weights_of_units()

    def _weights_of_units(self) -> list[int]:
        """Versions of the weights of all units beside the tables."""
        return [unit.buffers.shard._version for unit in self.flow.units()]

    def _return(self, gradient: Rows, lookup: TableLookup, guard: Guard) -> None:
        """Send row gradients to the rows' owners; the dense one of replicas may ride."""
        dtype = self.gradient_dtype
        dense = lookup.learnt.dense if lookup.learnt is not None and self.replicas.rides else None
        ordered = [
            routing.take(gradient, asked).view(-1).to(dtype)
            for routing, asked in zip(self.routings, lookup.asked, strict=True)
        ]
        guard.look(ordered, self.gradient_names, partial(each_of, gradient))
        out = exchange.floats(self.widths, lookup.counts)
        into = exchange.floats(self.widths, lookup.served)
        # Without a guard, ranks hear from each other's values whether all are finite. So each gets
        # at least one number from everybody, also where no row has a gradient for it.
        if self.guard is None and (dense is None or dtype != dense.dtype):
            if heads := sum(not any(row) for row in out):
                ordered.append(ordered[0].new_zeros(heads))
            out, into = exchange.without_empty(out), exchange.without_empty(into)
        if dense is not None:  # in full, whatever rows travel in
            ordered.append(dense.repeat(self.comm.size).view(dtype))
            size = len(ordered[-1]) // self.comm.size
            out, into = ([[*row, size] for row in counts] for counts in (out, into))
        sent = exchange.interleave(ordered, out)
        if self.guard is None and not guard.is_fine:
            exchange.spoil(sent, out)
        lookup.into, lookup.rides = into, dense is not None
        lookup.guard = None if self.guard is not None else guard
        lookup.travelling = self._exchange("exchange row gradients", sent, out, into)

    def _receive(self, lookup: TableLookup) -> None:
        """Wait for row gradients, group by group; what rode along is summed."""
        travelling, lookup.travelling = lookup.travelling, None
        if travelling is None:
            return
        received, into, guard = travelling.arrive(), lookup.into, lookup.guard
        lookup.guard = None
        if guard is not None and exchange.is_spoilt(received, into):
            guard.settle()
        parts = exchange.regroup(received, into)
        if lookup.rides:
            assert lookup.learnt is not None
            assert lookup.learnt.dense is not None
            dense = lookup.learnt.dense
            same = self.gradient_dtype == dense.dtype
            every = parts[-1] if same else parts[-1].clone().view(dense.dtype)
            torch.sum(every.view(self.comm.size, -1), 0, out=dense)
        lookup.gradients = parts[: len(self.stores)]

    def _learnt(self, gradient: Rows, lookup: TableLookup, guard: Guard) -> Learnt:
        """What this rank's backward brings to the replicas."""
        pairs = zip(self.replicas.routings, lookup.replicas, strict=True)
        own = [routing.take(gradient, asked) for routing, asked in pairs]
        guard.look(own, self.gradient_names, partial(each_of, gradient))
        return self.replicas.learnt(own, lookup.replicas)

    def _exchange(self, label: str, sent: torch.Tensor, out: Counts, into: Counts) -> Travelling:
        """All-to-all of values that lie by rank, ``out`` and ``into`` [rank][section] of them; one
        rank gets what it sent, where it lies."""
        sizes = ([*map(sum, into)], [*map(sum, out)])
        own = sent if self.comm.size == 1 else None
        return exchange.send(self.comm, label, sent, *sizes, own)
