"""Where the time of profiled steps went: by kernel, and by phase, in which waiting for the rank
that comes last is told from moving bytes.

A collective moves nothing before its last rank has arrived. So of the seconds that a rank is held
by it, those before that moment are waiting, and the others are moving. Moments are seconds on one
clock that all ranks share.
"""

# A rank's own trace cannot tell waiting from moving: a collective that takes long because its peer
# came late looks like one that moves many bytes. Only the arrivals of all ranks together tell, on
# one clock; how far the clocks may be apart is kept beside, for a wait shorter than that means
# nothing.

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from shardwright.core.timeline import PHASES

MOST_KERNELS = 100  # lines that a measurement keeps; what is left is one line more
OTHERS = "others"


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """Collective ``number`` of a ``group`` as one rank saw it: it ``arrived`` (the collective
    could begin), and was held by it from ``began`` to ``ended``."""

    group: str
    number: int
    kind: str
    label: str
    bytes: int
    arrived: float
    began: float
    ended: float
    phase: str = ""


class RankProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank saw of ``steps`` steps of a stage: seconds of every call of each kernel, seconds
    of the steps by phase, and its collectives. ``clock_error`` seconds is the most by which its
    clock may be off that of rank 0."""

    stage: str
    rank: int
    steps: int
    kernels: dict[str, tuple[float, ...]]
    phases: dict[str, float]
    meetings: tuple[Meeting, ...]
    clock_error: float = 0.0


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of a kernel on all ranks and their seconds; ``share`` of those of all kernels."""

    name: str
    calls: int
    seconds: float
    mean: float
    median: float
    longest: float
    share: float


class PhaseTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's seconds of a phase in a step, and those of them that it waited for a rank that came
    later, and that it moved bytes."""

    rank: int
    phase: str
    seconds: float
    waiting: float
    moving: float


class Awaited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds in a step that the other ranks together waited for ``rank``, which came last."""

    rank: int
    seconds: float


class ProfiledStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The profile of one stage, such as training: seconds by kernel, by rank and phase, and for
    whom ranks waited. ``unmatched`` collectives were not seen by all of their ranks."""

    name: str
    steps: int
    kernels: tuple[Kernel, ...]
    phases: tuple[PhaseTime, ...]
    awaited: tuple[Awaited, ...]
    clock_error: float
    unmatched: int = 0


def stages_of(ranks: Sequence[Sequence[RankProfile]]) -> tuple[ProfiledStage, ...]:
    """The stages that all ranks profiled, from what each of them saw."""
    by_name: dict[str, list[RankProfile]] = defaultdict(list)
    for own in ranks:
        for profile in own:
            by_name[profile.stage].append(profile)
    return tuple(_stage(found) for found in by_name.values() if len(found) == len(ranks))


def _stage(ranks: Sequence[RankProfile]) -> ProfiledStage:
    steps = max(1, min(profile.steps for profile in ranks))
    waits, unmatched = waiting({profile.rank: profile.meetings for profile in ranks})
    waited: dict[tuple[int, str], float] = defaultdict(float)
    moved: dict[tuple[int, str], float] = defaultdict(float)
    awaited: dict[int, float] = defaultdict(float)
    for rank, meeting, seconds, last in waits:
        waited[rank, meeting.phase] += seconds
        moved[rank, meeting.phase] += meeting.ended - meeting.began - seconds
        awaited[last] += seconds
    return ProfiledStage(
        ranks[0].stage,
        steps,
        tuple(_kernels(profile.kernels for profile in ranks)),
        tuple(
            PhaseTime(
                profile.rank,
                phase,
                seconds / steps,
                waited[profile.rank, phase] / steps,
                moved[profile.rank, phase] / steps,
            )
            for profile in ranks
            for phase, seconds in sorted(profile.phases.items(), key=_place)
        ),
        tuple(Awaited(rank, seconds / steps) for rank, seconds in sorted(awaited.items())),
        max(profile.clock_error for profile in ranks),
        unmatched,
    )


def _place(phase: tuple[str, float]) -> int:
    return PHASES.index(phase[0]) if phase[0] in PHASES else len(PHASES)


def waiting(
    meetings: Mapping[int, Iterable[Meeting]],
) -> tuple[list[tuple[int, Meeting, float, int]], int]:
    """Of every collective that all ranks of its group have seen, each rank's part: rank, meeting,
    seconds waited, and who came last; and how many meetings were seen by some ranks only.

    The ranks of a group are those that have any meeting of it.
    """
    members: dict[str, set[int]] = defaultdict(set)
    places: dict[tuple[str, int], list[tuple[int, Meeting]]] = defaultdict(list)
    for rank, own in meetings.items():
        for meeting in own:
            members[meeting.group].add(rank)
            places[meeting.group, meeting.number].append((rank, meeting))
    found: list[tuple[int, Meeting, float, int]] = []
    unmatched = 0
    for (group, _), seen in places.items():
        if len(seen) != len(members[group]):
            unmatched += len(seen)
            continue
        # Nothing moves before the last rank is there; a rank that left before (it timed out, or had
        # nothing to wait for) waited no longer than it was held.
        last, arrived = max(((r, m.arrived) for r, m in seen), key=lambda pair: pair[1])
        found.extend((rank, m, max(0.0, min(m.ended, arrived) - m.began), last) for rank, m in seen)
    return found, unmatched


def _kernels(of_ranks: Iterable[Mapping[str, Sequence[float]]]) -> Iterator[Kernel]:
    """The longest kernels first; those past ``MOST_KERNELS`` together."""
    calls: dict[str, list[float]] = defaultdict(list)
    for kernels in of_ranks:
        for name, seconds in kernels.items():
            calls[name].extend(seconds)
    names = sorted(calls, key=lambda name: -sum(calls[name]))
    kept = [(name, calls[name]) for name in names[:MOST_KERNELS]]
    if rest := [seconds for name in names[MOST_KERNELS:] for seconds in calls[name]]:
        kept.append((OTHERS, rest))
    total = sum(sum(seconds) for _, seconds in kept)
    for name, seconds in kept:
        taken = sum(seconds)
        yield Kernel(
            name,
            len(seconds),
            taken,
            taken / len(seconds),
            statistics.median(seconds),
            max(seconds),
            taken / total if total else 0.0,
        )


def by_phase(stage: ProfiledStage) -> dict[str, list[PhaseTime]]:
    """The lines of each phase, on the ranks that have it."""
    order = list(dict.fromkeys(line.phase for line in stage.phases))
    lines = sorted(stage.phases, key=lambda line: order.index(line.phase))
    return {phase: list(own) for phase, own in groupby(lines, key=lambda line: line.phase)}
