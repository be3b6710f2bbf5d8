"""Tables alone are planned beside a dense part that is traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import parse_job

MODULE = """
from torch import nn


def dense(width):
    return nn.Sequential(nn.Embedding(100, width), nn.Linear(width, width), nn.Linear(width, 1))
"""
JOB = """
[model]
kind = "tables"
python = "dense_part_of_tables:dense"
arguments = {{ width = 64 }}
[cluster]
preset = "h100-8"
[batch]
size = 32
sequence = 4
[planner.reservation]
kind = "traced"
{tables}
"""
TABLE = '[[tables]]\nname = "t{0}"\nrows = 1000\ndim = 16\n'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dense_part_of_tables.py").write_text(MODULE)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(tables="".join(TABLE.format(k) for k in range(3))))
    monkeypatch.chdir(tmp_path)
    return path


def test_tables_get_what_the_traced_dense_part_leaves(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    dense = {"python": "dense_part_of_tables:dense", "arguments": {"width": 64}}
    alone = estimated(
        parse_job(
            {
                "model": dense,
                "cluster": {"preset": "h100-8"},
                "batch": {"size": 32, "sequence": 4},
            }
        )
    ).worst
    left = made["reserved"]["hbm_left"]
    assert alone.reserved_bytes >= alone.peak_bytes > 0
    assert made["capacity"]["hbm"] - left == alone.reserved_bytes


def test_a_plan_with_a_traced_dense_part_is_explained(job: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(job), "-o", str(plan)]) == 0
    (tmp_path / "dense_part_of_tables.py").unlink()  # the figure stands in the plan
    assert main(["explain", str(plan)]) == 0


def test_a_dense_part_that_cannot_be_traced_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "--set", "model.python=no_such_module:dense"]) == 2
    assert "no_such_module" in capsys.readouterr().err
