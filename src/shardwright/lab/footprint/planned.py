"""The memory of a job that is planned: what its plan foresees of every rank."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.footprint import Footprint, PhasePeak, RankMemory
from shardwright.core.job import Job
from shardwright.core.plan import Plan, RankTotals
from shardwright.core.timeline import EXACT_KINDS, decode, phase_peaks
from shardwright.lab.recordings import plan

TABLES_ALONE = "tables"


def planned_footprint(job: Job) -> Footprint:
    """Plan the job; ranks with the same figures are one class, the fullest first."""
    made = plan(job)
    peaks: dict[int, list[PhasePeak]] = {}
    for (rank, phase), kinds in phase_peaks(decode(made.timeline)).items():
        peaks.setdefault(rank, []).append(PhasePeak(phase, sum(kinds.values()), dict(kinds)))
    classes: dict[tuple[object, ...], list[RankTotals]] = {}
    for totals in made.ranks:
        key = (totals.peak_bytes, totals.peak_phase, tuple(sorted(totals.at_peak.items())))
        classes.setdefault(key, []).append(totals)
    found = [_rank(its, peaks.get(its[0].rank, [])) for its in classes.values()]
    found.sort(key=lambda rank: -rank.peak_bytes)
    return Footprint(
        model=job.model.kind,
        parameters=_parameters(made),
        world_size=made.cluster.world_size,
        parallel={},
        settings={"runtime": "shardwright", "batch": str(job.batch.size)},
        ranks=tuple(found),
        capacity=made.cluster.memory_per_rank,
        assumptions=made.assumptions,
    )


def _rank(its: list[RankTotals], phases: Iterable[PhasePeak]) -> RankMemory:
    first = its[0]
    names = ", ".join(str(totals.rank) for totals in its[:4]) + (", ..." if len(its) > 4 else "")
    return RankMemory(
        name=f"rank {names}" if len(its) == 1 else f"ranks {names}",
        ranks=len(its),
        coordinates={"rank": first.rank},
        peak_bytes=first.peak_bytes,
        peak_phase=first.peak_phase,
        by_category=first.at_peak,
        certainty={k: "exact" if k in EXACT_KINDS else "modelled" for k in first.at_peak},
        phases=tuple(phases),
    )


def _parameters(made: Plan) -> int:
    """Elements of all parameters."""
    return sum(tensor.numel for tensor in made.model.tensors)
