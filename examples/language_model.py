"""A loop of your own around a model of your own: a small language model, sharded block by block.

    torchrun --nproc-per-node 2 examples/language_model.py

It trains on sentences that it makes up, and saves as it goes. Called again, with any number of
ranks, it goes on from the newest checkpoint: --steps is where it ends. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw

BATCH = 16  # sequences of all ranks together
LENGTH = 32  # characters
WIDTH, HEADS, LAYERS = 64, 4, 3
RATE, WARM_UP = 3e-3, 20
WHO = ["a baker", "the sailor", "my aunt", "the teacher", "one gardener"]
DOES = ["sells", "paints", "repairs", "finds", "carries"]
WHAT = ["red boats", "three apples", "an old clock", "warm bread", "the last letter"]


class Block(nn.Module):
    """Attention and a feed-forward part, both added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class LanguageModel(nn.Module):
    """Predicts the next character. Knows nothing of ranks."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.05)
        self.head.weight = self.embed.weight  # tied

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.place.weight[: text.shape[1]]
        for layer in self.layers:
            # Activations inside a block are computed again in the backward.
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.head(self.norm(x))


def corpus() -> torch.Tensor:
    """Characters of made-up sentences, as numbers."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(5, (2000, 3), generator=generator).tolist()
    text = " ".join(f"{WHO[a]} {DOES[b]} {WHAT[c]}." for a, b, c in picks)
    letters = sorted(set(text))
    return torch.tensor([letters.index(letter) for letter in text])


def batch(text: torch.Tensor, step: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's sequences [n, LENGTH + 1] of a step. All ranks draw the same ones and take every
    so many: which sequences a step has does not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    own = starts[mesh.get_rank() :: mesh.size()]
    return torch.stack([text[start : start + LENGTH + 1] for start in own])


def loss_of(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's share of the mean over the whole batch, times the number of ranks: the gradients'
    mean over ranks is that of the batch, also where ranks have unequal parts of it."""
    scores = model(rows[:, :-1]).flatten(0, 1)
    total = functional.cross_entropy(scores, rows[:, 1:].flatten(), reduction="sum")
    return total * mesh.size() / (BATCH * LENGTH)


def mean_of(value: torch.Tensor, mesh: DeviceMesh) -> float:
    """The mean over ranks."""
    value = value.detach().clone()
    dist.all_reduce(value, group=mesh.get_group())
    return value.item() / mesh.size()


def rate(step: int, steps: int) -> float:
    """Up in a line, then down in half a wave, as a part of RATE."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1)))


def train(mesh: DeviceMesh, folder: Path, steps: int, every: int, stop: int) -> dict[int, float]:
    """Train to ``stop`` of ``steps`` and save every so many; the losses that were evaluated."""
    text = corpus()
    torch.manual_seed(0)  # the same on all ranks: each keeps its part
    model = LanguageModel(int(text.max()) + 1)
    held_out, text = text[:4000], text[4000:]
    for layer in model.layers:
        sw.fully_shard_flat(layer, mesh, shard_strategy="flat")
    table = sw.fully_shard_flat(model, mesh, shard_strategy="flat")
    groups = sw.optimizer_parameters(
        model, lambda name, p: {"weight_decay": 0.1 if p.ndim > 1 else 0.0}
    )
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))

    first = 0
    if any(folder.glob("step-*/manifest.json")):
        found = sw.load_checkpoint(folder, model, optimizer)
        first = found.step
        scheduler.load_state_dict(found.extra)
    elif mesh.get_rank() == 0:
        print(table)

    evaluated = {}
    for step in range(first, stop):
        model.train()
        loss_of(model, batch(text, step, mesh), mesh).backward()
        norm = sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % every and step + 1 != stop:
            continue
        model.eval()
        with torch.no_grad():
            loss = mean_of(loss_of(model, batch(held_out, 0, mesh), mesh), mesh)
        evaluated[step + 1] = loss
        if mesh.get_rank() == 0:
            print(f"step {step + 1}: held-out loss {loss:.4f}, gradient norm {norm.item():.3f}")
        sw.save_checkpoint(
            folder, model, optimizer, step=step + 1, extra=scheduler.state_dict(), keep=2
        )
    return evaluated


def main() -> None:
    """Read the options, start the ranks that torchrun made, train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--stop", type=int, help="end here, as if interrupted")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train(mesh, options.folder, options.steps, options.every, options.stop or options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
