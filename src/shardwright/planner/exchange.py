"""What the tables of one module exchange in a step: who asks whom for how many rows, what that
takes whatever they are, and how much of its seconds is hidden."""

# These are the buffers of `runtime/embeddings`, byte for byte: who asks for how many ids, what
# comes back, in which groups, and which of it is sorted or joined again. What is changed there has
# to be changed once more, a group here, a header in `heap/traffic.py`, a copy in `heap/route.py`,
# or predicted peaks are off; tests of measured steps hold the two together. Ids are expected to
# spread evenly over ranks: what comes in fact differs from step to step, so these bytes are
# modelled, never exact.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.amount import minimum, named
from shardwright.core.batch import Batch, distinct_rows, expected_distinct, features, lookups
from shardwright.core.block import GroupKey, counted_dim
from shardwright.core.model import DENSE, ON_DISK, TableSpec
from shardwright.core.optimizers import BY_ROW
from shardwright.core.schedule import Direction, replicas_ride
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.core.timeline import Phase
from shardwright.cost.embedding import Part, exchange_latency, replica_part
from shardwright.cost.pipeline import hidden_seconds
from shardwright.heap.traffic import Asked, Served, Traffic
from shardwright.job.job import overlap_of
from shardwright.job.model_of_job import early_tables
from shardwright.job.planner import IN_FULL, Communication, trained_communication
from shardwright.planner.choice import Choice, Placed, tally
from shardwright.planner.choices import Tables
from shardwright.planner.problem import Problem

Computed = Mapping[str, float]  # seconds by the unit that computes; empty for none


