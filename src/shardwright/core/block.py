"""The truth of a plan: which block of which tensor, in which role, lives on which rank.

A block with as many offsets as its tensor has dimensions is a rectangle. A block with a single
offset on a tensor of more dimensions is a range of its elements in row-major order: that is how
the even cut of a flat buffer, which crosses tensors and rows, is recorded. Blocks of no elements
are left out. In a plan the list is run-length encoded.
"""

# A plan that does not cover a tensor, or covers an element twice, would train: some rows would
# never learn, or two ranks would update their own copies of one. So check_tiling is asked when a
# plan is read and again when it is applied, whoever made it. It counts elements and looks for
# overlaps, which together is exact, and sorts first, so that tens of thousands of blocks take no
# time.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec

from shardwright.core.errors import InputError
from shardwright.core.optimizers import BY_ROW
from shardwright.core.tensor import TensorSpec

Role = Literal["parameter", "gradient", "optimizer_state"]
MAX_RUN = 2**20  # ranks or shards in one run


# Written as a JSON array, without names of fields: a plan has one for every shard of every tensor,
# and the names would be most of the file. So the order of the fields is part of the format.
class Block(msgspec.Struct, frozen=True, array_like=True, order=True):
    """``sizes`` elements from ``offsets`` of ``tensor`` on ``rank``."""

    tensor: str
    role: Role
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int

    @property
    def numel(self) -> int:
        """Elements of this block."""
        return math.prod(self.sizes)


class GroupKey(NamedTuple):
    """What rows of tables kept and updated alike have in common; ``dim`` as ``counted_dim`` has it.

    ``by_rows`` are replicas whose gradient is exchanged row by row. With ``dedup`` a row travels
    once to a rank that asks for it several times.
    """

    width: int
    optimizer: str
    dtype: str
    dim: int
    on_disk: bool = False
    # Defaults only at the end, and never a new field in between: keys are built by position.
    by_rows: bool = False
    dedup: bool = False


def counted_dim(dim: int, width: int, optimizer: str) -> int:
    """What of a table's ``dim`` tells the key of a shard of ``width`` columns from others."""
    # States of one number a row are means over the row's own dim: two shards of equal width from
    # tables of unequal dim are not updated alike. Of all others the width says everything.
    return dim if optimizer in BY_ROW else width


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """``count`` blocks on consecutive ranks, each ``step`` further into the tensor."""

    tensor: str
    role: Role
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RUN)] = 1
    step: tuple[int, ...] = ()


def encode(blocks: Iterable[Block]) -> tuple[BlockRun, ...]:
    """Run-length encode, keeping the order of the blocks."""
    runs: list[BlockRun] = []
    for block in blocks:
        grown = _grow(runs[-1], block) if runs else None
        if grown is None:
            runs.append(BlockRun(block.tensor, block.role, block.offsets, block.sizes, block.rank))
        else:
            runs[-1] = grown
    return tuple(runs)


# Only neighbours in the given order are joined. Blocks are not sorted first: decode has to give
# back the list as it was, for the order of a tensor's blocks is the order of its shards.
def _grow(run: BlockRun, block: Block) -> BlockRun | None:
    """``run`` longer by ``block``, or None if the block does not continue it."""
    same = (
        run.tensor == block.tensor
        and run.role == block.role
        and run.sizes == block.sizes
        and block.rank == run.rank + run.count
    )
    if not same:
        return None
    moved = tuple(b - a for a, b in zip(run.offsets, block.offsets, strict=True))
    if run.count == 1:
        return msgspec.structs.replace(run, count=2, step=moved)
    # From the third block on the step is known, and has to be kept: an uneven cut ends a run.
    if moved == tuple(s * run.count for s in run.step):
        return msgspec.structs.replace(run, count=run.count + 1)
    return None


def decode(runs: Iterable[BlockRun]) -> Iterator[Block]:
    """The blocks of a run-length encoded list, in order."""
    for run in runs:
        # Here and not by a type: a file may say anything, and zip would fail without naming the
        # tensor.
        if run.count > 1 and len(run.step) != len(run.offsets):
            where = f"blocks of {run.tensor}"
            raise InputError(where, f"a step of {len(run.offsets)} offsets", f"{len(run.step)}")
        for k in range(run.count):
            offsets = run.offsets if k == 0 else _moved(run, k)
            yield Block(run.tensor, run.role, offsets, run.sizes, run.rank + k)


def _moved(run: BlockRun, k: int) -> tuple[int, ...]:
    return tuple(o + k * s for o, s in zip(run.offsets, run.step, strict=True))


def check_tiling(blocks: Iterable[Block], tensors: Iterable[TensorSpec], world_size: int) -> None:
    """Raise unless the distinct parameter blocks of each tensor cover every element once.

    The same block on several ranks is a replica; two different blocks may not overlap, and no
    rank may hold one block twice.
    """
    by_tensor: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        if not 0 <= block.rank < world_size:
            raise InputError(
                f"blocks of {block.tensor}", f"ranks below {world_size}", f"rank {block.rank}"
            )
        # The other roles need no check of their own: gradients and states follow from the same
        # layout, and under ZeRO-1 they are cut where parameters are whole.
        if block.role == "parameter":
            by_tensor[block.tensor].append(block)
    for tensor in tensors:
        _check_tensor(tensor, by_tensor.pop(tensor.fqn, []))
    if by_tensor:
        raise InputError("blocks", "only tensors of the model", f"'{next(iter(by_tensor))}'")


def _check_tensor(tensor: TensorSpec, blocks: list[Block]) -> None:
    where = f"blocks of {tensor.fqn}"
    if len(set(blocks)) != len(blocks):
        raise InputError(where, "each block once per rank", "one listed twice")
    # One form for all blocks of a tensor. A mixture is refused by the lengths below: whether a
    # range of elements overlaps a rectangle could not be seen by comparing offsets.
    flat = any(len(block.offsets) != len(tensor.shape) for block in blocks)
    shape = (tensor.numel,) if flat else tensor.shape
    # Replicas are the same box and count once; what is left must neither overlap nor leave a gap.
    # Of boxes inside the tensor the right number of elements and no overlap say both.
    boxes = sorted({(block.offsets, block.sizes) for block in blocks})
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or any(
            o < 0 or s < 1 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)
        ):
            raise InputError(where, f"blocks inside {shape}", f"offsets {offsets}, sizes {sizes}")
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != tensor.numel or _overlap(boxes):
        wanted = f"every one of {tensor.numel} elements exactly once"
        found = f"blocks of {covered} elements in all" if covered != tensor.numel else "an overlap"
        raise InputError(where, wanted, found, "Make the plan again with `shardwright plan`.")


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether any two boxes share an element; boxes come sorted by offset."""
    for i, (offsets, sizes) in enumerate(boxes):
        for other_offsets, other_sizes in boxes[i + 1 :]:
            if offsets and other_offsets[0] >= offsets[0] + sizes[0]:
                break  # sorted: no later box can reach back into this one
            if all(
                o < p + t and p < o + s
                for o, s, p, t in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            ):
                return True
    return False
