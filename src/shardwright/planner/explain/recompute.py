"""The draft a plan was written from, made again from the job and constants stored in it."""

# A plan is a file: it may be old, cut, or changed by hand. Before one of its numbers is explained
# all of them are made again and compared, for a derivation that ends in another number than the
# plan has explains nothing. The search is not run again; what it claims to have proven is checked
# as a proof.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.errors import InputError, MismatchError, ShardwrightError, there_are
from shardwright.core.model import ModelSpec
from shardwright.core.placement import Roles, describe
from shardwright.core.recording import Recording, check_recording
from shardwright.core.timeline import decode
from shardwright.job.job import Job, checkpointing_of
from shardwright.job.model_of_job import placed_tables
from shardwright.job.plan import Plan, TablePlan, UnitPlan
from shardwright.job.tables import check_constraints, check_tables
from shardwright.planner.choice import Choice, Placed
from shardwright.planner.choices import offers_slow, price
from shardwright.planner.draft import Draft, TablesDraft
from shardwright.planner.explain.explanation import same
from shardwright.planner.planner import assemble, bound_of
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.proof import is_proven
from shardwright.planner.statistics.tables import as_planned, ranks_of
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.tables import bounded_space
from shardwright.planner.unit_choice import UnitChoice
from shardwright.planner.units import UnitSpace, cut_evenly
from shardwright.planner.variation import ModelOf, changed

RECOMPUTED = (
    "ranks",
    "tables",
    "units",
    "prefetch",
    "blocks",
    "reserved",
    "needed",
    "assumptions",
    "max_rank_seconds",
    "lower_bound_seconds",
    "gap",
)
AGAIN = "Make the plan again with this version."


def draft_of(plan: Plan) -> Draft:
    """The draft a plan was written from; raises MismatchError if its numbers come out otherwise."""
    found = priced_again(plan)
    _check(plan, found)
    return found


def priced_again(plan: Plan) -> Draft:
    """What a plan chose, at the prices of its job's constants, which may be others than its own."""
    problem = problem_of(plan)
    same("plan: tables", [t.name for t in plan.tables], [t.name for t in problem.model.tables])
    members = [name for unit in plan.units for name in unit.members]
    same("plan: units", members, [name for u in problem.model.units for name in u.members])
    _check_cut(plan, problem.unit_space)
    tables = tuple(_placed(problem, i, chosen) for i, chosen in enumerate(plan.tables))
    units = tuple(choice_of(unit, problem.unit_space) for unit in plan.units)
    draft = StepDraft(problem, tables, units, plan.prefetch)
    return draft if problem.model.is_trained else TablesDraft(problem, tables, units)


def unit_of(plan: Plan, name: str) -> UnitPlan | None:
    """The unit of a ``name``: its own, or that of a module or tensor of it; a module that has
    tensors of several units is none's."""
    for unit in plan.units:
        if name in (unit.name, *unit.members, *unit.modules, *unit.tensors):
            return unit
    inside = [unit for unit in plan.units if any(t.startswith(f"{name}.") for t in unit.tensors)]
    return inside[0] if len(inside) == 1 else None


def unknown(plan: Plan, name: str) -> InputError:
    """Of a name that no table and no unit of the plan has."""
    known = [u.name for u in plan.units] + [t.name for t in plan.tables]
    remedy = there_are(name, known)
    return InputError("--tensor or --unit", "a table or unit of the plan", f"'{name}'", remedy)


def problem_of(plan: Plan) -> Problem:
    """The plan's job with every choice that its search had."""
    try:
        check_tables(plan.job.tables, "job", plan.job.model.kind)
        check_constraints(plan.job.planner.constraints, placed_tables(plan.job), "job")
        if plan.recording is not None:
            check_recording(plan.recording)
            _check_batch(plan.job, plan.recording)
        return _problem(plan, plan.job, plan.model)
    except ShardwrightError as error:
        wanted = "the job that the plan was made from"
        raise MismatchError("plan: job", wanted, f"'{error}'", AGAIN) from None


def _check_batch(job: Job, recording: Recording) -> None:
    """The inputs of a step of text were tokens and targets of the job's batch. What a function of
    the user's own makes of a batch, its recording alone knows."""
    if job.model.traits.reads_text:
        tokens = 2 * job.batch.size * job.batch.sequence * INDEX_BYTES
        same("plan: bytes of the batch", recording.inputs, tokens)


