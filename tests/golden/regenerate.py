"""The formats of this package as files: ``python tests/golden/regenerate.py`` writes them again.

Run it after a change of a format that is meant, and read the difference before keeping it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.document import encode_document
from shardwright.core.measurement import SCHEMA, Curve, Measurement, Quality
from shardwright.core.timeline import PEAK, Event, encode
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.launcher.ending import OUTCOME_SCHEMA, RunOutcome, encode_outcome
from shardwright.launcher.heartbeat import RankOutcome

FOLDER = Path(__file__).parent
KINDS: dict[str, type[msgspec.Struct]] = {
    "job": Job,
    "plan": Plan,
    "measurement": Measurement,
    "outcome": RunOutcome,
}
TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")
FINGERPRINT = "0" * 64  # in the files: a plan's own depends on the version


def job() -> Job:
    """One table of each type, one unit of each mode, everything else by default."""
    return parse_job(
        {
            "model": {"bottom": [8], "top": [4, 1]},
            "batch": {"size": 16},
            "planner": {
                "units": {"bottom": "shard", "top": "replicate"},
                "dense": {"reshard": True},
            },
            "tables": [
                {"name": kind, "rows": 5 + i, "dim": 8, "sharding_types": [kind]}
                for i, kind in enumerate(TYPES)
            ],
        }
    )


def measurement() -> Measurement:
    """Two ranks, of which one took longer."""
    events = [
        *(Event(rank, 0, "setup", "weight", "bottom", 240) for rank in (0, 1)),
        *(Event(rank, 1, "backward", "activation", PEAK, 4096) for rank in (0, 1)),
        Event(0, 1, "forward", "time", "forward", 0, 0.5, 0.25),
        Event(1, 1, "forward", "time", "forward", 0, 0.5, 0.375),
    ]
    return Measurement(
        schema=SCHEMA,
        plan_fingerprint=FINGERPRINT,
        world_size=2,
        steps=8,
        memory_steps=(3, 4, 5),
        time_steps=(6, 7, 8),
        timeline=encode(events),
        curve=Curve((1, 8), (0.75, 0.5)),
        quality=Quality(100, 0.75, 0.5, 0.875),
        samples_per_second=1024.0,
        bad_rows=1,
        versions={"shardwright": "0", "torch": "0"},
        machine={"cpu": "x"},
    )


def outcome() -> RunOutcome:
    """A rank that failed, and one that failed because of it."""
    return RunOutcome(
        schema=OUTCOME_SCHEMA,
        code=5,
        reason="rank 0 failed at step 3 in forward: out of memory",
        step=3,
        world_size=2,
        ranks=(
            RankOutcome(0, "failed", 5, 3, "forward", "out of memory"),
            RankOutcome(1, "lost", None, None, None, "", peer=True),
        ),
        command=("torchrun", "--nproc-per-node", "2"),
        seconds=1.5,
        versions={"shardwright": "0", "torch": "0"},
    )


REAL = re.compile(r'^(\s*(?:"[^"]*": )?)(-?\d+(?:\.\d+)?e-?\d+|-?\d+\.\d+)(,?)$', re.MULTILINE)


def masked(data: bytes) -> bytes:
    """Without what differs from run to run and from version to version.

    Reals keep 12 digits: since Python 3.12 ``sum`` makes up for rounding.
    """
    text = re.sub(r'"(wall_seconds)": [^,\n]+', r'"\1": 0.0', data.decode())
    text = re.sub(r'"(version)": "[^"]*"', r'"\1": "0"', text)
    text = re.sub(r'"(fingerprint)": "[^"]*"', rf'"\1": "{FINGERPRINT}"', text)
    return REAL.sub(_rounded, text).encode()


def _rounded(match: re.Match[str]) -> str:
    digits = msgspec.json.encode(float(f"{float(match[2]):.12g}")).decode()
    return f"{match[1]}{digits}{match[3]}"


def values() -> dict[str, Any]:
    """The value that each document holds."""
    return {
        "job": job(),
        "plan": plan(job()),
        "measurement": measurement(),
        "outcome": outcome(),
    }


def encoded(name: str, value: Any) -> bytes:
    """A document as the package writes it."""
    return encode_outcome(value) if name == "outcome" else encode_document(value)


def files() -> dict[str, bytes]:
    """Every golden file by name."""
    found = {f"{name}.json": masked(encoded(name, value)) for name, value in values().items()}
    schemas = {name: msgspec.json.schema(kind) for name, kind in KINDS.items()}
    text = msgspec.json.encode(schemas, order="deterministic")
    return found | {"schemas.json": msgspec.json.format(text) + b"\n"}


if __name__ == "__main__":
    for name, data in files().items():
        (FOLDER / name).write_bytes(data)
