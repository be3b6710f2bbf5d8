"""Recordings of a llama's stages: the part of a rank, with few of its layers, run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.recording import Recording
from shardwright.estimate.stages import Stage
from shardwright.models.llama import Llama
from shardwright.trace.checkpointing import policy
from shardwright.trace.module import TracedModule, record
from shardwright.trace.structure import series_of, stretches
from shardwright.trace.treatment import Treatment
from shardwright.tracker.tensors import DTYPES

HEAD = "head"  # the unit of what is behind the layers
KEPT = ("", HEAD)  # units that are not freed after their forward


class Request(msgspec.Struct, frozen=True):
    """All that a recording of a stage depends on, but how often its layers repeat."""

    shape: LlamaShape
    local: LocalShape
    batch: int
    sequence: int  # of this rank
    dtype: str
    treatment: Treatment
    root: bool = False  # all that is in no layer shares one unit
    casts: bool = True  # units cast their inputs, as mixed precision of FSDP does


def stage_recording(request: Request, stage: Stage, where: str = "") -> Recording:
    """The recording of a stage of the llama, unfolded to its layers by its series."""
    shape, every = request.shape, policy(request.treatment.checkpointing).every
    layers = range(*stage.layers)
    signatures = [(shape.is_moe(layer), (place + 1) % every) for place, layer in enumerate(layers)]
    cut = stretches(signatures)
    few = [place for stretch in cut for place in stretch.recorded]
    small = msgspec.structs.replace(
        shape,
        layers=len(few),
        moe_layers=tuple(k for k, place in enumerate(few) if signatures[place][0]),
    )
    treated = tuple(k for k, place in enumerate(few) if signatures[place][1] == 0)
    local = msgspec.structs.replace(request.local, first=stage.first, last=stage.last, layers=None)
    found = _recorded(msgspec.structs.replace(request, shape=small, local=local), treated)
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
def _recorded(request: Request, treated: tuple[int, ...]) -> Recording:
    dtype = DTYPES[request.dtype]
    local, batch, tokens = request.local, request.batch, request.sequence
    kept = Kept(pipelined=not local.first)
    with FakeTensorMode():
        model = Llama(request.shape, local, sequence=tokens, dtype=dtype)
        if local.first:
            x = torch.empty(batch, tokens, dtype=torch.int64)
        else:
            here = tokens // local.stream_degree
            x = torch.empty(batch, here, request.shape.dim, dtype=dtype, requires_grad=True)
            x.register_post_accumulate_grad_hook(kept.sent)
        targets = torch.empty(batch, tokens, dtype=torch.int64)
        units = _units(model, request.root)
        blocks = list(model.layers.values())
        loss: Callable[..., torch.Tensor] = model.loss
        if request.treatment.compiled_loss and local.loss != "chunked":
            from shardwright.trace.compiled import compiled_loss  # seconds of imports

            loss = compiled_loss
        with request.treatment.applied(model, blocks, treated) as treatment:
            subject = TracedModule(
                module=model,
                inputs=(x,),
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


class Kept:
    """What a stage behind another one keeps until its backward is over, as torch's pipelining does
    it: the result of the model; the gradient of the stream goes then, for it is sent."""

    def __init__(self, *, pipelined: bool) -> None:
        self.pipelined = pipelined
        self.results: list[torch.Tensor] = []

    def until_sent(self, result: torch.Tensor) -> torch.Tensor:
        """Keep a result, if there is a stage before that waits for a gradient."""
        if self.pipelined:
            self.results.append(result)
        return result

    def alone(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss without the logits that stay as long as it, which a step counts by itself: a
        recording ends before a runtime's backward does."""
        vars(loss).pop("logits", None)
        return loss

    def sent(self, stream: torch.Tensor) -> None:
        """The gradient of the stream is there."""
        self.results.clear()
        stream.grad = None


def _units(model: Llama, root: bool) -> dict[str, Sequence[nn.Module]]:
    """Units as TorchTitan makes them: embedding, blocks, norm and head together; experts that other
    ranks do not have on their own. A tied head shares the root's unit with its embedding."""
    found: dict[str, Sequence[nn.Module]] = {}
    local = model.local
    root = root or (model.shape.tied_embeddings and local.first and local.last)
    if local.first and not root:
        found["tok_embeddings"] = [model.tok_embeddings]
    for name, block in model.layers.items():
        if local.expert > 1 and block.is_moe:
            found[f"layers.{name}.moe.experts"] = [block.moe.experts]
        found[f"layers.{name}"] = [block]
    if root:
        found[""] = [model]
    elif local.last:
        found[HEAD] = [model.norm, model.output]
    return found


__all__ = ["HEAD", "KEPT", "Kept", "Request", "forget_recordings", "stage_recording"]
