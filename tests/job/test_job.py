from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.core.model import TableSpec
from shardwright.job.job import DataFiles, Job, data_files, parse_job, read_job

TABLE = {"name": "a", "rows": 10, "dim": 16}
TEXT = """
[batch]
size = 64

[[tables]]
name = "a"
rows = 10
dim = 16
"""


def _written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def _refused(document: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        parse_job(document)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _refused_table(**changes: Any) -> str:
    return _refused({"tables": [TABLE | changes]})


def test_what_a_job_leaves_out_has_a_default(tmp_path: Path) -> None:
    job = read_job(_written(tmp_path, TEXT))
    assert job.batch.size == 64
    assert (job.model.kind, job.cluster.preset, job.train.optimizer) == ("tables", "", "sgd")
    planner = job.planner
    assert (planner.constants, planner.search, planner.options) == ("cluster", "bounded", "wide")
    assert job.tables[0].pooling_factors == (1.0,)


@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        ({}, "tables"),
        ({"batch": {"size": 3}, "planner": {}, "cluster": {}}, "tables"),
        ({"model": {}}, "tables"),
        ({"model": {"kind": "tables"}, "train": {}}, "tables"),
        ({"model": {"kind": "dlrm"}}, "dlrm"),
        ({"model": {"bottom": [16]}}, "dlrm"),
        ({"model": {"interaction": "cat"}}, "dlrm"),
        ({"train": {}}, "dlrm"),
        ({"data": {}}, "dlrm"),
    ],
)
def test_a_job_without_layers_data_and_training_is_of_tables_alone(
    sections: dict[str, Any], kind: str
) -> None:
    assert parse_job({"tables": [TABLE]} | sections).model.kind == kind


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {},
            "job: expected [[tables]], or a [model] that needs none, got neither. "
            "A job to begin with: shardwright init.",
        ),
        ({"tables": []}, "job: tables: expected at least one [[tables]] entry, got none."),
        ({"tables": 3}, "job: tables: expected array, got 3."),
        (
            {"tables": [3]},
            "job: tables[0]: expected a section, { KEY = VALUE }, got 3. Known here: "
            f"{', '.join(sorted(TableSpec.__struct_fields__))}.",
        ),
        (
            {"tables": [TABLE], "batch": 3},
            "job: batch: expected a section, { KEY = VALUE }, got 3. Known here: sequence, size.",
        ),
        (
            {"tables": [TABLE], "batch": {"size": "x"}},
            "job: batch.size: expected int, got 'x'.",
        ),
        (
            {"tables": [TABLE], "batch": {"size": "8k"}},
            "job: batch.size: expected int, got '8k'. Did you mean 8192?",
        ),
        (
            {"tables": [TABLE], "batch": {"size": 1e3}},
            "job: batch.size: expected int, got 1000.0. Did you mean 1000?",
        ),
        ({"tables": [TABLE], "batch": {"size": 0}}, "job: batch.size: expected int >= 1, got 0."),
        (
            {"tables": [TABLE], "batch": {"size": 2**70}},
            f"job: batch.size: expected int <= 2147483647, got {2**70}.",
        ),
        (
            {"tables": [TABLE], "train": {"optimizer": "adm"}},
            "job: train.optimizer: expected one of sgd, sgd_momentum, adam, adamw, adamw_bf16, "
            "adamw_8bit, adamw_8bit_torchao, adamw_8bit_bitsandbytes, muon, adafactor, adagrad, "
            "got 'adm'. Did you mean 'adam'?",
        ),
        (
            {"tables": [TABLE], "train": {"learning_rate": float("nan")}},
            "job: train.learning_rate: expected float > 0.0, got nan.",
        ),
        (
            {"tables": [TABLE], "train": {"learning_rate": float("inf")}},
            "job: train.learning_rate: expected float <= 1000000.0, got inf.",
        ),
        (
            {"tables": [TABLE], "planner": {"units": {"top": "shrd"}}},
            "job: planner.units.top: expected one of shard, replicate, offload, got 'shrd'. "
            "Did you mean 'shard'?",
        ),
        (
            {"tables": [TABLE], "planner": {"units": {"bottom": "shard", "top": 3}}},
            "job: planner.units.top: expected one of shard, replicate, offload, got 3.",
        ),
        (
            {"tables": [TABLE], "cluster": {"compute_device": "gpu"}},
            "job: cluster.compute_device: expected one of cpu, cuda, got 'gpu'. "
            "Did you mean 'cuda'?",
        ),
        (
            {"tables": [TABLE], "cluster": {"ddr_cap": True}},
            "job: cluster.ddr_cap: expected int | str | null, got True.",
        ),
        (
            {"tables": [TABLE], "model": {"bottom": [64, 0]}},
            "job: model.bottom[1]: expected int >= 1, got 0.",
        ),
        (
            {"tables": [TABLE, TABLE]},
            "job: tables[1] 'a'.name: expected a name of its own, got one used twice.",
        ),
        (
            {"tables": [TABLE], "model": {"kind": "gpt"}},
            "job: model.kind: expected one of dlrm, transformer, tables, llama, python, got 'gpt'. "
            "Did you mean 'transformer'?",
        ),
        (
            {"tables": [TABLE], "planner": {"constants": "torchrec"}},
            "job: planner.constants: expected one of cluster, torchrec-1.9, additive, got "
            "'torchrec'. Did you mean 'torchrec-1.9'?",
        ),
        (
            {"tables": [TABLE], "planner": {"search": "greedy"}},
            "job: planner.search: expected one of bounded, proposers, exact, got 'greedy'.",
        ),
        (
            {"tables": [TABLE], "planner": {"options": "all"}},
            "job: planner.options: expected one of wide, torchrec, got 'all'.",
        ),
        (
            {"tables": [TABLE], "planner": {"time_limit": 0}},
            "job: planner.time_limit: expected float > 0.0, got 0.",
        ),
        (
            {"tables": [TABLE], "planner": {"reservation": {"percentage": 1}}},
            "job: planner.reservation.percentage: expected float < 1.0, got 1.",
        ),
        (
            {"tables": [TABLE], "planner": {"reservation": {"nbytes": "48"}}},
            "job: planner.reservation.nbytes: expected bytes as an integer or a text like "
            "'48 MiB', got '48'.",
        ),
        (
            {"tables": [TABLE], "planner": {"estimator": {"communication": ["fp32", "fp64"]}}},
            "job: planner.estimator.communication[1]: expected one of fp32, fp16, bf16, fp8, "
            "int8, got 'fp64'. Did you mean 'fp16'?",
        ),
        (
            {"tables": [TABLE], "cluster": {"world_size": 16385}},
            "job: cluster.world_size: expected int <= 16384, got 16385.",
        ),
        (
            {"tables": [TABLE], "cluster": {"pod_size": 0}},
            "job: cluster.pod_size: expected int >= 1, got 0.",
        ),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(
    document: dict[str, Any], message: str
) -> None:
    assert _refused(document) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "tables[0] 'a'.rows: expected a value from 1 to 1099511627776, got 0."),
        (
            {"rows": 2**70},
            f"tables[0] 'a'.rows: expected a value from 1 to 1099511627776, got {2**70}.",
        ),
        ({"rows": 1.5}, "tables[0].rows: expected int, got 1.5."),
        ({"dim": 65537}, "tables[0] 'a'.dim: expected a value from 1 to 65536, got 65537."),
        (
            {"min_partition": 65537},
            "tables[0] 'a'.min_partition: expected a value from 1 to 65536, got 65537.",
        ),
        (
            {"min_partition": 4, "dim": 65536},
            "tables[0] 'a'.min_partition: expected at most 4096 column shards, got 4 of 65536 "
            "columns.",
        ),
        (
            {"dtype": "fp31"},
            "tables[0] 'a'.dtype: expected one of fp64, fp32, bf16, fp16, fp8, fp8_e5m2, "
            "complex128, complex64, int64, int32, int16, int8, uint8, bool, got 'fp31'. "
            "Did you mean 'fp32'?",
        ),
        (
            {"pooling_factors": [1.0, 2.0], "num_poolings": [1.0]},
            "tables[0] 'a'.num_poolings: expected 2 values, as pooling_factors, got 1.",
        ),
        (
            {"batch_sizes": [1, 2]},
            "tables[0] 'a'.batch_sizes: expected 1 values, as pooling_factors, got 2.",
        ),
        (
            {"batch_sizes": [0]},
            "tables[0] 'a'.batch_sizes: expected a value from 1 to 2147483647, got 0.",
        ),
        (
            {"pooling_factors": []},
            "tables[0] 'a'.pooling_factors: expected one value per feature, got none.",
        ),
        (
            {"pooling_factors": [float("nan")]},
            "tables[0] 'a'.pooling_factors: expected a value from 0 to 1000000.0, got nan.",
        ),
        (
            {"num_poolings": [-1.0]},
            "tables[0] 'a'.num_poolings: expected a value from 0 to 1000000.0, got -1.0.",
        ),
        (
            {"name": "a b"},
            "tables[0].name: expected up to 200 characters without white space, got 'a b'.",
        ),
        (
            {"name": "a\n"},
            "tables[0].name: expected up to 200 characters without white space, got 'a\\n'.",
        ),
        (
            {"name": ""},
            "tables[0].name: expected up to 200 characters without white space, got ''.",
        ),
        (
            {"output_dtype": "half"},
            "tables[0] 'a'.output_dtype: expected one of fp64, fp32, bf16, fp16, fp8, fp8_e5m2, "
            "complex128, complex64, int64, int32, int16, int8, uint8, bool, got 'half'. "
            "Did you mean 'fp16'?",
        ),
        (
            {"kv_l1_mb": -1},
            "tables[0] 'a'.kv_l1_mb: expected a value from 0 to 1073741824, got -1.",
        ),
        (
            {"cache": {"load_factor": 1.5}},
            "tables[0] 'a'.cache.load_factor: expected a value from 0 to 1, got 1.5.",
        ),
        (
            {"cache": {"passes": 0}},
            "tables[0] 'a'.cache.passes: expected a value from 1 to 1000, got 0.",
        ),
        (
            {"cache": {"stats": [-1.0, 0.0, 0.0]}},
            "tables[0] 'a'.cache.stats: expected a value from 0 to 1000000000000000.0, got -1.0.",
        ),
        ({"optimizer": "adm"}, "tables[0].optimizer: expected one of none, sgd, adam, adagrad, "
            "rowwise_adagrad, partial_rowwise_adam, got 'adm'. Did you mean 'adam'?"),
        ({"compute_kernels": ["uvm"]}, "tables[0].compute_kernels[0]: expected one of dense, "
            "fused, fused_uvm, fused_uvm_caching, key_value, quant, quant_uvm, quant_uvm_caching, "
            "got 'uvm'. Did you mean 'fused_uvm'?"),
        ({"sharding_types": ["rowwise"]}, "tables[0].sharding_types[0]: expected one of "
            "data_parallel, table_wise, row_wise, column_wise, table_row_wise, "
            "table_column_wise, grid_shard, got 'rowwise'. Did you mean 'row_wise'?"),
    ],
)  # fmt: skip
def test_a_bad_table_is_named_with_what_was_expected(changes: dict[str, Any], message: str) -> None:
    assert _refused_table(**changes) == f"job: {message}"


