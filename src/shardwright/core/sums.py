"""Sums and extremes of many numbers, told so that every line of a derivation stays readable.

Of plain numbers they are plain numbers; of Amounts they are derivations, by parts where there are
many. Numbers become Amounts by a ``Lift``: ``bare`` leaves them as they are, ``leaf`` names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwright.core.amount import Amount, leaf, maximum, minimum, named, total

TERMS = 16  # of a sum on one line

# A number and what explain says about it: value, name, unit, source.
Lift = Callable[[Any, str, str, str], Any]
Fold = Callable[[Iterable[Any]], Any]


def bare(value: Any, name: str, unit: str, source: str) -> Any:
    """The number alone."""
    return value


def summed(name: str, terms: Sequence[Any], unit: str, adds: Fold = total) -> Any:
    """The sum of ``terms``, 0 of none; ``adds`` adds plain numbers."""
    if not terms:
        return 0
    return _folded(name, terms, unit, total, adds)


def largest(name: str, terms: Sequence[Any], unit: str) -> Any:
    """The largest of ``terms``."""
    return _folded(name, terms, unit, lambda parts: functools.reduce(maximum, parts), max)


def smallest(name: str, terms: Sequence[Any], unit: str) -> Any:
    """The smallest of ``terms``."""
    return _folded(name, terms, unit, lambda parts: functools.reduce(minimum, parts), min)


def times(amount: Any, count: int) -> Any:
    """``count`` times an amount, which of one is itself."""
    return amount * count if count > 1 else amount


def grouped(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Each different one of ``values``: the first that has it and how many more, it, the count."""
    groups: dict[Any, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    for value, labels in groups.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        yield f"[{labels[0]}{more}]", value, len(labels)


def alike(
    what: str, values: Mapping[str, float], unit: str, source: str, lift: Lift = leaf
) -> list[Any]:
    """One term for each of ``values``; equal ones are told once and counted."""
    return [
        times(lift(value, f"{what}{label}", unit, source), count)
        for label, value, count in grouped(values)
    ]


def sum_of(
    name: str, values: Mapping[str, float], unit: str, source: str, lift: Lift = leaf
) -> Any:
    """The sum of ``values``, a number of its own where there are none."""
    terms = alike(name, values, unit, source, lift)
    return summed(name, terms, unit) if terms else lift(0, name, unit, "nothing adds to it")


def _folded(name: str, terms: Sequence[Any], unit: str, fold: Fold, plain: Fold) -> Any:
    if not any(isinstance(term, Amount) for term in terms):
        return plain(terms)
    level = 0
    while len(terms) > TERMS:
        level += 1
        starts = range(0, len(terms), TERMS)
        terms = [
            named(f"{name}, part {level}.{number}", fold(terms[start : start + TERMS]), unit)
            for number, start in enumerate(starts, start=1)
        ]
    return named(name, fold(terms), unit)
