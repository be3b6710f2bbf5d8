"""How commands plan: a long search is heard, and Ctrl-C keeps the best plan."""

from __future__ import annotations

import io
import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.planning import EstimateProgress, SearchListener, progress_line
from shardwright.cli.train import _planned_before
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import write_plan
from shardwright.planner.search.watch import Watch


def test_a_long_search_is_heard_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.cli.planning.FIRST", 2.0)
    clock = itertools.count(0.0)
    stream = io.StringIO()
    watch = Watch(hear=SearchListener(stream), clock=lambda: next(clock) / 10)
    for _ in range(100):
        watch.over()
    watch.found(0.0288, 0.02)
    for _ in range(200):
        watch.over()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "planning for 2 s: no plan yet (Ctrl-C gives up)"
    assert "28.8 ms per step so far, gap 44.0 %" in lines[-1]
    assert "planner.time_limit" in lines[-1]
    assert len(lines) < 15


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    """Also where the tests themselves run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SearchListener(io.StringIO()) as listener:
            signal.raise_signal(signal.SIGINT)
        assert not listener.interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
def test_ctrl_c_keeps_the_best_plan_and_gives_up_where_there_is_none() -> None:
    watch = Watch()
    with SearchListener(io.StringIO()) as listener:
        watch.hear = listener
        watch.over()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            watch.over()
        watch.found(1.0)
        assert watch.over()
        with pytest.raises(KeyboardInterrupt):  # the second one
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
def test_ctrl_c_gives_up_at_once_while_the_model_is_recorded() -> None:
    with pytest.raises(KeyboardInterrupt), SearchListener(io.StringIO()):
        signal.raise_signal(signal.SIGINT)


class Heard(io.StringIO):
    """A stream that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.said = threading.Event()

    def flush(self) -> None:
        self.said.set()


def test_a_long_recording_is_heard_until_the_search_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwright.cli.planning.FIRST", 0.0)
    stream = Heard()
    with SearchListener(stream) as listener:
        assert stream.said.wait(60)
        Watch(hear=listener, clock=lambda: 0.0).over()
    first = stream.getvalue().splitlines()[0]
    assert first == "recording and pricing a step of the model for 0 s (Ctrl-C gives up)"


def test_answers_are_said_as_they_are_known_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = EstimateProgress()
    progress("estimate 2: memory.zero = 3")
    progress.known("As it is: fits")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("shardwright.cli.planning.QUIET", 0.0)
    progress.known("Longest sequence: 9")
    assert capsys.readouterr().err == "As it is: fits\nLongest sequence: 9\n"
    monkeypatch.setattr("shardwright.cli.planning.EVERY", 0.0)
    progress("estimate 3: memory.loss = chunked")
    assert capsys.readouterr().err == "estimate 3: memory.loss = chunked\n"


def test_a_search_without_a_bound_says_only_what_it_has() -> None:
    watch = Watch(5.0)
    watch.found(1.0)
    assert progress_line(watch).endswith("1 s per step so far (Ctrl-C keeps it)")


@pytest.mark.parametrize(
    ("section", "key", "value", "kept"),
    [
        ("train", "steps", 7, True),
        ("train", "learning_rate", 0.2, True),
        ("data", "rows", 5000, True),
        ("checkpoint", "every", 2, True),
        ("train", "optimizer", "adagrad", False),
        ("train", "overlap", "rows", False),
        ("data", "zipf", 2.0, False),
        ("batch", "size", 32, False),
    ],
)
def test_a_run_that_goes_on_has_its_plan_unless_the_job_asks_for_another(
    tmp_path: Path, section: str, key: str, value: Any, kept: bool
) -> None:
    document: dict[str, Any] = {
        "model": {"bottom": [4, 4], "top": [4, 1]},
        "data": {"kind": "synthetic"},
        "train": {"out": str(tmp_path)},
        "cluster": {"world_size": 2, "preset": "local"},
        "batch": {"size": 64},
        "tables": [{"name": "a", "rows": 300, "dim": 4}],
    }
    before = plan(parse_job(document))
    write_plan(before, tmp_path / "plan.json")
    job = parse_job({**document, section: {**document.get(section, {}), key: value}})
    found = _planned_before(job)
    assert (found is not None) == kept
    if found is not None:
        assert found.job == job
        assert found.tables == before.tables
