from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from shardwright.core.errors import InputError
from shardwright.core.kinds import (
    KINDS,
    EmbeddingsSection,
    cores_of,
    flops,
    kind_of,
    members_of,
    nbytes,
    packed_bytes,
    parameters,
    parts_of,
    settled,
)
from shardwright.core.model import TableSpec
from shardwright.job.job import Job, parse_job
from shardwright.job.model_of_job import placed_tables

# Criteo Kaggle's tables
KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
SECTION: dict[str, Any] = {"model": {"bottom": [8], "top": [4, 1]}}


def _tables(rows: tuple[int, ...], **keys: Any) -> tuple[TableSpec, ...]:
    bare = [TableSpec(f"C{i}", n, 16) for i, n in enumerate(rows, 1)]
    return settled(bare, EmbeddingsSection(**keys))


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({}, 416_000_000),
        ({"kind": "qr", "collisions": 200}, 2_163_200),
        ({"kind": "qr", "collisions": 1000}, 832_000),
        ({"kind": "hash", "collisions": 200}, 2_080_000),
        ({"kind": "memcom", "collisions": 200}, 28_080_000),
        ({"kind": "tt", "rank": 16}, 1_580_800),
        ({"kind": "dhe"}, 301_579_616),
    ],
)
def test_26_tables_of_a_million_rows_have_the_published_counts(
    keys: dict[str, Any], count: int
) -> None:
    tables = _tables((1_000_000,) * 26, **keys)
    assert sum(map(parameters, tables)) == count
    assert sum(map(nbytes, tables)) == 4 * count


@pytest.mark.parametrize(
    ("keys", "millions"),
    [
        ({}, 540.2),
        ({"kind": "hash", "collisions": 60}, 9.01),
        ({"kind": "hash", "collisions": 200}, 2.70),
        ({"kind": "qr", "collisions": 4}, 135.05),
        ({"kind": "qr", "collisions": 60}, 9.02),
        ({"kind": "qr", "collisions": 200}, 2.76),
        ({"kind": "memcom", "collisions": 200}, 36.47),
        ({"kind": "mixed_dim", "above": 0}, 33.79),
        ({"kind": "tt", "above": 1_000_000}, 9.67),
    ],
)
def test_the_tables_of_criteo_kaggle_have_the_published_counts(
    keys: dict[str, Any], millions: float
) -> None:
    assert sum(map(parameters, _tables(KAGGLE, **keys))) / 1e6 == pytest.approx(millions, abs=0.01)


def test_the_widths_of_mixed_dimensions_are_the_published_ones() -> None:
    found = _tables(KAGGLE, kind="mixed_dim", above=0, temperature=0.3)
    widths = (3, 3, 1, 1, 4, 9, 1, 3, 16, 1, 2, 1, 2, 8, 1, 1, 11, 2, 2, 15, 1, 9, 10, 1, 6, 1)
    assert tuple(table.width for table in found) == widths


def test_a_row_of_the_usual_hash_network_takes_23_megaflop() -> None:
    (table,) = _tables((1_000_000,), kind="dhe")
    assert flops(table) == 2 * (1024 * 1800 + 3 * 1800**2 + 1800 * 16) == 23_184_000


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 1000, 2**24 + 1, 2**40])
@pytest.mark.parametrize("dim", [1, 2, 7, 16, 48, 128])
def test_the_cores_of_a_tensor_train_reach_every_row_and_column(rows: int, dim: int) -> None:
    (table,) = settled([TableSpec("t", rows, dim, kind="tt")], EmbeddingsSection())
    (n1, n2, n3), (a, b, c) = cores_of(table)
    assert (n1 - 1) * n2 * n3 < rows <= n1 * n2 * n3
    assert a * b * c == dim
    assert b <= min(a, c)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if parts_of(_tables((9,), kind=kind)[0])])
def test_no_member_has_more_rows_than_the_table(kind: str) -> None:
    for rows in (1, 2, 3, 5, 200, 201, 4097):
        (table,) = settled([TableSpec("t", rows, 16, kind=kind)], EmbeddingsSection())  # type: ignore[arg-type]
        members = members_of(table)
        assert all(member.rows <= rows for member in members)
        assert sum(m.rows * m.dim for m in members) <= parameters(table)


def _job(*tables: dict[str, Any], **sections: Any) -> Job:
    own = [{"name": f"t{i}", "rows": 1000, "dim": 8} | keys for i, keys in enumerate(tables)]
    return parse_job({**SECTION, "tables": own, **sections})


def test_a_kind_for_all_tables_spares_small_ones_and_those_that_name_their_own() -> None:
    job = _job(
        {}, {"rows": 200}, {"kind": "full"}, {"kind": "hash", "collisions": 5},
        embeddings={"kind": "qr", "collisions": 50},
    )  # fmt: skip
    assert [kind_of(table) for table in job.tables] == ["qr", "full", "full", "hash"]
    placed = [(table.name, table.rows) for table in placed_tables(job)]
    assert placed == [
        ("t0.quotient", 20), ("t0.remainder", 50), ("t1", 200), ("t2", 1000), ("t3", 200),
    ]  # fmt: skip
    assert [table.collisions for table in job.tables] == [50, UNSET, UNSET, 5]


def test_a_job_without_kinds_places_its_own_tables() -> None:
    job = _job({}, {"rows": 5})
    assert [t.rows for t in placed_tables(job)] == [1000, 5]
    assert all(table.kind is UNSET for table in placed_tables(job))


def test_rows_that_are_multiplied_come_back_one_by_one_where_bags_are_looked_up() -> None:
    bag = {"pooling_factors": [3.0], "pooling_type": "mean"}
    job = _job({"kind": "qr"} | bag, {"kind": "qr", "operation": "add"} | bag)
    assert [table.pooling for table in placed_tables(job)] == ["none"] * 2 + ["mean"] * 2


