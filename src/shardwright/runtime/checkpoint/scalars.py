"""Plain values that are stored beside tensors: exactly what JSON gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwright.core.errors import InputError, expected

_WANTED = "text, a finite number, a 64-bit integer, true, false, none, or lists and maps of them"


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which tuples are lists; InputError names what would not come back equal."""
    return {_key("scalars", key): _plain(f"scalars.{key}", value) for key, value in values.items()}


def _plain(where: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and -(2**63) <= value < 2**64:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str) and _encodes(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(where, key): _plain(f"{where}.{key}", v) for key, v in value.items()}
    raise InputError(expected(where, _WANTED, f"{type(value).__name__} {value!r:.60}"))


def _key(where: str, key: Any) -> str:
    if not isinstance(key, str) or not _encodes(key):
        raise InputError(expected(where, "names as text", f"{key!r:.60}"))
    return key


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
