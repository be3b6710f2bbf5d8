"""A draft of a whole training step: its seconds with all latencies, and its peak, simulated.

Only this says whether a draft fits (its live bytes, what an allocator holds for them, and what
torch does not allocate), so that `plan`, `memory` and `fit` cannot disagree.
"""

# Ranks that are loaded alike have the same step: classes of ranks, few even among hundreds, are
# what is run. Anything that makes a rank's step differ has to be in its `RankLoad`, or two ranks
# are taken for one and the peak of the fuller one is missed.
#
# Bytes called exact are met to the byte by a run, which is tested; the others are modelled.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import msgspec

from shardwright.core.block import Role
from shardwright.core.footprint import Alive, RankMemory, needs_of
from shardwright.core.optimizers import OPTIMIZERS, trained
from shardwright.core.schedule import Action, Merged, Modes, Prefetch, training_step
from shardwright.core.timeline import EXACT_KINDS, PEAK, Event, Kind, Phase, stretches
from shardwright.cost import dense
from shardwright.cost.pipeline import by_phase, fixed_seconds
from shardwright.heap.allocator import AllocatorSettings
from shardwright.heap.classes import MODELLED, RankClass, Setting, rank_memories
from shardwright.heap.flat import FlatUnits
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Sharding, Units
from shardwright.heap.rank_step import RankStep
from shardwright.heap.traffic import Traffic
from shardwright.job.job import memory_of
from shardwright.job.plan import RankTotals
from shardwright.planner.draft import Draft, Filled
from shardwright.planner.exchange import Crossing, Exchange, crossings, exchanges
from shardwright.planner.unit_choice import UnitChoice
from shardwright.planner.units import dense_modes

# What depends on which ids come, of which a plan assumes that they spread evenly.
OF_IDS: tuple[Kind, ...] = ("communication", "temporary")
MOST_NAMED = 4  # stretches of ranks in the name of a class


class RankLoad(msgspec.Struct, frozen=True):
    """What a rank keeps (``resident`` bytes by kind) and what passes through it in a step."""

    resident: dict[Kind, int]
    traffic: dict[str, Traffic]


