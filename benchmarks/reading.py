"""How fast rows of a click log are read from a binary cache, and in how much memory.

    python benchmarks/reading.py --output validation/cpu-2-cores/reading.json

makes up rows in Criteo's form, parses them, and writes their cache; then ten million rows are read
on one rank, from a cache in which the rows that were parsed come again and again, for it takes as
many bytes as any other. Each is done in a process of its own. Rows per second are of the process's
CPU time, for other processes may run beside it; wall time stands beside them. Memory is the most
that was resident before and while rows were read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardwright.core.document import write_document
from shardwright.data.cache import LIST, Array, CachedRows, write_cache
from shardwright.data.logs import CriteoLog
from shardwright.data.reading import ClickBatch, ClickReader, numbered_batches
from shardwright.data.synthetic import CARDINALITIES, ClickModel

BATCH = 2048
PARSED = 400_000
EVERY = 50  # batches between two looks at memory


def resident() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read(batches: Iterator[ClickBatch], rows: int) -> dict[str, Any]:
    """Take ``rows`` rows and look at every one of them."""
    before = most = resident()
    wall, cpu, clicks, ids = time.perf_counter(), time.process_time(), 0.0, 0
    for number in range(rows // BATCH):
        batch = next(batches)
        clicks += float(batch.labels.sum())
        assert isinstance(batch.ids, np.ndarray)
        ids += int(batch.ids.sum())
        if number % EVERY == 0:
            most = max(most, resident())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    taken = rows // BATCH * BATCH
    return {
        "rows": taken,
        "rows_per_cpu_second": round(taken / cpu),
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "clicks": clicks,
        "sum_of_ids": ids,
        "resident_bytes_before": before,
        "resident_bytes_most": most,
    }


def parse(text: Path, rows: int) -> dict[str, Any]:
    """From the text."""
    return read(ClickReader(CriteoLog(text, CARDINALITIES), BATCH), rows)


def mapped(folder: Path, rows: int) -> dict[str, Any]:
    """From the cache."""
    return read(numbered_batches(CachedRows(folder).at, BATCH), rows)


def write(text: Path, folder: Path) -> dict[str, Any]:
    """The cache, once."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = write_cache(CriteoLog(text, CARDINALITIES), folder, narrow=True)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "rows": found.rows,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "text_bytes": text.stat().st_size,
        "cache_bytes": size,
        "resident_bytes_after": resident(),
    }


def make(text: Path, rows: int) -> dict[str, Any]:
    """The text."""
    facts = ClickModel().write(text, rows)
    return {"best_auc": facts.bayes_auc, "best_log_loss": facts.bayes_log_loss}


def repeat(few: Path, many: Path, times: int) -> None:
    """A cache in which the rows of another one come so many ``times``."""
    known = CachedRows(few).list
    many.mkdir()
    for name in known.arrays:
        with (many / name).open("wb") as file:
            for _ in range(times):
                file.write((few / name).read_bytes())
    arrays = {
        name: Array(of.dtype, (times * of.shape[0], *of.shape[1:]))
        for name, of in known.arrays.items()
    }
    changed = msgspec.structs.replace(known, rows=times * known.rows, arrays=arrays)
    write_document(changed, many / LIST)


def alone(task: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What ``task`` finds in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(task, arguments)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where rows are written; a temporary one")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        text, few, many = (Path(place) / name for name in ("rows.tsv", "few", "many"))
        found: dict[str, Any] = {"made": alone(make, text, PARSED)}
        found["text"] = alone(parse, text, PARSED)
        found["write"] = alone(write, text, few)
        found["cache_of_the_parsed_rows"] = same = alone(mapped, few, PARSED)
        repeat(few, many, -(-options.rows // PARSED))
        found["cache"] = alone(mapped, many, options.rows)
    for key in ("clicks", "sum_of_ids"):
        assert same[key] == found["text"][key], f"{key} differs between text and cache"
    rate = found["cache"]["rows_per_cpu_second"] / found["text"]["rows_per_cpu_second"]
    found["times_as_fast"] = round(rate, 1)
    found["machine"] = {
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
