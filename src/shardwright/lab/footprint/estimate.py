"""Every class of ranks of a job: recorded once, unfolded, and run on a symbolic heap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.footprint import Footprint, RankMemory
from shardwright.core.job import Job, degrees_of, memory_of, parallel_of
from shardwright.core.llama import LlamaShape
from shardwright.core.memory_section import MemorySection, float8_scaling
from shardwright.core.parallel import Degrees, ParallelSection, Quantile
from shardwright.cost import constants
from shardwright.lab.footprint.machines import machine_of, optimizer_of, sharding
from shardwright.lab.footprint.models import LlamaModel, PythonModel, RecordedModel
from shardwright.lab.footprint.outside import outside
from shardwright.lab.footprint.planned import planned_footprint
from shardwright.lab.footprint.stages import PipelineRank, pipeline_ranks
from shardwright.memory.allocator import AllocatorSettings
from shardwright.memory.allocator.replay import ASSUMPTION
from shardwright.memory.rank_step import Chunk, RankStep
from shardwright.memory.results import module_memory, rank_memory, reserved, timeline
from shardwright.trace.lowering import unknown_operators
from shardwright.trace.treatment import Treatment

PLANNED = ("dlrm", "transformer", "tables")  # kinds whose plan foresees their memory
CLOSE, MOST_FOLLOWED = 0.9, 4  # classes whose peaks are followed event by event
LARGEST = 20  # tensors at the peak that are listed
# Uneven routing is shown by the rank in the middle and by one of a hundred.
LOADS: tuple[tuple[Quantile, str, float], ...] = (
    ("p99", ", 99th percentile of experts", 0.01),
    ("p50", ", median of experts", 0.99),
)


def footprint(job: Job, *, details: bool = False, rank: str = "") -> Footprint:
    """The memory of every class of ranks of ``job``, without running it.

    On an accelerator the class with the highest peak is also replayed through the allocator. With
    ``details`` it has its modules, its largest tensors and a timeline; ``rank`` names another class
    to have them. Raises InputError for what cannot be traced or divided, naming the place.
    """
    begun = time.perf_counter()
    if job.model.kind in PLANNED:
        found = planned_footprint(job)
    else:
        found = _Estimate(job).result(details, rank)
    return msgspec.structs.replace(found, seconds=time.perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class _Class:
    """Ranks that do the same."""

    name: str
    ranks: int
    coordinates: dict[str, int]
    step: RankStep


class _Estimate:
    """A job with everything worked out that all of its ranks share."""

    def __init__(self, job: Job) -> None:
        self.job, self.section = job, memory_of(job)
        _refuse_compiled_experts(job)
        self.cluster, self.capacity = _cluster(job)
        self.world = job.cluster.world_size or self.cluster.world_size
        self.degrees = degrees_of(job, self.world)
        self.parallel: ParallelSection = parallel_of(job)
        self.device = self.section.lowering or self.cluster.compute_device
        self.sharding = sharding(self.section, self.degrees, self.device == "cuda")
        self.treatment = Treatment(
            self.device,
            self.section.checkpointing,
            bool(self.section.compile),
            self.section.compile is True,
            float8_scaling(self.section) or "",
        )
        self.allocator = AllocatorSettings.parse(self.section.allocator)
        self.model = _model(job, self.degrees, self.treatment)
        self.assumptions = [*optimizer_of(job).assumptions(), *_sharing(job, self.degrees)]

    def result(self, details: bool, rank: str) -> Footprint:
        classes = list(self._classes())
        make = machine_of(self.section, self.sharding)
        exact = self.device == "cpu" and not self.section.compile and not self.section.float8
        found = [
            rank_memory(each.name, each.ranks, each.coordinates, each.step, make, exact=exact)
            for each in classes
        ]
        found, classes = _ordered(found, classes)
        if details or self.device == "cuda":
            for index in self._followed(found, rank):
                self._follow(index, classes, found, details)
        return Footprint(
            model=self.job.model.kind,
            parameters=self.model.parameters,
            world_size=self.degrees.world_size,
            parallel=_degrees(self.degrees),
            settings=_settings(self.section, self.device, self.job),
            ranks=tuple(found),
            capacity=self.capacity,
            outside=outside(self.degrees, self.device == "cuda"),
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def _followed(self, found: list[RankMemory], named: str) -> list[int]:
        """The classes whose events are looked at: the worst, those close to it on an accelerator,
        whose allocator may hold more, and the one that is asked for."""
        close = [0]
        if self.device == "cuda":
            least = CLOSE * found[0].peak_bytes
            close = [k for k, each in enumerate(found) if each.peak_bytes >= least]
            close = sorted(close, key=lambda k: -found[k].peak_bytes)[:MOST_FOLLOWED]
        asked = [k for k, each in enumerate(found) if each.name == named]
        return list(dict.fromkeys([*close, *asked]))

    def _follow(
        self, index: int, classes: list[_Class], found: list[RankMemory], details: bool
    ) -> None:
        """Add to a class what its events show."""
        step = classes[index].step
        tape = step.taped(machine_of(self.section, self.sharding))
        if self.device == "cuda":
            held = reserved(tape.changes, self.allocator, self.capacity).reserved_peak
            found[index] = msgspec.structs.replace(found[index], reserved_bytes=held)
            self.assumptions.append(ASSUMPTION)
        if not details:
            return
        kinds, samples = timeline(tape.changes)
        found[index] = msgspec.structs.replace(
            found[index],
            modules=module_memory(tape.changes, *step.parameters(self.sharding)),
            largest=tuple(tape.alive_at_peak()[:LARGEST]),
            kinds=kinds,
            timeline=samples,
        )

    def _classes(self) -> Iterator[_Class]:
        degrees = self.degrees
        count = degrees.world_size // degrees.pipeline
        for rank in pipeline_ranks(self.model.layers, degrees):
            name = f"stage {rank.rank}" if degrees.pipeline > 1 else "all ranks"
            where = {"pipeline": rank.rank} if degrees.pipeline > 1 else {}
            for title, share, section in self._loads():
                ranks = count if share is None else max(1, round(count * share))
                yield _Class(f"{name}{title}", ranks, where, self._step(rank, section))

    def _assume_kernels(self, operators: tuple[str, ...]) -> None:
        """Operators whose kernels nobody has compared take on CUDA what they take on a CPU."""
        unknown = unknown_operators(operators) if self.device == "cuda" else ()
        if unknown:
            self.assumptions.append(f"as on a CPU: {', '.join(unknown)}")

    def _loads(self) -> Iterator[tuple[str, float | None, ParallelSection]]:
        """Ranks whose experts receive more than others, where routing is uneven."""
        if self.parallel.routing != "skewed" or self.degrees.expert == 1:
            yield "", None, self.parallel
            return
        for quantile, title, share in LOADS:
            section = msgspec.structs.replace(self.parallel, expert_load=quantile)
            yield title, share, section

    def _step(self, rank: PipelineRank, parallel: ParallelSection) -> RankStep:
        stages = [self.model.recorded(parallel, stage) for stage in rank.stages]
        for each in stages:
            self.assumptions.extend(each.recording.notes)
            self._assume_kernels(each.recording.operators)
        received = sum(each.received + each.recording.result for each in stages)
        return RankStep(
            [Chunk(each.recording, each.received) for each in stages],
            rank.passes,
            optimizer_of(self.job),
            received * rank.microbatches,
        )


def _cluster(job: Job) -> tuple[Cluster, int | None]:
    """The job's cluster, and the bytes that a rank may fill where the job says it."""
    found, _ = constants.cluster(job.cluster)
    section = job.cluster
    said = section.preset or section.file or section.hbm_cap or section.ddr_cap
    return found, found.memory_per_rank if said else None


