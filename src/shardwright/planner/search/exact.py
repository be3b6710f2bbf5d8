"""The whole placement as a mixed-integer program, solved by HiGHS.

For each item one option is chosen (binary); each option's blocks, which are alike, are counted per
slot (integers that sum to the number of blocks); every rank's seconds are at most T and its bytes
at most its capacity; T is minimised. Seconds are scaled by the relaxed bound and bytes by the
capacities, so that all coefficients are near 1.
"""

# What must stay true: all rules of the space (allowed ranks, items kept apart, blocks in one group)
# are rows, and an option is left out only where no better plan can have it. Else what is proven is
# not true of every plan. Tolerances are taken to the safe side: the solver calls equal what differs
# by a little, so the ceiling is raised by that (`SLACK`) and the bound lowered (`SAFETY`).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.core.errors import UnsupportedError
from shardwright.planner.search.search import SearchOutcome
from shardwright.planner.search.space import Assignment, ItemOption, Space

RELATIVE_GAP = 1e-4
MAX_VARIABLES = 500_000
SLACK = 1e-6  # the solver's tolerance, above what is known to be reached
SAFETY = 1e-9  # the solver's tolerance, taken off its bound
NO_OPTION = -1


@dataclass(frozen=True, slots=True)
class _Column:
    """A variable: how many of an option's blocks lie at ``slot``; slot -1 is the choice itself.

    Without an option: whether the item lies on rank ``slot``, or, at slot -1, in some group.
    """

    item: int
    option: int
    slot: int


@dataclass
class _Program:
    """Columns and rows of the program; column 0 is T. ``load`` and ``memory`` are terms of the rows
    of ranks, and of ranks and tiers."""

    columns: list[_Column] = field(default_factory=lambda: [_Column(-1, -1, -1)])
    upper: list[float] = field(default_factory=lambda: [np.inf])
    rows: list[tuple[list[int], list[float], float, float]] = field(default_factory=list)
    load: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    memory: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)

    def column(self, item: int, option: int, slot: int, upper: float) -> int:
        self.columns.append(_Column(item, option, slot))
        self.upper.append(upper)
        return len(self.columns) - 1

    def row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        merged: dict[int, float] = {}  # the solver wants a column once in a row
        for column, factor in terms:
            merged[column] = merged.get(column, 0.0) + factor
        self.rows.append((list(merged), list(merged.values()), low, high))


def solve(space: Space, start: SearchOutcome, seconds: float) -> tuple[Assignment | None, float]:
    """The best assignment of listed options found in ``seconds`` of solving, and a lower bound
    that is proven of these.

    :raises UnsupportedError: HiGHS is not installed, or the program would be too large.
    """
    useful = _useful(space, start)
    size = sum(len(numbers) for numbers in useful) * (space.ranks + 1)
    if size > MAX_VARIABLES:
        where, remedy = "planner.search 'exact'", "Use 'bounded', which proves a bound as well."
        raise UnsupportedError(where, f"at most {MAX_VARIABLES:,} variables", f"{size:,}", remedy)
    scale = start.bound.seconds or 1.0
    program, choices = _build(space, useful, scale)
    program.upper[0] = _ceiling(space, start) / scale
    solver = _solver(program, seconds)
    if start.best is not None:
        _begin_with(solver, program, space, start, scale)
    solver.run()
    # Everything above the plan that is known was cut off, so infeasible means that nothing is
    # faster: the plan's own seconds are proven, less what the tolerances may hide. Without a plan
    # the ceiling is above any assignment, and nothing can be placed at all.
    if solver.getModelStatus().name == "kInfeasible":  # nothing at or below the ceiling
        return None, _ceiling(space, start) * (1 - 2 * SLACK) if start.best else 0.0
    # A program that presolve alone solves has no tree and so no bound of one: the objective stands
    # for it.
    bound = float(solver.getInfo().mip_dual_bound)
    if not np.isfinite(bound) and solver.getModelStatus().name == "kOptimal":
        bound = float(solver.getInfo().objective_function_value) * (1 - SLACK)  # solved by presolve
    proved = max(start.bound.seconds, bound * scale * (1 - SAFETY)) if np.isfinite(bound) else 0.0
    proved = min(proved, start.seconds)  # above it there is nothing to be said
    values = np.array(solver.getSolution().col_value)
    if not len(values) or not solver.getInfo().primal_solution_status:
        return None, proved
    return _assignment(space, program, choices, useful, values), proved


