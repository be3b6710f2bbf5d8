"""What tests of several floors share."""

from __future__ import annotations

import atexit
import gc
import inspect
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import budgets
import pytest
import warm
from combinations import choose, is_dear
from commands import Call, called, forget_modules
from hypothesis import settings

from shardwright.core.amount import Step

# Recordings of models are made once for all tests of a run, whatever an earlier one has left.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["SHARDWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="shardwright-cache-")
    atexit.register(shutil.rmtree, os.environ["SHARDWRIGHT_CACHE"], ignore_errors=True)

# Cases that a test of properties draws, anew in every run, and as many more where a person asks:
# pytest --hypothesis-profile thorough
settings.register_profile("usual", deadline=None, max_examples=15)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("usual")

WAITING = {"faults", "test_tour.py"}
DEAR = "distributed"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "ceil": math.ceil,
    "log": math.log,
    "sqrt": math.sqrt,
    "max": max,
    "min": min,
    "where": lambda condition, a, b: a if condition else b,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "name the N test functions that take most processor time"
    parser.addoption("--dearest", type=int, default=0, metavar="N", help=said)


def pytest_configure(config: pytest.Config) -> None:
    budgets.register(config)


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks at what was imported and collected again


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that mostly wait for processes alternate with those that compute, so that no processor
    is idle, and the dearest ones come first, so that no worker is left alone with them. Of tests
    that are dear not every combination of parameters runs daily, nor of these every one in ``make
    test``. What is marked ``gpu`` is skipped without one."""
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])
    files: dict[Path, list[pytest.Item]] = {}
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    waiting = [path for path in files if WAITING & set(path.parts)]
    computing = sorted(
        (path for path in files if path not in waiting), key=lambda path: DEAR not in path.parts
    )
    order = (path for pair in zip_longest(waiting, computing) for path in pair if path)
    items[:] = [item for path in order for item in files[path]]
    for cases in tests.values():
        if is_dear(cases[0]):
            choose(cases)


def _skip_without_gpu(items: Sequence[pytest.Item]) -> None:
    if not items:
        return
    import torch  # not for tests of floors that have none

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _reevaluate(steps: Sequence[Step]) -> None:
    """Compute every printed line again: the formula from earlier names, the numbers alone."""
    known: dict[str, Any] = {}
    for step in steps:
        if step.formula:
            names = {name: f"value_{index}" for index, name in enumerate(known)}
            longest_first = sorted(map(re.escape, names), key=len, reverse=True)
            pattern = rf"(?<![\w.])(?:{'|'.join(longest_first) or '(?!)'})(?![\w.])"
            text = re.sub(pattern, lambda match: names[match.group()], step.formula)  # noqa: B023
            values = {names[name]: value for name, value in known.items()}
            bare: dict[str, Any] = {"__builtins__": {}}
            assert eval(text, bare, {**FUNCTIONS, **values}) == step.value, step
            assert eval(step.numbers, bare, dict(FUNCTIONS)) == step.value, step
        known[step.name] = step.value


@pytest.fixture(scope="session")
def reevaluate() -> Callable[[Sequence[Step]], None]:
    """Fails unless every printed line of a derivation evaluates to the value it states."""
    return _reevaluate


@pytest.fixture(scope="session")
def public_functions() -> Callable[[ModuleType], set[str]]:
    """Names of the functions that a module defines for others."""

    def names(module: ModuleType) -> set[str]:
        return {
            name
            for name, value in inspect.getmembers(module, inspect.isfunction)
            if value.__module__ == module.__name__ and not name.startswith("_")
        }

    return names


@pytest.fixture(autouse=True)
def _searches_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take on a busy machine."""
    monkeypatch.setattr("shardwright.cli.planning.FIRST", math.inf)


@pytest.fixture
def warm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test's own process launches import nothing."""
    monkeypatch.setattr("shardwright.launcher.launch.subprocess", warm.LAUNCHER)


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Call]:
    """``call("plan", path)`` as typed in an empty folder, away from a terminal."""
    for name in ("FORCE_COLOR", "NO_COLOR", "SHARDWRIGHT_LOG", "RANK", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield partial(called, capsys)
    forget_modules(tmp_path)
