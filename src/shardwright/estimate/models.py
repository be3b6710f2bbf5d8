"""The models that are recorded: a llama stage by stage, and a module of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.llama import LlamaShape
from shardwright.core.recording import RecordedUnit, Recording
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.estimate.llama import Request, stage_recording
from shardwright.estimate.stages import Stage, stages
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.job.memory import WHOLE
from shardwright.job.parallel import Degrees, ParallelSection, local_shape
from shardwright.trace.treatment import Treatment

if TYPE_CHECKING:
    from shardwright.estimate.own_stages import Blocks
    from shardwright.estimate.python_model import Recorded

STORED = "fp32"  # what runtimes that shard keep a llama's parameters in


@dataclass(frozen=True, slots=True)
class RecordedStage:
    """A stage's recording, and bytes: what a microbatch brings from the stage before, and what its
    step names until the backward is over (``Chunk.named``)."""

    recording: Recording
    received: int = 0
    named: int = 0


class RecordedModel(Protocol):
    """A model that can be recorded in stages of its layers."""

    parameters: int
    layers: int

    def recorded(self, parallel: ParallelSection, stage: Stage) -> RecordedStage:
        """The recording of a stage under degrees that ``parallel`` refines for some ranks."""
        ...


def recorded_model(job: Job, degrees: Degrees, treatment: Treatment) -> RecordedModel:
    """The model of a job, to be recorded under degrees."""
    kind = PythonModel if job.model.traits.is_function else LlamaModel
    return kind(job, degrees, treatment)


def recorded_whole(
    job: Job, treatment: Treatment, routed: tuple[str, ...] | None = ()
) -> Recording:
    """The whole model of a job as each of its ranks runs it, divided among data ranks alone; of a
    module of the user's own, embeddings that are ``routed`` are tables, or with None all that can
    be."""
    section = msgspec.structs.replace(parallel_of(job), data_replicate=1, data_shard=-1)
    if job.model.traits.is_function:
        from shardwright.estimate.python_model import python_recording  # seconds of imports

        return python_recording(
            job, treatment, job.batch.size, planned=True, routed=routed
        ).recording
    alone = msgspec.structs.replace(job, parallel=section)
    model = LlamaModel(job, degrees_of(alone, 1), treatment)
    return model.recorded(section, Stage((0, model.layers), True, True)).recording


class LlamaModel:
    """A llama: any stretch of its layers, with what one rank has of them."""

    def __init__(self, job: Job, degrees: Degrees, treatment: Treatment) -> None:
        assert isinstance(job.model.shape, LlamaShape)
        self.job, self.degrees, self.treatment = job, degrees, treatment
        self.shape = job.model.shape
        self.parameters = self.shape.parameter_count
        self.layers = self.shape.layers

    def recorded(self, parallel: ParallelSection, stage: Stage) -> RecordedStage:
        """The stage with parameters as they are stored, and the tokens of the whole batch."""
        request = self._request(parallel, stage)
        found = stage_recording(request, stage)
        units = tuple(_stored(unit) for unit in found.units)
        batch = self.job.batch
        tokens = batch.size * request.sequence * INDEX_BYTES * (stage.first + stage.last)
        stream = request.sequence // request.local.stream_degree * self.shape.dim
        received = request.batch * stream * element_bytes(request.dtype)
        return RecordedStage(
            msgspec.structs.replace(found, units=units, inputs=tokens),
            0 if stage.first else received,
            self._named(request),
        )

    def _named(self, request: Request) -> int:
        """Bytes of logits in fp32; a later stage of a pipeline keeps its results anyway."""
        local = request.local
        if not (local.fp32_logits and local.last and local.first):
            return 0
        words = local.vocab(self.shape) if local.loss == "parallel" else self.shape.vocab
        return request.batch * request.sequence * words * element_bytes("fp32")

    def _request(self, parallel: ParallelSection, stage: Stage) -> Request:
        section, batch = memory_of(self.job), self.job.batch
        assert section.param_dtype, "a llama's is known"
        local = local_shape(
            parallel,
            self.degrees,
            self.shape,
            layers=stage.layers,
            first=stage.first,
            last=stage.last,
            loss=section.loss,
            fp32_logits=bool(section.fp32_logits),
        )
        return Request(
            shape=self.shape,
            local=local,
            batch=batch.size // self.degrees.microbatches,
            sequence=batch.sequence // self.degrees.context,
            dtype=section.param_dtype,
            treatment=self.treatment,
            casts=section.runtime not in WHOLE,
        )


class PythonModel:
    """A module that a function returns; tensor ranks have parts of its layers, expert ranks some of
    its experts, a pipeline's stages some of its blocks."""

    def __init__(self, job: Job, degrees: Degrees, treatment: Treatment) -> None:
        self.job, self.treatment, self.several = job, treatment, degrees.microbatches
        self.batch = job.batch.size // self.several
        self.blocks: Blocks | None = None
        if degrees.pipeline > 1:
            from shardwright.estimate.python_model import python_blocks

            self.blocks = python_blocks(job, treatment, self.batch)
        self.layers = len(self.blocks.names) if self.blocks else 1
        ends = stages(self.layers, degrees.pipeline * degrees.chunks)
        self.parameters = self._of(ends[0], parallel_of(job)).parameters

    def recorded(self, parallel: ParallelSection, stage: Stage) -> RecordedStage:
        """The module, or a stage of its blocks; of those that are alike one stands for others."""
        begin, end = stage.layers
        by = 0
        if self.blocks and self.blocks.alike and not stage.first and not stage.last:
            by = begin - 1  # the blocks of the second stage on, wherever they lie
            stage = Stage((1, end - by), False, False)
        found, _, received = self._of(stage, parallel)
        if self.blocks:
            from shardwright.estimate.own_stages import moved

            found = moved(found, self.blocks, by)
        found = msgspec.structs.replace(found, inputs=found.inputs * self.several)
        return RecordedStage(found, received)

    def _of(self, stage: Stage, parallel: ParallelSection) -> Recorded:
        from shardwright.estimate.python_model import python_recording

        one = stage if self.blocks else None
        return python_recording(self.job, self.treatment, self.batch, stage=one, parallel=parallel)


def _stored(unit: RecordedUnit) -> RecordedUnit:
    tensors = tuple(TensorSpec(t.fqn, t.shape, STORED) for t in unit.tensors)
    return msgspec.structs.replace(unit, tensors=tensors)