@dataclass(frozen=True)
class StepDraft(Draft):
    """Tables and dense units together; everything about it is derived on demand."""

    prefetch: Prefetch = 0

    @cached_property
    def modes(self) -> Modes:
        """What this draft decides about the order of a step."""
        return dense_modes(
            self.units,
            self.prefetch,
            routed=frozenset(each.path for each in self.exchanges if each.routed),
            replicated_tables=frozenset(each.path for each in self.exchanges if each.replicas),
            early=frozenset(each.path for each in self.exchanges if each.early),
            asked=frozenset(each.path for each in self.exchanges if each.ahead),
        )

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """A steady step."""
        return training_step(self.model.step, self.modes)

    @cached_property
    def dense_seconds(self) -> dict[str, dict[Phase, float]]:
        """Seconds of every unit by phase; those of stages without a unit under no name."""
        return by_phase(self.problem.unit_space.walk(self.units, self.modes))

    @cached_property
    def shared_seconds(self) -> dict[str, float]:
        units = [phases for name, phases in self.dense_seconds.items() if name]
        return _added([self.other_seconds, *units])

    @cached_property
    def other_seconds(self) -> dict[str, float]:
        """Of these, what no unit takes: the batch, addressing ids, latencies of the tables'
        exchange, stages without parameters, and what a machine's constants count once a step."""
        values = self.problem.values
        totals = {}
        if self.problem.job.model.traits.reads_clicks:  # line by line
            totals["load"] = self.problem.batch.size * values["parse_cost"]
        requests = math.fsum(placed.choice.everywhere for placed in self.tables)
        if requests:
            totals["exchange_ids"] = requests
        latencies = (self.problem.context.latencies(each.parts) for each in self.exchanges)
        computed = self.problem.unit_space.all_computed
        routed = any(each.routed for each in self.exchanges)
        fixed = fixed_seconds(totals.get("load", 0.0), computed, values, routed=routed)
        return _added([totals, fixed, *latencies, self.dense_seconds.get("", {})])

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        return crossings(self.problem, self.exchanges)

    @property
    def shared_latency(self) -> float:
        """Seconds of a step that the exchanges of several tables take whatever these are."""
        latencies = self.problem.context.latencies
        several = [latencies(each.parts) for each in self.exchanges if len(each.tables) > 1]
        return math.fsum(math.fsum(phases.values()) for phases in several)

    @cached_property
    def exact(self) -> tuple[Exact, ...]:
        """Bytes that must be met exactly, by (phase, kind, name), of each rank."""
        return tuple(self.exact_of(rank) for rank in range(self.ranks))

    def exact_of(self, rank: int) -> Exact:
        """The same of one rank."""
        found = dict(self.tables_exact[rank])
        for choice in self.units:
            paddings = choice.padding[rank], choice.trained_padding[rank]
            key = choice.unit.name, *paddings, choice.elements(rank)
            if key not in self._unit_exact:
                self._unit_exact[key] = unit_events(choice, rank)
            found.update(self._unit_exact[key])
        return found

    @cached_property
    def _unit_exact(self) -> dict[tuple[Any, ...], Exact]:
        """What was worked out of units, by what differs between ranks: few have any padding."""
        return {}

    @cached_property
    def tables_exact(self) -> list[Exact]:
        found: list[Exact] = [{} for _ in range(self.ranks)]
        for placed in self.tables:
            fqn = placed.choice.table.tensor.fqn
            for rank, cost in zip(placed.ranks, placed.choice.shard_costs, strict=True):
                kept = cost.kinds(self.problem.cluster.decisive_tier)
                for phase, kind in _TABLE_EVENTS:
                    if kept.get(kind):
                        key = (phase, kind, fqn)
                        found[rank][key] = found[rank].get(key, 0) + kept[kind]
        return found

    def load(self, rank: int) -> RankLoad:
        """What the symbolic step of ``rank`` starts from."""
        return self._load(self.exact_of(rank), self.traffic(rank))

    @cached_property
    def _away(self) -> frozenset[str]:
        """Names of exact bytes that an accelerator does not have."""
        units = [choice.unit.name for choice in self.units if choice.away]
        roles = (f"{name}.{role}" for name in units for role in get_args(Role))
        return frozenset((*units, *roles))

    @cached_property
    def _beside(self) -> int:
        """Bytes of units that stay whole between steps in another dtype than their shares: a device
        has the share that is updated, and the whole that is computed with."""
        return sum(choice.buffers.room for choice in self.units if choice.stays)

    def kept(self, exact: Exact) -> Iterator[tuple[Kind, str, int]]:
        """Of the ``exact`` bytes of a rank what its device has between steps: kind, name, bytes."""
        for (phase, kind, name), size in exact.items():
            # Gradients are there from a reduce to the step, not between steps: the heap takes them
            # itself.
            passes = kind == "gradient" or (kind == "padding" and phase == "reduce")
            if name not in self._away and not passes:
                yield kind, name, size

    def _load(self, exact: Exact, traffic: dict[str, Traffic]) -> RankLoad:
        resident: dict[Kind, int] = {}
        for kind, _, size in self.kept(exact):
            resident[kind] = resident.get(kind, 0) + size
        if self._beside:
            resident["gathered_weight"] = self._beside
        return RankLoad(resident, traffic)

    @cached_property
    def sharding(self) -> Sharding:
        """What the units' placements are to whoever runs a step on a heap."""
        context = self.problem.unit_space.context
        return Sharding(
            shards=context.grid.shards,
            replicas=context.replicas,
            twice=context.twice,
            kept=frozenset(u.unit.name for u in self.units if not u.reshard),
            replicated=frozenset(u.unit.name for u in self.units if u.replicated),
            param_dtype=context.param_dtype,
            reduce_dtype=context.reduce_dtype,
            prefetch=self.prefetch,
            zero=context.zero,
            on_gpu=self.problem.cluster.compute_device != "cpu",
            offloaded=frozenset(u.unit.name for u in self.units if u.offloaded),
            block=OPTIMIZERS[self.problem.job.train.optimizer].block,
        )

    def rank_step(self, load: RankLoad) -> RankStep:
        """A steady step of a rank, to be run with :meth:`machine`."""
        return RankStep(
            [self.problem.chunk],
            optimizer=trained(self.problem.job.train.optimizer),
            merged=Merged(self.modes.merged),
            tables=load.traffic,
            resident=load.resident,
        )

    def machine(self, heap: Ledger, units: Units, frozen: frozenset[str]) -> FlatUnits:
        """The runtime that follows this draft, on a heap."""
        buffers = {c.unit.name: c.buffers for c in self.units if not c.replicated}
        return FlatUnits(heap, units, self.sharding, frozen, buffers)

    def ledger(self, load: RankLoad) -> Ledger:
        """A steady step of a rank: live bytes by kind at the peak of each phase."""
        return self.rank_step(load).ledger(self.machine, fine=True)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Of every module of tables."""
        return tuple(exchanges(self.problem, self.tables))

    def traffic(self, rank: int) -> dict[str, Traffic]:
        """This rank's share of every exchange, by its path."""
        return {each.path: each.traffic(rank) for each in self.exchanges}

    @cached_property
    def classes(self) -> tuple[tuple[RankLoad, tuple[int, ...]], ...]:
        """Ranks that are loaded alike, with their load."""
        # By the encoded load, for loads hold dicts and cannot be hashed.
        alike: dict[bytes, tuple[RankLoad, list[int]]] = {}
        for rank in range(self.ranks):
            load = self.load(rank)
            alike.setdefault(msgspec.msgpack.encode(load), (load, []))[1].append(rank)
        return tuple((load, tuple(ranks)) for load, ranks in alike.values())

    @cached_property
    def ledgers(self) -> tuple[Ledger, ...]:
        """A steady step of each of the classes."""
        return tuple(self.ledger(load) for load, _ in self.classes)

    @cached_property
    def peaks(self) -> tuple[dict[Phase, dict[Kind, int]], ...]:
        """Live bytes by kind at each phase's peak, of each rank; ranks loaded alike share them."""
        classes = zip(self.classes, self.ledgers, strict=True)
        found = {rank: ledger.peaks for (_, ranks), ledger in classes for rank in ranks}
        return tuple(found[rank] for rank in range(self.ranks))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(max(sum(kinds.values()) for kinds in phases.values()) for phases in self.peaks)

    @cached_property
    def highest_peak(self) -> int:
        """The highest total of any rank. Of units alone every rank has the same: what is padding
        on one is weight on another, unless their optimizer quantizes some."""
        # Asked for every draft of units alone: one step instead of one for each class of ranks.
        if self.tables or any(choice.elements(None) for choice in self.units):
            return super().highest_peak  # ranks differ
        exact: Exact = {}
        for choice in self.units:
            exact.update(unit_events(choice, None))
        phases = self.ledger(self._load(exact, self.traffic(0))).peaks
        return max(sum(kinds.values()) for kinds in phases.values())

    @property
    def fits(self) -> bool:
        # The cheapest question first: what an allocator holds is found by replaying every
        # allocation of a step, and only where live bytes fit and somebody wants to be sure.
        _, ddr, ssd = self.problem.capacity
        if max(self.disk_bytes, default=0) > ssd or self.host_bytes > ddr:
            return False
        room = self.problem.decisive_capacity
        if self.least_demand > room or not (self.problem.sure and self.problem.on_accelerator):
            return self.least_demand <= room
        return needs(self, room)[1] <= room

    @property
    def fills(self) -> Sequence[Filled]:
        fullest, problem = self.peak_bytes.index(max(self.peak_bytes)), self.problem
        tier, capacity = problem.cluster.decisive_tier, problem.decisive_capacity
        return [Filled(tier, fullest, self.demand, capacity)]

    @cached_property
    def needs(self) -> tuple[int, int]:
        """The least and the most bytes that the rank which asks most needs of its device."""
        if not self.problem.on_accelerator:
            return self.highest_peak, self.highest_peak
        return needs(self)

    def memories(self, enough: int | None = None) -> tuple[RankMemory, ...]:
        """Its classes of ranks; where an allocator holds more than ``enough``, not by how much."""
        # A replay that ended early knows only that it is too much: it is not kept, for whoever asks
        # for the needs themselves would get them cut.
        if not self._memories:
            found = memories(self, enough=enough)
            if enough is not None and any(rank.reserved_bytes > enough for rank in found):
                return found
            self._memories.append(found)
        return self._memories[0]

    @cached_property
    def _memories(self) -> list[tuple[RankMemory, ...]]:
        """The same in full, once it was worked out."""
        return []

    @property
    def demand(self) -> int:
        """Bytes that have to be there for the draft to fit, its allocator's where that is to be
        sure."""
        return self.needs[1] if self.problem.sure else self.least_demand

    @property
    def least_demand(self) -> int:
        """The same if the allocator held no more than what is alive."""
        outside = self.problem.outside[self.problem.sure]
        return self.highest_peak + outside

    @cached_property
    def host_bytes(self) -> int:
        """Bytes of units that every rank of an accelerator has in its host's memory."""
        return sum(_unit_total(choice) for choice in self.units if choice.away)

    @cached_property
    def disk_bytes(self) -> list[int]:
        """Bytes of every rank on disk."""
        return self.tally.tier_bytes("ssd", self.ranks)

    @property
    def room(self) -> tuple[int, int, int]:
        """A step needs as much again as it now has above what is kept."""
        # For changes of single tables: what passes through a step is taken to stay, so that what is
        # left is for shards; the step is run again before a change is taken.
        units = max(StepDraft(self.problem, (), self.units).kept_bytes)
        passing = self.demand - max(self.kept_bytes)
        left = self.problem.decisive_capacity - units - passing
        return self.problem.capacity_with(max(left, 0))

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes a rank keeps, gradients included, whatever the batch."""
        units = sum(_unit_total(choice) for choice in self.units if not choice.away)
        return tuple(units + sum(events.values()) for events in self.tables_exact)

    def totals(self, rank: int) -> RankTotals:
        phases = self.peaks[rank]
        phase = max(phases, key=lambda p: sum(phases[p].values()))
        exact: dict[str, int] = dict.fromkeys(EXACT_KINDS, 0)
        for (_, kind, _), size in self.exact[rank].items():
            if kind in exact:
                exact[kind] += size
        peak = self.peak_bytes[rank]
        return RankTotals(
            rank=rank,
            peak_bytes=peak,
            peak_phase=phase,
            at_peak={str(kind): size for kind, size in phases[phase].items()},
            exact=exact,
            seconds=self.rank_seconds[rank],
            parts=self.seconds[rank],
            hbm_bytes=peak if self.problem.cluster.decisive_tier == "hbm" else 0,
            ddr_bytes=peak if self.problem.cluster.decisive_tier == "ddr" else self.host_bytes,
            ssd_bytes=self.disk_bytes[rank],
        )

    def byte_events(self) -> Iterable[Event]:
        for rank, exact in enumerate(self.exact):
            for (phase, kind, name), size in exact.items():
                yield Event(rank, 0 if phase == "setup" else 1, phase, kind, name, size)
        for rank, phases in enumerate(self.peaks):
            for phase, kinds in phases.items():
                for kind, size in sorted(kinds.items()):
                    yield Event(rank, 1, phase, kind, PEAK, size)


def _added(parts: Iterable[Mapping[Any, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part in parts:
        for phase, value in part.items():
            totals[phase] = totals.get(phase, 0.0) + value
    return totals


_TABLE_EVENTS: tuple[tuple[Phase, Kind], ...] = (
    ("setup", "weight"),
    ("setup", "optimizer_state"),
    ("setup", "cache"),
    ("reduce", "gradient"),
)
Exact = dict[tuple[Phase, Kind, str], int]


def _unit_total(choice: UnitChoice) -> int:
    """Bytes of a unit in all roles: the same on every rank, for padding is stored like weights."""
    return sum(unit_events(choice, None).values())


def unit_events(choice: UnitChoice, rank: int | None) -> Exact:
    """The exact bytes of a dense unit on a rank, where padding is counted by role; with padding
    among the rest where it is None."""
    name, kind, trained = choice.unit.name, choice.unit.optimizer, choice.layout.trained
    padding = 0 if rank is None else choice.padding[rank]
    trained_padding = 0 if rank is None else choice.trained_padding[rank]
    elements = choice.elements(rank)
    kept = dense.unit_bytes(
        choice.layout.stored_bytes - padding,
        padding,
        kind,
        trained.shard_bytes - trained_padding,
        trained_padding,
        trained.flat_tensors,
        elements,
    )
    events: Exact = {
        ("setup", "weight", name): kept["weight"],
        ("setup", "padding", f"{name}.parameter"): padding,
    }
    if trained.trains:
        events["reduce", "gradient", name] = kept["gradient"]
        events["reduce", "padding", f"{name}.gradient"] = trained_padding
    if kept["optimizer_state"]:
        extra = kept["padding"] - padding - trained_padding
        events["step", "optimizer_state", name] = kept["optimizer_state"]
        events["step", "padding", f"{name}.optimizer_state"] = extra
    return events


def needs(draft: StepDraft, enough: int | None = None) -> tuple[int, int]:
    """The least and the most bytes that the rank which asks most needs of its device; not all of
    the most where that is more than ``enough``."""
    extras = draft.problem.extras
    # An allocator that holds more than `enough` is over the budget whatever else is there, so its
    # replay may end there: to say no is much quicker than to say by how much.
    beside = sum(extra.high for extra in extras)
    ranks = draft.memories(None if enough is None else enough - beside)
    all_needs = [needs_of(rank, ranks, extras) for rank in ranks]
    return max(least for least, _ in all_needs), max(most for _, most in all_needs)


def memories(
    draft: StepDraft, *, details: bool = False, named: str = "", enough: int | None = None
) -> tuple[RankMemory, ...]:
    """Ranks that are loaded alike are one class; each runs its step. What allocators hold beyond
    ``enough`` is not looked at, where that is given."""
    on_gpu = draft.problem.on_accelerator
    setting = Setting(
        draft.machine,
        draft.sharding,
        on_gpu,
        AllocatorSettings.parse(memory_of(draft.problem.job).allocator),
        draft.problem.decisive_capacity,
        modelled=(*(MODELLED if on_gpu else ()), *(OF_IDS if draft.tables else ())),
        enough=enough,
    )
    classes = [
        RankClass(
            class_name(ranks, draft.ranks),
            len(ranks),
            {"rank": ranks[0]},
            draft.rank_step(load),
            ledger,
            {
                name.rpartition(".")[0]: nbytes
                for (_, kind, name), nbytes in draft.tables_exact[ranks[0]].items()
                if kind == "weight"
            },
            [
                Alive(kind, name.removesuffix(".weight"), kind, nbytes)
                for kind, name, nbytes in draft.kept(draft.exact_of(ranks[0]))
                if nbytes
            ],
        )
        for (load, ranks), ledger in zip(draft.classes, draft.ledgers, strict=True)
    ]
    return rank_memories(classes, setting, details=details, named=named)


def class_name(ranks: Sequence[int], world_size: int) -> str:
    """Who they are: ``all ranks``, ``rank 3``, ``ranks 0-2, 5``; the first is in no other class."""
    if len(ranks) == world_size:
        return "all ranks"
    runs = [str(a) if n == 1 else f"{a}-{a + n - 1}" for a, n in stretches(ranks)]
    more = ", ..." if len(runs) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs[:MOST_NAMED])}{more}"
