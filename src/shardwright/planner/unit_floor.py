"""What units take in any plan, whatever they are merged with and whatever runs beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardwright.cost import dense, network, optimizer
from shardwright.cost.network import Collective
from shardwright.planner.unit_choice import UnitChoice
from shardwright.planner.units import Unit, UnitSpace

ALONE = "its fastest placement"
ANYHOW = "its compute, and its bytes over the links and through memory"
ONCE = "one update and one reduce at least, however many layers share them"


class Floor(NamedTuple):
    """No plan spends less than ``seconds`` on what ``name`` says; ``why`` is what that rests on."""

    name: str
    seconds: float
    why: str


def unit_floors(space: UnitSpace) -> Iterator[Floor]:
    """Floors that add up to one of all units."""
    for run in space.runs:
        if run[0].series or 1 in space.prefetches:
            yield from _of_run(space, run)
        else:
            choices = space.choices(run)
            least = min(math.fsum(choice.seconds.values()) for choice in choices)
            yield Floor(run[0].name, least, ALONE)


def _of_run(space: UnitSpace, run: Unit) -> Iterator[Floor]:
    """Layers that may be merged: every layer's own, and once what all of them may share.

    Compute cannot hide, nor can the share of a collective that needs the same cores. Resharding,
    padding and more collectives only add to that.
    """
    context = space.context
    for unit in run:
        choices = space.choices((unit,))
        moved = min(_bytes_of(space, choice) for choice in choices)
        cleared = _payload(choices[0], choices[0].cleared)
        own = sum(choices[0].computing) + dense.gradient_seconds(cleared, context.c)
        yield Floor(unit.name, own + moved, ANYHOW)
    waits = [
        sum(network.latency_seconds(k, ranks, context.c, local) for k, _, ranks, local in calls)
        for calls in (_calls(space, choice) for choice in space.choices(run[:1]))
    ]
    once = _shown(space) * min(waits) + dense.update_seconds(0, context.c)
    yield Floor(f"{run[0].series or run[0].name}, once", once, ONCE)


class Call(NamedTuple):
    """A collective of ``nbytes``, padding included, among ``ranks`` of which ``local`` are near."""

    kind: Collective
    nbytes: int
    ranks: int
    local: int | None


def _calls(space: UnitSpace, choice: UnitChoice) -> Iterator[Call]:
    """The collectives of a step; what is frozen reduces nothing."""
    context, grid = space.context, choice.grid
    if choice.replicated:
        if choice.reduces:
            yield Call("all_reduce", choice.reduced, context.ranks, context.local)
        return
    local = context.shards_local
    yield Call("all_gather", choice.gathered, grid.shards, local)
    if choice.reduces:
        yield Call("reduce_scatter", choice.reduced, grid.shards, local)
    if choice.between:
        kind: Collective = "reduce_scatter" if grid.twice else "all_reduce"
        yield Call(kind, choice.part_reduced, grid.replicas, context.replicas_local)


def _shown(space: UnitSpace) -> float:
    """The share of a collective that costs compute."""
    return 1 - space.context.c["overlap"] if 1 in space.prefetches else 1.0


def _bytes_of(space: UnitSpace, choice: UnitChoice) -> float:
    """Transfers and update of a unit that every rank keeps, or that all ranks share."""
    context = space.context
    moved = 0.0
    for kind, whole, ranks, local in _calls(space, choice):
        sent = _payload(choice, whole)
        moved += network.transfer_seconds(kind, sent, ranks, context.c, local)
        of_parts = choice.replicated or whole == choice.part_reduced
        if not (of_parts or (choice.stays and kind == "all_gather")):
            moved += dense.fresh_seconds(sent, context.c)
    trained = choice.layout.trained.payload_bytes
    held = trained if choice.replicated else trained / choice.layout.world_size
    updated: float = optimizer.dense_update_bytes(held, choice.unit.optimizer)
    return _shown(space) * moved + updated / context.c["memory_rate"]


def _payload(choice: UnitChoice, whole: int) -> int:
    """Bytes of the tensors alone in a buffer of ``whole`` bytes, or less."""
    layout = choice.layout
    return layout.payload_bytes * whole // layout.nbytes if layout.nbytes else 0
