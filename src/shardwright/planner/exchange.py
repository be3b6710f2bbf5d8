"""What the tables of one module exchange in a step: who asks whom for how many rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.batch import Batch, expected_distinct, lookups
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.schedule import replicas_ride
from shardwright.cost import embedding
from shardwright.memory.route import Traffic
from shardwright.planner.problem import Problem, ranks_per_host
from shardwright.planner.tally import Placed


@dataclass(frozen=True)
class Exchange:
    """The tables of the module at ``path``, whose ids and rows travel together."""

    path: str
    tables: tuple[Placed, ...]
    ranks: int
    batch: Batch

    @cached_property
    def routed(self) -> tuple[Placed, ...]:
        """Tables whose ids travel."""
        return tuple(p for p in self.tables if not p.choice.option.traits.replicated)

    @cached_property
    def replicas(self) -> tuple[TableSpec, ...]:
        """Tables that every rank keeps whole."""
        return tuple(p.choice.table for p in self.tables if p.choice.option.traits.replicated)

    @property
    def replica_bytes(self) -> int:
        """Bytes of all replicas, and of their gradient."""
        return sum(table.nbytes for table in self.replicas)

    @property
    def rides(self) -> bool:
        """Whether the gradient of replicas travels with the row gradients."""
        return replicas_ride(bool(self.routed), self.ranks, self.replica_bytes)

    def traffic(self, rank: int) -> Traffic:
        """The share of ``rank``."""
        requests, cut, serves = self._sums
        table = self.tables[0].choice.table
        return Traffic(
            self.path,
            requests=tuple((requests[w], w, cut[w]) for w in requests),
            serves=tuple((serves[rank][w][0], w, serves[rank][w][1]) for w in requests),
            replica_ids=sum(round(lookups(table, self.batch)) for table in self.replicas),
            replica_bytes=self.replica_bytes,
            replica_rows=sum(table.rows for table in self.replicas),
            ride_bytes=self.ranks * self.replica_bytes if self.rides else 0,
            dim=table.dim,
            adagrad=table.optimizer == "rowwise_adagrad",
        )

    @cached_property
    def _sums(self) -> tuple[dict[int, int], dict[int, int], list[dict[int, list[int]]]]:
        """By width, narrowest first: ids every rank asks for, those of them to be sorted, and of
        each rank the ids it serves with the distinct rows among them."""
        widths = sorted({s.columns for placed in self.routed for s in placed.choice.option.shards})
        requests, cut = dict.fromkeys(widths, 0), dict.fromkeys(widths, 0)
        serves = [{width: [0, 0] for width in widths} for _ in range(self.ranks)]
        for placed in self.routed:
            shards = placed.choice.option.shards
            ids = round(lookups(placed.choice.table, self.batch))
            parts = len({shard.row for shard in shards if shard.rows})
            for width in {shard.column: shard.columns for shard in shards}.values():
                requests[width] += ids
                cut[width] += ids if parts > 1 else 0
            share = ids * self.ranks // parts
            for shard, owner in zip(shards, placed.ranks, strict=True):
                if shard.rows:
                    served = serves[owner][shard.columns]
                    served[0] += share
                    served[1] += expected_distinct(share, shard.rows, self.batch.zipf, parts)
        return requests, cut, serves


def exchanges(
    model: ModelSpec, placed: Iterable[Placed], ranks: int, batch: Batch
) -> Iterator[Exchange]:
    """The placed tables by the modules that have them, in the order of their first ones."""
    members: dict[str, list[Placed]] = {}
    for each in placed:
        members.setdefault(model.step.tables_of(each.choice.table.tensor.fqn), []).append(each)
    for path, its in members.items():
        yield Exchange(path, tuple(its), ranks, batch)


def small_tables(problem: Problem) -> frozenset[str]:
    """Names of tables whose replica takes less time of a step than the latencies of an exchange of
    its own: in a unit with others it needs none."""
    ranks, local = problem.cluster.world_size, ranks_per_host(problem.cluster)
    latencies = embedding.step_latencies(True, False, False, ranks, problem.values, local)
    least = sum(latencies.values())
    return frozenset(
        choice.table.name
        for choices in problem.tables
        for choice in choices
        if choice.option.traits.replicated and choice.costs[0].total_seconds < least
    )
