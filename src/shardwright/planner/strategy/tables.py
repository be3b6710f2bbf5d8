"""The searches over tables alone: bounded, and exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from shardwright.core.errors import InputError
from shardwright.core.model import ModelSpec
from shardwright.core.option import Option, column_width
from shardwright.job.job import Job
from shardwright.planner import profiles
from shardwright.planner.choice import Choice, Placed
from shardwright.planner.choices import Tables, offers_slow, uncollected
from shardwright.planner.draft import Found, TablesDraft
from shardwright.planner.options import USUAL_MIN_PARTITION
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search import exact
from shardwright.planner.search.bound import Relaxed, lower_bound, relaxed, starts
from shardwright.planner.search.search import Earlier, SearchOutcome, search
from shardwright.planner.search.space import (
    Assignment,
    Bools,
    Item,
    ItemOption,
    Space,
    floor_option,
    item_option,
    open_slots,
    shard_ranks,
)
from shardwright.planner.search.watch import Watch
from shardwright.planner.search.widening import search_widening

# Tables come in an order that no job's listing changes (`Problem.order`): a search takes the first
# of what is as good, so that with the job's own order two listings of the same tables would have
# two plans. What rules a table out of a rank is said here, once; the search knows it only as ranks
# that are allowed and items that lie apart.


MAX_COMBINATIONS = 256  # of kernels of tables that are kept together


def bounded_space(problem: Problem) -> Space:
    """The space of a bound: all that the job's search may choose; proposers may enlarge caches."""
    tables = problem.tables
    if problem.job.planner.search == "proposers":
        tables = profiles.torchrec.bounded_tables(problem)
    return space_of(problem, tables, problem.capacity)


@uncollected()
def space_of(
    problem: Problem, tables: Tables, capacity: tuple[int, int, int], known: Space | None = None
) -> Space:
    """The choices of ``tables`` (in the job's order) under the problem's rules; the options of
    ``known``, a space of the same choices and others, are taken over."""
    cluster, rules = problem.cluster, problem.job.planner.constraints
    number = {table.name: index for index, table in enumerate(problem.model.tables)}
    groups = {number[names[0]]: tuple(number[n] for n in names) for names in rules.together}
    inside = {member: first for first, group in groups.items() for member in group}
    members: list[tuple[int, ...]] = []
    item_of: dict[int, int] = {}
    for table in problem.order:
        # A group that is kept together is one item and stands where its first member comes in the
        # order.
        first = inside.get(table, table)
        if first not in item_of:
            item_of[first] = len(members)
            members.append(groups.get(first, (table,)))
        item_of[table] = item_of[first]
    apart: dict[int, set[int]] = {}
    crowd: dict[int, int] = {}  # items in the largest group that an item is in
    for names in rules.apart:
        homes = {item_of[number[name]] for name in names}
        for home in homes:
            apart.setdefault(home, set()).update(homes - {home})
            crowd[home] = max(crowd.get(home, 1), len(homes))
    items = []
    for index, group in enumerate(members):
        allowed = _allowed(problem, group)
        made = known.items[index].options if known else ()
        its = [tables[table] for table in group]
        options, floor = _options(its, cluster.world_size, cluster.group, made)
        # Of a group that is kept apart each of the others needs a rank at least. So what lies on
        # all ranks is dropped here, and no search has to look out for it.
        room = cluster.world_size - crowd.get(index, 1) + 1  # ranks that the others leave
        options = tuple(option for option in options if _may_lie(option, allowed, room))
        if not options:
            where = f"planner.constraints of '{problem.model.tables[group[0]].name}'"
            wanted = "a sharding type that leaves room for its rules"
            found = "only types that use more ranks"
            raise InputError(where, wanted, found, "Allow table_wise or column_wise.")
        items.append(Item(group, options, allowed, tuple(sorted(apart.get(index, ()))), floor))
    constrained = bool(apart) or any(item.allowed is not None for item in items)
    return Space(tuple(items), cluster.world_size, cluster.group, capacity, constrained)


def _allowed(problem: Problem, group: Sequence[int]) -> Bools | None:
    """The ranks that every table of a group may use; None if none is pinned."""
    pinned = problem.job.planner.constraints.ranks
    mask: Bools | None = None
    for table in group:
        ranks = pinned.get(problem.model.tables[table].name)
        if ranks is not None:
            own = np.zeros(problem.cluster.world_size, bool)
            own[list(ranks)] = True
            mask = own if mask is None else mask & own
    # A rule that allows every rank is none, and spares the search its slower way with rules.
    return None if mask is None or mask.all() else mask


def _may_lie(option: ItemOption, allowed: Bools | None, room: int) -> bool:
    """Whether a block finds ranks that are ``allowed``, and others are left beside ``room``."""
    width = option.widths[0]
    if width > room:
        return False
    return allowed is None or bool(open_slots(allowed, width).any())