@pytest.mark.parametrize(
    ("table", "sections", "words"),
    [
        ({"kind": "quotient"}, {}, "kind: expected one of"),
        ({"collisions": 4}, {}, "collisions: expected no such key for kind 'full', got 4."),
        ({"kind": "tt", "hidden": 4}, {}, "hidden: expected no such key for kind 'tt', got 4. "
         "It belongs to kind 'dhe'."),
        ({"kind": "mixed_dim", "width": 9}, {}, "width: expected at most dim 8, got 9"),
        ({"kind": "qr", "operation": "concat", "dim": 3}, {}, "dim: expected an even dim"),
        ({"kind": "robe", "block": 3}, {}, "block: expected a divisor of dim 8, got 3"),
        ({"kind": "dhe", "rows": 2**31 + 1}, {}, "rows: expected at most 2,147,483,648 rows"),
        ({}, {"embeddings": {"kind": "hash", "rank": 2}}, "embeddings.rank: expected no such key"),
        ({}, {"embeddings": {"above": -1, "kind": "qr"}}, "above: expected a value from 0"),
        ({"kind": "dhe", "sharding_types": ["row_wise"]}, {},
         "sharding_types: expected none for kind 'dhe'"),
        ({"kind": "robe", "optimizer": "sgd"}, {}, "optimizer: expected none for kind 'robe'"),
        ({"kind": "int8"}, {}, "kind: expected a kind that is trained, got 'int8', for inference. "
         "Train it full"),
        ({}, {"planner": {"kinds": ["full", "int4"]}}, "kind: expected a kind that is trained"),
        ({"kind": "int4", "collisions": 4}, {}, "collisions: expected no such key for kind 'int4'"),
        ({}, {"embeddings": {"above": 5}}, "above: expected none without embeddings.kind"),
        ({}, {"embeddings": {"temperature": 0.5}}, "temperature: expected none without kind"),
        ({}, {"planner": {"kinds": []}}, "planner.kinds: expected different kinds, got []"),
        ({}, {"planner": {"kinds": ["qr"]}, "embeddings": {"kind": "hash"}},
         "embeddings.kind: expected none beside planner.kinds"),
        ({}, {"planner": {"kinds": ["qr"]}, "embeddings": {"rank": 3}}, "rank: expected no such"),
        ({}, {"planner": {"kinds": ["qr"], "constraints": {"ranks": {"t0": [0]}}}},
         "planner.constraints: expected tables with a kind of their own beside planner.kinds"),
    ],
)  # fmt: skip
def test_what_no_kind_has_is_refused_by_name(
    table: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as error:
        _job(table, **sections)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_tables_alone_have_no_kind_with_a_dense_part() -> None:
    tables = [{"name": "t", "rows": 1000, "dim": 8, "kind": "dhe"}]
    with pytest.raises(InputError, match="expected a kind made of tables alone"):
        parse_job({"tables": tables})


@pytest.mark.parametrize(
    ("keys", "planner", "words"),
    [
        ({"compute_kernels": ["fused"]}, {}, "compute_kernels: expected quant, quant_uvm, "
         "quant_uvm_caching for kind 'int4', which serves inference only, got 'fused'"),
        ({"dtype": "fp16"}, {}, "dtype: expected 'fp32' for kind 'int4', got 'fp16'"),
        ({}, {"constants": "torchrec-1.9"}, "expected planner.constants = 'cluster' beside kind "
         "'int4', got 'torchrec-1.9'"),
    ],
)  # fmt: skip
def test_rows_of_bytes_refuse_what_no_cost_knows(
    keys: dict[str, Any], planner: dict[str, Any], words: str
) -> None:
    table = {"name": "t", "rows": 1000, "dim": 8, "kind": "int4", **keys}
    with pytest.raises(InputError) as error:
        parse_job({"tables": [table], "planner": planner})
    assert words in str(error.value)


@pytest.mark.parametrize(("kind", "wide", "odd"), [("int8", 24, 17), ("int4", 12, 9)])
def test_a_row_of_bytes_has_its_entries_and_what_reads_them(kind: str, wide: int, odd: int) -> None:
    tables = _tables((1000, 1000), kind=kind)
    assert sum(map(nbytes, tables)) == 2000 * wide
    assert packed_bytes(9, kind) == odd
    (member,) = members_of(tables[0])
    assert (member.kind, member.rows, member.dim) == (kind, 1000, 16)
    assert parameters(tables[0]) == 16_000


def test_constraints_name_the_tables_that_are_placed() -> None:
    ranks = {"planner": {"constraints": {"ranks": {"t0.quotient": [0]}}}}
    assert _job({"kind": "qr"}, **ranks).planner.constraints.ranks == {"t0.quotient": (0,)}
    with pytest.raises(InputError, match="expected names of tables, got 't0'"):
        _job({"kind": "qr"}, planner={"constraints": {"ranks": {"t0": [0]}}})


@pytest.mark.parametrize(
    "section", [{"embeddings": {"kind": "hash"}}, {"planner": {"kinds": ["full"]}}]
)
def test_a_model_without_tables_has_no_kinds(section: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected none for a transformer"):
        parse_job({"model": {"kind": "transformer"}, **section})


def test_keys_of_a_kind_that_a_plan_may_choose_stand_in_the_section() -> None:
    job = _job({}, planner={"kinds": ["full", "qr"]}, embeddings={"collisions": 10})
    assert job.tables[0].kind is UNSET
    assert [table.rows for table in placed_tables(job)] == [1000]
