"""What every rank's record says, as one measurement of the run.

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

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.measurement import (
    MOST_KERNELS,
    Awaited,
    Curve,
    Kernel,
    Measurement,
    Meeting,
    PhaseTime,
    ProfiledStage,
    Quality,
    RankProfile,
    Record,
    Saved,
    Straggler,
)
from shardwright.core.timeline import PHASES, encode
from shardwright.job.plan import Plan

OTHERS = "others"  # kernels past the most that are kept
CURVE_POINTS = 500
LATE = 0.2  # of a step: a rank that is busy for so much longer than others is a straggler


def merge(
    plan: Plan,
    records: Sequence[Record],
    quality: Quality | None = None,
    validation: Quality | None = None,
) -> Measurement:
    """One measurement from every rank's record, in their order."""
    first = records[0]
    # Counted by losses, too: steps that were profiled are in neither of the others.
    steps = max(*first.memory_steps, *first.time_steps, len(first.losses), 0)
    # A step of the run takes as long as on its slowest rank, so throughput follows from that one.
    slowest = max(record.seconds_per_step for record in records)
    samples = plan.job.batch.size * plan.world_size
    return Measurement(
        schema="shardwright.measurement/1",
        plan_fingerprint=plan.fingerprint,
        world_size=plan.world_size,
        steps=steps,
        memory_steps=first.memory_steps,
        time_steps=first.time_steps,
        timeline=encode([event for record in records for event in record.events]),
        curve=_curve([record.losses for record in records], steps),
        quality=quality,
        validation=validation or UNSET,
        scores=first.scores or UNSET,
        samples_per_second=samples / slowest if slowest else 0.0,
        bad_rows=sum(record.bad_rows for record in records),
        versions=first.versions,
        machine=first.machine,
        skipped=first.skipped,
        straggler=_straggler(records),
        profile=stages_of([record.profile for record in records]) or UNSET,
        saved=_saved([record.saved for record in records if record.saved is not UNSET]),
    )


def _straggler(records: Sequence[Record]) -> Straggler | UnsetType:
    """The rank that is busiest, if that costs the others a good part of a step."""
    slowest = max(records, key=lambda record: record.busy_seconds)
    others = [record.busy_seconds for record in records if record is not slowest]
    if not others:
        return UNSET
    usual = statistics.median(others)
    # By work and not by the length of a step: a rank that waits is as slow as the one that it waits
    # for.
    if slowest.busy_seconds - usual < LATE * slowest.seconds_per_step:
        return UNSET
    return Straggler(slowest.rank, slowest.busy_seconds, usual)


def _saved(of_ranks: Sequence[Saved]) -> Saved | UnsetType:
    """Of all ranks together: all bytes, and the seconds of the slowest."""
    if not of_ranks:
        return UNSET
    return msgspec.structs.replace(
        of_ranks[0],
        nbytes=sum(own.nbytes for own in of_ranks),
        stall_seconds=max(own.stall_seconds for own in of_ranks),
        seconds=max(own.seconds for own in of_ranks),
    )


def _curve(losses: Sequence[Sequence[float]], steps: int) -> Curve:
    """The mean over ranks, in so many points; nothing where steps have no loss."""
    # Ranks of a loop of one's own may have given no losses: a mean over some would be another
    # curve.
    if any(len(own) != steps for own in losses):
        return Curve()
    means = [sum(values) / len(values) for values in zip(*losses, strict=True)]
    stride = max(1, steps // CURVE_POINTS)
    kept = range(stride - 1, steps, stride)
    return Curve(
        tuple(k + 1 for k in kept),
        tuple(sum(means[k - stride + 1 : k + 1]) / stride for k in kept),
    )


def stages_of(ranks: Sequence[Sequence[RankProfile]]) -> tuple[ProfiledStage, ...]:
    """The stages that all ranks profiled, from what each of them saw."""
    by_name: dict[str, list[RankProfile]] = defaultdict(list)
    for own in ranks:
        for profile in own:
            by_name[profile.stage].append(profile)
    # A stage that one rank has not profiled has collectives whose last arrival nobody knows.
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
        # One that not all saw began before the profile, or went on behind it; who came last cannot
        # be told.
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
