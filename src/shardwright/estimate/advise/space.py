"""The layouts that a job may have: axes with bounds, and the job that each layout is."""

# The space is a product of named axes so that what was looked at can be printed in a few lines. A
# combination that no engine could run (degrees that do not multiply or divide, schedules that need
# other numbers of microbatches) is left out here, by the same checks that refuse it in a job.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from shardwright.core.advice import Layout
from shardwright.core.errors import InputError, expected, not_one_of
from shardwright.core.llama import LlamaShape
from shardwright.estimate.unplanned import ends_of, treatment_of
from shardwright.job.cluster import device_of
from shardwright.job.exported import ENGINES, unlike
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.job.memory import check_policy
from shardwright.job.parallel import Degrees, ParallelSection, dealt, degrees
from shardwright.job.pipelining import checked, named
from shardwright.planner.variation import changed

LEAST_TOKENS = 2048  # of a sample on a context rank: with fewer, rings take longer than attention
MOST_MICRO, MOST_CHUNKS = 8, 4

# What a runtime has where no engine is named that runs it: ours runs data ranks alone, and torch's
# is asked for what TorchTitan makes of it.
QUARTERS = {"first:25%": 1, "first:50%": 2, "first:75%": 3}  # of a stage's layers, the first ones
POLICIES: dict[str, tuple[str, ...]] = {
    "megatron": ("none", "core_attention", "full", *QUARTERS),
    "fsdp2": ("none", "selective", "full", "layers:2", "layers:4"),
    "shardwright": ("none", "selective", "full", *QUARTERS),
    "ddp": ("none", "selective", "full", *QUARTERS),
}
ZEROS: dict[str, tuple[int, ...]] = {"megatron": (1,), "shardwright": (3, 2, 1)}
DATA_ALONE = ("shardwright", "ddp")
SCHEDULES = ("1f1b", "interleaved_1f1b")
DIVIDING = ("tensor", "pipeline", "context", "expert")
# Keys that speak of a degree, and are not read where it is 1.
SPEAK_OF = {
    "tensor": ("sequence",),
    "pipeline": ("schedule", "chunks"),
    "expert": ("routing", "capacity_factor", "skew", "expert_load", "expert_tensor"),
}
AXES = (
    "tensor", "pipeline", "schedule", "chunks", "context", "expert", "data_replicate", "zero",
    "micro_batch", "checkpointing", "compile",
)  # fmt: skip
# Fields of a layout that its degrees follow from; beside them it says how a rank runs.
RUN_BY = ("zero", "checkpointing", "compile")
OF_DEGREES = tuple(name for name in Layout.__struct_fields__ if name not in RUN_BY)
assert set(Layout.__struct_fields__) == {*AXES, "data_shard"}


def for_engine(job: Job, engine: str) -> Job:
    """The job as an ``engine`` runs it: keys of its memory that must have another value there have
    the first one that it takes."""
    if engine and engine not in ENGINES:
        raise InputError(not_one_of("--engine", engine, ENGINES))
    return changed(job, unlike(job, engine)) if engine else job


