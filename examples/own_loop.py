"""A model and a loop of your own: planned in Python, sharded, trained, and compared with its plan.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw

BATCH, WIDTH, CLASSES = 32, 64, 10
STEPS = 100


class Classifier(nn.Module):
    """Vectors [B, WIDTH] -> logits [B, CLASSES]."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """A residual stream, then one linear layer."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vectors, and which of their first coordinates is the largest."""
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


def train(mesh: DeviceMesh, steps: int) -> tuple[sw.Plan, sw.Measurement]:
    """Plan for the ranks of the mesh, shard, train: the plan, and what all ranks measured."""
    rank = mesh.get_local_rank()
    generator = torch.Generator().manual_seed(rank)
    inputs, targets = example(generator)
    cluster = {"preset": "local", "world_size": mesh.size(), "ddr_cap": "2300 KiB"}
    loss_of = nn.functional.cross_entropy
    plan = sw.plan_module(
        Classifier, inputs, loss=loss_of, targets=targets, cluster=cluster, optimizer="adam"
    )
    torch.manual_seed(0)  # the same on all ranks: each keeps its part
    model = sw.apply(Classifier(), plan, mesh)
    optimizer = torch.optim.Adam(sw.optimizer_parameters(model), lr=0.002, fused=True)

    with sw.measure(plan, model, optimizer) as measured:
        for step in range(steps):
            x, y = example(generator)
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            measured.step(loss)
            if rank == 0 and (step + 1) % 20 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")
    return plan, measured.gather()


def main() -> None:
    """Train on the ranks that torchrun started, and compare with the plan."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan, measurement = train(mesh, STEPS)
    if dist.get_rank() == 0:
        print(sw.compare(plan, measurement))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