def _ceiling(space: Space, start: SearchOutcome) -> float:
    """Seconds that the best plan need not exceed; without a finite T the solver may never end."""
    if start.best is not None:
        return start.seconds * (1 + SLACK)
    return sum(max(option.total_seconds for option in item.options) for item in space.items)


def _useful(space: Space, start: SearchOutcome) -> list[list[int]]:
    """Options that a better plan may have: no shard that alone takes as long as the best plan."""
    kept = []
    for item, entry in enumerate(space.items):
        chosen = -1 if start.best is None else start.best.options[item]
        kept.append(
            [
                number
                for number, option in enumerate(entry.options)
                # An option of which one shard takes as long as the whole plan is in no faster plan.
                # The chosen one stays, for the plan that the solver starts from must be one of its
                # own.
                if option.largest < start.seconds or number == chosen
            ]
        )
    return kept


def _build(space: Space, useful: list[list[int]], scale: float) -> tuple[_Program, list[list[int]]]:
    """The program, and the column of every useful option of every item."""
    program = _Program()
    program.load = {rank: [(0, -1.0)] for rank in range(space.ranks)}
    everywhere: list[tuple[int, float]] = []
    choices = []
    for item, rule in enumerate(space.items):
        chosen = [program.column(item, number, -1, 1.0) for number in useful[item]]
        choices.append(chosen)
        program.row([(c, 1.0) for c in chosen], 1.0, 1.0)
        for number, choice in zip(useful[item], chosen, strict=True):
            option = rule.options[number]
            if option.everywhere:
                everywhere.append((choice, option.everywhere / scale))
            # Blocks on all ranks need no counts: the choice stands for all of them at once, and
            # their seconds and bytes are those of so many blocks.
            times = len(option.widths) if option.widths[0] == space.ranks else 1
            assert option.blocks[0] is option.blocks[-1]  # else the proof would be of other blocks
            # Blocks of an option are alike, so how many lie at a slot is all there is to know. With
            # a variable of its own for each block every plan would be there once for each order of
            # the blocks, and the solver would search all of them.
            for column, slot in _counts(program, space, item, number, option, choice):
                _add_block(program, space, option, (column, slot), scale / times, times)
    for rank, terms in program.load.items():
        program.row([*terms, *everywhere], -np.inf, 0.0)
        for tier in range(3):
            if (rank, tier) in program.memory:
                program.row(program.memory[rank, tier], -np.inf, 1.0)
    _keep_apart(program, space)
    return program, choices


def _counts(
    program: _Program, space: Space, item: int, number: int, option: ItemOption, choice: int
) -> list[tuple[int, int]]:
    """Columns that count an option's blocks by slot; a block on all ranks needs none."""
    width, count = option.widths[0], len(option.widths)
    allowed = space.items[item].allowed
    if width == space.ranks:
        return [(choice, 0)]
    found = [
        (program.column(item, number, slot, float(count)), slot)
        for slot in range(0, space.ranks, width)
        if allowed is None or allowed[slot : slot + width].all()
    ]
    # All of the blocks if the option is chosen and none if not: this row ties counts to the choice.
    program.row([*((c, 1.0) for c, _ in found), (choice, -float(count))], 0.0, 0.0)
    if option.close:
        _keep_close(program, space, found, choice, count)
    return found


def _keep_close(
    program: _Program, space: Space, found: Sequence[tuple[int, int]], choice: int, count: int
) -> None:
    """All blocks of an option in one group of ranks."""
    item = program.columns[choice].item
    homes = {}
    for column, slot in found:
        home = slot // space.group
        if home not in homes:
            homes[home] = program.column(item, NO_OPTION, -1, 1.0)
        # No count is above 0 without its group, and below there is one group at most: together all
        # blocks lie in one.
        program.row([(column, 1.0), (homes[home], -float(count))], -np.inf, 0.0)
    program.row([*((home, 1.0) for home in homes.values()), (choice, -1.0)], -np.inf, 0.0)


