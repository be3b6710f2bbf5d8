"""Every figure of README.md and docs/ is one of a file in ``validation/``.

Beside a paragraph, a table or a printed example of a document stands a comment that nobody sees:

    <!-- figures: validation/cpu-2-cores/memory.json
    let fast = speed.times_faster_cold
    50 times = fast
    at most 10 % >= 100 * max(abs(row.off_percent) for row in random.rows)
    -->

It belongs to the text that it follows without an empty line, else to the text behind it. A line has
words as they are printed, and what makes their numbers from the file: an expression over the keys
of the file (``file`` is all of it), in the units that are printed. Where the words have several
numbers the expression has as many. ``=`` is equality within the digits that are printed; with
``>=`` and ``<=`` the printed number is a bound. ``WORDS : REASON`` says why a number has no file.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.timeline import decode, phase_seconds

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
MIB = 2**20

NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w])")
UNIT = r"(?:%|[mµu]?s|(?:milli)?seconds?|minutes?|hours?|times|[kKMGT]i?B|us)(?!\w)"
SPELLED = (
    r"(?:an?|half|one|two|three|four|five|six|seven|eight|nine|ten|twenty|quarter|third|tenth)"
)
MEASURED = re.compile(
    rf"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?: to \d[\d,.]*)? ?{UNIT}"  # 3 s, 2 to 6 s
    r"|(?<![\w.-])[\d,]*\d\.\d+(?![\w.])"  # 0.71
    rf"|\b{SPELLED}(?: to {SPELLED})? (?:of an? )?(?:seconds?|minutes?|hours?|times|per cent)\b"
)
# Numbers of README.md that no file of validation/ has, as patterns, and why.
ALLOWED = {
    r"Python 3\.11": "a version",
    r"PyTorch is 2\.13; with 2\.11": "versions",
    r"about a minute, 1\.1 GB of disk": "of an installation, by the net and the package index",
    r"a quarter of a minute": "of a machine that does nothing else",
    r"in 7 minutes on two cores": "of a machine that does nothing else",
    r"a tour in ten minutes": "of a reader",
}


class Keys(dict[str, Any]):
    """An object of JSON whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class Figure:
    """One line of a comment: words of a text, and what makes their numbers."""

    words: str
    relation: str
    expression: str
    names: str
    source: str


@dataclass
class Text:
    """A paragraph, a table or a block of code, in one line, and the figures beside it."""

    words: str
    code: bool
    figures: list[Figure]
    where: str


def one_line(text: str) -> str:
    return " ".join(text.split())


def chunks(path: Path) -> Iterator[tuple[str, str, int]]:
    """(kind, text, line) of every piece of a document: comment, code, text, or nothing."""
    lines = path.read_text().splitlines()
    at = 0
    while at < len(lines):
        start, kind = at, "text"
        if lines[at].lstrip().startswith("<!--"):
            kind = "comment"
            while "-->" not in lines[at]:
                at += 1
            at += 1
        elif lines[at].lstrip().startswith("```"):
            kind = "code"
            at += 1
            while not lines[at].lstrip().startswith("```"):
                at += 1
            at += 1
        elif not lines[at].strip():
            kind, at = "nothing", at + 1
        elif lines[at].startswith("    "):
            kind = "code"
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            while not lines[at - 1].strip():
                at -= 1
        else:
            while at < len(lines) and lines[at].strip() and not lines[at].startswith("<!--"):
                at += 1
        yield kind, "\n".join(lines[start:at]), start + 1


