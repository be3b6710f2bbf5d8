"""The command that measures on a GPU, on a CPU: what fails there is a row, and all of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu import kit, predict, show
from gpu.configurations import memory_configurations, timed_configurations
from gpu.rows import STAGES, Figures, Setting
from gpu.run import SHARES
from stage_checks import check_entries, check_kinds, check_numbers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FULLEST = "ours, 8 bits"  # is predicted of the fullest rank, which is not always the first


def run(out: Path, *arguments: str, **more: str) -> None:
    """``run.sh`` with these arguments, half an hour at most."""
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, **more}
    command = [ROOT / "benchmarks" / "gpu" / "run.sh", "--device", "cpu", "--small", *arguments]
    subprocess.run(command, env=environment, check=True, timeout=1800, capture_output=True)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.slow
def test_what_fails_dies_or_hangs_is_a_row_and_the_next_is_measured(tmp_path: Path) -> None:
    (package := tmp_path / "stages").mkdir()
    (package / "failing_stage.py").write_text((HERE / "failing_stage.py").read_text())
    run(tmp_path, "--stages", "stages.failing_stage,stages.absent", PYTHONPATH=str(tmp_path))
    rows = rows_of(tmp_path / "stages.failing_stage.json")
    first, same, another = (
        rows[name]["id"] for name in ("process", "same process", "another process")
    )
    assert first == same != another
    assert rows["raises"]["error"] == "RuntimeError: no such kernel"
    assert rows["poisoned"]["error"].startswith("RuntimeError: CUDA error")
    for name in ("dies", "hangs"):
        assert rows[name]["error"] == "the process died, or was stuck"
    assert rows["told"]["said"] == "so"
    assert list(rows) == [row.name for row in failing_rows()]
    absent = rows_of(tmp_path / "stages.absent.json")
    assert "No module named 'stages.absent'" in absent["rows"]["error"]


def failing_rows() -> Any:
    from failing_stage import rows

    return rows(Setting("cpu"))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages, small, on this CPU."""
    out = tmp_path_factory.mktemp("figures")
    run(out, "--seconds", "1700")
    return out


@pytest.mark.slow
def test_every_row_of_every_stage_runs_on_a_cpu(figures: Path) -> None:
    for stage in STAGES:
        document = json.loads((figures / f"{stage}.json").read_text())
        assert document["machine"]["device"] == "cpu"
        assert document["rows"], stage
        failed = [row for row in document["rows"] if show.failed(row)]
        assert not failed, stage


@pytest.mark.slow
def test_figures_of_operators_embeddings_and_the_runtime_are_sound(figures: Path) -> None:
    embeddings = rows_of(figures / "embeddings.json")
    check_kinds(embeddings.pop("values"))
    for name, row in (rows_of(figures / "ceilings.json") | embeddings).items():
        check_entries(name, row)
    for name, row in rows_of(figures / "runtime.json").items():
        check_numbers(name, row)


@pytest.mark.slow
def test_what_is_predicted_of_small_configurations_is_measured_to_the_byte(figures: Path) -> None:
    rows = rows_of(figures / "memory.json")
    assert rows.pop("workspaces") is not None
    assert len(rows) >= 16
    for name, row in rows.items():
        predicted, measured = row["predicted"]["peak"], row["allocated"]
        # An LSTM's weights are packed as the processor's kernels take them.
        if name in (FULLEST, "lstm"):
            assert 0.8 * predicted <= measured <= predicted, name
        else:
            assert abs(predicted - measured) <= 8, name


@pytest.mark.slow
def test_the_figures_are_shown(figures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show.page(show.read(figures))
    assert all(f"## {stage.capitalize()}" in shown for stage in STAGES)
    assert "| fsdp2 of 8 |" in shown
    assert "Not measured" not in shown


def test_a_machine_gets_what_it_lacks_and_nothing_that_it_has(tmp_path: Path) -> None:
    for name in ("absent_there", "msgspec"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}-1.dist-info/METADATA", "")
    out = tmp_path / "site"
    assert kit.unpack(tmp_path, out) == ["absent_there-1-py3-none-any.whl"]
    assert (out / "absent_there" / "__init__.py").exists()
    assert not (out / "msgspec").exists()


def test_a_file_of_figures_is_whole_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    first = Figures(path)
    first.note(machine={"card": "a card"})
    first.put("one", {"error": "not yet"})
    first.put("one", {"figure": 1})
    again = Figures(path)
    again.put("two", {"figure": 2})
    assert json.loads(path.read_text()) == {
        "rows": [{"name": "one", "figure": 1}, {"name": "two", "figure": 2}],
        "machine": {"card": "a card"},
    }


def test_errors_of_predictions_are_shown_and_what_was_not_measured_is_named() -> None:
    gib = 2**30
    known = {
        "peak": 10 * gib,
        "phases": {"forward": 9 * gib, "backward": 10 * gib, "step": 2 * gib},
        "reserved": 12 * gib,
        "retries": 0,
        "outside": [300 * 2**20, 500 * 2**20],
    }
    measured = {
        "allocated": 10 * gib + 64 * 2**20,
        "requested": 10 * gib + 54 * 2**20,
        "reserved": 12 * gib,
        "retries": 0,
        "outside_measured": 400 * 2**20,
        "phases": {
            "forward": {"allocated": 10 * gib},
            "backward": {"allocated": 10 * gib + 64 * 2**20},
            "step": {"allocated": 2 * gib},
        },
        "predicted": known,
    }
    rows = [
        {"name": "workspaces", "bytes": 64 * 2**20},
        {"name": "a job", **measured},
        {"name": "another", "error": "OutOfMemoryError: of 80 GiB"},
    ]
    shown = show.page({"memory": {"machine": {"card": "A Card"}, "rows": rows}})
    assert "# Measured on A Card" in shown
    assert (
        "| a job | 10.000 GiB | +0.10 % | 10.000 GiB | +0.00 % | 12.062 GiB | 12.000 GiB | "
        "+0.52 % | 0 | 300 to 500 MiB: 400 MiB |" in shown
    )
    assert "| a job | 9.000 GiB : 9.938 GiB |" in shown
    assert "- another: OutOfMemoryError: of 80 GiB" in shown


def test_every_stage_has_a_share_and_every_configuration_a_prediction() -> None:
    assert set(SHARES) == set(STAGES)
    names = [c.name for c in (*memory_configurations(), *timed_configurations())]
    assert list(predict.predictions().configurations) == names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2 of 8, full", "ours of 8", "fsdp2 of 2 x 4", "gpt2"])
def test_what_is_written_is_what_would_be_predicted_today(name: str) -> None:
    (configuration,) = (c for c in memory_configurations() if c.name == name)
    written = predict.predictions().configurations[name]
    assert predict.predicted(Setting("cuda"), configuration) == written, (
        "benchmarks/gpu/prepare.sh writes it anew"
    )


def test_the_page_of_the_stand_in_is_made_of_its_figures() -> None:
    kept = show.read(ROOT / "validation" / "stand-in")
    assert show.slug(kept) == "stand-in"
    assert (ROOT / "docs" / "gpu-stand-in.md").read_text() == show.page(kept)
    rows = {row["name"]: row for row in kept["memory"]["rows"] if not show.failed(row)}
    shared = rows.pop("workspaces")["bytes"]
    without_cudnn = {"vit", "lstm", "resnet"}
    for name, row in rows.items():
        asked = row["requested"] - shared
        assert name in without_cudnn or abs(row["predicted"]["peak"] / asked - 1) < 2e-4, name