@pytest.mark.parametrize("name", ["a b", "0", "a\n", "a.b", "ä", "", "a" * 101])
def test_tables_of_a_model_have_plain_names(name: str) -> None:
    document = {"model": {"bottom": [16]}, "tables": [TABLE | {"name": name}]}
    assert _refused(document) == (
        "job: tables[0].name: expected letters, digits and underscores, at most 100, got "
        f"{name[:100]!r}."
    )


@pytest.mark.parametrize("name", ["0", "a.b", "ä", "module/table:0", "a" * 200])
def test_tables_alone_may_have_any_name_without_white_space(name: str) -> None:
    assert parse_job({"tables": [TABLE | {"name": name}]}).tables[0].name == name


def test_the_key_that_a_table_without_rows_lacks_is_named() -> None:
    assert _refused({"tables": [{"name": "a", "dim": 4}]}) == (
        "job: tables[0].rows: expected a value, got none."
    )


def test_sizes_of_a_reservation_are_numbers_or_texts() -> None:
    sizes = {"kind": "absolute", "nbytes": "1.5 KiB"}
    found = parse_job({"tables": [TABLE], "planner": {"reservation": sizes}}).planner.reservation
    assert found.nbytes == 1536
    sizes = {"kind": "heuristic", "dense_bytes": "7 B"}
    found = parse_job({"tables": [TABLE], "planner": {"reservation": sizes}}).planner.reservation
    assert found.dense_bytes == 7


