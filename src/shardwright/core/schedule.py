"""What a training step does, action by action.

The memory model runs this list symbolically, the cost model puts seconds on it, and the runtime
does it for real and can say what it did: all three walk the same actions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from shardwright.core.model import ModelSpec, Stage
from shardwright.core.timeline import Phase

Verb = Literal[
    "load", "gather", "free", "compute", "exchange", "lookup", "assemble", "reduce", "update"
]


class Action(msgspec.Struct, frozen=True, array_like=True):
    """``verb`` on ``target`` (a stage, a unit, or ``tables``), in the time of ``phase``."""

    verb: Verb
    target: str
    phase: Phase
    direction: Literal["forward", "backward"] = "forward"


# Up to here the gradient of replicated tables rides along with the row gradients, once to every
# rank, which saves a collective; beyond, its bytes cost more than an all-reduce's latency.
RIDE_BYTES = 2**20


def replicas_ride(routed: bool, world_size: int, replica_bytes: int) -> bool:
    """Whether the gradient of replicated tables travels in the exchange of row gradients."""
    return routed and 0 < replica_bytes * world_size <= RIDE_BYTES


class Modes(msgspec.Struct, frozen=True):
    """What a plan decided that changes the order of a step."""

    sharded_units: frozenset[str]
    resharded_units: frozenset[str]
    routed: bool
    replicated_tables: bool


def training_step(model: ModelSpec, modes: Modes) -> tuple[Action, ...]:
    """One step: load, forward through the stages, backward through them, then update.

    A sharded unit is gathered before its forward, freed after it if it reshards, gathered again
    before its backward, and reduced and freed right after. Tables are updated inside their
    backward. Dense units are updated at the end of the step.
    """
    actions = [Action("load", "batch", "load")]
    for stage in model.stages:
        actions.extend(_forward(stage, modes))
    for stage in reversed(model.stages):
        actions.extend(_backward(stage, modes))
    actions.extend(Action("update", unit.name, "step", "backward") for unit in model.units)
    return tuple(actions)


def _forward(stage: Stage, modes: Modes) -> Iterator[Action]:
    if stage.access == "route":
        if modes.routed:
            yield Action("exchange", "ids", "exchange_ids")
        yield Action("lookup", stage.name, "lookup")
        if modes.routed:
            yield Action("exchange", "rows", "exchange_rows")
        yield Action("assemble", stage.name, "exchange_rows")
        return
    if stage.name in modes.sharded_units:
        yield Action("gather", stage.name, "forward")
    yield Action("compute", stage.name, "forward")
    if stage.name in modes.resharded_units:
        yield Action("free", stage.name, "forward")


def _backward(stage: Stage, modes: Modes) -> Iterator[Action]:
    if stage.access == "route":
        if modes.routed:
            yield Action("exchange", "row_gradients", "reduce", "backward")
        if modes.replicated_tables:
            yield Action("reduce", "tables", "reduce", "backward")
        yield Action("update", "tables", "step", "backward")
        return
    if stage.name in modes.resharded_units:
        yield Action("gather", stage.name, "backward", "backward")
    yield Action("compute", stage.name, "backward", "backward")
    if stage.access == "gather":
        yield Action("reduce", stage.name, "reduce", "backward")
    if stage.name in modes.sharded_units:
        yield Action("free", stage.name, "reduce", "backward")
