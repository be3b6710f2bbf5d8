from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.cli.train import _quality_lines
from shardwright.core.errors import InputError
from shardwright.data.cache import CachedRows
from shardwright.data.days import PARTS
from shardwright.data.synthetic import ClickModel
from shardwright.data.tokens import write_text
from shardwright.job.job import Job, parse_job
from shardwright.job.model_of_job import check_model
from shardwright.train.sources import source_of
from shardwright.train.sources.clicks import cache_of, rows_of
from shardwright.train.sources.made_up import make_up, read_facts


def _text(tmp_path: Path, **sections: Any) -> Job:
    base: dict[str, Any] = {
        "model": {"kind": "transformer", "dim": 8, "heads": 2},
        "batch": {"size": 2, "sequence": 16},
        "train": {"out": str(tmp_path)},
    }
    return parse_job({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def _clicks(tmp_path: Path, **sections: Any) -> Job:
    tables = [{"name": f"t{i}", "rows": 4, "dim": 16} for i in range(26)]
    return parse_job(
        {
            "model": {"kind": "dlrm"},
            "data": {"kind": "synthetic", "rows": 200, "test_rows": 100},
            "train": {"out": str(tmp_path)},
            "tables": tables,
        }
        | sections
    )


def _refused(job: Job) -> str:
    with pytest.raises(InputError) as caught:
        source_of(job).check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tables_alone_have_nothing_to_train_on() -> None:
    with pytest.raises(InputError, match="expected a model to train, got tables alone"):
        source_of(parse_job({"tables": [{"name": "a", "rows": 3, "dim": 4}]}))


def test_a_transformer_does_not_read_click_logs(tmp_path: Path) -> None:
    job = _text(tmp_path, data={"kind": "criteo"})
    assert _refused(job) == "data.kind: expected 'text' for a transformer, got 'criteo'."


def test_a_dlrm_does_not_read_text(tmp_path: Path) -> None:
    job = _clicks(tmp_path, data={"kind": "text"})
    wanted = "'criteo', 'columns' or 'synthetic' for a dlrm"
    assert _refused(job) == f"data.kind: expected {wanted}, got 'text'."


BAGS = [
    {"name": "user", "rows": 40, "dim": 16},
    {"name": "item", "rows": 30, "dim": 8, "pooling_factors": [2.5], "features": ["seen"]},
]


def _bags(tmp_path: Path, tables: list[dict[str, Any]] = BAGS, **data: Any) -> Job:
    model = {"kind": "dlrm", "dense_features": 2, "interaction": "cat"}
    return _clicks(tmp_path, tables=tables, model=model, data=data)


def test_rows_of_any_tables_are_made_up_and_read_back_with_their_best_score(tmp_path: Path) -> None:
    job = _bags(tmp_path, kind="synthetic", rows=300, test_rows=100)
    source = source_of(job)
    source.check()
    source.prepare()
    assert source.samples() == 300
    with (tmp_path / "data" / "train.tsv").open() as file:
        assert file.readline() == "label\tI1\tI2\tuser\tseen\n"
    assert 0.5 < read_facts(tmp_path / "data" / "test.tsv")["bayes_auc"] < 1


def test_a_log_of_named_columns_is_checked_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("click,age,price,user,seen\n1,2,3,39,1 2 29\n")
    named: dict[str, Any] = {"kind": "columns", "path": str(path), "label": "click"}
    right = _bags(tmp_path, dense=["age", "price"], **named)
    source_of(right).check()
    assert source_of(right).samples() == 1
    path.write_text("click,age,price,user,seen\n1,2,3,40,1 2 29\n")
    assert f"{path}:2, column 'user': expected ids from 0 to 39" in _refused(right)
    taken = _bags(tmp_path, dense=["age", "price"], ids="modulo", **named)
    source_of(taken).check()
    assert "one column 'I1', got none. There are 'click', " in _refused(_bags(tmp_path, **named))
    short = _bags(tmp_path, dense=["age"], **named)
    assert _refused(short) == "data.dense: expected 2 columns, as model.dense_features, got 1."


def test_what_other_logs_do_not_have_is_refused(tmp_path: Path) -> None:
    assert _refused(_bags(tmp_path, kind="criteo", path="log.tsv")).startswith(
        "data.kind 'criteo': expected tables of one dim with one unweighted id each, got 'item'. "
    )
    for key, value in {"label": "click", "dense": ["a", "b"], "ids": "exact"}.items():
        with pytest.raises(InputError, match=f"data.{key}: expected none beside data.kind 'synth"):
            _bags(tmp_path, kind="synthetic", **{key: value})
    weighted = [{**BAGS[0], "module_weighted": True}]
    assert "expected tables without weights" in _refused(
        _bags(tmp_path, weighted, kind="synthetic")
    )


def test_bad_rows_that_are_held_out_are_counted_too(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("click,age,user,seen\n1,34,3,1 2\n0,x,3,4\n0,,3,4\n,1,1,1\n")
    given = {"kind": "columns", "path": str(log), "test_path": str(log), "skip_bad_rows": True}
    job = _bags(tmp_path, **given, label="click", dense=["age"] * 2, scale={"age": [30.0, 2.0]})
    task = source_of(job).task()
    ((dense, *_), numbers), *_ = task.held_out(0, 1)
    assert (dense[:, 0].tolist(), numbers.tolist()) == ([2.0, 0.0], [0, 2])
    assert task.bad_rows == 2
    job = _bags(tmp_path, **given, label="click", dense=["age"] * 2, logarithm=["ages"])
    assert _refused(job) == "data.logarithm: expected names in data.dense, got 'ages'."


def test_a_feature_reads_one_table(tmp_path: Path) -> None:
    job = _bags(tmp_path, [*BAGS, {"name": "seen", "rows": 3, "dim": 4}], kind="synthetic")
    with pytest.raises(InputError, match=r"tables 'seen'.features: expected a feature of its own"):
        check_model(job)


def test_a_vocabulary_without_every_byte_is_refused(tmp_path: Path) -> None:
    job = _text(tmp_path, model={"vocab": 255})
    assert _refused(job) == (
        "model.vocab: expected at least 256 for text, whose bytes are the tokens, got 255."
    )


def test_text_has_no_test_file(tmp_path: Path) -> None:
    job = _text(tmp_path, data={"test_path": "other.txt"})
    assert _refused(job) == (
        "data.test_path: expected none for text, got 'other.txt'. "
        "The last tenth of data.path is held out."
    )


def test_a_missing_text_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = str(tmp_path / "none.txt")
    message = _refused(_text(tmp_path, data={"path": path}))
    assert message.startswith(f"{path}: expected a text file, got no such file.")


def test_a_text_that_is_too_short_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short")
    message = _refused(_text(tmp_path, data={"path": str(path)}))
    assert message.startswith(f"{path}: expected at least 33 bytes, for two windows of 16 tokens")


def test_a_named_text_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abc " * 100)
    job = _text(tmp_path, data={"path": str(path)})
    source_of(job).prepare()
    assert path.read_text() == "abc " * 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["book.txt"]


def test_a_made_up_text_is_too_short_for_endless_sequences(tmp_path: Path) -> None:
    job = _text(tmp_path, batch={"sequence": 10**6})
    with pytest.raises(InputError, match=r"text.txt: expected at least 2000001 bytes"):
        source_of(job).prepare()


def test_the_quality_of_text_is_nats_per_token_and_bits_per_byte(tmp_path: Path) -> None:
    job = _text(tmp_path)
    source = source_of(job)
    source.prepare()
    found = source.quality(np.array([[0, 16, 24.0], [1, 16, 40.0]]))
    assert found is not None
    assert (found.rows, found.auc, found.log_loss) == (32, None, 2.0)
    assert found.bits_per_byte == pytest.approx(2.0 / math.log(2))
    assert found.best_log_loss == write_text(tmp_path / "again").bayes_log_loss


def test_the_best_loss_of_a_named_text_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abc " * 100)
    job = _text(tmp_path, data={"path": str(path)})
    found = source_of(job).quality(np.array([[0, 16, 24.0]]))
    assert found is not None
    assert found.best_log_loss is None


def test_the_quality_of_clicks_is_auc_and_log_loss_beside_the_best(tmp_path: Path) -> None:
    job = _clicks(tmp_path)
    source = source_of(job)
    source.check()
    source.prepare()
    found = source.quality(np.array([[0, 1, 0.0], [1, 0, -1.0], [2, 1, 2.0]]))
    assert found is not None
    assert (found.rows, found.auc, found.bits_per_byte) == (3, 1.0, None)
    assert found.best_auc is not None
    assert found.best_auc > 0.5


def test_clicks_of_one_kind_have_no_auc(tmp_path: Path) -> None:
    job = _clicks(tmp_path)
    found = source_of(job).quality(np.array([[0, 1, 0.0], [1, 1, -1.0]]))
    assert found is not None
    assert found.auc is None
    first, _ = _quality_lines(found)
    assert first.startswith("held out, 2 rows: no AUC, for all have one label, log loss ")


@pytest.mark.parametrize("make", [_text, _clicks], ids=["text", "clicks"])
def test_without_scores_there_is_no_quality(tmp_path: Path, make: Any) -> None:
    job = make(tmp_path)
    assert source_of(job).quality(np.empty((0, 3))) is None


def _rows(path: Path, text: str) -> None:
    def write(part: Path) -> dict[str, float]:
        part.write_text(text)
        return {"bayes_log_loss": 0.5}

    make_up(path, write)


def test_made_up_rows_are_replaced_by_the_next_ones(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.tsv"
    for text in ("one\n", "two\n", "two\n", "three\n"):
        _rows(path, text)
        assert path.read_text() == text
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert read_facts(path) == {"bayes_log_loss": 0.5, "sha256": digest}
    assert sorted(p.name for p in path.parent.iterdir()) == ["train.facts.json", "train.tsv"]


def test_rows_that_were_changed_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    _rows(path, "one\n")
    path.write_text("one\nand mine\n")
    with pytest.raises(InputError, match=r"train.tsv: expected rows that a run made up, got other"):
        _rows(path, "two\n")
    assert path.read_text() == "one\nand mine\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.facts.json", "train.tsv"]


def test_rows_of_an_earlier_version_are_known_if_they_are_made_again(tmp_path: Path) -> None:
    """Facts had no digest then."""
    path = tmp_path / "train.tsv"
    path.write_text("one\n")
    (tmp_path / "train.facts.json").write_text('{"bayes_log_loss": 0.5}')
    _rows(path, "one\n")
    _rows(path, "two\n")
    assert path.read_text() == "two\n"


@pytest.mark.parametrize("what", ["a folder", "a dangling link", "a link to mine"])
def test_what_is_no_file_of_a_run_is_not_replaced(tmp_path: Path, what: str) -> None:
    path, mine = tmp_path / "train.tsv", tmp_path / "mine.tsv"
    if what == "a folder":
        path.mkdir()
    else:
        path.symlink_to(mine)
    if what == "a link to mine":
        mine.write_text("mine\n")
    with pytest.raises(
        InputError, match=r"train.tsv: expected .*\. Move it away or choose another"
    ):
        _rows(path, "one\n")
    assert path.is_dir() or path.is_symlink()
    assert not mine.exists() or mine.read_text() == "mine\n"


KILLED_AT_EACH_POINT = """
import os, signal, sys
from pathlib import Path
from shardwright.train.sources.made_up import make_up

path, changes = Path(sys.argv[1]), ("unlink", "replace")

def rows(text):
    def write(part):
        part.write_text(text)
        return {"bayes_log_loss": 0.5}
    make_up(path, write)

rows("first")
for point in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        passed = []
        def killing(change):
            def changes(*arguments):
                if len(passed) == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed.append(change(*arguments))
            return changes
        for name in changes:
            setattr(os, name, killing(getattr(os, name)))
        rows(f"killed at {point}")
        os._exit(0)
    print(os.WIFSIGNALED(os.waitpid(child, 0)[1]), path.read_text() if path.exists() else "-")
    rows(f"after {point}")
print(path.read_text())
"""


def test_a_run_that_is_killed_as_it_makes_rows_up_leaves_none_that_the_next_refuses(
    tmp_path: Path,
) -> None:
    """Killed before the old rows go, before the facts, before the rows, before the part is gone."""
    command = [sys.executable, "-c", KILLED_AT_EACH_POINT, str(tmp_path / "train.tsv"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True first",
        "True -",
        "True -",
        "True killed at 3",
        "after 3",
    ]


def test_made_up_days_are_written_once_and_the_best_of_both_halves_is_known(tmp_path: Path) -> None:
    data = {"kind": "synthetic", "rows": 700, "days": 7, "drift": 0.2, "zipf": 0.9}
    job, said = _clicks(tmp_path, data=data), list[str]()
    source = source_of(job)
    source.check()
    source.prepare(said.append)
    assert [path.name for path in (tmp_path / "data").iterdir()].count("train.tsv") == 1
    parts = {part: log.count() for part in PARTS if (log := rows_of(job, part))}
    assert parts == {"train": 600, "validation": 50, "test": 50}
    scores = np.stack([np.arange(50.0), np.arange(50.0) % 2, np.zeros(50)], 1)
    test, validation = (source.quality(scores, part) for part in ("test", "validation"))
    assert test is not None
    assert validation is not None
    assert test.best_auc != validation.best_auc
    (best,) = said
    assert best.startswith("700 rows made up; the best possible on held-out ones: AUC 0.")
    assert f"accuracy {test.best_accuracy:.4f}" in best


def test_a_cache_is_written_once_and_anew_for_other_data(tmp_path: Path) -> None:
    data = {"kind": "synthetic", "rows": 300, "days": 3, "cache": str(tmp_path / "rows")}
    job = _clicks(tmp_path, data=data)

    def prepared(job: Job) -> list[str]:
        said: list[str] = []
        source_of(job).prepare(said.append)
        return [text for text in said if "writing" in text]

    assert len(prepared(job)) == 3  # of training, validation and test
    assert prepared(job) == []
    assert source_of(job).samples() == 200
    assert len(prepared(_clicks(tmp_path, data={**data, "seed": 1}))) == 3
    (tmp_path / "file").touch()
    said = _refused(_clicks(tmp_path, data={**data, "cache": str(tmp_path / "file")}))
    assert "data.cache: expected a folder, got the file" in said


def test_a_log_on_disk_is_cached_by_place_size_and_date(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for day in range(3):
        ClickModel(cardinalities=(4,) * 26, seed=day).write(tmp_path / "log" / f"day_{day}", 20)
    given = {"kind": "criteo", "path": str(tmp_path / "log"), "cache": str(tmp_path / "rows")}
    job = _clicks(tmp_path, data={**given, "drop_negatives": 0.5})
    source_of(job).check()
    source_of(job).prepare()
    before = cache_of(job, "train")
    assert before is not None
    kept = len(CachedRows(before))
    log = rows_of(job, "train")
    assert log is not None
    assert kept == log.count() < 40
    ClickModel(cardinalities=(4,) * 26, seed=7).write(tmp_path / "log" / "day_1", 21)
    assert cache_of(job, "train") != before


def test_days_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    given = {"kind": "criteo", "path": "log"}
    for more, wanted in (
        ({"days": 7, "test_path": "held"}, "data.test_path: expected none beside data.days"),
        ({"drift": 0.5}, "data.drift: expected none beside data.kind 'criteo'"),
        ({"kind": "synthetic", "path": "", "drift": 0.5}, "data.drift: expected none without"),
        ({"days": 1}, "data.days"),
        ({"drop_negatives": 1.0}, "data.drop_negatives"),
    ):
        with pytest.raises(InputError, match=wanted):
            _clicks(tmp_path, data={**given, **more})
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day_0").touch()
    said = _refused(_clicks(tmp_path, data={"kind": "criteo", "path": str(tmp_path / "days")}))
    assert "expected files day_0, day_1, ..., two at least, got day_0" in said
