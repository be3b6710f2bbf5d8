"""Parameters that tensor parallelism has cut before: a unit cuts each rank's part again.

The unit sees, sums and gathers plain local tensors among the ranks that have the same part. Modules
compute with torch's DTensor over the gathered one; sharded parameters know where their part lies in
the tensor as the model had it, so that norms, states and checkpoints are those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.core.errors import UnsupportedError
from shardwright.core.placement import Flat, Placement, Replicate, Shard
from shardwright.runtime.comm import Comm
from shardwright.runtime.comm.torch_groups import root_mesh

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Parallel:
    """How a parameter lies on the tensor-parallel ``mesh``: cut along ``dim``, or on every rank
    where that is None. ``shape`` and ``stride`` are those of the whole."""

    mesh: DeviceMesh
    dim: int | None
    shape: Ints
    stride: Ints

    @classmethod
    def of(cls, parameter: torch.Tensor, fqn: str) -> Parallel | None:
        """That of torch's DTensor, as ``parallelize_module`` leaves parameters; of others None."""
        if type(parameter.data) is not DTensor:
            return None
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        placement = placements[0]
        dim = placement.dim if type(placement) is TorchShard else None
        alone = len(placements) == 1 and (dim is not None or isinstance(placement, TorchReplicate))
        even = dim is None or parameter.shape[dim] % mesh.size() == 0
        if not alone or not even:
            wanted = "a DTensor on a mesh of one dimension, replicated or cut evenly"
            found = f"{placements} of shape {tuple(parameter.shape)} on {mesh.size()} ranks"
            raise UnsupportedError(fqn, wanted, found)
        return cls(mesh, dim, tuple(parameter.shape), tuple(parameter.stride()))

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """torch's word for it."""
        return (TorchReplicate() if self.dim is None else TorchShard(self.dim),)

    def shown(self, whole: torch.Tensor) -> DTensor:
        """What modules compute with, over the gathered part; gradients reach it."""
        # A unit is shown as it is gathered, maybe under no_grad. The step from the gathered part to
        # the DTensor has to be in the graph all the same, or no gradient comes back.
        with torch.enable_grad():
            return DTensor.from_local(
                whole,
                self.mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=self.stride,
            )

    def cuts(self, placement: Placement, fqn: str) -> Placement:
        """How a unit cuts the part for ``placement``: a part that is no stretch of the whole is cut
        by rows where the unit is cut evenly."""
        if self.dim is not None and isinstance(placement, Replicate):
            wanted = "a placement that cuts it, for tensor parallelism has cut it already"
            raise UnsupportedError(fqn, wanted, "Replicate()", "Use Shard(0).")
        return Shard(0) if self.dim and isinstance(placement, Flat) else placement


@dataclass(frozen=True)
class ParallelGrid:
    """All ranks that share a parameter: those that cut it and those that had cut it before.
    ``comm`` counts them, the tensor-parallel ranks of one shard first if they are ``inner``."""

    comm: Comm
    shards: int
    inner: bool

    @classmethod
    def of(cls, comm: Comm, mesh: DeviceMesh, fqn: str) -> ParallelGrid:
        """The grid of a unit's ranks and those of a tensor-parallel mesh (collective, once)."""
        own, root = comm.mesh, root_mesh(comm.mesh)
        names = root.mesh_dim_names or ()
        shard, other = (own.mesh_dim_names or ("",))[-1], (mesh.mesh_dim_names or ("",))[0]
        known = shard in names and other in names and shard != other
        if not known or root[other] != mesh:
            wanted = "meshes that are slices of one with named dimensions"
            found = f"'{shard}' of {own.mesh_dim_names} beside '{other}' of {names}"
            remedy = (
                "Make one: init_device_mesh('cpu', (2, 2), mesh_dim_names=('shard', 'tensor'))."
            )
            raise UnsupportedError(f"{fqn} and the unit's mesh", wanted, found, remedy)
        order = tuple(name for name in names if name in (shard, other))
        flat = "_".join(order)
        joined = root[order]._flatten(flat)
        if own.ndim == 2:
            joined = root[(own.mesh_dim_names[0], flat)]  # type: ignore[index]
        return cls(Comm(joined, comm.probe), own.size(own.ndim - 1), order[-1] == other)

    def place(self, rank: int) -> tuple[int, int]:
        """The shard and the tensor-parallel part that a rank of ``comm`` has."""
        if self.inner:
            return divmod(rank, self.comm.size // self.shards)
        part, shard = divmod(rank, self.shards)
        return shard, part


@dataclass(frozen=True)
class Joint:
    """A parameter's ``parallel`` and the ``grid`` it is on."""

    parallel: Parallel
    grid: ParallelGrid

    def region(self, offsets: Ints, sizes: Ints, part: int, local: Ints) -> tuple[Ints, Ints]:
        """A region of the ``part``-th local tensor [local], in the whole."""
        dim = self.parallel.dim
        assert dim is not None
        if len(offsets) != len(local):  # a range of rows, which are a stretch of the whole
            return (offsets[0] + part * torch.Size(local).numel(),), sizes
        moved = list(offsets)
        moved[dim] += part * local[dim]
        return tuple(moved), sizes


def joints(parallels: Mapping[str, Parallel], comm: Comm) -> dict[str, Joint]:
    """The members of a unit that tensor parallelism has cut, by name (collective)."""
    mesh = comm.mesh
    for fqn, parallel in parallels.items():
        before = set(get_process_group_ranks(parallel.mesh.get_group()))
        groups = (get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim))
        # The unit would scatter rows among ranks that have different parts, and sum gradients of
        # different elements.
        if any(len(before.intersection(ranks)) > 1 for ranks in groups):
            wanted = "tensor parallelism on another dimension of the mesh than the unit's"
            found = "a DTensor on ranks that would cut it again"
            raise UnsupportedError(fqn, wanted, found, "Pass the other dimension.")
    cut = {fqn: parallel for fqn, parallel in parallels.items() if parallel.dim is not None}
    if cut and comm.twice:
        wanted = "one stage of ZeRO beside tensor parallelism"
        raise UnsupportedError(min(cut), wanted, "a pair", "Pass zero=3.")
    grids: dict[int, ParallelGrid] = {}
    found = {}
    for fqn, parallel in cut.items():
        if id(parallel.mesh) not in grids:
            grids[id(parallel.mesh)] = ParallelGrid.of(comm, parallel.mesh, fqn)
        found[fqn] = Joint(parallel, grids[id(parallel.mesh)])
    return found