@dataclass(frozen=True)
class Exchange:
    """The tables of the module at ``path``, whose ids and rows travel together, the latter in the
    dtypes of ``communication``, forward and backward."""

    path: str
    tables: tuple[Placed, ...]
    ranks: int
    batch: Batch
    communication: Communication = IN_FULL
    early: bool = False  # its lookup begins with the forward
    late: bool = False  # gradients are waited for when rows are updated
    ahead: bool = False  # ids of its next batch travel while this one is computed

    @cached_property
    def _features(self) -> list[tuple[TableSpec, int, int]]:
        """Every feature's table, its bags, and the rows that come for them."""
        return [
            (table, round(count * size), round((1.0 if table.pooled else length) * count * size))
            for table in (placed.choice.table for placed in self.tables)
            for length, count, size in features(table, self.batch)
        ]

    @cached_property
    def routed(self) -> tuple[Placed, ...]:
        """Tables whose ids travel."""
        return tuple(p for p in self.tables if not p.choice.is_replicated)

    @cached_property
    def replicas(self) -> tuple[Placed, ...]:
        """Tables that every rank keeps whole."""
        return tuple(p for p in self.tables if p.choice.is_replicated)

    @cached_property
    def rides(self) -> bool:
        """Whether the gradient of replicas travels with the row gradients."""
        # Not from the groups, which thousands of drafts never make: they are asked for seconds
        # alone.
        dense = (p.choice for p in self.replicas if p.choice.option.compute_kernel == DENSE)
        elements = sum(choice.table.rows * choice.table.dim for choice in dense)
        return replicas_ride(bool(self.routed), self.ranks, elements * ELEMENT_BYTES["fp32"])

    @property
    def parts(self) -> list[Part]:
        """What its latencies are those of."""
        # Sorted, for a set of names has another order in every process and sums of seconds depend
        # on it.
        kernels = sorted({placed.choice.option.compute_kernel for placed in self.replicas})
        parts: list[Part] = [self.routed_part] if self.routed else []
        if any(placed.choice.has_strips for placed in self.routed):
            parts.append("strips")
        return parts + [replica_part(kernel, self.rides) for kernel in kernels]

    @property
    def routed_part(self) -> Part:
        """That of its routed tables."""
        return "steady" if self.is_steady else "routed"

    @cached_property
    def is_steady(self) -> bool:
        """Whether counts of ids travel with them: as many go to each rank in every step."""
        return self.ranks > 1 and all(placed.choice.is_steady for placed in self.routed)

    def traffic(self, rank: int) -> Traffic:
        """The share of ``rank``."""
        forward, backward = (ELEMENT_BYTES[dtype] for dtype in self.communication)
        return Traffic(
            self.path,
            self.ranks,
            tuple(asked for asked, _ in self._groups),
            tuple(served[rank] for _, served in self._groups),
            self._replicas,
            self.rides,
            self._joined,
            forward,
            backward,
            steady=self.is_steady,
            as_asked=self._comes_as_asked,
            early=self.early,
            late=self.late,
            ahead=self.ahead,
            means=sum(bags for bags, _ in self._means),
            mean_elements=sum(bags * dim for bags, dim in self._means),
        )

    @property
    def _comes_as_asked(self) -> bool:
        """Whether results, which come feature by feature, are what came back: of tables that are
        kept alike, each whole on one rank."""
        if not self._joined or self.replicas or len(self._groups) > 1:
            return False
        ((asked, _),) = self._groups
        wide = all(placed.choice.table.dim == asked.width for placed in self.routed)
        return wide and not (asked.cut or asked.dedup)

    @cached_property
    def _joined(self) -> int:
        """Ids and lengths of bags that come feature by feature, which they do unless all tables
        have one dim and one id in each bag."""
        tables = [placed.choice.table for placed in self.tables]
        jagged = any(table.jagged for table in tables)
        if not jagged and len({t.dim for t in tables}) == 1 and not any(t.weighted for t in tables):
            return 0
        # Of a single feature there is nothing to join: its ids are taken as they are.
        ids = sum(round(lookups(t, self.batch)) for t in tables) if self._features[1:] else 0
        return ids + (sum(bags for _, bags, _ in self._features) if jagged else 0)

    @cached_property
    def _means(self) -> list[tuple[int, int]]:
        """Bags of every feature whose sums are divided, and the dim of its table."""
        means = [each for each in self._features if each[0].jagged and each[0].pooling == "mean"]
        return [(bags, table.dim) for table, bags, _ in means]

    @cached_property
    def _replicas(self) -> tuple[Served, ...]:
        # Tables of one group are looked up and updated by one call in the runtime, so its buffers
        # are as large as those of all of them together.
        groups: dict[GroupKey, list[TableSpec]] = {}
        for placed in self.replicas:
            table, kernel = placed.choice.table, placed.choice.option.compute_kernel
            key = _key(table, table.dim, kernel, by_rows=kernel != DENSE)
            groups.setdefault(key, []).append(table)
        # Replicas that exchange rows gather those that a batch touches; of others the whole
        # gradient is reduced, however few these are.
        return tuple(
            Served(
                sum(round(lookups(table, self.batch)) for table in tables),
                sum(self._bags(table) for table in tables),
                key.width,
                max(sum(distinct_rows(t, self.batch) for t in tables), 1) if key.by_rows else 0,
                any(table.jagged for table in tables),
                any(table.weighted for table in tables),
                key.optimizer,
                element=ELEMENT_BYTES[key.dtype],
                size=sum(table.rows for table in tables),
            )
            for key, tables in sorted(groups.items())
        )

    def _bags(self, table: TableSpec) -> int:
        """Rows that a step gets of ``table``; an empty bag is one, too."""
        if not table.pooled:
            return round(lookups(table, self.batch))
        return sum(round(count * size) for _, count, size in features(table, self.batch))

    @cached_property
    def _groups(self) -> list[tuple[Asked, list[Served]]]:
        """What every rank asks of each group of the route, and what each of them serves of it."""
        members: dict[GroupKey, list[tuple[Placed, int]]] = {}
        for placed in self.routed:
            choice, option = placed.choice, placed.choice.option
            for column, width in {shard.column: shard.columns for shard in option.shards}.items():
                key = _key(choice.table, width, option.compute_kernel, dedup=choice.dedup)
                members.setdefault(key, []).append((placed, column))
        return [self._group(key, members[key]) for key in sorted(members)]

    def _group(
        self, key: GroupKey, members: Sequence[tuple[Placed, int]]
    ) -> tuple[Asked, list[Served]]:
        asked = [0, 0, 0, 0]  # ids, rows, bags, ids to be sorted by owner
        served = [[0, 0, 0, 0] for _ in range(self.ranks)]  # ids, rows, distinct, sums
        is_cut = key.optimizer in BY_ROW and key.width < key.dim
        for placed, column in members:
            table = placed.choice.table
            # Rows of a table that is cut have several owners, so ids are sorted by owner and every
            # owner sends sums of its own; of one that is whole ids go as they are.
            shards = [
                (shard, rank)
                for shard, rank in zip(placed.choice.option.shards, placed.ranks, strict=True)
                if shard.column == column and shard.rows
            ]
            # Rounded table by table, as the runtime's buffers are made of whole ids: the sum of
            # all, rounded once, would be off by a few bytes.
            ids, bags = round(lookups(table, self.batch)), self._bags(table)
            parts = max(len(shards), 1)
            rows = bags if parts == 1 else self._partial_sums(table, parts)
            sent = ids
            if key.dedup:
                sent = rows = distinct_rows(table, self.batch)
            for place, count in enumerate((ids, rows, bags, ids if parts > 1 else 0)):
                asked[place] += count
            # What all ranks ask of this table, dealt evenly to the shards that cut its rows
            # (assumed): an owner serves that much, and of it so many different rows are expected.
            share = ids * self.ranks // parts
            zipf = self.batch.zipf_of(table)
            for shard, rank in shards:
                served[rank][0] += sent * self.ranks // parts
                served[rank][1] += rows * self.ranks // parts
                distinct = expected_distinct(share, shard.rows, zipf, parts)
                served[rank][2] += distinct
                # Optimizers with one number a row need the sum over all columns: each owner sends
                # its part of every row to those that have the others.
                if is_cut:
                    served[rank][3] += distinct * len(_beside(placed, shard.row) - {rank})
        jagged = any(placed.choice.table.jagged for placed, _ in members)
        weighted = any(placed.choice.table.weighted for placed, _ in members)
        ids, rows, bags, cut = asked
        # Where every id was sorted and all features have as many rows of one width, the runtime
        # puts rows in order by one index into the result and needs no copy in between.
        alone = cut == ids and not jagged and len(members) == len(self.tables)
        direct = alone and len({(table.dim, rows) for table, _, rows in self._features}) == 1
        # as torch counts: uint8 has all of 256 ranks, int16 those of 32,768
        owner = 1 if self.ranks <= 2**8 else 2 if self.ranks <= 2**15 else 4
        flags = (jagged, weighted, key.dedup, direct)
        return Asked(ids, rows, bags, key.width, cut, *flags, owner), [
            Served(
                *(ids, rows, key.width, distinct, jagged, weighted, key.optimizer, key.on_disk),
                ELEMENT_BYTES[key.dtype],
                is_cut,
                sums,
            )
            for ids, rows, distinct, sums in served
        ]

    def _partial_sums(self, table: TableSpec, parts: int) -> int:
        """Rows that come back of a table cut into ``parts``, among which ids spread evenly."""
        if not table.pooled:
            return round(lookups(table, self.batch))
        found = 0.0
        for length, count, size in features(table, self.batch):
            low, more = int(length), length - int(length)  # made-up bags have one id more or less
            # Of `parts` equal ones each id of a bag hits any: a part stays unhit with (1 -
            # 1/parts)^n. A bag comes back as one partial sum from every part that it hits. expm1
            # and log1p keep the digits that 1 - (1 - x) would lose where parts are many.
            hit = sum(
                share * parts * -math.expm1(n * math.log1p(-1 / parts))
                for n, share in ((low, 1 - more), (low + 1, more))
            )
            found += hit * count * size
        return round(found)


