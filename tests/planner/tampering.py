"""Plans as documents whose numbers are changed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a document stands that is not None."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    elif value is not None:
        yield path


def changed(value: Any) -> Any:
    """A value of the same type that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + max(1, value // 100)
    return f"{value}x" if isinstance(value, str) else value * 1.01 + 0.01
