"""What is known about made-up rows, in a file beside them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.document import write_atomically
from shardwright.lab.folder import facts_file


def write_facts(rows: Path, facts: Any) -> None:
    """Keep ``facts`` beside the file of ``rows``."""
    write_atomically(facts_file(rows), msgspec.json.encode(facts))


def read_facts(rows: Path) -> dict[str, float]:
    """What was kept beside ``rows``; nothing for rows that were not made up."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        facts = msgspec.json.decode(facts_file(rows).read_bytes())
        return facts if isinstance(facts, dict) else {}
    return {}
