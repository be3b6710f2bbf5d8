"""``shardwright study embeddings``: what is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MADE_UP = "data.kind=synthetic"


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
    call("study", "embeddings", job, *changes, "--out", "out").refuses(2, *words)
    assert not Path("out").exists()


def test_only_embeddings_are_studied(call: Callable[..., Any], job: Path) -> None:
    call("study", "optimizers", job).refuses(2, "'optimizers'", "'embeddings'")


@pytest.mark.parametrize("name", ["study.json", "study.html"])
def test_a_file_of_another_kind_is_not_replaced(
    call: Callable[..., Any], job: Path, name: str
) -> None:
    Path("out").mkdir()
    (Path("out") / name).write_text("mine")
    answer = call("study", "embeddings", job, "--set", MADE_UP, "--out", "out")
    answer.refuses(2, f"out/{name}: expected a new file or an earlier", "Choose another --out.")
    assert (Path("out") / name).read_text() == "mine"
