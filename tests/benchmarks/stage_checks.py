"""What is asked of a small row's figures, run by itself or with all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ONLY_CUDA = ("host copies", "products float8", "attention cudnn", "graph")


def check_entries(name: str, found: Mapping[str, Any]) -> None:
    """Every entry has figures, or says that only CUDA has it."""
    assert "error" not in found, name
    assert len(found["entries"]) > 0
    for entry in found["entries"]:
        if name in ONLY_CUDA:
            assert entry["skipped"] == "only on CUDA"
        else:
            assert 0 < entry["least"] <= entry["seconds"] <= entry["most"]
            assert {"class", "op", "dtype", "shape", "host", "calls"} <= entry.keys()
        assert "error" not in entry


def check_numbers(name: str, found: Mapping[str, Any]) -> None:
    """Everything is as it should be, and fp32 as the plain module has it."""
    for place, value in leaves(found):
        assert value is not False, place
        assert value != "differs", place
        assert "Error" not in str(value), place
        if place.endswith("_apart") and "bf16" not in name:
            assert value < 1e-3, place


def check_kinds(found: Mapping[str, Any]) -> None:
    """Kinds of embeddings start and look up alike on every device."""
    assert found["kinds"] == 9
    assert found["start_otherwise"] == []
    assert found["errors"] == {}
    assert found["apart"] <= 1e-6


def leaves(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Figures with the way to each."""
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name} {key}")
        else:
            yield f"{name} {key}", value
