"""How one tensor is divided among ranks: what each holds, and how the parts come together."""

# Everything that has to know where elements are asks a Cut: operators on sharded tensors, norms,
# checkpoints, optimizer states. Two tensors meet element by element without communication only if
# they lie alike on every rank, which ``key`` says and not the placement: torch's words cannot tell
# a range of elements, or blocks, from rows.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.core.arrange import Slot
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.layout import Segment
from shardwright.core.placement import BlockShard, Flat, Placement, Replicate, Shard, describe
from shardwright.runtime.checkpoint.region import Box, BoxAt, blocks_of, parts
from shardwright.runtime.comm import Comm
from shardwright.runtime.comm.torch_groups import root_mesh
from shardwright.runtime.torch_private import tensor_spec

Ints = tuple[int, ...]


# A unit cuts again what tensor parallelism has cut before: it sees, sums and gathers plain local
# tensors among the ranks that have the same part. Modules compute with torch's DTensor over the
# gathered one; sharded parameters know where their part lies in the tensor as the model had it, so
# that norms, states and checkpoints are those of the whole.


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


Region = tuple[Ints, Ints]  # offsets and sizes; one offset on other shapes: a row-major range


class Cut:
    """One tensor's parts on the ranks of a mesh; every element is in one of them.

    ``offsets`` and ``sizes`` are this rank's part: a rectangle, or with one offset on a tensor of
    another rank a range of its row-major elements. ``dim`` is the dimension that rectangles cut,
    None for ranges and for a tensor that is whole on one rank. Two tensors of one ``key`` lie alike
    on every rank, so that what works element by element needs no communication. ``placements`` are
    torch's nearest words: who computes parts from them (``distribute_tensor``) gets rows.
    """

    def __init__(
        self,
        fqn: str,
        shape: Ints,
        dim: int | None,
        region_of: Callable[[int], Region],
        key: Ints | tuple[Any, ...],
        comm: Comm,
    ) -> None:
        self.fqn = fqn
        self.shape = torch.Size(shape)
        self.dim = dim
        self.key = key
        self.comm = comm
        self.is_of_many = False  # whether it is the memory of many parameters
        self.is_joint = False  # whether tensor parallelism had cut it before
        self.offsets, self.sizes = region_of(comm.rank)
        self.region_of = region_of
        self._specs: dict[torch.dtype, Any] = {}

    @classmethod
    def of_slot(cls, segment: Segment, slot: Slot, comm: Comm, joint: Joint | None = None) -> Cut:
        """How a segment's layout cuts one of its tensors, which is a part of the ``joint`` one."""
        placement, tensor = slot.placement, slot.tensor

        def region_of(rank: int) -> Region:
            if joint is None:
                piece = segment.piece(slot, rank)
                return piece.offsets, piece.sizes
            shard, part = joint.grid.place(rank)
            piece = segment.piece(slot, shard)
            return joint.region(piece.offsets, piece.sizes, part, tuple(tensor.shape))

        place = (slot.start, segment.share) if segment.cut == "flat" else (slot.chunk,)
        key = (tensor.shape, describe(placement), *place, *comm.identity)
        dim = placement.dim if isinstance(placement, Shard | BlockShard) else None
        if joint is None:
            return cls(tensor.fqn, tensor.shape, dim, region_of, key, comm)
        every = joint.grid.comm
        key = (*key, joint.parallel.shape, joint.parallel.dim, *every.identity)
        made = cls(tensor.fqn, joint.parallel.shape, dim, region_of, key, every)
        made.is_joint = True
        return made

    @classmethod
    def of_runs(cls, name: str, lengths: Ints, comm: Comm) -> Cut:
        """A 1-D tensor of which every rank r holds ``lengths[r]`` elements, in rank order."""

        def region_of(rank: int) -> Region:
            return (sum(lengths[:rank]),), (lengths[rank],)

        return cls(name, (sum(lengths),), None, region_of, (name, *lengths, *comm.identity), comm)

    def of_blocks(self, block: int) -> Cut:
        """How numbers are cut of which there is one for so many elements; no part divides these."""
        shape = tuple(self.shape)

        def region_of(rank: int) -> Region:
            return blocks_of(shape, *self.region_of(rank), block)[1]

        number, _ = blocks_of(shape, (0,) * len(shape), shape, block)
        return Cut(self.fqn, number, None, region_of, (block, *self.key), self.comm)

    def __deepcopy__(self, memo: Any) -> Cut:
        # It holds the mesh, of which there is one; nothing in it changes with a copy's values.
        return self

    def __reduce__(self) -> Any:
        # Those of all ranks are written out, for a function that is made here cannot be pickled.
        regions = tuple(self.region_of(rank) for rank in range(self.comm.size))
        return (
            restored_cut,
            (
                *(self.fqn, tuple(self.shape), self.dim, regions, self.key, self.mesh),
                self.comm.twice,
            ),
        )

    @property
    def mesh(self) -> DeviceMesh:
        """Where the tensor is sharded; the first dimension of two holds replicas."""
        return self.comm.mesh

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """One placement of torch's for every dimension of the mesh; they have none for what is cut
        again among replicas."""
        replicas = (TorchReplicate() for _ in range(self.mesh.ndim - 1))
        return (*replicas, TorchShard(self.dim or 0))

    @property
    def parts_for_torch(self) -> tuple[TorchPlacement, ...]:
        """``placements`` that answer which part a rank has, or refuse to."""
        *replicas, shard = self.placements
        return (*replicas, PartShard(shard.dim, self))

    def spec(self, dtype: torch.dtype) -> Any:
        """What torch's DTensor wants to know."""
        if dtype not in self._specs:
            self._specs[dtype] = tensor_spec(self.mesh, self.placements, self.shape, dtype)
        return self._specs[dtype]

    def spec_of_view(self, view: torch.Tensor) -> Any:
        """The same of a view of the tensor, of another shape."""
        every = (TorchReplicate(),) * self.mesh.ndim
        return tensor_spec(self.mesh, every, view.shape, view.dtype)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor [shape]; shares memory where that can be."""
        return part_of(whole, self.offsets, self.sizes)

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor [shape] from every rank's ``local`` part [sizes] (collective)."""
        if local.is_meta:
            return local.new_empty(self.shape)
        regions = [self.region_of(rank) for rank in range(self.comm.size)]
        sizes = [size for _, size in regions]
        counts = [math.prod(each) for each in sizes]
        label = f"whole {self.fqn}"
        with self.comm.asked_of_all(label):
            flat = self.comm.gather_uneven(label, local.reshape(-1), counts)
        if not self._is_in_order(regions):
            whole = flat.new_empty(self.shape)
            for region, piece in zip(regions, flat.split(counts), strict=True):
                target = part_of(whole, *region)
                target.copy_(piece.view_as(target))
            return whole
        if self.dim is None:
            return flat.view(self.shape)
        pieces = zip(flat.split(counts), sizes, strict=True)
        return torch.cat([piece.view(each) for piece, each in pieces], self.dim)

    def _is_in_order(self, regions: Sequence[Region]) -> bool:
        """Whether the parts of all ranks follow one another along one dimension."""
        end, axis = 0, self.dim or 0
        for offsets, sizes in regions:
            if not math.prod(sizes):
                continue
            is_range = len(sizes) != len(self.shape)
            if not (is_range or _is_slab(sizes, self.shape, axis)) or (
                sizes and offsets[axis] != end
            ):
                return False
            end += sizes[axis] if sizes else 0
        return True

    def boxes(self) -> Iterator[BoxAt]:
        """This rank's part as rectangles; every rank has all of a tensor without elements."""
        if not self.shape.numel():
            yield BoxAt(Box((0,) * len(self.shape), tuple(self.shape)), 0)
            return
        for part in parts(tuple(self.shape), self.offsets, self.sizes):
            if 0 not in part.box.sizes:
                yield part


