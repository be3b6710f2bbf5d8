"""``PYTHONPATH=validation python -m published.fits [FILE.json] [-o FILE.json]``: layouts that
others ran, or that ran out of memory, beside what is said of them before the run.

A layout is told right where it ran and is called possible (it ``fits``, or ``perhaps``), or ran out
and is said not to fit. Wrong ones are counted by kind.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from published.times import command, job_of, read_rows
from shardwright.core.errors import ShardwrightError
from shardwright.core.outputs import FileKind
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import parse_job

FITS = FileKind("comparison of what fits", re.compile(rb'\{\s*"ran": \{'))
# What the study's rows do not say because it is the same in all of them.
SAME = {"glu": True, "experts": 0, "cp": 1, "vpp": 1, "compile": None}
# A layout that is told wrong is of the first kind that it is one of.
KINDS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("ran, on a card that it fills to the last few percent", lambda row: bool(row["ran"])),
    (
        "ran out with sequence parallel: layers keep what tensor ranks gather, and ours "
        "gather it again",
        lambda row: bool(row["sp"]),
    ),
    ("ran out, where at least 90 % of the card are needed", lambda row: row["least"] >= 0.9),
    (
        "ran out, and may need more than the card",
        lambda row: row["verdict"] == "perhaps",
    ),
    ("ran out, and nothing that the rows tell says why", lambda row: True),
)


def layout_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a layout as one of a step."""
    heads, hidden = row["heads"], row["hidden"]
    own = {"kv_heads": heads, "head_dim": hidden // heads, "framework": f"kernel {row['kernel']}"}
    return {**SAME, **row, **own}


def said(row: Mapping[str, Any]) -> dict[str, Any]:
    """A layout with what is said of it: the verdict, and the least that it needs of its card."""
    found = estimated(parse_job(job_of(layout_of(row))))
    worst = max(found.ranks, key=lambda rank: found.needs(rank)[0])
    least, most = found.needs(worst)
    assert found.capacity, "a preset has one"
    keys = ("model", "gpus", "tp", "pp", "sp", "micro_batch", "seq", "checkpointing", "kernel")
    return {
        **{key: row[key] for key in keys},
        "ran": row["ran"],
        "verdict": found.verdict,
        "peak": round(worst.peak_bytes / found.capacity, 3),
        "least": round(least / found.capacity, 3),
        "most": round(most / found.capacity, 3),
    }


def compare(document: Any, where: str) -> dict[str, Any]:
    """What is said of every layout, and how much of it is right."""
    told, left_out = [], Counter[str]()
    for row in read_rows(document, where):
        try:
            told.append(said(row))
        except ShardwrightError as error:
            left_out[re.sub(r"\d+", "N", str(error))] += 1
    result: dict[str, Any] = {}
    missed: list[dict[str, Any]] = []
    for name, ran in (("ran", True), ("ran_out", False)):
        its = [row for row in told if bool(row["ran"]) is ran]
        wrong = [row for row in its if (row["verdict"] != "does not fit") is not ran]
        missed += wrong
        result[name] = {
            "rows": len(its),
            "right": len(its) - len(wrong),
            "share": round(1 - len(wrong) / len(its), 4) if its else None,
            "verdicts": dict(Counter(row["verdict"] for row in its)),
        }
    # The highest peak that is predicted of anything that ran, as a share of its card.
    result["highest_that_ran"] = max((row["peak"] for row in told if row["ran"]), default=None)
    kinds = Counter(next(kind for kind, is_of in KINDS if is_of(row)) for row in missed)
    result["kinds"] = {kind: kinds[kind] for kind, _ in KINDS if kind in kinds}
    return {**result, "left_out": dict(left_out), "wrong": missed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m published.fits", description=__doc__)
    rows = Path(__file__).parent / "fits_rows.json"
    parser.add_argument("file", type=Path, nargs="?", default=rows, help="JSON with rows")
    return command(compare, parser, FITS, arguments, "wrong")


if __name__ == "__main__":
    sys.exit(main())
