"""Which layers each rank of a pipeline holds, and in which order it runs them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.errors import InputError, expected
from shardwright.heap.rank_step import ONE_PASS
from shardwright.job.parallel import Degrees
from shardwright.job.pipelining import PassRun, order_in_runs, representative, stage_of

# What the embedding and the head weigh, in layers, where layers are dealt out: TorchTitan's default
# (torchtitan/distributed/pipeline_parallel.py, input_weight and output_weight).
ENDS_WEIGH = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of the model; ``first`` has the embedding, ``last`` the head."""

    layers: tuple[int, int]
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """What a rank of the pipeline holds and does; ``microbatches`` is how many it really has."""

    rank: int
    stages: tuple[Stage, ...]
    runs: tuple[PassRun, ...]
    microbatches: int


def stages(layers: int, count: int) -> list[Stage]:
    """Deal ``layers`` out to ``count`` stages, the first and last with less for what is beside."""
    if count == 1:
        return [Stage((0, layers), True, True)]
    weight = layers + 2 * ENDS_WEIGH
    if weight < count or layers < count - 2 * ENDS_WEIGH:
        raise InputError(
            expected(
                "[parallel] pipeline",
                f"at most {layers + 2 * ENDS_WEIGH} stages for {layers} layers",
                str(count),
            )
        )
    each, over = divmod(weight, count)
    sizes = [each + (index < over) for index in range(count)]
    sizes[0] -= ENDS_WEIGH
    sizes[-1] -= ENDS_WEIGH
    found, begin = [], 0
    for index, size in enumerate(sizes):
        found.append(Stage((begin, begin + size), index == 0, index == count - 1))
        begin += size
    return found


def pipeline_ranks(layers: int, degrees: Degrees) -> list[PipelineRank]:
    """Every rank of the pipeline; without one a single rank that accumulates microbatches."""
    count = degrees.pipeline * degrees.chunks
    dealt = stages(layers, count)
    if degrees.pipeline == 1:
        # what accumulates does so from the second on
        runs = (PassRun(ONE_PASS.passes, min(degrees.microbatches, 2)),)
        return [PipelineRank(0, tuple(dealt), runs, degrees.microbatches)]
    few = representative(degrees.schedule, degrees.pipeline, degrees.microbatches, degrees.chunks)
    runs_of = order_in_runs(degrees.schedule, degrees.pipeline, few, degrees.chunks)
    return [
        PipelineRank(
            rank,
            tuple(
                dealt[stage_of(degrees.schedule, degrees.pipeline, rank, chunk)]
                for chunk in range(degrees.chunks)
            ),
            runs_of[rank],
            degrees.microbatches,
        )
        for rank in range(degrees.pipeline)
    ]
