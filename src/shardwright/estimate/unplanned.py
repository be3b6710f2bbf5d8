"""The memory of a job without a plan: every class of ranks recorded once, unfolded and run, inside
the machine of the runtime that the job names.
"""

# Ranks are sorted into classes that do the same: a stage of the pipeline, a load of the experts.
# One of each is run on the symbolic heap, so a cluster of thousands costs as much as one of two.
# Of a pipeline only as many microbatches are run as change the peak (``representative``), while
# what stays for all of them, their inputs and results, is counted by their real number.
# ``sharding`` and ``machine_of`` are the one place where keys of [memory] become a runtime: a
# rehearsal reads them as well, so that what is measured is cut as what was estimated.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.footprint import Footprint, StepTime
from shardwright.core.llama import LLAMA_EXPERTS, LlamaShape
from shardwright.core.optimizers import Optimizer, optimizer_named
from shardwright.core.tensor import TensorSpec
from shardwright.cost import constants
from shardwright.cost.clock import has_clock
from shardwright.estimate.footprint import assumptions_on_gpu, settings_of
from shardwright.estimate.llama import LlamaModel
from shardwright.estimate.stages import (
    KEPT,
    PipelineRank,
    most_alive,
    pipeline_ranks,
)
from shardwright.estimate.step_time import RankClock, step_time
from shardwright.heap.allocator import AllocatorSettings
from shardwright.heap.classes import MODELLED, RankClass, Setting, outside, rank_memories
from shardwright.heap.flat import FlatUnits
from shardwright.heap.fsdp2 import FSDP2
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Machine, Megatron, Reduces, Replicated, Sharding, Shares
from shardwright.heap.rank_step import Chunk, MakeMachine, RankStep
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.job.memory import WHOLE, MemorySection, Runtime, check_memory, float8_scaling
from shardwright.job.model import as_function
from shardwright.job.model_of_job import beyond_positions, unplanned
from shardwright.job.parallel import ENDS_WEIGH, Degrees, ParallelSection, Quantile, experts_of
from shardwright.job.pipelining import named
from shardwright.job.rules import refuse_unread
from shardwright.planner.profiles import cluster_of
from shardwright.trace.treatment import Treatment
from shardwright.tracker.private import fsdp2_holds_all_reduced

if TYPE_CHECKING:
    from shardwright.estimate.recorded import OwnModel

# Uneven routing is shown by the rank in the middle and by one of a hundred.
LOADS: tuple[tuple[Quantile, str, float], ...] = (
    ("p99", "99th percentile of experts", 0.01),
    ("p50", "median of experts", 0.99),
)


def estimated(
    job: Job, *, details: bool = False, rank: str = "", spare: int | None = None
) -> Footprint:
    """The memory of every class of ranks of a llama or a user's module, as ``[parallel]`` and
    ``[memory]`` divide and run it; arguments are those of :func:`footprint`. Where all that is
    asked is whether so many bytes are ``spare``, what allocators hold is not followed beyond that,
    and seconds are left out.
    """
    return _Estimate(job).result(details, rank, spare)


def chunks_of(job: Job) -> tuple[list[Sequence[Chunk]], Sharding, Degrees]:
    """What the ranks of a job's pipeline compute, how data ranks share parameters, and how ranks
    are divided: what a step's seconds follow from, without its memory."""
    made = _Estimate(job)
    return made.usual(), made.sharding, made.degrees


def timed(job: Job) -> StepTime | UnsetType:
    """A step's seconds as :func:`estimated` has them, without its memory, which takes longer."""
    made = _Estimate(job)
    return made.time(made.usual())


