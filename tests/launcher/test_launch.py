"""The launcher's pure parts, and the worker's side of the agreement; nothing here needs torch."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.errors import InputError, RunError
from shardwright.launcher import launch as launching
from shardwright.launcher.ending import (
    OUTCOME_SCHEMA,
    Blame,
    End,
    RunOutcome,
    blame,
    decode_outcome,
    encode_outcome,
    exit_code,
    last_words,
    outcome_of,
    reason,
)
from shardwright.launcher.folder import MARK
from shardwright.launcher.heartbeat import (
    PHASES,
    Beat,
    Heartbeat,
    RankOutcome,
    read_heartbeat,
    read_status,
    write_status,
)
from shardwright.launcher.launch import (
    Launch,
    hold,
    launch,
    loopback_environment,
    torchrun_command,
)
from shardwright.launcher.progress import Lines, ProgressLog, ProgressReader, describe, writer_for
from shardwright.launcher.watch import RankView, RunWatch, exits_in, in_trouble
from shardwright.launcher.worker import first_line, from_a_peer

AT_7 = Beat(pid=1, step=7, sequence=42, phase="exchange_rows", time=0.0)
LATE = replace(AT_7, sequence=41)
DONE = RankOutcome(0, "finished", 0, 9, "done", "finished")
PEER = RankOutcome(0, "failed", 5, 7, "exchange_rows", "lost its peers", peer=True)
OWN = RankOutcome(1, "failed", 2, 7, "lookup", "batch: expected ids below 9, got 9.")


def view(rank: int, **seen: object) -> RankView:
    return replace(RankView(rank, AT_7, None, "alive"), **seen)  # type: ignore[arg-type]


def end(*views: RankView, exits: dict[int, int] | None = None, words: str = "") -> tuple[int, str]:
    verdict = blame(views)
    assert verdict is not None
    by_rank = {view.rank: view for view in views}
    arguments = (verdict, by_rank, exits or {}, words)
    return exit_code(*arguments), reason(*arguments)


def test_a_rank_with_an_error_of_its_own_is_blamed_before_a_lost_one() -> None:
    code, text = end(view(0, process="gone"), view(1, status=OWN), view(2, status=PEER))
    assert (code, text) == (2, "rank 1: batch: expected ids below 9, got 9. (step 7, lookup)")


def test_the_first_of_two_errors_is_the_cause_and_equal_ones_are_named_together() -> None:
    other = replace_status(OWN, rank=0, code=1, message="KeyError: 'a'")
    assert end(view(0, status=other, spoke=2.0), view(1, status=OWN, spoke=1.0))[0] == 2
    same = replace_status(OWN, rank=0)
    assert end(view(0, status=same), view(1, status=OWN))[1].startswith("ranks 0, 1: batch")


def replace_status(status: RankOutcome, **changes: object) -> RankOutcome:
    fields = {name: getattr(status, name) for name in status.__struct_fields__}
    return RankOutcome(**(fields | changes))


def test_a_lost_rank_is_named_with_what_is_known_of_its_end() -> None:
    views = (view(0, status=PEER), view(1, process="gone"))
    assert end(*views) == (5, "rank 1 died without a word at step 7 in exchange_rows")
    assert end(*views, exits={1: -6})[1].endswith("exchange_rows (killed by signal 6, SIGABRT)")
    assert "killed by signal 9, SIGKILL; the system" in end(*views, exits={1: -9})[1]


def test_a_start_for_which_there_was_no_memory_is_a_run_that_failed(tmp_path: Path) -> None:
    """Not what torchrun says as it cleans up; and not a bug of ours, as another error would be."""
    log = "RuntimeError: can't start new thread\nRuntimeError: cannot join thread\n"
    (tmp_path / "torchrun.log").write_text(log)
    with subprocess.Popen(["true"]) as torchrun:
        watch = RunWatch(tmp_path, 1, torchrun, "abc")
    never = End((view(0, beat=None, process="gone"),), 1, None, ())
    found = outcome_of(never, watch, (), 1.0, {})
    assert found.code == 5
    assert found.reason.startswith(
        "torchrun could not start the ranks: memory could not be had: RuntimeError: can't start new"
    )
    views = (view(0, beat=None, process="gone"),)
    assert end(*views, exits={0: 1}, words="memory could not be had: MemoryError")[0] == 5


def test_a_rank_that_never_lived_says_what_its_log_says() -> None:
    views = (view(0, beat=None, process="gone"), view(1, status=PEER))
    assert end(*views, exits={0: 1}, words="ImportError: no x") == (
        1,
        "rank 0 died before a sign of life (exit code 1): ImportError: no x",
    )
    assert end(*views, exits={0: 2}, words="usage: expected a folder")[0] == 2


def test_the_rank_that_is_behind_is_the_one_the_others_wait_for() -> None:
    views = (view(0, quiet=10.2), view(1, beat=LATE, quiet=10.4), view(2, quiet=10.2))
    want = "rank 1 made no progress for 10 s; step 7, exchange_rows, collective 41; ranks 0, 2 "
    assert end(*views) == (5, want + "waited")


def test_a_stopped_process_is_blamed_when_all_ranks_are_at_one_collective() -> None:
    _, text = end(view(0, quiet=9.0), view(1, process="stopped", quiet=9.0))
    assert text.startswith("rank 1 made no progress for 9 s (the process is stopped); step 7, ")
    assert end(view(0, quiet=9.0), view(1, quiet=9.0))[1].startswith("ranks 0, 1 made no progress")


def test_a_hanging_rank_that_torchrun_ended_is_still_the_one_that_hung() -> None:
    ended = RankOutcome(1, "stopped", 75, 7, "exchange_rows", "stopped by SIGTERM")
    hung = view(1, status=ended, quiet=5.0)
    assert end(view(0, status=PEER), hung)[1].startswith("rank 1 made no progress for 5 s")
    assert end(view(0, status=PEER), replace(hung, quiet=0.1)) == (
        75,
        "rank 1: stopped by SIGTERM (step 7, exchange_rows)",
    )


def test_a_rank_that_saved_for_long_before_it_stopped_did_not_hang() -> None:
    """As by the end of a worker that all of its loader's ranks lose: nobody asked the launcher."""
    told = "stopped by the end of a worker, saved in run/checkpoints/step-7"
    views = [
        view(r, quiet=9.0, status=RankOutcome(r, "stopped", 75, 7, "step", told)) for r in (0, 1)
    ]
    code, text = end(*views)
    assert (code, text.startswith(f"ranks 0, 1: {told}")) == (75, True)


