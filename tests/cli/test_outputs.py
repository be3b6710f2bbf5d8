"""What a command writes never lands on what the user gave it, nor on a file of another kind."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
TABLES = '{"tables": [{"name": "a", "rows": 100, "dim": 16}, {"name": "b", "rows": 9, "dim": 16}]}'
HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, by its name."""
    found = sorted(path for path in folder.rglob("*") if not path.is_fifo())
    return {str(p): None if p.is_dir() else p.read_bytes() for p in found}


@pytest.fixture
def unchanged(call: Any, tmp_path: Path) -> Callable[..., None]:
    """The command is refused with these words, and no file is other than it was."""

    def refused(command: tuple[object, ...], *words: str) -> None:
        before = contents(tmp_path)
        call(*command).refuses(2, *words)
        assert contents(tmp_path) == before

    return refused


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A job of tables alone that names a file of tables, with links to both."""
    (tmp_path / "tables.json").write_text(TABLES)
    job = tmp_path / "tables.toml"
    job.write_text('[model]\ntables = "tables.json"\n[cluster]\npreset = "a100-8"\n')
    (tmp_path / "link.toml").symlink_to(job)
    os.link(tmp_path / "tables.json", tmp_path / "hard.json")
    (tmp_path / "folder").mkdir()
    return job


@pytest.mark.parametrize(
    "output", ["tables.toml", "folder/../tables.toml", "link.toml", "tables.json", "hard.json"]
)
def test_a_plan_is_not_written_over_its_job_or_what_that_names(
    unchanged: Any, inputs: Path, output: str
) -> None:
    words = (output, "expected another file than those that are read", "Choose another -o.")
    unchanged(("plan", inputs, "-o", output), *words)


@pytest.mark.parametrize("key", ["path", "test_path"])
def test_a_plan_is_not_written_over_the_data(
    unchanged: Any, job: Path, tmp_path: Path, key: str
) -> None:
    (tmp_path / "clicks.tsv").write_text("1\t2\t3\n")
    command = ("plan", job, "--set", f"data.{key}=clicks.tsv", "-o", "clicks.tsv")
    unchanged(command, "clicks.tsv: expected another file than those that are read")


def test_a_file_beside_the_job_is_found_from_another_folder(
    unchanged: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "folder")
    unchanged(
        ("plan", inputs, "-o", "../tables.json"), f"got the same as {tmp_path / 'tables.json'}."
    )


@pytest.mark.slow
def test_a_plan_replaces_a_plan_or_an_empty_file_and_nothing_else(
    call: Any, unchanged: Any, job: Path, tmp_path: Path
) -> None:
    target = tmp_path / "p.json"
    target.touch()
    for _ in range(2):
        assert call("plan", job, "-o", target).code == 0
        assert json.loads(target.read_text())["schema"] == "shardwright.plan/4"
    for text in ("notes", "{}", '{"schema": "shardwright.measurement/1"}', TABLES):
        target.write_text(text)
        wanted = "expected a new file or an earlier plan, got a file of another kind. Choose"
        unchanged(("plan", job, "-o", target), f"{target}: {wanted}")


@pytest.mark.slow
def test_a_command_says_what_it_replaces_and_which_folder_it_makes(
    call: Any, job: Path, plan: Path, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "p.json"
    made = call("plan", job, "-o", target).err
    assert made.endswith(f"plan written to {target} in a new folder, {target.parent}\n")
    again = call("plan", job, "-o", target).err
    assert again.endswith(f"plan written to {target}, replacing the earlier one\n")
    assert call("report", plan, "-o", "page.html").err == "report written to page.html\n"
    again = call("report", plan, "-o", "page.html").err
    assert again == "report written to page.html, replacing the earlier one\n"
    unnamed = call("report", plan, "--trace", tmp_path / "traces" / "a.json").err
    assert unnamed == (
        f"report written to {Path.cwd() / 'report.html'}\ntrace written to "
        f"{tmp_path / 'traces' / 'a.json'} in a new folder, {tmp_path / 'traces'}\n"
    )


def test_every_command_that_makes_a_folder_says_so(call: Any, job: Path, tmp_path: Path) -> None:
    export = ("export", "llama3-8b", "--on", "8xH100", "--to", "fsdp2", "--runtime", "fsdp2")
    for words, option, name in (
        (("init", "tables"), "-o", "job.toml"),
        (export, "-o", "layout.toml"),
        (export, "--write", "job.toml"),
    ):
        target = tmp_path / f"{words[0]}{option}" / name
        answer = call(*words, option, target)
        assert f"{target} in a new folder, {target.parent}\n" in answer.out + answer.err


def test_what_is_no_regular_file_is_not_written_over(
    unchanged: Any, job: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    unchanged(("plan", job, "-o", "pipe"), "pipe: expected a file that can be written", "regular")
    assert (tmp_path / "pipe").is_fifo()


def test_a_cluster_file_is_not_written_over_a_job(unchanged: Any, job: Path) -> None:
    wanted = "expected a new file or an earlier cluster file, got a file of another kind"
    unchanged(("calibrate", "-o", job), f"{job}: {wanted}")


def test_a_report_is_not_written_over_its_plan(unchanged: Any, plan: Path) -> None:
    unchanged(("report", plan, "-o", plan), f"{plan}: expected another file than those that are")


@pytest.mark.parametrize("output", ["run/plan.json", "run/outcome.json", "job.toml"])
def test_a_report_is_not_written_over_files_of_its_run_or_a_job(
    call: Any, unchanged: Any, plan: Path, tmp_path: Path, output: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_bytes(plan.read_bytes())
    (tmp_path / "run" / "outcome.json").write_text("{}")
    unchanged(("report", "run", "-o", output), output)


def test_a_report_replaces_a_report(call: Any, plan: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert call("report", plan, "-o", "page.html").code == 0
    (tmp_path / "page.html").write_text("<!DOCTYPE html><title>mine</title>")
    call("report", plan, "-o", "page.html").refuses(2, "page.html", "an earlier report")


@pytest.mark.parametrize("output", ["config.json", "job.json", "notes.json", "logo.svg"])
def test_a_timeline_is_not_written_over_a_config_a_job_or_another_file(
    unchanged: Any, tmp_path: Path, output: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "job.json").write_text('[model]\nhf_config = "config.json"\n')
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "logo.svg").write_text("<svg></svg>")
    command = ("memory", "job.json", "--set", "cluster.preset=h100-8", "--timeline", output)
    unchanged(command, output, "Choose another --timeline.")


def test_the_demo_does_not_write_over_a_page_of_yours(unchanged: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("<!DOCTYPE html><title>mine</title>")
    unchanged(("demo", "--out", "mine"), "report.html", "Choose another --out.")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("key", ["path", "test_path"])
@pytest.mark.parametrize("there", [True, False])
def test_made_up_rows_are_never_written_where_a_job_names_data(
    unchanged: Any, tmp_path: Path, key: str, there: bool
) -> None:
    if there:
        (tmp_path / "MINE.tsv").write_text("a year of work\n")
    for command in (("train", DEMO), ("demo", "--out", "run")):
        unchanged(
            (*command, "--set", f"data.{key}=MINE.tsv"),
            f"data.{key}: expected none for data.kind 'synthetic', whose rows go into train.out, "
            "got 'MINE.tsv'. To train on a file, set data.kind=criteo, or columns.",
        )
