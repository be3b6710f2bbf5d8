"""What commands say of the jobs in jobs.toml: ``python tests/golden/jobs.py`` holds it against
answers.json, before and after a change that is to change nothing, and names every difference;
``--write`` makes the answers anew, ``--only NAME`` takes the jobs with that in their name.

Nothing is called here but the command line, as a user calls it, so that files and classes may move.
Answers are exit codes, what is printed, and plans and footprints as documents. Reals are the same
where 11 digits are. What is long (recordings, blocks, constants, events) is a digest, events also
their sums. What the clock decides is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright
from shardwright.cli.main import main

FOLDER = Path(__file__).parent
ANSWERS = FOLDER / "answers.json"
EXAMPLES = FOLDER.parents[1] / "examples"
CLUSTER = FOLDER / "earlier" / "cluster.toml"
TERMINAL = ("COLUMNS", "FORCE_COLOR", "SHARDWRIGHT_LOG", "TTY_COMPATIBLE", "RANK")
DIGITS = 12
NEAR = 1e-11  # relatively; sums differ in the last bits from one Python to the next
# Fields that the clock or the version decides, and what a digest takes the place of.
LEFT_OUT = {"wall_seconds", "version", "fingerprint"}
LONG = {"recording", "cluster", "blocks", "timeline", "modules", "largest", "memory_prices"}
DIGESTED = 400  # characters of JSON above which what is long is a digest
PROGRESS = re.compile(r"^(?:recording and pricing|planning for|\d+ estimates?;).*\n", re.MULTILINE)
SEARCH = re.compile(r"^(The search \([^)]*\) tried [^.]*?\sin)\s[\d.,]+\s\S+\.$", re.MULTILINE)
SHOWN = 12  # differing lines of a text

Tree = Any  # what JSON holds


def jobs() -> dict[str, dict[str, Any]]:
    """Every job by name."""
    found: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "jobs.toml").read_text())
    return found


def names(runs: str) -> list[str]:
    """The jobs that tests ask, ``daily`` or ``slow``."""
    return [name for name, job in jobs().items() if job.get("runs") == runs]


def kept() -> dict[str, Tree]:
    """The answers as they were."""
    found: dict[str, Tree] = json.loads(ANSWERS.read_text())
    return found


def answer(job: dict[str, Any]) -> Tree:
    """What each of a job's commands leaves."""
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        folder = Path(made)
        (folder / "examples").symlink_to(EXAMPLES)
        shutil.copy(CLUSTER, folder)
        for name, text in ({"job.toml": job.get("job", "")} | job.get("files", {})).items():
            if text:
                (folder / name).write_text(text.lstrip("\n"))
        shown = job.get("shown", ())
        with _forgotten():
            return {each: _said(each, folder, shown=each in shown) for each in job["commands"]}


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """Modules of examples/ are imported anew by who comes next."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "examples":
                del sys.modules[name]


def _said(command: str, folder: Path, *, shown: bool) -> Tree:
    """Exit code, both streams, and the plan that a command writes."""
    words = shlex.split(command, posix="'" not in command)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    found: dict[str, Tree] = {"code": code}
    text = _steady(out.getvalue(), folder)
    if "--json" in words and code in (0, 3) and text:
        found["json"] = summary(json.loads(text) | {"seconds": 0.0})
    elif text:
        found["out"] = text if shown else _digest(text)
    said = _steady(err.getvalue(), folder)
    if said and (
        code == 2 or words[0] != "fit"
    ):  # which says what it knows as soon as it takes long
        found["err"] = said
    if "-o" in words and code == 0 and (path := folder / words[words.index("-o") + 1]).exists():
        if path.suffix == ".json":
            found["plan"] = summary(json.loads(path.read_text()))
        else:
            found["file"] = path.read_text()
    return found


def _steady(text: str, folder: Path) -> str:
    """A text without the folder, the clock, and progress, which is said after seconds."""
    text = text.replace(f"{folder}/", "")
    text = PROGRESS.sub("", text)
    text = re.sub(r"^(\d+ estimates? in) [\d.]+ \S+\.", r"\1 TIME.", text, flags=re.MULTILINE)
    return SEARCH.sub(lambda found: " ".join(found[1].split()) + " TIME.", text)


def summary(document: Tree) -> Tree:
    """A document without what the clock decides, with reals of 12 digits and digests."""
    return _short(document) | _sums(document.get("timeline", ()))


def _short(value: Tree) -> Tree:
    match value:
        case dict():
            found = {k: _short(v) for k, v in value.items() if k not in LEFT_OUT}
            for name in LONG & found.keys():
                if len(text := json.dumps(found[name], sort_keys=True)) > DIGESTED:
                    found[name] = f"{len(found[name])} {_digest(text)}"
            return found
        case list():
            return [_short(each) for each in value]
        case float():
            return float(f"{value:.{DIGITS}g}")
    return value


def _sums(timeline: list[Tree]) -> dict[str, Tree]:
    """Of a plan's events bytes and seconds by ranks, phase and kind; peaks are events, too."""
    found: dict[str, dict[str, Tree]] = {}
    for (rank, _, phase, kind, name, nbytes, _, duration), count in timeline:
        ranks = f"ranks {rank} to {rank + count - 1}"
        place = f"{phase} {kind}" + (" at the peak" if name == "peak" else "")
        total = found.setdefault(ranks, {}).setdefault(place, [0, 0.0])
        total[0] += nbytes
        total[1] += duration
    return {"events": _short(found)} if found else {}