def test_a_rank_without_a_heartbeat_showed_no_sign_of_life() -> None:
    views = (view(0, quiet=60.0), view(1, beat=None, process="unknown", quiet=61.0))
    assert end(*views)[1] == "rank 1 showed no sign of life for 61 s; rank 0 waited"


def test_only_everybodys_silence_is_trouble_and_starting_takes_longer() -> None:
    assert not in_trouble([view(0, quiet=1.0), view(1, quiet=99.0)], 10.0, 60.0)
    assert in_trouble([view(0, quiet=11.0), view(1, quiet=99.0)], 10.0, 60.0)
    assert in_trouble([view(0, status=DONE), view(1, quiet=11.0)], 10.0, 60.0)
    starting = view(1, beat=None, process="unknown", quiet=30.0)
    assert not in_trouble([view(0, quiet=30.0), starting], 10.0, 60.0)
    assert in_trouble([view(0, quiet=61.0), replace(starting, quiet=61.0)], 10.0, 60.0)
    assert not in_trouble([view(0, status=DONE), view(1, status=DONE)], 10.0, 60.0)
    assert blame([view(0, status=DONE)]) is None
    assert blame([view(0, status=DONE), view(1, process="gone")]) == Blame("lost", (1,))


def test_torchruns_log_has_exit_codes_and_signals() -> None:
    log = (
        "E0101 1 torch/x.py:1] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python\n"
        "[1]:\n  time : now\n  host : h\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : 5 (pid: 76)\n"
    )
    assert exits_in(log) == {0: 5, 1: -9}


