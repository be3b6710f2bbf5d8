"""How one tensor is divided among ranks: what each holds, and how the parts come together."""

# Everything that has to know where elements are asks a Cut: operators on sharded tensors, norms,
# checkpoints, optimizer states. Two tensors meet element by element without communication only if
# they lie alike on every rank, which ``key`` says and not the placement: torch's words cannot tell
# a range of elements, or blocks, from rows.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.core.arrange import Slot
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.layout import Segment
from shardwright.core.placement import BlockShard, Shard, describe
from shardwright.runtime.checkpoint.region import Box, BoxAt, blocks_of, parts
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import tensor_spec
from shardwright.runtime.units.tensor_parallel import Joint

Ints = tuple[int, ...]
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
