"""Two jobs that save into one folder at once: ``python savers.py FOLDER --ranks 2 --kills 5``.

Prints one JSON object: how many saves returned normally (claims), how many of these cannot be
loaded bit by bit (lost), how many were refused, and the words of the refusals. A job that is killed
begins again and saves until it is killed as often as is asked for, and ``--rounds`` times after
that. Jobs are forked, so that a new one starts in a moment; every wait has an end.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import ShardwrightError
from shardwright.runtime.checkpoint import TensorPart, read_full, run_through, save_in_parts
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.comm import Comm

MOST_ELEMENTS = 20_000
JOB_SECONDS = 120.0


def no_locks(_descriptor: int, _how: int) -> None:
    """A file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def blind_locks(_descriptor: int, _how: int) -> None:
    """Locks that do not see those of other machines."""


LOCKS = {"system": fcntl.flock, "none": no_locks, "blind": blind_locks}


class Saver:
    """One rank of a job; ``life`` counts how often the job was started."""

    def __init__(self, options: argparse.Namespace, job: int, life: int, rank: int) -> None:
        self.options, self.job, self.rank = options, job, rank
        self.folder, self.notes = Path(options.folder) / "saved", Path(options.folder)
        self.chance = random.Random(f"{options.seed} {job} {life}")  # alike on the job's ranks
        self.comm = None if options.ranks == 1 else self._join(f"store-{job}-{life}")

    def _join(self, store: str) -> Comm:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        ranks = self.options.ranks
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(self.notes / store), ranks),
            rank=self.rank,
            world_size=ranks,
            timeout=timedelta(seconds=20),
        )
        return Comm(DeviceMesh("cpu", list(range(ranks))))

    def save(self) -> None:
        """Try once, and note how it went."""
        step = self._next_step()
        value, count = self.chance.random(), self.chance.randint(1, MOST_ELEMENTS)
        time.sleep(self.chance.random() * 0.003)
        own = torch.full((1, count), value)
        held = [TensorPart("weight", (self.options.ranks, count), (self.rank, 0), (1, count), own)]
        try:
            run_through(save_in_parts(self.folder, step, held, self.comm, facts={}, scalars={}))
        except ShardwrightError as error:
            text = str(error).replace(str(self.folder), "")
            self._note("refused", text)
        else:
            self._note("claims", {"step": step, "value": own[0, 0].item(), "count": count})

    def _next_step(self) -> int:
        """The first that is not there yet, of this job's own or of all; the same on all ranks."""
        jobs = self.options.jobs if self.options.steps == "own" else 1
        found = [path.name.partition("-")[2] for path in self.folder.glob("step-*")]
        newest = max((int(number) for number in found if number.isdigit()), default=0)
        step = newest + 1 + (self.job - newest - 1) % jobs
        if self.comm is None:
            return step
        told = torch.tensor([step if self.rank == 0 else 0])
        self.comm.all_reduce("step", told)
        return int(told)

    def _note(self, file: str, said: Any) -> None:
        if self.rank == 0:
            line = json.dumps({"job": self.job, "said": said}) + "\n"
            descriptor = os.open(self.notes / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, line.encode())
            os.close(descriptor)


def live(options: argparse.Namespace, job: int, life: int, rank: int) -> None:
    """The life of one rank's process."""
    signal.alarm(int(JOB_SECONDS))
    code = 1
    try:
        saver = Saver(options, job, life, rank)
        for _ in range(options.rounds) if life > options.kills else itertools.count():
            saver.save()
        code = 0
    finally:
        os._exit(code)


class Job:
    """A job's processes as seen by the one that starts, kills and buries them."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self.options, self.number = options, number
        self.lives = 0
        self.chance = random.Random(f"{options.seed} kills {number}")
        self.pids: list[int] = []
        self.strike_at = float("inf")

    def start(self) -> None:
        """Fork the ranks, and choose the moment at which one is killed."""
        self.lives += 1
        self.pids = []
        for rank in range(self.options.ranks):
            pid = os.fork()
            if pid == 0:
                live(self.options, self.number, self.lives, rank)
            self.pids.append(pid)
        if self.lives <= self.options.kills:
            self.strike_at = time.monotonic() + self.chance.uniform(0.1, 0.5)

    def step(self) -> bool:
        """Kill, bury, start again; False when the job has done all."""
        if time.monotonic() > self.strike_at:
            self.strike_at = float("inf")
            os.kill(self.chance.choice(self.pids), signal.SIGKILL)
            time.sleep(self.chance.uniform(0.0, 0.1))
            self.end()
            self.start()
            return True
        return not all(self._ended(pid) for pid in self.pids)

    def _ended(self, pid: int) -> bool:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> list[int]:
        """Exit codes, whatever state the job is in."""
        codes = []
        for pid in self.pids:
            if not self._ended(pid):
                os.kill(pid, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return codes


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_lost(folder: Path, said: dict[str, Any], ranks: int) -> bool:
    """Whether a save that returned normally cannot be loaded as it was."""
    try:
        found = read_full(folder, said["step"])["weight"]
    except (ShardwrightError, OSError, KeyError):
        return True
    wanted = torch.full((ranks, said["count"]), said["value"])
    return not torch.equal(found, wanted)


def main(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    fcntl.flock = LOCKS[options.locks]  # type: ignore[assignment]
    jobs = [Job(options, number) for number in range(options.jobs)]
    limit = time.monotonic() + JOB_SECONDS
    for job in jobs:
        job.start()
    running = list(jobs)
    while running and time.monotonic() < limit:
        running = [job for job in running if job.step()]
        time.sleep(0.01)
    codes = [job.end() for job in jobs]
    notes, folder = Path(options.folder), Path(options.folder) / "saved"
    claims = [entry["said"] for entry in lines(notes / "claims")]
    words = Counter(entry["said"].partition(":")[2] for entry in lines(notes / "refused"))
    return {
        "claims": len(claims),
        "lost": sum(is_lost(folder, said, options.ranks) for said in claims),
        "refused": sum(words.values()),
        "words": dict(words),
        "complete": len(complete_steps(folder)),
        "left": sorted(path.name for path in folder.iterdir() if ".tmp" in path.name),
        "killed": sum(job.lives - 1 for job in jobs),
        "codes": codes,
    }


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", choices=("same", "own"), default="same")
    parser.add_argument("--locks", choices=LOCKS, default="system")
    parser.add_argument("--kills", type=int, default=0, help="of each job, before its rounds")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    json.dump(main(parsed(sys.argv[1:])), sys.stdout)