def test_a_rank_that_torchrun_ended_is_not_blamed_beside_the_one_that_was_killed(
    tmp_path: Path,
) -> None:
    ends = ((0, -signal.SIGTERM), (1, -signal.SIGKILL))
    log = "".join(f"failed (exitcode: {code}) local_rank: {rank}\n" for rank, code in ends)
    (tmp_path / "torchrun.log").write_text(log)
    for rank, _ in ends:
        output = tmp_path / f"logs/abc_0/attempt_0/{rank}/stderr.log"
        output.parent.mkdir(parents=True)
        output.write_text("")
    with subprocess.Popen(["true"]) as torchrun:
        watch = RunWatch(tmp_path, 2, torchrun, "abc")
    silent = End((view(0, process="gone"), view(1, process="gone")), 1, None, ())
    found = outcome_of(silent, watch, (), 1.0, {})
    assert found.reason.startswith("rank 1 died without a word at step 7 in exchange_rows (killed")
    assert [rank.state for rank in found.ranks] == ["stopped", "lost"]


@pytest.mark.parametrize("becomes", ["nothing", "empty", "a file", "another's"])
def test_a_run_whose_folder_is_gone_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """What ranks save on their way out can be gone on from: the folder is a run's again."""
    forever = [sys.executable, "-c", "import time; time.sleep(300)"]
    monkeypatch.setattr(launching, "torchrun_command", lambda *_: forever)
    folder = tmp_path / "run"

    def take_away() -> None:
        while not (folder / "torchrun.log").exists():
            time.sleep(0.01)
        folder.rename(tmp_path / "moved")
        if becomes == "a file":
            folder.touch()
        elif becomes != "nothing":
            folder.mkdir()
        if becomes == "another's":
            (folder / "launcher.lock").write_text(12 * "0")

    request = Launch("none", (), 1, folder)
    meanwhile = threading.Thread(target=take_away, daemon=True)
    found = launch(request, io.StringIO(), meanwhile.start)
    assert (found.code, found.reason) == (
        5,
        f"{folder}: expected the folder of the run, got one that was removed, moved or emptied "
        "before the first step. Nothing that was trained is left: run again.",
    )
    left = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    ours = ["launcher.lock", "outcome.json"]
    assert left == {"a file": [], "another's": ours[:1]}.get(becomes, ours)


def test_a_folder_that_is_gone_before_the_ranks_start_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunError, match="removed, moved or emptied before it began"):
        launch(Launch("none", (), 1, folder), io.StringIO(), lambda: shutil.rmtree(folder))


def test_ranks_whose_folder_is_gone_have_the_time_to_save_and_say_where(tmp_path: Path) -> None:
    saved = "stopped by SIGTERM after step 7, saved in x/step-7: the same command goes on."
    write_status(tmp_path, RankOutcome(0, "stopped", 75, 7, "step", saved))
    with subprocess.Popen(["true"]) as torchrun:
        watch = RunWatch(tmp_path, 1, torchrun, "mark")
        found = outcome_of(End((view(0),), None, None, (), gone=True), watch, (), 1.0, {})
    assert found.code == 5
    assert found.reason.endswith(f"before the first step. The ranks were {saved}")


def test_the_last_words_of_a_log_are_no_ornament() -> None:
    log = "Traceback (most recent call last):\nImportError: no x\n    ^^^^\n======\n"
    assert last_words(log) == "ImportError: no x"
    assert last_words("") == ""