def _beside(placed: Placed, row: int) -> set[int]:
    """The ranks that have columns of a table's rows from ``row`` on."""
    shards = zip(placed.choice.option.shards, placed.ranks, strict=True)
    return {rank for shard, rank in shards if shard.row == row and shard.rows}


def _key(
    table: TableSpec, width: int, kernel: str, *, by_rows: bool = False, dedup: bool = False
) -> GroupKey:
    optimizer = table.optimizer or "sgd"
    dim = counted_dim(table.dim, width, optimizer)
    return GroupKey(width, optimizer, table.dtype, dim, kernel == ON_DISK, by_rows, dedup)


def exchanges(problem: Problem, placed: Iterable[Placed]) -> Iterator[Exchange]:
    """The placed tables by the modules that have them, in the order of their first ones. Where a
    job lets them overlap, those that may be are looked up as a forward begins, and maybe asked for
    in the step before."""
    ranks, model, job = problem.cluster.world_size, problem.model, problem.job
    communication = trained_communication(problem.context.estimator)
    overlap, early = overlap_of(job, ranks), early_tables(job, model)
    members: dict[str, list[Placed]] = {}
    for each in placed:
        members.setdefault(model.step.tables_of(each.choice.table.tensor.fqn), []).append(each)
    for path, its in members.items():
        routed = any(not placed.choice.is_replicated for placed in its)
        late = overlap != "none" and routed
        # Each overlap needs the one before it: ids ahead only help a lookup that begins early, and
        # nothing is late that does not travel.
        first = late and path in early
        ahead = first and overlap == "ids_and_rows"
        yield Exchange(path, tuple(its), ranks, problem.batch, communication, first, late, ahead)


