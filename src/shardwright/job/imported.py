"""The configuration of another program as a job: which of its keys were read, which were not."""

# An estimate of a configuration that was read only in part is worse than none, for it looks like
# one. So every key is asked for, known to change no memory, or told as unread, and what is asked
# for and cannot be followed is refused by its name, all such keys at once: whoever mends a file
# wants to mend it once. `asked` is filled by reading itself and not by a list beside it, which
# would be forgotten.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from shardwright.core.errors import InputError, ShardwrightError, UnsupportedError, expected

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
    change no memory of a step. Arguments of a command are a section without a name, whose keys
    begin with ``dashes``.

    A value that is missing, wrong or not followed is noted, and reading goes on with another one;
    :meth:`imported` refuses all of them.
    """

    def __init__(
        self, config: Mapping[str, Any], harmless: re.Pattern[str], dashes: str = "--"
    ) -> None:
        self.config, self.harmless, self.dashes = config, harmless, dashes
        self.asked: set[tuple[str, str]] = set()
        self.refusals: dict[str, None] = {}  # in order, each once
        self.assumed: list[str] = []
        self.stood_in = False  # whether something else was taken for a wrong value

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
            self.wrong(expected(self.spot(section, name), wanted, f"{found!r}"))
            return max(default, 1)
        return found

    def needed(self, section: str, key: str, remedy: str) -> int:
        """A number that no default is known for."""
        if self.value(section, key, None) is None:
            self.wrong(expected(self.spot(section, key), "a number", "none", remedy))
            return 1
        return self.number(section, key, default=1)

    def decimal(self, section: str, key: str, default: float) -> float:
        """A number that need not be a whole one."""
        found = self.value(section, key, default)
        try:
            if isinstance(found, bool):
                raise TypeError
            return float(found)
        except (TypeError, ValueError):
            self.wrong(expected(self.spot(section, key), "a number", f"{found!r}"))
            return default

    def one_of(self, section: str, key: str, known: Mapping[str, str], default: str) -> str:
        found = self.value(section, key, default)
        if not isinstance(found, str) or found not in known:
            self.refuse(section, key, " or ".join(known), default or "none")
            self.stood_in = True
            return next(iter(known.values()))
        return known[found]

    def refuse(self, section: str, key: str, wanted: str, default: str = "none") -> None:
        """Refuse a key together with all others, once everything is read."""
        found = self.value(section, key, default)
        self._note(expected(self.spot(section, key), wanted, f"{found}"))

    def wrong(self, message: str) -> None:
        """Refuse a value for which another one stands in until everything is read."""
        self._note(message)
        self.stood_in = True

    def _note(self, message: str) -> None:
        self.refusals[message.removesuffix(".")] = None

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

    def imported(self, read: Callable[[], Document]) -> Imported:
        """The job that ``read`` makes of the keys, with what nobody asked for in its order;
        UnsupportedError that names all that was refused."""
        document: Document = {}
        try:
            document = read()
        except ShardwrightError as error:
            if not self.refusals:
                raise
            # What does not fit a value that stands in for a wrong one is no news of the file.
            if not self.stood_in:
                self._note(str(error))
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
            if section and not given:  # which says nothing
                continue
            keys = self._unread_of(section, given)
            spots = [self.spot(section, key) for key in keys]
            # A section of which nothing is known is told as one line, not key by key.
            strange = len(keys) == len(given) and not any(map(self.harmless.fullmatch, spots))
            if section and (self.harmless.fullmatch(section) or strange):
                yield section
            else:
                yield from spots

    def spot(self, section: str, key: str) -> str:
        """A key as a message names it."""
        return f"{section}.{key}" if section else f"{self.dashes}{key}"
