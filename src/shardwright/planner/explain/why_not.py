"""What another sharding type or kernel would do to a table, with everything else in place and with
the rest planned anew, or why there is no such option."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from shardwright.core.cluster import TIERS
from shardwright.core.errors import InputError, expected
from shardwright.core.model import ComputeKernel
from shardwright.core.option import Option
from shardwright.core.quantities import SAME_SECONDS, exact_bytes, format_seconds
from shardwright.core.sharding import TYPES
from shardwright.job.plan import Plan
from shardwright.planner.choice import Choice
from shardwright.planner.choices import Tables, table_choices
from shardwright.planner.draft import Draft, TablesDraft
from shardwright.planner.exclusion import Rules, exclusion
from shardwright.planner.explain.recompute import draft_of, unknown
from shardwright.planner.explain.replan import Replanned, forced_table, instead, replanned
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.placing import spread
from shardwright.planner.search.space import Item, Space, shard_ranks
from shardwright.planner.search.state import SearchState
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.found import ModelOf
from shardwright.planner.strategy.spacing import space_of
from shardwright.planner.tally import Placed

IN_PLACE = "everything else in place"
KERNELS: tuple[str, ...] = typing.get_args(ComputeKernel)
WANTED = (*TYPES, *KERNELS)
POWER = 6.0  # by which the search weighs its worst ranks first

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


@dataclass(frozen=True, slots=True)
class Trial:
    """The plan with one thing changed, which ``option`` says in words."""

    option: str
    draft: Draft
    tier: str
    rank: int
    needed: int
    capacity: int

    @property
    def missing(self) -> int:
        return max(self.needed - self.capacity, 0)

    @property
    def key(self) -> tuple[int, float]:
        return self.missing, self.draft.max_rank_seconds


def why_not_table(
    plan: Plan, name: str, wanted: str, again: ModelOf | None, watch: Watch
) -> WhyNot:
    """Try ``wanted`` for one table, on the least busy ranks that it fits, then plan anew with it.

    :raises InputError: there is no such table, type or kernel.
    """
    index = next((i for i, t in enumerate(plan.tables) if name in (t.name, t.fqn)), None)
    if index is None:
        raise unknown(plan, name)
    if wanted not in WANTED:
        raise InputError(expected("--why-not", f"one of {', '.join(WANTED)}", f"'{wanted}'"))
    draft = draft_of(plan)
    table = plan.tables[index]
    chosen = table.sharding_type if wanted in TYPES else table.compute_kernel

    def answer(verdict: Verdict, reason: str, **more: typing.Any) -> WhyNot:
        return WhyNot(table.name, chosen, wanted, verdict, reason, **more)

    if wanted == chosen:
        return answer("chosen", f"{wanted} is what was chosen.")
    problem = _with_slow_kernels(draft.problem)
    choices, reason = _choices(problem, index, wanted)
    if not choices:
        return answer("impossible", f"{wanted} is not possible: {reason}.")
    trials, reason = _trials(draft, problem, index, choices)
    watch.over()
    forced = forced_table(plan, index, _field(wanted), wanted)
    anew = replanned(
        plan, forced, lambda found: _words(found.tables[index].choice), wanted, again, watch
    )
    if not trials:
        text = f"{wanted} is not possible with {IN_PLACE}: {reason}."
        return answer("impossible", text, replanned=anew)
    best = min(trials, key=lambda trial: trial.key)
    verdict, reason = verdict_of(draft, best, wanted)
    return answer(
        verdict,
        reason,
        option=best.option,
        seconds=best.draft.max_rank_seconds,
        missing=best.missing,
        replanned=anew,
    )


def _field(wanted: str) -> str:
    """The key of a table that allows types or kernels."""
    return "sharding_types" if wanted in TYPES else "compute_kernels"


def _with_slow_kernels(problem: Problem) -> Problem:
    """The problem with kernels in host memory too, where the search could do without them."""
    if problem.slow or problem.model.is_trained:
        return problem
    return make_problem(problem.job, problem.model, slow=True)


def _choices(problem: Problem, index: int, wanted: str) -> tuple[tuple[Choice, ...], str]:
    """The choices that are ``wanted``, and why there are none.

    What a search looks at on request only is requested here.
    """
    table = problem.model.tables[index]
    rules = Rules(problem.job, problem.context, problem.model.is_trained)
    reason = exclusion(rules, table, wanted)
    found = tuple(c for c in problem.tables[index] if _is(c, wanted))
    if reason or found:
        return (() if reason else found), reason
    given = {_field(wanted): (wanted,)}
    named = msgspec.structs.replace(table, **given)
    model = msgspec.structs.replace(problem.model, tables=(named,))
    try:
        asked = table_choices(model, problem.job, problem.context, slow=True)[0]
    except InputError as error:
        return (), str(error)
    found = tuple(msgspec.structs.replace(c, table=table) for c in asked if _is(c, wanted))
    return found, "" if found else f"no option of this table is {wanted}"


def _is(choice: Choice, wanted: str) -> bool:
    return wanted in (choice.option.sharding_type, choice.option.compute_kernel)


def _trials(
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
    trials = []
    for number, option in enumerate(item.options):
        slots = spread(state, 0, number)
        if slots is not None:
            placed = list(draft.tables)
            for member, table in enumerate(item.tables):
                ranks = shard_ranks(option, member, slots)
                placed[table] = Placed(option.choices[member], ranks)
            member = item.tables.index(index)
            changed = dataclasses.replace(draft, tables=tuple(placed))
            before = draft.tables[index].choice.option
            trials.append(trial(changed, _words(option.choices[member], before)))
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
    neighbours = {t for other in item.apart_from for t in space.items[other].tables}
    allowed = np.ones(space.ranks, bool) if item.allowed is None else item.allowed.copy()
    for table in neighbours:
        allowed[list(draft.tables[table].ranks)] = False
    alone = Item(item.tables, item.options, allowed)
    one = Space((alone,), space.ranks, space.group, draft.room, constrained=True)
    state = SearchState(one, max(draft.max_rank_seconds, 1e-12), POWER)
    state.load, state.memory = load, memory
    return state


def trial(changed: Draft, option: str) -> Trial:
    """A changed draft with the rank and the memory that it fills most."""
    problem = changed.problem
    if isinstance(changed, TablesDraft):
        found = [
            (size - most, tier, rank, size, most)
            for tier, most in zip(TIERS, problem.capacity, strict=True)
            for rank, size in enumerate(changed.tier_bytes[tier])
        ]
        _, tier, rank, size, most = max(found, key=lambda f: (f[0] > 0, f[3] / max(f[4], 1)))
        return Trial(option, changed, tier, rank, size, most)
    assert isinstance(changed, StepDraft)
    tier = "ddr" if problem.cluster.compute_device == "cpu" else "hbm"
    rank = changed.peak_bytes.index(max(changed.peak_bytes))
    return Trial(option, changed, tier, rank, changed.demand, problem.decisive_capacity)


def verdict_of(draft: Draft, best: Trial, wanted: str) -> tuple[Verdict, str]:
    """Whether ``best`` fits and what it does to the slowest rank of ``draft``, in a sentence."""
    how = best.option.replace(f"{wanted}, ", "")
    what = f"{wanted if how == wanted else f'{wanted} ({how})'} with {IN_PLACE}"
    where = f"rank {best.rank}"
    filled = f"{exact_bytes(best.needed)} of {best.capacity:,} B {best.tier.upper()}"
    if best.missing:
        return "does not fit", (
            f"{what} does not fit: {where} would need {filled}, {best.missing:,} B too much."
        )
    before, after = draft.max_rank_seconds, best.draft.max_rank_seconds
    fits = f"{what} fits ({where} is the fullest with {filled})"
    if abs(after - before) <= SAME_SECONDS * before:
        return "as good", f"{fits} and is as good: {format_seconds(before)} per step either way."
    verdict: Verdict = "slower" if after > before else "faster"
    return verdict, f"{fits} and is {verdict}: {instead(before, after)}."


def _words(choice: Choice, before: Option | None = None) -> str:
    """The option in words: type, kernel, how it is cut, and the kernel that it had ``before``."""
    option = choice.option
    run = option.runs[0]
    shards = f"{option.count} x " if option.count > 1 else ""
    cut = f"{shards}{run.rows:,} x {run.columns}"
    changed = before is not None and before.compute_kernel != option.compute_kernel
    was = f"; its kernel was {before.compute_kernel}" if before and changed else ""
    return f"{option.sharding_type}, {option.compute_kernel}, {cut}{was}"
