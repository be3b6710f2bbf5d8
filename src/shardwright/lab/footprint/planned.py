"""The memory of a job that is planned: its plan's, class of ranks by class of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.core.footprint import Alive, Footprint, RankMemory
from shardwright.core.job import Job, degrees_of, memory_of
from shardwright.core.optimizers import trained
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import EXACT_KINDS, Kind, stretches
from shardwright.lab.footprint.classes import (
    RankClass,
    Setting,
    assumptions_on_gpu,
    rank_memories,
    settings_of,
)
from shardwright.lab.footprint.outside import outside
from shardwright.lab.recordings import found_for
from shardwright.lab.with_tables import Recorded
from shardwright.memory.allocator import AllocatorSettings
from shardwright.memory.results import MODELLED
from shardwright.planner import shortage
from shardwright.planner.draft import Draft
from shardwright.planner.planner import watch_of
from shardwright.planner.search.watch import Hear
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import smallest

# What depends on which ids come, of which a plan assumes that they spread evenly.
OF_IDS: tuple[Kind, ...] = ("communication", "temporary")
MOST_NAMED = 4  # stretches of ranks in the name of a class


def planned(
    job: Job,
    *,
    details: bool = False,
    rank: str = "",
    hear: Hear | None = None,
    record: Recorded | None = None,
) -> Footprint:
    """The memory of the plan of ``job``; where none fits, of the draft that asks least of its
    fullest rank. NoPlanError where tables alone do not fit; arguments are those of ``footprint``.
    """
    watch = watch_of(job, hear)
    found = found_for(job, watch, record)
    problem, draft = found.problem, found.draft
    source = "To the byte what the job's plan foresees (shardwright plan)."
    if watch.cut_short:
        source += f" Not searched to its end: {watch.cut_short}."
    if draft is None and problem.model.is_trained:
        source = "No plan was found that fits: this is what asks least of the fullest rank."
        draft = smallest(problem)
    if draft is None:
        raise shortage.error(found, watch)
    whole, room = problem.cluster.memory_per_rank, problem.decisive_capacity
    if found.draft is not None and isinstance(draft, StepDraft):
        room = whole
    elif room < whole:
        source += f" Its budget is what the reservation leaves of {format_bytes(whole)}."
    world, assumptions = problem.cluster.world_size, list(problem.assumptions)
    device = memory_of(problem.job).lowering or problem.cluster.compute_device
    units = problem.model.units
    policy = next((unit.checkpointing for unit in units if unit.checkpointed), "none")
    on_gpu = device == "cuda" and problem.model.is_trained
    if isinstance(draft, StepDraft):
        recording = problem.chunk.recording
        assumptions += [*trained(problem.job.train.optimizer).assumptions(), *recording.notes]
        assumptions += assumptions_on_gpu([recording.operators]) if on_gpu else []
        ranks = _stepped(draft, on_gpu, room, details, rank)
    else:
        ranks = tuple(_counted(draft))
    return Footprint(
        model=job.model.name,
        parameters=sum(tensor.numel for tensor in problem.model.tensors),
        world_size=world,
        parallel={},
        settings=settings_of(problem.job, device if problem.model.is_trained else "", policy),
        ranks=ranks,
        capacity=room,
        outside=outside(degrees_of(problem.job, world), on_gpu),
        assumptions=tuple(dict.fromkeys(assumptions)),
        source=source,
    )


def _stepped(
    draft: StepDraft, on_gpu: bool, room: int, details: bool, rank: str
) -> tuple[RankMemory, ...]:
    """Ranks that are loaded alike are one class; each runs its step."""
    setting = Setting(
        draft.machine,
        draft.sharding,
        on_gpu,
        AllocatorSettings.parse(memory_of(draft.problem.job).allocator),
        room,
        modelled=(*(MODELLED if on_gpu else ()), *(OF_IDS if draft.tables else ())),
        fine=True,
    )
    classes = [
        RankClass(
            _name(ranks, draft.ranks),
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
    return rank_memories(classes, setting, details=details, named=rank)


def _counted(draft: Draft) -> Iterator[RankMemory]:
    """Of tables alone what they keep, the fullest ranks first; there is no step of them."""
    classes: dict[tuple[tuple[str, int], ...], list[int]] = {}
    totals = [draft.totals(rank) for rank in range(draft.ranks)]
    for each in totals:
        classes.setdefault(tuple(sorted(each.at_peak.items())), []).append(each.rank)
    for ranks in sorted(classes.values(), key=lambda its: -totals[its[0]].peak_bytes):
        first = totals[ranks[0]]
        yield RankMemory(
            name=_name(ranks, draft.ranks),
            ranks=len(ranks),
            coordinates={"rank": first.rank},
            peak_bytes=first.peak_bytes,
            peak_phase=first.peak_phase,
            by_category=first.at_peak,
            certainty={k: "exact" if k in EXACT_KINDS else "modelled" for k in first.at_peak},
            phases=(),
        )


def _name(ranks: Sequence[int], world_size: int) -> str:
    """Who they are: ``all ranks``, ``rank 3``, ``ranks 0-2, 5``; the first is in no other class."""
    if len(ranks) == world_size:
        return "all ranks"
    runs = [str(a) if n == 1 else f"{a}-{a + n - 1}" for a, n in stretches(ranks)]
    more = ", ..." if len(runs) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs[:MOST_NAMED])}{more}"