class _Estimate:
    """A job with everything worked out that all of its ranks share."""

    def __init__(self, job: Job) -> None:
        self.job, self.section = job, memory_of(job)
        refuse_unread(job, "job", "memory")
        check_memory(self.section, "job")
        _refuse_compiled_experts(job)
        self.cluster, _ = cluster_of(job)
        self.capacity = (
            self.cluster.memory_per_rank if constants.says_capacity(job.cluster) else None
        )
        self.world = job.cluster.world_size or self.cluster.world_size
        self.degrees = degrees_of(job, self.world)
        self.parallel: ParallelSection = parallel_of(job)
        self.device = self.section.lowering or self.cluster.compute_device
        experts = experts_of(self.parallel, job.model.traits)
        block = optimizer_of(job).block
        self.sharding = sharding(self.section, self.degrees, self.device == "cuda", experts, block)
        self.machine = machine_of(self.section, self.sharding)
        self.treatment = treatment_of(self.section, self.device, self.degrees)
        self.model = recorded_model(job, self.degrees, self.treatment)
        self.ranks = pipeline_ranks(self.model.layers, self.degrees, ends_of(self.section))
        self.operators: list[tuple[str, ...]] = []
        self.assumptions = [*beyond_positions(job), *optimizer_of(job).assumptions()]
        self.assumptions += _sharing(job, self.degrees)

    def result(self, details: bool, rank: str, spare: int | None) -> Footprint:
        # On the CPU the kernels of the trace are those of a run, so all bytes are met exactly; a
        # GPU's, a compiler's and fp8's are known by rules.
        exact = self.device == "cpu" and not self.section.compile and not self.section.float8
        extras = outside(
            self.degrees,
            self.device == "cuda",
            more=self.section.fsdp2_settings.separate_reduce_scatter_group,
        )
        enough = None
        if spare is not None and self.capacity is not None:
            enough = self.capacity - spare - sum(extra.high for extra in extras)
        setting = Setting(
            self.machine,
            self.sharding,
            self.device == "cuda",
            AllocatorSettings.parse(self.section.allocator),
            self.capacity,
            modelled=() if exact else MODELLED,
            enough=enough,
        )
        classes = list(self._classes())
        found = rank_memories(classes, setting, details=details, named=rank)
        if self.device == "cuda":
            self.assumptions += assumptions_on_gpu(self.operators)
        # Of a section its name: what all it holds says nothing of why.
        why = unplanned(self.job)
        keys = ", ".join(key if "=" in value else f"{key} = {value}" for key, _, value in why)
        return Footprint(
            model=self.job.model.name,
            parameters=self.model.parameters,
            world_size=self.degrees.world_size,
            parallel=_degrees(self.degrees),
            settings=settings_of(self.job, self.device, _tensors(classes)),
            ranks=found,
            capacity=self.capacity,
            outside=extras,
            assumptions=tuple(dict.fromkeys(self.assumptions)),
            source=f"Estimated without a plan, for none follows {keys}." if keys else "",
            # Where routing is uneven the last class of a stage is the usual one.
            frozen=self.model.frozen or UNSET,
            time=UNSET
            if spare is not None
            else self.time(
                list({c.coordinates.get("pipeline", 0): c.step.chunks for c in classes}.values())
            ),
        )

    def time(self, ranks: Sequence[Sequence[Chunk]]) -> StepTime | UnsetType:
        """A step's seconds on an accelerator whose clock is known, of ranks of a pipeline."""
        # Without a preset constants are those of some accelerator, and it is not known of which.
        named = self.job.cluster.preset and has_clock(self.cluster.constants)
        if self.device != "cuda" or not named:
            return UNSET
        clock = RankClock.of(self.degrees, self.cluster)
        dtype = self.section.param_dtype or "fp32"
        return step_time(
            ranks,
            self.sharding,
            clock,
            optimizer_of(self.job),
            self.job.batch,
            dtype,
        )

    def usual(self) -> list[Sequence[Chunk]]:
        """What every rank of the pipeline computes; where routing is uneven, the usual one."""
        *_, (_, _, section) = self._loads()
        return [self.step(each, section).chunks for each in self.ranks]

    def _classes(self) -> Iterator[RankClass]:
        degrees = self.degrees
        # Ranks of one stage do the same whatever their other coordinates: only the pipeline's place
        # and the load of the experts make classes.
        count = degrees.world_size // degrees.pipeline
        holders = _expert_holders(self.job, degrees)
        holding = "ranks with experts" if holders else ""
        for rank in self.ranks:
            stage = f"stage {rank.rank}" if degrees.pipeline > 1 else ""
            where = {"pipeline": rank.rank} if degrees.pipeline > 1 else {}
            for title, share, section in self._loads():
                name = ", ".join(filter(None, (stage, holding, title))) or "all ranks"
                ranks = count if share is None else max(1, round(count * share))
                ranks = ranks * holders // degrees.shards if holders else ranks
                step = self.step(rank, section)
                yield RankClass(name, ranks, where, step, step.ledger(self.machine))

    def _loads(self) -> Iterator[tuple[str, float | None, ParallelSection]]:
        """Ranks whose experts receive more than others, where routing is uneven."""
        if self.parallel.routing != "skewed" or self.degrees.expert == 1:
            yield "", None, self.parallel
            return
        if self.parallel.expert_load == "p50":
            yield LOADS[-1][1], None, self.parallel
            return
        for quantile, title, share in LOADS:
            section = msgspec.structs.replace(self.parallel, expert_load=quantile)
            yield title, share, section

    def step(self, rank: PipelineRank, parallel: ParallelSection) -> RankStep:
        """What a rank of the pipeline does."""
        stages = [self.model.recorded(parallel, stage) for stage in rank.stages]
        for each in stages:
            self.assumptions.extend(each.recording.notes)
            self.operators.append(each.recording.operators)
        if self.section.runtime == "megatron":  # allocates what it receives, and sends at once
            receives = most_alive(rank.runs, [each.received for each in stages])
        else:
            # Of every microbatch, though few are run: such buffers are there from first to last.
            received = sum(each.received + each.recording.result for each in stages)
            receives = received * rank.microbatches
        return RankStep(
            [Chunk(each.recording, each.received, each.named) for each in stages],
            rank.runs,
            optimizer_of(self.job),
            receives,
        )


