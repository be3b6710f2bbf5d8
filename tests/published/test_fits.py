"""Layouts that others ran or that ran out of memory, beside what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published.fits import compare, main
from published.times import read_rows

VALIDATION = Path(__file__).parents[2] / "validation" / "published"
CARRIED = json.loads((VALIDATION / "fits_rows.json").read_text())
TOLD = json.loads((VALIDATION / "fits.json").read_text())


def few(count: int) -> dict[str, object]:
    """The first layouts without a pipeline that ran, and as many that ran out."""
    fields = CARRIED["fields"]
    pp, ran = fields.index("pp"), fields.index("ran")
    rows = [row for row in CARRIED["rows"] if row[pp] == 1]
    its = [row for way in (0, 1) for row in [r for r in rows if r[ran] == way][:count]]
    return CARRIED | {"rows": its}


def test_a_few_layouts_are_told_as_the_figures_say() -> None:
    found = compare(few(2), "rows.json")
    assert found["ran"]["rows"] == found["ran_out"]["rows"] == 2
    assert found["left_out"] == {}
    wrong = [{**row, "ran": int(row["ran"])} for row in TOLD["wrong"]]
    assert all(row in wrong for row in found["wrong"])
    assert found["ran"]["right"] + found["ran_out"]["right"] == 4 - len(found["wrong"])


def test_figures_are_of_all_carried_layouts() -> None:
    rows = read_rows(CARRIED, "rows.json")
    for name, way in (("ran", 1), ("ran_out", 0)):
        assert TOLD[name]["rows"] == sum(row["ran"] == way for row in rows)
        assert sum(TOLD[name]["verdicts"].values()) == TOLD[name]["rows"]


def test_a_file_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert main([str(path)]) == 2
    assert "x.json: expected an object with 'fields' and 'rows'" in capsys.readouterr().err
