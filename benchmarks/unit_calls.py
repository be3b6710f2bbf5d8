"""What a sharded unit costs a step in calls of Python and operators of torch, part by part.

    python benchmarks/unit_calls.py --machine cpu-2-cores

Times of small units differ by half from run to run on a machine that others use; calls do not. A
GPT of four small layers takes a step on two gloo ranks under ``cProfile``, and one under a mode
that hears of operators. From both is taken what the same step of one process needs, and the rest
is divided by the five units. A call of torch's or Python's own counts for the file of ours that
made it. Writes ``validation/<machine>/unit_calls.json``.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import pstats
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsdp
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from fsdp_contestants import SIZES, contestants
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("single", "fsdp2", "flat", "per_param")
LAYERS, WARM_STEPS, STEPS = 4, 6, 2
PARTS = {
    "hooks and marks": ("hooks", "linked"),
    "what to do next": ("flow", "schedule", "rebind"),
    "what users may have changed": ("parameter", "sharded_parameters", "private"),
    "memory": ("unit", "buffers"),
    "gradients": ("gradients", "regroup", "torch_private"),
    "collectives": ("mesh", "peers", "pending", "ways", "torch_groups", "probe", "announce"),
    "optimizer": ("flat_tensors", "shard_tensor", "operators", "cut"),
}
PART_OF = {name: part for part, names in PARTS.items() for name in names}


class Operators(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def part_of(file: str) -> str | None:
    """The part that a file of ours is of; None for what torch and Python have."""
    return PART_OF.get(Path(file).stem, "other") if "/shardwright/" in file else None


def calls(run: fsdp.Run) -> dict[str, float]:
    """Calls of a step by part; what no file of ours called is "torch"."""
    profile = cProfile.Profile()
    profile.enable()
    for number in range(STEPS):
        run.step(number)
    profile.disable()
    found = dict.fromkeys(("torch", "other", *PARTS), 0.0)
    for (file, *_), (_, total, _, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        own = part_of(file)
        if own is not None:
            found[own] += total / STEPS
            continue
        for (caller, *_), (_, times, *_) in callers.items():
            found[part_of(caller) or "torch"] += times / STEPS
            total -= times
        found["torch"] += total / STEPS
    return found


def operators(run: fsdp.Run) -> int:
    """Operators of a step."""
    with Operators() as heard:
        run.step(0)
    return heard.count


def worker(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    SIZES["tiny"]["layers"] = LAYERS
    mesh, known = fsdp._join("gloo", rank, 2, port), contestants()
    found: dict[str, Any] = {}
    for name in NAMES:
        run = fsdp.Run(name, known[name], "tiny", rank, mesh)
        for number in range(WARM_STEPS):
            run.step(number)
        found[name] = {"calls": calls(run), "operators": operators(run)}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def over_single(found: dict[str, Any]) -> dict[str, Any]:
    """What each needs a unit beyond one process."""
    units, bare = LAYERS + 1, found["single"]
    rows = {}
    for name in NAMES[1:]:
        row = found[name]
        parts = {k: round((n - bare["calls"][k]) / units, 1) for k, n in row["calls"].items()}
        rows[name] = {
            "calls": round(sum(parts.values()), 1),
            "operators": round((row["operators"] - bare["operators"]) / units, 1),
            "parts": parts,
        }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", required=True, help="the folder under validation/")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        processes.spawn(worker, args=(port, str(out)), nprocs=2)
        rows = over_single(json.loads(out.read_text()))
    written = {"units": rows, "torch": torch.__version__, "date": str(datetime.date.today())}
    path = fsdp.ROOT / "validation" / options.machine / "unit_calls.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(written, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