def test_a_folder_on_a_full_disk_is_none_to_write_in(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(InputError) as caught, hold(tmp_path, 12 * "0"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"{tmp_path}: expected a folder to write in, got File too large."


def test_the_command_names_the_module_last_and_rendezvous_by_file(tmp_path: Path) -> None:
    command = torchrun_command(Launch("w", ("--x", "1"), 3, tmp_path), "abc")
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[-4:] == ["-m", "w", "--x", "1"]
    assert "--nproc-per-node=3" in command
    assert "--rdzv-conf=store_type=file" in command
    assert f"--rdzv-endpoint={tmp_path}/rendezvous" in command


def test_the_users_thread_count_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert loopback_environment(2)["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert loopback_environment(10_000)["OMP_NUM_THREADS"] == "1"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    text = "a folder no run is using"
    with launching.hold(tmp_path, "0" * 12), pytest.raises(InputError, match=text):
        launch(Launch("w", (), 1, tmp_path), io.StringIO())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_refused_folder_leaves_no_file_open(tmp_path: Path) -> None:
    with launching.hold(tmp_path, "0" * 12):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with pytest.raises(InputError), hold(tmp_path, "1" * 12):
                pass
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_of_the_locks_name_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "launcher.lock").write_text("mine")
    text = r"launcher\.lock: expected the lock of a run, got another file\. Move it away\."
    with pytest.raises(InputError, match=text):
        launch(Launch("w", (), 1, tmp_path), io.StringIO())
    assert (tmp_path / "launcher.lock").read_text() == "mine"


def test_a_worker_without_a_launcher_is_not_ended_by_the_lock_of_an_earlier_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "launcher.lock").write_text("0123456789ab")
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from shardwright.launcher.worker import run_worker\n"
        "sys.exit(run_worker(Path(sys.argv[1]), 0, lambda heartbeat: time.sleep(0.3)))"
    )
    environment = {k: v for k, v in os.environ.items() if k != MARK}
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, timeout=20, check=False, env=environment).returncode == 0
    environment[MARK] = "ba9876543210"  # a launcher's that does not hold the folder
    assert subprocess.run(command, timeout=20, check=False, env=environment).returncode == 5


def test_lines_are_sparse_and_the_last_one_is_never_left_out() -> None:
    said, now = io.StringIO(), [0.0]
    lines = Lines(said, 5.0, lambda: now[0])
    for second in range(8):
        now[0] = float(second)
        lines.update({"step": second, "steps": 8, "loss": 0.5})
    lines.close()
    steps = [line.split()[1] for line in said.getvalue().splitlines()]
    assert steps == ["0/8", "5/8", "7/8"]
    assert describe({"step": 3, "text": "saved"}) == "step 3  saved"
    assert isinstance(writer_for(said), Lines)


def test_an_outcome_survives_its_file_and_refuses_what_it_does_not_know() -> None:
    outcome = RunOutcome(OUTCOME_SCHEMA, 5, "why", 7, 2, (DONE, PEER), ("x",), 1.5, {"torch": "2"})
    data = encode_outcome(outcome)
    assert decode_outcome(data) == outcome
    for bad in (data.replace(b"/1", b"/2"), data.replace(b'"why"', b"3"), b"[", b"\xff"):
        with pytest.raises(InputError, match=r"outcome\.json: expected JSON"):
            decode_outcome(bad)


def test_a_heartbeat_is_read_as_it_was_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat.create(tmp_path, 3)
    path = tmp_path / "rank-3.pulse"
    first = read_heartbeat(path)
    assert first is not None
    assert (first.step, first.sequence, first.phase) == (None, 0, "setup")
    for phase in PHASES:
        heartbeat.begin(phase, step=5)
    heartbeat.mark("lookup")
    last = read_heartbeat(path)
    assert last == heartbeat.reading()
    assert (last.step, last.sequence, last.phase) == (5, len(PHASES), "lookup")
    assert path.stat().st_size == 64


@pytest.mark.parametrize("data", [b"", b"SWPULSE1", b"\0" * 64, b"SWPULSE1" + b"\xff" * 56])
def test_a_file_that_is_no_heartbeat_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p").write_bytes(data)
    assert read_heartbeat(tmp_path / "p") is None
    assert read_heartbeat(tmp_path / "absent") is None


def test_progress_is_read_in_whole_lines_only(tmp_path: Path) -> None:
    reader, log = ProgressReader(tmp_path), ProgressLog(tmp_path)
    assert reader.new() == []
    log.update({"step": 1})
    with (tmp_path / "progress.jsonl").open("ab") as file:
        file.write(b'nonsense\n{"step"')
    assert reader.new() == [{"step": 1}]
    with (tmp_path / "progress.jsonl").open("ab") as file:
        file.write(b": 2}\n")
    assert reader.new() == [{"step": 2}]


