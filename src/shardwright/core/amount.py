"""A number that is its own explanation.

Cost formulas are plain functions over numbers. Given ints, floats or NumPy arrays they are fast;
given :class:`Amount` objects the same functions record how every value came about. Bytes stay
exact Python ints; seconds may be floats or float arrays.

Sums and extremes of many numbers are told so that every line of a derivation stays readable: of
plain numbers they are plain numbers, of Amounts derivations, by parts where there are many. Numbers
become Amounts by a ``Lift``: ``bare`` leaves them as they are, ``leaf`` names them.

``where`` is eager (both branches are evaluated), so a formula never divides in a dead branch.
"""

# Two things must stay true. A formula gives the same value whether it is called with numbers or
# with Amounts, so there is no `if` on a number in it: an Amount refuses to be a truth value,
# because a branch that was not taken would be missing from the derivation, and nobody would
# notice. And bytes stay Python ints: float64 misses by one byte on some tables that are partly
# cached, and the replica of TorchRec's planner is compared byte by byte.

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_PRECEDENCE = {"<": 1, "<=": 1, ">": 1, ">=": 1, "+": 2, "-": 2, "*": 3, "/": 3, "//": 3}


# No `==` either: it would have to record itself as `<` does, and `in`, sets and dicts ask it for a
# bool. What is left is identity, which is what a derivation goes by.
@dataclass(frozen=True, slots=True, eq=False)
class Amount:
    """A value with its unit, its name if it has one, and the operation and parts that made it."""

    value: Any
    unit: str = ""
    name: str = ""
    operation: str = ""
    parts: tuple[Amount, ...] = ()
    source: str = ""

    __array_ufunc__ = None  # an array must never swallow an Amount element by element

    def __bool__(self) -> bool:
        raise TypeError(
            f"Amount {self.name or self.value!r} used as a truth value: a formula chooses with "
            "where(condition, a, b), never with if"
        )

    def __add__(self, other: Any) -> Amount:
        return _binary("+", self, other)

    def __radd__(self, other: Any) -> Amount:
        return _binary("+", other, self)

    def __sub__(self, other: Any) -> Amount:
        return _binary("-", self, other)

    def __rsub__(self, other: Any) -> Amount:
        return _binary("-", other, self)

    def __mul__(self, other: Any) -> Amount:
        return _binary("*", self, other)

    def __rmul__(self, other: Any) -> Amount:
        return _binary("*", other, self)

    def __truediv__(self, other: Any) -> Amount:
        return _binary("/", self, other)

    def __rtruediv__(self, other: Any) -> Amount:
        return _binary("/", other, self)

    def __floordiv__(self, other: Any) -> Amount:
        return _binary("//", self, other)

    def __lt__(self, other: Any) -> Amount:
        return _binary("<", self, other)

    def __le__(self, other: Any) -> Amount:
        return _binary("<=", self, other)

    def __gt__(self, other: Any) -> Amount:
        return _binary(">", self, other)

    def __ge__(self, other: Any) -> Amount:
        return _binary(">=", self, other)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _lift(value: Any) -> Amount:
    if isinstance(value, Amount):
        return value
    if hasattr(value, "__array_namespace__"):
        # numpy gives way here (`__array_ufunc__` above). Without that it would make an object array
        # of a million Amounts, which is slow and which nobody can print.
        raise TypeError("an Amount cannot be combined with an array: explain one case at a time")
    return Amount(value)


def _binary(operation: str, left: Any, right: Any) -> Amount:
    a, b = _lift(left), _lift(right)
    return Amount(_BINARY[operation](a.value, b.value), operation=operation, parts=(a, b))


