"""Packing of tables is an example now: ``examples/packing.py``."""

from __future__ import annotations

from shardwright.core.errors import UnsupportedError, expected

MOVED = ("saved_embeddings", "write_packed", "packed_embeddings")


def __getattr__(name: str) -> object:
    """UnsupportedError that says where a name of before is."""
    if name not in MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    wanted, remedy = "a name of the package", "It is in examples/packing.py of the repository."
    raise UnsupportedError(expected(f"{__name__}.{name}", wanted, "one that left it", remedy))
