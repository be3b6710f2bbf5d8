"""Defects that are planted to see what tests catch: each can be, and its tests are there."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFECTS = json.loads((ROOT / "benchmarks" / "planted.json").read_text())


def test_the_text_of_every_defect_is_in_its_file_once() -> None:
    texts = {each["file"]: (ROOT / each["file"]).read_text() for each in DEFECTS}
    found = {each["name"]: texts[each["file"]].count(each["old"]) for each in DEFECTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_tests_that_may_see_a_defect_exist() -> None:
    named = {
        path for each in DEFECTS for key in ("first", "tests", "elsewhere") for path in each[key]
    }
    assert sorted(path for path in named if not (ROOT / path.partition("::")[0]).exists()) == []
