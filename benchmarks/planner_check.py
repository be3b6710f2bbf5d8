"""Checks of a plan that share nothing with the planner: they add its shards up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from planner_problems import BATCH, CAPACITY, HOST

from shardwright.job.plan import Plan, TablePlan

INDEX_BYTES = ELEMENT_BYTES = 4
ID_BYTES = 8
Shard = tuple[int, int, int, int, int]  # row, column, rows, columns, rank


def shards_of(table: TablePlan) -> list[Shard]:
    """Every shard of a table with its rank."""
    return [
        (shape.row, shape.column, shape.rows, shape.columns, rank)
        for shard in table.shards
        for rank, shape in zip(shard.ranks, shard.run.shapes(), strict=True)
    ]


def placed(plan: Plan) -> dict[str, Any]:
    """Types, kernels and shards by table, for TorchRec's estimators."""
    return {
        table.name: {
            "type": table.sharding_type,
            "kernel": table.compute_kernel,
            "shards": shards_of(table),
        }
        for table in plan.tables
    }


def check(plan: Plan, tables: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """What is wrong with a plan (nothing, one hopes) and how full its fullest rank is.

    Every table has to be there once, its shards have to tile it, to lie where their type lets
    them, and to leave every rank within its capacity.
    """
    wrong = []
    wanted, found = Counter(t["name"] for t in tables), Counter(t.name for t in plan.tables)
    if wanted != found:
        wrong.append(f"tables: {dict((wanted - found) + (found - wanted))}")
    given = {table["name"]: table for table in tables}
    used = [0] * ranks
    for table in plan.tables:
        traffic = given[table.name]
        wrong += [f"{table.name}: {text}" for text in _misplaced(table, traffic, ranks)]
        for shard in shards_of(table):
            used[shard[-1]] += _bytes(table, traffic, shard, ranks)
    over = [rank for rank, nbytes in enumerate(used) if nbytes > CAPACITY]
    wrong += [f"rank {rank} holds {used[rank]} of {CAPACITY} bytes" for rank in over]
    stated = [rank.hbm_bytes for rank in plan.ranks]
    if stated != used:
        rank = next(r for r in range(ranks) if stated[r] != used[r])
        wrong.append(f"rank {rank} has {stated[rank]} bytes in the plan and holds {used[rank]}")
    return {"wrong": wrong[:10], "max_hbm_bytes": max(used), "capacity_bytes": CAPACITY}


def _misplaced(table: TablePlan, given: dict[str, Any], ranks: int) -> Iterator[str]:
    shards = shards_of(table)
    homes = [shard[-1] for shard in shards]
    rows, dim, kind = given["rows"], given["dim"], table.sharding_type
    if (table.rows, table.dim) != (rows, dim):
        yield f"is {table.rows} x {table.dim}"
    if not all(0 <= rank < ranks for rank in homes):
        yield "a rank that is none"
    if kind == "data_parallel":
        if [shard[:4] for shard in shards] != [(0, 0, rows, dim)] * ranks:
            yield "is not whole on every rank"
    elif not _tiles([shard[:4] for shard in shards], rows, dim):
        yield "is not tiled by its shards"
    if kind in ("data_parallel", "row_wise") and homes != list(range(ranks)):
        yield "has no shard of its own on every rank"
    if kind in ("table_row_wise", "table_column_wise") and len({r // HOST for r in homes}) > 1:
        yield "leaves its host"
    if kind == "table_row_wise" and [rank % HOST for rank in homes] != list(range(len(homes))):
        yield "is not spread over its host in order"
    if table.compute_kernel != ("dense" if kind == "data_parallel" else "fused"):
        yield f"has kernel {table.compute_kernel}"


def _tiles(shapes: list[tuple[int, int, int, int]], rows: int, dim: int) -> bool:
    """Whether rectangles cover the table once: strips of columns, each cut by rows in order."""
    strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, column, height, width in shapes:
        strips.setdefault((column, width), []).append((row, height))
    at = 0
    for column, width in sorted(strips):
        if column != at:
            return False
        at += width
        end = 0
        for row, height in sorted(strips[column, width]):
            if row != end:
                return False
            end += height
        if end != rows:
            return False
    return at == dim


def _bytes(table: TablePlan, given: dict[str, Any], shard: Shard, ranks: int) -> int:
    """Bytes of a shard: weights, row-wise Adagrad's state, inputs and outputs of a step."""
    _, _, rows, columns, _ = shard
    ids, bags = given["pooling"] * BATCH, min(1.0, given["pooling"]) * BATCH
    weights = rows * columns * ELEMENT_BYTES
    state = -(-weights // table.dim)
    match table.sharding_type:
        case "data_parallel":
            inputs, outputs = ids * ID_BYTES, bags * columns * ELEMENT_BYTES
        case "row_wise" | "table_row_wise" | "grid_shard" if not rows * columns:
            inputs = outputs = 0.0
        case "row_wise":
            inputs, outputs = ids / ranks * ranks * ID_BYTES, bags * ranks * columns * ELEMENT_BYTES
        case "table_row_wise" | "grid_shard":
            host = min(HOST, ranks)
            inputs = ids / host * ranks * ID_BYTES
            outputs = bags * ranks * columns * ELEMENT_BYTES
        case _:
            inputs = ids * ranks * ID_BYTES
            outputs = bags * ranks * columns * ELEMENT_BYTES
    return weights + state + _up(inputs) + _up(outputs)


def _up(value: float) -> int:
    return -int(-value // 1)