def test_progress_that_cannot_be_written_ends_a_run_that_no_launcher_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ProgressLog(tmp_path / "gone")
    monkeypatch.setenv(MARK, "0")
    log.update({"step": 1})
    monkeypatch.delenv(MARK)
    with pytest.raises(RunError, match="a file to write in, got 'No such file"):
        log.update({"step": 1})


def test_a_status_survives_its_file(tmp_path: Path) -> None:
    write_status(tmp_path, PEER)
    assert read_status(tmp_path, 0) == PEER
    assert read_status(tmp_path, 1) is None


def test_errors_that_come_from_a_peer_are_kept_from_ones_own() -> None:
    gloo = RuntimeError(
        "[/a/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:3. This is typically caused by"
        " a remote worker crashing."
    )
    assert from_a_peer(gloo)
    assert first_line(str(gloo)) == "Connection closed by peer [127.0.0.1]:3"
    assert not from_a_peer(RuntimeError("shape mismatch"))
    assert not from_a_peer(ConnectionResetError("Connection reset by peer"))
    wrapped = InputError("could not read")
    wrapped.__cause__ = gloo
    assert from_a_peer(wrapped)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("body", "code", "state", "message"),
    [
        ("pass", 0, "finished", "finished"),
        ("raise MismatchError('a: expected 1, got 2.')", 4, "failed", "a: expected 1, got 2."),
        ("raise KeyError('x')", 1, "failed", "KeyError: 'x'"),
        ("raise MemoryError('1 GiB')", 5, "failed", "ran out of memory at step 3, forward: 1 GiB"),
        ("raise KeyboardInterrupt", 130, "stopped", "stopped by Ctrl-C"),
        ("sys.exit(3)", 3, "failed", "exited with code 3"),
        ("signal.raise_signal(signal.SIGTERM)", 75, "stopped", "stopped by SIGTERM"),
        ("import shutil; shutil.rmtree(sys.argv[1]); raise KeyError('x')", 1, "failed", "KeyError"),
        ("raise RuntimeError('Timed out waiting 5000ms')", 5, "failed", "lost its peers at step 3"),
    ],
)
def test_a_worker_leaves_a_last_word(
    tmp_path: Path, body: str, code: int, state: str, message: str
) -> None:
    script = (
        "import signal, sys\nfrom pathlib import Path\n"
        "from shardwright.core.errors import *\nfrom shardwright.launcher.worker import *\n"
        f"def body(heartbeat):\n    heartbeat.begin('forward', 3)\n    {body}\n"
        "sys.exit(run_worker(Path(sys.argv[1]), 0, body))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=False)
    status = read_status(tmp_path, 0)
    assert done.returncode == code
    assert status is not None
    assert (status.state, status.code, status.step) == (state, code, 3)
    assert status.message.startswith(message)
    assert status.peer == ("peers" in message)
    has_log = state == "failed" and "exit" not in body and "rmtree" not in body
    assert (tmp_path / "rank-0.log").exists() == has_log


@pytest.mark.parametrize(
    ("number", "saves", "seconds"),
    [
        (None, False, launching._GRACE),  # the folder is gone
        (None, True, 17.0),
        (signal.SIGINT, False, launching._GRACE),
        (signal.SIGINT, True, 17.0),
        (signal.SIGTERM, False, 17.0),
        (signal.SIGTERM, True, 17.0),
    ],
)
def test_ranks_that_save_have_their_time_whatever_the_signal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals | None,
    saves: bool,
    seconds: float,
) -> None:
    given: list[float] = []

    def ended(*words: object) -> set[int]:
        given.append(words[4])  # type: ignore[arg-type]
        return set()

    monkeypatch.setattr(launching, "end_run", ended)
    request = Launch("none", (), 1, tmp_path, stop_grace=17.0, saves=saves)
    with subprocess.Popen(["true"]) as torchrun:
        watch = RunWatch(tmp_path, 1, torchrun, "mark")
        caught = [number] if number else []
        launching._end(request, watch, caught, gone=not caught)
    assert given == [seconds]