def _apply(operation: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` on plain values, recording the call if any argument is an Amount."""
    # The fast path: the search calls the same formulas on arrays of a million shards.
    if not any(isinstance(argument, Amount) for argument in arguments):
        return function(*arguments)
    parts = tuple(_lift(argument) for argument in arguments)
    return Amount(function(*(part.value for part in parts)), operation=operation, parts=parts)


# By the array API and not by `import numpy`: this file stands on the floor that has the standard
# library and msgspec alone, and the formulas still take the search's arrays.
def _namespace(*values: Any) -> Any:
    for value in values:
        if hasattr(value, "__array_namespace__"):
            return value.__array_namespace__()
    return None


def leaf(value: Any, name: str, unit: str = "", source: str = "") -> Amount:
    """An input of a derivation: a size from the job, or a constant with its source."""
    return Amount(value, unit=unit, name=name, source=source)


def noted(value: Any, name: str, unit: str, source: str, like: Any) -> Any:
    """A number that a formula brings along itself: a leaf if ``like`` is an Amount, else bare."""
    return leaf(value, name, unit, source) if isinstance(like, Amount) else value


def total(parts: Iterable[Any]) -> Any:
    """The sum of one or more numbers, without the zero that ``sum`` starts from."""
    return functools.reduce(operator.add, parts)


def named(name: str, value: Any, unit: str = "") -> Any:
    """Give an intermediate result the name and unit that ``explain`` prints; else a no-op."""
    # Named in place rather than wrapped: `explain` prints a line for each named amount, and a
    # wrapper would print the same number twice.
    if isinstance(value, Amount):
        if value.name:  # already a step of its own: keep it and add one that equals it
            return Amount(value.value, unit=unit, name=name, operation="is", parts=(value,))
        return replace(value, name=name, unit=unit)
    return value


def ceil_div(a: Any, b: Any) -> Any:
    """``ceil(a / b)`` in exact integer arithmetic."""
    # Not math.ceil(a / b): `/` goes through a double, which is off by one from 2**53 on.
    return _apply("ceil_div", lambda x, y: -(-x // y), a, b)


def ceil(a: Any) -> Any:
    """Round up to an integer."""

    def function(x: Any) -> Any:
        xp = _namespace(x)
        return math.ceil(x) if xp is None else xp.ceil(x)

    return _apply("ceil", function, a)


def rounded(value: Any) -> Any:
    """The nearest whole number, ties to the even one, as an int."""
    # By `where` and not by round(): a derivation shows which of the three cases it was. Ties go to
    # the even number as Python's round has them, since TorchRec's estimator calls that.
    value = named("exactly", value)
    low = named("rounded_down", ceil(value // 1))
    rest = named("rest", value - low)
    tie = ceil_div(low, 2) * 2
    return where(rest < 0.5, low, where(rest > 0.5, low + 1, tie))


def log(a: Any) -> Any:
    """The natural logarithm of a number."""
    return _apply("log", math.log, a)


def root(a: Any) -> Any:
    """The square root."""

    def function(x: Any) -> Any:
        xp = _namespace(x)
        return math.sqrt(x) if xp is None else xp.sqrt(x)

    return _apply("sqrt", function, a)


def plain(a: Any) -> Any:
    """The value alone, to choose by: what is chosen is no part of a derivation."""
    return a.value if isinstance(a, Amount) else a


def maximum(a: Any, b: Any) -> Any:
    """The larger of two, element by element for arrays."""
    if type(a) is type(b) is float:  # of clocks, millions of times
        return max(a, b)

    def function(x: Any, y: Any) -> Any:
        xp = _namespace(x, y)
        return max(x, y) if xp is None else xp.maximum(x, y)

    return _apply("max", function, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two, element by element for arrays."""

    def function(x: Any, y: Any) -> Any:
        xp = _namespace(x, y)
        return min(x, y) if xp is None else xp.minimum(x, y)

    return _apply("min", function, a, b)


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """Choose by a condition; both branches are evaluated, the condition is recorded."""

    def function(c: Any, x: Any, y: Any) -> Any:
        xp = _namespace(c, x, y)
        return (x if c else y) if xp is None else xp.where(c, x, y)

    return _apply("where", function, condition, then, otherwise)


@dataclass(frozen=True, slots=True)
class Step:
    """One printed line of a derivation: ``name = formula = numbers = value unit``."""

    name: str
    formula: str
    numbers: str
    value: Any
    unit: str
    source: str


def derivation(amount: Amount) -> list[Step]:
    """Every named step below ``amount``, inputs first, each once."""
    steps: list[Step] = []
    # By identity: two inputs may have the same value and are two lines, while one amount that is
    # used twice is one.
    seen: set[int] = set()
    for node in _post_order(amount, seen):
        if not node.name:
            continue
        formula = "" if not node.parts else _render(node, symbolic=True)
        numbers = "" if not node.parts else _render(node, symbolic=False)
        steps.append(Step(node.name, formula, numbers, node.value, node.unit, node.source))
    return steps


def _post_order(amount: Amount, seen: set[int]) -> Iterator[Amount]:
    if id(amount) in seen:
        return
    seen.add(id(amount))
    for part in amount.parts:
        yield from _post_order(part, seen)
    yield amount


def _render(node: Amount, *, symbolic: bool) -> str:
    """The expression of ``node`` down to the next named amounts."""

    def text(part: Amount) -> str:
        if part.name or not part.parts:
            return part.name if symbolic and part.name else repr(part.value)
        return _render(part, symbolic=symbolic)

    if node.operation == "is":
        return text(node.parts[0])
    if node.operation not in _PRECEDENCE:
        return f"{node.operation}({', '.join(text(part) for part in node.parts)})"
    # Parentheses where Python would need them and nowhere else: the line is read as an expression,
    # and one pair too few would say another formula than the one that made the value.
    level = _PRECEDENCE[node.operation]
    left, right = node.parts

    def wrap(part: Amount, *, is_right: bool) -> str:
        inner = "" if part.name else part.operation
        groups = is_right or level == 1  # comparisons chain in Python: keep each one apart
        needs = inner in _PRECEDENCE and (
            _PRECEDENCE[inner] < level or (groups and _PRECEDENCE[inner] == level)
        )
        return f"({text(part)})" if needs else text(part)

    return f"{wrap(left, is_right=False)} {node.operation} {wrap(right, is_right=True)}"


# Also the depth: a sum of Amounts is a chain as deep as it has terms, and _post_order and _render
# follow it by recursion. A thousand tables in one chain would end in a RecursionError.
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
    # Plain numbers take the builtin: the clocks and the search call this far more often than
    # `explain`.
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
