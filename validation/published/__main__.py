"""``PYTHONPATH=validation python -m published FILE.json ... [-o DIR]``: predict published rows.

Prints one JSON object; with ``-o`` it goes into files of DIR instead, one for each framework and a
page beside them, and the distribution of the errors is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published.comparison import compare
from published.sheet import INTRODUCTION, SECTIONS, page
from shardwright.core.document import parse_json, read_bytes, write_atomically
from shardwright.core.errors import EXIT_OK, InputError, ShardwrightError, expected
from shardwright.core.outputs import FileKind, check_output

PAGE = FileKind("page", re.compile(re.escape(INTRODUCTION.encode())))
ROWS = FileKind("comparison", re.compile(rb'\{\s*"rows": \['))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m published",
        description="Predicts published measurements of memory and compares.",
    )
    parser.add_argument("file", type=Path, nargs="+", help="JSON with lists of published rows")
    parser.add_argument("-o", "--out", type=Path, help="folder for JSON files and a page")
    options = parser.parse_args(arguments)
    try:
        result = compare(_joined(options.file), options.file[0].name)
        told = result if options.out is None else _write(result, options.out, options.file)
    except ShardwrightError as error:
        print(f"shardwright: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    json.dump(told, sys.stdout, indent=1)
    print()
    return EXIT_OK


def _joined(paths: Sequence[Path]) -> Any:
    """What the files say together; of a list that several have, what the last says."""
    found: dict[str, Any] = {}
    for path in paths:
        document = _read(path)
        if not isinstance(document, dict):
            wanted = "an object with lists of rows"
            raise InputError(expected(path.name, wanted, type(document).__name__))
        found |= document
    return found


def _read(path: Path) -> Any:
    return parse_json(read_bytes(path, "JSON"), str(path), "JSON")


def _write(result: dict[str, Any], folder: Path, read: Sequence[Path]) -> dict[str, Any]:
    """One file for each framework with its rows, and a page of all; the errors' distribution."""
    beside = {
        name: _read(folder / f"{name}.json")
        for name in SECTIONS
        if (folder / f"{name}.json").exists()
    }
    texts = {folder / "README.md": page(result, beside)}
    for framework in result["distribution"]["by_framework"]:
        some = {
            key: [row for row in result[key] if row["framework"] == framework]
            for key in ("rows", "left_out")
        }
        told = {**some, "distribution": result["distribution"]["by_framework"][framework]}
        texts[folder / f"{framework}.json"] = json.dumps(told, indent=1) + "\n"
    for path in texts:
        check_output(path, PAGE if path.suffix == ".md" else ROWS, read)
    for path, text in texts.items():
        write_atomically(path, text.encode())
    distribution: dict[str, Any] = result["distribution"]
    return distribution


if __name__ == "__main__":
    sys.exit(main())
