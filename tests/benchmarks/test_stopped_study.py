"""A study that is stopped goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from study.found import Study, read_study

from shardwright.launcher.heartbeat import read_heartbeat

HANGS = 180.0
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
JOB = """
[model]
dense_features = 3
bottom = [8]
top = [1]

[cluster]
world_size = {ranks}

[batch]
size = 32

[data]
kind = "synthetic"
rows = 4_000
test_rows = 1_000

[train]
steps = 600
learning_rate = 0.1

[study]
kinds = [{{ kind = "qr", above = 1000 }}]
seeds = 2

[[tables]]
name = "a"
rows = 3_000
dim = 8

[[tables]]
name = "b"
rows = 500
dim = 8
"""


def start(folder: Path, out: str, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "study", "job.toml", "--out", out]
    paths = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": paths}
    return subprocess.Popen(
        [*line, *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=HANGS)
    finally:
        process.kill()


def wait_for_a_step(run: Path, process: subprocess.Popen[str]) -> None:
    """Until a rank of the run trains."""
    limit = time.monotonic() + HANGS
    while time.monotonic() < limit and process.poll() is None:
        beat = read_heartbeat(run / "rank-0.pulse")
        if beat is not None and (beat.step or 0) >= 1:
            return
        time.sleep(0.02)
    raise AssertionError(f"{run} never came to a step")


@pytest.mark.product  # minutes, of a benchmark
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_study_that_was_stopped_goes_on_and_keeps_what_it_found(
    tmp_path: Path, ranks: int
) -> None:
    """On two ranks it is also beside one that never stopped, which takes as long again."""
    (tmp_path / "job.toml").write_text(JOB.format(ranks=ranks))
    process = start(tmp_path, "stopped")
    wait_for_a_step(tmp_path / "stopped" / "qr-seed-1", process)
    process.send_signal(signal.SIGINT)
    _, errors = ended(process)
    assert process.returncode == 130, errors
    assert "stopped by Ctrl-C" in errors
    assert "the same command goes on with what is left" in errors
    so_far = read_study(tmp_path / "stopped" / "study.json")
    assert [len(kind.trials) for kind in so_far.kinds] == [1]
    assert "Not finished: 1 run left." in (tmp_path / "stopped" / "study.html").read_text()

    process = start(tmp_path, "stopped")
    shown, errors = ended(process)
    assert process.returncode == 0, errors
    assert "trained before, in stopped/qr-seed-0" in errors
    assert "timing lookups" not in errors
    words = f"600 steps of {32 * ranks} samples"
    assert shown.startswith(f"1 kind of embeddings of a dlrm, {words}, 2 seeds\n")
    assert max(map(len, shown.splitlines())) <= 80
    gone_on = read_study(tmp_path / "stopped" / "study.json")
    assert not gone_on.left
    assert [kind.lookup for kind in gone_on.kinds] == [kind.lookup for kind in so_far.kinds]

    (before,) = so_far.kinds[0].trials
    first, second = gone_on.kinds[0].trials
    assert first == before
    assert first.quality["all"].auc != second.quality["all"].auc  # another seed
    assert first.quality["all"].best_auc == second.quality["all"].best_auc  # the same rows

    shown, errors = ended(start(tmp_path, "stopped", "--json"))
    assert errors.count("trained before, in ") == 2
    assert msgspec.json.decode(shown, type=Study) == gone_on
    if ranks == 1:
        return
    shown, errors = ended(start(tmp_path, "whole", "--json"))
    whole = read_study(tmp_path / "whole" / "study.json")
    assert msgspec.json.decode(shown, type=Study) == whole
    assert [kind.trials for kind in whole.kinds] == [kind.trials for kind in gone_on.kinds]
    assert whole.seen == gone_on.seen
