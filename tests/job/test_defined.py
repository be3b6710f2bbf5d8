"""Whether a file defines a function is seen without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.core.errors import InputError
from shardwright.job.model import check_defined

SOURCE = """
import elsewhere as imported
from elsewhere import chosen, given as renamed
raise SystemExit(3)
if True:
    def inside(): ...
else:
    assigned = lambda: None
class Made:
    def method(self): ...
def plain():
    hidden = 3
    def inner(): ...
first, (second, third) = 1, (2, 3)
"""
FOUND = ("imported", "chosen", "renamed", "inside", "assigned", "Made", "Made.method", "plain")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "defines.py").write_text(SOURCE)
    (tmp_path / "opens.py").write_text("from elsewhere import *\n")
    (tmp_path / "broken_here.py").write_text("def (\n")
    (tmp_path / "spaced" / "deep").mkdir(parents=True)
    (tmp_path / "spaced" / "deep" / "defines.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("module", ["defines", "spaced.deep.defines"])
@pytest.mark.parametrize("name", [*FOUND, "second", "third"])
def test_whatever_a_file_has_at_its_own_level_is_found(module: str, name: str) -> None:
    check_defined(f"{module}:{name}", "data.python")


@pytest.mark.parametrize("name", ["hidden", "inner", "method", "elsewhere", "given"])
def test_what_is_inside_of_others_is_not(name: str) -> None:
    with pytest.raises(InputError, match=f"data.python: expected a function '{name}' in defines"):
        check_defined(f"defines:{name}", "data.python")


@pytest.mark.parametrize("name", ["opens:any", "broken_here:any", "spaced.deep:any", "math:any"])
def test_what_only_running_it_would_tell_is_left_to_a_run(name: str) -> None:
    check_defined(name, "data.python")


@pytest.mark.parametrize("name", ["nowhere:f", "defines.inner:f", "spaced.nowhere:f"])
def test_a_module_that_is_not_there_is_named(name: str) -> None:
    module = name.partition(":")[0]
    with pytest.raises(InputError, match=f"an importable module '{module}', got none"):
        check_defined(name, "data.python")


def test_what_is_installed_is_found() -> None:
    check_defined("numpy.linalg:norm", "x")
    with pytest.raises(InputError, match="There are "):
        check_defined("wsgiref.util:nothing_of_that_name", "x")
