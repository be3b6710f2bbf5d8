"""Tables in a file of their own, and constraints on them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.document import encode_toml
from shardwright.core.errors import InputError
from shardwright.core.model import CacheSpec, TableSpec
from shardwright.job.job import Job, parse_job, read_job
from shardwright.job.tables import entry_of

TABLE = {"name": "a", "rows": 10, "dim": 16}
NAMES = ("a", "b", "c", "d")


def _read(folder: Path, document: Any, name: str = "tables.json") -> Job:
    """A job in ``folder`` whose tables are ``document``, as text or as a value."""
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / name).write_text(text)
    return _read_job(folder, name)


def _read_job(folder: Path, name: str) -> Job:
    path = folder / "job.toml"
    path.write_text(f"[model]\ntables = {json.dumps(name)}\n")
    return read_job(path)


def _refused(folder: Path, document: Any) -> str:
    with pytest.raises(InputError) as caught:
        _read(folder, document)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_may_be_a_list_of_tables(tmp_path: Path) -> None:
    job = _read(tmp_path, [TABLE, TABLE | {"name": "b"}])
    assert [table.name for table in job.tables] == ["a", "b"]
    assert job.model.kind == "tables"


EVERY_KEY = TableSpec(
    "a",
    50,
    16,
    dtype="fp16",
    optimizer="adagrad",
    pooled=False,
    pooling_factors=(2.0, 1.5),
    num_poolings=(2.0, 1.0),
    batch_sizes=(7, 9),
    output_dtype="fp16",
    module_weighted=True,
    constraint_weighted=True,
    sharding_types=("row_wise",),
    compute_kernels=("fused",),
    min_partition=4,
    cache=CacheSpec(0.5, stats=(3.0, 0.5, 0.25)),
    kv_l1_mb=7,
    features=("x", "y"),
    pooling_type="mean",
    zipf=1.5,
    kind="hash",
    collisions=3,
    operation="add",
    width=4,
    rank=2,
    hashes=5,
    hidden=6,
    layers=3,
    block=8,
)


def test_an_entry_that_is_written_says_every_key_of_its_table() -> None:
    (found,) = tomllib.loads(encode_toml({"tables": [entry_of(EVERY_KEY)]}))["tables"]
    assert {"fqn", *found} == {field.name for field in msgspec.structs.fields(TableSpec)}
    assert msgspec.convert(found, TableSpec) == EVERY_KEY
    assert entry_of(TableSpec("a", 50, 16)) == {"name": "a", "rows": 50, "dim": 16}


def test_a_file_may_be_an_object_with_tables(tmp_path: Path) -> None:
    assert _read(tmp_path, {"tables": [TABLE]}) == _read(tmp_path, [TABLE])


def test_notes_of_a_file_are_shown_and_not_used(tmp_path: Path) -> None:
    notes = {"source": "where it is from", "kind": "kaggle", "dim": 99}
    assert _read(tmp_path, notes | {"tables": [TABLE]}) == _read(tmp_path, [TABLE])


def test_pooling_is_short_for_one_pooling_factor(tmp_path: Path) -> None:
    job = _read(tmp_path, [TABLE | {"pooling": 2.5}])
    assert job.tables[0].pooling_factors == (2.5,)


def test_a_table_may_leave_values_open_with_null(tmp_path: Path) -> None:
    open_values = dict.fromkeys(
        ("num_poolings", "batch_sizes", "output_dtype", "sharding_types", "compute_kernels")
    ) | dict.fromkeys(("min_partition", "kv_l1_mb", "optimizer"))
    cache = dict.fromkeys(("load_factor", "prefetch_pipeline", "passes", "stats"))
    job = _read(tmp_path, [TABLE | open_values | {"cache": cache}])
    assert job.tables == (TableSpec("a", 10, 16, cache=CacheSpec()),)
    assert _read(tmp_path, [TABLE | {"cache": None}]).tables == (TableSpec("a", 10, 16),)


def test_a_table_of_a_file_has_every_field_of_a_table(tmp_path: Path) -> None:
    full: dict[str, Any] = {
        "name": "ebc.t/0",
        "rows": 2**40,
        "dim": 128,
        "dtype": "fp16",
        "optimizer": "rowwise_adagrad",
        "pooled": False,
        "pooling_factors": [1.5, 0.0],
        "num_poolings": [1.0, 2.0],
        "batch_sizes": [3, 4],
        "output_dtype": "bf16",
        "module_weighted": True,
        "constraint_weighted": True,
        "sharding_types": ["grid_shard"],
        "compute_kernels": ["fused_uvm_caching"],
        "min_partition": 64,
        "cache": {"load_factor": 0.5, "passes": 2, "stats": [10.0, 0.5, 0.25]},
        "kv_l1_mb": 64,
    }
    assert _read(tmp_path, [full]).tables == parse_job({"tables": [full]}).tables


def test_a_relative_file_lies_beside_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _read(tmp_path / "jobs", [TABLE]).tables[0].name == "a"


def test_a_file_of_the_working_directory_comes_before_one_beside_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.json").write_text(json.dumps([TABLE | {"name": "here"}]))
    assert _read(tmp_path / "jobs", [TABLE]).tables[0].name == "here"


def test_an_absolute_file_is_read_as_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "tables.json"
    path.write_text(json.dumps([TABLE]))
    assert _read_job(tmp_path, str(path)).tables[0].name == "a"


def test_an_override_may_name_the_tables(tmp_path: Path) -> None:
    job, path = tmp_path / "job.toml", tmp_path / "tables.json"
    job.write_text("[batch]\nsize = 3\n")
    path.write_text(json.dumps([TABLE]))
    assert read_job(job, [f"model.tables={path}"]).tables[0].name == "a"


def test_a_model_may_have_its_tables_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text(json.dumps([TABLE]))
    path = tmp_path / "job.toml"
    path.write_text('[model]\ntables = "tables.json"\nbottom = [8, 16]\n')
    assert (read_job(path).model.kind, read_job(path).tables[0].name) == ("dlrm", "a")


NO_JSON = "{}: expected a JSON file of tables, got '"
NO_LIST = "{}: expected a list of tables, or an object with one, got "


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", NO_JSON + "Expecting value: line 1 column 1 (char 0)'."),
        ("[" * 200_000, NO_JSON + "maximum recursion depth exceeded"),
        ("[" + "1" * 5000 + "]", NO_JSON + "Exceeds the limit"),
        (
            {"tables": [TABLE], "topology": {}},
            "{}: expected an object with tables, got 'topology'. Clusters and batches belong into "
            "the job.",
        ),
        ({"source": "x"}, NO_LIST + "NoneType."),
        ("3", NO_LIST + "int."),
        ('"a"', NO_LIST + "str."),
        ({"tables": {"a": TABLE}}, NO_LIST + "dict."),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, document: Any, message: str) -> None:
    assert _refused(tmp_path, document).startswith(message.format(tmp_path / "tables.json"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "tables: expected at least one [[tables]] entry, got none."),
        ([3], "tables[0]: expected a section, { KEY = VALUE }, got 3."),
        ([None], "tables[0]: expected a section, { KEY = VALUE }, got None."),
        (
            [[TABLE]],
            "tables[0]: expected a section, { KEY = VALUE }, got "
            "[{'name': 'a', 'rows': 10, 'dim': 16}].",
        ),
        (
            [TABLE | {"pooling": 1.0, "pooling_factors": [1.0]}],
            "unknown key 'tables[0].pooling'. Did you mean 'pooling_factors'? ",
        ),
        ([TABLE | {"pooling": None}], "tables[0].pooling_factors[0]: expected float, got None."),
        ([TABLE | {"fqn": "x"}], "unknown key 'tables[0].fqn'. Known here: "),
        ([TABLE | {"rows": None}], "tables[0].rows: expected int, got None."),
        ([TABLE | {"rows": -1}], "tables[0] 'a'.rows: expected a value from 1 to 1099511627776, "),
        ([TABLE, TABLE], "tables[1] 'a'.name: expected a name of its own, got one used twice."),
    ],
)
def test_tables_of_a_file_are_checked_like_those_of_a_job(
    tmp_path: Path, tables: list[Any], message: str
) -> None:
    assert _refused(tmp_path, tables).startswith(f"{tmp_path / 'job.toml'}: {message}")


def test_an_unknown_key_of_a_cache_is_named_like_any_other() -> None:
    with pytest.raises(InputError) as caught:
        parse_job({"tables": [TABLE | {"cache": {"load_facto": 0.5}}]})
    message = str(caught.value)
    assert message.startswith("job: unknown key 'tables[0].cache.load_facto'. Did you mean ")
    assert "'load_factor'" in message


@pytest.mark.parametrize("stats", [[5.0, 1.5, 0.5], [5.0, 0.5, 1.5]])
def test_shares_of_a_cache_are_at_most_one(stats: list[float]) -> None:
    with pytest.raises(InputError, match=r"tables\[0\] 'a'\.cache\.stats: expected "):
        parse_job({"tables": [TABLE | {"cache": {"stats": stats}}]})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("key", ["pooling", "rows"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, key: str, number: str) -> None:
    text = f'[{{"name": "a", "dim": 16, "rows": 3, "{key}": {number}}}]'
    assert "tables[0]" in _refused(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(InputError) as caught:
        _read_job(tmp_path, "tables.json")
    path = tmp_path / "tables.json"
    assert str(caught.value).startswith(f"{path}: expected a JSON file of tables, got '")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        _read_job(tmp_path, "none.json")
    assert str(caught.value) == (
        "none.json: expected a table file, got no such file. Name a JSON file in model.tables."
    )


def test_a_folder_is_no_file_of_tables(tmp_path: Path) -> None:
    (tmp_path / "tables.json").mkdir()
    with pytest.raises(InputError, match=r"tables\.json: expected a table file, got a directory"):
        _read_job(tmp_path, "tables.json")


def test_tables_are_named_in_one_place_only(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text(json.dumps([TABLE]))
    path = tmp_path / "job.toml"
    path.write_text('[model]\ntables = "tables.json"\n\n[[tables]]\nname = "a"\n')
    with pytest.raises(InputError) as caught:
        read_job(path)
    assert str(caught.value) == (
        f"{path}: model.tables: expected a file or [[tables]] in the job, got both."
    )


def _constrained(constraints: dict[str, Any], **changes: dict[str, Any]) -> Job:
    tables = [TABLE | {"name": name} | changes.get(name, {}) for name in NAMES]
    return parse_job({"tables": tables, "planner": {"constraints": constraints}})


def test_constraints_that_agree_are_accepted() -> None:
    job = _constrained(
        {
            "together": [["a", "b"]],
            "apart": [["a", "c"], ["b", "d"], ["c", "d"]],
            "ranks": {"a": [0, 1], "b": [1, 2], "c": [0]},
        }
    )
    assert job.planner.constraints.together == (("a", "b"),)
    assert job.planner.constraints.ranks["b"] == (1, 2)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"together": [["a", "x"]]}, "together[0]: expected names of tables, got 'x'."),
        ({"together": [["a"]]}, "together[0]: expected 2 or more different tables, got ['a']."),
        ({"apart": [["a", "b"], []]}, "apart[1]: expected 2 or more different tables, got []."),
        (
            {"apart": [["a", "b", "a"]]},
            "apart[0]: expected 2 or more different tables, got ['a', 'b', 'a'].",
        ),
        (
            {"together": [["a", "b"], ["b", "c"]]},
            "together: expected each table in one group, got 'b' in two.",
        ),
        (
            {"together": [["a", "b", "c"]], "apart": [["d", "c", "a"]]},
            "apart[0]: expected tables that are not kept together, got 'c', which is in "
            "together[0] with another of them.",
        ),
        ({"ranks": {"x": [0]}}, "ranks: expected names of tables, got 'x'."),
        ({"ranks": {"a": []}}, "ranks.a: expected distinct ranks from 0, got []."),
        ({"ranks": {"a": [1, 1]}}, "ranks.a: expected distinct ranks from 0, got [1, 1]."),
        ({"ranks": {"a": [0, -1]}}, "ranks.a: expected distinct ranks from 0, got [0, -1]."),
        (
            {"together": [["a", "b"]], "ranks": {"a": [0, 1], "b": [2]}},
            "together[0]: expected tables with a rank in common, got constraints.ranks without "
            "one.",
        ),
    ],
)
def test_constraints_that_cannot_be_met_are_refused(
    constraints: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        _constrained(constraints)
    assert str(caught.value) == f"job: planner.constraints.{message}"


def test_tables_that_share_a_rank_lie_whole_on_it() -> None:
    with pytest.raises(InputError) as caught:
        _constrained({"together": [["a", "b"]]}, b={"sharding_types": ["row_wise"]})
    assert str(caught.value) == (
        "job: planner.constraints.together[0]: expected tables that may be table_wise, for each "
        "lies whole on the common rank, got 'b' with row_wise."
    )


groups = st.lists(st.lists(st.sampled_from([*NAMES, "x"]), max_size=4), max_size=3)


@given(
    together=groups,
    apart=groups,
    ranks=st.dictionaries(st.sampled_from([*NAMES, "x"]), st.lists(st.integers(-1, 3), max_size=3)),
)
def test_any_constraints_are_accepted_or_refused_in_one_line(
    together: list[list[str]], apart: list[list[str]], ranks: dict[str, list[int]]
) -> None:
    constraints = {"together": together, "apart": apart, "ranks": ranks}
    message = _refusal(constraints)
    if message:
        assert message.startswith("job: planner.constraints.")
        assert "\n" not in message
        return
    rules = _constrained(constraints).planner.constraints
    for group in (*rules.together, *rules.apart):
        assert 1 < len(group) == len(set(group))
        assert set(group) <= set(NAMES)
    for one in rules.together:
        assert not any(len(set(one) & set(other)) > 1 for other in rules.apart)


def _refusal(constraints: dict[str, Any]) -> str:
    try:
        _constrained(constraints)
    except InputError as error:
        return str(error)
    return ""
