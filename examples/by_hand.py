"""A training loop of your own around a plan, instead of `shardwright train`.

torchrun --nproc-per-node 2 examples/by_hand.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.models.dlrm import DLRM

STEPS = 20


def main() -> None:
    """Plan for the ranks that torchrun started, shard a DLRM, train on random clicks."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    demo = Path(__file__).parent / "demo.toml"
    job = sw.read_job(demo, [f"cluster.world_size={ranks}", "cluster.ddr_cap='2 GiB'"])
    plan = sw.plan(job)

    model = sw.apply(DLRM(job, device="meta"), plan, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.Adam(sw.optimizer_parameters(model), lr=0.002, fused=True)
    # Saved as it goes on; started again it begins where the last one ended, or was stopped.
    with sw.Run(plan, model, optimizer, "runs/by_hand", every="10 steps") as run:
        for step in run.steps(STEPS):
            generator = torch.Generator().manual_seed(ranks * step + rank)
            dense = torch.randn(job.batch.size, job.model.dense_features, generator=generator)
            ids = [
                torch.randint(t.rows, (job.batch.size,), generator=generator) for t in job.tables
            ]
            clicks = (dense[:, 0] > 0).float()
            logits = model(dense, torch.stack(ids, 1)).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks)
            loss.backward()  # updates the tables and reduces the units' gradients
            optimizer.step()
            optimizer.zero_grad()
            run.end(loss)
            if rank == 0 and step % 5 == 0:
                print(f"step {step}: loss {loss.item():.4f}")

    weights = sw.full_state_dict(model)
    if rank == 0:
        print(
            f"{len(weights)} whole tensors, {sum(w.numel() for w in weights.values()):,} elements"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
