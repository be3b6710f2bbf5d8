"""What is timed of a rank's own memory and processor."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.lab.measure.bench import Run
from shardwright.lab.measure.sizes import FLOAT

LARGE = 64 * 2**20  # bytes of an array that no cache keeps
FRESH = 80 * 2**20  # malloc takes more than 32 MiB from the system, unless up to 64 lie unused
LAYERS = ((128, 256, 256), (128, 512, 512), (512, 512, 512), (1024, 256, 256), (128, 1024, 1024))
CHAIN, WIDTH = 8, 16  # layers so small that calling them is all they cost
OPERATIONS_OF_A_LAYER = 4  # linear and ReLU, forward and backward


def memory(device: torch.device) -> dict[str, Run]:
    """An update and a copy; an amount is the bytes of the arrays that are touched."""
    weight = torch.zeros(LARGE // FLOAT, device=device)
    gradient = torch.ones_like(weight)
    return {
        "update": Run(2 * LARGE, lambda: weight.add_(gradient, alpha=-0.1)),
        "copy": Run(2 * LARGE, lambda: weight.copy_(gradient)),
        "fresh": Run(FRESH, lambda: torch.empty(FRESH // FLOAT, device=device).fill_(1.0)),
    }


def link(device: torch.device) -> dict[str, Run]:
    """An accelerator's way to its host's memory, and that memory itself."""
    near = torch.zeros(LARGE // FLOAT, device=device)
    pinned = torch.zeros(LARGE // FLOAT, pin_memory=True)
    other = torch.ones(LARGE // FLOAT)
    return {
        "link": Run(LARGE, lambda: near.copy_(pinned, non_blocking=True)),
        "host": Run(2 * LARGE, lambda: pinned.copy_(other)),
    }


def compute(device: torch.device) -> dict[str, Run]:
    """Layers of usual sizes, forward; an amount is FLOPs."""
    runs = {}
    for samples, fan_in, fan_out in LAYERS:
        batch = torch.randn(samples, fan_in, device=device)
        weight = torch.randn(fan_out, fan_in, device=device)
        bias = torch.zeros(fan_out, device=device)

        def layer(
            batch: torch.Tensor = batch, weight: torch.Tensor = weight, bias: torch.Tensor = bias
        ) -> None:
            nn.functional.linear(batch, weight, bias)

        runs[f"layer {samples}x{fan_in}x{fan_out}"] = Run(2.0 * samples * fan_in * fan_out, layer)
    return runs


def operations(device: torch.device) -> dict[str, Run]:
    """A step of a chain of tiny layers; an amount is the operations a plan counts for it."""
    chain = nn.Sequential(*(m for _ in range(CHAIN) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    chain.to(device)
    batch = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)

    def step() -> None:
        chain.zero_grad()
        chain(batch).sum().backward()

    return {"operations": Run(CHAIN * OPERATIONS_OF_A_LAYER, step)}
