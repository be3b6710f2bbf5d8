"""Figures that more than one picture needs, derived from plans and measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwright.core.categories import category
from shardwright.core.measurement import Measurement
from shardwright.core.plan import Plan
from shardwright.core.timeline import (
    EXACT_KINDS,
    PHASES,
    EventRun,
    decode,
    phase_peaks,
    phase_seconds,
)

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((category(kind), (kind,)) for kind in EXACT_KINDS),
    ("gathered and exchanged", ("gathered_weight", "unreduced_gradient", "communication", "cache")),
    ("activations", ("activation", "temporary", "output")),
    ("batch and other", ()),
)
_PART_OF = {kind: part for part, kinds in PARTS for kind in kinds}
OTHER = PARTS[-1][0]


@dataclass(frozen=True, slots=True)
class Peak:
    """A rank's fullest moment: bytes by part, every part of ``PARTS`` present."""

    rank: int
    phase: str
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Live bytes in all."""
        return sum(self.parts.values())


def parts_of(by_kind: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind gathered into the parts of ``PARTS``; unknown kinds count as other."""
    parts = {part: 0 for part, _ in PARTS}
    for kind, nbytes in by_kind.items():
        parts[_PART_OF.get(kind, OTHER)] += nbytes
    return parts


def predicted_peaks(plan: Plan) -> dict[int, Peak]:
    """Each rank's predicted peak; bytes that no kind accounts for count as other."""
    peaks: dict[int, Peak] = {}
    for totals in plan.ranks:
        parts = parts_of(totals.at_peak)
        parts[OTHER] += max(0, totals.peak_bytes - sum(parts.values()))
        peaks[totals.rank] = Peak(totals.rank, totals.peak_phase, parts)
    return peaks


def measured_peaks(measurement: Measurement) -> dict[int, Peak]:
    """Each rank's fullest phase as measured, set-up left out."""
    peaks: dict[int, Peak] = {}
    for (rank, phase), kinds in phase_peaks(decode(_steady(measurement.timeline))).items():
        peak = Peak(rank, phase, parts_of(kinds))
        if rank not in peaks or peak.nbytes > peaks[rank].nbytes:
            peaks[rank] = peak
    return peaks


def step_seconds(timeline: Iterable[EventRun]) -> dict[int, dict[str, float]]:
    """Seconds by rank and phase of one training step, set-up left out, phases in their order."""
    found = phase_seconds(decode(_steady(timeline)))
    ranks = sorted({rank for rank, _ in found})
    return {r: {p: found[r, p] for p in PHASES if (r, p) in found} for r in ranks}


def slowest(seconds: Mapping[int, Mapping[str, float]]) -> int | None:
    """The rank whose phases take longest in all; None without any."""
    return max(seconds, key=lambda rank: sum(seconds[rank].values()), default=None)


def _steady(timeline: Iterable[EventRun]) -> list[EventRun]:
    return [run for run in timeline if run.event.step != 0]
