from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shardwright.core.errors import InputError, MismatchError
from shardwright.core.option import ShardRun
from shardwright.core.schedule import Modes
from shardwright.estimate.recordings import described, plan
from shardwright.job.job import parse_job
from shardwright.job.plan import (
    Plan,
    Search,
    ShardPlan,
    fingerprint,
    read_plan,
    sealed,
    write_plan,
)


@pytest.fixture(scope="module")
def made() -> Plan:
    model = {"bottom": [64, 16], "top": [64, 1]}
    return plan(parse_job({"model": model, "tables": [{"name": "a", "rows": 30, "dim": 16}]}))


def test_a_plan_is_shown_in_one_line(made: Plan) -> None:
    assert repr(made).startswith("<Plan of 1 table and 2 units on 2 ranks: ")
    assert made.fingerprint[:12] in repr(made)
    assert len(repr(made)) < 120


def test_how_long_planning_took_is_no_part_of_the_fingerprint(made: Plan) -> None:
    slower = msgspec.structs.replace(made.search, wall_seconds=100.0)
    assert fingerprint(msgspec.structs.replace(made, search=slower)) == made.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"version": "0.0.0"},
        lambda p: {"blocks": p.blocks[:-1]},
        lambda p: {"gap": p.gap + 1},
        lambda p: {"search": Search("bounded", 0, 0, 0.0)},
    ],
)
def test_everything_else_is_part_of_the_fingerprint(
    made: Plan, change: Callable[[Plan], dict[str, object]]
) -> None:
    changed = msgspec.structs.replace(made, **change(made))
    assert fingerprint(changed) != made.fingerprint
    assert sealed(changed).fingerprint == fingerprint(changed)


def test_a_plan_comes_back_from_its_file(made: Plan, tmp_path: Path) -> None:
    write_plan(made, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", check=True) == made


def test_a_plan_carries_the_model_that_was_planned(made: Plan, of_tables: Plan) -> None:
    assert made.model == described(made.job)
    assert made.model.is_trained
    assert not of_tables.model.is_trained


def test_of_an_edited_plan_both_fingerprints_are_named(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    edited = msgspec.structs.replace(made, gap=made.gap + 1)
    write_plan(edited, path)
    with pytest.raises(MismatchError) as caught:
        read_plan(path)
    assert str(caught.value) == (
        f"{path}: expected content of fingerprint {made.fingerprint[:12]}, got "
        f"{fingerprint(edited)[:12]}. The file was edited after planning; make the plan again "
        "from the job."
    )


def test_blocks_that_do_not_tile_the_model_are_refused(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(sealed(msgspec.structs.replace(made, blocks=made.blocks[1:])), path)
    assert read_plan(path).blocks == made.blocks[1:]
    with pytest.raises(InputError, match=r"^blocks of tables.a.weight: expected every one of 480"):
        read_plan(path, check=True)


def test_blocks_are_kept_run_length_encoded(made: Plan) -> None:
    assert len(made.blocks) < len(made.expanded())
    assert made.world_size == 2


@pytest.fixture(scope="module")
def of_tables() -> Plan:
    cluster = {"preset": "h100-8", "world_size": 16}
    tables = [
        {"name": "rows", "rows": 1001, "dim": 16, "sharding_types": ["row_wise"]},
        {"name": "columns", "rows": 7, "dim": 16, "sharding_types": ["column_wise"]},
        {"name": "copies", "rows": 7, "dim": 16, "sharding_types": ["data_parallel"]},
    ]
    return plan(parse_job({"cluster": cluster, "tables": tables}))


def test_a_plan_of_tables_alone_comes_back_from_its_file(of_tables: Plan, tmp_path: Path) -> None:
    write_plan(of_tables, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", check=True) == of_tables


def test_a_plan_of_the_schema_before_is_refused(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(made, path)
    path.write_text(path.read_text().replace("shardwright.plan/4", "shardwright.plan/3"))
    with pytest.raises(InputError) as caught:
        read_plan(path)
    assert str(caught.value) == (
        f"{path}: schema: expected 'shardwright.plan/4', got 'shardwright.plan/3'. "
        "Make it again with `shardwright plan JOB.toml -o plan.json`."
    )


def test_shards_alike_on_ranks_that_follow_are_written_together(of_tables: Plan) -> None:
    rows, columns, copies = of_tables.tables
    assert [(s.rank, s.run.rows, s.run.count) for s in rows.shards] == [(0, 63, 15), (15, 56, 1)]
    assert len(copies.shards) == 1
    assert len(columns.shards) <= len(columns.ranks)


def test_a_table_shows_rank_size_seconds_and_bytes_of_every_shard(of_tables: Plan) -> None:
    rows, columns, copies = of_tables.tables
    assert rows.ranks == copies.ranks == tuple(range(16))
    assert rows.shard_sizes == ((63, 16),) * 15 + ((56, 16),)
    assert copies.shard_sizes == ((7, 16),) * 16
    for table in (rows, columns, copies):
        assert len(table.ranks) == len(table.shard_sizes) == len(table.seconds)
        assert len(table.ranks) == len(table.nbytes)
        assert sum(table.nbytes) == sum(s.run.count * sum(s.storage) for s in table.shards)
    assert rows.nbytes[0] > rows.nbytes[15]
    assert rows.seconds[0] == rows.shards[0].total_seconds


def test_the_ranks_of_a_shard_follow_one_another() -> None:
    shard = ShardPlan(3, ShardRun(2, 4, 2, row_step=2), {"lookup": 1.0, "step": 2.0}, {}, {}, {})
    assert shard.ranks == range(3, 5)
    assert (shard.total_seconds, shard.storage) == (3.0, (0, 0, 0))


def test_the_blocks_of_a_table_are_those_of_its_shards(of_tables: Plan) -> None:
    for table in of_tables.tables:
        blocks = [block for block in of_tables.expanded() if block.tensor == table.fqn]
        assert [block.rank for block in blocks] == list(table.ranks)
        assert [block.sizes for block in blocks] == list(table.shard_sizes)


@pytest.mark.slow
def test_a_plan_shows_the_order_of_its_step() -> None:
    model = {"kind": "transformer", "layers": 4, "dim": 8, "heads": 2, "vocab": 16}
    units = {"embed": "replicate", "layers": "shard", "head": "shard"}
    dense = {"layers_per_unit": 2, "prefetch": 1, "reshard": True}
    made = plan(
        parse_job(
            {
                "model": model,
                "batch": {"size": 2, "sequence": 4},
                "planner": {"units": units, "dense": dense},
            }
        )
    )
    pairs = {"layers.0-1": ("layers.0", "layers.1"), "layers.2-3": ("layers.2", "layers.3")}
    sharded = frozenset({*pairs, "head"})
    assert made.modes == Modes(sharded, sharded, prefetch=1, merged=tuple(pairs.items()))
    assert [unit.modules for unit in made.units] == [("embed",), *pairs.values(), ("head",)]


def test_a_unit_shows_the_calls_of_a_step_and_the_buffers_they_fill(made: Plan) -> None:
    for unit in made.units:
        note = 4 * 64  # 16 bits twice and a number for every tensor, up to a multiple of 32
        moved = unit.bytes_per_rank + note
        assert (unit.collectives, unit.bytes_per_step) == (1, moved)  # one all-reduce of a replica
