"""One number of a plan with every step that leads to it, and sums of many such numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardwright.core.amount import Amount, Step, derivation, leaf, maximum, minimum, named, total
from shardwright.core.errors import MismatchError, expected

RELATIVE = 1e-12  # by which a number may come out otherwise for rounding
TERMS = 16  # of a sum on one line
DIGITS = 13  # to which seconds of ranks are equal


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a number is, the value it has in the plan, and every step that leads to it.

    ``ranks`` are those that it is told of; ``notes`` say what numbers cannot.
    """

    title: str
    stored: float
    unit: str
    steps: tuple[Step, ...]
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def finished(
    title: str,
    stored: float,
    amount: Amount,
    *,
    ranks: Iterable[int] = (),
    notes: Iterable[str] = (),
    relative: float = RELATIVE,
    absolute: float = 0.0,
) -> Explanation:
    """The explanation that ends in ``amount``, which has to be what is ``stored``."""
    if abs(stored - amount.value) > max(relative * abs(stored), absolute):
        raise disagreement(title, stored, amount.value)
    return Explanation(
        title, stored, amount.unit, tuple(derivation(amount)), tuple(ranks), tuple(notes)
    )


def disagreement(where: str, stored: Any, found: Any) -> MismatchError:
    """What is raised where a number comes out otherwise than it was written down."""
    return MismatchError(
        expected(where, f"{stored} as stored", f"{found} when recomputed")
        + " The plan is of another version; make it again."
    )


def same(where: str, stored: Any, found: Any) -> None:
    """Compare element by element; numbers may differ by rounding.

    :raises MismatchError: names the first place that differs.
    """
    if isinstance(stored, dict) and isinstance(found, dict) and stored.keys() == found.keys():
        for key in found:
            same(f"{where}.{key}", stored[key], found[key])
        return
    if isinstance(stored, (list, tuple)) and isinstance(found, (list, tuple)):
        same(f"{where}: length", len(stored), len(found))
        for index, (a, b) in enumerate(zip(stored, found, strict=True)):
            same(f"{where}[{index}]", a, b)
        return
    numbers = isinstance(stored, (int, float)) and isinstance(found, (int, float))
    if abs(stored - found) > RELATIVE * abs(stored) if numbers else stored != found:
        raise disagreement(where, stored, found)


def summed(name: str, terms: Sequence[Any], unit: str) -> Any:
    """The sum of ``terms``; of many by partial sums, so that every line stays readable."""
    return _folded(name, terms, unit, total)


def largest(name: str, terms: Sequence[Any], unit: str) -> Any:
    """The largest of ``terms``, of many by parts."""
    return _folded(name, terms, unit, lambda parts: functools.reduce(maximum, parts))


def smallest(name: str, terms: Sequence[Any], unit: str) -> Any:
    """The smallest of ``terms``, of many by parts."""
    return _folded(name, terms, unit, lambda parts: functools.reduce(minimum, parts))


def logarithm(amount: Amount) -> Amount:
    """The natural logarithm."""
    return Amount(math.log(amount.value), operation="log", parts=(amount,))


def _folded(
    name: str, terms: Sequence[Any], unit: str, fold: Callable[[Iterable[Any]], Any]
) -> Any:
    if not terms:
        return leaf(0, name, unit, "nothing adds to it")
    level = 0
    while len(terms) > TERMS:
        level += 1
        starts = range(0, len(terms), TERMS)
        terms = [
            named(f"{name}, part {level}.{number}", fold(terms[start : start + TERMS]), unit)
            for number, start in enumerate(starts, start=1)
        ]
    return named(name, fold(terms), unit)


def alike(
    what: str, values: Mapping[str, float], unit: str, source: str, *, counted: bool = True
) -> list[Any]:
    """One term for each of ``values``; equal ones are told once and, where ``counted``, counted."""
    groups: dict[float, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    terms = []
    for value, labels in groups.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        term = leaf(value, f"{what}[{labels[0]}{more}]", unit, source)
        terms.append(term * len(labels) if more and counted else term)
    return terms


def alike_ranks(values: Sequence[float]) -> list[tuple[str, float, int]]:
    """Ranks with equal values, rounding apart: what to call them, a value, how many they are."""
    groups: dict[float, list[int]] = {}
    for rank, value in enumerate(values):
        exact = isinstance(value, int)
        key = value if exact else float(f"{value:.{DIGITS}g}")
        groups.setdefault(key, []).append(rank)
    return [(ranks_label(ranks), values[ranks[0]], len(ranks)) for ranks in groups.values()]


def ranks_label(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-7``, ``rank 0 and 4 more``."""
    distinct = sorted(set(ranks))
    if len(distinct) == 1:
        return f"rank {distinct[0]}"
    if all(a + 1 == b for a, b in pairwise(distinct)):
        return f"ranks {distinct[0]}-{distinct[-1]}"
    return f"rank {distinct[0]} and {len(distinct) - 1} more"
