"""One estimate in a process of its own: 405B on 16,384 ranks, in how many seconds and bytes."""

from __future__ import annotations

import json
import resource
import sys
import time

from shardwright.estimate.footprint import footprint
from shardwright.job.job import parse_job

MIB = 2**20
KIB = 2**10  # ru_maxrss counts these on Linux
JOB = {
    "model": {
        "kind": "llama",
        "layers": 126,
        "dim": 16384,
        "heads": 128,
        "kv_heads": 8,
        "ffn_dim": 53248,
        "vocab": 128256,
    },
    "cluster": {"world_size": 16384, "compute_device": "cuda"},
    "batch": {"size": 32, "sequence": 8192},
    "parallel": {"tensor": 8, "pipeline": 16},
    "memory": {"runtime": "fsdp2", "checkpointing": "full"},
}


def main() -> int:
    begun = time.perf_counter()
    found = footprint(parse_job(JOB))
    seconds = time.perf_counter() - begun
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    figures = {
        "parameters": found.parameters,
        "ranks": found.world_size,
        "classes_of_ranks": len(found.ranks),
        "seconds_after_imports": round(seconds, 3),
        "resident_mib": round(resident / MIB, 1),
        "peak_mib": {rank.name: round(rank.peak_bytes / MIB, 1) for rank in found.ranks},
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