def texts(path: Path) -> list[Text]:
    """Every text of a document with the figures of its comments."""
    found: list[Text] = []
    waiting: list[Figure] = []
    follows = False
    for kind, text, line in chunks(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        if kind == "comment":
            if text.lstrip("<!- ").startswith("figures:"):
                (found[-1].figures if follows else waiting).extend(figures(text, where))
            continue
        follows = kind != "nothing"
        if follows:
            found.append(Text(one_line(text), kind == "code", waiting, where))
            waiting = []
    assert not waiting, f"{path.name}: a comment at its end belongs to no text"
    return found


def figures(comment: str, where: str) -> list[Figure]:
    """The lines of a comment; those that begin with ``let`` go to all that follow."""
    head, *lines = comment.strip().removeprefix("<!--").removesuffix("-->").strip().splitlines()
    source = head.removeprefix("figures:").strip()
    assert (ROOT / source).is_file(), f"{where}: {source} is no file"
    names, found = "", []
    for line in lines:
        if line.startswith("let "):
            names += line.removeprefix("let ") + "\n"
            continue
        parts = re.match(r"(.+?) (=|>=|<=|:) (.+)", line)
        assert parts is not None, f"{where}: expected WORDS = EXPRESSION, got {line}"
        found.append(Figure(parts[1], parts[2], parts[3], names, source))
    return found


@cache
def carried(source: str) -> dict[str, Any]:
    """A file of ``validation/`` as names for expressions."""
    file = json.loads((ROOT / source).read_text(), object_hook=Keys)
    helpers = {
        "file": file,
        "one": one,
        "mean": statistics.fmean,
        "median": statistics.median,
        "deviation": statistics.stdev,
        "binary_entropy": lambda p: -p * math.log(p) - (1 - p) * math.log(1 - p),
        "MB": 10**6,
        "KIB": 2**10,
        "MIB": MIB,
        "GIB": 2**30,
    }
    return {**file, **helpers}


def one(rows: Iterable[Any], **like: Any) -> Any:
    """The only one of ``rows`` that has these values."""
    (found,) = (row for row in rows if all(row[key] == value for key, value in like.items()))
    return found


def flat(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [each for one_of in value for each in flat(one_of)]
    return [value]


def wrong(figure: Figure) -> str | None:
    """What a figure is instead, or None where it is what is printed."""
    if figure.relation == ":":
        return None
    names = dict(carried(figure.source))
    exec(figure.names, names)
    value = eval(figure.expression, names)
    if isinstance(value, bool):
        return None if value else "not so"
    if isinstance(value, str):
        return None if value == figure.words else value
    values, printed = flat(value), NUMBER.findall(figure.words)
    if len(values) != len(printed):
        return f"{len(values)} numbers for {len(printed)}: {values}"
    for text, found in zip(printed, values, strict=True):
        number = float(text.replace(",", ""))
        digits = len(text.partition(".")[2])
        near = abs(number - found) <= 0.5 * 10**-digits * (1 + 1e-9)
        holds = {"=": near, ">=": number >= found, "<=": number <= found}[figure.relation]
        if not holds or (text[0] in "+-" and found and text[0] != f"{found:+}"[0]):
            return f"{values}"
    return None


def uncovered(text: Text, allowed: Iterable[str] = ()) -> list[str]:
    """Measured numbers of a text that no comment and no allowance names."""
    words = text.words
    for pattern in [*(re.escape(one_line(figure.words)) for figure in text.figures), *allowed]:
        words = re.sub(pattern, " … ", words)
    return [match[0] for match in MEASURED.finditer(words)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_figure_is_what_its_file_says(document: Path) -> None:
    for text in texts(document):
        for figure in text.figures:
            assert one_line(figure.words) in text.words, f"{text.where} does not say it: {figure}"
            assert wrong(figure) is None, f"{text.where}: {figure} is {wrong(figure)}"


def test_every_measured_number_of_the_first_page_has_a_file_or_a_reason() -> None:
    found = texts(README)
    numbers = {text.where: uncovered(text, ALLOWED) for text in found if not text.code}
    assert {where: left for where, left in numbers.items() if left} == {}
    whole = one_line(README.read_text())
    assert [pattern for pattern in ALLOWED if not re.search(pattern, whole)] == []
    assert [one for text in found for one in text.figures if one.relation == ":"] == []


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda path: path.name)
def test_a_text_that_names_a_file_of_figures_is_held_to_it_as_a_whole(document: Path) -> None:
    found = texts(document)
    for text, following in zip(found, [*found[1:], found[-1]], strict=True):
        names_a_file = re.search(r"validation/[\w-]+/\w+\.json", text.words) and not text.code
        if names_a_file:  # or introduces a table that is held to it
            assert text.figures or following.figures, f"{text.where}: no figures beside it"
        if text.figures or names_a_file:
            assert uncovered(text) == [], text.where


@pytest.fixture(scope="module")
def demo() -> sw.Plan:
    return sw.plan(sw.read_job(ROOT / "examples" / "demo.toml"))


def test_the_carried_run_of_the_demo_is_one_of_the_present_plan(demo: sw.Plan) -> None:
    run = carried("validation/cpu-2-cores/demo.json")
    assert {line.rank: line.predicted_bytes for line in run["peaks"]} == {
        rank.rank: rank.peak_bytes for rank in demo.ranks
    }
    assert run["plan"] == {
        "max_rank_seconds": demo.max_rank_seconds,
        "lower_bound_seconds": demo.lower_bound_seconds,
        "gap": demo.gap,
    }
    seconds = {(line.rank, line.phase): line.predicted for line in run["seconds"]}
    assert seconds == phase_seconds(decode(demo.timeline))
    assert run["exact_bytes_unequal"] == 0


def test_the_first_page_shows_the_demos_present_plan(
    demo: sw.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "104")  # as wide as what is shown
    (shown,) = (text for text in texts(README) if text.code and " C16 70,364 x 16 " in text.words)
    printed = one_line(re.sub("─+", "", str(demo)))
    plan, _, _ = shown.words.partition(" Memory as predicted")
    parts = [one_line(re.sub("─+", "", part)) for part in plan.split(" ... ")]
    assert len(parts) == 3
    assert [part for part in parts if part not in printed] == []
