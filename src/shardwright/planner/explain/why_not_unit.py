"""What another placement or checkpointing would do to a dense unit, with everything else in place
and with the rest planned anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardwright.core.errors import InputError, ShardwrightError, expected
from shardwright.job.job import CHOSEN_FROM
from shardwright.job.plan import Plan, UnitPlan
from shardwright.planner.draft import Draft
from shardwright.planner.explain.recompute import choice_of, draft_of, recorded_with
from shardwright.planner.explain.replan import (
    STAGES,
    check_dtypes,
    forced_unit,
    replanned,
    sharing_of,
)
from shardwright.planner.explain.why_not import Trial, WhyNot, trial, verdict_of
from shardwright.planner.problem import make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.sharing import Sharing, with_sharing
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.found import ModelOf
from shardwright.planner.unit_choice import UnitChoice, unit_choices

PLACEMENTS = ("replicated", "sharded", "resharded", "kept", "offloaded")
WAYS = (*PLACEMENTS, *STAGES, "checkpointed", *CHOSEN_FROM)


def why_not_unit(
    plan: Plan, unit: UnitPlan, wanted: str, again: ModelOf | None, watch: Watch
) -> WhyNot:
    """Try ``wanted``: for one unit a placement, for all units a stage of ZeRO, for all blocks,
    which are checkpointed alike, a policy; then plan anew with it. A policy takes another
    recording, which ``again`` makes.

    :raises InputError: there is no such way.
    """
    if wanted not in WAYS:
        where = f"--why-not of unit '{unit.name}'"
        raise InputError(expected(where, f"one of {', '.join(WAYS)}", f"'{wanted}'"))
    draft = draft_of(plan)
    assert isinstance(draft, StepDraft)
    choice = draft.units[plan.units.index(unit)]
    placed = words(choice)
    policy = f", checkpointing {unit.checkpointing}"
    chosen = placed if wanted in (*PLACEMENTS, *STAGES) else placed + policy
    is_chosen = {
        **dict.fromkeys(placed.split(", "), True),
        "checkpointed": bool(unit.checkpointed),
        unit.checkpointing: True,
        f"zero{choice.zero}": not (choice.replicated or choice.grid.twice),
    }
    if is_chosen.get(wanted):
        return WhyNot(unit.name, chosen, wanted, "chosen", f"{wanted} is what was chosen.")
    reason = "it is no part that repeats"
    trials: list[Trial] = []
    try:
        if wanted in PLACEMENTS:
            trials += _placed(draft, choice, wanted)
        elif wanted in STAGES:
            trials += _staged(plan, unit, draft, sharing_of(plan, wanted))
        else:
            trials += _checkpointed(plan, unit, draft, wanted, again)
    except ShardwrightError as error:
        reason = str(error)
    if not trials:
        text = f"{wanted} is not possible: {reason}."
        return WhyNot(unit.name, chosen, wanted, "impossible", text)
    best = min(trials, key=lambda each: each.key)
    verdict, text = verdict_of(draft, best, wanted)
    watch.over()
    seconds, missing = best.draft.max_rank_seconds, best.missing
    forced = forced_unit(plan, unit, wanted)
    anew = replanned(plan, forced, lambda found: _lies(unit, found), wanted, again, watch)
    return WhyNot(unit.name, chosen, wanted, verdict, text, best.option, seconds, missing, anew)


def _lies(unit: UnitPlan, draft: Draft) -> str:
    """How the modules of a unit are placed in a draft."""
    own = [each for each in draft.units if set(each.unit.members) & set(unit.members)]
    policies = (
        f"checkpointing {each.unit.checkpointing}" for each in own if each.unit.checkpointed
    )
    return " and ".join(dict.fromkeys((*map(words, own), *policies)))


def words(choice: UnitChoice) -> str:
    """How a unit is placed: ``replicated``, or sharded, whether it reshards or stays, and where."""
    if choice.replicated:
        return "replicated"
    where = ", offloaded" if choice.offloaded else ""
    if choice.grid.replicas > 1 and choice.zero == 3:
        where = f", {'hfsdp' if choice.grid.twice else 'hsdp'}{where}"
    if choice.stays:
        return f"sharded, ZeRO-{choice.zero}{where}"
    return f"sharded, {'resharded' if choice.reshard else 'kept'}{where}"


def _placed(draft: StepDraft, choice: UnitChoice, wanted: str) -> Iterator[Trial]:
    """The unit placed as is wanted, whatever the job forces."""
    space = draft.problem.unit_space
    members = tuple(u for u in space.model.units if set(u.members) <= set(choice.unit.members))
    for other in unit_choices(members, space.computed, space.context):
        elsewhere = other.offloaded != (wanted == "offloaded" or choice.offloaded)
        if wanted in words(other).split(", ") and (other.replicated or not elsewhere):
            units = tuple(other if each is choice else each for each in draft.units)
            yield trial(dataclasses.replace(draft, units=units), words(other))


def _staged(plan: Plan, unit: UnitPlan, draft: StepDraft, sharing: Sharing) -> Iterator[Trial]:
    """The unit and all that are sharded at another stage, the rest as it is."""
    check_dtypes(plan)
    if plan.model.bucket_size != sharing.bucket_size:
        where = "planner.dense.bucket_size"
        raise InputError(expected(where, "a stage that keeps parameters whole", "3"))
    job = with_sharing(plan.job, sharing)
    problem = make_problem(job, plan.model, slow=plan.search.slow_kernels)
    space = problem.unit_space
    for reshard in (False, True) if space.context.zero == 3 else (False,):
        units = []
        for own, each in zip(plan.units, draft.units, strict=True):
            members = tuple(u for u in space.model.units if set(u.members) <= set(own.members))
            replicated = each.replicated and own is not unit
            found = unit_choices(members, space.computed, space.context)
            wanted = (replicated, reshard and not replicated, each.offloaded and not replicated)
            units.append(next(c for c in found if _ways(c) == wanted))
        changed = StepDraft(problem, draft.tables, tuple(units), draft.prefetch)
        yield trial(changed, f"all sharded units: {words(units[plan.units.index(unit)])}")


def _ways(choice: UnitChoice) -> tuple[bool, bool, bool]:
    return choice.replicated, choice.reshard, choice.offloaded


def _checkpointed(
    plan: Plan, unit: UnitPlan, draft: StepDraft, wanted: str, again: ModelOf | None
) -> Iterator[Trial]:
    """All blocks under another policy, every unit placed as it is."""
    for policy in CHOSEN_FROM[1:] if wanted == "checkpointed" else (wanted,):
        problem = recorded_with(plan, policy, again)
        units = tuple(choice_of(each, problem.unit_space) for each in plan.units)
        changed = StepDraft(problem, draft.tables, units, draft.prefetch)
        own = next(each.unit for each in units if each.unit.name == unit.name)
        if own.checkpointing == policy:
            yield trial(changed, f"all blocks: {policy}")
