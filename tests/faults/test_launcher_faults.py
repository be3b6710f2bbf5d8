"""Every way a run can end: the code, the words, and nobody left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.core.errors import InputError
from shardwright.launcher import launch as launching
from shardwright.launcher.ending import RunOutcome, decode_outcome
from shardwright.launcher.folder import MARK
from shardwright.launcher.heartbeat import read_heartbeat
from shardwright.launcher.launch import Launch, launch

HERE = Path(__file__).parent
HANGS = 60.0  # seconds after which nothing will come; an endless worker lives for 100

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def workers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def torchrun_has_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes long."""
    monkeypatch.setattr(launching, "_LEAVE", 2 * HANGS)


def run(folder: Path, fault: str, timeout: float = 20.0) -> tuple[RunOutcome, str]:
    said = io.StringIO()
    request = Launch("workers", (str(folder), fault), 2, folder, timeout, setup_timeout=60.0)
    outcome = launch(request, said)
    assert decode_outcome((folder / "outcome.json").read_bytes()) == outcome
    assert living(folder) == []
    return outcome, said.getvalue()


def living(folder: Path) -> list[str]:
    """The command lines of the processes that work for a run in ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            line = (process / "cmdline").read_bytes()
            marked = f"{MARK}=".encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if marked and bytes(folder) in line:
            found.append(line.decode())
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def start_launcher(folder: Path) -> subprocess.Popen[bytes]:
    """A launcher in its own process, with both ranks past their start."""
    code = (
        "import sys; from pathlib import Path; from shardwright.launcher.launch import *;"
        f"folder = Path({str(folder)!r});"
        "outcome = launch(Launch('workers', (str(folder), 'endless'), 2, folder));"
        "assert 'torch' not in sys.modules;"
        "print(outcome.reason, file=sys.stderr); sys.exit(outcome.code)"
    )
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=said)
    wait_for(lambda: all(moving(folder, rank) for rank in (0, 1)), HANGS)
    return process


def moving(folder: Path, rank: int) -> bool:
    heartbeat = read_heartbeat(folder / f"rank-{rank}.pulse")
    return heartbeat is not None and heartbeat.sequence > 3


@pytest.mark.slow
def test_a_run_that_finishes_ends_with_0_and_listens_on_loopback_only(tmp_path: Path) -> None:
    outcome, said = run(tmp_path, "none")
    assert (outcome.code, outcome.reason, outcome.step) == (0, "finished", 9)
    assert [rank.state for rank in outcome.ranks] == ["finished", "finished"]
    command = (tmp_path / "torchrun.sh").read_text()
    assert "-m torch.distributed.run --nnodes=1 --nproc-per-node=2" in command
    assert "step 10/10  loss 8.0000" in said
    listening = (tmp_path / "listening.txt").read_text().split()
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}


@pytest.mark.slow
def test_a_rank_that_refuses_its_input_is_named_and_not_its_peers(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "input_1")
    assert outcome.code == 2
    want = "rank 1: batch 7: expected ids below 100, got 100. (step 7, exchange_rows)"
    assert outcome.reason == want
    assert outcome.ranks[1].state == "failed"
    assert outcome.ranks[0].state in ("failed", "stopped")


@pytest.mark.slow
def test_ranks_that_agree_that_no_plan_fits_end_with_3(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "no_plan")
    assert outcome.code == 3
    assert "plan: expected at most 1 GiB on rank 0, got 2 GiB." in outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.product), 1])
def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path, victim: int) -> None:
    outcome, _ = run(tmp_path, f"kill_{victim}")
    assert outcome.code == 5
    start = f"rank {victim} died without a word at step 7 in exchange_rows"
    assert outcome.reason.startswith(start)
    assert "killed by signal 9, SIGKILL" in outcome.reason
    assert outcome.ranks[victim].state == "lost"
    assert outcome.ranks[victim].code == -9
    other = outcome.ranks[1 - victim]
    assert other.state in ("failed", "stopped")  # stopped: torchrun was faster than gloo's error
    if other.state == "failed":
        assert other.peer
        assert "at step 7, exchange_rows, collective 8" in other.message


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "stop_1", timeout=3.0)
    assert outcome.code == 5
    assert outcome.reason.startswith("rank 1 made no progress for ")
    assert "(the process is stopped); step 7, exchange_rows, collective 8" in outcome.reason
    assert outcome.reason.endswith("; rank 0 waited")
    assert outcome.ranks[1].state == "lost"


@pytest.mark.slow
def test_a_worker_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "import")
    assert outcome.code == 1
    assert "No module named 'shardwright.no_such_module'" in outcome.reason
    assert "stderr.log" in outcome.reason
    assert "died before a sign of life" in outcome.reason


@pytest.mark.slow
def test_nobody_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path)
    launcher.kill()
    launcher.wait(HANGS)
    wait_for(lambda: living(tmp_path) == [], HANGS)


@pytest.mark.slow
def test_the_next_run_in_the_folder_of_a_killed_launcher_outlives_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_LAST_WORKERS", 60.0)
    launcher = start_launcher(tmp_path)
    launcher.kill()
    launcher.wait(5.0)
    assert living(tmp_path) != []
    outcome, _ = run(tmp_path, "quick")
    assert (outcome.code, outcome.reason, outcome.step) == (0, "finished", 9)


@pytest.mark.slow
def test_workers_of_a_killed_launcher_that_cannot_end_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = start_launcher(tmp_path)
    reading = read_heartbeat(tmp_path / "rank-1.pulse")
    assert reading is not None
    os.kill(reading.pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait(5.0)
    monkeypatch.setattr(launching, "_LAST_WORKERS", 3.0)
    try:
        for _ in range(2):
            with pytest.raises(InputError, match="a run whose launcher is gone: ") as caught:
                run(tmp_path, "quick")
            assert str(reading.pid) in str(caught.value)
            assert str(caught.value).endswith("End them or choose another folder.")
    finally:
        os.kill(reading.pid, signal.SIGKILL)
    wait_for(lambda: living(tmp_path) == [], 30.0)
    assert run(tmp_path, "quick")[0].code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 75, "SIGTERM")]
)
def test_a_signal_ends_everything_in_order(
    tmp_path: Path, number: signal.Signals, code: int, name: str
) -> None:
    launcher = start_launcher(tmp_path)
    launcher.send_signal(number)
    assert launcher.wait(HANGS) == code
    assert living(tmp_path) == []
    outcome = decode_outcome((tmp_path / "outcome.json").read_bytes())
    assert outcome.code == code
    assert [(rank.state, rank.code) for rank in outcome.ranks] == [("stopped", code)] * 2
    assert outcome.reason.startswith(f"stopped by {name} at step ")
    assert outcome.reason in (tmp_path / "said.txt").read_text()


@pytest.mark.slow
def test_a_file_of_the_folder_does_not_stand_in_the_way_of_a_module_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uuid.py").write_text("raise SystemExit('not the one that was meant')")
    monkeypatch.chdir(tmp_path)
    outcome, _ = run(tmp_path / "run", "quick")
    assert outcome.code == 0