def treatment_of(section: MemorySection, device: str, degrees: Degrees) -> Treatment:
    """How a step is recorded for the device that it is of."""
    return Treatment(
        device,
        section.policy,
        bool(section.compile),
        section.compile is True,
        float8_scaling(section) or "",
        *_kernels(section, device, degrees),
    )


def ends_of(section: MemorySection) -> tuple[int, int]:
    """What embedding and head weigh, in layers, where layers are dealt out to stages."""
    settings = section.megatron_settings
    return settings.ends if settings else ENDS_WEIGH


def _kernels(section: MemorySection, device: str, degrees: Degrees) -> tuple[str, str]:
    """Those of attention and norms that a job names; InputError where there are none to choose."""
    settings = section.megatron_settings
    usual = "composite" if settings and not settings.rms_norm_fusion else "fused"
    attention, norm = section.attention or "flash", section.rms_norm or usual
    if device == "cpu" and (attention, norm) != ("flash", "fused"):
        key = "attention" if attention != "flash" else "rms_norm"
        wanted = "nothing beside lowering = 'cpu', whose kernels are those of this torch"
        raise InputError(expected(f"memory.{key}", wanted, repr(getattr(section, key))))
    if degrees.context > 1 and attention != "flash":
        wanted = "'flash' where parallel.context divides a sequence"
        raise InputError(expected("memory.attention", wanted, repr(attention)))
    return attention, norm