def recorded_with(plan: Plan, policy: str, again: ModelOf | None) -> Problem:
    """The plan's problem with a step that ``again`` records with another checkpointing policy."""
    job = changed(plan.job, {"planner.dense.checkpointing": (policy,)})
    return _problem(plan, job, model_recorded(plan, job, again))


def _problem(plan: Plan, job: Job, model: ModelSpec) -> Problem:
    """As a plan's search saw it: of what perhaps fits only where nothing did for sure."""
    # A plan that only perhaps fits was searched with less asked of it, and its numbers follow from
    # that.
    sure = plan.verdict != "perhaps"
    return make_problem(job, model, slow=plan.search.slow_kernels, sure=sure)


def model_recorded(plan: Plan, job: Job, again: ModelOf | None) -> ModelSpec:
    """The plan's model as ``again`` records it for ``job``, the plan's with one other policy.

    ShardwrightError where it is not recorded here, or is no longer the plan's model.
    """
    where = f"plan: its model with checkpointing '{checkpointing_of(job)[0]}'"
    if again is None:
        raise InputError(where, "a way to record it", "none")
    model = again(job)
    bare = (msgspec.structs.replace(each, bucket_size=0) for each in (plan.model, model))
    own, its = ([(u.name, u.tensors) for u in each.units] for each in bare)
    if own != its:
        raise MismatchError(where, "the plan's units", "others", AGAIN)
    return model


def _placed(problem: Problem, index: int, chosen: TablePlan) -> Placed:
    """A table's choice, found by type, kernel, width and number of shards, on its ranks."""
    where = f"plan: table '{chosen.name}'"
    choices = _choices(problem, index, chosen)
    counts = [shard.run.count for shard in chosen.shards]
    if not counts or min(counts) < 1:
        raise MismatchError(f"{where} shards", "runs of one shard or more", str(counts))
    wanted = _identity(chosen.sharding_type, chosen.compute_kernel, chosen.shards[0].run.columns)
    choice = next((c for c in choices if _identity_of(c) == wanted), None)
    if choice is None:
        known = ", ".join(dict.fromkeys(_identity_of(c) for c in choices))
        raise MismatchError(where, f"one of {known}", wanted, AGAIN)
    world_size = problem.cluster.world_size
    inside = all(s.rank >= 0 and s.rank + s.run.count <= world_size for s in chosen.shards)
    if sum(counts) != choice.option.count or not inside:
        wanted = f"{choice.option.count} ranks below {world_size}"
        first = [(shard.rank, shard.run.count) for shard in chosen.shards[:3]]
        raise MismatchError(f"{where} ranks", wanted, f"runs {first}")
    return Placed(choice, ranks_of(chosen))


def _choices(problem: Problem, index: int, chosen: TablePlan) -> Sequence[Choice]:
    table = problem.model.tables[index]
    # Proposers may enlarge a table's cache: then the plan has another table than its job, priced
    # anew.
    planned = as_planned(table, chosen)
    if planned == table:
        return problem.tables[index]
    cases = [(planned, choice.option) for choice in problem.tables[index]]
    return price(problem.job, problem.context, cases)


def _identity(sharding_type: str, kernel: str, columns: int) -> str:
    return f"{sharding_type} {kernel} of {columns} columns"


def _identity_of(choice: Choice) -> str:
    option = choice.option
    return _identity(option.sharding_type, option.compute_kernel, option.runs[0].columns)


def choice_of(unit: UnitPlan, space: UnitSpace) -> UnitChoice:
    """A unit's choice, found by its modules, placement and whether it reshards."""
    where = f"plan: unit '{unit.name}'"
    members = space.model.units_of(unit.members)
    alike = {(found.series or found.name, found.optimizer) for found in members}
    if len(alike) != 1:
        got = " and ".join(repr(name) for name in unit.members[:3]) or "none"
        raise MismatchError(f"{where} members", "layers of one series", got, AGAIN)
    choices = space.choices(members)
    wanted = _way(unit.roles, unit.reshard_after_forward, unit.offloaded is True)
    for choice in choices:
        if _way_of(choice) == wanted:
            return choice
    raise MismatchError(where, " or ".join(map(_way_of, choices)), wanted, AGAIN)


