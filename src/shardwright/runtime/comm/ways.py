"""What is measured of a process group: which way of doing a collective is faster in it, and how far
the clocks of its ranks are apart.

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
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import InputError
from shardwright.runtime.comm.torch_groups import Operations

BACKEND: Final = "backend"
POINT_TO_POINT: Final = "point_to_point"
ALL_TO_ALL: Final = "all_to_all"
OTHER_WAY: Final = {"all_gather": POINT_TO_POINT, "reduce_scatter": ALL_TO_ALL}

MIB: Final = 2**20
SIZES: Final = (MIB, 4 * MIB, 16 * MIB)
# Less than this can be noise, and would be another answer in the next run.
GAIN: Final = 1.25
ROUNDS: Final = 3
SECONDS: Final = 0.3
_GROWTH: Final = 4  # from one size to the next
_TAGS: Final = 1 << 30
CLOCK_ROUNDS, CLOCK_SECONDS = 128, 0.5  # with each rank; no more begin after so long
_ASKED, _ANSWERED = 1 << 20, (1 << 20) + 1  # tags that no other message has

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
    for start, way in reversed(steps):
        if nbytes >= start:
            return way
    return BACKEND


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
        "paths", f"'backend' or some of {{{pairs}}}", repr(paths), "Leave it out to probe."
    )


def sends_and_receives(
    operations: Operations, full: torch.Tensor, shard: torch.Tensor, sequence: int
) -> Iterator[dist.Work]:
    """An all-gather: every shard [n] goes straight into its place in all ranks' ``full`` [W*n]."""
    rank, size = operations.rank, operations.size
    assert full.numel() == size * shard.numel(), "the full tensor is not W shards"
    places = full.data.view(size, -1).unbind()
    # By the collective's number: a message of the next one may arrive before this one is over.
    tag = _TAGS | (sequence & (_TAGS - 1))
    # Receives first, so that what arrives has a place. By distance, so that every rank begins with
    # another one and no rank is sent to by all at once.
    for distance in range(1, size):
        source = (rank - distance) % size
        yield operations.receive(places[source], source, tag)
    for distance in range(1, size):
        yield operations.send(shard, (rank + distance) % size, tag)
    if places[rank].data_ptr() != shard.data_ptr():
        places[rank].copy_(shard)


def sum_parts(shard: torch.Tensor, parts: torch.Tensor, size: int) -> None:
    """``shard`` [n] becomes the sum of ``parts`` [W*n] in rank order."""
    if shard.dim() != 1:
        shard, parts = shard.view(-1), parts.view(-1)
    if size == 2:
        torch.add(*parts.chunk(2), out=shard)
    else:
        torch.sum(parts.view(size, -1), 0, out=shard)


def fastest_paths(operations: Operations) -> Paths:
    """Time every way at a few sizes; a collective of the group, with one answer on every rank.

    Sizes that would take it beyond ``SECONDS`` are left out. Another way than the usual one is
    taken for a size only where it is at least ``GAIN`` times faster.
    """
    usual = {"all_gather": BACKEND, "reduce_scatter": ALL_TO_ALL}
    found: dict[str, list[tuple[int, str]]] = {name: [(0, way)] for name, way in usual.items()}
    spent = last = 0.0
    for nbytes in SIZES:
        # ``last`` is the slowest rank's, so all ranks stop at the same size. Their own times would
        # part them, and the next trial is a collective.
        if spent + last * _GROWTH > SECONDS:
            break
        trials = _trials(operations, nbytes)
        # Without being timed: the first exchange between two ranks also connects them.
        if not spent:
            _rounds(trials, 1)
        began = time.perf_counter()
        times = _rounds(trials, ROUNDS)
        # What the slowest rank took is what a step waits for, and it is the same number on every
        # rank.
        *slowest, last = _most([*times, time.perf_counter() - began], operations)
        spent += last
        agreed = dict(zip(trials, slowest, strict=True))
        for name, other in OTHER_WAY.items():
            another = BACKEND if usual[name] == other else other
            faster = agreed[name, usual[name]] >= GAIN * agreed[name, another]
            found[name].append((nbytes, another if faster else usual[name]))
    return Paths(*map(_changes, found.values()))


def _trials(operations: Operations, nbytes: int) -> dict[tuple[str, str], Callable[[], None]]:
    size = operations.size
    full = torch.zeros(nbytes // 4 // size * size)
    shard = torch.zeros(full.numel() // size)
    parts = torch.zeros_like(full)

    def gather() -> None:
        _finish([operations.all_gather(full, shard, True)])

    def transfers() -> None:
        _finish(sends_and_receives(operations, full, shard, 0))

    def scatter() -> None:
        _finish([operations.reduce_scatter(shard, full, True)])

    def exchange() -> None:
        _finish([operations.all_to_all(parts, full, (), (), True)])
        sum_parts(shard, parts, size)

    return {
        ("all_gather", BACKEND): gather,
        ("all_gather", POINT_TO_POINT): transfers,
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


def _most(numbers: Sequence[float], operations: Operations) -> list[float]:
    """The largest of each number over the group's ranks."""
    most = torch.tensor(numbers, dtype=torch.float64)
    _finish([operations.all_reduce(most, True, True)])
    return most.tolist()


def _changes(steps: Sequence[tuple[int, str]]) -> Steps:
    """Only the sizes at which the way changes; it is the backend's before the first."""
    before = [BACKEND, *(way for _, way in steps)]
    return tuple(step for step, last in zip(steps, before, strict=False) if step[1] != last)


def clock_offset(mesh: DeviceMesh) -> tuple[float, float]:
    """Seconds from this rank's ``time.perf_counter`` to that of rank 0 of the 1-D ``mesh``, and the
    most by which they may be wrong; all ranks leave together (collective).

    Rank 0 asks each rank what time it is. The answer was given between question and answer, in the
    middle if both took as long; the quickest round is believed.
    """
    if mesh.size() == 1:
        return 0.0, 0.0
    operations = Operations(mesh.get_group())
    found = _offset(operations, mesh.device_type)
    # Rank 0 asks one after the other. Without this the first ones would go on, and be measured,
    # while the last is asked.
    here = torch.ones(1, device=mesh.device_type)
    _finish([operations.all_reduce(here, True, False)])
    assert here.item() == mesh.size()  # waits for the device, too
    return found


def _offset(operations: Operations, device: str) -> tuple[float, float]:
    def send(values: list[float], to: int, tag: int) -> None:
        operations.send(torch.tensor(values, dtype=torch.float64, device=device), to, tag).wait()

    def receive(count: int, source: int, tag: int) -> list[float]:
        values = torch.empty(count, dtype=torch.float64, device=device)
        operations.receive(values, source, tag).wait()
        return values.tolist()

    if operations.rank:
        while True:
            is_last, offset, error = receive(3, 0, _ASKED)
            if is_last:
                return offset, error
            send([time.perf_counter()], 0, _ANSWERED)
    for other in range(1, operations.size):
        rounds: list[tuple[float, float]] = []
        began = time.perf_counter()
        while len(rounds) < CLOCK_ROUNDS and (
            not rounds or time.perf_counter() - began < CLOCK_SECONDS
        ):
            asked = time.perf_counter()
            send([0.0, 0.0, 0.0], other, _ASKED)
            (theirs,) = receive(1, other, _ANSWERED)
            answered = time.perf_counter()
            rounds.append((answered - asked, (asked + answered) / 2 - theirs))
        # A slow round waited on its way there or back: its middle is not when the answer was given.
        took, offset = min(rounds)
        send([1.0, offset, took / 2], other, _ASKED)
    return 0.0, 0.0
