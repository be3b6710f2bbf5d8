"""What a save and a load take, beside torch.distributed.checkpoint on the same sharded model.

    torchrun --nproc-per-node 2 benchmarks/saving.py OUT.json

A model of GPT-2's shape (10 layers of width 320) with AdamW's states, sharded
by ``fully_shard_flat``. Ours and torch's take turns, five times each; medians are kept. Training
stands still while these saves write. torch's turns have in them that the state is made and filled
by functions of ours; how much of them that is stands beside them.

Then what a save a minute costs a run that trains on while files are written (``overlap``): the
model ``mid`` of ``fsdp.py`` takes turns of as many steps with a run's look at whether a save is
due, and with one save among them. Seconds of wall and of CPU over all ranks, by what
``time.process_time`` counts: threads that write among them. A save costs what its turn takes more
than the one beside it; the looks are clocked themselves, for they are less than the noise of steps.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_contestants import batch_of, contestants, model_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw
from shardwright.job.train import CheckpointSection
from shardwright.models.transformer import next_token_loss
from shardwright.runtime.saves import Saves

TURNS, STEPS, MINUTE = 15, 6, 60.0
TIMES, WIDTH, LAYERS, WORDS = 5, 320, 10, 50_257


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 5, 4 * WIDTH, 0.0, batch_first=True)
        for _ in range(LAYERS)
    ]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers)


def seconds(act: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Turns:
    """Steps of the model ``mid``, ready to save, and with a save among them."""

    def __init__(self, mesh: DeviceMesh, folder: Path) -> None:
        contestant = contestants()["flat"]
        self.model = contestant.wrap(model_of("mid"), mesh)
        self.optimizer = contestant.optimizer(self.model)
        self.now, self.number = 0.0, 0
        self.found: dict[str, list[tuple[float, ...]]] = {}
        self.saves = Saves(
            folder,
            self.model,
            self.optimizer,
            CheckpointSection(every="60 s", keep=1),
            extra=lambda: None,
            facts={},
            say=lambda text: None,
            clock=lambda: self.now,
        )

    def turn(self, name: str) -> None:
        """``STEPS`` steps, or as many as its save takes; steps, wall and CPU seconds of all ranks
        go to ``found``."""
        self.now += MINUTE if name == "a save" else 0.0
        wanted, steps = self.saves.count + (name == "a save"), 0
        dist.barrier()
        wall, cpu, looks = time.perf_counter(), time.process_time(), 0.0
        while steps < STEPS or self.saves.count < wanted:
            steps += 1
            self.number += 1
            tokens, targets = batch_of("mid", self.number, dist.get_rank(), dist.get_world_size())
            next_token_loss(self.model(tokens), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            looked = time.process_time()
            self.saves.after(self.number, self.saves.agreed(self.number))
            looks += time.process_time() - looked
        both = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu, looks])
        dist.all_reduce(both)
        self.found.setdefault(name, []).append((steps, *both.tolist()))

    def figures(self) -> dict[str, object]:
        """What looks and a save cost, in seconds over all ranks and in shares of a minute."""
        ready, save, ranks = self.found["ready"], self.found["a save"], dist.get_world_size()
        looks = statistics.median(looked / cpu for _, _, cpu, looked in ready)
        extra = {
            clock: statistics.median(
                one[at] - beside[at] / beside[0] * one[0]
                for one, beside in zip(save, ready, strict=True)
            )
            for at, clock in ((1, "wall"), (2, "cpu"))
        }
        return {
            "model": "mid",
            "bytes a rank writes": self.saves.nbytes,
            "load of the machine": os.getloadavg(),
            "steps, and seconds of wall, CPU and CPU of looks over all ranks": self.found,
            "looks, of a step's CPU": looks,
            "seconds of a save over all ranks": extra,
            "a save a minute costs": {
                clock: looks + seconds / (MINUTE * ranks) for clock, seconds in extra.items()
            },
        }


def overlapped(mesh: DeviceMesh, folder: Path) -> dict[str, object]:
    """What saving costs while a run trains on; turns of a pair are in another order each."""
    torch.set_num_threads(1)
    turns = Turns(mesh, folder)
    names = ["ready", "a save"]
    for index in range(-1, TURNS):
        for name in names[:: 1 if index % 2 else -1]:
            turns.turn(name)
        if index < 0:  # warm
            turns.found.clear()
    return turns.figures()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in model:
        sw.fully_shard_flat(layer, mesh)
    sw.fully_shard_flat(model, mesh)
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model), fused=True)
    model(torch.zeros(1, 8, dtype=torch.int64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    folder, found = Path(names[0]), dict[str, list[float]]()
    sizes: dict[str, int] = {}

    def states() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": sw.optimizer_state_dict(model, optimizer)}

    def save_theirs(step: int) -> None:
        begun = time.perf_counter()
        state = states()
        found.setdefault("save, torch: of it ours", []).append(time.perf_counter() - begun)
        dcp.save(state, checkpoint_id=folder / "theirs" / str(step))

    def load_theirs(step: int) -> None:
        begun = time.perf_counter()
        state = states()
        ours = time.perf_counter() - begun
        dcp.load(state, checkpoint_id=folder / "theirs" / str(step))
        begun = time.perf_counter()
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        sw.load_optimizer_state_dict(model, optimizer, state["optimizer"])  # type: ignore[arg-type]
        ours += time.perf_counter() - begun
        found.setdefault("load, torch: of it ours", []).append(ours)

    def note(name: str, act: Callable[[], object]) -> None:
        found.setdefault(name, []).append(seconds(act))

    for step in range(TIMES):
        theirs = folder / "theirs" / str(step)
        note("save", lambda s=step: sw.save_checkpoint(folder / "ours", model, optimizer, step=s))
        note("save, torch", lambda s=step: save_theirs(s))
        note("load", lambda s=step: sw.load_checkpoint(folder / "ours", model, optimizer, step=s))
        note("load, torch", lambda s=step: load_theirs(s))
        sizes = {"ours": nbytes(folder / "ours" / f"step-{step}"), "torch": nbytes(theirs)}
    load = os.getloadavg()
    running = overlapped(mesh, folder / "overlapped")
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in found.items()}
        document = {
            "what": "saves and loads of a sharded model with AdamW's states",
            "parameters": sum(p.numel() for p in network().parameters()),
            "ranks": dist.get_world_size(),
            "versions": {"torch": str(torch.__version__), "shardwright": sw.__version__},
            "load of the machine": load,
            "bytes": sizes,
            "median seconds": medians,
            "all seconds": found,
            "a save a minute costs at most": medians["save"] / MINUTE,
            "while a run trains on": running,
        }
        Path(sys.argv[1]).write_text(json.dumps(document, indent=2) + "\n")
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