@pytest.mark.parametrize(
    ("document", "spot", "near"),
    [
        ({"bach": {"size": 3}}, "bach", "batch"),
        ({"batch": {"sise": 3}}, "batch.sise", "size"),
        ({"cluster": {"worldsize": 3}}, "cluster.worldsize", "world_size"),
        ({"tables": [TABLE | {"row": 3}]}, "tables[0].row", "rows"),
        ({"planner": {"constant": "additive"}}, "planner.constant", "constants"),
        ({"planner": {"reservation": {"bytes": 3}}}, "planner.reservation.bytes", "nbytes"),
        ({"planner": {"proposers": [{"kin": "grid"}]}}, "planner.proposers[0].kin", "kind"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    document: dict[str, Any], spot: str, near: str
) -> None:
    message = _refused({"tables": [TABLE]} | document)
    assert message.startswith(f"job: unknown key '{spot}'. Did you mean '{near}")
    assert "Known here: " in message


@pytest.mark.parametrize(
    ("document", "spot"),
    [
        ({"tables": [TABLE | {"fqn": "x"}]}, "tables[0].fqn"),
        ({"tables": [TABLE | {"": 3}]}, "tables[0]."),
        ({"planner": {"constraints": {"pin": {}}}}, "planner.constraints.pin"),
    ],
)
def test_an_unknown_key_that_is_like_none_is_refused_without_a_guess(
    document: dict[str, Any], spot: str
) -> None:
    message = _refused({"tables": [TABLE]} | document)
    assert message.startswith(f"job: unknown key '{spot}'. Known here: ")
    assert "fqn," not in message


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("[batch", "expected a job in TOML, got 'Expected ']' at the end of a table declaration"),
        ("size = " + "[" * 5000, "expected a job in TOML, got 'maximum recursion depth exceeded"),
        ("size = " + "1" * 5000, "expected a job in TOML, got 'Exceeds the limit"),
    ],
)
def test_a_text_that_is_no_toml_is_refused(tmp_path: Path, text: str, ending: str) -> None:
    path = _written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_job(path)
    assert str(caught.value).startswith(f"{path}: {ending}")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="expected a job in TOML, got ''utf-8' codec"):
        read_job(path)


