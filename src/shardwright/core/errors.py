"""The errors a user can meet, and the process exit code that belongs to each.

Every message reads ``where: expected X, got Y. what to do`` and names the file, the key or the
tensor. ``ValueError``-like types are the user's to mend; an ``AssertionError`` is ours.
"""

# Exit codes are a contract: a scheduler may restart what ends with 75 and gives up what ends with
# 2, so a type says which of the two an error is, not where it was raised. Whoever raises writes
# the line; nobody above adds to it, for then a message would say less about its own key.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INPUT = 2
EXIT_NO_PLAN = 3
EXIT_MISMATCH = 4
EXIT_RUN_FAILED = 5
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class ShardwrightError(Exception):
    """Base of every error this package raises on purpose; ``exit_code`` is the process's."""

    exit_code = EXIT_BUG


class InputError(ShardwrightError, ValueError):
    """A file, a key, a size or a call that cannot be used as it was given."""

    exit_code = EXIT_INPUT


class UnsupportedError(InputError):
    """A valid request that this version does not carry out; the message names the alternative."""


class NoPlanError(ShardwrightError):
    """No assignment of tensors to ranks fits the memory of the cluster."""

    exit_code = EXIT_NO_PLAN


class MismatchError(ShardwrightError):
    """Two things that must agree do not: ranks, plan and job, prediction and measurement."""

    exit_code = EXIT_MISMATCH


class RunError(ShardwrightError):
    """A training run that started and could not finish."""

    exit_code = EXIT_RUN_FAILED


class StoppedError(ShardwrightError):
    """A run that a signal stopped between two steps."""

    exit_code = EXIT_PREEMPTED


class PeerError(RunError):
    """This rank could go on; another one could not, and says why itself."""


NEAREST = 5  # names that a message suggests


def likeliest(name: str, known: Iterable[str]) -> str:
    """The known name that was meant, one that begins with ``name`` first; empty where none is like
    it."""
    names = list(known)
    near = [each for each in names if name and each.startswith(name)]
    return next(iter(near or get_close_matches(name, names, n=1)), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names most like ``name``, whatever their case, in quotes; all where there are few;
    empty where there are none."""
    names = list(known)
    lower = {each.lower(): each for each in reversed(names)}
    close = [lower[each] for each in get_close_matches(name.lower(), lower, NEAREST, cutoff=0.4)]
    within = [each for each in names if name.lower() in each.lower() and each not in close]
    shown = names if len(names) <= NEAREST else ([*close, *within] or names)[:NEAREST]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return ", ".join(f"'{each}'" for each in shown) + more


def listed(names: Sequence[str], most: int) -> str:
    """The first of the names, at ``most`` so many, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_type(value: object, kind: type, where: str, remedy: str = "") -> None:
    """InputError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise InputError(expected(where, f"a {kind.__name__}", type(value).__name__, remedy))


def expected(where: str, wanted: str, found: str, remedy: str = "") -> str:
    """One line in the form every message of this package has."""
    text = f"{where}: expected {wanted}, got {found}."
    return f"{text} {remedy}" if remedy else text
