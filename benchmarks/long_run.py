"""A long run of the demo's model: resident memory, open files and threads of every rank.

``python benchmarks/long_run.py OUT.json [STEPS]`` trains STEPS steps (3,000) on 2 ranks, looks at
each rank every half second, and writes the medians of ten equal parts of the run behind its first
tenth.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shardwright.estimate.recordings import plan
from shardwright.job.job import read_job
from shardwright.launcher.folder import heartbeat_file
from shardwright.launcher.heartbeat import read_heartbeat
from shardwright.train.session import run

ROOT = Path(__file__).parents[1]
PARTS = 10
Look = tuple[int, int, int, int]  # step, resident bytes, files, threads


def look(folder: Path, rank: int) -> Look | None:
    """The rank now; None before it begins and after it ends."""
    beat = read_heartbeat(heartbeat_file(folder, rank))
    if beat is None or beat.step is None or beat.phase in ("evaluate", "done"):
        return None
    process = Path(f"/proc/{beat.pid}")
    try:
        status = dict(
            line.split(":", 1) for line in (process / "status").read_text().splitlines() if line
        )
        files = len(list((process / "fd").iterdir()))
    except OSError:
        return None
    if "VmRSS" not in status:
        return None
    resident = int(status["VmRSS"].split()[0]) * 1024
    return beat.step, resident, files, int(status["Threads"])


def watched(folder: Path, ranks: int, over: threading.Event) -> list[list[Look]]:
    """What was seen of every rank until the run was over."""
    found: list[list[Look]] = [[] for _ in range(ranks)]
    while not over.wait(0.5):
        for rank, looks in enumerate(found):
            if seen := look(folder, rank):
                looks.append(seen)
    return found


def summary(looks: list[Look], steps: int) -> dict[str, Any]:
    """Medians by part, and the last part's over the first's."""
    begin = steps // PARTS  # first steps also fill caches
    found: dict[str, Any] = {"looks": len(looks)}
    for index, name in ((1, "resident bytes"), (2, "files"), (3, "threads")):
        parts: list[list[int]] = [[] for _ in range(PARTS)]
        for seen in looks:
            if seen[0] > begin:
                part = (seen[0] - begin - 1) * PARTS // (steps - begin)
                parts[min(part, PARTS - 1)].append(seen[index])
        medians = [statistics.median(part) for part in parts if part]
        found[name] = medians
        found[f"{name}, last over first"] = medians[-1] / medians[0]
    return found


def main() -> None:
    output, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        words = [f"train.steps={steps}", f"train.out={folder}", "data.rows=200000"]
        made = plan(read_job(ROOT / "examples" / "demo.toml", words))
        over, looks = threading.Event(), list[list[Look]]()
        watcher = threading.Thread(
            target=lambda: looks.extend(watched(folder, made.world_size, over))
        )
        watcher.start()
        started = time.monotonic()
        try:
            session = run(made, folder, sys.stderr)
        finally:
            over.set()
            watcher.join()
    document = {
        "what": "the demo's model, trained long",
        "steps": steps,
        "exit code": session.outcome.code,
        "seconds": round(time.monotonic() - started, 1),
        "python": platform.python_version(),
        "versions": session.outcome.versions,
        "ranks": [summary(each, steps) for each in looks],
    }
    output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
