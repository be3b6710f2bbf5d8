from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.launcher import load


@pytest.mark.parametrize(("taken", "wanted"), [(-0.1, 0.0), (0.0, 0.0), (2 / 3, 1.0), (1.0, 2.0)])
def test_others_want_more_than_they_take_beside_ranks_on_all_cores(
    taken: float, wanted: float
) -> None:
    assert load.wanted(taken, cores=2) == pytest.approx(wanted)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2\n", "cpu a b c d e\n"])
def test_where_the_system_does_not_say_the_load_before_is_taken(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    monkeypatch.setattr(load, "_STAT", stat)
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 0.0, 0.0))
    assert load.OtherLoad().ended() == 1.5


def test_what_this_process_does_is_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, used = tmp_path / "stat", [10.0]
    monkeypatch.setattr(load, "_STAT", stat)
    monkeypatch.setattr(load, "_own", lambda: used[0])
    monkeypatch.setattr("time.monotonic", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    stat.write_text("cpu 1000 0 0 500 0 0 0 0 0 0\n")
    found = load.OtherLoad()
    stat.write_text("cpu 2900 0 100 500 0 0 0 0 0 0\n")  # 20 s of cores, of which 10 are its own
    used[0] = 20.0
    assert found.ended() == pytest.approx(2.0)
