"""Classes of ranks on a symbolic heap: what each takes, and of some what every event shows."""

# A class is run once for all of its ranks. Its peaks come from a ledger that keeps sums. What an
# allocator holds, the tensors at the peak and a timeline need every event of the step, which takes
# many times as long: only classes that may decide are followed that far.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shardwright.core.footprint import Alive, Extra, ModuleMemory, PhasePeak, RankMemory, Sample
from shardwright.core.quantities import counted
from shardwright.core.timeline import Kind, StorageChange
from shardwright.heap.allocator import AllocatorSettings, replay
from shardwright.heap.allocator.growth import grown
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import MakeMachine, RankStep
from shardwright.heap.tape import StepRequests
from shardwright.job.parallel import Degrees

CLOSE, MOST_FOLLOWED = 0.9, 4  # classes whose peaks are followed event by event
LARGEST = 20  # tensors at the peak that are listed

MODELLED: tuple[Kind, ...] = ("activation", "temporary", "output")  # what kernels decide


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that do the same: their ``step``, and the ``ledger`` of one. ``tables`` are bytes of
    weights of what no unit has, by path; ``kept`` is what is there between steps, where it is known
    one by one."""

    name: str
    ranks: int
    coordinates: dict[str, int]
    step: RankStep
    ledger: Ledger
    tables: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[Alive] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the classes of a job have in common: their runtime, as a machine that ``make`` makes,
    and the device. Figures of ``modelled`` kinds rest on a model. With ``enough`` nobody asks what
    allocators hold beyond that."""

    make: MakeMachine
    sharding: Sharding
    on_gpu: bool
    allocator: AllocatorSettings
    capacity: int | None
    modelled: Collection[Kind] = MODELLED
    enough: int | None = None


def rank_memories(
    classes: Sequence[RankClass], setting: Setting, *, details: bool, named: str
) -> tuple[RankMemory, ...]:
    """The class with the highest peak first, the others in their order.

    On an accelerator those close to the highest peak have what the allocator holds; with
    ``details`` the first, and one that is ``named``, have modules, largest tensors and a timeline.
    """
    found = [_memory(each, setting.modelled) for each in classes]
    # Allocators are replayed only near the highest peak: a class far below it would need more than
    # a tenth of its bytes in gaps to be the fullest, and a replay plays every allocation of a step
    # twice.
    worst = max(range(len(found)), key=lambda k: found[k].peak_bytes)
    over = setting.enough is not None and found[worst].peak_bytes > setting.enough
    if details or (setting.on_gpu and not over):
        for index in _followed(found, worst, setting.on_gpu, named):
            found[index] = _with_events(found[index], classes[index], setting, details)
            if setting.enough is not None and found[index].reserved_bytes > setting.enough:
                break
    return (found.pop(worst), *found)


def _followed(found: Sequence[RankMemory], worst: int, on_gpu: bool, named: str) -> list[int]:
    """The classes whose events are looked at: the worst, those close to it on an accelerator,
    whose allocator may hold more, and the one that is asked for."""
    close = [worst]
    if on_gpu:
        order = sorted(range(len(found)), key=lambda k: -found[k].peak_bytes)
        least = CLOSE * found[worst].peak_bytes
        close += [k for k in order if k != worst and found[k].peak_bytes >= least]
    asked = [k for k, each in enumerate(found) if each.name == named]
    return list(dict.fromkeys([*close[:MOST_FOLLOWED], *asked]))


def _with_events(
    memory: RankMemory, each: RankClass, setting: Setting, details: bool
) -> RankMemory:
    """A class with what its events show."""
    if setting.on_gpu:
        asked = each.step.asked(setting.make)
        most, retries = reserved(asked, setting.allocator, setting.capacity, setting.enough)
        memory = msgspec.structs.replace(memory, reserved_bytes=most, retries=retries)
    if not details:
        return memory
    tape = each.step.taped(setting.make)
    kinds, samples = timeline(tape.changes)
    parameters, counts = each.step.parameters(setting.sharding)
    for path, nbytes in each.tables.items():
        for above in _around(path):
            parameters[above] = parameters.get(above, 0) + nbytes
    return msgspec.structs.replace(
        memory,
        modules=module_memory(tape.changes, parameters, counts),
        largest=tuple(_one_by_one(tape.alive_at_peak(), each.kept)[:LARGEST]),
        kinds=kinds,
        timeline=samples,
    )


def _one_by_one(alive: Sequence[Alive], kept: Sequence[Alive]) -> list[Alive]:
    """What is alive, with the ``kept`` of each kind instead of their sum; largest first."""
    sums = {each.kind for each in kept}
    others = [a for a in alive if a.module or a.name not in sums or a.kind != a.name]
    return sorted([*others, *kept], key=lambda each: -each.bytes)


def _memory(each: RankClass, modelled: Collection[Kind]) -> RankMemory:
    """The peaks of a class; figures of ``modelled`` kinds rest on a model."""
    where = each.ledger.where
    phases = tuple(
        PhasePeak(phase, sum(kinds.values()), dict(sorted(kinds.items())), where.get(phase, ""))
        for phase, kinds in each.ledger.peaks.items()
    )
    worst = max(phases, key=lambda phase: phase.bytes)
    return RankMemory(
        name=each.name,
        ranks=each.ranks,
        coordinates=each.coordinates,
        peak_bytes=worst.bytes,
        peak_phase=worst.phase,
        by_category=worst.by_category,
        certainty={k: "modelled" if k in modelled else "exact" for k in worst.by_category},
        phases=phases,
    )


