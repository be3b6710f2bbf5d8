"""Recordings of a llama's stages: the part of a rank, with few of its layers, run once."""

# Layers of a llama are known to be alike, so unlike a user's module it is not searched for parts
# that repeat: a stretch of layers with the same experts and the same place in a checkpointing
# policy is recorded as its first, one between and its last, and unfolded. A recording is kept by
# everything it depends on but how often layers repeat: depth costs nothing, and all stages in the
# middle of a pipeline share one. A rank's share of each layer is ``LocalShape``'s; data ranks cut
# by bytes, which the machine does later.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import msgspec
import torch
from msgspec import UNSET
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.errors import InputError, expected
from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.megatron import MegatronSettings
from shardwright.core.recording import RecordedUnit, Recording, Unfolded
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.estimate.stages import HEAD, ModelStage, RecordedStage, StageResults
from shardwright.job.job import Job, memory_of
from shardwright.job.memory import WHOLE
from shardwright.job.parallel import Degrees, ParallelSection, local_shape
from shardwright.models.llama import Llama, LlamaBlock
from shardwright.trace.checkpointing import policy
from shardwright.trace.module import TracedModule, record
from shardwright.trace.structure import series_of, stretches
from shardwright.trace.treatment import Treatment
from shardwright.tracker.tensors import DTYPES

STORED = "fp32"  # what runtimes that shard keep a llama's parameters in, but for frozen ones


class StageRequest(msgspec.Struct, frozen=True):
    """All that a recording of a stage depends on, but how often its layers repeat."""

    shape: LlamaShape
    local: LocalShape
    batch: int
    sequence: int  # of this rank
    dtype: str
    treatment: Treatment
    casts: bool = True  # units cast their inputs, as mixed precision of FSDP does


def stage_recording(request: StageRequest, stage: ModelStage) -> Recording:
    """The recording of a stage of the llama, unfolded to its layers by its series."""
    shape, chosen = request.shape, policy(request.treatment.checkpointing)
    layers = range(*stage.layers)
    # All that may differ between two layers of a llama: whether it has experts, and whether the
    # policy picks it.
    signatures = [(shape.is_moe(layer), chosen.turn(place)) for place, layer in enumerate(layers)]
    cut = stretches(signatures)
    few = [place for stretch in cut for place in stretch.recorded]
    further = range(len(few), len(few) + shape.further * stage.last)  # blocks behind the last
    small = msgspec.structs.replace(
        shape,
        layers=len(few),
        moe_layers=(
            *(k for k, place in enumerate(few) if signatures[place][0]),
            *(k for k in further if shape.is_moe(shape.layers)),
        ),
        mtp_layers=len(further) or UNSET,
    )
    treated = [k for k, place in enumerate(few) if signatures[place][1] == 0]
    treated += further if not chosen.first else ()  # which are behind the first ones
    local = msgspec.structs.replace(request.local, first=stage.first, last=stage.last, layers=None)
    if not small.moe_layers:  # a stage of a model that has experts elsewhere
        local = msgspec.structs.replace(local, expert=1, expert_load=1.0, capacity_factor=None)
    # Asked for with the few layers alone, so that the cache knows nothing of the depth: a llama of
    # 32 and one of 80 layers share a recording.
    request = msgspec.structs.replace(request, shape=small, local=local)
    found = _recorded(request, tuple(treated))
    series, begin = [], 0
    for index, stretch in enumerate(cut):
        size = len(stretch.recorded)
        names = [f"layers.{layers[stretch.start + k]}" for k in range(stretch.length)]
        recorded = [f"layers.{k}" for k in range(begin, begin + size)]
        series.append(series_of(stretch, names, recorded, f"layers{index or ''}"))
        begin += size
    of_series = {block: each.name for each in series for block in each.recorded}
    units = tuple(
        msgspec.structs.replace(unit, series=of_series.get(unit.name, "")) for unit in found.units
    )
    notes = (
        (*found.notes, f"not read of hf_config: {', '.join(shape.unread)}")
        if shape.unread
        else found.notes
    )
    return msgspec.structs.replace(found, series=tuple(series), units=units, notes=notes)