def least_latencies(problem: Problem, tables: Tables) -> dict[str, float]:
    """Seconds by phase that the exchanges of several tables, placed by any of their choices, take
    at least whatever these are: those of a routed table, or of replicas where all may be some."""
    ranks = problem.cluster.world_size
    members: dict[str, list[tuple[Choice, ...]]] = {}
    for choices in tables:
        path = problem.model.step.tables_of(choices[0].table.tensor.fqn)
        members.setdefault(path, []).append(choices)
    # A bound has to hold whatever is chosen: of every module the latencies of its cheapest way
    # alone.
    found: dict[str, float] = {}
    for its in members.values():
        if len(its) == 1:
            continue  # its own choices have them
        routed = {c.part(ranks) for choices in its for c in choices if not c.is_replicated}
        replicas = [{c.part(ranks) for c in choices if c.is_replicated} for choices in its]
        # Only where every table may be a replica is there a plan without any routed one.
        parts = routed.union(*replicas) if all(replicas) else routed
        ways = [problem.context.latencies([part]) for part in parts]
        for phase, seconds in min(ways, key=lambda way: math.fsum(way.values())).items():
            found[phase] = found.get(phase, 0.0) + seconds
    return found


# Compute hides an exchange only once: seconds of compute beside which rows travel are no longer
# there for ids. So legs are sorted by their windows, the narrowest first (a wide one can still use
# what a narrow one left), and ids, which may travel all step long, get what rows and gradients did
# not take.
@dataclass(frozen=True)
class Windows:
    """What a rank computes while exchanges may travel: by module of tables from a forward's begin
    until it needs its rows, from its row gradients to the end of the backward, and in all."""

    rows: Mapping[str, Computed]
    gradients: Mapping[str, Computed]
    everything: Computed

    def most(self, *, ids: bool) -> float:
        """The most that can be hidden of rows and their gradients, or with ``ids`` as well."""
        if ids:
            return _sum(self.everything)
        widest = (
            max((_sum(window) for window in windows.values()), default=0.0)
            for windows in (self.rows, self.gradients)
        )
        return math.fsum(widest)


@dataclass(frozen=True)
class Leg:
    """One exchange of a crossing: seconds of its bytes on every rank, of its collectives on each,
    and what is computed meanwhile."""

    exchange: Exchange
    moved: NDArray[np.float64]
    latency: float
    window: Computed


@dataclass(frozen=True)
class Crossing:
    """What travels in ``phase`` under a ``name``, ``behind`` the phase that computes meanwhile. The
    narrowest windows come first, of which ``taken`` seconds of every rank hide other exchanges."""

    phase: Phase
    name: str
    behind: Phase
    legs: Sequence[Leg]
    overlap: float
    taken: Any = 0.0

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """What they take on every rank."""
        return sum((leg.moved + leg.latency for leg in self.legs), start=np.zeros(1))

    @cached_property
    def hidden(self) -> NDArray[np.float64]:
        """What of it costs a rank nothing."""
        pairs = [
            (leg.moved + leg.latency, _sum(leg.window) - self.taken if leg.window else 0.0)
            for leg in self.legs
        ]
        found: NDArray[np.float64] = hidden_seconds(pairs, self.overlap)
        return found


