from __future__ import annotations

import pytest
from recordings import chain, layers, unit

from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.recording import RecordedUnit, Recording
from shardwright.core.tensor import TensorSpec

MODEL = ModelSpec(
    "test",
    (TableSpec("a", 3, 4, fqn="tables.a.weight"), TableSpec("b", 5, 4)),
    chain([RecordedUnit("top", (TensorSpec("top.w", (2, 2)), TensorSpec("top.b", (2,))))]),
)


def test_every_parameter_is_listed_tables_first() -> None:
    assert [t.fqn for t in MODEL.tensors] == ["tables.a.weight", "b", "top.w", "top.b"]


@pytest.mark.parametrize("name", ["a", "tables.a.weight"])
def test_a_table_is_found_by_name_or_fqn(name: str) -> None:
    assert MODEL.table(name) is MODEL.tables[0]


def test_a_unit_is_found_by_name() -> None:
    assert MODEL.unit("top") is MODEL.units[0]


def test_units_come_in_the_order_of_their_forward_with_the_optimizer_of_the_model() -> None:
    found = ModelSpec("test", (), chain([unit("embed"), *layers(2), unit("head")]), "adam").units
    assert [(u.name, u.series, u.modules, u.members) for u in found] == [
        (name, series, (name,), (name,))
        for name, series in (
            ("embed", ""),
            ("layers.0", "layers"),
            ("layers.1", "layers"),
            ("head", ""),
        )
    ]
    assert {u.optimizer for u in found} == {"adam"}


def _units(*names: str, empty: str = "none") -> list[tuple[str, tuple[str, ...]]]:
    recorded = [RecordedUnit(n, () if n == empty else unit(n).tensors) for n in names]
    return [(u.name, u.members) for u in ModelSpec("test", (), chain(recorded)).units]


def test_what_is_in_no_other_unit_is_the_root() -> None:
    assert _units("", "a") == [("root", ("",)), ("a", ("a",))]
    assert _units("", "root") == [("(root)", ("",)), ("root", ("root",))]


def test_what_has_no_parameters_is_no_unit() -> None:
    assert _units("a", "b", empty="b") == [("a", ("a",))]


def test_tables_alone_are_not_trained() -> None:
    alone = ModelSpec("tables", MODEL.tables)
    assert MODEL.is_trained
    assert not alone.is_trained
    assert (alone.units, [t.fqn for t in alone.tensors]) == ((), ["tables.a.weight", "b"])


def test_a_step_of_nothing_is_still_a_step() -> None:
    assert ModelSpec("test", (), Recording((), ())).is_trained


def test_a_table_has_one_pooling_per_feature_where_nothing_is_said() -> None:
    assert TableSpec("t", 3, 4, pooling_factors=(2.0, 3.0)).poolings == (1.0, 1.0)


def test_a_table_has_the_bytes_of_its_weight() -> None:
    table = TableSpec("t", 40_000_000, 128, dtype="bf16")
    assert table.nbytes == table.tensor.nbytes == 40_000_000 * 128 * 2
