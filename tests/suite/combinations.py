"""Which combinations of a test's parameters run daily, which of those are slow, and which run only
in ``make test-products``.

A full product of parameters shows little that its pairs do not, and costs most of a suite. So of a
test that is dear (one on process groups, or one with slow cases) there run daily:

- 4 ranks only where there is no 3 among its sizes: 3 has what is uneven, 4 what is a grid;
- of several parameters combinations with all pairs of values, except that a value of the parameter
  that has most of them meets two values of each other one, not all.

The choice is greedy and drawn from the test's name, so that it stays the same from run to run.
What is left out is marked ``product``, as is what ``in_turn`` leaves out of a list and what a list
calls ``rare``. Of what is chosen ``make test`` takes less: as many as ``slow_after`` says, else, on
process groups, as many as have every value once, on at most two ranks.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest

Value = tuple[int, str]  # the number of a parameter, and what it is
SIZES = ("world_size", "size")
MEETS = 2


class Case(NamedTuple):
    """One case of a parametrised test."""

    item: pytest.Item
    values: tuple[Value, ...]

    @property
    def size(self) -> int:
        """Its ranks, 0 where no parameter says it."""
        params = getattr(getattr(self.item, "callspec", None), "params", {})
        sizes = [params[name] for name in SIZES if isinstance(params.get(name), int)]
        return max(sizes, default=0)

    @property
    def pairs(self) -> set[tuple[Value, Value]]:
        return set(combinations(self.values, 2))


def is_dear(item: pytest.Item) -> bool:
    """Whether combinations of it are chosen at all."""
    marks = ("slow", "slow_after")
    return _on_ranks(item) or any(item.get_closest_marker(mark) for mark in marks)


def choose(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of one test function: ``product`` what is not daily, ``slow`` what is not
    quick."""
    cases = [Case(item, _values(item)) for item in items]
    left = [case for case in cases if not case.item.get_closest_marker("product")]
    chosen = daily(left) if left else []
    quick = _quick(chosen) if chosen else []
    for case in cases:
        if case not in chosen:
            case.item.add_marker(pytest.mark.product)
        elif case not in quick:
            case.item.add_marker(pytest.mark.slow)


def daily(cases: Sequence[Case]) -> list[Case]:
    """The cases of one test function that run daily."""
    if any(case.size == 3 for case in cases):
        cases = [case for case in cases if case.size != 4]
    if len(cases[0].values) < 2:
        return list(cases)
    drawn = random.Random(zlib.crc32(cases[0].item.nodeid.partition("[")[0].encode()))
    found = _covering(cases, _wanted(cases, drawn), drawn)
    return [case for case in cases if case in found]


def in_turn(*lists: Iterable[Any], count: int = 0) -> list[Any]:
    """Parameters of which every value of each list occurs, each beside the next ones of the other
    lists, as many as the longest list has or ``count``; other combinations are marked ``product``.
    """
    values = [list(each) for each in lists]
    turns = range(count or max(map(len, values)))
    chosen = list(
        dict.fromkeys(
            tuple(
                (turn + place * (turn // len(own))) % len(own) for place, own in enumerate(values)
            )
            for turn in turns
        )
    )
    rest = set(product(*(range(len(own)) for own in values))).difference(chosen)

    def of(places: tuple[int, ...], *marks: Any) -> Any:
        found = (own[place] for own, place in zip(values, places, strict=True))
        return pytest.param(*found, marks=marks)

    return [
        *(of(places) for places in chosen),
        *(of(places, pytest.mark.product) for places in sorted(rest)),
    ]


def rare(*values: Any) -> Any:
    """A case that runs in ``make test-products`` alone."""
    return pytest.param(*values, marks=pytest.mark.product)


def slow(*values: Any) -> Any:
    """A case that runs daily, and not in ``make test``."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _on_ranks(item: pytest.Item) -> bool:
    return "distributed" in item.path.parts


def _quick(cases: Sequence[Case]) -> list[Case]:
    """Those of the daily ones that are not slow."""
    mark = cases[0].item.get_closest_marker("slow_after")
    small = sorted(cases, key=lambda case: case.size)
    if mark is not None:
        return small[: mark.args[0]]
    if not _on_ranks(cases[0].item):
        return list(cases)
    few = [case for case in cases if case.size <= 2]
    return each_value_once(few) if len(few) > 1 else few


def each_value_once(cases: Sequence[Case]) -> list[Case]:
    """Of ``cases`` enough that every value of every parameter occurs."""
    missing = {value for case in cases for value in case.values}
    found, left = [], list(cases)
    while missing:
        most = max(left, key=lambda case: len(missing.intersection(case.values)))
        missing.difference_update(most.values)
        left.remove(most)
        found.append(most)
    return found


def _values(item: pytest.Item) -> tuple[Value, ...]:
    """Arguments that are given together are one parameter."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = []
    for number, mark in enumerate(item.iter_markers("parametrize")):
        names = mark.args[0]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        found.append((number, repr([params[name] for name in names])))
    return tuple(found)


def _wanted(cases: Sequence[Case], drawn: random.Random) -> set[tuple[Value, Value]]:
    """The pairs of values that have to occur."""
    pairs = set().union(*(case.pairs for case in cases))
    values = {value for case in cases for value in case.values}
    counts = {number: sum(each[0] == number for each in values) for number, _ in values}
    longest = max(counts, key=lambda number: counts[number])
    wanted = {pair for pair in pairs if longest not in (pair[0][0], pair[1][0])}
    for value in sorted(value for value in values if value[0] == longest):
        met: dict[int, list[tuple[Value, Value]]] = {}
        for pair in sorted(pair for pair in pairs if value in pair):
            other = pair[1] if pair[0] == value else pair[0]
            met.setdefault(other[0], []).append(pair)
        for several in met.values():
            wanted.update(drawn.sample(several, min(MEETS, len(several))))
    return wanted


def _covering(
    cases: Sequence[Case], wanted: set[tuple[Value, Value]], drawn: random.Random
) -> list[Case]:
    """Few cases with all pairs that are wanted: always the one with most of those still missing."""
    left, found = list(cases), []
    drawn.shuffle(left)
    while wanted:
        most = max(left, key=lambda case: len(wanted & case.pairs))
        wanted = wanted - most.pairs
        left.remove(most)
        found.append(most)
    return found