def test_a_missing_job_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    with pytest.raises(InputError) as caught:
        read_job(path)
    assert str(caught.value) == (
        f"{path}: expected a job file, got no such file. "
        "Name a job in TOML, such as examples/demo.toml."
    )


def _overridden(folder: Path, *overrides: str) -> Job:
    return read_job(_written(folder, TEXT), overrides)


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    assert _overridden(tmp_path, "batch.size=8").batch.size == 8


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert _overridden(tmp_path, "batch.size=8", "batch.size=9").batch.size == 9


def test_an_override_makes_a_section_that_the_file_lacks(tmp_path: Path) -> None:
    assert _overridden(tmp_path, "train.steps=7").train.steps == 7


def test_an_override_may_leave_out_the_quotes_of_a_text(tmp_path: Path) -> None:
    job = _overridden(tmp_path, "train.optimizer=adam", "cluster.ddr_cap=48 MiB", "train.out=a=b")
    assert (job.train.optimizer, job.cluster.ddr_cap, job.train.out) == ("adam", "48 MiB", "a=b")


def test_an_override_may_be_any_toml_value(tmp_path: Path) -> None:
    job = _overridden(tmp_path, "model.bottom=[8, 16]", 'planner.units={top = "shard"}')
    assert job.model.bottom == (8, 16)
    assert job.planner.units == {"top": "shard"}


@pytest.mark.parametrize("text", ["batch.size", "size=3", ".size=3", "batch.=3", "", "="])
def test_an_override_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        _overridden(tmp_path, text)
    assert str(caught.value) == f"--set: expected section.key=value, got '{text}'."


def test_an_override_reaches_a_section_in_a_section(tmp_path: Path) -> None:
    job = _overridden(tmp_path, "planner.dense.prefetch=0", "planner.dense.reshard=true")
    assert (job.planner.dense.prefetch, job.planner.dense.reshard) == (0, True)


def test_an_override_reaches_a_key_of_one_table(tmp_path: Path) -> None:
    name = _overridden(tmp_path).tables[0].name
    job = _overridden(tmp_path, f"tables.{name}.sharding_types=['row_wise']")
    assert job.tables[0].sharding_types == ("row_wise",)
    assert all(table.sharding_types is None for table in job.tables[1:])


