"""A small realistic plan, what a run of it measured, and the two compared."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from recordings import chain
from recordings import unit as recorded_unit

from shardwright.core.block import Block, encode
from shardwright.core.cluster import Cluster, Constant
from shardwright.core.measurement import ComparedNumber, Comparison, Curve, Measurement, Quality
from shardwright.core.option import Option, ShardRun, place, row_runs
from shardwright.core.placement import Flat, Replicate
from shardwright.core.timeline import PEAK, Event, EventRun
from shardwright.core.timeline import encode as encode_events
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import (
    Plan,
    RankTotals,
    Reserved,
    Search,
    ShardPlan,
    TablePlan,
    UnitPlan,
    sealed,
)

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


def runs(rows: int, kind: str) -> tuple[ShardRun, ...]:
    """Two-rank shards of a table of 16 columns, each a run of its own."""
    whole = ShardRun(rows, 16)
    if kind == "row_wise":
        rest = rows - (rows + 1) // 2
        return (*row_runs(rows - rest, 16, 1), ShardRun(rest, 16, row=rows - rest))
    return {
        "column_wise": (ShardRun(rows, 8), ShardRun(rows, 8, column=8)),
        "table_wise": (whole,),
        "data_parallel": (whole, whole),
    }[kind]


def shard(rank: int, run: ShardRun, nbytes: int | None = None) -> ShardPlan:
    """One shard in host memory; its seconds grow with its rows."""
    size = run.rows * run.columns * 4 if nbytes is None else nbytes
    seconds = {"lookup": 2e-5, "step": run.rows * 1e-10}
    return ShardPlan(rank, run, seconds, {}, {"weight": size}, {})


def table(
    name: str, rows: int, kind: Any, ranks: tuple[int, ...], nbytes: int | None = None
) -> TablePlan:
    """A chosen table, each shard of as many bytes as its weights have, or of ``nbytes``."""
    cut = runs(rows, kind)
    return TablePlan(
        name=name,
        fqn=f"tables.{name}",
        rows=rows,
        dim=16,
        sharding_type=kind,
        compute_kernel="dense" if kind == "data_parallel" else "fused",
        optimizer="rowwise_adagrad",
        shards=tuple(shard(rank, run, nbytes) for rank, run in zip(ranks, cut, strict=True)),
    )


def blocks(tables: tuple[TablePlan, ...], specs: Job) -> list[Block]:
    """The parameter blocks of ``tables``."""
    found: list[Block] = []
    for spec, chosen in zip(specs.tables, tables, strict=True):
        option = Option(
            chosen.name, chosen.sharding_type, "", runs(spec.rows, chosen.sharding_type)
        )
        named = msgspec.structs.replace(spec, fqn=chosen.fqn)
        found.extend(place(option, chosen.ranks, named))
    return found


def unit(name: str, sharded: bool) -> UnitPlan:
    """A dense unit, fully sharded or replicated."""
    where = Flat() if sharded else Replicate()
    return UnitPlan(
        name=name,
        modules=(name,),
        members=(name,),
        tensors=(f"{name}.0.weight", f"{name}.0.bias"),
        parameter=where,
        gradient=where,
        optimizer_state=Flat(),
        optimizer="adagrad",
        reshard_after_forward=sharded,
        seconds=3.1e-4,
        bytes_per_rank=20_480,
        padding_bytes=48 if sharded else 0,
        collectives=3 if sharded else 1,
        bytes_per_step=3 * 40_960 if sharded else 20_480,
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


def rank_totals(rank: int) -> RankTotals:
    """A rank that peaks in backward; the second is a little slower."""
    seconds = 8.1e-3 + rank / 1e4
    return RankTotals(
        rank=rank,
        peak_bytes=sum(AT_PEAK.values()),
        peak_phase="backward",
        at_peak=AT_PEAK,
        exact={"weight": 5 * MIB},
        seconds=seconds,
        parts={"forward": 4e-3, "backward": seconds - 4e-3},
        hbm_bytes=0,
        ddr_bytes=sum(AT_PEAK.values()),
    )


def plan(**changes: Any) -> Plan:
    """Six tables of four sharding types and two dense units on two CPU ranks."""
    asked = changes.pop("job", job())
    tables = tuple(table(*size) for size in SIZES)
    made = Plan(
        schema="shardwright.plan/4",
        version="0.1.0",
        job=asked,
        cluster=Cluster(
            name="local",
            world_size=2,
            local_world_size=2,
            compute_device="cpu",
            hbm_cap=0,
            ddr_cap=14 * MIB,
            ssd_cap=0,
            group=2,
            constants={"copy": Constant(1e10, "B/s", "assumed", "2026")},
        ),
        recording=chain([recorded_unit(name) for name in ("bottom", "top")]),
        tables=tables,
        units=(unit("bottom", False), unit("top", True)),
        prefetch=0,
        blocks=encode(blocks(tables, asked)),
        timeline=timeline(1.0),
        ranks=(rank_totals(0), rank_totals(1)),
        max_rank_seconds=8.2e-3,
        lower_bound_seconds=7.9e-3,
        gap=0.038,
        reserved=Reserved("traced", 0, 14 * MIB, 0),
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
        ComparedNumber(rank, "setup", kind, f"tables.{name}", nbytes, nbytes)
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
            ComparedNumber(r, "backward", "", "peak", peak, peak + 150_000 * (r + 1))
            for r in (0, 1)
        ),
        phase_peaks=tuple(
            ComparedNumber(r, phase, "", "peak", 6 * MIB, 6 * MIB + 4096)
            for r in (0, 1)
            for phase in ("forward", "backward")
        ),
        seconds=tuple(
            ComparedNumber(r, phase, "time", phase, s, s * 1.3)
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
