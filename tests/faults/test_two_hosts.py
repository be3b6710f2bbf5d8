"""Two torchrun agents on loopback, as two hosts have them: with a folder in common and without, and
with one of them lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from commands import LITTLE_TEXT, Call
from test_cases import OWN
from warm import Popen

from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan, write_plan
from shardwright.launcher.heartbeat import RankOutcome, read_status

pytestmark = pytest.mark.slow
SECONDS = 240.0
TIMEOUT = 10.0
TEXT = {
    "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
    "cluster": {"preset": "local", "world_size": 2, "local_world_size": 1},
    "data": {"path": "text"},
    "batch": {"size": 4, "sequence": 16},
    "train": {"steps": 8, "timeout": 60.0},
}
LOST = "[os.kill(pid, signal.SIG{name}) for pid in (os.getppid(), os.getpid())]"


class Agents:
    """Two agents, each with its working directory in ``tmp_path``."""

    def __init__(self, tmp_path: Path) -> None:
        self.folders = [tmp_path / "alpha", tmp_path / "beta"]
        self.started: list[Popen] = []
        for folder in self.folders:
            folder.mkdir()
            (folder / "text").write_bytes(LITTLE_TEXT)

    def start(self, *outs: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for folder, out in zip(self.folders, outs, strict=True):
            line = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two"),
                *("-m", "shardwright", "run", "plan.json", "--out", str(out)),
            ]
            env = {k: v for k, v in os.environ.items() if k != "SHARDWRIGHT_RUN"}
            with (folder / "said").open("wb") as said:
                agent = Popen(
                    line,
                    cwd=folder,
                    env=env | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            self.started.append(agent)

    def said(self) -> list[str]:
        """What each of them said, once both have ended."""
        for agent in self.started:
            agent.wait(SECONDS)
        return [(folder / "said").read_text() for folder in self.folders]

    def end(self) -> None:
        for agent in self.started:
            for pid in (agent.pid, *children(agent.pid)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            agent.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    made.end()


def written(made: Plan, agents: Agents) -> None:
    for folder in agents.folders:
        write_plan(made, folder / "plan.json")


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(True, id="one folder", marks=pytest.mark.product),
        pytest.param(False, id="a folder each"),
    ],
)
def test_two_hosts_train_and_what_they_leave_is_compared_and_reported(
    call: Call, agents: Agents, tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(agents.folders[0])  # where the text is
    written(plan(parse_job(TEXT)), agents)
    outs = [tmp_path / "run", tmp_path / "run" if shared else tmp_path / "run of beta"]
    agents.start(*outs)
    said = agents.said()
    assert [agent.returncode for agent in agents.started] == [0, 0], said
    assert all(text.startswith("2 hosts: ") for text in said)
    (run,) = {out for out in outs if (out / "measured.json").exists()}
    assert sum(f"results in {run} on " in text for text in said) == 1
    assert sum(f"results in {run}; shardwright compare {run}" in text for text in said) == 1
    compared = call("compare", run)
    assert compared.code == 0, compared.err
    assert "Memory as predicted: exact bytes equal on 2 of 2 ranks" in compared.out
    assert call("report", run, "-o", tmp_path / "page.html").code == 0


def test_another_plan_on_one_host_is_one_line_on_each(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(agents.folders[0])  # where the text is
    for folder, steps in zip(agents.folders, (8, 9), strict=True):
        job = TEXT | {"train": {"steps": steps, "timeout": 60.0}}
        write_plan(plan(parse_job(job)), folder / "plan.json")
    agents.start(tmp_path / "run", tmp_path / "run")
    for text in agents.said():
        (line,) = (line for line in text.splitlines() if line.startswith("shardwright: "))
        assert "hosts: expected the same plan everywhere, got another one on" in line
    assert [agent.returncode for agent in agents.started] == [1, 1]  # torchrun's own
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.parametrize(
    ("name", "rank"), [pytest.param("KILL", 0, marks=pytest.mark.product), ("STOP", 1)]
)
def test_a_host_that_is_lost_ends_the_other_with_one_line(
    agents: Agents, tmp_path: Path, name: str, rank: int
) -> None:
    own = OWN.replace("rank == 1", f"rank == {rank}")
    own = own.format(where="forward", fault=LOST.format(name=name), timeout=TIMEOUT)
    for folder in agents.folders:
        (folder / "own.py").write_text(own)
    job = {
        "model": {"python": "own:build"},
        "data": {"python": "own:batches"},
        "cluster": TEXT["cluster"],
        "batch": {"size": 2},
        "train": {"steps": 8, "timeout": TIMEOUT},
    }
    made = subprocess.run(
        [sys.executable, "-c", MAKE.format(job=job)],
        cwd=agents.folders[0],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert made.returncode == 0, made.stderr
    agents.folders[1].joinpath("plan.json").write_bytes(
        agents.folders[0].joinpath("plan.json").read_bytes()
    )
    agents.start(tmp_path / "alpha run", tmp_path / "beta run")
    line = last_word(agents)
    if name == "KILL" and "stopped by SIGTERM" in line:  # by its agent, which noticed first
        return
    assert "step 3" in line
    assert f"no sign of rank {rank}" in line or "no answer from the store" in line
    status = status_of([tmp_path / "alpha run", tmp_path / "beta run"], 1 - rank)
    assert (status.code, status.peer) == (5, True)


MAKE = """
from shardwright.job.job import parse_job
from shardwright.job.plan import write_plan
from shardwright.estimate.recordings import plan
write_plan(plan(parse_job({job})), "plan.json")
"""


def last_word(agents: Agents) -> str:
    """The line that the host which is left ends with. (Its agent may wait five minutes more for the
    other agent.)"""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        texts = [(folder / "said").read_text() for folder in agents.folders]
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        found = [line for line in lines if line.startswith("shardwright: ") and line.endswith("\n")]
        if found:
            (line,) = found
            return line
        time.sleep(0.2)
    raise AssertionError(texts)


def status_of(folders: Iterable[Path], rank: int) -> RankOutcome:
    """A rank's last word, in whichever folder it is."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for folder in folders:
            if status := read_status(folder, rank):
                return status
        time.sleep(0.2)
    raise AssertionError("no last word")
