"""What ``train`` refuses before it starts any process or writes any row."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plans import plan

from shardwright.cli.main import parsers
from shardwright.cli.train import _again
from shardwright.core.document import encode_document
from shardwright.job.job import read_job
from shardwright.job.plan import Plan
from shardwright.launcher.ending import OUTCOME_SCHEMA, RunOutcome
from shardwright.runtime.checkpoint.files import MANIFEST
from shardwright.train.session import Session

CRITEO = Path(__file__).parents[2] / "examples" / "criteo_csv.toml"
TRANSFORMER = CRITEO.with_name("transformer.toml")
HEADER = ",".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
ROW = ",".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26])


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def planned(*settings: str) -> bytes:
    """The click-log example's plan."""
    return encode_document(plan(read_job(CRITEO, settings)))


@pytest.fixture
def train(call: Any, tmp_path: Path) -> Callable[..., Any]:
    """Train the click-log example on a file of this text."""

    def started(text: str | bytes, *more: str) -> Any:
        data = text.encode() if isinstance(text, str) else text
        (tmp_path / "clicks.csv").write_bytes(data)
        (tmp_path / "clicks.json").write_bytes(planned("data.path=clicks.csv"))
        return call("train", "clicks.json", *more)

    return started


@pytest.fixture
def made_up(call: Any, tmp_path: Path) -> Callable[..., Any]:
    """Train the click-log example on rows that the run makes up."""

    def started(out: str) -> Any:
        settings = ("data.kind=synthetic", "data.rows=10", "data.test_rows=5")
        path = tmp_path / "synthetic.json"
        path.write_bytes(planned(*settings))
        return call("train", path, "--out", out)

    return started


@pytest.mark.slow
def test_without_a_data_file_it_says_how_to_name_one(call: Any) -> None:
    call("train", CRITEO).refuses(2, "data.path", "--set data.path=FILE")


@pytest.mark.slow
def test_a_run_s_folder_is_chosen_without_touching_the_job(call: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "outcome.json").write_text("{}")
    refusal = "mine: expected a new folder, or one of an earlier run, got one with a outcome.json"
    call("train", TRANSFORMER, "--out", "mine").refuses(2, refusal)


@pytest.mark.slow
def test_a_missing_data_file_is_named(call: Any) -> None:
    call("train", CRITEO, "--set", "data.path=none.csv").refuses(2, "none.csv", "data.path")


@pytest.mark.slow
def test_a_directory_is_no_data_file(call: Any, tmp_path: Path) -> None:
    answer = call("train", CRITEO, "--set", f"data.path={tmp_path}")
    answer.refuses(2, str(tmp_path), "an empty folder")


