"""What a step needs of its device: its live bytes, what an allocator holds for them, and what
torch does not allocate.

Only this says whether a draft fits, so that `plan`, `memory` and `fit` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.core.footprint import Alive, RankMemory, needs_of
from shardwright.core.timeline import Kind, stretches
from shardwright.heap.allocator import AllocatorSettings
from shardwright.heap.classes import MODELLED, RankClass, Setting, rank_memories
from shardwright.job.job import memory_of

if TYPE_CHECKING:
    from shardwright.planner.step_draft import StepDraft

# What depends on which ids come, of which a plan assumes that they spread evenly.
OF_IDS: tuple[Kind, ...] = ("communication", "temporary")
MOST_NAMED = 4  # stretches of ranks in the name of a class


def needs(draft: StepDraft, enough: int | None = None) -> tuple[int, int]:
    """The least and the most bytes that the rank which asks most needs of its device; not all of
    the most where that is more than ``enough``."""
    extras = draft.problem.extras
    beside = sum(extra.high for extra in extras)
    ranks = draft.memories(None if enough is None else enough - beside)
    all_needs = [needs_of(rank, ranks, extras) for rank in ranks]
    return max(least for least, _ in all_needs), max(most for _, most in all_needs)


def memories(
    draft: StepDraft, *, details: bool = False, named: str = "", enough: int | None = None
) -> tuple[RankMemory, ...]:
    """Ranks that are loaded alike are one class; each runs its step. What allocators hold beyond
    ``enough`` is not looked at, where that is given."""
    on_gpu = draft.problem.on_accelerator
    setting = Setting(
        draft.machine,
        draft.sharding,
        on_gpu,
        AllocatorSettings.parse(memory_of(draft.problem.job).allocator),
        draft.problem.decisive_capacity,
        modelled=(*(MODELLED if on_gpu else ()), *(OF_IDS if draft.tables else ())),
        fine=True,
        enough=enough,
    )
    classes = [
        RankClass(
            class_name(ranks, draft.ranks),
            len(ranks),
            {"rank": ranks[0]},
            draft.rank_step(load),
            {
                name.rpartition(".")[0]: nbytes
                for (_, kind, name), nbytes in draft.tables_exact[ranks[0]].items()
                if kind == "weight"
            },
            [
                Alive(kind, name.removesuffix(".weight"), kind, nbytes)
                for kind, name, nbytes in draft.kept(draft.exact_of(ranks[0]))
                if nbytes
            ],
        )
        for load, ranks in draft.classes
    ]
    return rank_memories(classes, setting, details=details, named=named)


def class_name(ranks: Sequence[int], world_size: int) -> str:
    """Who they are: ``all ranks``, ``rank 3``, ``ranks 0-2, 5``; the first is in no other class."""
    if len(ranks) == world_size:
        return "all ranks"
    runs = [str(a) if n == 1 else f"{a}-{a + n - 1}" for a, n in stretches(ranks)]
    more = ", ..." if len(runs) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs[:MOST_NAMED])}{more}"
