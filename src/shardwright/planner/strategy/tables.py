"""The searches over tables alone: bounded, and exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.model import ModelSpec
from shardwright.core.option import column_width
from shardwright.job.job import Job
from shardwright.planner.choices import offers_slow
from shardwright.planner.draft import Found, TablesDraft
from shardwright.planner.options import USUAL_MIN_PARTITION
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search import exact
from shardwright.planner.search.bound import Relaxed, lower_bound, relaxed, starts
from shardwright.planner.search.search import Earlier, SearchOutcome, search
from shardwright.planner.search.space import Assignment, Item, ItemOption, Space
from shardwright.planner.search.watch import Watch
from shardwright.planner.search.widening import search_widening
from shardwright.planner.strategy.spacing import (
    bounded_space,
    placed_tables,
    space_of,
    with_close_columns,
)

ROUNDING = 1e-12
DEFAULT_SECONDS, LEAST_SECONDS = 60.0, 0.1  # of an exact search
WIDE_GAP, WIDE_GAP_OF_MANY = 0.01, 0.02  # above the bound (of many tables), where a rank is
NEARLY_FULL = 0.8  # of its HBM: other kernels may help though all ranks together have room


@dataclass(frozen=True)
class _Searched:
    """A problem, its space as a ``whole``, and what its search brought, which may have been a
    ``quick`` one."""

    problem: Problem
    whole: Relaxed
    outcome: SearchOutcome
    quick: bool = False

    @property
    def space(self) -> Space:
        """What was searched."""
        return self.whole.space

    @cached_property
    def draft(self) -> TablesDraft | None:
        """What was found, if it fits to the byte: the search adds doubles."""
        if self.outcome.best is None:
            return None
        draft = TablesDraft(self.problem, placed_tables(self.space, self.outcome.best), ())
        return draft if draft.fits else None


def search_tables(job: Job, model: ModelSpec, watch: Watch) -> Found:
    """The fastest plan found.

    Kernels with weights in host memory are looked at first only where they are faster or nothing
    else fits a rank, then all of them, unless memory is no matter.
    """
    problem = make_problem(job, model, slow=False)
    whole = relaxed(space_of(problem, problem.tables, problem.capacity))
    offered = offers_slow(model, job, problem.cluster)
    # Kernels with weights in host memory multiply the options. Where the bound would be the same
    # with more memory they cannot make a plan faster than it, so they are looked at only if the
    # search stays far above its bound on ranks that are nearly full.
    more = _of_all_kernels(problem) if offered and _is_short(whole) else None
    quick = more is not None
    outcome = search_widening(whole, _narrow(whole.space), watch, quick=quick, roomy=offered)
    done = _Searched(problem, whole, outcome, quick)
    if more is None and offered and _memory_matters(done):
        more = _of_all_kernels(problem)
    tried, feasible = outcome.tried, outcome.feasible
    if more is not None:
        done = _widened(done, more, watch)
        tried, feasible = tried + done.outcome.tried, feasible + done.outcome.feasible
    bound = done.outcome.bound.seconds
    proved = done.outcome.proved if done.outcome.proved > bound else 0.0
    return Found(done.problem, done.draft, bound, "bounded", tried, feasible, proved=proved)


def _of_all_kernels(problem: Problem) -> Problem | None:
    """The problem with all kernels, None where it has them."""
    more = make_problem(problem.job, problem.model, slow=True, known=problem)
    return more if _options(more) > _options(problem) else None


def _widened(done: _Searched, problem: Problem, watch: Watch) -> _Searched:
    """The search of the same problem with more options, from what was found."""
    space = space_of(problem, problem.tables, problem.capacity, done.space)
    whole = relaxed(space)
    if done.draft is None or done.outcome.best is None:
        outcome = search_widening(whole, _narrow(space), watch)
        return _Searched(problem, whole, outcome)
    best = done.outcome.best
    known = done.outcome.bound.seconds if space.has_many or not done.quick else math.inf
    earlier = Earlier(
        Assignment(_again(done.space, space, best.options), best.slots),
        known,
        _again(done.space, space, next(starts(done.whole)).tolist()),
    )
    return _Searched(problem, whole, search(whole, watch, earlier))


def _options(problem: Problem) -> int:
    return sum(map(len, problem.tables))


def _memory_matters(done: _Searched) -> bool:
    """Whether the bound, or the plan found, may be another with more memory."""
    draft, bound = done.draft, done.outcome.bound
    if draft is None or not bound.usable or _is_short(done.whole):
        return True
    hbm = max(draft.tier_bytes["hbm"]) / max(done.problem.capacity[0], 1)
    gap = WIDE_GAP_OF_MANY if done.space.has_many else WIDE_GAP
    return hbm > NEARLY_FULL and done.outcome.seconds > bound.seconds * (1 + gap)


def _is_short(whole: Relaxed) -> bool:
    """Whether the bound would be another with more memory.

    Where it is the same without a limit on the bytes of all ranks together, it holds for slower
    kernels as well: each takes as long as the fused one that fits, or longer.
    """
    space, options, bound = whole
    roomy = lower_bound(space, options, roomy=True)
    return bound.seconds > roomy.seconds * (1 + ROUNDING)


def _again(before: Space, space: Space, options: Sequence[int]) -> tuple[int, ...]:
    """The numbers of options of a space in one of more options."""
    numbers = []
    for old, item, number in zip(before.items, space.items, options, strict=True):
        wanted = _ways(old.options[number])
        numbers.append(next(n for n, o in enumerate(item.options) if _ways(o) == wanted))
    return tuple(numbers)


def _ways(option: ItemOption) -> tuple[object, ...]:
    return (option.widths, *(choice.option for choice in option.choices))


def _narrow(space: Space) -> Callable[[Item, ItemOption], bool]:
    """Whether TorchRec's planner would look at an option, one column split and no grid, and rules
    that keep tables apart leave ranks to all of them."""

    def narrow(item: Item, option: ItemOption) -> bool:
        choice = option.choices[0]
        if item.apart_from and sum(option.widths) * (len(item.apart_from) + 1) > space.ranks:
            return False
        if choice.option.traits.cuts_columns and choice.option.partition == "device":
            table = choice.table
            width = column_width(table, table.min_partition or USUAL_MIN_PARTITION)
            return choice.option.runs[0].columns == width
        return choice.option.partition != "multi_host"

    return narrow


def search_exactly(job: Job, model: ModelSpec, watch: Watch) -> Found:
    """The proven optimum, or the best of the time limit (60 s if none is given): the bounded search
    first, then HiGHS on top of it."""
    problem = make_problem(job, model, slow=True)
    space = space_of(problem, problem.tables, problem.capacity)
    # The solver alone may find nothing in its time. From a plan it has a ceiling, which cuts off
    # most of the tree, and at the end there is never less than the bounded search has.
    start = search(relaxed(space), watch)
    left = DEFAULT_SECONDS if watch.left == float("inf") else max(watch.left, LEAST_SECONDS)
    # After the options that the search knows, so that their numbers in what it found stay what they
    # are.
    space = with_close_columns(space)
    assignment, proved = exact.solve(space, start, left)
    if any(item.floor for item in space.items):
        proved = 0.0  # options that are not listed may be faster
    drafts = [
        TablesDraft(problem, placed_tables(space, found), ())
        for found in (start.best, assignment)
        if found is not None
    ]
    fitting = [draft for draft in drafts if draft.fits]
    best = min(fitting, key=lambda draft: draft.max_rank_seconds, default=None)
    bound, feasible = start.bound.seconds, len(fitting)
    return Found(problem, best, bound, "exact", start.tried + 1, feasible, proved=proved)


def tables_bound(problem: Problem) -> float:
    """No plan of these tables is faster."""
    return relaxed(bounded_space(problem)).bound.seconds
