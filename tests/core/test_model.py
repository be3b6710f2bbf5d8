from __future__ import annotations

import pytest

from shardwright.core.model import Allocation, ModelSpec, TableSpec, UnitSpec
from shardwright.core.tensor import TensorSpec

MODEL = ModelSpec(
    "test",
    (TableSpec("a", 3, 4, fqn="tables.a.weight"), TableSpec("b", 5, 4)),
    (UnitSpec("top", (TensorSpec("top.w", (2, 2)), TensorSpec("top.b", (2,)))),),
    (),
)


def test_every_parameter_is_listed_tables_first() -> None:
    assert [t.fqn for t in MODEL.tensors] == ["tables.a.weight", "b", "top.w", "top.b"]


@pytest.mark.parametrize("name", ["a", "tables.a.weight"])
def test_a_table_is_found_by_name_or_fqn(name: str) -> None:
    assert MODEL.table(name) is MODEL.tables[0]


def test_a_unit_is_found_by_name() -> None:
    assert MODEL.unit("top") is MODEL.units[0]


def test_an_allocation_grows_with_the_batch() -> None:
    assert Allocation("x", "activation", 12, 5).nbytes(10) == 125


def test_a_table_has_one_pooling_per_feature_where_nothing_is_said() -> None:
    assert TableSpec("t", 3, 4, pooling_factors=(2.0, 3.0)).poolings == (1.0, 1.0)


def test_a_table_has_the_bytes_of_its_weight() -> None:
    table = TableSpec("t", 40_000_000, 128, dtype="bf16")
    assert table.nbytes == table.tensor.nbytes == 40_000_000 * 128 * 2
