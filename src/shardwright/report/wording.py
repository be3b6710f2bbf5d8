"""Numbers and names as people read them: plain text, the same in a terminal and on a page.

Names come from files that anyone may have written, so :func:`printable` stands before every one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard
from shardwright.core.quantities import format_seconds
from shardwright.core.timeline import stretches

NAME_LIMIT = 120
TEXT_LIMIT = 2000
_MOST_STRETCHES = 5


def printable(text: str, limit: int = NAME_LIMIT) -> str:
    """``text`` on one line without control, direction or unassigned characters.

    Those become U+FFFD, white space becomes a blank, and what is longer than ``limit`` loses its
    middle. Markup is left alone: whoever builds markup escapes it.
    """
    shown = "".join(_printable(c) for c in text[: 2 * limit])
    if len(text) <= limit:
        return shown
    half = limit // 2 - 1
    return f"{shown[:half]}…{''.join(_printable(c) for c in text[-half:])}"


def _printable(character: str) -> str:
    if character.isspace():
        return " "
    return "\ufffd" if unicodedata.category(character).startswith("C") else character


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, the middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def counted(number: int, noun: str) -> str:
    """``1 table``, ``26 tables``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ranks_text(ranks: Iterable[int], world_size: int) -> str:
    """Distinct ranks in few characters: ``all``, ``0-1, 5``, ``32 of 64``; ``none`` without any."""
    distinct = sorted(set(ranks))
    if not distinct:
        return "none"
    if world_size > 1 and (distinct[0], distinct[-1]) == (0, len(distinct) - 1) == (
        0,
        world_size - 1,
    ):
        return "all"
    found = list(stretches(distinct))
    if len(found) > _MOST_STRETCHES:
        return f"{len(distinct)} of {world_size}"
    return ", ".join(f"{a}" if n == 1 else f"{a}-{a + n - 1}" for a, n in found)


def shards_text(sizes: Sequence[tuple[int, int]], replicated: bool = False) -> str:
    """Shard sizes, equal ones counted: ``2 x 200,000 x 16``; different sizes on their own lines."""
    counts: dict[tuple[int, int], int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    if replicated and len(counts) == 1:
        return f"{size_text(*sizes[0])} each"
    if len(counts) > 3:
        return f"{len(sizes)} up to {size_text(*max(counts))}"
    return "\n".join(
        size_text(*size) if count == 1 else f"{count} x {size_text(*size)}"
        for size, count in counts.items()
    )


def size_text(rows: int, columns: int) -> str:
    """``200,000 x 16``."""
    return f"{rows:,} x {columns:,}"


def placement_text(placement: Placement) -> str:
    """A placement in the words of people who do not read our code."""
    match placement:
        case Replicate():
            return "replicated"
        case Flat():
            return "sharded (flat)"
        case Shard(dim):
            return f"sharded ({_dim_word(dim)})"
        case Owned(rank):
            return f"whole on rank {rank}"
        case BlockShard(size, dim):
            return f"sharded (blocks of {size} {_dim_word(dim)})"


def _dim_word(dim: int) -> str:
    return {0: "rows", 1: "columns"}.get(dim, f"dimension {dim}")


def percent(share: float, signed: bool = False) -> str:
    """``3.1 %``; two digits where one would round to nothing, none from 1000 % on."""
    value = share * 100
    digits = 0 if abs(value) >= 1000 else 2 if 0 < abs(value) < 0.1 else 1
    if value == 0:
        return "0 %"
    return f"{value:+,.{digits}f} %" if signed else f"{value:,.{digits}f} %"


def signed_bytes(difference: float) -> str:
    """A difference in bytes, to the byte: ``+1,024 B``, ``equal``."""
    return "equal" if difference == 0 else f"{difference:+,.0f} B"


def seconds_text(seconds: float | None, absent: str = "-") -> str:
    """A duration, or ``absent``."""
    return absent if seconds is None else format_seconds(seconds)