def _options(
    choices: Sequence[tuple[Choice, ...]], ranks: int, group: int, made: Sequence[ItemOption]
) -> tuple[tuple[ItemOption, ...], ItemOption | None]:
    """One table's choices, or those that put several whole tables side by side; and what no other
    combination is below where there are too many to list."""
    if len(choices) == 1:
        known: dict[int, list[ItemOption]] = {}
        for option in made:
            known.setdefault(id(option.choices[0]), []).append(option)
        found = _undominated(choices[0])
        ways = (known.get(id(choice)) or _ways(choice, ranks, group) for choice in found)
        return tuple(itertools.chain.from_iterable(ways)), None
    whole = [[c for c in own if c.option.traits.whole] for own in choices]
    if math.prod(map(len, whole)) <= MAX_COMBINATIONS:
        return tuple(item_option(c, ranks, group) for c in itertools.product(*whole)), None
    kernels = dict.fromkeys(c.option.compute_kernel for own in whole for c in own)
    options = []
    for kernel in kernels:
        its = []
        for own in whole:  # one of the kernel, or where there is none the first
            its.append(next((c for c in own if c.option.compute_kernel == kernel), own[0]))
        options.append(item_option(its, ranks, group))
    return tuple(options), floor_option(
        [[item_option([c], ranks, group) for c in own] for own in whole]
    )


def _ways(choice: Choice, ranks: int, group: int) -> Iterator[ItemOption]:
    """A choice as blocks. Columns on one host may lie on all its ranks, on a half, a quarter..."""
    option = choice.option
    if not _columns_of_a_host(option):
        yield item_option((choice,), ranks, group)
        return
    # Only parts of a host that divide it: blocks begin at multiples of their width, and a block
    # that lay across two hosts would not be on one.
    for spread in range(min(option.count, group), 0, -1):
        if group % spread == 0:
            yield item_option((choice,), ranks, group, (spread,))


def with_close_columns(space: Space) -> Space:
    """The space with every way to lay columns that keep to one host there, after the ways that are
    in it."""
    items = []
    for item in space.items:
        close = {
            id(o.choices[0]): msgspec.structs.replace(
                o, widths=(1,) * o.choices[0].option.count, close=True
            )
            for o in item.options
            if _columns_of_a_host(o.choices[0].option)
        }
        items.append(replace(item, options=(*item.options, *close.values())))
    return replace(space, items=tuple(items))


def _columns_of_a_host(option: Option) -> bool:
    return option.traits.cuts_columns and option.partition == "host"


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Without what costs the same as a choice of the same shards that may go to more ranks."""
    freer = {c.option.traits.freer for c in choices}
    costs = {
        (c.option.sharding_type, c.option.compute_kernel, c.option.runs): c.costs
        for c in choices
        if c.option.sharding_type in freer
    }
    return [
        c
        for c in choices
        if c.option.traits.freer is None
        or costs.get((c.option.traits.freer, c.option.compute_kernel, c.option.runs)) != c.costs
    ]


def assignment_of(space: Space, placed: Sequence[Placed]) -> Assignment | None:
    """The tables of a draft in a space; None where it does not list what was chosen."""
    options, slots = [], []
    for item in space.items:
        first = placed[item.tables[0]]
        chosen = tuple(placed[table].choice for table in item.tables)
        ways = (
            (number, its)
            for number, option in enumerate(item.options)
            if option.choices == chosen
            for its in [_slots(option, first.ranks)]
            if tuple(shard_ranks(option, 0, its)) == tuple(first.ranks)
        )
        number, its = next(ways, (-1, ()))
        if number < 0:
            return None
        options.append(number)
        slots.append(its)
    return Assignment(tuple(options), tuple(slots))


def _slots(option: ItemOption, ranks: Sequence[int]) -> tuple[int, ...]:
    """The first rank of each of the blocks of an option whose shards lie on ``ranks``, if it is
    laid like that."""
    starts = itertools.accumulate(option.widths[:-1], initial=0)
    return tuple(ranks[start] for start in starts)


def placed_tables(space: Space, found: Assignment) -> tuple[Placed, ...]:
    """Every table with its choice and ranks, in the job's order."""
    placed: dict[int, Placed] = {}
    for item, number, slots in zip(space.items, found.options, found.slots, strict=True):
        option = item.options[number]
        for member, table in enumerate(item.tables):
            ranks = shard_ranks(option, member, slots)
            placed[table] = Placed(option.choices[member], ranks)
    return tuple(placed[table] for table in sorted(placed))


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
    counts = [sum(map(len, each.tables)) for each in (problem, more)]
    return more if counts[1] > counts[0] else None


def _widened(done: _Searched, problem: Problem, watch: Watch) -> _Searched:
    """The search of the same problem with more options, from what was found."""
    space = space_of(problem, problem.tables, problem.capacity, done.space)
    whole = relaxed(space)
    if done.draft is None or done.outcome.best is None:
        outcome = search_widening(whole, _narrow(space), watch)
        return _Searched(problem, whole, outcome)
    best = done.outcome.best
    known = done.outcome.bound.seconds if space.has_many or not done.quick else math.inf
    first = Assignment(_again(done.space, space, best.options), best.slots)
    earlier = Earlier(first, known, _again(done.space, space, next(starts(done.whole)).tolist()))
    return _Searched(problem, whole, search(whole, watch, earlier))


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
        wanted = _key(old.options[number])
        numbers.append(next(n for n, o in enumerate(item.options) if _key(o) == wanted))
    return tuple(numbers)


def _key(option: ItemOption) -> tuple[object, ...]:
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
