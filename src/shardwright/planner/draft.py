"""A complete set of choices: who gets which shard, and what that costs each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.batch import expected_distinct, lookups
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.schedule import Modes, replicas_ride
from shardwright.core.timeline import Kind, Phase
from shardwright.cost import dense, embedding, optimizer
from shardwright.memory import simulate
from shardwright.memory.route import Traffic
from shardwright.planner.problem import Problem, TableChoice, UnitChoice


@dataclass(frozen=True)
class Placed:
    """A table's choice and the rank of each of its shards."""

    choice: TableChoice
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Draft:
    """One proposal; everything about it is derived on demand."""

    problem: Problem
    tables: tuple[Placed, ...]
    units: tuple[UnitChoice, ...]

    @property
    def model(self) -> ModelSpec:
        """The model planned for."""
        return self.problem.model

    @cached_property
    def modes(self) -> Modes:
        """What this draft decides about the order of a step."""
        sharded = frozenset(u.unit.name for u in self.units if not u.replicated)
        types = {placed.choice.option.sharding_type for placed in self.tables}
        return Modes(
            sharded_units=sharded,
            resharded_units=sharded,
            routed=bool(types - {"data_parallel"}),
            replicated_tables="data_parallel" in types,
        )

    @cached_property
    def rides(self) -> bool:
        """Whether the gradient of replicated tables travels with the row gradients."""
        replica_bytes = sum(table.nbytes for table in self.replicas)
        return replicas_ride(self.modes.routed, self.problem.cluster.world_size, replica_bytes)

    @cached_property
    def seconds(self) -> tuple[dict[str, float], ...]:
        """Seconds per step of each rank, by phase."""
        world_size = self.problem.cluster.world_size
        totals = [dict(self.shared_seconds) for _ in range(world_size)]
        for placed in self.tables:
            for rank, spent in zip(placed.ranks, placed.choice.shard_seconds, strict=True):
                for phase, value in spent.items():
                    totals[rank][phase] = totals[rank].get(phase, 0.0) + value
        return tuple(totals)

    @cached_property
    def shared_seconds(self) -> dict[str, float]:
        """Seconds that every rank spends whatever tables it holds."""
        values = self.problem.values
        modes = self.modes
        ranks = self.problem.cluster.world_size
        totals = {"load": self.problem.batch.size * values["parse_cost"]}
        requests = math.fsum(placed.choice.request_seconds for placed in self.tables)
        if requests:
            totals["exchange_ids"] = requests
        reduced = modes.replicated_tables and not self.rides
        parts = [
            embedding.step_latencies(modes.routed, modes.replicated_tables, reduced, ranks, values)
        ]
        parts += [unit.seconds for unit in self.units]
        for stage in self.model.stages:
            if stage.access == "none":
                forward, calls, backward, back_calls = dense.stage_flops(
                    stage, self.problem.batch.size
                )
                parts.append(
                    {
                        "forward": dense.compute_seconds(forward, calls, values),
                        "backward": dense.compute_seconds(backward, back_calls, values),
                    }
                )
        for part in parts:
            for phase, value in part.items():
                totals[phase] = totals.get(phase, 0.0) + value
        return totals

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds per step of each rank."""
        return tuple(math.fsum(phases.values()) for phases in self.seconds)

    @property
    def max_rank_seconds(self) -> float:
        """What the search minimises."""
        return max(self.rank_seconds)

    @cached_property
    def exact(self) -> tuple[dict[tuple[Phase, Kind, str], int], ...]:
        """Bytes that must be met exactly, by (phase, kind, name), of each rank."""
        world_size = self.problem.cluster.world_size
        found: list[dict[tuple[Phase, Kind, str], int]] = [{} for _ in range(world_size)]
        for placed in self.tables:
            fqn = placed.choice.table.tensor.fqn
            for rank, kept in zip(placed.ranks, placed.choice.shard_bytes, strict=True):
                for phase, kind in _TABLE_EVENTS:
                    if kept[kind]:
                        key = (phase, kind, fqn)
                        found[rank][key] = found[rank].get(key, 0) + kept[kind]
        for choice in self.units:
            for rank in range(world_size):
                found[rank].update(_unit_events(choice, rank))
        return tuple(found)

    def load(self, rank: int) -> simulate.RankLoad:
        """What the symbolic step of ``rank`` starts from."""
        resident: dict[Kind, int] = {}
        for (phase, kind, _), size in self.exact[rank].items():
            if kind != "gradient" and not (kind == "padding" and phase == "reduce"):
                resident[kind] = resident.get(kind, 0) + size
        resident["buffer"] = sum(tensor.nbytes for tensor in self.model.buffers)
        on_gloo = self.problem.cluster.compute_device == "cpu"
        units = {
            u.unit.name: simulate.UnitBytes(
                full=u.layout.nbytes,
                shard=u.layout.shard_bytes,
                replicated=u.replicated,
                scratch=u.layout.nbytes if on_gloo and not u.replicated else 0,
            )
            for u in self.units
        }
        return simulate.RankLoad(resident, units, self.traffic(rank), self.problem.batch.size)

    @cached_property
    def replicas(self) -> tuple[TableSpec, ...]:
        """The tables that every rank keeps whole."""
        placed = (p.choice for p in self.tables if p.choice.option.sharding_type == "data_parallel")
        return tuple(choice.table for choice in placed)

    def traffic(self, rank: int) -> Traffic:
        """This rank's share of the exchange."""
        requests, cut, serves = self._exchange
        batch = self.problem.batch
        replica_bytes = sum(table.nbytes for table in self.replicas)
        return Traffic(
            requests=tuple((requests[w], w, cut[w]) for w in requests),
            serves=tuple((serves[rank][w][0], w, serves[rank][w][1]) for w in requests),
            replica_ids=sum(round(lookups(table, batch)) for table in self.replicas),
            replica_bytes=replica_bytes,
            replica_rows=sum(table.rows for table in self.replicas),
            ride_bytes=self.problem.cluster.world_size * replica_bytes if self.rides else 0,
            features=len(self.tables),
            dim=self.tables[0].choice.table.dim,
            batch=batch.size,
            adagrad=self.tables[0].choice.table.optimizer == "rowwise_adagrad",
        )

    @cached_property
    def _exchange(self) -> tuple[dict[int, int], dict[int, int], list[dict[int, list[int]]]]:
        """By width, narrowest first: ids every rank asks for, those of them to be sorted, and of
        each rank the ids it serves with the distinct rows among them."""
        world_size = self.problem.cluster.world_size
        routed = [p for p in self.tables if p.choice.option.sharding_type != "data_parallel"]
        widths = sorted({s.columns for placed in routed for s in placed.choice.option.shards})
        requests, cut = dict.fromkeys(widths, 0), dict.fromkeys(widths, 0)
        serves = [{width: [0, 0] for width in widths} for _ in range(world_size)]
        for placed in routed:
            shards = placed.choice.option.shards
            ids = round(lookups(placed.choice.table, self.problem.batch))
            parts = len({shard.row for shard in shards if shard.rows})
            for width in {shard.column: shard.columns for shard in shards}.values():
                requests[width] += ids
                cut[width] += ids if parts > 1 else 0
            share = ids * world_size // parts
            for shard, owner in zip(shards, placed.ranks, strict=True):
                if shard.rows:
                    served = serves[owner][shard.columns]
                    served[0] += share
                    served[1] += expected_distinct(share, shard.rows)
        return requests, cut, serves

    @cached_property
    def peaks(self) -> tuple[dict[Phase, dict[Kind, int]], ...]:
        """Live bytes by kind at each phase's peak, of each rank."""
        world_size = self.problem.cluster.world_size
        return tuple(
            simulate.phase_peaks(self.model, self.modes, self.load(rank))
            for rank in range(world_size)
        )

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The highest total of each rank."""
        return tuple(max(sum(kinds.values()) for kinds in phases.values()) for phases in self.peaks)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within its memory."""
        return max(self.peak_bytes) <= self.problem.cluster.memory_per_rank

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes a rank keeps, gradients included, whatever the batch."""
        return tuple(sum(events.values()) for events in self.exact)


_TABLE_EVENTS: tuple[tuple[Phase, Kind], ...] = (
    ("setup", "weight"),
    ("setup", "optimizer_state"),
    ("reduce", "gradient"),
)


def _unit_events(choice: UnitChoice, rank: int) -> dict[tuple[Phase, Kind, str], int]:
    """The exact bytes of a dense unit on a rank; padding is told by role."""
    name, kind = choice.unit.name, choice.unit.optimizer
    padding = choice.layout.padding_bytes(0 if choice.replicated else rank)
    payload = choice.layout.shard_bytes - padding
    kept = dense.unit_bytes(payload, padding, kind)
    events: dict[tuple[Phase, Kind, str], int] = {
        ("setup", "weight", name): kept["weight"],
        ("setup", "padding", f"{name}.parameter"): padding,
        ("reduce", "gradient", name): kept["gradient"],
        ("reduce", "padding", f"{name}.gradient"): padding,
    }
    if kept["optimizer_state"]:
        extra = optimizer.dense_padding_state_bytes(padding, kind)
        events["step", "optimizer_state", name] = kept["optimizer_state"]
        events["step", "padding", f"{name}.optimizer_state"] = extra
    return events