def forget_recordings() -> None:
    """Record every stage anew from now on."""
    _recorded.cache_clear()


@lru_cache(maxsize=256)
def _recorded(request: StageRequest, treated: tuple[int, ...]) -> Recording:
    dtype = DTYPES[request.dtype]
    local, batch, tokens = request.local, request.batch, request.sequence
    # Megatron-LM lets go of a stage's result as soon as its loss is there; who gathers logits is
    # another, and keeps them as torch does.
    lets_go = local.megatron is not None and local.own_words
    kept = StageResults(pipelined=not (local.first or lets_go))
    with _without_data(request.treatment):
        model = Llama(request.shape, local, sequence=tokens, dtype=dtype)
        if local.first:
            x = torch.empty(batch, tokens, dtype=torch.int64)
        else:
            here = tokens // local.stream_degree
            x = torch.empty(batch, here, request.shape.dim, dtype=dtype, requires_grad=True)
            x.register_post_accumulate_grad_hook(kept.sent)
        targets = torch.empty(batch, tokens, dtype=torch.int64)
        units = _units(model)
        blocks = list(_blocks(model).values())
        loss: Callable[..., torch.Tensor] = model.loss
        # A chunked loss computes its gradients itself, in its forward: nothing of it is compiled.
        if request.treatment.compiled_loss and local.loss != "chunked":
            from shardwright.trace.compiled import compiled_loss  # seconds of imports

            loss = compiled_loss
        with request.treatment.applied(model, blocks, treated) as treatment:
            subject = TracedModule(
                module=model,
                inputs=(x, targets) if local.last and request.shape.further else (x,),
                extra=(targets,) if local.last else (),
                units=units,
                loss=(lambda found: kept.alone(loss(kept.until_sent(found), targets)))
                if local.last
                else None,
                cast=dtype if request.casts else None,
                around=treatment.around,
                checkpointed=treatment.checkpointed,
            )
            found = record(subject)
    return msgspec.structs.replace(found, notes=tuple(treatment.notes))


def _without_data(treatment: Treatment) -> AbstractContextManager[Any]:
    """Tensors that have no data: of torch's meta device, which needs a third of the time of fake
    ones, but where what is treated looks at the device that a tensor would be on."""
    is_plain = treatment.device == "cuda" and not (treatment.compile or treatment.float8)
    return torch.device("meta") if is_plain else FakeTensorMode()


def _units(model: Llama) -> dict[str, Sequence[nn.Module]]:
    """Units as TorchTitan makes them: embedding, blocks, norm and head together; experts that other
    ranks do not have on their own. A tied head shares the root's unit with its embedding."""
    found: dict[str, Sequence[nn.Module]] = {}
    local = model.local
    root = model.shape.tied_embeddings and local.first and local.last
    if model.embeds and not root:
        found["tok_embeddings"] = [model.tok_embeddings]
    for name, block in _blocks(model).items():
        if (local.expert > 1 or local.expert_tensor) and block.is_moe:
            found[f"{name}.moe.experts"] = [block.moe.experts]
        found[name] = [block]
    if root:
        found[""] = [model]
    elif local.last:
        found[HEAD] = [model.norm, model.output]
    return found


def _blocks(model: Llama) -> dict[str, LlamaBlock]:
    """The blocks of a stage and those behind the last, by name."""
    found = {f"layers.{name}": block for name, block in model.layers.items()}
    return found | {f"mtp.{k}": block for k, block in enumerate(getattr(model, "mtp", ()))}


