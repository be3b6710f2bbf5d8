"""Streams as a shell sees them: escape codes, pipes, encodings, and what is not imported."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "shardwright"]
SETTINGS = ("FORCE_COLOR", "NO_COLOR", "SHARDWRIGHT_LOG", "TTY_COMPATIBLE")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in SETTINGS} | {
    "TERM": "xterm-256color"
}


def _on_a_terminal(*words: str, **more: str) -> bytes:
    """All that a command writes to a terminal, stdout and stderr together."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *words], stdout=theirs, stderr=theirs, env={**ENVIRONMENT, **more}
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                written += chunk
        except OSError:  # Linux's way of saying that the other end is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    return written


def _faults(stderr: bytes) -> list[bytes]:
    """All lines but those on what takes long, as anything does on a busy machine."""
    long = (b"planning for ", b"recording and pricing ")
    return [line for line in stderr.splitlines() if not line.startswith(long)]


@pytest.mark.slow
def test_a_terminal_gets_styles(job: Path) -> None:
    assert b"\x1b" in _on_a_terminal("plan", str(job))


@pytest.mark.slow
def test_no_color_means_no_escape_codes_at_all(job: Path) -> None:
    assert b"\x1b" not in _on_a_terminal("plan", str(job), NO_COLOR="1")


@pytest.mark.slow
def test_a_pipe_gets_no_escape_codes(job: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "plan", str(job)], capture_output=True, env=ENVIRONMENT, check=True
    )
    assert b"big" in done.stdout
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", [("plan",), ("plan", "--json"), ("--help",)])
def test_a_reader_that_leaves_early_gets_no_traceback(job: Path, words: tuple[str, ...]) -> None:
    target = [str(job)] if "plan" in words else []
    with subprocess.Popen(
        [*COMMAND, *words, *target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert _faults(process.stderr.read()) == []
    assert process.returncode == 0


@pytest.mark.slow
def test_head_gets_its_line(job: Path) -> None:
    line = f"'{sys.executable}' -m shardwright plan '{job}' --json | head -1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, env=ENVIRONMENT, check=True)
    assert done.stdout == b"{\n"
    assert _faults(done.stderr) == []


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii_gets_a_table(job: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "plan", str(job)],
        capture_output=True,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert b"big" in done.stdout
    assert done.stderr == b""


@pytest.mark.slow
def test_planning_explaining_and_reporting_import_no_torch(job: Path, tmp_path: Path) -> None:
    script = """
import sys
from shardwright.cli.main import main
job, plan, page = sys.argv[1:]
for words in (["plan", job, "-o", plan], ["explain", plan], ["report", plan, "-o", page]):
    assert main(words) == 0, words
assert "torch" not in sys.modules
"""
    words = [str(path) for path in (job, tmp_path / "plan.json", tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", script, *words], capture_output=True, check=True)
