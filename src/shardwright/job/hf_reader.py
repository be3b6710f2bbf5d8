"""Values of a ``config.json`` by key, which remembers those that were asked for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from shardwright.core.errors import expected

T = TypeVar("T")


class _Asked(dict[str, Any]):
    """A document that knows which keys it was asked for."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document)
        self.asked: set[str] = set()

    # `get` alone counts as a read: every value below goes through it, and `unread` must not.
    def get(self, key: str, default: Any = None) -> Any:
        """The value, which is known from now on."""
        self.asked.add(key)
        return super().get(key, default)


class Reader:
    """Values of a configuration by key, with a default for what is missing, null or ``wrong``."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.document = _Asked(document)
        self.where = where
        self.wrong: list[str] = []

    def unread(self, harmless: Collection[str]) -> tuple[str, ...]:
        """Keys that nobody asked for and that may change the model; what is off changes none."""
        # Falsy values are left out: a feature that is off (null, false, 0, an empty list) changes
        # nothing.
        known = self.document.asked.union(harmless)
        return tuple(key for key, value in self.document.items() if value and key not in known)

    def size(self, key: str, default: int, least: int = 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            return self._instead(key, f"a whole number from {least}", value, default)
        return value

    def unless_null(self, key: str, default: int | None) -> int | None:
        """A size that a file may also say there is none of."""
        found = self.document.get(key, default)
        return None if found is None else self.size(key, found)

    def real(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            return float(self._instead(key, "a number above 0", value, default))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            return self._instead(key, "true or false", value, default)
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self._value(key, [])
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            return self._instead(key, "a list of layers", value, ())
        return tuple(value)

    def theta(self, default: float) -> float:
        """The base of rotary positions: a key of its own, or of ``rope_parameters`` (5.0)."""
        nested = self.document.get("rope_parameters")
        if isinstance(nested, dict) and "rope_theta" in nested:
            inner = Reader(nested, "")
            found = inner.real("rope_theta", default)
            self.wrong += [f"rope_parameters: {each}" for each in inner.wrong]
            return found
        return self.real("rope_theta", default)

    def _instead(self, key: str, wanted: str, value: Any, default: T) -> T:
        self.wrong.append(expected(key, wanted, repr(value)).removesuffix("."))
        return default

    def _value(self, key: str, default: Any) -> Any:
        value = self.document.get(key)
        return default if value is None else value