def _digest(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:20]}"


def differences(expected: Tree, got: Tree, path: str = "") -> Iterator[str]:
    """What differs, each as ``path: expected X, got Y``."""
    match expected, got:
        case dict(), dict():
            for key in [*expected, *(key for key in got if key not in expected)]:
                where = f"{path} > {key}" if path else str(key)
                if key not in got:
                    yield f"{where}: expected {_brief(expected[key])}, got nothing"
                elif key not in expected:
                    yield f"{where}: expected nothing, got {_brief(got[key])}"
                else:
                    yield from differences(expected[key], got[key], where)
        case list(), list() if len(expected) == len(got):
            for index, (old, new) in enumerate(zip(expected, got, strict=True)):
                name = old.get("name") if isinstance(old, dict) else None
                yield from differences(old, new, f"{path} > {name or index}")
        case str(), str() if "\n" in expected and expected != got:
            lines = difflib.unified_diff(expected.splitlines(), got.splitlines(), n=0, lineterm="")
            changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("---", "+++")]
            more = [f"and {len(changed) - SHOWN} lines more"] if changed[SHOWN:] else []
            yield "\n    ".join([f"{path}: other text, - expected, + got", *changed[:SHOWN], *more])
        case (int() | float(), int() | float()) if isinstance(expected, float) or isinstance(
            got, float
        ):
            if not math.isclose(expected, got, rel_tol=NEAR, abs_tol=1e-15):
                yield f"{path}: expected {expected!r}, got {got!r}"
        case _ if expected != got:
            yield f"{path}: expected {_brief(expected)}, got {_brief(got)}"


def _brief(value: Tree) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:100]} ... ({len(text)} characters)"


def _written(answers: dict[str, Tree]) -> str:
    """An answer of a command a line, or a field of it: differences in git are then readable."""
    lines = []
    for name, said in answers.items():
        commands = []
        for command, found in said.items():
            fields = ",\n".join(f"   {_json(k)}: {_json(v)}" for k, v in found.items())
            commands.append(f"  {_json(command)}: {{\n{fields}\n  }}")
        lines.append(f" {_json(name)}: {{\n" + ",\n".join(commands) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Tree) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make answers.json anew")
    parser.add_argument("--only", default="", metavar="NAME", help="jobs with this in their name")
    options = parser.parse_args()
    home, here = Path(shardwright.__file__).parent, FOLDER.parents[1] / "src"
    if home.parent != here:
        sys.exit(f"shardwright: expected that of {here}, got {home}. Set PYTHONPATH={here}.")
    chosen = {name: job for name, job in jobs().items() if options.only in name}
    old = kept() if ANSWERS.exists() else {}
    new, wrong = dict(old), 0
    for name, job in chosen.items():
        begun = time.process_time()
        new[name] = answer(job)
        found = list(differences(old.get(name), json.loads(json.dumps(new[name])), name))
        wrong += len(found)
        print(f"{time.process_time() - begun:6.2f} s  {len(found):3} differ  {name}", flush=True)
        for line in found:
            print(f"  {line}")
    if options.write:
        ANSWERS.write_text(_written({name: new[name] for name in jobs() if name in new}))
        return 0
    gone = sorted(old.keys() - jobs().keys())
    print(
        f"{len(chosen)} jobs, {wrong} differences" + (f"; no job any more: {gone}" if gone else "")
    )
    return 1 if wrong or gone else 0


if __name__ == "__main__":
    for each in TERMINAL:
        os.environ.pop(each, None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHARDWRIGHT_CACHE"] = cache  # what is recorded, is recorded by this code
        sys.exit(_main())
