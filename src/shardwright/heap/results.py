"""A class of ranks as a result: peaks by phase and category, and how sure they are.

From a tape also modules, a timeline, and what an allocator would reserve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardwright.core.footprint import ModuleMemory, PhasePeak, RankMemory, Sample
from shardwright.core.timeline import Kind, StorageChange
from shardwright.heap.allocator import AllocatorSettings, Replay, replay
from shardwright.heap.ledger import Ledger
from shardwright.heap.rank_step import MakeMachine, RankStep
from shardwright.heap.tape import Asked

MODELLED: tuple[Kind, ...] = ("activation", "temporary", "output")  # what kernels decide


def rank_memory(
    name: str,
    ranks: int,
    coordinates: dict[str, int],
    step: RankStep,
    make: MakeMachine,
    *,
    modelled: Collection[Kind] = MODELLED,
    fine: bool = False,
) -> RankMemory:
    """Run a steady step of the class. Figures of ``modelled`` kinds rest on a model; ``fine`` tells
    every phase of a run."""
    heap = Ledger(fine=fine)
    step.run(heap, make)
    phases = tuple(
        PhasePeak(
            phase, sum(kinds.values()), dict(sorted(kinds.items())), heap.where.get(phase, "")
        )
        for phase, kinds in heap.peaks.items()
    )
    worst = max(phases, key=lambda phase: phase.bytes)
    return RankMemory(
        name=name,
        ranks=ranks,
        coordinates=coordinates,
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
    requests: Sequence[Asked],
    settings: AllocatorSettings,
    capacity: int | None,
    enough: int | None = None,
) -> Replay:
    """Two steps through the caching allocator: what was there before, then the step twice.

    Where the device would be full, it is what a larger one would hold. A replay ends where more
    than ``enough`` is held, if nobody asks how much more.
    """
    found = replay(requests, settings, capacity, enough)
    if found.out_of_memory is None:
        return found
    return replay(requests, settings, enough=enough)


def _around(module: str) -> Iterable[str]:
    """A path and all that contain it, the root too."""
    yield ""
    parts = module.split(".") if module else []
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])
