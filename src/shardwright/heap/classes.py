"""Classes of ranks on a symbolic heap: what each takes, and of some what every event shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shardwright.core.footprint import Alive, RankMemory
from shardwright.core.timeline import Kind
from shardwright.heap.allocator import AllocatorSettings
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import MakeMachine, RankStep
from shardwright.heap.results import MODELLED, module_memory, rank_memory, reserved, timeline

CLOSE, MOST_FOLLOWED = 0.9, 4  # classes whose peaks are followed event by event
LARGEST = 20  # tensors at the peak that are listed


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that do the same. ``tables`` are bytes of weights of what no unit has, by path;
    ``kept`` is what is there between steps, where it is known one by one."""

    name: str
    ranks: int
    coordinates: dict[str, int]
    step: RankStep
    tables: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[Alive] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the classes of a job have in common: their runtime, as a machine that ``make`` makes,
    and the device. Figures of ``modelled`` kinds rest on a model; ``fine`` has every phase of a
    run, not only forward, backward and step. With ``enough`` nobody asks what allocators hold
    beyond that."""

    make: MakeMachine
    sharding: Sharding
    on_gpu: bool
    allocator: AllocatorSettings
    capacity: int | None
    modelled: Collection[Kind] = MODELLED
    fine: bool = False
    enough: int | None = None


def rank_memories(
    classes: Sequence[RankClass], setting: Setting, *, details: bool, named: str
) -> tuple[RankMemory, ...]:
    """The class with the highest peak first, the others in their order.

    On an accelerator those close to the highest peak have what the allocator holds; with
    ``details`` the first, and one that is ``named``, have modules, largest tensors and a timeline.
    """
    found = [
        rank_memory(
            each.name,
            each.ranks,
            each.coordinates,
            each.step,
            setting.make,
            modelled=setting.modelled,
            fine=setting.fine,
        )
        for each in classes
    ]
    worst = max(range(len(found)), key=lambda k: found[k].peak_bytes)
    if details or setting.on_gpu:
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
        found = reserved(asked, setting.allocator, setting.capacity, setting.enough)
        memory = msgspec.structs.replace(
            memory, reserved_bytes=found.reserved_peak, retries=found.retries
        )
    if not details:
        return memory
    tape = each.step.taped(setting.make)
    kinds, samples = timeline(tape.changes)
    parameters, counts = each.step.parameters(setting.sharding)
    for path, nbytes in each.tables.items():
        parts = path.split(".")
        for above in (".".join(parts[:length]) for length in range(len(parts) + 1)):
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
