"""What a save and a load take, beside torch.distributed.checkpoint on the same sharded model.

    torchrun --nproc-per-node 2 benchmarks/saving.py OUT.json

A model of GPT-2's shape (10 layers of width 320) with AdamW's states, sharded
by ``fully_shard_flat``. Ours and torch's take turns, five times each; medians are kept. Training
stands still while these saves write, so a save a minute costs at most its seconds over sixty: runs
that train on while files are written (``overlap``) wait less.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw

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

    def load_theirs(step: int) -> None:
        state = states()
        dcp.load(state, checkpoint_id=folder / "theirs" / str(step))
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        sw.load_optimizer_state_dict(model, optimizer, state["optimizer"])  # type: ignore[arg-type]

    def note(name: str, act: Callable[[], object]) -> None:
        found.setdefault(name, []).append(seconds(act))

    for step in range(TIMES):
        theirs = folder / "theirs" / str(step)
        note("save", lambda s=step: sw.save_checkpoint(folder / "ours", model, optimizer, step=s))
        note("save, torch", lambda to=theirs: dcp.save(states(), checkpoint_id=to))
        note("load", lambda s=step: sw.load_checkpoint(folder / "ours", model, optimizer, step=s))
        note("load, torch", lambda s=step: load_theirs(s))
        sizes = {"ours": nbytes(folder / "ours" / f"step-{step}"), "torch": nbytes(theirs)}
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in found.items()}
        document = {
            "what": "saves and loads of a sharded model with AdamW's states",
            "parameters": sum(p.numel() for p in network().parameters()),
            "ranks": dist.get_world_size(),
            "versions": {"torch": str(torch.__version__), "shardwright": sw.__version__},
            "load of the machine": os.getloadavg(),
            "bytes": sizes,
            "median seconds": medians,
            "all seconds": found,
            "a save a minute costs at most": medians["save"] / 60,
        }
        Path(sys.argv[1]).write_text(json.dumps(document, indent=2) + "\n")
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
