"""What another sharding type or kernel would do to a table, another placement or checkpointing to a
dense unit: with everything else in place and with the rest planned anew, or why it is impossible.

The first answer is exact and cheap and says what the choice itself costs; the second says whether
the plan should have been another one, and names the key of a job that would make it so.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from shardwright.core.errors import InputError, ShardwrightError, not_one_of
from shardwright.core.model import ComputeKernel
from shardwright.core.option import Option
from shardwright.core.quantities import SAME_SECONDS, exact_bytes, format_seconds
from shardwright.core.sharding import TYPES
from shardwright.job.job import CHOSEN_FROM, Job
from shardwright.job.plan import Plan, UnitPlan
from shardwright.planner.choice import Choice, Placed
from shardwright.planner.choices import Rules, Tables, exclusion, table_choices
from shardwright.planner.draft import Draft
from shardwright.planner.explain.recompute import (
    choice_of,
    draft_of,
    recorded_with,
    unit_of,
    unknown,
)
from shardwright.planner.explain.replan import (
    STAGES,
    Replanned,
    at_stage,
    check_dtypes,
    forced_table,
    forced_unit,
    instead,
    replanned,
)
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.placing import spread
from shardwright.planner.search.space import Item, Space, shard_ranks
from shardwright.planner.search.state import SearchState
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.tables import space_of
from shardwright.planner.unit_choice import UnitChoice, unit_choices
from shardwright.planner.variation import ModelOf

IN_PLACE = "everything else in place"
KERNELS: tuple[str, ...] = typing.get_args(ComputeKernel)
WANTED = (*TYPES, *KERNELS)
PLACEMENTS = ("replicated", "sharded", "resharded", "kept", "offloaded")
WAYS = (*PLACEMENTS, *STAGES, "checkpointed", *CHOSEN_FROM)
POWER = 4.0  # a power of two, by which the search weighs its worst ranks first

Trial = tuple[str, Draft]  # the plan with one thing changed, in words and as a draft
Verdict = Literal["chosen", "impossible", "does not fit", "slower", "as good", "faster"]


@dataclass(frozen=True, slots=True)
class WhyNot:
    """What ``wanted`` would do to a table (a sharding type or a kernel) or to a unit.

    With everything else in place ``option`` is the way to do it that was tried, ``seconds`` are
    those of the slowest rank then, ``missing`` the bytes by which it does not fit. ``replanned`` is
    the plan with the rest free to move, none where ``wanted`` was chosen or a rule is against it.
    """

    name: str
    chosen: str
    wanted: str
    verdict: Verdict
    reason: str
    option: str = ""
    seconds: float | None = None
    missing: int = 0
    replanned: Replanned | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """What was chosen, and both answers in words."""
        anew = (self.replanned.reason,) if self.replanned else ()
        return (f"{self.name} is {self.chosen}.", self.reason, *anew)


def why_not(
    plan: Plan, name: str, wanted: str, again: ModelOf | None = None, watch: Watch | None = None
) -> WhyNot:
    """What ``wanted`` would do to a table or a unit: with everything else in place, and with the
    rest free to move, searched for at most ``planner.time_limit`` or 30 seconds.

    ``again`` records the model with another checkpointing policy; ``watch`` is looked at meanwhile.
    """
    watch = watch or Watch()
    is_table = any(name in (table.name, table.fqn) for table in plan.tables)
    unit = None if is_table else unit_of(plan, name)
    if unit is None:
        return _of_table(plan, name, wanted, again, watch)
    return _of_unit(plan, unit, wanted, again, watch)


def _of_table(plan: Plan, name: str, wanted: str, again: ModelOf | None, watch: Watch) -> WhyNot:
    """Try ``wanted`` for one table, on the least busy ranks that it fits, then plan anew with it.

    :raises InputError: there is no such table, type or kernel.
    """
    index = next((i for i, t in enumerate(plan.tables) if name in (t.name, t.fqn)), None)
    if index is None:
        raise unknown(plan, name)
    if wanted not in WANTED:
        raise InputError(not_one_of("--why-not", wanted, WANTED))
    draft = draft_of(plan)
    table = plan.tables[index]
    chosen = table.sharding_type if wanted in TYPES else table.compute_kernel
    answer = WhyNot(table.name, chosen, wanted, "impossible", f"{wanted} is what was chosen.")
    if wanted == chosen:
        return replace(answer, verdict="chosen")
    problem = draft.problem
    if not (problem.slow or problem.model.is_trained):  # the search could do without slow kernels
        problem = make_problem(problem.job, problem.model, slow=True)
    choices, reason = _choices(problem, index, wanted)
    if not choices:
        return replace(answer, reason=f"{wanted} is not possible: {reason}.")
    trials, reason = _moved(draft, problem, index, choices)
    watch.over()
    forced = forced_table(plan, index, _field(wanted), wanted)
    anew = replanned(
        plan, forced, lambda found: _option(found.tables[index].choice), wanted, again, watch
    )
    if not trials:
        text = f"{wanted} is not possible with {IN_PLACE}: {reason}."
        return replace(answer, reason=text, replanned=anew)
    return replace(_best(answer, draft, trials), replanned=anew)


def _of_unit(
    plan: Plan, unit: UnitPlan, wanted: str, again: ModelOf | None, watch: Watch
) -> WhyNot:
    """Try ``wanted``: for one unit a placement, for all units a stage of ZeRO, for all blocks,
    which are checkpointed alike, a policy; then plan anew with it. A policy takes another
    recording, which ``again`` makes.

    :raises InputError: there is no such way.
    """
    if wanted not in WAYS:
        raise InputError(not_one_of(f"--why-not of unit '{unit.name}'", wanted, WAYS))
    draft = draft_of(plan)
    assert isinstance(draft, StepDraft)
    choice = draft.units[plan.units.index(unit)]
    placed = _placement(choice)
    policy = f", checkpointing {unit.checkpointing}"
    chosen = placed if wanted in (*PLACEMENTS, *STAGES) else placed + policy
    is_chosen = {
        **dict.fromkeys(placed.split(", "), True),
        "checkpointed": bool(unit.checkpointed),
        unit.checkpointing: True,
        f"zero{choice.zero}": not (choice.replicated or choice.grid.twice),
    }
    answer = WhyNot(unit.name, chosen, wanted, "impossible", f"{wanted} is what was chosen.")
    if is_chosen.get(wanted):
        return replace(answer, verdict="chosen")
    reason = "it is no part that repeats"
    trials: list[Trial] = []
    try:
        if wanted in PLACEMENTS:
            trials += _placed(draft, choice, wanted)
        elif wanted in STAGES:
            trials += _staged(plan, unit, draft, at_stage(plan, plan.job, wanted))
        else:
            trials += _checkpointed(plan, unit, draft, wanted, again)
    except ShardwrightError as error:
        reason = str(error)
    if not trials:
        return replace(answer, reason=f"{wanted} is not possible: {reason}.")
    found = _best(answer, draft, trials)
    watch.over()
    forced = forced_unit(plan, unit, wanted)
    anew = replanned(plan, forced, lambda its: _lies(unit, its), wanted, again, watch)
    return replace(found, replanned=anew)


def _best(answer: WhyNot, draft: Draft, trials: Sequence[Trial]) -> WhyNot:
    """The answer with the trial that misses least, or of those that fit is fastest, beside the
    ``draft`` of the plan."""
    tried = (_judged(answer, draft, *trial) for trial in trials)
    return min(tried, key=lambda each: (each.missing, each.seconds or 0.0))


def _judged(answer: WhyNot, draft: Draft, option: str, trial: Draft) -> WhyNot:
    """Whether a trial fits and what it does to the slowest rank of ``draft``, in a sentence."""
    wanted = answer.wanted
    # Of memories that are too small the one that is over by the largest share, else the fullest
    # one.
    fullest = max(trial.fills, key=lambda its: (its.over > 0, its.needed / max(its.capacity, 1)))
    how = option.replace(f"{wanted}, ", "")
    what = f"{wanted if how == wanted else f'{wanted} ({how})'} with {IN_PLACE}"
    where = f"rank {fullest.rank}"
    filled = f"{exact_bytes(fullest.needed)} of {fullest.capacity:,} B {fullest.tier.upper()}"
    before, after = draft.max_rank_seconds, trial.max_rank_seconds
    fits = f"{what} fits ({where} needs most, {filled})"
    verdict: Verdict = "slower" if after > before else "faster"
    text = f"{fits} and is {verdict}: {instead(before, after)}."
    if fullest.over > 0:
        verdict = "does not fit"
        text = f"{what} does not fit: {where} would need {filled}, {fullest.over:,} B too much."
    elif abs(after - before) <= SAME_SECONDS * before:
        verdict = "as good"
        text = f"{fits} and is as good: {format_seconds(before)} per step either way."
    missing = max(fullest.over, 0)
    return replace(
        answer, verdict=verdict, reason=text, option=option, seconds=after, missing=missing
    )


def _field(wanted: str) -> str:
    """The key of a table that allows types or kernels."""
    return "sharding_types" if wanted in TYPES else "compute_kernels"


def _choices(problem: Problem, index: int, wanted: str) -> tuple[tuple[Choice, ...], str]:
    """The choices that are ``wanted``, and why there are none.

    What a search looks at on request only is requested here.
    """
    table = problem.model.tables[index]
    rules = Rules(problem.job, problem.model, problem.context)
    reason = exclusion(rules, table, wanted)
    found = tuple(c for c in problem.tables[index] if _is(c, wanted))
    if reason or found:
        return (() if reason else found), reason
    given = {_field(wanted): (wanted,)}
    named = msgspec.structs.replace(table, **given)
    model = msgspec.structs.replace(problem.model, tables=(named,))
    try:
        asked = table_choices(rules._replace(model=model), slow=True)[0]
    except InputError as error:
        return (), str(error)
    found = tuple(msgspec.structs.replace(c, table=table) for c in asked if _is(c, wanted))
    return found, "" if found else f"no option of this table is {wanted}"


def _is(choice: Choice, wanted: str) -> bool:
    return wanted in (choice.option.sharding_type, choice.option.compute_kernel)


def _moved(
    draft: Draft, problem: Problem, index: int, choices: Sequence[Choice]
) -> tuple[list[Trial], str]:
    """Each choice on the ranks that are least busy without the table and what goes with it."""
    tables: Tables = tuple(
        tuple(choices) if i == index else own for i, own in enumerate(problem.tables)
    )
    try:
        space = space_of(problem, tables, problem.capacity)
    except InputError as error:
        return [], f"the rules of the job leave no place for it ({error})"
    item = next(item for item in space.items if index in item.tables)
    if not item.options:
        return [], "tables that are kept together with it cannot follow"
    state = _without(draft, space, item)
    trials: list[Trial] = []
    for number, option in enumerate(item.options):
        slots = spread(state, 0, number)
        if slots is not None:
            placed = list(draft.tables)
            for member, table in enumerate(item.tables):
                ranks = shard_ranks(option, member, slots)
                placed[table] = Placed(option.choices[member], ranks)
            member = item.tables.index(index)
            changed = replace(draft, tables=tuple(placed))
            before = draft.tables[index].choice.option
            trials.append((_option(option.choices[member], before), changed))
    return trials, "" if trials else "planner.constraints leave no rank for it"


def _without(draft: Draft, space: Space, item: Item) -> SearchState:
    """The ranks as the rest of the plan leaves them, ready for ``item`` alone."""
    moved = set(item.tables)
    rest = [placed for i, placed in enumerate(draft.tables) if i not in moved]
    load, memory = np.zeros(space.ranks), np.zeros((space.ranks, 3))
    for placed in rest:
        load += placed.choice.everywhere
        for first, run, cost in placed.stretches():
            load[first : first + run.count] += cost.total_seconds
            memory[first : first + run.count] += cost.storage
    # A state of one item alone, on ranks as loaded as the rest of the plan leaves them: where that
    # item goes is then the search's own rule for the least busy ranks.
    neighbours = {t for other in item.apart_from for t in space.items[other].tables}
    allowed = np.ones(space.ranks, bool) if item.allowed is None else item.allowed.copy()
    for table in neighbours:
        allowed[list(draft.tables[table].ranks)] = False
    alone = Item(item.tables, item.options, allowed)
    one = Space((alone,), space.ranks, space.group, draft.room, constrained=True)
    state = SearchState(one, max(draft.max_rank_seconds, 1e-12), POWER)
    state.load, state.memory = load, memory
    return state


def _option(choice: Choice, before: Option | None = None) -> str:
    """The option in words: type, kernel, how it is cut, and the kernel that it had ``before``."""
    option = choice.option
    run = option.runs[0]
    shards = f"{option.count} x " if option.count > 1 else ""
    cut = f"{shards}{run.rows:,} x {run.columns}"
    was = ""
    if before and before.compute_kernel != option.compute_kernel:
        was = f"; its kernel was {before.compute_kernel}"
    return f"{option.sharding_type}, {option.compute_kernel}, {cut}{was}"


def _lies(unit: UnitPlan, draft: Draft) -> str:
    """How the modules of a unit are placed in a draft."""
    own = [each for each in draft.units if set(each.unit.members) & set(unit.members)]
    policies = (
        f"checkpointing {each.unit.checkpointing}" for each in own if each.unit.checkpointed
    )
    return " and ".join(dict.fromkeys((*map(_placement, own), *policies)))


def _placement(choice: UnitChoice) -> str:
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
    members = space.model.units_of(choice.unit.members)
    for other in unit_choices(members, space.computed, space.context):
        elsewhere = other.offloaded != (wanted == "offloaded" or choice.offloaded)
        if wanted in _placement(other).split(", ") and (other.replicated or not elsewhere):
            units = tuple(other if each is choice else each for each in draft.units)
            yield _placement(other), replace(draft, units=units)


def _staged(plan: Plan, unit: UnitPlan, draft: StepDraft, job: Job) -> Iterator[Trial]:
    """The unit and all that are sharded at another stage, that of a job, the rest as it is."""
    check_dtypes(plan)
    if plan.model.bucket_size != (job.planner.dense.bucket_size or 0):
        raise InputError("planner.dense.bucket_size", "a stage that keeps parameters whole", "3")
    problem = make_problem(job, plan.model, slow=plan.search.slow_kernels)
    space = problem.unit_space
    for reshard in (False, True) if space.context.zero == 3 else (False,):
        units = []
        for own, each in zip(plan.units, draft.units, strict=True):
            members = space.model.units_of(own.members)
            replicated = each.replicated and own is not unit
            found = unit_choices(members, space.computed, space.context)
            wanted = (replicated, reshard and not replicated, each.offloaded and not replicated)
            ways = (((c.replicated, c.reshard, c.offloaded), c) for c in found)
            units.append(next(c for way, c in ways if way == wanted))
        changed = StepDraft(problem, draft.tables, tuple(units), draft.prefetch)
        yield f"all sharded units: {_placement(units[plan.units.index(unit)])}", changed


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
            yield f"all blocks: {policy}", changed
