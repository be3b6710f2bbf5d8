"""What a stage is made of: rows, each measured by itself, written as they come.

A stage is a module with ``rows(setting)``, one here or one named by its package. Each row runs in a
worker process that runs many; what a row raises is its figure then, and so is the death of the
worker, after which the next one goes on behind it. So a stage that is cut off anywhere leaves all
that was measured before, and a row that hangs costs its own time alone.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGES = ("ceilings", "memory", "seconds", "runtime", "embeddings", "tests")  # in order of worth
MESSAGE = 2000  # characters of what a row raised
# What a process that had such an error cannot do anything after.
FATAL = ("CUDA error", "device-side assert", "cudaError")


@dataclass(frozen=True)
class Setting:
    """On which ``device`` ("cuda" or "cpu") a stage runs, and whether ``small``: sizes that two
    cores of a CPU measure in seconds, to show that the stage works."""

    device: str
    small: bool = False

    def synchronize(self) -> None:
        """Wait for all that the device was asked to do."""
        if self.device == "cuda":
            import torch  # seconds, which a process that only fails can do without

            torch.cuda.synchronize()


@dataclass(frozen=True)
class Row:
    """Something to measure: ``run()`` gives its figures, ``seconds`` is what it takes at most on a
    GPU, its making included, and no row is begun that would not end in time; one that takes
    ``patience`` seconds beyond three times these is stuck, and its process ends. Rows with the same
    ``environment`` share processes."""

    name: str
    run: Callable[[], Mapping[str, Any]]
    seconds: float = 5.0
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 30.0


def rows_of(stage: str, setting: Setting) -> list[Row]:
    """The rows of a stage, those of most worth first."""
    path = stage if "." in stage else f"gpu.{stage}"
    found: list[Row] = importlib.import_module(path).rows(setting)
    names = [row.name for row in found]
    assert len(set(names)) == len(names), f"{stage}: names of rows are not unique"
    return found


class Figures:
    """A stage's JSON file, written anew with every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[dict[str, Any]] = self.document.setdefault("rows", [])

    def put(self, name: str, figures: Mapping[str, Any]) -> None:
        """Replace the row of that name, or add it."""
        self.rows[:] = [row for row in self.rows if row["name"] != name]
        self.rows.append({"name": name, **figures})
        self._write()

    def note(self, **facts: Any) -> None:
        """Facts of the stage beside its rows."""
        self.document.update(facts)
        self._write()

    def _write(self) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(beside, self.path)


def worker(stage: str, setting: Setting, path: Path, names: list[str], until: float) -> int:
    """Run the rows of these names, as long as they fit before ``until`` (of ``time.time``); 3 where
    the process is of no use any more."""
    figures = Figures(path)
    rows = rows_of(stage, setting)
    gc.freeze()  # no collection between rows looks at what was imported
    for row in rows:
        if row.name not in names:
            continue
        if time.time() + (0 if setting.small else row.seconds) > until:
            figures.put(row.name, {"skipped": f"needs {row.seconds:g} s"})
            continue
        figures.put(
            row.name, {"error": "the process died, or was stuck"}
        )  # until it is known better
        begun = time.time()
        faulthandler.dump_traceback_later(3 * row.seconds + row.patience, exit=True)
        found: dict[str, Any] = {}
        try:
            found = dict(row.run())
            setting.synchronize()
        except Exception as error:  # also of what the row left running, whose figures stay
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"[:MESSAGE]
        faulthandler.cancel_dump_traceback_later()
        figures.put(row.name, {**found, "took": round(time.time() - begun, 3)})
        print(f"{stage}: {row.name}: {json.dumps(figures.rows[-1])[:300]}", flush=True)
        if any(word in found.get("error", "") for word in FATAL):
            return 3
    return 0


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """Rank 0 of so many, of which there is no other: nothing moves, all is allocated as it would
    be, and what is gathered is not initialised."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def group_of_one(setting: Setting) -> Iterator[None]:
    """The one rank of a group of NCCL, on a CPU of gloo, which meets itself in this process."""
    import torch.distributed as dist

    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def timed(setting: Setting, run: Callable[[], Any], *, seconds: float = 0.05) -> dict[str, Any]:
    """Seconds a call, the median of five samples of calls one after the other that take ``seconds``
    together each; on a GPU by its own clock, without what the host takes to ask for it once the
    queue is full. ``host`` is what one call takes of the host."""
    import torch

    for _ in range(3):
        run()
    setting.synchronize()
    begun = time.perf_counter()
    run()
    setting.synchronize()
    once = time.perf_counter() - begun
    calls = max(1, min(1000, round((0.005 if setting.small else seconds) / max(once, 1e-6))))
    samples, hosts = [], []
    for _ in range(5):
        if setting.device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        hosts.append((time.perf_counter() - begun) / calls)
        if setting.device == "cuda":
            stop.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(stop) / 1e3 / calls)
        else:
            samples.append(hosts[-1])
    samples.sort()
    return {
        "seconds": samples[2],
        "least": samples[0],
        "most": samples[-1],
        "host": sorted(hosts)[2],
        "calls": calls,
    }


def main() -> int:
    """``-m gpu.rows STAGE DEVICE small|whole FILE UNTIL``; names of rows on stdin, one a line."""
    stage, device, size, path, until = sys.argv[1:]
    names = sys.stdin.read().splitlines()
    return worker(stage, Setting(device, size == "small"), Path(path), names, float(until))


if __name__ == "__main__":
    sys.exit(main())
