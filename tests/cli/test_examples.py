"""The jobs of ``examples/`` do what their plans say, and say it on one screen."""

from __future__ import annotations

import importlib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import Call
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
JOBS = sorted(path.stem for path in (ROOT / "examples").glob("*.toml"))
OF_OTHER_RUNTIMES = ("llama8b", "llama405b")  # which no plan follows


@pytest.mark.slow
@pytest.mark.usefixtures("warm_runs")
@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("transformer", "equal"),
        pytest.param("llama_experts", "equal", marks=pytest.mark.product),
        pytest.param("own_model", "equal", marks=pytest.mark.product),
        # of one percent: a plan's ids spread evenly
        pytest.param("recommender", "within 0.", marks=pytest.mark.product),
        pytest.param("vision", "equal", marks=pytest.mark.product),
        pytest.param("llama_tiny", "equal", marks=pytest.mark.product),
        pytest.param("bags", "within 0.", marks=pytest.mark.product),
    ],
)
def test_an_example_is_trained_with_the_memory_of_its_plan(
    name: str, peak: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    changes = ("--set", "train.steps=6", "--set", f"train.out={tmp_path / 'run'}")
    done = call("train", f"examples/{name}.toml", *changes)
    assert done.code == 0, done.err
    _is_one_screen(done.out)
    said = " ".join(done.out.split())
    assert "exact bytes equal on 2 of 2 ranks, peak " + peak in said
    if name in ("own_model", "vision", "recommender"):
        assert "no samples were held out to be scored: model.python may return an sw.Task" in said


@pytest.mark.parametrize("name", ["own_model", "recommender", "vision"])
def test_batches_of_an_example_go_on_after_any_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    batches: Any = importlib.import_module(f"examples.{name}").batches
    sizes = {"batch": 4, "sequence": 5} if name == "own_model" else {"batch": 4}

    def had(rank: int, world_size: int, number: int, start: int = 0) -> list[Any]:
        given = {"rank": rank, "world_size": world_size, "seed": 1, "start": start}
        found = islice(batches(**sizes, **given), number)
        return [[tensor.tolist() for tensor in tree_leaves(each)] for each in found]

    every = had(0, 1, 6)
    assert [had(0, 2, 3), had(1, 2, 3)] == [every[::2], every[1::2]]
    assert had(0, 1, 2, start=4 * 4) == every[4:]
    assert [had(rank, 2, 1, start=4 * 4) for rank in (0, 1)] == [[each] for each in every[4:]]
    assert every[0] != every[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "job"),
    [
        *(("plan", job) for job in JOBS if job not in OF_OTHER_RUNTIMES),
        *(("memory", job) for job in JOBS),
    ],
)
def test_a_first_screen_has_forty_lines_of_eighty_columns(
    command: str, job: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    said = call(command, f"examples/{job}.toml")
    assert said.code == 0, said
    _is_one_screen(said.out)


def _is_one_screen(said: str) -> None:
    lines = said.splitlines()
    assert 0 < len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
