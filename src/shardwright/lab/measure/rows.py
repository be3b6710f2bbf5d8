"""What is timed of embedding rows: addressing and sorting ids, reading rows, updating them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from shardwright.data.criteo import CriteoReader
from shardwright.data.synthetic import ClickModel
from shardwright.lab.measure.bench import Run
from shardwright.lab.measure.sizes import FLOAT, WIDTHS, row_case
from shardwright.runtime.embeddings import update
from shardwright.runtime.embeddings.guide import Guide
from shardwright.runtime.embeddings.route import Group, Piece

FEATURES, BATCH = 8, 2048
IDS = FEATURES * BATCH
TABLE_BYTES = 64 * 2**20  # of a table that no cache keeps
CLICK_ROWS, CLICK_BATCH, CLICK_TABLE = 2048, 256, 1000


def rows_of(width: int) -> int:
    """Rows of the table of a width."""
    return TABLE_BYTES // FLOAT // width


def accesses(device: torch.device, owners: int) -> dict[str, Run]:
    """Reads of random rows, fused updates of them, and ids on their way to ``owners`` ranks."""
    runs = {}
    random = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        weight = torch.zeros(rows_of(width), width, device=device)
        rows = torch.randint(rows_of(width), (IDS,), generator=random).to(device)
        out = torch.empty(IDS, width, device=device)
        runs[row_case(width)] = Run(IDS, partial(torch.index_select, weight, 0, rows, out=out))
    runs |= _updates(device, random)
    for name, cut in (("ids addressed", False), ("ids sorted", True)):
        runs[name] = Run(IDS, _travel(device, owners, cut, random))
    return runs


def _updates(device: torch.device, random: torch.Generator) -> dict[str, Run]:
    width = WIDTHS[0]
    weight = torch.zeros(rows_of(width), width, device=device)
    state = torch.zeros(rows_of(width), device=device)
    rows = torch.randint(rows_of(width), (IDS,), generator=random).to(device)
    gradient = torch.zeros(IDS, width, device=device)
    return {
        "sgd": Run(IDS, lambda: update.sgd(weight, rows, gradient, 0.1)),
        "rowwise_adagrad": Run(
            IDS, lambda: update.rowwise_adagrad(weight, state, rows, gradient, 0.1)
        ),
    }


def _travel(
    device: torch.device, owners: int, cut: bool, random: torch.Generator
) -> Callable[[], None]:
    """Ids made into requests, and the order of the answers undone, for tables on one rank each or
    for tables cut by rows; answers are one element wide, so that they hardly count."""
    chunk = rows_of(WIDTHS[0]) // owners
    pieces = []
    for feature in range(FEATURES):
        parts = tuple(range(owners)) if cut else (feature * owners // FEATURES,)
        size = chunk if cut else chunk * owners
        pieces.append(Piece(feature, 0, 1, size, parts, (0,) * len(parts)))
    group = Group(1, 0 if cut else FEATURES, tuple(pieces), {})
    guide = Guide.of(group, owners, device)
    ids = torch.randint(chunk * owners, (FEATURES, BATCH), generator=random).to(device)
    out = torch.empty(FEATURES, BATCH, 1, device=device)
    answers = torch.zeros(IDS, 1, device=device)

    def travel() -> None:
        asked = guide.request(ids)
        guide.put(out, answers, asked.order)

    return travel


def parsing(folder: Path, rank: int) -> dict[str, Run]:
    """Reading a click log of this rank's own; an amount is rows."""
    path = folder / f"rank-{rank}.tsv"
    tables = (CLICK_TABLE,) * 26
    ClickModel(cardinalities=tables).write(path, CLICK_ROWS)
    reader = CriteoReader(path, tables, CLICK_BATCH)
    return {"click rows": Run(CLICK_BATCH, lambda: next(reader))}
