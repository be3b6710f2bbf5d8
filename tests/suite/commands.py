"""The command line called in a test's own process, as a user types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main


@dataclass(frozen=True)
class Answer:
    """What a command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refuses(self, code: int, *words: str) -> None:
        """One line on stderr that says all of ``words``; nothing on stdout."""
        assert self.code == code, self
        assert self.err.startswith("shardwright"), self
        assert self.err.count("\n") == 1, self
        assert self.err.endswith("\n"), self
        assert "Traceback" not in self.err
        assert "\x1b" not in self.err
        assert self.out == ""
        for word in words:
            assert word in self.err


Call = Callable[..., Answer]

# A text of which little is held out. Without data.path a run makes up 300 kB and scores a tenth of
# it, which takes longer than the few steps that a test trains.
LITTLE_TEXT = bytes(range(256)) * 10


def called(
    capsys: pytest.CaptureFixture[str], *words: object, main: Callable[..., int] = main
) -> Answer:
    """What ``shardwright words ...`` leaves, or another program."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    streams = capsys.readouterr()
    return Answer(code, streams.out, streams.err)


def forget_modules(folder: Path) -> None:
    """Modules of a folder are imported anew by who comes next, from a folder of its own."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]
