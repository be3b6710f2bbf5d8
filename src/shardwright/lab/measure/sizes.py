"""Sizes of the cases, for those who time them and for those who make figures of the times."""

from __future__ import annotations

from shardwright.cost.network import Collective

FLOAT = 4
BUFFERS = tuple(2**k for k in (12, 14, 16, 18, 20, 22, 24, 25))  # 4 KiB to 32 MiB
OVERLAPPED: tuple[tuple[Collective, int], ...] = (  # buffers of a small layer and of a large one
    ("all_gather", 2**20),
    ("reduce_scatter", 2**20),
    ("all_gather", 2**23),
    ("reduce_scatter", 2**23),
)
PARTS = ("alone", "work", "both")
WIDTHS = (16, 64)  # elements of a row that is read


def collective_case(collective: Collective, nbytes: int) -> str:
    """The case of a collective over a full buffer."""
    return f"{collective} {nbytes}"


def overlap_case(collective: Collective, nbytes: int, part: str) -> str:
    """The case of a collective alone, of work that takes as long, or of both at once."""
    return f"overlap {collective} {nbytes} {part}"


def row_case(width: int) -> str:
    """The case of reading random rows."""
    return f"rows of {width}"