def _refuse_compiled_experts(job: Job) -> None:
    """A compiled block does not show what the experts in it keep."""
    shape = job.model.shape
    has_experts = isinstance(shape, LlamaShape) and bool(shape.moe_layers)
    if memory_of(job).compile and (has_experts or parallel_of(job).expert > 1):
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
    section = memory_of(job)
    if section.runtime == "ddp":
        yield (
            f"whole parameters, their gradients and states are kept in "
            f"{section.param_dtype or 'the dtypes they were made in'}, without copies in fp32"
        )
    if section.runtime == "megatron" and job.model.traits.is_function:
        yield "what a forward keeps is the module's own, not that of Megatron-LM's layers"
    if section.zero in (1, 2) and degrees.shards == 1:
        yield (
            f"memory.zero = {section.zero} shares nothing: parallel.data_shard is 1, and copies "
            "(data_replicate) share nothing"
        )
    if section.runtime == "fsdp2" and degrees.data_replicate > 1:
        told = section.fsdp2_settings.holds_all_reduced is not UNSET
        stay = "until the backward ends" if holds_all_reduced(section, degrees) else "one unit long"
        whose = (
            "memory.fsdp2.holds_all_reduced" if told else f"torch {torch.__version__}, found here"
        )
        yield f"sums over replicas that are not gradients themselves stay {stay} ({whose})"
    if degrees.pipeline > 1:
        yield "the last stage keeps no results (return_outputs=False)"
        if named(degrees.schedule).split:
            yield (
                f"{degrees.schedule} splits backwards in halves: gradients that wait in between, "
                "and what is computed again for both, are not counted"
            )
    holders = _expert_holders(job, degrees)
    if holders:
        yield (
            f"FSDP2 gives {holders} experts to {holders} of {degrees.shards} ranks, which are "
            "shown; the others hold less (parallel.expert shares them)"
        )


def _expert_holders(job: Job, degrees: Degrees) -> int:
    """How many of the ranks that share parameters have experts, where these are cut one by one and
    not all ranks get one; else 0."""
    shape = job.model.shape
    if not isinstance(shape, LlamaShape) or not shape.moe_layers:
        return 0
    section = memory_of(job)
    # FSDP2 cuts the first dimension of each parameter, which is that of the experts: with fewer
    # experts than ranks some ranks get whole ones and others nothing. Our runtime cuts flat
    # buffers, of which every rank has a share.
    cut = section.runtime == "fsdp2" and degrees.expert == 1
    return shape.experts if cut and shape.experts < degrees.shards else 0


def _degrees(degrees: Degrees) -> dict[str, int]:
    names = ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert")
    return {name: getattr(degrees, name) for name in names}


def recorded_model(job: Job, degrees: Degrees, treatment: Treatment) -> LlamaModel | OwnModel:
    """The model of a job, to be recorded under degrees."""
    if not job.model.traits.is_function:
        return LlamaModel(job, degrees, treatment)
    from shardwright.estimate.recorded import OwnModel  # seconds of imports

    return OwnModel(job, degrees, treatment)


def with_traced_dense(job: Job) -> Job:
    """The job with the traced peak of its dense part in ``planner.reservation.nbytes``.

    Only of tables alone whose reservation is ``traced`` and whose ``model.python`` names the
    function that makes the dense part; other jobs come back as they are. On an accelerator it is
    what the allocator reserves, for that is not there for tables.
    """
    section = job.planner.reservation
    wanted = not job.model.traits.has_step and section.kind == "traced" and not section.nbytes
    if not wanted or job.model.python is UNSET:
        return job
    model = as_function(job.model)
    worst = estimated(msgspec.structs.replace(job, tables=(), model=model)).worst
    nbytes = max(worst.peak_bytes, worst.reserved_bytes)
    planner = msgspec.structs.replace(
        job.planner, reservation=msgspec.structs.replace(section, nbytes=nbytes)
    )
    return msgspec.structs.replace(job, planner=planner)


# ---- the runtime that a job names ----------------------------------------------------------------