class PartShard(TorchShard):
    """``Shard`` to torch, for which a rank's part is what its ``Cut`` says.

    torch slices a whole tensor by it where one rank gives it to all (``broadcast_from_rank0``).
    """

    def __new__(cls, dim: int, cut: Cut) -> PartShard:
        return super().__new__(cls, dim)

    def __init__(self, dim: int, cut: Cut) -> None:
        super().__init__(dim)
        self.cut = cut

    def __reduce__(self) -> Any:
        return TorchShard, (self.dim,)

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        sizes, offsets = self.cut.sizes, self.cut.offsets
        if not _is_slab(sizes, self.cut.shape, self.dim):
            wanted = "a part that is a slice of the whole tensor"
            found = "a range of its elements, or one cut twice, which torch has no word for"
            remedy = "Load the whole state on every rank, or shard with 'per_param'."
            raise UnsupportedError(self.cut.fqn, wanted, found, remedy)
        return sizes[self.dim], offsets[self.dim]


def restored_cut(
    fqn: str,
    shape: Ints,
    dim: int | None,
    regions: tuple[Region, ...],
    key: tuple[Any, ...],
    mesh: DeviceMesh,
    twice: bool = False,
) -> Cut:
    """A cut that was pickled, in a process with the mesh it was made on; InputError in one without
    ranks."""
    if not dist.is_initialized():
        wanted, found = "the ranks it was saved on", "a process without ranks"
        remedy = "Save sw.full_state_dict(model), which loads anywhere."
        raise InputError(f"a saved part of {fqn}", wanted, found, remedy)
    comm = Comm(mesh, twice=twice)
    return Cut(fqn, shape, dim, regions.__getitem__, key, comm)


def _is_slab(sizes: Ints, shape: Ints, axis: int) -> bool:
    """Whether a rectangle reaches across ``shape`` in all dimensions but ``axis``."""
    return len(sizes) == len(shape) and all(
        size == whole
        for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True))
        if dim != axis
    )


def part_of(value: torch.Tensor, offsets: Ints, sizes: Ints) -> torch.Tensor:
    """A rectangle of ``value``, or a range of its elements where there is one offset for them."""
    if len(offsets) != value.dim():
        return value.reshape(-1)[offsets[0] : offsets[0] + sizes[0]]
    found = value
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        # An empty part may begin beyond the end, which narrow refuses.
        found = found.narrow(dim, offset, size) if size else found.narrow(dim, 0, 0)
    return found
