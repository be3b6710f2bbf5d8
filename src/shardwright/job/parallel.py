"""The ``[parallel]`` of a job: what divides a model and its batch, and the mesh that this makes."""

# Degrees must multiply to the ranks and divide what they cut, or a collective of the run would have
# other members than the estimate counted. They are worked out in one place, for the plan, the
# memory and a run of the same job have to agree on which ranks share what. Expert parallelism
# multiplies nothing: it regroups ranks of data_shard, context and tensor, as TorchTitan does.

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, expected
from shardwright.core.llama import (
    MAX_WORLD,
    Degree,
    LlamaShape,
    LocalShape,
    check_local,
)
from shardwright.job.model import ModelTraits
from shardwright.job.pipelining import chunk_count

DEFAULT_CAPACITY = 1.25
DEFAULT_SKEW = 0.3
# What the embedding and the head weigh, in layers, where layers are dealt out: TorchTitan's default
# (torchtitan/distributed/pipeline_parallel.py, input_weight and output_weight).
ENDS_WEIGH = (1, 1)

Rest = Annotated[int, msgspec.Meta(ge=-1, le=MAX_WORLD)]
Quantile = Literal["p50", "p99"]
# How a layer of a user's module is cut over tensor ranks: outputs of a Linear or columns of an
# Embedding, which stay apart or are gathered; or inputs or rows, whose results are summed. And of a
# stack of experts: some of them on each of the ranks that share them.
Style = Literal["colwise", "colwise_rep", "rowwise", "expert"]
# Deviations from the mean of a normal distribution below which that share lies.
QUANTILES: dict[Quantile, float] = {"p50": 0.0, "p99": 2.3263478740408408}


class ParallelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees that multiply to the number of ranks, all but ``expert``, which regroups ranks of
    ``data_shard``, ``context`` and ``tensor``.

    Attributes:
        data_replicate, data_shard: ranks with whole copies; ranks that share each copy, -1 for all
            that are left. A plan of our runtime cuts units over the ranks of each copy, which are
            neighbours, and sums gradients over copies (HSDP); tables are shared by all ranks
        tensor, sequence (1, ``true`` beside ``tensor``): of a llama: ranks that share heads, MLPs
            and words; whether they share the tokens between these too. Of a module of your own:
            ranks that share its layers
        parallelize_plan: beside ``tensor``, [which
            layers](memory.md#tensor-parallelism-of-a-module-of-your-own) of a module of your own it
            divides, beside ``expert`` which experts: ``{ "layers.*.up" = "colwise", ... }``
        pipeline, schedule, chunks (1, ``"1f1b"``, the schedule's): of a llama or [a module of your
            own](memory.md#a-pipeline-of-a-module-of-your-own): stages; ``"gpipe"``, ``"1f1b"``,
            ``"interleaved_1f1b"``, ``"looped_bfs"``, ``"zbh1"``, ``"zbh2"``,
            ``"interleaved_zero_bubble"``, ``"zbv"``, ``"dualpipev"``; pieces of the model per rank
        microbatches (``batch.size`` in a pipeline, else 1): parts of a rank's batch; without a
            pipeline gradients are accumulated over them
        context: of a llama: ranks that share the tokens of a sample
        expert: of a llama, or of a module of your own [where a plan names its
            experts](memory.md#experts-of-a-module-of-your-own): ranks that share the experts, taken
            from those of ``data_shard``, ``context`` and ``tensor``
        expert_tensor (that of ``tensor`` where ``expert`` is 1, else 1): of a llama beside
            ``runtime = "megatron"``: ranks that share the width of each expert
        routing: tokens that a rank's experts receive: ``"even"``; ``"capacity"``: so many times the
            even share; ``"skewed"``: a lognormal share
        capacity_factor (1.25): of ``"capacity"``
        skew, expert_load (0.3, ``"p99"``): of ``"skewed"``: deviation between experts over their
            mean (assumed), and which ranks are shown: ``"p99"``: the median and one in a hundred;
            ``"p50"``: the median alone
    """

    data_replicate: Degree = 1
    data_shard: Rest = -1
    tensor: Degree = 1
    sequence: bool | None = None
    pipeline: Degree = 1
    context: Degree = 1
    expert: Degree = 1
    schedule: str = "1f1b"
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    chunks: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    routing: Literal["even", "capacity", "skewed"] = "even"
    capacity_factor: Annotated[float, msgspec.Meta(gt=0, le=1e4)] | None = None
    skew: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    expert_load: Quantile = "p99"
    parallelize_plan: dict[str, Style] | UnsetType = UNSET
    expert_tensor: Degree | UnsetType = UNSET


class Degrees(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section with every number known; ``chunks`` and ``microbatches`` too."""

    data_replicate: int
    data_shard: int
    tensor: int
    sequence: bool
    pipeline: int
    context: int
    expert: int
    schedule: str
    microbatches: int
    chunks: int
    expert_tensor: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        data = self.data_replicate * self.data_shard
        return data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks that share a dense parameter by bytes, as FSDP does: context ranks take part."""
        # Context ranks have the same parameters and other tokens, so FSDP may share among them,
        # too.
        return self.data_shard * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that share the parameters of one rank's experts by bytes."""
        if self.expert_tensor is not None:
            return self.shards * self.tensor // (self.expert * self.expert_tensor)
        if self.expert == 1:
            return self.shards
        # Tensor ranks do not cut experts there, so they share them by bytes as data ranks do; ranks
        # of `expert` have different ones.
        return self.data_shard * self.context * self.tensor // self.expert


# Every pattern is asked for at every module of a model, again and again.
@lru_cache(maxsize=2**16)
def fits(path: str, pattern: str) -> bool:
    """Whether a pattern, in which ``*`` stands for any part of a path, names a module."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def experts_of(section: ParallelSection, traits: ModelTraits) -> tuple[str, ...]:
    """Patterns of the modules that ``expert`` divides."""
    return traits.experts or tuple(
        name for name, style in (section.parallelize_plan or {}).items() if style == "expert"
    )


def fixed_world(section: ParallelSection) -> int | None:
    """The ranks that the degrees multiply to; None where one of them is all that is left."""
    return None if section.data_shard == -1 else _others(section) * section.data_shard


def degrees(
    section: ParallelSection, world_size: int, batch: int = 1, where: str = "job"
) -> Degrees:
    """The section on ``world_size`` ranks with ``batch`` samples per data rank and step.

    InputError names the key and the numbers that do not multiply, divide or fit.
    """
    others = _others(section)
    if section.data_shard == 0:
        raise InputError(
            expected(f"{where}: parallel.data_shard", "at least 1, or -1 for all that is left", "0")
        )
    if section.data_shard == -1 and world_size % others:
        raise InputError(
            expected(
                f"{where}: cluster.world_size",
                f"a multiple of {others}, which is {_product(section)}",
                str(world_size),
            )
        )
    # data_shard is the one that may be left open, as in TorchTitan: the others are chosen for a
    # model, this one follows from the machine.
    shard = world_size // others if section.data_shard == -1 else section.data_shard
    if others * shard != world_size:
        raise InputError(
            expected(
                f"{where}: cluster.world_size",
                f"{others * shard}, which is data_shard {shard} x {_product(section)}",
                str(world_size),
                "Leave one of them out, or set data_shard = -1.",
            )
        )
    _check_expert(section, shard, where)
    return Degrees(
        data_replicate=section.data_replicate,
        data_shard=shard,
        tensor=section.tensor,
        sequence=section.tensor > 1 if section.sequence is None else section.sequence,
        pipeline=section.pipeline,
        context=section.context,
        expert=section.expert,
        schedule=section.schedule,
        microbatches=_microbatches(section, batch, where),
        chunks=chunk_count(section.schedule, section.chunks) if section.pipeline > 1 else 1,
        expert_tensor=section.expert_tensor or None,
    )


def check_parallel(section: ParallelSection, is_function: bool, where: str) -> None:
    """Refuse a schedule that there is not, and degrees of a module of the user's own, whose
    function ``is_function``, where the job does not say what they divide."""
    if is_function:
        _check_python(section, section.parallelize_plan or {}, where)
    chunk_count(section.schedule, section.chunks)


def _check_python(section: ParallelSection, plan: Mapping[str, Style], where: str) -> None:
    """The job says how a degree divides a module of the user's own; experts on tensor ranks, which
    all have the same tokens, are not looked at."""
    for name, value, example, named in (
        (
            "tensor",
            section.tensor,
            '"layers.*.up" = "colwise", "layers.*.down" = "rowwise"',
            any(style != "expert" for style in plan.values()),
        ),
        (
            "expert",
            section.expert,
            '"layers.*.moe.experts" = "expert"',
            "expert" in plan.values(),
        ),
    ):
        if value > 1 and not named:
            spot, what = f"{where}: parallel.parallelize_plan", "modules" if plan else "layers"
            wanted = f"which {what} parallel.{name} cuts"
            raise InputError(expected(spot, wanted, "none", f"Such as {{ {example} }}."))
    if section.expert > 1 and section.tensor > 1:
        wanted = "1 beside parallel.tensor of a module of your own"
        raise InputError(expected(f"{where}: parallel.expert", wanted, str(section.expert)))


def check_divides(
    section: ParallelSection,
    found: Degrees,
    shape: LlamaShape,
    sequence: int,
    where: str = "job",
    ends: int = 0,
) -> None:
    """Refuse degrees that do not divide a llama or the ``sequence`` of its samples; so many
    ``ends`` of it may be pieces of their own."""
    local_shape(section, found, shape, LocalShape(), f"{where}: parallel")
    pieces = found.pipeline * found.chunks
    if pieces > shape.layers + ends:
        raise InputError(
            expected(
                f"{where}: parallel.pipeline",
                f"at most {shape.layers} pieces, one layer each",
                f"{found.pipeline} ranks of {found.chunks}",
            )
        )
    # Both cut the tokens of one sample, one after the other, and collectives take equal pieces.
    parts = found.context * (found.tensor if found.sequence else 1)
    if sequence % parts:
        factors = f"context {found.context}"
        factors += f" x tensor {found.tensor}" if found.sequence else ""
        raise InputError(
            expected(
                f"{where}: batch.sequence",
                f"a multiple of {parts}, which is {factors}",
                str(sequence),
            )
        )


def dealt(layers: int, count: int, ends: tuple[int, int] = ENDS_WEIGH) -> list[int]:
    """Layers of each of ``count`` stages, the first and last with less for the ``ends`` that are
    beside."""
    if count == 1:
        return [layers]
    # Embedding and head count as layers when they are dealt out and are taken off again: so the
    # first and last stage get fewer layers, as TorchTitan does it.
    weight = layers + sum(ends)
    if weight < count or layers < count - sum(ends):
        raise InputError(
            expected(
                "[parallel] pipeline",
                f"at most {weight} stages for {layers} layers",
                str(count),
            )
        )
    each, over = divmod(weight, count)
    sizes = [each + (index < over) for index in range(count)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return sizes


def capacity_of(section: ParallelSection) -> float | None:
    """How many times their even share experts take, where they take no more; else None."""
    if section.routing != "capacity" or section.expert == 1:
        return None
    return section.capacity_factor or DEFAULT_CAPACITY


def expert_load(section: ParallelSection, experts: int, quantile: Quantile) -> float:
    """Rows that a rank's experts receive, relative to even routing, in one rank of a hundred for
    ``p99`` and in every second for ``p50``.

    Assumed: loads of experts are independent, of mean 1 and deviation ``skew``; their mean over a
    rank's experts is lognormal.
    """
    if section.routing != "skewed" or section.expert == 1:
        return 1.0
    skew = DEFAULT_SKEW if section.skew is None else section.skew
    # A mean of n independent loads deviates by 1/sqrt(n): ranks with few experts are hit hardest.
    spread = skew / math.sqrt(experts / section.expert)
    variance = math.log1p(spread**2)
    # Without the half variance the mean of a lognormal is above 1: ranks would receive more rows in
    # all than they send.
    return math.exp(-variance / 2 + QUANTILES[quantile] * math.sqrt(variance))


def local_shape(
    section: ParallelSection,
    found: Degrees,
    shape: LlamaShape,
    stage: LocalShape,
    where: str = "job: parallel",
) -> LocalShape:
    """The part of a llama on one rank of the mesh, of the layers, and with the loss, of a
    ``stage``; InputError where it cannot be divided so."""
    local = msgspec.structs.replace(
        stage,
        tensor=found.tensor,
        sequence_parallel=found.sequence,
        context=found.context,
        expert=found.expert,
        expert_tensor=found.expert_tensor,
        expert_load=expert_load(section, shape.experts, section.expert_load),
        capacity_factor=capacity_of(section),
    )
    check_local(shape, local, where)
    return local


def _others(section: ParallelSection) -> int:
    """The product of all degrees but ``data_shard``."""
    return section.data_replicate * section.tensor * section.pipeline * section.context


def _product(section: ParallelSection) -> str:
    names = ("data_replicate", "tensor", "pipeline", "context")
    return " x ".join(f"{name} {getattr(section, name)}" for name in names)


def _check_expert(section: ParallelSection, shard: int, where: str) -> None:
    group = shard * section.context * section.tensor
    width = section.expert_tensor or 1
    if group % (section.expert * width):
        raise InputError(
            expected(
                f"{where}: parallel.expert",
                f"a divisor of {group}, which is data_shard {shard} x context {section.context} "
                f"x tensor {section.tensor}",
                f"{section.expert}" + (f" x expert_tensor {width}" if width > 1 else ""),
            )
        )


def _microbatches(section: ParallelSection, batch: int, where: str) -> int:
    # A pipeline without microbatches is one rank at work at a time, so there one sample each is the
    # default; without a pipeline nothing is accumulated that nobody asked for.
    if section.microbatches is None:
        return batch if section.pipeline > 1 else 1
    if batch % section.microbatches:
        raise InputError(
            expected(
                f"{where}: parallel.microbatches",
                f"a divisor of the {batch} samples of a rank, batch.size",
                str(section.microbatches),
            )
        )
    return section.microbatches
