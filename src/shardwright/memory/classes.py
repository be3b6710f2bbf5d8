"""A class of ranks as a result: its peaks by phase and category, and how sure they are."""

from __future__ import annotations

from shardwright.core.footprint import Certainty, PhasePeak, RankMemory
from shardwright.core.timeline import Kind
from shardwright.memory.ledger import Ledger
from shardwright.memory.rank_step import MakeMachine, RankStep

MODELLED: tuple[Kind, ...] = ("activation", "temporary", "output")  # what kernels decide


def rank_memory(
    name: str,
    ranks: int,
    coordinates: dict[str, int],
    step: RankStep,
    make: MakeMachine,
    *,
    exact: bool,
) -> RankMemory:
    """Run a steady step of the class; ``exact`` where kernels are those of the trace."""
    heap = Ledger()
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
        certainty={kind: certainty(kind, exact) for kind in worst.by_category},
        phases=phases,
    )


def certainty(kind: Kind, exact: bool) -> Certainty:
    """How sure a figure of a kind is."""
    return "modelled" if kind in MODELLED and not exact else "exact"
