"""Stages of a GPU's measurements that train and run tests: small, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu import show
from gpu import tests as stage_of_tests
from gpu.rows import Setting, rows_of
from stage_checks import check_numbers

SMALL = Setting("cpu", small=True)
ROWS = {row.name: row for row in rows_of("runtime", SMALL)}
DAILY = (
    *("fp32 flat zero 2", "bf16 per_param zero 3", "clipping", "step flat fp32, offloaded"),
    *("checkpoint per_param", "tables sgd table_wise", "one rank all_to_all"),
    "one rank, the runtime's own",
)
PASSES, FAILS = "def test_one(): pass\n", "def test_two(): assert 1 == 2\n"
MARKED = "import pytest\n\npytestmark = pytest.mark.gpu\n\n"


@pytest.mark.parametrize("name", DAILY)  # all of them: test_gpu_run.py
def test_numbers_are_those_of_plain_modules(name: str) -> None:
    found = dict(ROWS[name].run())
    assert json.loads(json.dumps(found)) == found
    check_numbers(name, found)


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
