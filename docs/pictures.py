"""``python docs/pictures.py`` makes the pictures of README.md again, in ``docs/pictures``.

Each is what a command of README.md draws; the last one is of a run of the demo on this machine.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from shardwright.cli.main import main
from shardwright.estimate.recordings import plan
from shardwright.job.job import read_job
from shardwright.report.memory_timeline import standalone
from shardwright.report.svg import memory_chart
from shardwright.train.session import run

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
LLAMA = str(ROOT / "examples" / "llama8b.toml")


def demo() -> str:
    """The peaks of the demo's ranks, predicted and measured."""
    with tempfile.TemporaryDirectory() as scratch:
        job = read_job(ROOT / "examples" / "demo.toml", [f"train.out={scratch}/run"])
        session = run(plan(job), Path(job.train.out), sys.stderr)
    return standalone(partial(memory_chart, session.plan, session.measurement))


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    main(["memory", LLAMA, "--timeline", str(PICTURES / "memory.svg")])
    main(["advise", LLAMA, "--picture", str(PICTURES / "layouts.svg")])
    (PICTURES / "measured.svg").write_text(demo())