def _check_cut(plan: Plan, space: UnitSpace) -> None:
    """Layers share units as one of the cuts has them that the job allows."""
    found = [unit.members for unit in plan.units]
    for size in space.sizes:
        cut = (part for run in space.runs for part in cut_evenly(run, size))
        if found == [tuple(m for unit in part for m in unit.members) for part in cut]:
            break
    else:
        wanted = f"layers cut evenly into units of {' or '.join(map(str, space.sizes))} at most"
        raise MismatchError("plan: units", wanted, "another cut", AGAIN)
    if plan.prefetch not in space.prefetches:
        wanted = " or ".join(map(str, space.prefetches))
        raise MismatchError("plan: prefetch", wanted, str(plan.prefetch), AGAIN)
    ran = {unit.checkpointing for unit in plan.units if unit.checkpointed}
    picked = ("layers:", "first:")
    known = {"full" if name.startswith(picked) else name for name in checkpointing_of(plan.job)}
    if not ran <= known:
        wanted = " or ".join(sorted(known))
        raise MismatchError("plan: checkpointing", wanted, ", ".join(sorted(ran)), AGAIN)


def _way_of(choice: UnitChoice) -> str:
    return _way(choice.roles, choice.reshard, choice.offloaded)


def _way(roles: Roles, reshard: bool, offloaded: bool) -> str:
    found = ", ".join(dict.fromkeys(map(describe, roles)))
    return f"{found}{', resharded' if reshard else ''}{', offloaded' if offloaded else ''}"


def _check(plan: Plan, draft: Draft) -> None:
    """Everything that is stored must come out again."""
    if plan.cluster != draft.problem.cluster:
        wanted = "the constants of its job's preset"
        remedy = "The preset changed since; make the plan again."
        raise MismatchError("plan: cluster", wanted, "other ones", remedy)
    _check_search(plan, draft.problem)
    again = assemble(draft, bound_of(draft.problem), plan.search)
    for part in RECOMPUTED:
        stored, found = getattr(plan, part), getattr(again, part)
        same(f"plan: {part}", msgspec.to_builtins(stored), msgspec.to_builtins(found))
    same("plan: timeline", _ordered(plan), _ordered(again))


def _check_search(plan: Plan, problem: Problem) -> None:
    """What can be said of a search without running it again."""
    search = plan.search
    asked = plan.job.planner.search
    same("plan: search.name", search.name, asked)
    same("plan: search.options", search.options, sum(map(len, problem.tables)))
    if search.tried:
        least = min(t.max_rank_seconds for t in search.tried if t.max_rank_seconds is not None)
        same("plan: search.tried", least, plan.max_rank_seconds)
    if not 1 <= search.feasible <= search.proposals:
        wanted = f"from 1 to {search.proposals}, the proposals"
        raise MismatchError("plan: search.feasible", wanted, str(search.feasible))
    if not _is_proven(plan, problem):
        wanted = "what no plan takes less than"
        raise MismatchError("plan: search.proved_seconds", wanted, f"{search.proved_seconds}")


def _is_proven(plan: Plan, problem: Problem) -> bool:
    """Whether the seconds that a search proved are; what an exact one did is not done again."""
    seconds = plan.search.proved_seconds
    if not seconds or plan.job.planner.search == "exact":
        return 0 <= seconds <= plan.max_rank_seconds * (1 + 1e-6)
    if plan.job.planner.search != "bounded" or problem.model.is_trained:
        return False
    roomy = not problem.slow and offers_slow(problem.model, problem.job, problem.cluster)
    return is_proven(bounded_space(problem), seconds, roomy=roomy)


def _ordered(plan: Plan) -> list[Any]:
    """Events in an order that no rounding of seconds can change."""
    if not all(0 < run.count <= plan.world_size for run in plan.timeline):
        raise MismatchError("plan: timeline", f"runs of 1 to {plan.world_size} ranks", "another")
    # Seconds come last in an event and may differ in their last bits: what stands before them
    # orders it.
    events: list[Any] = msgspec.to_builtins(decode(plan.timeline))
    return sorted(events, key=lambda event: event[:6])
