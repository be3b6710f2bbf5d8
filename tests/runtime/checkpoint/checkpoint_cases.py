"""Tensors, ways to cut them, and a checkpoint of several ranks written by one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardwright.runtime.checkpoint import TensorPart
from shardwright.runtime.checkpoint.files import digest_of, list_name, sealed, shard_name
from shardwright.runtime.checkpoint.folders import step_folder, temporary_folder
from shardwright.runtime.checkpoint.read import Stored
from shardwright.runtime.checkpoint.region import Box, checked, is_range
from shardwright.runtime.checkpoint.write import claim, commit, write_rank, writers

Tensors = dict[str, torch.Tensor]
Cut = list[list[Box]]  # by rank

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
)


def tensors() -> Tensors:
    """One tensor of every dtype, of odd shapes, a scalar, and one without elements."""
    made = {
        str(dtype).removeprefix("torch."): filled((5 + i, 7), dtype, i)
        for i, dtype in enumerate(DTYPES)
    }
    made["cube"] = filled((3, 4, 5), torch.float32, 50)
    made["scalar"] = torch.tensor(3.5)
    made["nothing"] = torch.zeros(0, 4)
    made["optimizer/cube/exp_avg"] = filled((3, 4, 5), torch.float32, 51)
    return made


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that every dtype represents and that tell elements apart."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if dtype == torch.bool else 100, tuple(shape), generator=generator)
    return values.to(torch.float32).to(dtype)


def said(stored: Stored, rank: int = 0) -> tuple[Any, ...]:
    """What a checkpoint says besides its tensors: step, facts, the scalars that ``rank`` goes on
    with, how many ranks saved it, and the scalars of all."""
    every = tuple(found.scalars for found in stored.lists)
    manifest = stored.manifest
    return manifest.step, manifest.facts, every[rank % len(every)], len(every), every


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(first: Tensors, second: Tensors) -> bool:
    """Whether names, shapes, dtypes and bytes are equal."""
    return first.keys() == second.keys() and all(
        t.shape == second[n].shape and t.dtype == second[n].dtype and bits(t) == bits(second[n])
        for n, t in first.items()
    )


def whole_box(shape: Sequence[int]) -> Box:
    """A tensor in one piece."""
    return Box((0,) * len(shape), tuple(shape))


def cut_ranges(shape: Sequence[int], world_size: int, chance: random.Random) -> Cut:
    """Row-major ranges, some of them empty."""
    numel = torch.Size(shape).numel()
    inner = sorted(chance.randint(0, numel) for _ in range(world_size - 1))
    ends = [0, *inner, numel]
    return [[Box((a,), (b - a,))] for a, b in itertools.pairwise(ends)]


def cut_slabs(shape: Sequence[int], world_size: int, chance: random.Random) -> Cut:
    """Uneven slabs along one dimension."""
    if not shape:
        return cut_owned(shape, world_size, chance)
    dim = chance.randrange(len(shape))
    found: Cut = []
    for (start,), (size,) in (part[0] for part in cut_ranges((shape[dim],), world_size, chance)):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, size
        found.append([Box(tuple(offsets), tuple(sizes))])
    return found


def cut_pieces(shape: Sequence[int], world_size: int, chance: random.Random) -> Cut:
    """Halved here and there, each piece on any rank: several on one, none on another."""
    boxes = [whole_box(shape)]
    for _ in range(chance.randint(0, 6)):
        offsets, sizes = boxes.pop(chance.randrange(len(boxes)))
        long = [d for d, n in enumerate(sizes) if n > 1]
        if not long:
            boxes.append(Box(offsets, sizes))
            continue
        dim = chance.choice(long)
        at = chance.randint(1, sizes[dim] - 1)
        moved = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
        boxes.append(Box(offsets, tuple(at if d == dim else n for d, n in enumerate(sizes))))
        boxes.append(Box(moved, tuple(n - at * (d == dim) for d, n in enumerate(sizes))))
    found: Cut = [[] for _ in range(world_size)]
    for box in boxes:
        found[chance.randrange(world_size)].append(box)
    return found


def cut_owned(shape: Sequence[int], world_size: int, chance: random.Random) -> Cut:
    """Whole on one rank."""
    owner = chance.randrange(world_size)
    return [[whole_box(shape)] if rank == owner else [] for rank in range(world_size)]


def cut_replicated(shape: Sequence[int], world_size: int, chance: random.Random) -> Cut:
    """Whole on every rank."""
    return [[whole_box(shape)] for _ in range(world_size)]


CUTS: tuple[Callable[[Sequence[int], int, random.Random], Cut], ...] = (
    cut_ranges,
    cut_slabs,
    cut_pieces,
    cut_owned,
)


def part(name: str, tensor: torch.Tensor, region: Box) -> TensorPart:
    """A copy of a region; a rectangle keeps a strided view every second time."""
    shape = tuple(tensor.shape)
    if is_range(shape, region.offsets):
        start, count = region.offsets[0], region.sizes[0]
        return TensorPart(name, shape, *region, tensor.reshape(-1)[start : start + count].clone())
    view = tensor.clone()
    for dim, (offset, size) in enumerate(zip(*region, strict=True)):
        view = view.narrow(dim, offset, size)
    return TensorPart(name, shape, *region, view if sum(region.offsets) % 2 else view.contiguous())


def deal(made: Tensors, world_size: int, seed: int, copies: bool = False) -> list[list[TensorPart]]:
    """What each rank holds under a random cut of every tensor."""
    chance = random.Random(seed)
    held: list[list[TensorPart]] = [[] for _ in range(world_size)]
    for name, tensor in made.items():
        cuts = (*CUTS, cut_replicated) if copies else CUTS
        for rank, regions in enumerate(chance.choice(cuts)(tensor.shape, world_size, chance)):
            held[rank].extend(part(name, tensor, region) for region in regions)
    return held


def blank(held: Sequence[TensorPart]) -> list[TensorPart]:
    """The same parts with other values."""
    return [h._replace(tensor=torch.empty_like(h.tensor).copy_(~h.tensor.bool())) for h in held]


def equal(held: Sequence[TensorPart], others: Sequence[TensorPart]) -> bool:
    """Whether parts are equal bit by bit."""
    return len(held) == len(others) and all(
        a[:4] == b[:4] and a.tensor.dtype == b.tensor.dtype and bits(a.tensor) == bits(b.tensor)
        for a, b in zip(held, others, strict=True)
    )


def all_of(made: Tensors) -> list[TensorPart]:
    """Every tensor in one piece."""
    return [part(name, tensor, whole_box(tensor.shape)) for name, tensor in made.items()]


def save(folder: Path, step: int, held: Sequence[Sequence[TensorPart]], **facts: str) -> Path:
    """Write as ``len(held)`` ranks would."""
    size = len(held)
    temporary, final = temporary_folder(folder, step, 0), step_folder(folder, step)
    temporary.mkdir(parents=True)
    kept = [checked(parts) for parts in held]
    chosen = writers([[claim(p) for p in parts] for parts in kept])
    for rank, parts in enumerate(kept):
        mine = [p for p in parts if claim(p).part in chosen[rank]]
        write_rank(temporary, step, rank, size, mine, {"rank": rank})
    commit(temporary, final, step, size, facts)
    return final


def forge(saved: Path, rank: int, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a rank's list as an attacker would, with every digest made to fit."""
    path = saved / list_name(rank)
    found = msgspec.json.decode(path.read_bytes())
    shard = digest_of((saved / shard_name(rank)).read_bytes())
    found["file"] = {"nbytes": shard.nbytes, "sha256": shard.sha256}
    edit(found)
    path.write_bytes(msgspec.json.encode(found))
    seal(saved)


def seal(saved: Path) -> None:
    """Write the manifest again so that it fits the lists."""
    lists = sorted(saved.glob("rank-*.json"), key=lambda p: int(p.stem.partition("-")[2]))
    step = int(saved.name.partition("-")[2])
    digests = tuple(digest_of(path.read_bytes()) for path in lists)
    (saved / "manifest.json").write_bytes(sealed(step, {}, digests))
