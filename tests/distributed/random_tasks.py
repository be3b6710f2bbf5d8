"""Random models, cut at random, beside the unsharded one in fp64, where only a wrong term shows."""

from __future__ import annotations

import itertools
import random

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard
from shardwright.runtime.clip import clip_grad_norm_
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.state import full_state_dict


def furthest_of_random_models(mesh: DeviceMesh, seeds: range) -> float:
    """The largest difference of a norm or weight after three clipped steps of two backwards."""
    return max(_furthest(mesh, seed) for seed in seeds)


def _model(seed: int, widths: list[int]) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [
        nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b)) for a, b in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks).double()


def _shard(model: nn.Sequential, mesh: DeviceMesh, choose: random.Random) -> None:
    size = mesh.size()

    def placement(fqn: str, parameter: nn.Parameter) -> Placement | None:
        every = [
            *(Shard(0), Shard(parameter.dim() - 1), Owned(choose.randrange(size)), Replicate()),
            *(BlockShard(choose.randint(1, 4)), Flat(), None),
        ]
        return choose.choice(every)

    strategy = choose.choice(["flat", "per_param", "param_boundary"])
    reshard = choose.choice([True, False, 1])
    function = placement if choose.random() < 0.6 else None
    prefetch = choose.randint(0, 2)
    for module in (*(block for block in model if choose.random() < 0.6), model):
        fully_shard_flat(
            module,
            mesh,
            reshard_after_forward=reshard,
            shard_strategy=strategy,
            shard_placement_fn=function,
            prefetch=prefetch,
        )


def _furthest(mesh: DeviceMesh, seed: int) -> float:
    rank, size = mesh.get_local_rank(), mesh.size()
    choose = random.Random(seed)
    widths = [choose.randint(1, 9) for _ in range(choose.randint(2, 5))]
    model, reference = _model(seed, widths), _model(seed, widths)
    _shard(model, mesh, choose)
    given = list(model.parameters())
    if choose.random() < 0.5:
        given = optimizer_parameters(model, per_unit=choose.random() < 0.5)
    optimizer = torch.optim.SGD(given, lr=0.05, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    worst = 0.0
    for step in range(3):
        for micro in range(2):
            inputs = [_inputs(widths[0], step, micro, r) for r in range(size)]
            model(inputs[rank]).square().sum().backward()
            for each in inputs:
                (reference(each).square().sum() / size).backward()
        norm = clip_grad_norm_(model, 1.0)
        true = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        worst = max(worst, abs(norm.item() - true.item()) / (1 + true.item()))
        for each_optimizer in (optimizer, other):
            each_optimizer.step()
            each_optimizer.zero_grad()
    whole = full_state_dict(model)
    for name, weight in reference.named_parameters():
        worst = max(worst, (whole[name] - weight).abs().max().item())
    return worst


def _inputs(width: int, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, width, dtype=torch.float64, generator=generator)
