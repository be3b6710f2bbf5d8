"""``shardwright init``: what it writes can be planned as it is, and trained where it says so."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from shardwright.cli.init import TEMPLATES
from shardwright.data.synthetic import ClickModel
from shardwright.job.job import read_job
from shardwright.train.sources import source_of
from shardwright.train.sources.clicks import log_of, rows_of

NAMES = {"python": "my_model"}  # of the job that is written, where it is not its kind


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_job_is_written_and_can_be_read(call: Any, kind: str, tmp_path: Path) -> None:
    job = f"{NAMES.get(kind, kind)}.toml"
    written = call("init", kind)
    assert written.code == 0
    assert written.out.startswith(f"wrote {job}\n")
    assert f"  shardwright plan {job}\n" in written.out
    assert read_job(tmp_path / job).model.kind == kind
    for path in tmp_path.iterdir():
        assert not re.search("JOB|MODULE", path.read_text())


def test_a_name_is_said_in_all_that_is_written(call: Any, tmp_path: Path) -> None:
    written = call("init", "python", "-o", "ranker.toml")
    assert written.out.startswith("wrote ranker.toml\nwrote ranker.py\n")
    assert 'python = "ranker:build"' in (tmp_path / "ranker.toml").read_text()
    assert "shardwright plan ranker.toml" in (tmp_path / "ranker.toml").read_text()


def test_a_file_that_is_there_stays(call: Any, tmp_path: Path) -> None:
    (tmp_path / "my_model.toml").write_text("[train]\n")
    call("init", "python").refuses(2, "my_model.toml", "no file yet", "-o")
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.toml"]
    assert (tmp_path / "my_model.toml").read_text() == "[train]\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def build(batch): ...\ndef batches(batch): ...\n", "the job calls its build and batches"),
        ("from net import build\nbatches = build\n", "the job calls its build and batches"),
        ("def build(batch): ...\n", "the job needs its batches(), as docs/own-model.md"),
        ("class Net: ...\n", "the job needs its build() and batches(), as docs/own-model.md"),
        ("def build(\n", "no Python that can be read"),
        ("\0", "no Python that can be read"),
    ],
)
def test_a_module_that_is_there_stays_and_gets_a_job(
    call: Any, tmp_path: Path, code: str, said: str
) -> None:
    (tmp_path / "recs.py").write_text(code)
    written = call("init", "python", "-o", "recs.toml")
    assert written.code == 0
    assert written.out.startswith(f"wrote recs.toml\nkept recs.py: {said}")
    assert (tmp_path / "recs.py").read_text() == code
    assert 'python = "recs:build"' in (tmp_path / "recs.toml").read_text()


@pytest.mark.parametrize("name", ["my-model.toml", "models/ranker.toml", "2.toml"])
def test_a_name_that_python_cannot_import_is_refused(call: Any, name: str) -> None:
    call("init", "python", "-o", name).refuses(2, "--out", "my_model.toml", name)


def test_an_unknown_kind_is_answered_with_the_known_ones(call: Any) -> None:
    call("init", "bert").refuses(2, "bert", *TEMPLATES)


def test_tables_are_planned_as_they_are(call: Any) -> None:
    call("init", "tables")
    assert "Fits" in call("plan", "tables.toml").out


def test_a_configuration_of_torchtitan_becomes_a_job(call: Any, tmp_path: Path) -> None:
    parallelism = "[parallelism]\ndata_parallel_shard_degree = -1\n"
    model = '[model]\nname = "llama3"\nflavor = "8B"\n'
    (tmp_path / "titan.toml").write_text(f"[metrics]\nlog_freq = 1\n{model}{parallelism}")
    call("init", "--from", "torchtitan", "titan.toml").refuses(2, "titan.toml", "-n")
    written = call("init", "--from", "torchtitan", "titan.toml", "-n", 8, "-o", "job.toml")
    assert written.out.startswith("wrote job.toml\n  shardwright memory job.toml\n")
    assert "# Without effect on memory: metrics." in (tmp_path / "job.toml").read_text()
    assert read_job(tmp_path / "job.toml").cluster.world_size == 8


LOG = (
    "click;age;Preis €;user;seen;title;empty;country;price;day\n"
    "1;34;9.5;17.0;3|90;Blue, or so;;1;NULL;2026-03-01 09:30\n"
    "0;;2000.0;4.0;;Red;;1;3;2026-03-01 09:31\n"
    "0;51;0.5;17.0;7|3|5;Grün;;1;8;2026-03-02 10:00\n"
)


def test_a_log_becomes_a_job_that_reads_it(call: Any, tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text(LOG)
    written = call("init", "dlrm", "--data", "clicks.csv", "-o", "job.toml")
    assert written.out.startswith("wrote job.toml\n  shardwright inspect job.toml -o job.toml\n")
    job, text = read_job(tmp_path / "job.toml"), (tmp_path / "job.toml").read_text()
    assert (job.data.label, job.data.dense) == ("click", ("age", "Preis €", "price"))
    assert (job.data.logarithm, job.data.missing) == (("Preis €",), ("NULL",))
    assert job.data.scale["age"] == (42.5, 8.5)
    assert [(table.name, table.rows, table.pooling_factors) for table in job.tables] == [
        ("user", 18, (1.0,)),
        ("seen", 91, (1.6667,)),
        ("title", 20, (1.6667,)),
    ]
    for line in ("empty: empty", "country: always '1'", "day: a date, as '2026-03-01 09:30'"):
        assert f"# not used {line}\n" in text
    assert job.data.ids == "hash"
    assert "# ids title: 5 different ones, hashed, 4 rows for each\n" in text
    log = log_of(job, "clicks.csv")
    assert log.parsed(list(log.rows()), skip_bad_rows=False)[0].dense.shape == (3, 3)
    counted = call("inspect", "job.toml", "-o", "job.toml")
    assert counted.out == (
        "wrote zipf of 3 tables into job.toml\n"
        "left out: pooling_factors of 3 tables, as the job has them\n"
    )
    assert read_job(tmp_path / "job.toml").tables[1].zipf is not UNSET


def rows(count: int, *columns: Callable[[int], object]) -> str:
    return "".join(",".join(str(make(n)) for make in columns) + "\n" for n in range(count))


def test_a_part_of_a_log_is_held_out_for_scores(call: Any, tmp_path: Path) -> None:
    """Where there are rows for that, and with what scores of it cannot tell."""
    ordinary = (lambda n: n % 2, lambda n: n % 7, lambda n: f"u{n % 5}")
    for name, text, days, said in (
        ("few", rows(19, *ordinary), UNSET, "19 rows are too few to hold some out"),
        ("enough", rows(20, *ordinary), 10, ""),
        ("one", rows(40, lambda n: 1, *ordinary[1:]), 10, "every label is 1: nothing can"),
        ("sorted", rows(60, lambda n: n // 30, *ordinary[1:]), 10, "last rows, which are held"),
    ):
        (tmp_path / f"{name}.csv").write_text("click,age,user\n" + text)
        call("init", "--data", f"{name}.csv", "-o", f"{name}.toml")
        written = (tmp_path / f"{name}.toml").read_text()
        job = read_job(tmp_path / f"{name}.toml")
        assert job.data.days == days
        assert job.train.steps == 20  # a short log is not learned by heart
        assert ("days = 10  # the last tenth of the rows is held out" in written) == (days == 10)
        assert said in written
        assert ("AUC" in written) == bool(said)


def test_whole_numbers_below_zero_are_ids_too(call: Any, tmp_path: Path) -> None:
    """-1 of a user who is not known, and hashes of 64 bits with a sign."""
    signed = rows(40, lambda n: n % 2, lambda n: n / 2, lambda n: n % 9 - 1, lambda n: -(7**n) or 1)
    (tmp_path / "log.csv").write_text("click,share,user,hashed\n" + signed)
    call("init", "--data", "log.csv")
    job = read_job(tmp_path / "dlrm.toml")
    assert (job.data.ids, job.data.dense) == ("hash", ("share",))
    assert [(table.name, table.rows) for table in job.tables] == [("user", 36), ("hashed", 160)]


def test_of_days_the_first_is_looked_at_and_the_others_have_other_ids(
    call: Any, tmp_path: Path
) -> None:
    (tmp_path / "days").mkdir()
    for day in range(2):
        text = rows(30, lambda n: n % 2, lambda n: n % 7, lambda n: n % 5)
        (tmp_path / "days" / f"day_{day}.csv").write_text("click,age,user\n" + text)
    call("init", "--data", "days")
    job = read_job(tmp_path / "dlrm.toml")
    assert (job.data.ids, job.data.days, job.train.steps) == ("modulo", UNSET, 100)


def test_a_log_without_a_header_has_numbers_for_names(call: Any, tmp_path: Path) -> None:
    text = rows(30, lambda n: n % 2, lambda n: n / 4, lambda n: f"u{n % 5}")
    (tmp_path / "log.tsv.gz").write_bytes(gzip.compress(text.replace(",", "\t").encode()))
    call("init", "--data", "log.tsv.gz")
    job = read_job(tmp_path / "dlrm.toml")
    assert job.data.header == ("column_1", "column_2", "column_3")
    assert (job.data.label, job.data.dense) == ("column_1", ("column_2",))
    source_of(job).check()
    log = rows_of(job, "train")
    assert log is not None
    assert log.count() == 27
    assert log.parsed(list(log.rows())[:2], skip_bad_rows=False)[0].dense.shape == (2, 1)


def test_what_columns_may_be_is_said_where_they_are_not_used(call: Any, tmp_path: Path) -> None:
    text = "click,age,age,price,user,request,vector,cost\n" + rows(
        1000,
        lambda n: n % 2,
        lambda n: 1,
        lambda n: 2,
        lambda n: f'"{n},5"',
        lambda n: f"u{n % 5} null",
        lambda n: f"r{n:x}",
        lambda n: f"{n / 4}|0.5",
        lambda n: "?" if n == 7 else n / 8,
    )
    (tmp_path / "log.csv").write_text(text + "1,2\n")
    call("init", "--data", "log.csv")
    written = (tmp_path / "dlrm.toml").read_text()
    for line in (
        "label click; dense cost",
        "not used age: several columns of that name",
        "not used price: numbers with a comma in place of a point, as '0,5'",
        "not used request: another one in every row",
        "not used vector: several numbers, as '0.0|0.5'",
        "nothing is meant by '?', 'null' (data.missing)",
        "bad rows: 1; training stops at the first one without data.skip_bad_rows",
    ):
        assert f"# {line}\n" in written
    assert [table.name for table in read_job(tmp_path / "dlrm.toml").tables] == ["user"]


def test_hashes_become_tables_that_they_are_taken_modulo_of(call: Any, tmp_path: Path) -> None:
    text = rows(50, lambda n: n % 2, lambda n: n, lambda n: n * 2654435761)
    (tmp_path / "clicks.csv").write_text("y,age,item-id\n" + text)
    call("init", "dlrm", "--data", "clicks.csv")
    job = read_job(tmp_path / "dlrm.toml")
    (table,) = job.tables
    assert (job.data.ids, table.name, table.rows) == ("modulo", "item_id", 200)
    assert table.feature_names == ("item-id",)


def test_a_log_of_criteo_s_becomes_a_job_of_that_kind(call: Any, tmp_path: Path) -> None:
    ClickModel().write(tmp_path / "day_0.tsv", rows=40)
    call("init", "--data", "day_0.tsv")
    job = read_job(tmp_path / "dlrm.toml")
    assert (job.data.kind, len(job.tables), job.model.dense_features) == ("criteo", 26, 13)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "clicks.csv: expected data rows, got an empty file"),
        ("click,age,user\n", "clicks.csv: expected data rows, got only a header"),
        (" \n", "got a line of blanks"),
        ("click,age\n1,2,3\n", "csv:2, all rows: expected 2 fields, as in the first line, got 3"),
        ("click,age\n-1,2\n", "'click' (has '-1')"),
        ("age,user\n34,17\n5,3\n", "expected a column of 0 and 1, the label, got none"),
        ("click,user\n1,17\n0,3\n", "expected a column of numbers, which a DLRM takes, got none"),
        ("click,age\n1,17\n0,3\n", "expected a column of ids, which a DLRM takes, got none"),
        ("PAR1", "expected a readable file"),
    ],
)
def test_a_log_without_what_a_dlrm_takes_is_refused(
    call: Any, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "clicks.csv").write_text(text)
    call("init", "dlrm", "--data", "clicks.csv").refuses(2, said)
    call("init", "llama", "--data", "clicks.csv").refuses(2, "--data: expected kind dlrm")
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]


MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 500 --seq-length 32 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer --lr 1"
)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("typed", [False, True])
def test_arguments_of_megatron_become_a_job(call: Any, tmp_path: Path, typed: bool) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {MEGATRON}\n")
    written = call("init", "--from", "megatron", MEGATRON if typed else "run.sh", "-n", 4)
    assert written.out.startswith("wrote megatron.toml\n  shardwright memory megatron.toml\n")
    assert "# Without effect on memory: --lr." in (tmp_path / "megatron.toml").read_text()
    assert call("memory", "megatron.toml").code == 0


def test_a_configuration_of_deepspeed_becomes_a_job_beside_one(call: Any, tmp_path: Path) -> None:
    config = """{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "overlap_comm": true},
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10}"""
    (tmp_path / "ds.json").write_text(config)
    call("init", "llama")
    call("init", "--from", "deepspeed", "ds.json").refuses(2, "--job", "DeepSpeed's JSON names no")
    words = (
        "init",
        "--from",
        "deepspeed",
        "ds.json",
        "--job",
        "llama.toml",
        "-n",
        4,
        "-o",
        "a.toml",
    )
    assert call(*words).out.startswith("wrote a.toml\n  shardwright memory a.toml\n")
    text = (tmp_path / "a.toml").read_text()
    assert "# Without effect on memory: steps_per_print.\n" in text
    assert "# Not read, whatever they change: zero_optimization.overlap_comm.\n" in text
    assert read_job(tmp_path / "a.toml").batch.size == 2


def test_a_model_s_configuration_becomes_a_job(call: Any, tmp_path: Path) -> None:
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "odd": 3}))
    written = call("init", "--from", "huggingface", "config.json", "-n", 8, "-o", "job.toml")
    assert written.out.startswith("wrote job.toml\n  shardwright memory job.toml\n")
    text = (tmp_path / "job.toml").read_text()
    said = (
        "computed in bfloat16, its torch_dtype; batches of 1 x 2048 tokens a rank; 8 ranks; AdamW"
    )
    assert f"# Assumed: {said}.\n" in text
    assert "# Not read, whatever they change: odd.\n" in text
    assert read_job(tmp_path / "job.toml").model.hf_config == "config.json"
    (tmp_path / "bad.json").write_text('{"model_type": "llama", "hidden_size": 0}')
    refused = call("init", "--from", "huggingface", "bad.json")
    refused.refuses(2, "bad.json: hidden_size: expected a whole number from 1, got 0")
    assert refused.err.count("bad.json") == 1


def test_a_plan_of_torchrec_becomes_a_job_of_tables(call: Any, tmp_path: Path) -> None:
    shards = [{"shard_offsets": [0, 0], "shard_sizes": [70, 16], "placement": "rank:1/cuda:1"}]
    table = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1]}
    plan = {"plan": {"ebc": {"shops": table | {"shards": shards}}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    written = call("init", "--from", "torchrec", "plan.json", "-o", "job.toml")
    assert written.out == "wrote job.toml\n  shardwright plan job.toml\n"
    assert read_job(tmp_path / "job.toml").planner.constraints.ranks == {"shops": (1,)}
    call("init", "--from", "torchrec", "nothing.json").refuses(2, "no such file")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "neither"),
        (("llama", "--from", "torchtitan", "x.toml"), "both"),
        (("--from", "nemo", "x.toml"), "'nemo'"),
        (("--from", "torchtitan", "x.toml"), "no such file"),
        (("--from", "megatron", "x.sh"), "no such file"),
        (("--from", "megatron", "--num-layers 2"), "--hidden-size"),
    ],
)
def test_what_init_cannot_write_is_refused(call: Any, words: tuple[str, ...], said: str) -> None:
    call("init", *words).refuses(2, said)


def trained(call: Any, kind: str, steps: int) -> str:
    """What is said of a run of what is written."""
    assert call("init", kind).code == 0
    done = call("train", f"{NAMES.get(kind, kind)}.toml", "--set", f"train.steps={steps}")
    assert done.code == 0, done.err
    said: str = done.out
    return said


AS_PLANNED = "exact bytes equal on 2 of 2 ranks, peak "


@pytest.mark.product  # daily those of the tour and of examples/
@pytest.mark.parametrize("kind", ["dlrm", "llama"])
def test_what_is_written_is_trained_with_the_memory_of_its_plan(kind: str, call: Any) -> None:
    assert AS_PLANNED in trained(call, kind, 6)


@pytest.mark.product  # daily the tour trains it
def test_the_example_of_a_module_learns_with_the_memory_of_its_plan(call: Any) -> None:
    said = trained(call, "python", 40)
    assert AS_PLANNED in said
    found = re.search(r"loss ([\d.]+) at the start, ([\d.]+) at step 40;", said)
    assert found is not None
    first, last = map(float, found.groups())
    assert last < 0.7 * first
