"""Rows that are made up: written into the run folder, with what is known about them beside them.

The file beside them also has their digest. So it is known of rows whether a run made them up, and
nothing else is ever replaced.
"""

# A run must never write over rows that somebody else put there under the same name. What tells them
# apart is a digest that is kept with the facts: rows are replaced only if they are those of which
# these facts are. Facts are renamed into place before the rows, so a run that is killed in between
# leaves facts without rows, which the next one makes again, and never rows under wrong facts.

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.document import write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.launcher.folder import facts_file

DIGEST, ALWAYS = "sha256", "bayes_log_loss"  # keys that show whose facts they are
REMEDY = "Move it away or choose another train.out."


def make_up(rows: Path, write: Callable[[Path], Any]) -> None:
    """Have ``write`` write the file ``rows``, and keep beside it what it returns about them.

    InputError, and nothing has changed, if a file that no run has made up is in the way.
    """
    facts = facts_file(rows)
    _refuse_foreign(rows, facts)
    # Always written anew, though they may be there already: only so is it known that they are the
    # same.
    part = rows.with_name(f".{rows.name}.part")
    try:
        rows.parent.mkdir(parents=True, exist_ok=True)
        known = msgspec.to_builtins(write(part))
        made, before = _digest(part), read_facts(rows).get(DIGEST)
        found = _digest(rows) if rows.exists() else None
        if found not in (None, before, made):
            raise InputError(expected(str(rows), "rows that a run made up", "others", REMEDY))
        # Without rows first: whenever this ends, rows that are there are those that facts are of.
        if found != made:
            rows.unlink(missing_ok=True)
        write_atomically(facts, msgspec.json.encode(known | {DIGEST: made}))
        part.replace(rows)
    except OSError as error:
        found = f"'{error.strerror or type(error).__name__}'"
        raise InputError(expected(str(rows), "a file that can be written", found)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def read_facts(rows: Path) -> dict[str, Any]:
    """What is known about ``rows``; nothing of rows that were not made up."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        facts = msgspec.json.decode(facts_file(rows).read_bytes())
        return facts if isinstance(facts, dict) else {}
    return {}


def _refuse_foreign(rows: Path, facts: Path) -> None:
    """What is no file of ours whatever it contains."""
    for path in (rows, facts):
        if os.path.lexists(path) and not path.is_file():
            raise InputError(expected(str(path), "a file", "something else", REMEDY))
    if facts.exists() and ALWAYS not in read_facts(rows):
        raise InputError(expected(str(facts), "the facts of rows made up", "another file", REMEDY))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
