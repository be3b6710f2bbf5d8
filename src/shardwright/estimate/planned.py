"""The memory of a job that is planned: its plan's, class of ranks by class of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.errors import NoPlanError
from shardwright.core.footprint import Footprint, RankMemory
from shardwright.core.optimizers import trained
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import EXACT_KINDS
from shardwright.estimate.recordings import found_for
from shardwright.estimate.settings import assumptions_on_gpu, settings_of
from shardwright.estimate.with_tables import Recorded
from shardwright.job.job import Job, memory_of
from shardwright.planner import shortage
from shardwright.planner.draft import Draft
from shardwright.planner.planner import watch_of
from shardwright.planner.search.watch import Hear
from shardwright.planner.step_draft import StepDraft, class_name, memories
from shardwright.planner.strategy.steps import smallest


def planned(
    job: Job,
    *,
    details: bool = False,
    rank: str = "",
    hear: Hear | None = None,
    record: Recorded | None = None,
    ways: bool = True,
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
        raise shortage.error(found, watch) if ways else NoPlanError("no plan found that fits")
    whole, room = problem.cluster.memory_per_rank, problem.decisive_capacity
    if room < whole:
        source += f" Its budget is what the reservation leaves of {format_bytes(whole)}."
    world, assumptions = problem.cluster.world_size, list(problem.assumptions)
    device = memory_of(problem.job).lowering or problem.cluster.compute_device
    units = problem.model.units
    policy = next((unit.checkpointing for unit in units if unit.checkpointed), "none")
    on_gpu = problem.on_accelerator
    if isinstance(draft, StepDraft):
        recording = problem.chunk.recording
        assumptions += [*trained(problem.job.train.optimizer).assumptions(), *recording.notes]
        assumptions += assumptions_on_gpu([recording.operators]) if on_gpu else []
        shown = details or rank
        ranks = memories(draft, details=details, named=rank) if shown else draft.memories()
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
        outside=problem.extras,
        assumptions=tuple(dict.fromkeys(assumptions)),
        source=source,
    )


def _counted(draft: Draft) -> Iterator[RankMemory]:
    """Of tables alone what they keep, the fullest ranks first; there is no step of them."""
    classes: dict[tuple[tuple[str, int], ...], list[int]] = {}
    totals = [draft.totals(rank) for rank in range(draft.ranks)]
    for each in totals:
        classes.setdefault(tuple(sorted(each.at_peak.items())), []).append(each.rank)
    for ranks in sorted(classes.values(), key=lambda its: -totals[its[0]].peak_bytes):
        first = totals[ranks[0]]
        yield RankMemory(
            name=class_name(ranks, draft.ranks),
            ranks=len(ranks),
            coordinates={"rank": first.rank},
            peak_bytes=first.peak_bytes,
            peak_phase=first.peak_phase,
            by_category=first.at_peak,
            certainty={k: "exact" if k in EXACT_KINDS else "modelled" for k in first.at_peak},
            phases=(),
        )
