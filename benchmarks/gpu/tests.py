"""The tests that are marked ``gpu``, on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu.rows import Row, Setting

ROOT = Path(__file__).resolve().parents[2]
MARK = "mark.gpu"  # in files that have such tests: of others none is collected
SECONDS = 45.0  # after which they are stopped; what has ended by then is told
MESSAGE = 500  # characters of what a test says
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def outcomes(path: Path) -> dict[str, Any]:
    """Counts of a JUnit file, and every case that did not pass."""
    cases = []
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(path).iter("testcase"):
        ill = next((each for each in case if each.tag in OUTCOMES), None)
        outcome = "passed" if ill is None else OUTCOMES[ill.tag]
        counts[outcome] += 1
        if ill is not None:
            said = (ill.get("message") or "")[: MESSAGE // 2]
            said += "\n" + (ill.text or "").strip()[len(said) + 1 - MESSAGE :]  # its end tells most
            name = f"{case.get('classname')}::{case.get('name')}"
            seconds = float(case.get("time") or 0)
            cases.append({"name": name, "outcome": outcome, "seconds": seconds})
            cases[-1]["message"] = said
    return {**counts, "cases": cases}


def measured(setting: Setting, folder: Path = ROOT / "tests") -> dict[str, Any]:
    """pytest in a process of its own; what it said last where it gave no file."""
    files = sorted(str(path) for path in folder.rglob("test_*.py") if MARK in path.read_text())
    with tempfile.TemporaryDirectory() as own:
        path = Path(own) / "cases.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "-n", "0"]
        command += ["-p", "no:cacheprovider", f"--junitxml={path}", *files]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            said, code = ended.stdout + ended.stderr, ended.returncode
        except subprocess.TimeoutExpired as error:
            said, code = f"{error}: {error.stdout or b''!r}", -1
        if not path.exists():
            return {"error": f"pytest ended with {code}: {said[-MESSAGE:]}"}
        return {**outcomes(path), "code": code}


def rows(setting: Setting) -> list[Row]:
    """All in one."""
    return [Row("all", partial(measured, setting), 30)]
