"""Memory estimated in a moment beside what torch's FSDPMemTracker sees of a whole step.

    python benchmarks/memory.py --machine cpu-2-cores

writes ``validation/<machine>/memory.json``; ``--cases speed,large`` runs some. The cases:

* ``random``: llamas of random size, sharding, batch, checkpointing and dtype under FSDP2 on a fake
  process group, each estimated from its job and tracked in its second step.
* ``speed``: seconds for 8B on 8 ranks; the trace forgotten before every estimate, and kept.
* ``policies``: checkpointing policies on that model.
* ``planned``: CPU seconds of ``shardwright plan`` and ``fit`` of 8B on 8 H100, imports included.
* ``large``: 405B on 16,384 ranks in a process of its own: seconds after imports, and its memory.

Kernels are those of the CPU, where torch's tracker can run: it proves how pieces are put together,
not what a GPU keeps.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory_truth import fsdp_mem_tracker

from shardwright.core.footprint import RankMemory
from shardwright.estimate.footprint import footprint
from shardwright.estimate.llama import forget_recordings
from shardwright.job.job import Job, parse_job

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
LIMIT_PERCENT = 1.0
COLD, CACHED, TRACKED = 9, 31, 3  # repetitions
MODEL_8B = {
    "kind": "llama",
    "layers": 32,
    "dim": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn_dim": 14336,
    "vocab": 128256,
}
PLANNED = """
[cluster]
preset = "h100-8"
[batch]
size = 1
sequence = 4096
[train]
optimizer = "adamw"
"""
MEMORY = {"runtime": "fsdp2", "lowering": "cpu"}
CHECKPOINTING = ("none", "selective", "full")  # of the 8B model
POLICIES = ("none", "full", "selective", "selective_op", "core_attention", "layers:2", "layers:3")


def random_document(generator: random.Random) -> dict[str, Any]:
    """A job of one of very many configurations."""
    pick = generator.choice
    heads = pick([2, 4, 8])
    dim = heads * pick([16, 32, 64])
    model = {
        "kind": "llama",
        "layers": generator.randint(1, 12),
        "dim": dim,
        "heads": heads,
        "kv_heads": pick([count for count in (1, 2, 4, 8) if heads % count == 0]),
        "ffn_dim": pick([2, 3, 4]) * dim + 8 * generator.randint(0, 3),
        "vocab": pick([512, 1000, 5000, 32000]),
    }
    if generator.random() < 0.2:  # one unit for all that is in no block
        model["tied_embeddings"] = True
    if generator.random() < 0.15:
        model |= {"experts": pick([4, 8]), "experts_per_token": 2}
    world = generator.choice([2, 3, 4, 5, 7, 8, 12, 16, 24, 48, 64, 100, 128])
    size, microbatches = generator.randint(1, 4), 1
    if generator.random() < 0.15 and "tied_embeddings" not in model:
        microbatches = size  # torch's tracker refuses a second forward of a root with a unit
    parallel: dict[str, Any] = {"microbatches": microbatches}
    if generator.random() < 0.25:
        replicas = pick([2, 4])
        parallel["data_replicate"] = replicas
        world = replicas * pick([1, 2, 3, 4, 8, 16])
    memory = {
        "checkpointing": pick(POLICIES),
        "param_dtype": pick(["bf16", "fp32"]),
        "reduce_dtype": pick(["fp32", "fp32", "bf16"]),
        "reshard_after_forward": pick(["default", True, False]),
    }
    if generator.random() < 0.2:
        memory["fsdp2"] = {"reduce_scatter_max_input_buffers": pick([2, 3, 20])}
    if generator.random() < 0.2:
        memory["fp32_logits"] = True
    return {
        "model": model,
        "cluster": {"world_size": world},
        "batch": {"size": size, "sequence": pick([64, 128, 333, 1024])},
        "parallel": parallel,
        "memory": MEMORY | memory,
    }


def compared(document: dict[str, Any]) -> dict[str, Any]:
    """The estimate of a job beside its truth, in bytes and percent."""
    job = parse_job(document)
    truth, estimate = fsdp_mem_tracker(job), estimated(job)
    off = estimate.peak_bytes - truth.peak
    return {
        "estimate_bytes": estimate.peak_bytes,
        "truth_bytes": truth.peak,
        "off_bytes": off,
        "off_percent": round(100 * off / truth.peak, 6),
        "phase": estimate.peak_phase,
    }


def estimated(job: Job) -> RankMemory:
    """The only class of ranks of a job without a pipeline."""
    (rank,) = footprint(job).ranks
    return rank


def random_case(count: int, seed: int) -> dict[str, Any]:
    """Every configuration with its error."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        document = random_document(generator)
        row = {**_told(document), **compared(document)}
        rows.append(row)
        print(f"{number + 1:4} {row['off_percent']:9.4f} % {json.dumps(row)}", flush=True)
    errors = [abs(row["off_percent"]) for row in rows]
    return {
        "configurations": count,
        "seed": seed,
        "worst_percent": max(errors),
        "median_percent": statistics.median(errors),
        "to_the_byte": sum(row["off_bytes"] == 0 for row in rows),
        "within_limit": sum(error <= LIMIT_PERCENT for error in errors),
        "limit_percent": LIMIT_PERCENT,
        "rows": rows,
    }


