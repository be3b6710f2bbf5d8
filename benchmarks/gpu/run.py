"""All stages, one after the other, each in processes of its own, within so many seconds.

    PYTHONPATH=src:benchmarks python -m gpu.run --seconds 420 --out figures

``run.sh`` calls it, and adds what the machine lacks; it needs nothing but torch itself to begin, so
that what is missing is a row like any other failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu.rows import STAGES, Figures, Row, Setting, rows_of

ROOT = Path(__file__).resolve().parents[2]
ONE_ROW = 120.0  # seconds: with less every stage runs its first row alone
# Shares of the time that stages get at most; what one leaves is the next ones'.
SHARES = {
    "ceilings": 30,
    "memory": 170,
    "seconds": 70,
    "runtime": 100,
    "embeddings": 20,
    "tests": 30,
}
USUAL = 30  # of any other stage
START = 12.0  # seconds of imports and of a context that a process takes


def machine(device: str) -> dict[str, Any]:
    """What figures of this machine have to say of it."""
    import torch

    found = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name,
            "memory_bytes": card.total_memory,
            "multiprocessors": card.multi_processor_count,
            "capability": f"{card.major}.{card.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    return found


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def run_stage(stage: str, setting: Setting, path: Path, until: float, one: bool) -> None:
    """Every row of a stage, in as many processes as it takes."""
    figures = Figures(path)
    try:
        rows = rows_of(stage, setting)
    except Exception as error:  # the stage cannot even say what it would do
        figures.put("rows", {"error": f"{type(error).__name__}: {error}"})
        return
    for together in _together(rows[:1] if one else rows):
        left = [row.name for row in together]
        while left and time.time() < until:
            _work(stage, setting, path, left, dict(together[0].environment), until)
            there = {row["name"] for row in Figures(path).rows}
            rest = [name for name in left if name not in there]
            if len(rest) == len(left):  # not even begun: it would not be the next time, either
                Figures(path).put(left[0], {"error": "its process ended before it began"})
                rest = left[1:]
            left = rest
    done = Figures(path)
    for row in rows[:1] if one else rows:
        if row.name not in {each["name"] for each in done.rows}:
            done.put(row.name, {"skipped": "no time was left"})


def _together(rows: list[Row]) -> Iterator[list[Row]]:
    """Neighbours that share processes."""
    for _, found in groupby(rows, lambda row: sorted(row.environment.items())):
        yield list(found)


def _work(
    stage: str, setting: Setting, path: Path, names: list[str], more: dict[str, str], until: float
) -> None:
    """One process for these rows; one that hangs is killed with all that it started."""
    size = "small" if setting.small else "whole"
    command = [sys.executable, "-m", "gpu.rows", stage, setting.device, size, path, str(until)]
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **more},  # ranks meet on this machine alone
        start_new_session=True,
    )
    try:
        started.communicate("\n".join(names), timeout=max(1.0, until - time.time() + START))
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, 9)
        started.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-figures")))
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="begin nothing that ends later"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="sizes for two cores of a CPU")
    parser.add_argument("--stages", default=",".join(STAGES))
    options = parser.parse_args()
    begun = time.time()
    end = begun + options.seconds
    setting, stages = Setting(options.device, options.small), options.stages.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = machine(options.device)
    one = options.seconds < ONE_ROW and not options.small
    for place, stage in enumerate(stages):
        path = options.out.resolve() / f"{stage}.json"
        path.unlink(missing_ok=True)
        rest = sum(SHARES.get(each, USUAL) for each in stages[place:])
        left = end - time.time()
        whole = one or options.small  # nobody waits for these
        until = time.time() + (left if whole else left * SHARES.get(stage, USUAL) / rest)
        if left <= 0:
            Figures(path).note(stage=stage, machine=facts, skipped="no time was left")
            continue
        Figures(path).note(stage=stage, machine=facts)
        run_stage(stage, setting, path, until, one)
        Figures(path).note(ended=round(time.time() - begun, 1))
        print(_summary(stage, Figures(path).rows), flush=True)
    return 0


def _summary(stage: str, rows: list[dict[str, Any]]) -> str:
    failed = [row for row in rows if "error" in row]
    skipped = sum(isinstance(row.get("skipped"), str) for row in rows)
    said = f"{stage}: {len(rows) - len(failed) - skipped} rows, {len(failed)} failed"
    said += f", {skipped} skipped" if skipped else ""
    return "\n  ".join([said, *(f"{row['name']}: {json.dumps(row['error'])}" for row in failed)])


if __name__ == "__main__":
    sys.exit(main())
