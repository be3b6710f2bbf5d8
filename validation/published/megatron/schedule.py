"""The order in which the last rank of a pipeline runs its micro-batches forward and backward.

Source: Megatron-LM d98e8a64 ``core/pipeline_parallel/schedules.py``. Without virtual stages the
last rank alternates at once; with them it first runs every chunk but its last for as many
micro-batches as there are stages.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from published.megatron.description import Run


class Turn(msgspec.Struct, frozen=True):
    """A chunk of the rank for one micro-batch, forward or backward."""

    direction: Literal["forward", "backward"]
    chunk: int


def turns(run: Run, most: int = 4) -> tuple[Turn, ...]:
    """The turns of a step, at most ``most`` rounds of the pipeline: later ones repeat."""
    stages, chunks = run.parallel.pipeline, run.parallel.chunks
    batches = min(run.microbatches, most * stages)
    total = batches * chunks
    warmup = (chunks - 1) * stages if chunks > 1 else 0
    if run.kernels.overlap_experts and chunks > 1:
        warmup += 1
    warmup = min(warmup, total)
    order = [Turn("forward", _chunk(run, index)) for index in range(warmup)]
    for index in range(total - warmup):
        order.append(Turn("forward", _chunk(run, warmup + index)))
        order.append(Turn("backward", chunks - 1 - _chunk(run, index)))
    for index in range(total - warmup, total):
        order.append(Turn("backward", chunks - 1 - _chunk(run, index)))
    return tuple(order)


def _chunk(run: Run, index: int) -> int:
    stages, chunks = run.parallel.pipeline, run.parallel.chunks
    return index % (stages * chunks) // stages
