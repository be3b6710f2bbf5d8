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
        sum(network.latency_seconds(k, context.ranks, context.c, context.local) for k in kinds)
        for kinds in map(_calls, space.choices(run[:1]))
    ]
    once = _shown(space) * min(waits) + dense.update_seconds(0, context.c)
    yield Floor(f"{run[0].series or run[0].name}, once", once, ONCE)


def _calls(choice: UnitChoice) -> tuple[Collective, ...]:
    """The collectives of a step; what is frozen reduces nothing."""
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    if choice.replicated:
        kinds = ("all_reduce",)
    return kinds if choice.reduces else kinds[:-1]


def _shown(space: UnitSpace) -> float:
    """The share of a collective that costs compute."""
    return 1 - space.context.c["overlap"] if 1 in space.prefetches else 1.0


def _bytes_of(space: UnitSpace, choice: UnitChoice) -> float:
    """Transfers and update of a unit that every rank keeps, or that all ranks share."""
    context = space.context
    moved = 0.0
    for kind in _calls(choice):
        whole = choice.gathered if kind == "all_gather" else choice.reduced
        sent = _payload(choice, whole)
        moved += network.transfer_seconds(kind, sent, context.ranks, context.c, context.local)
        if not (choice.replicated or (choice.stays and kind == "all_gather")):
            moved += dense.fresh_seconds(sent, context.c)
    trained = choice.layout.trained.payload_bytes
    held = trained if choice.replicated else trained / context.ranks
    updated: float = optimizer.dense_update_bytes(held, choice.unit.optimizer)
    return _shown(space) * moved + updated / context.c["memory_rate"]


def _payload(choice: UnitChoice, whole: int) -> int:
    """Bytes of the tensors alone in a buffer of ``whole`` bytes, or less."""
    layout = choice.layout
    return layout.payload_bytes * whole // layout.nbytes if layout.nbytes else 0