def windows_of(problem: Problem) -> Windows | None:
    """Those of a job; None where nothing travels while a rank computes."""
    overlap = overlap_of(problem.job, problem.cluster.world_size)
    if overlap == "none" or not problem.model.is_trained:
        return None
    step, early = problem.model.step, early_tables(problem.job, problem.model)
    rows = {
        moment.unit: _computed(problem, "forward", range(place))
        for place, moment in enumerate(step.forward)
        if moment.piece.point == "lookup" and moment.unit in early
    }
    count = len(step.backward)
    gradients = {
        moment.unit: _computed(problem, "backward", range(place, count))
        for place, moment in enumerate(step.backward)
        if moment.piece.point == "row_gradients"
    }
    everything = _computed(problem, "forward", range(len(step.forward)))
    for unit, seconds in _computed(problem, "backward", range(count)).items():
        everything[unit] = everything.get(unit, 0.0) + seconds
    return Windows(rows, gradients, everything)


def _computed(problem: Problem, direction: Direction, places: range) -> dict[str, float]:
    homes = problem.model.step.homes[direction]
    pieces = problem.unit_space.pieces[direction]
    found: dict[str, float] = {}
    for place in places:
        if pieces[place]:
            found[homes[place]] = found.get(homes[place], 0.0) + pieces[place]
    return found


def crossings(problem: Problem, exchanges: Iterable[Exchange]) -> tuple[Crossing, ...]:
    """What travels of ``exchanges`` while ranks compute."""
    windows = windows_of(problem)
    if windows is None:
        return ()
    routed = [each for each in exchanges if each.late]
    early = [each.path for each in routed if each.early]
    overlap = problem.values["overlap"]
    found = []
    if early:
        legs = _legs(problem, routed, "exchange_rows", windows.rows)
        found.append(Crossing("exchange_rows", "rows", "forward", legs, overlap))
    if routed:
        legs = _legs(problem, routed, "reduce", windows.gradients)
        found.append(Crossing("reduce", "row_gradients", "backward", legs, overlap))
    if early and problem.job.train.overlap == "ids_and_rows":
        legs = _legs(problem, routed, "exchange_ids", dict.fromkeys(early, windows.everything))
        # Ids of the next batch travel all step long, and lose the compute that hides rows already.
        taken = sum(crossing.hidden for crossing in found)
        found.append(Crossing("exchange_ids", "ids", "forward", legs, overlap, taken))
    return tuple(found)


def _legs(
    problem: Problem, exchanges: Iterable[Exchange], phase: Phase, windows: Mapping[str, Computed]
) -> list[Leg]:
    values, linked, found = problem.values, problem.cluster.linked, []
    for each in exchanges:
        moved = tally(each.routed, each.ranks).seconds.get(phase, np.zeros(each.ranks))
        latency = exchange_latency(each.routed_part, phase, each.ranks, values, linked)
        found.append(Leg(each, moved, latency, windows.get(each.path, {})))
    return sorted(found, key=lambda leg: _sum(leg.window))


def without_hidden(problem: Problem, tables: Any, lift: Any = None) -> Any:
    """Seconds of tables that a step takes at least, of those that they take at least alone.

    Whatever their exchanges, no more is hidden than is computed meanwhile, nor than their share.
    ``lift`` makes an input of a number.
    """
    # Which tables are routed, and so what can travel, is not known where a bound is asked for: it
    # may hide as much as any placement could.
    windows = windows_of(problem)
    if windows is None:
        return tables
    most: Any = windows.most(ids=problem.job.train.overlap == "ids_and_rows")
    share: Any = problem.values["overlap"]
    if lift is not None:
        most = lift(most, "computed_meanwhile", "s", "while exchanges of tables may travel")
        share = lift(share, "overlap", "", "constant")
    hidden = named("hidden_at_most", minimum(tables * share, most), "s")
    return tables - hidden


def _sum(window: Computed) -> float:
    return math.fsum(window.values())