MOST_SAMPLES = 4000  # of a timeline; peaks between are kept


def module_memory(
    changes: Sequence[StorageChange], parameters: dict[str, int], counts: dict[str, int]
) -> tuple[ModuleMemory, ...]:
    """Every module that made a tensor, and those around it, from the root down.

    ``parameters`` are bytes on this rank by module path, ``counts`` how many blocks a path with a
    star stands for. What a module saves is what it made in a microbatch's forward that its backward
    frees.
    """
    saved: dict[str, int] = {}
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    total = 0
    for change in changes:
        total += change.bytes
        if change.kind == "activation" and change.phase == "forward" and change.microbatch == 0:
            for path in _around(change.module):
                saved[path] = saved.get(path, 0) + change.bytes
        if change.bytes > 0 and change.phase in ("forward", "backward"):
            highest = forward if change.phase == "forward" else backward
            for path in _around(change.module):
                if total > highest.get(path, 0):
                    highest[path] = total
    paths = sorted(set(parameters) | set(forward) | set(backward), key=lambda path: path.split("."))
    return tuple(
        ModuleMemory(
            name=path,
            kind="",
            parameters=parameters.get(path, 0),
            saved=saved.get(path, 0),
            forward_peak=forward.get(path, 0),
            backward_peak=backward.get(path, 0),
            count=counts.get(path.partition("*")[0], 1) if "*" in path else 1,
        )
        for path in paths
    )


def timeline(changes: Sequence[StorageChange]) -> tuple[tuple[Kind, ...], tuple[Sample, ...]]:
    """Live bytes by kind after the changes, thinned to the extremes of equal stretches."""
    kinds = tuple(dict.fromkeys(change.kind for change in changes))
    live = dict.fromkeys(kinds, 0)
    stretch = max(1, len(changes) * 2 // MOST_SAMPLES)
    found: list[Sample] = []
    best: tuple[int, Sample] | None = None
    total = 0
    for index, change in enumerate(changes):
        live[change.kind] += change.bytes
        total += change.bytes
        name = change.name or "free"
        sample = Sample(f"{change.unit} {name}".strip(), change.phase, tuple(live.values()))
        if best is None or total > best[0]:
            best = (total, sample)
        if (index + 1) % stretch == 0 or index + 1 == len(changes):
            found.append(best[1])
            if sample is not best[1]:
                found.append(sample)
            best = None
    return kinds, tuple(found)


def reserved(
    requests: StepRequests,
    settings: AllocatorSettings,
    capacity: int | None,
    enough: int | None = None,
) -> tuple[int, int]:
    """Bytes that the caching allocator holds at most: of what was there before, then of the step
    twice; and how often it gave everything back for a request.

    Where the device would be full, it is what a larger one would hold. A replay ends where more
    than ``enough`` is held, if nobody asks how much more.
    """
    twice = requests.twice()
    most = grown(twice, settings, enough)
    room = settings.room(capacity)
    if most is not None and (room is None or most <= room):
        return most, 0
    found = replay(twice, settings, capacity, enough)
    # Where the device runs out, the replay ends at that request and says nothing of how much would
    # have been enough.
    if found.out_of_memory is None:
        return found.reserved_peak, found.retries
    if most is None:
        most = replay(twice, settings, enough=enough).reserved_peak
    return most, 0


def _around(module: str) -> Iterable[str]:
    """A path and all that contain it, the root too."""
    yield ""
    parts = module.split(".") if module else []
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


MB = 10**6
CONTEXT = (300 * MB, 500 * MB)
CONTEXT_SOURCE = "CUDA context and kernels, as commonly seen; assumed"
# The upper end is what Fujii et al. (arXiv 2411.06465) count; a communicator that has sent nothing
# yet holds less.
COMMUNICATOR = (100 * MB, 500 * MB)
COMMUNICATOR_SOURCE = "NCCL buffers; upper end from arXiv 2411.06465, lower assumed"


def communicators(degrees: Degrees) -> int:
    """Groups of more than one rank that a rank talks in; the world counts where data is shared."""
    sizes = (
        degrees.shards,
        degrees.data_replicate,
        degrees.tensor,
        degrees.pipeline,
        degrees.context,
        degrees.expert,
    )
    return sum(size > 1 for size in sizes)


def outside(degrees: Degrees, on_gpu: bool, more: int = 0) -> tuple[Extra, ...]:
    """What else fills a rank's device, with so many communicators ``more``; nothing on a CPU."""
    if not on_gpu:
        return ()
    found = [Extra("CUDA context", *CONTEXT, CONTEXT_SOURCE)]
    count = communicators(degrees) + more
    if count:
        low, high = COMMUNICATOR
        name = counted(count, "communicator")
        found.append(Extra(name, count * low, count * high, COMMUNICATOR_SOURCE))
    return tuple(found)
