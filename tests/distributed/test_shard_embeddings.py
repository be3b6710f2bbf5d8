"""A module's embeddings, sharded by a plan of tables alone."""

from __future__ import annotations

from typing import Any

import embedding_tasks as tasks
import pytest
from plans import plan
from pool import Pool

from shardwright.core.sharding import TYPES, traits
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan

KERNELS = "UnsupportedError: t0: expected a kernel of fused, dense, key_value on cpu, got"
UNCUT = {
    "column_wise": "table_wise",
    "table_column_wise": "table_wise",
    "grid_shard": "table_row_wise",
}
SHAPES = {"t0": (9, 4), "t1": (7, 8), "s0": (6, 4), "seen": (11, 4), "user.weight": (5, 8)}


def planned_tables(world_size: int, kinds: tuple[str, ...] = TYPES) -> Plan:
    tables: list[dict[str, Any]] = []
    for number, (name, (rows, dim)) in enumerate(SHAPES.items()):
        kind = kinds[number % len(kinds)]
        pooled = name not in ("s0", "user.weight")
        kind = kind if pooled or not kind.startswith(("table_", "grid")) else "row_wise"
        if dim == 4:  # nothing to cut
            kind = UNCUT.get(kind, kind)
        table = {"name": name, "rows": rows, "dim": dim, "sharding_types": [kind]}
        tables.append({**table, "min_partition": 4, "pooled": pooled})
    cluster = {"preset": "local", "world_size": world_size}
    return plan(parse_job({"tables": tables, "cluster": cluster, "batch": {"size": 3}}))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kinds", "world_size"),
    [
        (TYPES, 2),
        (TYPES, 1),
        (TYPES, 4),
        *(((kind,), 4 if traits(kind).within_hosts else 2) for kind in TYPES),
    ],
    ids=lambda value: f"{len(value)} {value[-1]}" if isinstance(value, tuple) else str(value),
)
def test_losses_and_rows_are_those_of_one_process(
    pool: Pool, kinds: tuple[str, ...], world_size: int
) -> None:
    for found in pool.run(world_size, tasks.trained, made=planned_tables(world_size, kinds)):
        assert max(found.values()) <= 1e-6, found


def test_bags_that_come_once_for_several_samples_are_given_to_each(pool: Pool) -> None:
    for far, said in pool.run(2, tasks.bags_once, made=planned_tables(2)):
        assert max(far.values()) <= 1e-6, far
        assert [text.partition(". ")[0].rstrip(".") for text in said] == [
            "inverse_indices of feature 'a': expected bags from 0 to 1, got 2",
            "inverse_indices of features: expected a tensor [3, samples], got [3]",
            "features: expected 'b', got c, a",
            "values: expected as many bags of every feature, got 2 of 'a', 3 of 'b', 1 of 'c'",
        ]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "partial_rowwise_adam"])
def test_a_table_of_a_collection_is_frozen_alone_and_a_collection_has_a_rate(
    pool: Pool, optimizer: str
) -> None:
    kinds = ["row_wise"] if optimizer == "sgd" else ["column_wise"]
    table = {"rows": 6, "dim": 8, "min_partition": 4, "sharding_types": kinds}
    cluster = {"preset": "local", "world_size": 2}
    tables = [{"name": name, **table} for name in "xy"]
    made = plan(parse_job({"tables": tables, "cluster": cluster, "batch": {"size": 2}}))
    for steps in pool.run(2, tasks.moved, made=made, optimizer=optimizer):
        went = [{name for name, far in step.items() if far} for step in steps]
        assert went == [{"x", "y"}, {"y"}, set(), {"x", "y"}, {"y"}]


def test_what_would_change_nothing_cannot_be_set(pool: Pool) -> None:
    had = "expected a setting of sharded tables (learning_rate"
    for said in pool.run(2, tasks.set_in_vain, made=planned_tables(2)):
        assert [name for name, text in said.items() if not text] == ["padding_idx", "note"]
        assert said["overlap"] == (
            f"'bags.overlap': {had}), got one of its rows. Set it there: .rows.overlap = ..."
        )
        assert all(had in text for text in said.values() if text)


WRONG = {
    "rows": "MismatchError: user.weight: expected shape (5, 8) as planned, got (6, 8)",
    "missing": "expected an embedding for every table of the plan, got none for 'user",
    "largest": "UnsupportedError: embedding 'seen': expected an embedding that a table",
    "fused_uvm": f"{KERNELS} fused_uvm.",
    "fused_uvm_caching": f"{KERNELS} fused_uvm_caching.",
    "optimizer": "optimizer of bags.embedding_bags.t0.weight: expected one, got none",
}


def test_a_module_that_the_plan_is_not_for_is_refused(pool: Pool) -> None:
    for found in pool.run(2, tasks.refused, made=planned_tables(2), changes=list(WRONG)):
        for change, text in WRONG.items():
            assert text in found[change], change
