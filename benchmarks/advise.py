"""What ``shardwright advise`` takes and how tight its bound of memory is.

    python benchmarks/advise.py -o validation/advise.json      # four large jobs, a process each
    python benchmarks/advise.py --published -o validation/advise.json    published choices
    python benchmarks/advise.py --bound 2000                   # random layouts against exact memory
    python benchmarks/advise.py --memory 60                    # exact memory of the fastest layouts
    python benchmarks/advise.py --exhaustive 50                # random jobs, every layout taken

Each job is searched in a process of its own, so that nothing is recorded yet; a layout of the bound
is worked out as ``memory`` does it, without an allocator.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardwright.estimate.advise import advise
from shardwright.estimate.advise.pricing import Pricing
from shardwright.estimate.advise.space import Space, global_batch
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import Job, parse_job
from shardwright.planner.profiles import cluster_of

LLAMA3 = {"kind": "llama", "kv_heads": 8, "vocab": 128256}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": LLAMA3 | {"layers": 32, "dim": 4096, "heads": 32, "ffn_dim": 14336},
    "Llama 3 70B": LLAMA3 | {"layers": 80, "dim": 8192, "heads": 64, "ffn_dim": 28672},
    "Llama 3 405B": LLAMA3 | {"layers": 126, "dim": 16384, "heads": 128, "ffn_dim": 53248},
    "Mixtral 8x7B": LLAMA3
    | {"layers": 32, "dim": 4096, "heads": 32, "vocab": 32000, "experts": 8}
    | {"experts_per_token": 2, "expert_ffn_dim": 14336, "moe_layers": list(range(32))},
}
JOBS = {  # ranks, samples of all in a step, tokens of each
    "Llama 3 8B": (8, 256, 8192),
    "Llama 3 70B": (64, 512, 8192),
    "Llama 3 405B": (1024, 2048, 8192),
    "Mixtral 8x7B": (64, 1024, 4096),
}


# Layouts that were published, with what of them is the axis of a search for a faster one.
PUBLISHED: dict[str, tuple[str, tuple[int, int, int], dict[str, str], str]] = {
    "TorchTitan's of 8B": (
        "Llama 3 8B",
        (8, 16, 8192),
        {"tensor": "1", "context": "1", "pipeline": "1", "data_replicate": "1"}
        | {"micro_batch": "2", "checkpointing": "selective"},
        "context",
    ),
    "Llama 3's of 405B": (
        "Llama 3 405B",
        (16384, 2048, 8192),
        {"tensor": "8", "pipeline": "16", "context": "1"},
        "tensor",
    ),
    "Llama 3's of 405B, 131,072 tokens": (
        "Llama 3 405B",
        (16384, 128, 131072),
        {"tensor": "8", "pipeline": "16", "context": "16"},
        "tensor",
    ),
}


def job_of(name: str, sizes: tuple[int, int, int] | None = None) -> Job:
    world, samples, sequence = sizes or JOBS[name]
    return parse_job(
        {
            "model": MODELS[name],
            "cluster": {"preset": "h100-8", "world_size": world},
            "batch": {"size": max(samples // world, 1), "sequence": sequence},
            "memory": {"runtime": "fsdp2"},
        }
    )


def searched(name: str) -> dict[str, Any]:
    """One job, in this process."""
    begun = time.process_time()
    found = advise(job_of(name))
    answer = found.answer
    assert answer is not None
    return {
        "job": name,
        "ranks": found.world_size,
        "layouts": found.layouts,
        "bounded": found.bounded,
        "exact": found.exact,
        "proven": found.proven,
        "answer": answer.layout.words,
        "step_seconds": round(answer.time.seconds, 2),
        "mfu": round(answer.time.mfu, 3),
        "cpu_seconds": round(time.process_time() - begun, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def published(title: str) -> dict[str, Any]:
    """A published layout beside the fastest of those that have one of its axes in common."""
    name, sizes, fixed, axis = PUBLISHED[title]
    found: dict[str, Any] = {"choice": title}
    searched = {"published": fixed, "answer": {axis: fixed[axis]}}
    for key, axes in searched.items():
        advice = advise(job_of(name, sizes), global_batch=sizes[1], fixed=axes)
        row = advice.answer or advice.nearest
        assert row
        found[key] = {
            "layout": row.layout.words,
            "fits": row.verdict,
            "seconds": round(row.time.seconds, 2),
            "spare_gib": round((advice.capacity - row.most_bytes) / 2**30, 2),
            "bubble": round(row.time.parts.get("pipeline bubble", 0.0), 2),
        }
    return found


def bounded(count: int, seed: int) -> dict[str, Any]:
    """Bounds of random layouts of all models, as parts of what they take exactly."""
    draw, parts, seconds = random.Random(seed), [], []
    for name in MODELS:
        job, (world, *_) = job_of(name), JOBS[name]
        space = Space(job, "", (world, 8), global_batch(job, world), {})
        pricing, layouts = Pricing(space), list(space.layouts())
        for layout in draw.sample(layouts, min(count // len(MODELS), len(layouts))):
            bound = pricing.least_bytes(layout)
            begun = time.process_time()
            exact = estimated(space.job_of(layout), spare=2**50).worst.peak_bytes
            seconds.append(time.process_time() - begun)
            if bound > exact:
                print(f"above: {name}, {layout.words}: {bound} > {exact}", file=sys.stderr)
            parts.append(bound / exact)
        print(f"{name}: {len(parts)} layouts so far", file=sys.stderr)
    return {
        "layouts": len(parts),
        "above": sum(part > 1 for part in parts),
        "median": round(statistics.median(parts), 4),
        "least": round(min(parts), 4),
        "exact_cpu_ms_median": round(1000 * statistics.median(seconds), 1),
    }


def exact(count: int) -> dict[str, Any]:
    """Milliseconds of CPU for the exact memory of the fastest layouts of 70B that their bound lets
    through: what is not recorded yet is, then the same with all recordings there."""
    name = "Llama 3 70B"
    job, (world, *_) = job_of(name), JOBS[name]
    space = Space(job, "", (world, 8), global_batch(job, world), {})
    pricing, capacity = Pricing(space), cluster_of(job)[0].memory_per_rank
    left = [each for each in space.layouts() if pricing.least_bytes(each) <= capacity]
    jobs = [space.job_of(each) for each in sorted(left, key=pricing.least_seconds)[:count]]
    found: dict[str, Any] = {"job": name, "layouts": len(jobs)}
    for turn in ("cold", "warm"):
        seconds = []
        for each in jobs:
            begun = time.process_time()
            estimated(each, spare=0)
            seconds.append(1000 * (time.process_time() - begun))
        found[f"{turn}_ms_median"] = round(statistics.median(seconds))
        found[f"{turn}_ms_most"] = round(max(seconds))
    return found


def exhaustive(count: int, seed: int) -> dict[str, Any]:
    """Answers of random jobs beside the fastest of all their layouts, each worked out by itself:
    the first job has hundreds, the others tens, for some of their axes are fixed."""
    draw, layouts, beaten, nothing = random.Random(seed), [], 0, 0
    for number in range(count):
        width = 256 * draw.choice([4, 6, 8])
        model = {"kind": "llama", "layers": draw.choice([4, 6, 8]), "dim": width, "vocab": 32000}
        model |= {"heads": width // 128, "kv_heads": width // 256, "ffn_dim": 3 * width}
        if draw.random() < 0.3:
            experts = {"experts": 8, "experts_per_token": 2, "expert_ffn_dim": width}
            model |= experts | {"moe_layers": list(range(model["layers"]))}
        job = parse_job(
            {
                "model": model,
                "cluster": {"preset": "h100-8", "hbm_cap": f"{draw.choice([4, 6, 8, 12])} GiB"},
                "batch": {"size": draw.choice([4, 8]), "sequence": 4096},
                "memory": {"runtime": draw.choice(["fsdp2", "megatron"])},
            }
        )
        axes = {"context": "1", "chunks": "1"}
        if number:
            axes |= {"micro_batch": draw.choice("12"), "data_replicate": "1"}
            axes |= {"checkpointing": draw.choice(["none", "full"])}
        found = advise(job, fixed=axes)
        space = Space(job, "", (8, 8), global_batch(job, 8), axes)
        fits = []
        for layout in space.layouts():
            footprint = estimated(space.job_of(layout))
            assert footprint.time
            if footprint.verdict == "fits":
                fits.append((footprint.time.seconds, layout.words))
        layouts.append(found.layouts)
        print(f"job {number}: {found.layouts} layouts, {len(fits)} fit", file=sys.stderr)
        best, told = min(fits, default=None), found.answer
        nothing += best is None
        if (best is None) != (told is None) or (
            best and told and best[0] < told.time.seconds * (1 - 3e-5)
        ):
            beaten += 1
            print(f"beaten: job {number}, {best}, told {told}", file=sys.stderr)
    return {
        "jobs": count,
        "layouts": sum(layouts),
        "largest": max(layouts),
        "nothing_fits": nothing,
        "beaten": beaten,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--bound", type=int, metavar="N")
    parser.add_argument("--memory", type=int, metavar="N")
    parser.add_argument("--exhaustive", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(searched(options.job)))
        return
    found: dict[str, Any] = {"jobs": [], "bound": None}
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text())
    if options.exhaustive:
        found["exhaustive"] = exhaustive(options.exhaustive, options.seed)
        print(found["exhaustive"])
    elif options.memory:
        found["memory"] = exact(options.memory)
        print(found["memory"])
    elif options.published:
        found["published"] = []
        for title in PUBLISHED:
            found["published"].append(published(title))
            print(found["published"][-1], flush=True)
    elif options.bound:
        found["bound"] = bounded(options.bound, options.seed)
        print(found["bound"])
    else:
        found["jobs"] = []
        for name in JOBS:
            command = [sys.executable, __file__, "--job", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found["jobs"].append(json.loads(done.stdout))
            print(found["jobs"][-1])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
