"""What a backend can do, and which way of doing it is faster in this process group.

gloo's own all-gather and reduce-scatter take copies that other ways do not: shards sent straight
into their places, and an all-to-all whose parts each rank sums itself. The latter is the usual way
on gloo, for it was never seen slower, takes no more memory and takes it where it can be counted.
Which is faster depends on the machine and on the number of ranks, so for large tensors it is timed,
once per group, and agreed on by its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from shardwright.core.errors import InputError, expected
from shardwright.runtime.torch_private import Operations

BACKEND: Final = "backend"
POINT_TO_POINT: Final = "point_to_point"
ALL_TO_ALL: Final = "all_to_all"
OTHER_WAY: Final = {"all_gather": POINT_TO_POINT, "reduce_scatter": ALL_TO_ALL}

MIB: Final = 2**20
SIZES: Final = (MIB, 4 * MIB, 16 * MIB)
GAIN: Final = 1.25
ROUNDS: Final = 3
SECONDS: Final = 0.3
_GROWTH: Final = 4  # from one size to the next
_TAGS: Final = 1 << 30

Steps = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Paths:
    """From how many bytes of the full tensor on which way is taken, smallest first.

    Below the first step, and where there is none, the backend's own.
    """

    all_gather: Steps = ()
    reduce_scatter: Steps = ()

    def table(self) -> dict[str, str]:
        """The way of each collective in words, e.g. ``point_to_point from 4 MiB``."""
        return {
            "all_gather": _words(self.all_gather),
            "reduce_scatter": _words(self.reduce_scatter),
        }


USUAL_ON_GLOO: Final = Paths(reduce_scatter=((0, ALL_TO_ALL),))


def _words(steps: Steps) -> str:
    parts = [f"{way} from {start // MIB} MiB" if start else way for start, way in steps]
    return ", ".join(parts) or BACKEND


def way_at(steps: Steps, nbytes: int) -> str:
    """The way of a collective whose full tensor has ``nbytes``."""
    return next((way for start, way in reversed(steps) if nbytes >= start), BACKEND)


def fixed_paths(paths: str | Mapping[str, str]) -> Paths:
    """``"backend"``, or a way for all sizes by the collective's name; InputError for others."""
    if paths == BACKEND:
        return Paths()
    wanted = {} if isinstance(paths, str) else dict(paths)
    for name, way in wanted.items():
        if way not in (BACKEND, OTHER_WAY.get(name)):
            break
    else:
        if wanted:
            steps = {n: ((0, w),) for n, w in wanted.items() if w != BACKEND}
            return Paths(steps.get("all_gather", ()), steps.get("reduce_scatter", ()))
    pairs = ", ".join(f"{name!r}: {way!r}" for name, way in OTHER_WAY.items())
    raise InputError(
        expected(
            "paths", f"'backend' or some of {{{pairs}}}", repr(paths), "Leave it out to probe."
        )
    )


def gather_point_to_point(
    operations: Operations,
    rank: int,
    size: int,
    full: torch.Tensor,
    shard: torch.Tensor,
    sequence: int,
) -> Iterator[dist.Work]:
    """Every shard [n] goes straight into its place in every rank's ``full`` [W*n]."""
    assert full.numel() == size * shard.numel(), "the full tensor is not W shards"
    places = full.data.view(size, -1).unbind()
    tag = _TAGS | (sequence & (_TAGS - 1))
    for distance in range(1, size):
        source = (rank - distance) % size
        yield operations.receive(places[source], source, tag)
    for distance in range(1, size):
        yield operations.send(shard, (rank + distance) % size, tag)
    if places[rank].data_ptr() != shard.data_ptr():
        places[rank].copy_(shard)


def sum_parts(shard: torch.Tensor, parts: torch.Tensor, size: int) -> None:
    """``shard`` [n] becomes the sum of ``parts`` [W*n] in rank order, its version untouched."""
    rows = parts.view(size, -1)
    if size == 2:
        torch.add(rows[0], rows[1], out=shard.data.view(-1))
    else:
        torch.sum(rows, 0, out=shard.data.view(-1))


def fastest_paths(operations: Operations, rank: int, size: int) -> Paths:
    """Time every way at a few sizes; a collective of the group, with one answer on every rank.

    Sizes that would take it beyond ``SECONDS`` are left out. Another way than the usual one is
    taken for a size only where it is at least ``GAIN`` times faster.
    """
    usual = {"all_gather": BACKEND, "reduce_scatter": ALL_TO_ALL}
    found: dict[str, list[tuple[int, str]]] = {name: [(0, way)] for name, way in usual.items()}
    spent = last = 0.0
    for nbytes in SIZES:
        if spent + last * _GROWTH > SECONDS:
            break
        trials = _trials(operations, rank, size, nbytes)
        if not spent:
            _rounds(trials, 1)  # connections are made here
        began = time.perf_counter()
        times = _rounds(trials, ROUNDS)
        *slowest, last = _most([*times, time.perf_counter() - began], operations.group)
        spent += last
        agreed = dict(zip(trials, slowest, strict=True))
        for name, other in OTHER_WAY.items():
            another = BACKEND if usual[name] == other else other
            faster = agreed[name, usual[name]] >= GAIN * agreed[name, another]
            found[name].append((nbytes, another if faster else usual[name]))
    return Paths(*map(_changes, found.values()))


def _trials(
    operations: Operations, rank: int, size: int, nbytes: int
) -> dict[tuple[str, str], Callable[[], None]]:
    full = torch.zeros(nbytes // 4 // size * size)
    shard = torch.zeros(full.numel() // size)
    parts = torch.zeros_like(full)

    def gather() -> None:
        _finish([operations.all_gather(full, shard, True)])

    def letters() -> None:
        _finish(gather_point_to_point(operations, rank, size, full, shard, 0))

    def scatter() -> None:
        _finish([operations.reduce_scatter(shard, full, True)])

    def exchange() -> None:
        _finish([operations.all_to_all(parts, full, (), (), True)])
        sum_parts(shard, parts, size)

    return {
        ("all_gather", BACKEND): gather,
        ("all_gather", POINT_TO_POINT): letters,
        ("reduce_scatter", BACKEND): scatter,
        ("reduce_scatter", ALL_TO_ALL): exchange,
    }


def _finish(works: Iterable[dist.Work | None]) -> None:
    for work in list(works):
        if work is not None:
            work.wait()


def _rounds(trials: Mapping[tuple[str, str], Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each trial; they take turns, so that a busy moment hits all of them."""
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in trials}
    for _ in range(rounds):
        for name, trial in trials.items():
            began = time.perf_counter()
            trial()
            seconds[name].append(time.perf_counter() - began)
    return [median(taken) for taken in seconds.values()]


def _most(numbers: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """The largest of each number over the group's ranks."""
    most = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    values: list[float] = most.tolist()
    return values


def _changes(steps: Sequence[tuple[int, str]]) -> Steps:
    """Only the sizes at which the way changes; it is the backend's before the first."""
    before = [BACKEND, *(way for _, way in steps)]
    return tuple(step for step, last in zip(steps, before, strict=False) if step[1] != last)
