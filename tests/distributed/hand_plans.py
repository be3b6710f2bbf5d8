"""Plans written by hand: units and where their tensors lie, and no predictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from shardwright import __version__
from shardwright.core.block import encode
from shardwright.core.cluster import Cluster
from shardwright.core.layout import unit_layout
from shardwright.core.placement import Flat, Placement, Replicate
from shardwright.core.tensor import TensorSpec
from shardwright.job.job import Job
from shardwright.job.plan import Plan, Reserved, Search, UnitPlan, sealed
from shardwright.tracker.tensors import NAMES

ROLES = ("parameter", "gradient", "optimizer_state")


def plan_by_hand(
    job: Job,
    model: nn.Module,
    world_size: int,
    units: Mapping[str, Sequence[str]],
    *,
    replicated: Collection[str] = (),
    kept: Collection[str] = (),
    prefetch: int = 0,
) -> Plan:
    """``units`` are paths of modules by the unit's name; one of ``""`` has what is left over. Units
    are sharded but for ``replicated`` ones, and let whole weights go after a forward but for
    ``kept`` ones."""
    parameters = dict(model.named_parameters())
    left = dict.fromkeys(parameters)
    plans, blocks = {}, []
    for name in sorted(units, key=lambda name: "" in units[name]):
        tensors = [
            n for n in left if n.startswith(tuple(f"{p}." if p else "" for p in units[name]))
        ]
        for tensor in tensors:
            del left[tensor]
        placement: Placement = Replicate() if name in replicated else Flat()
        specs = [
            TensorSpec(n, tuple(parameters[n].shape), NAMES[parameters[n].dtype]) for n in tensors
        ]
        frozen = [n for n in tensors if not parameters[n].requires_grad]
        layout = unit_layout(specs, placement, world_size, frozen)
        blocks += [block for role in ROLES for block in layout.blocks(role)]  # type: ignore[arg-type]
        plans[name] = UnitPlan(
            name=name,
            modules=tuple(units[name]),
            members=tuple(units[name]),
            tensors=tuple(tensors),
            parameter=placement,
            gradient=placement,
            optimizer_state=placement,
            optimizer=job.train.optimizer,
            reshard_after_forward=name not in kept and name not in replicated,
            seconds=0.0,
            bytes_per_rank=layout.shard_bytes,
            padding_bytes=layout.nbytes - layout.payload_bytes,
            collectives=0,
            bytes_per_step=0,
        )
    return sealed(
        Plan(
            schema="shardwright.plan/4",
            version=__version__,
            job=job,
            recording=None,
            cluster=Cluster("hand", world_size, world_size, "cpu", 0, 2**40, 0, world_size, {}),
            tables=(),
            units=tuple(plans[name] for name in units),
            prefetch=prefetch,  # type: ignore[arg-type]
            blocks=encode(blocks),
            timeline=(),
            ranks=(),
            max_rank_seconds=0.0,
            lower_bound_seconds=0.0,
            gap=0.0,
            reserved=Reserved("none", 0, 2**40, 0),
            assumptions=(),
            search=Search("hand", 0, 0, 0.0),
        )
    )
