"""The wheel has everything that the commands need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def typed(folder: Path, *words: str, **variables: str) -> str:
    line = [sys.executable, *words]
    environment = os.environ | variables
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=folder, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_writes_plans_explains_and_reports_a_job(tmp_path: Path) -> None:
    source, installed, home = (tmp_path / name for name in ("source", "installed", "home"))
    home.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = ("-m", "pip", "--disable-pip-version-check")
    built = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path))
    typed(home, *pip, *built, str(source))
    (wheel,) = tmp_path.glob("shardwright-*.whl")
    typed(home, *pip, "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel))

    def shardwright(*words: str) -> str:
        return typed(home, "-m", "shardwright", *words, PYTHONPATH=str(installed))

    where = "import shardwright; print(shardwright.__file__)"
    assert Path(typed(home, "-c", where, PYTHONPATH=str(installed))).is_relative_to(installed)
    shardwright("init", "dlrm")
    assert "Fits" in shardwright("plan", "dlrm.toml", "-o", "plan.json")
    assert "C3" in shardwright("explain", "plan.json", "--tensor", "C3")
    shardwright("report", "plan.json", "-o", "report.html")
    assert "C3" in (home / "report.html").read_text()
    assert "Fits" in shardwright("memory", "dlrm.toml")