def test_a_step_with_dots_of_its_own_is_quoted(tmp_path: Path) -> None:
    job = _overridden(tmp_path, 'planner.units."layers.0"=shard')
    assert job.planner.units == {"layers.0": "shard"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tables.rows=3", "--set tables.rows: expected the name of an entry first, got 'rows'."),
        (
            "tables.no_such.rows=3",
            "--set tables.no_such: expected the name of an entry, got 'no_such'. There is 'a'",
        ),
        ("batch.size.more=3", "--set batch.size: expected a section, got "),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        _overridden(tmp_path, override)
    assert str(caught.value).startswith(said)


def test_an_override_of_tables_in_a_file_of_their_own_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path, 'model.tables = "tables.json"')
    with pytest.raises(InputError, match=r"\[\[tables\]\] in the job, not in tables.json"):
        read_job(path, ["tables.t0.rows=3"])


def test_an_override_is_checked_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown key 'batch.sise'. Did you mean 'size'"):
        _overridden(tmp_path, "batch.sise=3")


@pytest.mark.parametrize("value", ["[" * 5000, "1" * 5000])
def test_an_override_beyond_all_bounds_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match=r"batch.size: expected int, got str"):
        _overridden(tmp_path, f"batch.size={value}")


def test_a_transformer_needs_nothing_but_its_kind() -> None:
    job = parse_job({"model": {"kind": "transformer"}})
    assert (job.tables, job.data.kind, job.model.ffn_dim) == ((), "text", None)


@pytest.mark.parametrize("data", [{}, {"path": "book.txt"}])
def test_a_transformer_reads_text_unless_the_job_says_otherwise(data: dict[str, str]) -> None:
    model = {"kind": "transformer"}
    assert parse_job({"model": model, "data": data}).data.kind == "text"
    other = parse_job({"model": model, "data": data | {"kind": "criteo"}})
    assert other.data.kind == "criteo"


def test_text_is_its_own_test_file() -> None:
    model = {"kind": "transformer"}
    named = data_files(parse_job({"model": model, "data": {"path": "book.txt"}}))
    assert named == DataFiles("book.txt", "book.txt")
    made_up = data_files(parse_job({"model": model, "train": {"out": "runs/a"}}))
    assert made_up == DataFiles("runs/a/data/text.txt", "runs/a/data/text.txt")


def test_a_transformer_has_no_tables() -> None:
    document = {"model": {"kind": "transformer"}, "tables": [TABLE]}
    assert _refused(document) == "job: tables: expected none for a transformer, got 1."


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"kind": "transformer", "bottom": [8]},
            "model.bottom: expected no such key for kind 'transformer', got [8]. "
            "It belongs to kind 'dlrm'.",
        ),
        (
            {"kind": "dlrm", "layers": 3},
            "model.layers: expected no such key for kind 'dlrm', got 3. "
            "It belongs to kind 'transformer'.",
        ),
        (
            {"kind": "tables", "ffn_dim": 3},
            "model.ffn_dim: expected no such key for kind 'tables', got 3. "
            "It belongs to kind 'transformer'.",
        ),
    ],
)
def test_a_width_of_another_kind_of_model_is_refused(model: dict[str, Any], message: str) -> None:
    document = {"model": model} | ({} if model["kind"] == "transformer" else {"tables": [TABLE]})
    assert _refused(document) == f"job: {message}"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"layers": 0}}, "model.layers: expected int >= 1, got 0."),
        ({"model": {"layers": 5000}}, "model.layers: expected int <= 4096, got 5000."),
        ({"model": {"dim": 0}}, "model.dim: expected int >= 1, got 0."),
        ({"model": {"heads": -1}}, "model.heads: expected int >= 1, got -1."),
        ({"model": {"vocab": 2.5}}, "model.vocab: expected int, got 2.5."),
        ({"batch": {"sequence": 0}}, "batch.sequence: expected int >= 1, got 0."),
    ],
)
def test_a_size_that_no_transformer_has_is_refused(sections: dict[str, Any], message: str) -> None:
    model = {"kind": "transformer"} | sections.get("model", {})
    assert _refused({**sections, "model": model}) == f"job: {message}"


def test_a_million_tables_are_refused_by_their_number() -> None:
    tables = [{}] * 1_000_000
    with pytest.raises(InputError, match=r"job: tables: expected at most 100,000, got 1,000,000\."):
        parse_job({"tables": tables})


def test_all_unknown_keys_are_named_at_once() -> None:
    wrong = {"modle": {}, "batch": {"sise": 3}, "tables": [{"name": "a", "rows": 3, "xyz": 1}]}
    with pytest.raises(InputError) as error:
        parse_job(wrong, "job.toml")
    assert str(error.value) == (
        "job.toml: unknown keys 'tables[0].xyz', 'modle' (did you mean 'model'?), "
        "'batch.sise' (did you mean 'size'?)."
    )
