"""What a user holds of a sharded unit: one parameter each, made once, that optimizers work on.

Under a flat cut they are 1-D ranges of elements, otherwise DTensors. All share the unit's shard.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.layout import Segment, Slot
from shardwright.core.placement import BlockShard, Shard
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import dtensor_like, set_local
from shardwright.runtime.units.buffers import Buffers, local_view
from shardwright.runtime.units.dtensors import as_dtensor, explain_irregular, is_irregular


class Face:
    """A sharded parameter: its piece on this rank and how it is shown."""

    def __init__(self, segment: Segment, slot: Slot, comm: Comm, *, plain: bool) -> None:
        self.segment = segment
        self.slot = slot
        self.placement = slot.placement
        self.piece = segment.piece(slot, comm.rank)
        self.comm = comm
        self.plain = plain

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """``local`` [piece.sizes] as what the user sees."""
        if self.plain:
            return local
        return as_dtensor(local, self.placement, self.piece, self.comm.mesh, self.whole)

    def wrap_like(self, local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """``local`` as what ``parameter`` is, fast: for gradients."""
        if self.plain:
            return local
        made = dtensor_like(local, parameter)
        if is_irregular(self.placement):
            explain_irregular(made, self.piece, self.whole)
        return made

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor from every rank's ``local`` part (collective)."""
        assert self.segment.cut != "flat", "a range of elements is gathered with its unit"
        if self.segment.cut == "replicated":
            return local.clone()
        pieces = [self.segment.piece(self.slot, rank) for rank in range(self.comm.size)]
        sizes = [piece.numel for piece in pieces]
        label = f"whole {self.piece.tensor.fqn}"
        flat = self.comm.gather_uneven(label, local.reshape(-1), sizes)
        parts = zip(flat.split(sizes), pieces, strict=True)
        dim = self.placement.dim if isinstance(self.placement, Shard | BlockShard) else 0
        return torch.cat([part.view(piece.sizes) for part, piece in parts], dim)


class Faces:
    """The parameters of a unit in SHARDED state, and the sink of its gradients."""

    def __init__(self, buffers: Buffers, comm: Comm, *, plain: bool) -> None:
        self.buffers = buffers
        self.faces: list[list[Face]] = []
        for views in buffers.segments:
            segment = views.segment
            self.faces.append(
                [
                    Face(segment, slot, comm, plain=plain or segment.cut == "flat")
                    for slot in segment.slots
                ]
            )
        self.parameters: list[list[nn.Parameter]] = []

    def make(self) -> list[nn.Parameter]:
        """New parameters over the shard, in layout order."""
        locals_ = iter(self.buffers.locals)
        self.parameters = []
        for views, faces in zip(self.buffers.segments, self.faces, strict=True):
            made = []
            for face in faces:
                tensor = face.wrap(next(locals_))
                parameter = nn.Parameter(tensor, requires_grad=views.segment.trainable)
                if isinstance(parameter, DTensor) and is_irregular(face.placement):
                    explain_irregular(parameter, face.piece, face.whole)
                made.append(parameter)
            self.parameters.append(made)
        return self.all

    def adopt(self, parameters: list[nn.Parameter]) -> None:
        """Go on with ``parameters`` that exist, in layout order, over the present shard."""
        given = iter(parameters)
        locals_ = iter(self.buffers.locals)
        self.parameters = []
        for faces in self.faces:
            kept = []
            for face in faces:
                parameter = next(given)
                set_local(parameter, next(locals_))
                if isinstance(parameter, DTensor) and is_irregular(face.placement):
                    explain_irregular(parameter, face.piece, face.whole)
                kept.append(parameter)
            self.parameters.append(kept)

    @property
    def all(self) -> list[nn.Parameter]:
        """Every parameter, in layout order."""
        return [parameter for segment in self.parameters for parameter in segment]

    def room(self, index: int) -> torch.Tensor | None:
        """Gradients come in memory of their own."""
        return None

    def accept(self, index: int, share: torch.Tensor) -> None:
        """Set or add to ``.grad`` of every parameter of a segment that requires it."""
        views = self.buffers.segments[index]
        slots = views.segment.slots
        rank = self.buffers.comm.rank
        rows = zip(slots, self.faces[index], self.parameters[index], strict=True)
        for slot, face, parameter in rows:
            if not parameter.requires_grad:
                continue
            part = local_view(views.segment, slot, rank, share)
            if parameter.grad is None:
                parameter.grad = face.wrap_like(part, parameter)
            elif isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().add_(part)
            else:
                parameter.grad.add_(part)
