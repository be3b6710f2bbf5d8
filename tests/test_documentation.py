"""What the documents say about the tree is true, and the tree keeps the sizes they promise."""

from __future__ import annotations

import ast
import doctest
import functools
import itertools
import re
from pathlib import Path

import job_tables
import pytest
import torch.distributed as dist
from study.section import StudySection

import shardwright as sw
from shardwright.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
API_PAGE = ROOT / "docs" / "api.md"
COMMANDS_PAGE = ROOT / "docs" / "commands.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(PACKAGE.rglob("*.py"))

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 80

_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|toml|md|css|j2|typed))`")
_LINK = re.compile(r"(?m)(?:\]\(\s*<?|^\[[\w-]+\]: )([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")


@functools.cache
def _tree(path: Path) -> ast.Module:
    """Of a source file, which several tests look at."""
    return ast.parse(path.read_text())


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_path_in_the_architecture_exists() -> None:
    named = set(_PATH.findall(ARCHITECTURE.read_text()))
    assert named
    missing = [p for p in named if not (ROOT / p).exists() and not (PACKAGE / p).exists()]
    assert missing == []


def test_the_first_line_of_every_source_file_says_what_it_is() -> None:
    silent = [_name(path) for path in SOURCES if not ast.get_docstring(_tree(path))]
    assert silent == []


def test_every_command_is_on_the_page_of_commands() -> None:
    text = COMMANDS_PAGE.read_text()
    assert [name for name in COMMANDS if not re.search(rf"shardwright {name}\b", text)] == []


def test_the_readme_says_how_a_shell_finds_the_command_before_it_uses_it() -> None:
    typed = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    (found,) = (at for at, line in enumerate(typed) if line == ". .venv/bin/activate")
    used = [at for at, line in enumerate(typed) if line.startswith(("shardwright ", "torchrun "))]
    assert used
    assert found < min(used)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    targets = [a or b for a, b in _LINK.findall(document.read_text())]
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    assert [t for t in local if not (document.parent / t).exists()] == []


def _anchors(document: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_to_headings_that_there_are(document: Path) -> None:
    targets = [(a or b).partition("#") for a, b in _LINK.findall(document.read_text())]
    for path, _, anchor in targets:
        if anchor and path.endswith((".md", "")) and ":" not in path:
            there = document.parent / path if path else document
            assert anchor in _anchors(there), f"{path}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_no_level_of_headers_is_left_out(document: Path) -> None:
    """The site is not built otherwise."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.M)]
    assert [b for a, b in itertools.pairwise([0, *levels]) if b > a + 1] == []


def test_no_source_file_is_too_long() -> None:
    lines = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {n: count for n, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_too_long() -> None:
    found = {}
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    found[f"{_name(path)}:{node.name}"] = length
    assert found == {}


def test_the_architecture_names_the_exit_codes_of_the_errors() -> None:
    from shardwright.core import errors

    rows = re.findall(r"^\| (\d+) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(row) for row in rows} == codes


def test_the_python_example_of_the_commands_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", COMMANDS_PAGE.read_text(), re.DOTALL)
    assert found
    monkeypatch.chdir(ROOT)
    exec(compile(found.group(1), "commands.md", "exec"), {})
    peak, seconds, gap = capsys.readouterr().out.split()
    assert int(peak) > 0
    assert float(seconds) > 0
    assert float(gap) >= 0


def _examples() -> list[doctest.Example]:
    """Those of the page of the Python interface, in order."""
    text = re.sub(r"^```.*$", "", API_PAGE.read_text(), flags=re.MULTILINE)
    return doctest.DocTestParser().get_examples(text, API_PAGE.name)


def test_every_public_name_has_an_example() -> None:
    code = "".join(example.source for example in _examples())
    assert [name for name in sw.__all__ if not re.search(rf"\bsw\.{name}\b", code)] == []
    kinds = (sw.DStorage, sw.Buckets, sw.Run)
    own = {name for kind in kinds for name in vars(kind) if re.match(r"[a-z]+", name)} - {"unit"}
    assert [name for name in sorted(own) if not re.search(rf"\.{name}\b", code)] == []


@pytest.mark.slow
def test_the_examples_of_the_python_interface_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    page = doctest.DocTest(_examples(), {}, API_PAGE.name, str(API_PAGE), 0, None)
    said: list[str] = []
    try:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(page, out=said.append)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert said == [], "".join(said)


def test_the_reference_of_a_job_says_what_its_sections_do() -> None:
    assert job_tables.PAGE.read_text() == job_tables.page(StudySection), (
        "python tests/suite/job_tables.py writes the table of docs/job.md again"
    )
