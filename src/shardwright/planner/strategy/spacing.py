"""From a problem to the space of its search, and from an assignment back to placed tables."""

# Tables come in an order that no job's listing changes (`Problem.order`): a search takes the first
# of what is as good, so that with the job's own order two listings of the same tables would have
# two plans. What rules a table out of a rank is said here, once; the search knows it only as ranks
# that are allowed and items that lie apart.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from shardwright.core.errors import InputError
from shardwright.core.option import Option
from shardwright.planner import profiles
from shardwright.planner.choice import Choice, Placed
from shardwright.planner.choices import Tables, uncollected
from shardwright.planner.problem import Problem
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
