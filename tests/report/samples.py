"""A small realistic plan, what a run of it measured, and the two compared."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from shardwright.core.block import Block, encode
from shardwright.core.cluster import Cluster, Constant
from shardwright.core.comparison import Comparison, Line
from shardwright.core.job import Job, parse_job
from shardwright.core.measurement import Curve, Measurement, Quality
from shardwright.core.option import Option, ShardShape, place, row_shards
from shardwright.core.placement import Flat, Replicate
from shardwright.core.plan import Plan, RankTotals, Search, TablePlan, UnitPlan, sealed
from shardwright.core.timeline import PEAK, Event, EventRun
from shardwright.core.timeline import encode as encode_events

MIB = 2**20
SIZES = (
    ("C3", 92921, "row_wise", (0, 1)),
    ("C12", 85185, "column_wise", (1, 0)),
    ("C21", 78914, "table_wise", (0,)),
    ("C16", 70364, "table_wise", (1,)),
    ("C8", 633, "data_parallel", (0, 1)),
    ("C9", 3, "data_parallel", (0, 1)),
)
SECONDS = {
    "load": 2.1e-4,
    "exchange_ids": 4.0e-4,
    "lookup": 9.2e-4,
    "exchange_rows": 6.1e-4,
    "forward": 1.4e-3,
    "backward": 2.7e-3,
    "reduce": 8.0e-4,
    "step": 1.1e-3,
}
AT_PEAK = {
    "weight": 5 * MIB,
    "gradient": 40_960,
    "optimizer_state": 90_112,
    "padding": 48,
    "gathered_weight": 20_480,
    "communication": 300_000,
    "activation": 2 * MIB,
    "temporary": 400_000,
    "input": 80_000,
}


def job(**changes: Any) -> Job:
    """The job; ``changes`` replace whole sections."""
    return parse_job(
        {
            "cluster": {"world_size": 2, "ddr_cap": "14 MiB"},
            "batch": {"size": 256},
            "train": {"steps": 390, "optimizer": "adagrad"},
            "tables": [{"name": name, "rows": rows, "dim": 16} for name, rows, _, _ in SIZES],
            **changes,
        }
    )


def shards(rows: int, kind: str) -> tuple[ShardShape, ...]:
    """Two-rank shards of a table of 16 columns."""
    return {
        "row_wise": row_shards(rows, 16, 2),
        "column_wise": (ShardShape(0, 0, rows, 8), ShardShape(0, 8, rows, 8)),
        "table_wise": (ShardShape(0, 0, rows, 16),),
        "data_parallel": (ShardShape(0, 0, rows, 16),) * 2,
    }[kind]


def table(name: str, rows: int, kind: Any, ranks: tuple[int, ...]) -> TablePlan:
    """A chosen table."""
    cut = shards(rows, kind)
    return TablePlan(
        name=name,
        fqn=f"tables.{name}",
        rows=rows,
        dim=16,
        sharding_type=kind,
        compute_kernel="dense" if kind == "data_parallel" else "fused",
        optimizer="rowwise_adagrad",
        ranks=ranks,
        shard_sizes=tuple((s.rows, s.columns) for s in cut),
        seconds=tuple(2e-5 + s.rows * 1e-10 for s in cut),
        nbytes=tuple(s.rows * s.columns * 4 for s in cut),
    )


def blocks(tables: tuple[TablePlan, ...], specs: Job) -> list[Block]:
    """The parameter blocks of ``tables``."""
    found: list[Block] = []
    for spec, chosen in zip(specs.tables, tables, strict=True):
        option = Option(
            chosen.name, chosen.sharding_type, "", shards(spec.rows, chosen.sharding_type)
        )
        named = msgspec.structs.replace(spec, fqn=chosen.fqn)
        found.extend(place(option, chosen.ranks, named))
    return found


def unit(name: str, sharded: bool) -> UnitPlan:
    """A dense unit, fully sharded or replicated."""
    where = Flat() if sharded else Replicate()
    return UnitPlan(
        name=name,
        tensors=(f"{name}.0.weight", f"{name}.0.bias"),
        parameter=where,
        gradient=where,
        optimizer_state=Flat(),
        optimizer="adagrad",
        reshard_after_forward=sharded,
        seconds=3.1e-4,
        bytes_per_rank=20_480,
        padding_bytes=48 if sharded else 0,
    )


def timeline(scale: float, extra: int = 0) -> tuple[EventRun, ...]:
    """Peaks and seconds of both ranks; ``scale`` stretches time, ``extra`` adds activations."""
    events = []
    for rank in (0, 1):
        for phase, seconds in SECONDS.items():
            took = seconds * scale * (1 + 0.05 * rank)
            events.append(Event(rank, 1, phase, "time", phase, 0, 0.0, took))  # type: ignore[arg-type]
        for kind, nbytes in AT_PEAK.items():
            more = extra * (rank + 1) if kind == "activation" else 0
            events.append(Event(rank, 1, "backward", kind, PEAK, nbytes + more))  # type: ignore[arg-type]
        events.append(Event(rank, 1, "forward", "weight", PEAK, 5 * MIB))
        events.append(Event(rank, 0, "setup", "time", "setup", 0, 0.0, 3.0))
    return encode_events(events)


def plan(**changes: Any) -> Plan:
    """Six tables of four sharding types and two dense units on two CPU ranks."""
    asked = changes.pop("job", job())
    tables = tuple(table(*size) for size in SIZES)
    peak = sum(AT_PEAK.values())
    made = Plan(
        schema="shardwright.plan/1",
        version="0.1.0",
        job=asked,
        cluster=Cluster(
            "local", 2, 2, "cpu", 0, 14 * MIB, {"copy": Constant(1e10, "B/s", "assumed", "2026")}
        ),
        tables=tables,
        units=(unit("bottom", False), unit("top", True)),
        blocks=encode(blocks(tables, asked)),
        timeline=timeline(1.0),
        ranks=tuple(
            RankTotals(r, peak, "backward", AT_PEAK, {"weight": 5 * MIB}, 8.1e-3 + r / 1e4, 0, peak)
            for r in (0, 1)
        ),
        max_rank_seconds=8.2e-3,
        lower_bound_seconds=7.9e-3,
        gap=0.038,
        assumptions=(
            "Copy bandwidth of this machine is assumed to be 10 GB/s; it has not been calibrated.",
            "Every table is read once per sample (pooling factor 1).",
        ),
        search=Search("greedy", 214, 180, 0.031),
    )
    return sealed(msgspec.structs.replace(made, **changes))


def measurement(of: Plan | None = None, **changes: Any) -> Measurement:
    """A run of 390 steps whose loss falls towards the best possible."""
    steps = tuple(range(1, 391))
    loss = tuple(0.43 + 0.26 * math.exp(-s / 70) + 0.02 * math.sin(s * 1.7) for s in steps)
    made = Measurement(
        schema="shardwright.measurement/1",
        plan_fingerprint=(of or plan()).fingerprint,
        world_size=2,
        steps=390,
        memory_steps=(3, 4, 5),
        time_steps=(20, 389),
        timeline=timeline(1.3, extra=150_000),
        curve=Curve(steps, loss),
        quality=Quality(20_000, 0.7712, 0.4387, 0.7904, 0.4211),
        samples_per_second=48_211.0,
        bad_rows=0,
        versions={"python": "3.12.3", "shardwright": "0.1.0", "torch": "2.13.0"},
        machine={"cpu": "two cores", "system": "Linux"},
    )
    return msgspec.structs.replace(made, **changes)


def comparison(of: Plan | None = None, **changes: Any) -> Comparison:
    """Exact bytes equal, peaks a few percent low, seconds further off."""
    peak = sum(AT_PEAK.values())
    exact = tuple(
        Line(rank, "setup", kind, f"tables.{name}", nbytes, nbytes)
        for rank in (0, 1)
        for kind, nbytes in (("weight", 2_973_472), ("optimizer_state", 185_842), ("padding", 48))
        for name in ("C3", "C12")
    )
    made = Comparison(
        schema="shardwright.comparison/1",
        plan_fingerprint=(of or plan()).fingerprint,
        tolerance=0.1,
        exact=exact,
        peaks=tuple(
            Line(r, "backward", "", "peak", peak, peak + 150_000 * (r + 1)) for r in (0, 1)
        ),
        phase_peaks=tuple(
            Line(r, phase, "", "peak", 6 * MIB, 6 * MIB + 4096)
            for r in (0, 1)
            for phase in ("forward", "backward")
        ),
        seconds=tuple(
            Line(r, phase, "time", phase, s, s * 1.3)
            for r in (0, 1)
            for phase, s in SECONDS.items()
        ),
        failures=(),
    )
    return msgspec.structs.replace(made, **changes)


HOSTILE = '<script>alert(1)</script>"onload=x\x1b[31m\u202e'


def hostile_plan() -> Plan:
    """A plan whose every free text tries to break out of its place."""
    honest = plan()
    first = honest.tables[0]
    tables = (
        msgspec.structs.replace(first, name=HOSTILE, fqn=HOSTILE, compute_kernel=HOSTILE),
        *honest.tables[1:],
    )
    return sealed(
        msgspec.structs.replace(
            honest,
            tables=tables,
            units=(msgspec.structs.replace(honest.units[0], name=HOSTILE, optimizer=HOSTILE),),
            blocks=tuple(
                msgspec.structs.replace(run, tensor=HOSTILE) if run.tensor == first.fqn else run
                for run in honest.blocks
            ),
            ranks=tuple(msgspec.structs.replace(r, peak_phase=HOSTILE) for r in honest.ranks),
            assumptions=(HOSTILE,),
            version=HOSTILE,
            search=msgspec.structs.replace(honest.search, name=HOSTILE),
            cluster=msgspec.structs.replace(honest.cluster, name=HOSTILE),
        )
    )
