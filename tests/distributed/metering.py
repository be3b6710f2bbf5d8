"""A loop whose steps are measured one by one, for tests that hold each against its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright.core.timeline import Event
from shardwright.runtime.guard import Guard
from shardwright.runtime.meter import MEMORY_STEPS, Meter

STEPS = MEMORY_STEPS[-1]
LossOf = Callable[[nn.Module, Any], torch.Tensor]


def steps_measured(
    meter: Meter,
    guard: Guard,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    loss_of: LossOf,
    ask: Callable[[nn.Module, Any], None] | None = None,
) -> tuple[list[Event], list[list[Event]]]:
    """Exact events, and the events of each step whose memory was followed.

    Peaks are kept apart by step: gloo's threads may hold a buffer for a moment after the wait, so
    on a busy machine a step can show more than it needs. ``ask`` lets ids of the next batch travel.
    """
    by_step: list[list[Event]] = []
    following = None

    def loaded() -> Any:
        batch = next(batches)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                meter.holds(leaf, "input")
        return batch

    with meter.watching(model, optimizer):
        for step in range(1, STEPS + 1):
            meter.begin()
            batch, following = loaded() if following is None else following, None
            loss = loss_of(model, batch)
            if ask is not None:
                with meter.phase("load"):
                    following = loaded()
                ask(model, following)
            loss.backward()
            guard.settle()
            optimizer.step()
            optimizer.zero_grad()
            del loss, batch
            meter.end()
            if step in MEMORY_STEPS:
                by_step.append(meter.events())
                meter.forget_peaks()
    return meter.exact, by_step
