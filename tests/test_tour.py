"""docs/tour.md shows what its commands print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?m)^    \$ shardwright (?P<words>.*)\n(?P<shown>(?:    (?!\$ ).*\n)*)")
TIMES = re.compile(r"[\d.,]+ (?:µs|ms|s)\b")  # of constants that may be measured again


def plain(line: str) -> str:
    """A line without the width of its columns."""
    return re.sub(r"─+", "─", " ".join(TIMES.sub("#", line).split()))


@pytest.mark.slow
def test_the_tour_is_what_its_commands_print(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = os.environ | {"COLUMNS": "80", "SHARDWRIGHT_CACHE": str(tmp_path / "cache")}
    blocks = list(BLOCK.finditer((ROOT / "docs" / "tour.md").read_text()))
    assert len(blocks) > 5
    for block in blocks:
        line = [sys.executable, "-m", "shardwright", *shlex.split(block["words"])]
        done = subprocess.run(
            line, capture_output=True, text=True, cwd=tmp_path, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        printed = iter(map(plain, done.stdout.splitlines()))
        for shown in map(plain, block["shown"].splitlines()):
            assert shown == "..." or shown in printed, f"{block['words']}: {shown}"
