"""From a job to the memory of every class of its ranks, without running it.

A job that can be planned has the memory of its plan; others are estimated without one. Both are
ranks' steps on the same heap: what differs is who says how a rank's tensors are cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET

from shardwright.core.errors import NoPlanError, check_type
from shardwright.core.footprint import Footprint, RankMemory
from shardwright.core.optimizers import trained
from shardwright.core.quantities import format_bytes
from shardwright.core.tensor import TensorSpec
from shardwright.core.timeline import EXACT_KINDS
from shardwright.estimate.recordings import found_for
from shardwright.estimate.step_time import planned_time
from shardwright.estimate.with_tables import Recorded
from shardwright.heap.allocator.replay import ASSUMPTION
from shardwright.job.job import A_JOB, Job, memory_of
from shardwright.job.memory import MemorySection
from shardwright.job.model_of_job import is_planned
from shardwright.planner import shortage
from shardwright.planner.draft import Draft, Found
from shardwright.planner.planner import watch_of
from shardwright.planner.search.watch import Hear
from shardwright.planner.step_draft import StepDraft, class_name, memories
from shardwright.planner.strategy.steps import smallest


def footprint(
    job: Job,
    *,
    details: bool = False,
    rank: str = "",
    hear: Hear | None = None,
    record: Recorded | None = None,
    ways: bool = True,
) -> Footprint:
    """The memory of every class of ranks of ``job``, without running it.

    A job that can be planned has the memory of its plan, to the byte, also where no plan fits:
    then that of the draft which asks least. Others are estimated as their ``[parallel]`` and
    ``[memory]`` say. On an accelerator the class with the highest peak is also replayed through
    the allocator. With ``details`` it has its modules, its largest tensors and a timeline;
    ``rank`` names another class to have them. ``hear`` is called in every round of a search, and
    ``record`` gives the step of a module of the user's own that is planned.
    Raises InputError for what cannot be traced or divided, naming the place, NoPlanError where
    no tables alone fit, with ``ways`` out unless nobody asks for them.
    """
    check_type(job, Job, "job", A_JOB)
    begun = time.perf_counter()
    if is_planned(job):
        found = _planned(job, details=details, rank=rank, hear=hear, record=record, ways=ways)
    else:
        from shardwright.estimate.unplanned import estimated

        found = estimated(job, details=details, rank=rank)
    return msgspec.structs.replace(found, seconds=time.perf_counter() - begun)


def _planned(
    job: Job, *, details: bool, rank: str, hear: Hear | None, record: Recorded | None, ways: bool
) -> Footprint:
    """The memory of the plan of ``job``; where none fits, of the draft that asks least of its
    fullest rank. NoPlanError where tables alone do not fit; arguments are those of ``footprint``.
    """
    watch = watch_of(job, hear)
    found = found_for(job, watch, record)
    draft = found.draft
    if draft is None and found.problem.model.is_trained:
        draft = smallest(found.problem)
    if draft is None:
        raise shortage.error(found, watch) if ways else NoPlanError("no plan found that fits")
    return footprint_of(found, draft, watch.cut_short, details=details, rank=rank)


def footprint_of(
    found: Found, draft: Draft, cut_short: str = "", *, details: bool = False, rank: str = ""
) -> Footprint:
    """The memory of a ``draft``: that of what was ``found``, or where that has none of another,
    which does not fit; ``cut_short`` says what ended the search, if anything."""
    problem, job = found.problem, found.problem.job
    source = "To the byte what the job's plan foresees (shardwright plan)."
    if cut_short:
        source += f" Not searched to its end: {cut_short}."
    if found.draft is None:
        source = "No plan was found that fits: this is the one whose highest peak is lowest."
    whole, room = problem.cluster.memory_per_rank, problem.decisive_capacity
    if room < whole:
        source += f" Its budget is what the reservation leaves of {format_bytes(whole)}."
    world, assumptions = problem.cluster.world_size, list(problem.assumptions)
    device = memory_of(job).lowering or problem.cluster.compute_device
    units = problem.model.units
    policy = next((unit.checkpointing for unit in units if unit.checkpointed), "none")
    on_gpu = problem.on_accelerator
    if isinstance(draft, StepDraft):
        recording = problem.chunk.recording
        assumptions += [*trained(job.train.optimizer).assumptions(), *recording.notes]
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
        settings=settings_of(
            job,
            device if problem.model.is_trained else "",
            (tensor for unit in units for tensor in unit.tensors),
            policy,
        ),
        ranks=ranks,
        capacity=room,
        outside=problem.extras,
        assumptions=tuple(dict.fromkeys(assumptions)),
        source=source,
        time=planned_time(draft) if isinstance(draft, StepDraft) else UNSET,
        frozen=sum(t.numel for unit in units for t in unit.tensors if t.fqn in unit.frozen)
        or UNSET,
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


def assumptions_on_gpu(operators: Iterable[Iterable[str]]) -> list[str]:
    """What is assumed of an accelerator: operators whose kernels nobody has compared take there
    what they take on a CPU."""
    from shardwright.trace.lowering import unknown_operators

    unknown = [unknown_operators(tuple(each)) for each in operators]
    return [*(f"as on a CPU: {', '.join(names)}" for names in unknown if names), ASSUMPTION]


def settings_of(
    job: Job, device: str, tensors: Iterable[TensorSpec], policy: str = ""
) -> dict[str, str]:
    """What a step is run with on ``device``, and checkpointed by a plan's ``policy``; of the rest
    what is not by default. Parameters of a module of one's own have the dtypes that these
    ``tensors`` were made in. Of tables alone, without a step on any, the batch."""
    batch = {"batch": str(job.batch.size)}
    if not device:
        return batch
    section, usual = memory_of(job), MemorySection()
    rest = ("zero", "compile", "float8", "offload", "loss", "implementation", "allocator")
    rest += ("attention", "rms_norm")
    values = {name: getattr(section, name) for name in rest}
    changed = {
        name: str(list(value) if isinstance(value, tuple) else value)
        for name, value in values.items()
        if value != getattr(usual, name)
    }
    kernels = section.megatron_settings
    if kernels and kernels.fp8_format != "none":
        changed["fp8_format"] = kernels.fp8_format
    own = " and ".join(sorted({tensor.dtype for tensor in tensors}))
    return {
        # First what most asks for: bytes and seconds hang on it.
        "param_dtype": section.param_dtype or own,
        "reduce_dtype": section.reduce_dtype or own,
        "runtime": section.runtime,
        "checkpointing": policy or section.policy,
        "lowering": device,
        "optimizer": job.train.optimizer,
        **batch,
        "sequence": str(job.batch.sequence),
        **changed,
    }
