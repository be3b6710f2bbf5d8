"""Which layers stand on which stage of the pipeline."""

from __future__ import annotations

from published.megatron.description import Parallel, Shape
from published.megatron.flags import Flags
from published.megatron.layout import Chunk, even_stages, expand
from shardwright.core.errors import InputError, expected

_COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def virtual_stages(flags: Flags, pipeline: int) -> int:
    """Stages that each rank of the pipeline holds."""
    layout = flags.text("pipeline-model-parallel-layout", "")
    if layout:
        return max(1, len(_stages(flags, layout)) // pipeline)
    if "num-virtual-stages-per-pipeline-rank" in flags:
        return flags.integer("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in flags:
        layers = flags.integer("num-layers", 0) + sum(map(flags.on, _COUNTED))
        each = flags.integer("num-layers-per-virtual-pipeline-stage", 1)
        return max(1, layers // pipeline // each)
    pattern = flags.text("hybrid-layer-pattern", "")
    if "|" in pattern:
        return max(1, len(pattern.split("/")[0].split("|")) // pipeline)
    return 1


def _stages(flags: Flags, layout: str) -> list[str]:
    try:
        return expand(layout).split("|")
    except (ValueError, IndexError):
        raise InputError(
            expected(f"{flags.where}: pipeline-model-parallel-layout", "Et*2|...|tmL", layout)
        ) from None


def last_rank_chunks(flags: Flags, shape: Shape, parallel: Parallel) -> tuple[Chunk, ...]:
    """The virtual stages of the last rank of the pipeline, in the order of the model."""
    layout = flags.text("pipeline-model-parallel-layout", "")
    stages = parallel.pipeline * parallel.chunks
    if layout:
        counts = tuple(stage.count("t") for stage in _stages(flags, layout))
    else:
        counts = _counts(flags, shape, parallel)
    if sum(counts) != len(shape.layers) or len(counts) != stages:
        raise InputError(
            expected(
                f"{flags.where}: pipeline",
                f"{len(shape.layers)} layers on {stages} stages",
                f"{sum(counts)} on {len(counts)}",
            )
        )
    chunks = []
    for index in range(parallel.pipeline - 1, stages, parallel.pipeline):
        before = sum(counts[:index])
        last = index == stages - 1
        chunks.append(
            Chunk(
                layers=shape.layers[before : before + counts[index]],
                first=before,
                embedding=index == 0,
                predictors=shape.predictors if last else (),
                loss=last,
            )
        )
    return tuple(chunks)


def _counts(flags: Flags, shape: Shape, parallel: Parallel) -> tuple[int, ...]:
    """Layers of every virtual stage. Where the first or the last rank has its own number of
    layers, each rank divides its own over its stages."""
    pattern = flags.text("hybrid-layer-pattern", "").split("/")[0]
    if "|" in pattern:
        return tuple(len(part) for part in pattern.split("|"))
    layers = len(shape.layers)
    first = flags.raw("decoder-first-pipeline-num-layers")
    last = flags.raw("decoder-last-pipeline-num-layers")
    embedding, loss = (flags.on(name) for name in _COUNTED)
    if first is None and last is None:
        stages = parallel.pipeline * parallel.chunks
        return even_stages(layers, stages, embedding=embedding, loss=loss, first=None, last=None)
    ranks = even_stages(
        layers,
        parallel.pipeline,
        embedding=embedding,
        loss=loss,
        first=None if first is None else int(first),
        last=None if last is None else int(last),
    )
    return tuple(count // parallel.chunks for _ in range(parallel.chunks) for count in ranks)