class LlamaModel:
    """A llama: any stretch of its layers, with what one rank has of them."""

    def __init__(self, job: Job, degrees: Degrees, treatment: Treatment) -> None:
        assert isinstance(job.model.shape, LlamaShape)
        self.job, self.degrees, self.treatment = job, degrees, treatment
        self.shape = job.model.shape
        if self.shape.sinks and memory_of(job).attention == "eager":
            wanted = "'flash' for a model with sinks of attention"
            raise InputError(expected("memory.attention", wanted, "'eager'"))
        self.parameters = self.shape.parameter_count
        self.frozen = self.parameters - self.shape.trained_count
        self.layers = self.shape.layers

    def recorded(self, parallel: ParallelSection, stage: ModelStage) -> RecordedStage:
        """The stage with parameters as they are stored, and the tokens of the whole batch."""
        request = self._request(parallel, stage)
        found = stage_recording(request, stage)
        units = tuple(_stored(unit) for unit in found.units)
        batch = self.job.batch
        tokens = batch.size * request.sequence * INDEX_BYTES * (stage.first + stage.last)
        stream = request.sequence // request.local.stream_degree * self.shape.dim
        received = request.batch * stream * element_bytes(request.dtype)
        settings = request.local.megatron
        if (
            settings
            and settings.create_attention_mask_in_dataloader
            and (stage.first or stage.last)
        ):
            tokens += request.batch * request.sequence * batch.sequence
        lasting = found.buffers + _shared(request) + _copies(found, settings)
        return RecordedStage(
            msgspec.structs.replace(found, units=units, inputs=tokens, buffers=lasting),
            self.parameters,
            0 if stage.first else received,
            self._named(request),
        )

    def _named(self, request: StageRequest) -> int:
        """Bytes of logits in fp32; a later stage of a pipeline keeps its results anyway."""
        local = request.local
        if not (local.fp32_logits and local.last and local.first):
            return 0
        words = local.vocab(self.shape) if local.own_words else self.shape.vocab
        return request.batch * request.sequence * words * element_bytes("fp32")

    def _request(self, parallel: ParallelSection, stage: ModelStage) -> StageRequest:
        section, batch = memory_of(self.job), self.job.batch
        assert section.param_dtype, "a llama's is known"
        own = LocalShape(
            layers=stage.layers,
            first=stage.first,
            last=stage.last,
            loss=section.loss,
            fp32_logits=bool(section.fp32_logits),
            megatron=section.megatron_settings,
        )
        local = local_shape(parallel, self.degrees, self.shape, own)
        return StageRequest(
            shape=self.shape,
            local=local,
            batch=batch.size // self.degrees.microbatches,
            sequence=batch.sequence // self.degrees.context,
            dtype=section.param_dtype,
            treatment=self.treatment,
            casts=section.runtime not in WHOLE,
        )


def _shared(request: StageRequest) -> int:
    """Bytes of the buffer that Megatron-LM's products and its own attention share: of scores, or
    of the tokens of all ranks (``core/utils.py``, ``GlobalMemoryBuffer``)."""
    local, tokens = request.local, request.batch * request.sequence
    if local.megatron is None:
        return 0
    gathered = tokens * request.shape.dim if local.stream_degree > 1 else 0
    scores = tokens * request.sequence * local.context * local.heads(request.shape)
    own = local.megatron.attention_backend == "local"
    return max(gathered, scores if own else 0) * element_bytes(request.dtype)


def _copies(found: Recording, megatron: MegatronSettings | None) -> int:
    """Bytes of copies in 8 bits, by rows and by columns, of the matrices of blocks."""
    if megatron is None or megatron.fp8_format == "none" or megatron.fp8_param_gather:
        return 0
    units = Unfolded(found).units.values()
    matrices = (
        t for unit in units if unit.name.startswith(("layers.", "mtp.")) for t in unit.tensors
    )
    return sum(2 * t.numel for t in matrices if len(t.shape) > 1 and "router" not in t.fqn)


def _stored(unit: RecordedUnit) -> RecordedUnit:
    tensors = tuple(
        t if t.fqn in unit.frozen else TensorSpec(t.fqn, t.shape, STORED) for t in unit.tensors
    )
    return msgspec.structs.replace(unit, tensors=tensors)