@pytest.mark.slow
def test_a_missing_test_file_is_named(call: Any, tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text(f"{HEADER}\n{ROW}\n")
    words = ("--set", "data.path=clicks.csv", "--set", "data.test_path=none.csv")
    call("train", CRITEO, *words).refuses(2, "none.csv")


@pytest.mark.slow
def test_a_truncated_row_is_shown_with_file_and_line(train: Any) -> None:
    row = ",".join(ROW.split(",")[:12])
    train(f"{HEADER}\n{row}\n").refuses(2, "clicks.csv:2", "40 fields", "12")


def test_a_row_that_is_too_wide_is_shown_with_file_and_line(train: Any) -> None:
    row = "\t".join([*ROW.split(","), "7"])
    train(f"{row}\n").refuses(2, "clicks.csv:1", "40 fields", "41")


def test_a_bad_field_is_shown_with_file_line_and_field(train: Any) -> None:
    row = ROW.replace("0a1b2c3d", "wxyz", 1)
    train(f"{HEADER}\n{row}\n").refuses(2, "clicks.csv:2, field C1", "wxyz")


def test_a_wrong_header_is_shown_with_its_column(train: Any) -> None:
    train(f"{HEADER.replace('I7', 'J7')}\n{ROW}\n").refuses(2, "clicks.csv:1", "'I7'", "'J7'")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("text", ["", f"{HEADER}\n", "hello\n", "\x1f\x8b\x08binary"])
def test_what_is_no_click_log_is_refused(train: Any, text: str) -> None:
    train(text.encode("latin-1")).refuses(2, "clicks.csv")


def test_a_model_that_click_logs_do_not_fit_is_refused(call: Any, job: Path) -> None:
    call("train", job, "--set", "data.path=x").refuses(2, "26 tables", "3 tables")


@pytest.mark.slow
def test_no_rows_are_written_for_a_job_that_does_not_fit(call: Any, tmp_path: Path) -> None:
    words = ("--set", "data.kind=synthetic", "--set", "cluster.ddr_cap=2 MiB")
    call("train", CRITEO, *words).refuses(3, "no plan found that fits")
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_a_file_is_refused(made_up: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    made_up("taken").refuses(2, "taken")


THREADS = ("--set", "data.kind=synthetic", "--set", "train.forward=parallel")


@pytest.mark.slow
def test_ranks_that_are_threads_are_not_profiled(call: Any) -> None:
    words = (*THREADS, "--set", "data.rows=10", "--profile", "2")
    call("train", CRITEO, *words).refuses(2, "--profile", "train.forward 'parallel', got 2.")


@pytest.mark.slow
def test_a_torchrun_of_one_s_own_starts_no_threads(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("plan", CRITEO, *THREADS, "-o", tmp_path / "p.json")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    answer = call("run", tmp_path / "p.json", "--out", tmp_path / "run")
    answer.refuses(2, "train.forward: expected 'distributed' under a torchrun of your own")
    answer = call("run", tmp_path / "p.json", "--out", tmp_path / "run", "--threads")
    answer.refuses(2, "--threads: expected to be set by shardwright train")


def test_threads_are_of_a_dlrm(call: Any) -> None:
    words = ("--set", "train.forward=parallel")
    call("plan", TRANSFORMER, *words).refuses(2, "train.forward: expected none beside model.kind")
    call("plan", TRANSFORMER, "-o", "p.json")
    words = ("--forward", "parallel")
    call("train", "p.json", *words).refuses(2, "--forward: expected none beside model.kind 'trans")
    call("plan", CRITEO, "--set", "train.forward=both").refuses(2, "train.forward", "'both'")


def test_other_ranks_than_the_plans_are_bad_input(call: Any, plan: Path) -> None:
    command = f"shardwright plan JOB.toml -n 4 -o {plan}"
    call("train", plan, "-n", 4).refuses(2, "-n", "2", "got 4", command)


def test_a_plan_takes_no_overrides(call: Any, plan: Path) -> None:
    call("train", plan, "--set", "train.steps=1").refuses(2, "--set", "Plan again")


def test_a_plan_edited_by_hand_is_4(call: Any, edit: Any) -> None:
    call("train", edit(gap=0.0)).refuses(4, "fingerprint")


def test_a_plan_without_a_data_file_is_refused(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    call("plan", CRITEO, "-o", path)
    call("train", path).refuses(2, "data.path")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.path=none.txt", ("none.txt", "no such file", "data.path")),
        ("data.path=.", ("a text file", "a directory")),
        ("data.kind=criteo", ("data.kind", "'text' for a transformer")),
        ("model.heads=3", ("model.heads", "a divisor of model.dim = 64", "got 3")),
        ("model.vocab=100", ("model.vocab", "at least 256", "100")),
        ("batch.sequence=0", ("batch.sequence", "int >= 1", "0")),
        ("batch.sequence=200_000", ("text.txt", "at least 400001 bytes", "300000")),
        ("model.bottom=[3]", ("model.bottom", "kind 'transformer'")),
        ("model.kind=gpt", ("model.kind", "dlrm, transformer, tables", "'gpt'")),
    ],
)
def test_a_transformer_that_cannot_be_trained_is_refused_by_its_key(
    call: Any, override: str, words: tuple[str, ...]
) -> None:
    call("train", TRANSFORMER, "--set", "cluster.ddr_cap=64 GiB", "--set", override).refuses(
        2, *words
    )


def test_a_text_that_is_too_short_for_its_sequence_is_refused(call: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    answer = call("train", TRANSFORMER, "--set", "data.path=short.txt")
    answer.refuses(2, "short.txt", "at least 129 bytes", "got 5")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["plan.json", "rank-0.log", "store", "torchrun.log"])
def test_a_folder_of_yours_does_not_become_a_run_folder(
    train: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine")
    train(f"{HEADER}\n{ROW}\n", "--out", "mine").refuses(
        2,
        f"mine: expected a new folder, or one of an earlier run, got one with a {name}. "
        "Choose another train.out.",
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [name]
    assert (tmp_path / "mine" / name).read_text() == "mine"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["outcome.json", "rank-1.log", "progress.jsonl", "torchrun.log"])
def test_a_run_does_not_write_over_what_it_reads(call: Any, tmp_path: Path, name: str) -> None:
    """A text to learn from that is a file of an earlier run."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "launcher.lock").touch()
    (out / name).write_text("a log " * 1000)
    (tmp_path / "link.txt").symlink_to(out / name)
    for path in (out / name, "link.txt"):
        words = ("--set", f"data.path={path}", "--set", f"train.out={out}")
        call("train", TRANSFORMER, *words).refuses(
            2, f"{path}: expected a file that the run does not write over, got one of {out}."
        )
    assert (out / name).read_text() == "a log " * 1000


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["train.tsv", "test.tsv", "test.facts.json"])
def test_rows_that_no_run_made_up_stay_and_with_them_the_results(
    made_up: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "out" / "data").mkdir(parents=True)
    mine = tmp_path / "out" / "data" / name
    mine.write_text("a year of work\n")
    (tmp_path / "out" / "launcher.lock").touch()
    for result in ("outcome.json", "measured.json", "rank-0.record.json"):
        (tmp_path / "out" / result).write_text("of the last run")
    answer = made_up("out")
    answer.refuses(2, f"out/data/{name}: expected ", "Move it away or choose another train.out.")
    assert mine.read_text() == "a year of work\n"
    for result in ("outcome.json", "measured.json", "rank-0.record.json"):
        assert (tmp_path / "out" / result).read_text() == "of the last run"


@pytest.mark.slow
def test_a_run_in_progress_keeps_its_rows_and_files(made_up: Any, tmp_path: Path) -> None:
    """Of a second run in the same folder nothing is written: the first one reads its rows."""
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "train.tsv").write_text("rows of the first run\n")
    (out / "plan.json").write_text("the first plan")
    descriptor = os.open(out / "launcher.lock", os.O_RDWR | os.O_CREAT)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        answer = made_up("out")
    finally:
        os.close(descriptor)
    answer.refuses(2, "out: expected a folder no run is using, got one with a run in progress")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


OWN = """
import torch

def build(batch):
    return torch.nn.Linear(4, 4), torch.zeros(batch, 4)
"""


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ('[data]\npython = "own_model:batches"', "data.python: expected a function 'batches' in"),
        ('[data]\npython = "nowhere:batches"', "expected an importable module 'nowhere'"),
        ('[data]\nkind = "text"', "data.kind: expected 'python' for a model of that kind"),
        ("[parallel]\nmicrobatches = 2", "parallel.microbatches: expected None, as steps of"),
    ],
)
def test_what_a_model_of_one_s_own_cannot_be_trained_on(
    call: Any, tmp_path: Path, section: str, text: str
) -> None:
    (tmp_path / "own_model.py").write_text(OWN)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\npython = "own_model:build"\n[batch]\nsize = 2\n{section}\n'
        "[cluster]\nworld_size = 2\n"
    )
    call("train", job).refuses(2, text)


@pytest.mark.parametrize(
    ("settings", "saved", "told"),
    [
        ((), (), "nothing was saved, for the job has no [checkpoint]; with one: shardwright train"),
        (("checkpoint.every=5",), (), "to go on from its beginning, for nothing was saved yet"),
        (("checkpoint.every=5",), (5, 10), "to go on after step 10: shardwright train job.toml"),
    ],
)
def test_a_run_that_failed_names_the_command_that_goes_on_with_it(
    call: Any, job: Path, monkeypatch: Any, settings: tuple[str], saved: tuple[int], told: str
) -> None:
    def failed(plan: Plan, folder: Path, *_: Any, **__: Any) -> Session:
        for step in saved:
            (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
            (folder / "checkpoints" / f"step-{step}" / MANIFEST).touch()
        versions: dict[str, str] = {}
        end = RunOutcome(OUTCOME_SCHEMA, 5, "rank 1 died", 12, 2, (), (), 3.0, versions)
        return Session(folder, plan, end, None, None)

    monkeypatch.setattr("shardwright.cli.train.run", failed)
    words = [word for setting in ("data.kind=synthetic", *settings) for word in ("--set", setting)]
    answer = call("train", "job.toml", "--out", "a run", *words)
    assert answer.code == 5
    last = answer.err.splitlines()[-1]
    assert last.startswith(told)
    given = shlex.split(last[last.index("shardwright train") :])
    assert given[:5] == ["shardwright", "train", "job.toml", "--out", "a run"]
    assert "--resume" in given or "checkpoint.every=10 min" in given
    assert "train.out=a run" not in given  # it is said once


def test_the_command_that_goes_on_has_every_word_of_the_first() -> None:
    first = ["train", "gpt2", "-n", "2", "--on", "2xcpu", "--batch", "4", "--set", "train.steps=5"]
    parser, _ = parsers("train")
    again = _again(parser.parse_args(first))
    assert again[:3] == ["shardwright", *first[:2]]
    assert sorted(again[3:]) == sorted(first[2:])
