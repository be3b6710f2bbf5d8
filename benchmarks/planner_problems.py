"""The embedding problems that planners are compared on, made again from a rule.

All tables are fp32 with row-wise Adagrad, pooled, one feature each; batch 512 per rank, hosts of
eight ranks with 32 GiB each, of which 15 % are reserved.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
HBM = 32 * GIB  # bytes per rank
RESERVED = 0.15
CAPACITY = int((1 - RESERVED) * HBM)
BATCH = 512  # samples per rank
HOST = 8  # ranks
EVERY_KERNEL = "every kernel"
DIMS = (16, 32, 64, 128, 128, 256)
KAGGLE_ROWS = (
    *(1461, 584, 10131227, 2202608, 306, 24, 12518, 634, 4, 93146, 5684, 8351593, 3195, 28),
    *(14993, 5461306, 11, 5653, 2173, 4, 7046547, 18, 16, 286181, 105, 142572),
)


@dataclass(frozen=True)
class Problem:
    """``count`` tables on ``ranks`` ranks; ``peer`` says whether TorchRec is asked as well."""

    count: int
    ranks: int
    peer: bool = True

    @property
    def name(self) -> str:
        """Such as 100x16."""
        return f"{self.count}x{self.ranks}"

    @property
    def tables(self) -> list[dict[str, Any]]:
        """Name, rows, dim and ids per sample of each table."""
        return kaggle() if self.count == len(KAGGLE_ROWS) else drawn(self.count)


PROBLEMS = (
    Problem(26, 8),
    Problem(100, 16),
    Problem(500, 64),
    Problem(1000, 128),
    Problem(5000, 512, peer=False),
)


def kaggle() -> list[dict[str, Any]]:
    """26 tables of a click log's cardinalities, 128 columns, one id each."""
    return [
        {"name": f"c{i}", "rows": rows, "dim": 128, "pooling": 1.0}
        for i, rows in enumerate(KAGGLE_ROWS)
    ]


def drawn(count: int) -> list[dict[str, Any]]:
    """``count`` tables of one random sequence: rows from 1e3 to 5e7, up to 100 ids per sample."""
    draw = random.Random(7)
    tables = []
    for i in range(count):
        rows = int(math.exp(draw.uniform(math.log(1e3), math.log(5e7))))
        dim = draw.choice(DIMS)
        pooling = round(math.exp(draw.uniform(0, math.log(100))), 1)
        tables.append({"name": f"t{i}", "rows": rows, "dim": dim, "pooling": pooling})
    return tables


def write_job(problem: Problem, options: str, folder: Path) -> Path:
    """The problem as a job file in TOML with its tables in JSON beside it; ``options`` are those
    of the planner, of two kernels, or ``EVERY_KERNEL``."""
    kernels = {} if options == EVERY_KERNEL else {"compute_kernels": ["dense", "fused"]}
    entries = [{**table, "optimizer": "rowwise_adagrad", **kernels} for table in problem.tables]
    planner = f"""
[planner]
constants = "torchrec-1.9"
options = "{"wide" if options == EVERY_KERNEL else options}"

[planner.reservation]
kind = "percentage"
percentage = {RESERVED}
"""
    path = folder / f"{problem.name}.{options}.toml".replace(" ", "_")
    return write(path, entries, problem.ranks, HBM, planner)


def write(path: Path, tables: list[dict[str, Any]], ranks: int, hbm: int, planner: str) -> Path:
    """A job file, with its tables in JSON beside it, of ``ranks`` with ``hbm`` bytes each;
    ``planner`` are the sections of that name."""
    listed = path.with_suffix(".tables.json")
    listed.write_text(json.dumps(tables))
    path.write_text(
        f"""
[model]
tables = {json.dumps(str(listed))}

[cluster]
compute_device = "cuda"
world_size = {ranks}
local_world_size = {HOST}
hbm_cap = {hbm}

[batch]
size = {BATCH}
{planner}"""
    )
    return path


def write_peer_problem(problem: Problem, seconds: float, folder: Path) -> Path:
    """The problem for the script that runs TorchRec; ``seconds`` is the limit of its search."""
    path = folder / f"{problem.name}.peer.json"
    document = {
        "tables": problem.tables,
        "ranks": problem.ranks,
        "host": HOST,
        "hbm": HBM,
        "batch": BATCH,
        "reserved": RESERVED,
        "seconds": seconds,
    }
    path.write_text(json.dumps(document))
    return path
