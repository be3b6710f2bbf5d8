"""What ``train`` refuses before it starts any process or writes any row."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CRITEO = Path(__file__).parents[2] / "examples" / "criteo_csv.toml"
TRANSFORMER = CRITEO.with_name("transformer.toml")
HEADER = ",".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
ROW = ",".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26])


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture
def train(call: Any, tmp_path: Path) -> Callable[..., Any]:
    """Train the click-log example on a file of this text."""

    def started(text: str | bytes, *more: str) -> Any:
        data = text.encode() if isinstance(text, str) else text
        (tmp_path / "clicks.csv").write_bytes(data)
        return call("train", CRITEO, "--set", "data.path=clicks.csv", *more)

    return started


def test_without_a_data_file_it_says_how_to_name_one(call: Any) -> None:
    call("train", CRITEO).refuses(2, "data.path", "--set data.path=FILE")


def test_a_missing_data_file_is_named(call: Any) -> None:
    call("train", CRITEO, "--set", "data.path=none.csv").refuses(2, "none.csv", "data.path")


def test_a_directory_is_no_data_file(call: Any, tmp_path: Path) -> None:
    answer = call("train", CRITEO, "--set", f"data.path={tmp_path}")
    answer.refuses(2, str(tmp_path), "a directory")


def test_a_missing_test_file_is_named(train: Any) -> None:
    train(f"{HEADER}\n{ROW}\n", "--set", "data.test_path=none.csv").refuses(2, "none.csv")


def test_a_truncated_row_is_told_with_file_and_line(train: Any) -> None:
    row = ",".join(ROW.split(",")[:12])
    train(f"{HEADER}\n{row}\n").refuses(2, "clicks.csv:2", "40 fields", "12")


def test_a_row_that_is_too_wide_is_told_with_file_and_line(train: Any) -> None:
    row = "\t".join([*ROW.split(","), "7"])
    train(f"{row}\n").refuses(2, "clicks.csv:1", "40 fields", "41")


def test_a_bad_field_is_told_with_file_line_and_field(train: Any) -> None:
    row = ROW.replace("0a1b2c3d", "wxyz", 1)
    train(f"{HEADER}\n{row}\n").refuses(2, "clicks.csv:2, field C1", "wxyz")


def test_a_wrong_header_is_told_with_its_column(train: Any) -> None:
    train(f"{HEADER.replace('I7', 'J7')}\n{ROW}\n").refuses(2, "clicks.csv:1", "'I7'", "'J7'")


@pytest.mark.parametrize("text", ["", f"{HEADER}\n", "hello\n", "\x1f\x8b\x08binary"])
def test_what_is_no_click_log_is_refused(train: Any, text: str) -> None:
    train(text.encode("latin-1")).refuses(2, "clicks.csv")


def test_a_model_that_click_logs_do_not_fit_is_refused(call: Any, job: Path) -> None:
    call("train", job, "--set", "data.path=x").refuses(2, "26 tables", "3 tables")


def test_a_job_that_does_not_fit_is_3(train: Any) -> None:
    train(f"{HEADER}\n{ROW}\n", "--set", "cluster.ddr_cap=2 MiB").refuses(
        3, "no plan found that fits"
    )


def test_no_rows_are_written_for_a_job_that_does_not_fit(call: Any, tmp_path: Path) -> None:
    words = ("--set", "data.kind=synthetic", "--set", "cluster.ddr_cap=2 MiB")
    call("train", CRITEO, *words).refuses(3, "no plan found that fits")
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_a_file_is_refused(call: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    words = ("--set", "data.kind=synthetic", "--set", "data.rows=10", "--set", "train.out=taken")
    call("train", CRITEO, *words).refuses(2, "taken")


def test_other_ranks_than_the_plans_are_4(call: Any, plan: Path) -> None:
    call("train", plan, "-n", 4).refuses(4, "-n", "2", "got 4")


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
