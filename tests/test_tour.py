"""docs/tour.md shows what its commands print."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Call

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?m)^    \$ shardwright (?P<words>(?:.*\\\n)*.*)\n(?P<shown>(?:    (?!\$ ).*\n)*)"
)
README = (ROOT / "README.md").read_text()
# scores of the demo's training, on a processor whose sums are rounded otherwise
SCORE = re.compile(r"\b0\.\d{4}\b")
SCORES_VARY_BY = 0.002
# of constants that may be measured again, and what another machine learns
VARIES = re.compile(r"[\d.,]+ (?:µs|ms|s)\b|[\d.,]+ samples per second|[\d.]+ at step")


def plain(line: str) -> str:
    """A line without the width of its columns."""
    return re.sub(r"─+", "─", " ".join(VARIES.sub("#", line).split()))


@pytest.fixture
def printed(
    call: Call,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str, int], str]:
    """What a command prints on so many columns, in a folder that has the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "tour"))

    def by(words: str, columns: int) -> str:
        monkeypatch.setenv("COLUMNS", f"{columns}")
        said = call(*shlex.split(words))
        assert said.code == 0, said.err
        return said.out

    return by


def check_shown(shown: str, text: str, words: str) -> None:
    """Every line that is ``shown`` is in ``text``, in this order, but for what varies."""
    printed = iter(map(plain, text.splitlines()))
    for line in map(plain, shown.splitlines()):
        assert line == "..." or line in printed, f"{words}: {line}"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_runs")
def test_the_tour_is_what_its_commands_print(printed: Callable[[str, int], str]) -> None:
    blocks = list(BLOCK.finditer((ROOT / "docs" / "tour.md").read_text()))
    assert len(blocks) > 5
    for block in blocks:
        words = block["words"].replace("\\\n", "")
        check_shown(block["shown"], printed(words, 80), words)


def check_scores(shown: list[str], printed: list[str]) -> None:
    """The lines with scores are in ``printed``, with scores that are nearly those."""
    words = {SCORE.sub("#", line): SCORE.findall(line) for line in printed}
    for line in shown:
        scores = [float(score) for score in SCORE.findall(line)]
        assert len(scores) >= 3, line
        found = [float(score) for score in words[SCORE.sub("#", line)]]
        assert found == pytest.approx(scores, abs=SCORES_VARY_BY), line


def after(start: str) -> str:
    """The first indented block of README.md after a text."""
    found = re.search(r"\n\n((?:(?:    .*)?\n)+)", README[README.index(start) :])
    assert found is not None
    return re.sub(r"(?m)^    ", "", found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "commands"),
    [
        ("`train` print, shortened", ["plan own.toml", "train own.toml"]),
        ("output, shortened:", ["memory examples/llama8b.toml"]),
        ("From the output, shortened, without seconds", ["demo --out run"]),
    ],
)
def test_the_first_page_shows_what_commands_print(
    request: pytest.FixtureRequest,
    printed: Callable[[str, int], str],
    tmp_path: Path,
    start: str,
    commands: list[str],
) -> None:
    if "demo --out run" in commands:  # which make demo starts as it is
        request.getfixturevalue("warm_runs")
    (tmp_path / "own.toml").write_text(after("job that names the function"))
    text = "".join(printed(words, 104) for words in commands)
    shown = [line for line in after(start).splitlines() if line.strip()]
    if "demo --out run" in commands:  # what its run measured varies with the slower rank
        ran = next(index for index, line in enumerate(shown) if "Memory as" in line)
        check_scores(shown[-2:], text.splitlines())
        shown = shown[:ran]
    check_shown("\n".join(shown), text, commands[0])
