"""Bytes and seconds as people write and read them. 1 GiB is 2^30 bytes and is written GiB."""

# A bare number is the commonest mistake in a job ("hbm_cap = 80"), and would be 80 bytes. So small
# integers are refused with the unit that was likeliest meant.

from __future__ import annotations

import re
from decimal import Decimal

from shardwright.core.errors import InputError

_SCALES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*$")
MAX_BYTES = 2**60
LEAST_BARE = 2**20  # bytes that a number without a unit stands for
MOST_GIB = 4096  # that a smaller number is likelier to mean than MiB
SAME_SECONDS = 1e-9  # relative; closer ones differ by rounding


def parse_bytes(value: int | str, where: str) -> int:
    """Bytes from an integer or from text such as ``"48 MiB"`` or ``"80 GB"``."""
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.match(value)
        if match is None:
            raise InputError(where, "bytes as an integer or a text like '48 MiB'", f"'{value}'")
        size = int(Decimal(match.group(1)) * _SCALES[match.group(2)])
    if not 0 < size <= MAX_BYTES:
        raise InputError(
            where, "a size between 1 B and 2^60 B", f"{value}", "Write bytes or '48 MiB'."
        )
    return size


def check_unit(value: object, where: str, least: int = LEAST_BARE) -> None:
    """InputError for an integer below ``least``, so few bytes as no machine has: its unit was left
    out."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < least:
        unit = "GiB" if value < MOST_GIB else "MiB"
        remedy = f'Did you mean "{value} {unit}"? Bytes as few as these are written "{value} B".'
        raise InputError(where, "a size with its unit", f"{value} bytes", remedy)


def format_bytes(size: float) -> str:
    """A size for a table: binary units, three to four significant digits."""
    sign = "-" if size < 0 else ""
    magnitude = abs(size)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if magnitude >= _SCALES[unit]:
            return f"{sign}{magnitude / _SCALES[unit]:.2f} {unit}"
    return f"{sign}{magnitude:.0f} B"


def counted(number: int, noun: str) -> str:
    """``1 table``, ``26 tables``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def exact_bytes(size: float) -> str:
    """Every byte, and in units where there are enough for one."""
    exact, rounded = f"{int(size):,} B", format_bytes(size)
    return exact if rounded.endswith(" B") else f"{exact} ({rounded})"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """A duration for a table."""
    if seconds == 0:
        return "0"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.{digits}g} {unit}"
    return f"{seconds * 1e9:.{digits}g} ns"
