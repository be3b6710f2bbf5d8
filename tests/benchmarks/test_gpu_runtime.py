"""Stages of a GPU's measurements that train and run tests: small, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import show
from gpu import tests as stage_of_tests
from gpu.rows import Setting, rows_of

SMALL = Setting("cpu", small=True)
ROWS = {row.name: row for row in rows_of("runtime", SMALL)}
DAILY = (
    *("fp32 flat zero 2", "bf16 per_param zero 3", "clipping", "step flat fp32, offloaded"),
    *("checkpoint per_param", "tables sgd table_wise", "one rank all_to_all"),
    "one rank, the runtime's own",
)
PASSES, FAILS = "def test_one(): pass\n", "def test_two(): assert 1 == 2\n"
MARKED = "import pytest\n\npytestmark = pytest.mark.gpu\n\n"


def leaves(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, dict):
            yield from leaves(value, f"{name} {key}")
        else:
            yield f"{name} {key}", value


@pytest.mark.parametrize(
    "name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in ROWS]
)
def test_numbers_are_those_of_plain_modules(name: str) -> None:
    found = dict(ROWS[name].run())
    assert json.loads(json.dumps(found)) == found
    for place, value in leaves(found):
        assert value is not False, place
        assert value != "differs", place
        assert "Error" not in str(value), place
        if place.endswith("_apart") and "bf16" not in name:
            assert value < 1e-3, place


def test_half_precision_is_that_of_fsdp2() -> None:
    found = ROWS["bf16 flat zero 3"].run()["beside fsdp2 bf16"]
    assert found == {"loss_apart": 0, "gradient_apart": 0, "weight_apart": 0}


def test_tests_are_told_one_by_one_where_they_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED + PASSES + FAILS)
    (tmp_path / "test_other.py").write_text("def test_three(): raise OSError\n")
    found = stage_of_tests.measured(SMALL, tmp_path)
    assert (found["passed"], found["failed"], found["skipped"], found["code"]) == (1, 1, 0, 1)
    (case,) = found["cases"]
    assert case["name"].endswith("test_two")
    assert case["message"].startswith("assert 1 == 2")
    document = {"stage": "tests", "rows": [{"name": "all", **found}]}
    assert "Not measured" not in "\n".join(show._left(document))


def test_pytest_that_cannot_even_begin_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text("import nowhere  # pytest.mark.gpu\n")
    found = stage_of_tests.measured(SMALL, tmp_path)
    assert found["failed"] == 1
    assert "nowhere" in found["cases"][0]["message"]