def _told(document: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for part in document.values() for name, value in part.items()}
    return {name: value for name, value in found.items() if name not in (*MEMORY, "kind")}


def document_8b(checkpointing: str) -> dict[str, Any]:
    """An 8B model on 8 ranks, a sequence of 8192."""
    return {
        "model": MODEL_8B,
        "cluster": {"world_size": 8},
        "batch": {"size": 1, "sequence": 8192},
        "memory": {**MEMORY, "checkpointing": checkpointing},
    }


def speed_case() -> dict[str, Any]:
    """Seconds of both in this process, and how many times faster the estimate is."""
    job = parse_job(document_8b("none"))
    begun = time.perf_counter()
    estimated(job)
    first = time.perf_counter() - begun
    cold = _seconds(job, COLD, forget_recordings)
    cached = _seconds(job, CACHED, lambda: None)
    truths = [fsdp_mem_tracker(job) for _ in range(TRACKED)]
    once = truths[0].built + truths[0].warm + truths[0].tracked
    step = statistics.median(truth.tracked for truth in truths)
    both = statistics.median(truth.warm + truth.tracked for truth in truths)
    return {
        "estimate_first_seconds": round(first, 4),
        "tracker_first_seconds": round(once, 3),
        "estimate_cold_seconds": round(cold, 4),
        "estimate_cached_seconds": round(cached, 5),
        "tracked_step_seconds": round(step, 3),
        "warm_and_tracked_seconds": round(both, 3),
        "times_faster_first": round(once / first, 1),
        "times_faster_cold": round(both / cold, 1),
        "times_faster_cold_than_the_tracked_step": round(step / cold, 1),
        "times_faster_cached": round(both / cached, 1),
    }


def _seconds(job: Job, repetitions: int, before: Callable[[], None]) -> float:
    taken = []
    for _ in range(repetitions):
        before()
        begun = time.perf_counter()
        estimated(job)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def policies_case() -> dict[str, Any]:
    """MiB of each policy: estimated, and tracked."""
    found = {}
    for name in CHECKPOINTING:
        row = compared(document_8b(name))
        found[name] = {
            "estimate_mib": round(row["estimate_bytes"] / MIB, 1),
            "truth_mib": round(row["truth_bytes"] / MIB, 1),
            "off_percent": row["off_percent"],
        }
    return found


def planned_case() -> dict[str, Any]:
    """CPU seconds of commands that plan 8B on 8 GPUs: steps to be recorded yet, and recorded."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in MODEL_8B.items()]
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job.toml"
        job.write_text("\n".join(["[model]", *lines, PLANNED]))
        for command, turn in itertools.product(("plan", "fit"), ("first", "again")):
            before = os.times()
            subprocess.run(
                [sys.executable, "-m", "shardwright", command, job, "--json"],
                env={**os.environ, "SHARDWRIGHT_CACHE": str(Path(scratch) / command)},
                capture_output=True,
                check=True,
            )
            after = os.times()
            spent = sum(after[2:4]) - sum(before[2:4])  # of children, user and system
            found[f"{command}_{turn}_cpu_seconds"] = round(spent, 2)
    return found


def large_case() -> dict[str, Any]:
    """The whole estimate of 405B, in a process of its own."""
    answer = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "memory_once.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", required=True, help="the folder under validation/")
    parser.add_argument("--cases", default="random,speed,policies,planned,large")
    parser.add_argument("--configurations", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "random": lambda: random_case(options.configurations, options.seed),
        "speed": speed_case,
        "policies": policies_case,
        "planned": planned_case,
        "large": large_case,
    }
    path = ROOT / "validation" / options.machine / "memory.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in options.cases.split(","):
        stamp = {"torch": torch.__version__, "python": sys.version.split()[0]}
        results[name] = {**cases[name](), **stamp, "date": datetime.date.today().isoformat()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        shown = {key: value for key, value in results[name].items() if key != "rows"}
        print(json.dumps({name: shown}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