def _add_block(
    program: _Program,
    space: Space,
    option: ItemOption,
    place: tuple[int, int],
    scale: float,
    times: int,
) -> None:
    """A block at a ``place``, its column and slot; ``times``: blocks that a column stands for."""
    block = option.blocks[0]
    column, slot = place
    for offset in range(block.width):
        rank = slot + offset
        if block.seconds[offset]:
            program.load[rank].append((column, float(block.seconds[offset]) / scale))
        for tier in range(3):
            if size := float(block.storage[offset, tier]):
                share = times * size / max(space.capacity[tier], 1)
                program.memory.setdefault((rank, tier), []).append((column, share))


def _keep_apart(program: _Program, space: Space) -> None:
    """Two items that are kept apart have no rank in common."""
    at: dict[tuple[int, int], list[int]] = {}
    for index, column in enumerate(program.columns):
        if column.slot >= 0 and space.items[column.item].apart_from:
            width = space.items[column.item].options[column.option].widths[0]
            for rank in range(column.slot, column.slot + width):
                at.setdefault((column.item, rank), []).append(index)
    present = {}
    for (item, rank), columns in at.items():
        # One variable for each item and rank, whatever its options: a row for each pair of blocks
        # that may not meet would be as many as the options of both multiplied.
        there = program.column(item, NO_OPTION, rank, 1.0)
        present[item, rank] = there
        for index in columns:
            program.row([(index, 1.0), (there, -program.upper[index])], -np.inf, 0.0)
    for (item, rank), there in present.items():
        for other in space.items[item].apart_from:
            # Of every pair once: both items name each other.
            if other > item and (other, rank) in present:
                program.row([(there, 1.0), (present[other, rank], 1.0)], -np.inf, 1.0)


def _solver(program: _Program, seconds: float) -> Any:
    try:
        import highspy
    except ImportError:
        raise UnsupportedError(
            "planner.search 'exact'", "HiGHS installed", "no highspy", "Install shardwright[exact]."
        ) from None
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.columns), len(program.rows)
    lp.col_cost_ = np.array([1.0] + [0.0] * (lp.num_col_ - 1))
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.array(program.upper)
    lp.row_lower_ = np.array([row[2] for row in program.rows])
    lp.row_upper_ = np.array([row[3] for row in program.rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0] + [len(row[0]) for row in program.rows])
    lp.a_matrix_.index_ = np.concatenate([row[0] for row in program.rows])
    lp.a_matrix_.value_ = np.concatenate([row[1] for row in program.rows])
    # Only T is no whole number.
    kinds = [highspy.HighsVarType.kContinuous]
    lp.integrality_ = kinds + [highspy.HighsVarType.kInteger] * (lp.num_col_ - 1)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(seconds))
    solver.setOptionValue("mip_rel_gap", RELATIVE_GAP)
    solver.passModel(lp)
    return solver


def _begin_with(
    solver: Any, program: _Program, space: Space, start: SearchOutcome, scale: float
) -> None:
    """Give the solver what the bounded search has found."""
    assert start.best is not None
    import highspy

    solution = highspy.HighsSolution()
    values = np.zeros(len(program.columns))
    values[0] = start.seconds / scale
    for index, column in enumerate(program.columns[1:], start=1):
        slots = start.best.slots[column.item]
        if column.option < 0:
            widths = space.items[column.item].options[start.best.options[column.item]].widths
            held = any(s <= column.slot < s + w for s, w in zip(slots, widths, strict=True))
            values[index] = float(held)
        elif column.option == start.best.options[column.item]:
            values[index] = 1.0 if column.slot < 0 else float(slots.count(column.slot))
    solution.col_value = values.tolist()
    solver.setSolution(solution)


def _assignment(
    space: Space, program: _Program, choices: list[list[int]], useful: list[list[int]], values: Any
) -> Assignment:
    # The solver's numbers are whole only within its tolerance: the largest of an item's choices is
    # the one that is 1, and counts are rounded.
    options = [
        numbers[int(np.argmax([values[c] for c in columns]))]
        for columns, numbers in zip(choices, useful, strict=True)
    ]
    slots: list[list[int]] = [[] for _ in space.items]
    for column, value in zip(program.columns, values, strict=True):
        if column.slot >= 0 and column.option == options[max(column.item, 0)]:
            slots[column.item] += [column.slot] * round(value)
    for item, option in enumerate(options):
        widths = space.items[item].options[option].widths
        if widths[0] == space.ranks:
            slots[item] = [0] * len(widths)
    return Assignment(tuple(options), tuple(tuple(s) for s in slots))
