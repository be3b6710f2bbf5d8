"""The configuration of another program as a job: which of its keys were read, which were not."""

# An estimate of a configuration that was read only in part is worse than none, for it looks like
# one. So every key is asked for, known to change no memory, or told as unread, and what is asked
# for and cannot be followed is refused by its name. `asked` is filled by reading itself and not by
# a list beside it, which would be forgotten.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shardwright.core.errors import InputError, UnsupportedError, expected

Document = dict[str, dict[str, Any]]


class Imported(msgspec.Struct, frozen=True):
    """A configuration as sections of a job, its keys that change no memory, those that nobody
    read, whatever they change, and what it does not say and was assumed."""

    document: Document
    harmless: tuple[str, ...]
    unread: tuple[str, ...]
    assumed: tuple[str, ...] = ()


class Keys:
    """A configuration, and which of its keys were asked for. Its ``harmless`` keys or sections
    change no memory of a step. Arguments of a command are a section without a name."""

    def __init__(self, config: Mapping[str, Any], harmless: re.Pattern[str]) -> None:
        self.config, self.harmless = config, harmless
        self.asked: set[tuple[str, str]] = set()
        self.refusals: list[str] = []
        self.assumed: list[str] = []

    def value(self, section: str, key: str, default: Any) -> Any:
        self.asked.add((section, key))
        given = self.config.get(section, {})
        if not isinstance(given, Mapping):
            raise InputError(expected(section, "a section of a configuration", f"{given!r}"))
        return given.get(key, default)

    def number(self, section: str, *names: str, default: int, least: int = 1) -> int:
        """The first of ``names`` that is given; other ones are those of earlier versions."""
        given = [(name, self.value(section, name, None)) for name in names]
        name, found = next((pair for pair in given if pair[1] is not None), (names[0], default))
        # 0 is never a size; -1 is what TorchTitan writes for "all that are left".
        if not isinstance(found, int) or isinstance(found, bool) or found < least or found == 0:
            wanted = "a number from 1" if least == 1 else "-1 or a number from 1"
            raise InputError(expected(_spot(section, name), wanted, f"{found!r}"))
        return found

    def decimal(self, section: str, key: str, default: float) -> float:
        """A number that need not be a whole one."""
        found = self.value(section, key, default)
        try:
            if isinstance(found, bool):
                raise TypeError
            return float(found)
        except (TypeError, ValueError):
            raise InputError(expected(_spot(section, key), "a number", f"{found!r}")) from None

    def one_of(self, section: str, key: str, known: Mapping[str, str], default: str) -> str:
        found = self.value(section, key, default)
        if not isinstance(found, str) or found not in known:
            raise self.refused(section, key, " or ".join(known), default or "none")
        return known[found]

    def refused(
        self, section: str, key: str, wanted: str, default: str = "none"
    ) -> UnsupportedError:
        found = self.value(section, key, default)
        return UnsupportedError(expected(_spot(section, key), wanted, f"{found}"))

    def refuse(self, section: str, key: str, wanted: str) -> None:
        """Refuse a key together with all others, once everything is read."""
        self.refusals.append(str(self.refused(section, key, wanted)).removesuffix("."))

    def assume(self, what: str) -> None:
        """Take something that the configuration does not say, and say so."""
        self.assumed.append(what)

    def unread(self) -> Iterator[tuple[str, str, Any]]:
        """Keys of sections that nobody asked for, with their values."""
        for section, given in self.config.items():
            if isinstance(given, Mapping):
                yield from ((section, key, given[key]) for key in self._unread_of(section, given))

    def _unread_of(self, section: str, given: Mapping[str, Any]) -> list[str]:
        return [key for key in given if (section, key) not in self.asked]

    def imported(self, document: Document) -> Imported:
        """The job, with what nobody asked for in its order; UnsupportedError that names all that
        was refused."""
        if self.refusals:
            raise UnsupportedError(f"{'; '.join(self.refusals)}.")
        left = tuple(self._left())
        harmless = tuple(spot for spot in left if self.harmless.fullmatch(spot))
        unread = tuple(spot for spot in left if spot not in harmless)
        return Imported(document, harmless, unread, tuple(self.assumed))

    def _left(self) -> Iterator[str]:
        """Sections that nobody asked for, or that are harmless, and keys of others."""
        for section, given in self.config.items():
            if not isinstance(given, Mapping):  # a key that stands in no section
                yield section
                continue
            keys = self._unread_of(section, given)
            # A section of which nothing was read is told as one line, not key by key.
            if section and (self.harmless.fullmatch(section) or len(keys) == len(given)):
                yield section
            else:
                yield from (_spot(section, key) for key in keys)


def _spot(section: str, key: str) -> str:
    return f"{section}.{key}" if section else f"--{key}"
