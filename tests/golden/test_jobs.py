"""Commands say of jobs what they said: of tables daily, of each kind of model among the slow tests,
of all jobs where ``python tests/golden/jobs.py`` is called."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jobs
import pytest

PINNED = f"torch=={version('torch').partition('+')[0]}\n"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.parametrize("name", jobs.names("daily"))
def test_tables_have_the_answers_that_they_had(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _hold(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(
    PINNED not in CONSTRAINTS.read_text(), reason="another torch records a model otherwise"
)
@pytest.mark.parametrize("name", jobs.names("slow"))
def test_a_job_has_the_answers_that_it_had(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _hold(name, monkeypatch)


def test_every_command_has_an_answer_and_every_answer_a_command() -> None:
    kept = {name: list(said) for name, said in jobs.kept().items()}
    assert kept == {name: job["commands"] for name, job in jobs.jobs().items()}


def _hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in jobs.TERMINAL:
        monkeypatch.delenv(each, raising=False)
    found = jobs.answer(jobs.jobs()[name])
    assert not list(jobs.differences(jobs.kept()[name], json.loads(json.dumps(found)), name))


def _tree(**changed: Any) -> Any:
    return {"code": 0, "plan": {"gap": 0.1, "units": [{"name": "top", "bytes": 4}]}} | changed


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (_tree(), []),
        (_tree(code=3), ["job > code: expected 0, got 3"]),
        (
            _tree(plan={"gap": 0.1 * (1 + 1e-13), "units": [{"name": "top", "bytes": 8}]}),
            ["job > plan > units > top > bytes: expected 4, got 8"],
        ),
        (
            _tree(plan={"gap": 0.1 * (1 + 1e-9), "units": []}),
            [
                "job > plan > gap: expected 0.1, got 0.1000000001",
                'job > plan > units: expected [{"name": "top", "bytes": 4}], got []',
            ],
        ),
        ({"code": 0, "more": 1}, ["job > plan: expected {", "job > more: expected nothing, got 1"]),
    ],
)
def test_a_difference_is_said_with_its_path(got: Any, said: list[str]) -> None:
    found = list(jobs.differences(_tree(), got, "job"))
    assert len(found) == len(said)
    assert all(line.startswith(words) for line, words in zip(found, said, strict=True))
