"""Plants the defects of ``planted.json`` one at a time in a copy of this tree and says which tests
see them.

    python benchmarks/planted.py -o validation/cpu-2-cores/planted.json [M01 M02 ...]

Each is run against the tests that are likeliest to see it, then those of its folder, then others
that use the file; quick tests before slow ones. One whose text is no longer in its file is named.
Those that are ``missed`` there no test saw when they were first planted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 1800  # seconds of one call of pytest
RUNS = (("not slow and not product", "quick"), ("slow and not product", "daily"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", help="those of planted.json; all where none is named")
    options = parser.parse_args()
    defects = json.loads((HERE / "planted.json").read_text())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "--quiet", str(HERE.parent), str(tree)], check=True)
        for defect in defects:
            if options.names and defect["name"] not in options.names:
                continue
            rows.append(planted(tree, defect))
            print(*rows[-1].values(), flush=True)
            found = {"planted": rows, "date": time.strftime("%Y-%m-%d")}
            options.out.write_text(json.dumps(found, indent=1) + "\n")


def planted(tree: Path, defect: dict[str, Any]) -> dict[str, str]:
    """Which run of tests sees it, and the first test that does."""
    path = tree / defect["file"]
    whole = path.read_text()
    row = {"name": defect["name"], "caught": "no", "by": ""}
    if whole.count(defect["old"]) != 1:
        return row | {"caught": "not planted: its text is no longer there"}
    path.write_text(whole.replace(defect["old"], defect["new"]))
    try:
        for marks, caught in RUNS:
            for where in ("first", "tests", "elsewhere"):
                if defect[where] and (by := failure(tree, marks, defect[where])):
                    return row | {"caught": caught, "by": by}
    finally:
        path.write_text(whole)
    return row


def failure(tree: Path, marks: str, paths: list[str]) -> str:
    """The first test that fails; empty where all pass."""
    line = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", marks, *paths]
    done = subprocess.run(
        line,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": f"{tree}/src", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode in (0, 5):
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named.group(1) if named else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    main()
