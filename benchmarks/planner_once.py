"""Plans one job file in this process and prints how long that took, as JSON.

    python benchmarks/planner_once.py JOB.toml PLAN.json

Seconds run from reading the job to the plan on disk; ``ready`` is the time of day of the machine's
monotonic clock when all imports were done, so whoever started the process knows what that cost.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from shardwright.estimate.recordings import plan
from shardwright.job.job import read_job
from shardwright.job.plan import write_plan


def main() -> None:
    """Plan, and print the figures."""
    ready, before = time.perf_counter(), time.process_time()
    job = read_job(sys.argv[1])
    read = time.perf_counter()
    made = plan(job)
    planned = time.perf_counter()
    write_plan(made, sys.argv[2])
    done = time.perf_counter()
    print(
        json.dumps(
            {
                "ready": ready,
                "seconds": done - ready,
                "cpu_seconds": time.process_time() - before,
                "read_seconds": read - ready,
                "plan_seconds": planned - read,
                "write_seconds": done - planned,
                "peak_rss_bytes": _peak(),
            }
        )
    )


def _peak() -> int:
    """The most resident bytes of this program; ``ru_maxrss`` has those of who started it, too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = (row for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