def _model(job: Job, degrees: Degrees, treatment: Treatment) -> RecordedModel:
    kind = LlamaModel if job.model.kind == "llama" else PythonModel
    return kind(job, degrees, treatment)


def _ordered(
    found: list[RankMemory], classes: list[_Class]
) -> tuple[list[RankMemory], list[_Class]]:
    """The class with the highest peak first, the others in their order."""
    worst = max(range(len(found)), key=lambda k: found[k].peak_bytes)
    order = [worst, *(k for k in range(len(found)) if k != worst)]
    return [found[k] for k in order], [classes[k] for k in order]


def _refuse_compiled_experts(job: Job) -> None:
    """A compiled block does not show what the experts in it keep."""
    shape = job.model.shape
    if memory_of(job).compile and isinstance(shape, LlamaShape) and shape.moe_layers:
        raise UnsupportedError(
            expected(
                "memory.compile",
                "false for a model with experts",
                "true",
                "Estimate it as it runs eagerly, which takes more.",
            )
        )


def _sharing(job: Job, degrees: Degrees) -> Iterator[str]:
    """What is assumed of parameters that ranks do not share evenly, or not at all."""
    section, shape = memory_of(job), job.model.shape
    if section.runtime == "ddp" or section.zero == 1:
        yield (
            f"whole parameters, their gradients and states are kept in {section.param_dtype}, "
            "without copies in fp32"
        )
    experts = shape.experts if isinstance(shape, LlamaShape) and shape.moe_layers else 0
    if section.runtime == "fsdp2" and degrees.expert == 1 and 0 < experts < degrees.shards:
        yield (
            f"FSDP2 gives {experts} experts to {experts} of {degrees.shards} ranks, which are "
            "told; the others hold less (parallel.expert shares them)"
        )


def _degrees(degrees: Degrees) -> dict[str, int]:
    names = ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert")
    return {name: getattr(degrees, name) for name in names}


def _settings(section: MemorySection, device: str, job: Job) -> dict[str, str]:
    """What a step is run with; of the rest what is not by default."""
    rest = ("zero", "compile", "float8", "offload", "loss", "implementation", "allocator")
    usual = MemorySection()
    changed = {
        name: str(getattr(section, name))
        for name in rest
        if getattr(section, name) != getattr(usual, name)
    }
    return {
        "runtime": section.runtime,
        "checkpointing": section.checkpointing,
        "lowering": device,
        "param_dtype": section.param_dtype,
        "reduce_dtype": section.reduce_dtype,
        "optimizer": job.train.optimizer,
        "batch": str(job.batch.size),
        "sequence": str(job.batch.sequence),
        **changed,
    }
