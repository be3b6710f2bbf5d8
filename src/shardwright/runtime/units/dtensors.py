"""Sharded parameters as DTensors, also where torch has no placement for how they are cut.

torch knows chunks of equal rows. A tensor that is whole on one rank, or cut in blocks, is shown as
``Shard(dim)`` with local tensors of unusual sizes: pointwise operations, norms and optimizers work
on local tensors and are right. What would compute offsets from the placement instead, gathering and
``torch.distributed.checkpoint``, is answered by the tensor itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.layout import Piece
from shardwright.core.placement import BlockShard, Owned, Placement, Shard


def torch_placements(placement: Placement, mesh: DeviceMesh) -> tuple[TorchPlacement, ...]:
    """The placements of a parameter on ``mesh``; the first dimension of two holds replicas."""
    match placement:
        case Shard(dim) | BlockShard(_, dim):
            cut: TorchPlacement = TorchShard(dim)
        case Owned():
            cut = TorchShard(0)
        case _:
            cut = TorchReplicate()
    return (*(TorchReplicate() for _ in range(mesh.ndim - 1)), cut)


def is_irregular(placement: Placement) -> bool:
    """Whether torch would compute other offsets than ours."""
    return isinstance(placement, Owned | BlockShard)


def as_dtensor(
    local: torch.Tensor,
    placement: Placement,
    piece: Piece,
    mesh: DeviceMesh,
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> DTensor:
    """The tensor whose ``piece`` is ``local``; ``whole`` gathers one like it (collective)."""
    made = _cut(local, piece, mesh, torch_placements(placement, mesh))
    if is_irregular(placement):
        explain_irregular(made, piece, whole)
    return made


def _cut(
    local: torch.Tensor, piece: Piece, mesh: DeviceMesh, placements: Sequence[TorchPlacement]
) -> DTensor:
    shape = torch.Size(piece.tensor.shape)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def explain_irregular(
    tensor: DTensor, piece: Piece, whole: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let ``tensor`` itself say what torch cannot know from its placement."""
    inner: Any = tensor._local_tensor
    tensor.full_tensor = functools.partial(_whole_of, whole, inner)  # type: ignore[method-assign]
    tensor.redistribute = functools.partial(  # type: ignore[method-assign]
        _redistributed, whole, inner, piece.tensor.fqn, tensor.device_mesh
    )
    tensor.detach = functools.partial(  # type: ignore[method-assign]
        _detached, whole, inner, piece, tensor.device_mesh, tensor.placements
    )
    inner.__create_write_items__ = functools.partial(_write_items, piece)
    inner.__create_chunk_list__ = functools.partial(_chunks, piece)
    inner.__get_tensor_shard__ = functools.partial(_shard, weakref.ref(inner))


def is_explained(tensor: DTensor) -> bool:
    """Whether ``explain_irregular`` was called for it."""
    return "full_tensor" in vars(tensor)


def _whole_of(
    whole: Callable[[torch.Tensor], torch.Tensor], local: torch.Tensor, **_: Any
) -> torch.Tensor:
    return whole(local)


def _redistributed(
    whole: Callable[[torch.Tensor], torch.Tensor],
    local: torch.Tensor,
    fqn: str,
    mesh: DeviceMesh,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[TorchPlacement] = (),
    **_: Any,
) -> DTensor:
    """What torch calls to gather a tensor; it cannot be cut otherwise."""
    if not all(isinstance(placement, TorchReplicate) for placement in placements):
        raise UnsupportedError(
            expected(fqn, "placements that replicate it", repr(tuple(placements)))
        )
    every = [TorchReplicate() for _ in range(mesh.ndim)]
    return DTensor.from_local(whole(local), mesh, every, run_check=False)


def _detached(
    whole: Callable[[torch.Tensor], torch.Tensor],
    local: torch.Tensor,
    piece: Piece,
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
) -> DTensor:
    made = _cut(local.detach(), piece, mesh, placements)
    explain_irregular(made, piece, whole)
    return made


def _shard(local: weakref.ref[torch.Tensor], index: Any) -> torch.Tensor:
    found = local()
    assert found is not None
    return found


def _chunks(piece: Piece) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not piece.numel and piece.tensor.numel:  # an empty tensor is named by every rank
        return []
    return [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))]


def _write_items(piece: Piece, fqn: str, tensor: DTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(tensor._local_tensor),
                size=tensor.size(),
            ),
        )
        for chunk in _chunks(piece)
    ]
