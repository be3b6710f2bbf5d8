"""A footprint made by hand: two pipeline stages of a decoder of four layers, the first one in
detail, and its step event by event."""

from __future__ import annotations

from typing import Any

import msgspec

from shardwright.core.footprint import (
    Alive,
    Extra,
    Footprint,
    ModuleMemory,
    PhasePeak,
    RankMemory,
    Sample,
)
from shardwright.core.timeline import Kind

MIB, GIB = 2**20, 2**30
KINDS: tuple[Kind, ...] = (
    "weight",
    "optimizer_state",
    "gradient",
    "input",
    "activation",
    "gathered_weight",
    "unreduced_gradient",
    "all_gather",
    "reduce_scatter",
    "temporary",
)
LAYERS = 4
REST = {"weight": 4000, "optimizer_state": 8000, "input": 2}  # MiB, all the time


def samples() -> tuple[Sample, ...]:
    """A step: blocks are gathered one after another, run forward and back, and updated."""
    live: dict[str, int] = {kind: REST.get(kind, 0) for kind in KINDS}
    found: list[Sample] = []

    def happens(name: str, phase: str, **changes: int) -> None:
        for kind, change in changes.items():
            live[kind] += change
        found.append(Sample(name, phase, tuple(live[kind] * MIB for kind in KINDS)))

    for layer in range(LAYERS):
        name = f"layers.{layer}"
        happens(name, "forward", gathered_weight=436, all_gather=436)
        happens(name, "forward", all_gather=-436, temporary=700)
        happens(name, "forward", temporary=-700, activation=1411)
        happens(name, "forward", gathered_weight=-436)
    happens("output", "forward", gathered_weight=1002, activation=2004, temporary=2004)
    for layer in reversed(range(LAYERS)):
        name = f"layers.{layer}"
        happens(name, "backward", gathered_weight=436, all_gather=436)
        happens(name, "backward", all_gather=-436, unreduced_gradient=436)
        happens(name, "backward", activation=-1411, reduce_scatter=872, gradient=109)
        happens(name, "backward", gathered_weight=-436, unreduced_gradient=-436)
        happens(name, "backward", reduce_scatter=-872)
    happens("output", "backward", gathered_weight=-1002, activation=-2004, temporary=-2004)
    happens("optimizer", "step", temporary=500)
    happens("optimizer", "step", temporary=-500, gradient=-436)
    return tuple(found)


def _peak(phase: str, at: str) -> PhasePeak:
    top = max((s for s in samples() if s.phase == phase), key=lambda s: sum(s.bytes))
    kinds = {kind: n for kind, n in zip(KINDS, top.bytes, strict=True) if n}
    return PhasePeak(phase, sum(top.bytes), kinds, at)


def worst() -> RankMemory:
    """The first stage, with all that can be told of it."""
    phases = (_peak("forward", "output"), _peak("backward", "layers.3"), _peak("step", ""))
    top = max(phases, key=lambda phase: phase.bytes)
    return RankMemory(
        name="stage 0",
        ranks=4,
        coordinates={"pipeline": 0, "data_shard": 0},
        peak_bytes=top.bytes,
        peak_phase=top.phase,
        by_category=top.by_category,
        certainty={
            kind: "modelled" if kind in ("activation", "temporary") else "exact" for kind in KINDS
        },
        phases=phases,
        modules=(
            ModuleMemory("Llama", "Llama", 4000 * MIB, 7648 * MIB, 23654 * MIB, 23000 * MIB),
            ModuleMemory("layers", "ModuleList", 436 * MIB, 5644 * MIB, 20 * GIB, 22 * GIB),
            ModuleMemory("layers.*", "Block", 436 * MIB, 5644 * MIB, 20 * GIB, 22 * GIB, 4),
            ModuleMemory("layers.*.attention", "Attention", 84 * MIB, 2068 * MIB, 19 * GIB, 0, 4),
            ModuleMemory("layers.*.attention.wq", "Linear", 32 * MIB, 256 * MIB, 18 * GIB, 0, 4),
            ModuleMemory("output", "Linear", 250 * MIB, 2004 * MIB, 23 * GIB, 23 * GIB),
            ModuleMemory("tok_embeddings", "Embedding", 250 * MIB, 0, 12000 * MIB, 0),
        ),
        largest=(
            Alive("states", "", "optimizer_state", 8000 * MIB),
            Alive("mul", "layers.*.feed_forward", "activation", 4 * 224 * MIB, 4),
        ),
        reserved_bytes=top.bytes + 900 * MIB,
        retries=3,
        kinds=KINDS,
        timeline=samples(),
    )


def footprint(**changes: Any) -> Footprint:
    """Both classes on ranks of 40 GiB; ``changes`` are fields of the footprint."""
    first = worst()
    last = msgspec.structs.replace(
        first,
        name="stage 1",
        peak_bytes=first.peak_bytes - GIB,
        reserved_bytes=first.reserved_bytes - GIB,
        coordinates={"pipeline": 1, "data_shard": 0},
        modules=(),
        largest=(),
        kinds=(),
        timeline=(),
    )
    made = Footprint(
        model="llama",
        parameters=8_030_261_248,
        world_size=8,
        parallel={"data_replicate": 1, "data_shard": 4, "pipeline": 2},
        settings={"checkpointing": "none", "runtime": "fsdp2", "batch": "1 x 8192"},
        ranks=(first, last),
        capacity=40 * GIB,
        outside=(
            Extra("CUDA context", 300 * 10**6, 500 * 10**6, "assumed"),
            Extra("2 communicators", 200 * 10**6, 10**9, "arXiv 2411.06465"),
        ),
        assumptions=("cluster.preset not given",),
        seconds=0.31,
    )
    return msgspec.structs.replace(made, **changes)
