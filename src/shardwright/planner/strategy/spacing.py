"""From a problem to the space of its search, and from an assignment back to placed tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.core.errors import InputError, expected
from shardwright.planner.choice import Choice
from shardwright.planner.problem import Problem, Tables
from shardwright.planner.search.space import (
    Assignment,
    Bools,
    Item,
    ItemOption,
    Space,
    item_option,
    shard_ranks,
)
from shardwright.planner.tally import Placed


def space_of(problem: Problem, tables: Tables, capacity: tuple[int, int, int]) -> Space:
    """The choices of ``tables`` (in the job's order) under the problem's rules."""
    cluster, rules = problem.cluster, problem.job.planner.constraints
    number = {table.name: index for index, table in enumerate(problem.model.tables)}
    groups = {number[names[0]]: tuple(number[n] for n in names) for names in rules.together}
    inside = {member: first for first, group in groups.items() for member in group}
    members: list[tuple[int, ...]] = []
    item_of: dict[int, int] = {}
    for table in problem.order:
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
        options = _options(
            [tables[table] for table in group],
            cluster.world_size,
            cluster.group,
            most=max(cluster.world_size // crowd.get(index, 1), 1),
            whole=allowed is None and index not in apart,
        )
        if not options:
            name = problem.model.tables[group[0]].name
            raise InputError(
                expected(
                    f"planner.constraints of '{name}'",
                    "a sharding type that leaves room for its rules",
                    "only types that use every rank",
                    "Allow table_wise or column_wise.",
                )
            )
        items.append(Item(group, options, allowed, tuple(sorted(apart.get(index, ())))))
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
    return mask


def _options(
    choices: Sequence[tuple[Choice, ...]], ranks: int, group: int, *, most: int, whole: bool
) -> tuple[ItemOption, ...]:
    """One table's choices on at most ``most`` ranks, or those that put several whole tables side by
    side; types that use every rank are left out unless ``whole``."""
    if len(choices) == 1:
        options = [item_option((choice,), ranks, group) for choice in _undominated(choices[0])]
        if whole or ranks == 1:
            return tuple(options)
        return tuple(
            option
            for option in options
            if sum(option.widths) <= most and option.choices[0].option.partition != "uniform"
        )
    kernels = [
        {c.option.compute_kernel: c for c in own if c.option.sharding_type == "table_wise"}
        for own in choices
    ]
    return tuple(
        item_option([own[kernel] for own in kernels], ranks, group)
        for kernel in kernels[0]
        if all(kernel in own for own in kernels)
    )


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Without what costs the same as another choice and may go to fewer ranks: the columns of a
    table_column_wise shard lie on one host, those of a column_wise one anywhere."""
    free = {
        (c.option.compute_kernel, c.option.runs)
        for c in choices
        if c.option.sharding_type == "column_wise"
    }
    return [
        c
        for c in choices
        if c.option.sharding_type != "table_column_wise"
        or (c.option.compute_kernel, c.option.runs) not in free
    ]


def placed_tables(space: Space, found: Assignment) -> tuple[Placed, ...]:
    """Every table with its choice and ranks, in the job's order."""
    placed: dict[int, Placed] = {}
    for item, number, slots in zip(space.items, found.options, found.slots, strict=True):
        option = item.options[number]
        for member, table in enumerate(item.tables):
            ranks = shard_ranks(option, member, slots)
            placed[table] = Placed(option.choices[member], ranks)
    return tuple(placed[table] for table in sorted(placed))
