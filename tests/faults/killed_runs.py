"""A training that is killed again and again: ``python killed_runs.py FOLDER --kills 200``.

Its two ranks save after every step while they train on; SIGKILL of one or both ends a life at a
seeded moment. After each the newest complete checkpoint is read, and the next life goes on from it.
Prints one JSON object: kills, the steps that the newest checkpoints had, and how many of them
differ by a bit from what a training that was never killed has after that step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.job.train import CheckpointSection
from shardwright.runtime.checkpoint import read_full
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.saves import Saves

RANKS = 2
LIFE_SECONDS = 120


def train(folder: Path, life: str, rank: int, last: int, wanted: set[int]) -> None:
    """One rank's life: up to step ``last``, saved after every step, or after those wanted alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"store-{life}"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    sw.fully_shard_flat(model, DeviceMesh("cpu", list(range(RANKS))), shard_strategy="flat")
    optimizer = torch.optim.Adam(sw.optimizer_parameters(model), 0.01, fused=True)
    saved, start = folder / "checkpoints", 0
    if not wanted and complete_steps(saved):
        start = sw.load_checkpoint(saved, model, optimizer).step
    section = CheckpointSection(every="1 steps", keep=2)
    options = {"extra": lambda: None, "facts": {}, "say": print, "step": start}
    saves = Saves(saved, model, optimizer, section, **options)
    for step in range(start + 1, last + 1):
        generator = torch.Generator().manual_seed(RANKS * step + rank)
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not wanted:
            saves.after(step, saves.agreed(step))
        elif step in wanted:
            sw.save_checkpoint(saved, model, optimizer, step=step)


def started(folder: Path, life: str, last: int, wanted: set[int]) -> list[int]:
    """The pids of a life's ranks."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIFE_SECONDS)
            code = 1
            try:
                train(folder, life, rank, last, wanted)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def buried(pids: list[int]) -> list[int]:
    """Kill who is left; exit codes."""
    for pid in pids:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def digest(folder: Path, step: int) -> str:
    """Of all bytes of weights and states."""
    found = hashlib.sha256()
    for name, tensor in sorted(read_full(folder / "checkpoints", step).items()):
        found.update(
            name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def warm() -> None:
    """Import what lives need before they are forked."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    for name in ("fully_shard_flat", "optimizer_parameters", "load_checkpoint", "save_checkpoint"):
        getattr(sw, name)


def main(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    warm()
    folder, chance = Path(options.folder), random.Random(options.seed)
    newest: list[int] = []
    digests: dict[int, str] = {}
    differ = 0
    for life in range(options.kills):
        before = newest[-1] if newest else 0
        pids = started(folder, str(life), 10**6, set())
        limit = time.monotonic() + LIFE_SECONDS
        while _newest(folder) <= before and time.monotonic() < limit:
            time.sleep(0.005)  # lives that are too short to save anything would prove nothing
        time.sleep(chance.uniform(0.0, 0.1))
        for pid in chance.sample(pids, chance.randint(1, RANKS)):
            os.kill(pid, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 0.02))
        buried(pids)
        step = _newest(folder)
        newest.append(step)
        found = digest(folder, step)
        differ += digests.setdefault(step, found) != found
    true = folder / "never killed"
    true.mkdir()
    codes = buried_at_the_end(started(true, "whole", max(newest), set(newest)))
    differ += sum(digest(true, step) != found for step, found in digests.items())
    return {"kills": len(newest), "steps": newest, "differ": differ, "codes": codes}


def _newest(folder: Path) -> int:
    return max(complete_steps(folder / "checkpoints"), default=0)


def buried_at_the_end(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    json.dump(main(parser.parse_args()), sys.stdout)