def sharding(
    section: MemorySection,
    degrees: Degrees,
    on_gpu: bool,
    experts: tuple[str, ...] = LLAMA_EXPERTS,
    block: int = 1,
) -> Sharding:
    """How a job's parameters lie on its data ranks.

    A pipeline keeps its units whole and reduces once, as TorchTitan does it, unless the job says
    otherwise; FSDP alone reduces every microbatch. FSDP2 keeps the root's own parameters, and by
    default TorchTitan the head's, whose backward comes next; our runtime by default the root's.
    ``experts`` are patterns of the units that the expert degree divides, ``block`` elements are
    those that the optimizer quantizes together.
    """
    wanted = section.reshard_after_forward
    resharded = degrees.pipeline == 1 if wanted == "default" else bool(wanted)
    if section.runtime == "fsdp2":
        kept = frozenset(KEPT if wanted == "default" else ("",))
    else:
        kept = frozenset(("",) if wanted == "default" else ())
    return Sharding(
        shards=degrees.shards,
        expert_shards=degrees.expert_shards,
        replicas=degrees.data_replicate,
        param_dtype=section.param_dtype or "",
        reduce_dtype=section.reduce_dtype or "",
        reshard_after_forward=resharded,
        kept=kept,
        prefetch=1 if on_gpu else 0,
        zero=section.stage,
        reduces=_reduces(section, degrees),
        shares=_shares(section),
        waits=section.runtime == "megatron",  # but with --overlap-grad-reduce
        on_gpu=on_gpu,
        offload=section.on_host,
        twice=section.twice,
        reduce_scatter_inputs=section.fsdp2_settings.reduce_scatter_max_input_buffers,
        holds_all_reduced=holds_all_reduced(section, degrees),
        experts=experts,
        block=block,
    )


def holds_all_reduced(section: MemorySection, degrees: Degrees) -> bool:
    """What the job says of FSDP2's sums over replicas, else what the torch here does: to ask it
    takes a second of imports, so that nobody does where there are no such sums."""
    told = section.fsdp2_settings.holds_all_reduced
    if not isinstance(told, UnsetType):
        return told
    return section.runtime != "fsdp2" or degrees.data_replicate == 1 or fsdp2_holds_all_reduced()


def _shares(section: MemorySection) -> Shares:
    if section.runtime not in WHOLE:
        return "all"
    return "states" if section.zero == 1 else "nothing"


def _reduces(section: MemorySection, degrees: Degrees) -> Reduces:
    """FSDP2 in a pipeline reduces when all is over; ours where it is set to wait, unit by unit, as
    it does where whole gradients are accumulated."""
    if degrees.pipeline == 1 and section.stage != 1:
        return "each"
    return "end" if section.runtime == "fsdp2" else "last"


def machine_of(section: MemorySection, found: Sharding) -> MakeMachine:
    """A function that makes the machine of a runtime for a heap and units."""

    def make(
        heap: Ledger, units: dict[str, tuple[TensorSpec, ...]], frozen: frozenset[str]
    ) -> Machine:
        return MACHINES[section.runtime](heap, units, found, frozen)

    return make


MACHINES: dict[Runtime, Callable[..., Machine]] = {
    "shardwright": FlatUnits,
    "fsdp2": FSDP2,
    "ddp": Replicated,
    "megatron": Megatron,
}


def _tensors(classes: Iterable[RankClass]) -> Iterator[TensorSpec]:
    for each in classes:
        for chunk in each.step.chunks:
            for unit in chunk.step.units.values():
                yield from unit.tensors


def optimizer_of(job: Job) -> Optimizer:
    """The optimizer of a job; on whole parameters in less than fp32 it has no copies. Ours updates
    what is on the host there, as it does elsewhere. Beside other runtimes than ours it may be
    another one."""
    section = memory_of(job)
    other = section.runtime != "shardwright"
    found = optimizer_named(
        job.train.optimizer, section.implementation, offload=other and section.offload != "none"
    )
    return found.beside_others if other else found
