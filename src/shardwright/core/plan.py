"""A plan: which block of which tensor lives on which rank, how it is reached, and what that costs.

The block list is the truth; sharding types and placements label it. A plan embeds everything its
numbers rest on (job, cluster, constants), so it can be explained and run anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from shardwright.core.block import Block, BlockRun, check_tiling, decode
from shardwright.core.cluster import Cluster
from shardwright.core.document import read_document, write_document
from shardwright.core.errors import MismatchError, expected
from shardwright.core.job import Job
from shardwright.core.model import ModelSpec, ShardingType
from shardwright.core.placement import Placement
from shardwright.core.timeline import EventRun

SCHEMA = "shardwright.plan/1"


class TablePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for a table; shard *k* lies on ``ranks[k]``, ``seconds`` are per step."""

    name: str
    fqn: str
    rows: int
    dim: int
    sharding_type: ShardingType
    compute_kernel: str
    optimizer: str
    ranks: tuple[int, ...]
    shard_sizes: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]


class UnitPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for a dense unit: a placement for each role, and whether full weights go."""

    name: str
    tensors: tuple[str, ...]
    parameter: Placement
    gradient: Placement
    optimizer_state: Placement
    optimizer: str
    reshard_after_forward: bool
    seconds: float
    bytes_per_rank: int
    padding_bytes: int


class RankTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's predicted bytes by kind at the peak, where the peak is, and seconds per step."""

    rank: int
    peak_bytes: int
    peak_phase: str
    at_peak: dict[str, int]
    exact: dict[str, int]
    seconds: float
    hbm_bytes: int
    ddr_bytes: int


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan was found."""

    name: str
    proposals: int
    feasible: int
    wall_seconds: float


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything ``apply`` needs, and everything ``explain`` recomputes."""

    schema: Literal["shardwright.plan/1"]
    version: str
    job: Job
    cluster: Cluster
    tables: tuple[TablePlan, ...]
    units: tuple[UnitPlan, ...]
    blocks: tuple[BlockRun, ...]
    timeline: tuple[EventRun, ...]
    ranks: tuple[RankTotals, ...]
    max_rank_seconds: float
    lower_bound_seconds: float
    gap: float
    assumptions: tuple[str, ...]
    search: Search
    fingerprint: str = ""

    @property
    def world_size(self) -> int:
        """Ranks the plan is for."""
        return self.cluster.world_size

    def expanded(self) -> list[Block]:
        """The block list without run-length encoding."""
        return list(decode(self.blocks))


def fingerprint(plan: Plan) -> str:
    """sha256 of what must be equal on every rank: all but how the plan was found."""
    bare = msgspec.structs.replace(
        plan, fingerprint="", search=msgspec.structs.replace(plan.search, wall_seconds=0.0)
    )
    return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


def sealed(plan: Plan) -> Plan:
    """The plan with its fingerprint."""
    return msgspec.structs.replace(plan, fingerprint=fingerprint(plan))


def write_plan(plan: Plan, path: Path | str) -> None:
    """Write ``plan`` as JSON."""
    write_document(plan, path)


def read_plan(path: Path | str, model_of: Callable[[Job], ModelSpec] | None = None) -> Plan:
    """Read a plan and check its fingerprint; with ``model_of`` also that its blocks tile the model
    of its job."""
    plan = read_document(path, Plan, SCHEMA, made_by="shardwright plan JOB.toml -o plan.json")
    if plan.fingerprint != fingerprint(plan):
        raise MismatchError(
            expected(
                str(path),
                f"content of fingerprint {plan.fingerprint[:12]}",
                f"{fingerprint(plan)[:12]}",
                "The file was edited after planning; make the plan again from the job.",
            )
        )
    if model_of is not None:
        check_tiling(plan.expanded(), model_of(plan.job).tensors, plan.world_size)
    return plan
