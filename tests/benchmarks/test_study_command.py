"""``python -m study``: what is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study.__main__ import main

MADE_UP = "data.kind=synthetic"
JOB = """
[model]
bottom = [16]
top = [32, 1]

[[tables]]
name = "big"
rows = 100_000
dim = 16
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["study.seeds=0"], ["study.seeds: expected int >= 1, got 0"]),
        (['study.kinds=[{kind="qrr"}]'], ["study.kinds[0].kind: expected one of full, hash"]),
        (["data.test_rows=0"], ["data.test_rows: expected rows that are held out"]),
        (["embeddings.kind=qr", "study.seeds=1"], ["study: expected none beside embeddings"]),
    ],
)
def test_bad_input_is_one_line(
    call: Callable[..., Any], job: Path, sets: list[str], words: list[str]
) -> None:
    changes = [word for each in (MADE_UP, *sets) for word in ("--set", each)]
    call(job, *changes, "--out", "out", main=main).refuses(2, *words)
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["study.json", "study.html"])
def test_a_file_of_another_kind_is_not_replaced(
    call: Callable[..., Any], job: Path, name: str
) -> None:
    Path("out").mkdir()
    (Path("out") / name).write_text("mine")
    answer = call(job, "--set", MADE_UP, "--out", "out", main=main)
    answer.refuses(2, f"out/{name}: expected a new file or an earlier", "Choose another --out.")
    assert (Path("out") / name).read_text() == "mine"


def test_the_command_of_before_says_where_it_is(call: Callable[..., Any]) -> None:
    where = "PYTHONPATH=benchmarks python -m study JOB.toml"
    call("study", "embeddings", "job.toml").refuses(2, "'study': expected a command", where)