class Space:
    """The layouts of a ``job`` for ``engine`` with ``batch`` samples of all ranks in a step;
    ``ranks`` are how many there are, and how many of them on a host. ``fixed`` has axes with the
    only values that they may have."""

    def __init__(
        self, job: Job, engine: str, ranks: tuple[int, int], batch: int, fixed: Mapping[str, str]
    ) -> None:
        self.engine = engine
        self.world, host = ranks
        self.job = for_engine(job, engine)
        self.device = memory_of(self.job).lowering or device_of(job.cluster)
        self.global_batch = batch
        self.shape = job.model.shape if isinstance(job.model.shape, LlamaShape) else None
        self._degrees: dict[tuple[object, ...], Degrees] = {}
        self.axes: dict[str, Sequence[Any]] = self._axes(host)
        for axis, text in fixed.items():
            self.axes[axis] = (self._fixed(axis, text),)

    def _axes(self, host: int) -> dict[str, Sequence[Any]]:
        runtime = memory_of(self.job).runtime
        found: dict[str, Sequence[Any]] = {
            "zero": ZEROS.get(runtime, (0,)),
            "micro_batch": [n for n in _powers(MOST_MICRO) if self.global_batch % n == 0],
            "checkpointing": POLICIES[runtime],
            "compile": (bool(memory_of(self.job).compile),),
            "data_replicate": (1,) if runtime == "megatron" else _divisors(self.world),
            "schedule": SCHEDULES,
            "chunks": _powers(MOST_CHUNKS),
        }
        if self.shape is None:
            # What divides a user's module it says itself: those degrees stay as the job has them.
            given = parallel_of(self.job)
            found |= {name: (getattr(given, name),) for name in DIVIDING}
            found |= {"schedule": (given.schedule,), "chunks": (given.chunks or 1,)}
        elif runtime in DATA_ALONE:
            found |= dict.fromkeys((*DIVIDING, "chunks"), (1,)) | {"schedule": ("1f1b",)}
        else:
            shape, sequence = self.shape, self.job.batch.sequence
            found |= {
                "tensor": [n for n in _divisors(host) if shape.heads % n == 0],
                "pipeline": [n for n in _divisors(self.world) if n <= shape.layers],
                "context": [n for n in _powers(sequence // LEAST_TOKENS) if self.world % n == 0],
                "expert": [n for n in _divisors(shape.experts or 1) if self.world % n == 0],
            }
        return {name: self._of_engine(name, found[name]) for name in AXES}

    def _of_engine(self, axis: str, values: Sequence[Any]) -> Sequence[Any]:
        """Those values of an axis that the engine takes, but for the first, which says nothing."""
        if not self.engine:
            return values
        engine = ENGINES[self.engine]
        where = "memory" if axis in RUN_BY else "parallel"
        if axis in ("micro_batch", "zero", "compile") or where in engine.limits:
            return values
        first = values[:1] if axis != "checkpointing" else ()
        kept = [v for v in values if v in first or engine.takes(f"{where}.{axis}", v)]
        return kept or values[:1]

    def _fixed(self, axis: str, text: str) -> Any:
        if axis not in self.axes:
            raise InputError(not_one_of("--fix", axis, self.axes))
        where = f"--fix {axis}"
        if axis == "checkpointing":
            if text not in QUARTERS:
                check_policy(text, where)
            return text
        if axis == "schedule":
            return named(text).name
        if axis == "compile":
            if text not in ("true", "false"):
                raise InputError(expected(where, "true or false", f"'{text}'"))
            return text == "true"
        if not text.isdigit() or int(text) < (axis != "zero"):
            raise InputError(expected(where, "a whole number from 1 on", f"'{text}'"))
        if self.shape is None and int(text) not in self.axes[axis]:
            its = " of a module of your own" if self.job.model.traits.is_function else ""
            raise InputError(expected(where, " or ".join(map(str, self.axes[axis])) + its, text))
        return int(text)

    def layouts(self) -> Iterator[Layout]:
        """Every layout, in the order of the axes."""
        a = self.axes
        for tensor, context, expert, pipeline in product(
            a["tensor"], a["context"], a["expert"], a["pipeline"]
        ):
            ranks = tensor * context * pipeline
            if self.world % ranks:
                continue
            data = self.world // ranks
            if self.global_batch % data:
                continue
            rest = product(a["schedule"], a["chunks"], a["data_replicate"], a["micro_batch"])
            for schedule, chunks, replicate, micro in rest:
                if data % replicate or (self.global_batch // data) % micro:
                    continue
                if (data // replicate) * context * tensor % expert:
                    continue
                made = Layout(
                    data_replicate=replicate,
                    data_shard=data // replicate,
                    tensor=tensor,
                    pipeline=pipeline,
                    schedule=schedule if pipeline > 1 else "",
                    chunks=chunks if pipeline > 1 else 1,
                    context=context,
                    expert=expert,
                    micro_batch=micro,
                )
                first = schedule == a["schedule"][0] and chunks == a["chunks"][0]
                if (first if pipeline == 1 else True) and self._runs(made):
                    for zero, policy, compiled in product(
                        self._zeros(made), self._policies(made), a["compile"]
                    ):
                        keys = {"zero": zero, "checkpointing": policy, "compile": compiled}
                        yield msgspec.structs.replace(made, **keys)

    def _zeros(self, layout: Layout) -> Sequence[int]:
        """Stages of ZeRO that differ: in a step of one backward 1 is 2, and where nobody shares
        anything each is any other."""
        stages: Sequence[int] = self.axes["zero"]
        if self.microbatches(layout) > 1:
            return stages
        if layout.data_shard == 1:
            return stages[:1]
        return [stage for stage in stages if stage != 1 or 2 not in stages]

    def _policies(self, layout: Layout) -> Sequence[str]:
        """Policies that differ, with numbers of layers for parts of a stage."""
        policies: Sequence[str] = self.axes["checkpointing"]
        if self.shape is None:
            return [name for name in policies if name not in QUARTERS]
        stages = layout.pipeline * layout.chunks
        most = max(dealt(self.shape.layers, stages, ends_of(memory_of(self.job))))
        return list(dict.fromkeys(_of_stage(name, most) for name in policies))

    def microbatches(self, layout: Layout) -> int:
        """How many a data rank has in a step."""
        data = layout.data_replicate * layout.data_shard
        return self.global_batch // data // layout.micro_batch

    def degrees(self, layout: Layout) -> Degrees:
        """Its degrees; InputError where they do not divide what they are to."""
        key = tuple(getattr(layout, name) for name in OF_DEGREES)
        if key not in self._degrees:
            self._degrees[key] = degrees_of(self.job_of(layout), self.world)
        return self._degrees[key]

    def job_of(self, layout: Layout) -> Job:
        """The job that asks for a layout."""
        names = ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert")
        keys: dict[str, Any] = {f"parallel.{name}": getattr(layout, name) for name in names}
        for name, others in SPEAK_OF.items():
            if getattr(layout, name) == 1:
                keys |= {f"parallel.{key}": getattr(ParallelSection(), key) for key in others}
        if layout.pipeline > 1:
            keys["parallel.schedule"] = layout.schedule
            keys["parallel.chunks"] = layout.chunks if layout.chunks > 1 else None
        times = self.microbatches(layout)
        keys["parallel.microbatches"] = times if times > 1 or layout.pipeline > 1 else None
        keys["batch.size"] = times * layout.micro_batch
        keys["cluster.world_size"] = self.world
        keys["memory.checkpointing"] = layout.checkpointing
        if layout.zero:
            keys["memory.zero"] = layout.zero
        if layout.compile != bool(memory_of(self.job).compile):
            keys["memory.compile"] = layout.compile
        return changed(self.job, keys)

    def _runs(self, layout: Layout) -> bool:
        """Whether the job's own checks take it."""
        try:
            if layout.pipeline > 1:
                times = self.microbatches(layout)
                chunks = None if layout.chunks == 1 else layout.chunks
                if checked(layout.schedule, layout.pipeline, times, chunks) != layout.chunks:
                    return False
            treatment_of(memory_of(self.job), self.device, self.degrees(layout))
        except InputError:
            return False
        return True


def _of_stage(name: str, layers: int) -> str:
    """A policy of a stage with so many layers at most, of which it may pick none or all."""
    kind, _, count = name.partition(":")
    if kind not in ("first", "layers"):
        return name
    if name in QUARTERS:
        picked = QUARTERS[name] * layers // 4
        name = f"first:{picked}"
    else:
        picked = min(int(count), layers) if kind == "first" else layers // int(count)
    return name if 0 < picked < layers else "full" if picked else "none"


def global_batch(job: Job, world: int) -> int:
    """Samples of all ranks in a step of the job as it is."""
    section = parallel_of(job)
    found = degrees(section, world, job.batch.size)
    return job.batch.size * found.data_replicate * found.data_shard


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    return [2**n for n in range(max(most, 1).bit_length())]
