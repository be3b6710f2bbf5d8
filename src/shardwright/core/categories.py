"""What people call the kinds of bytes of a step, from what stays to what comes and goes."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.timeline import Kind

CATEGORIES: dict[str, str] = {
    "weight": "weights",
    "optimizer_state": "optimizer states",
    "gradient": "gradients",
    "buffer": "buffers",
    "input": "inputs",
    "cache": "caches",
    "padding": "padding",
    "activation": "activations",
    "gathered_weight": "gathered weights",
    "unreduced_gradient": "unreduced gradients",
    "all_gather": "all-gather buffers",
    "reduce_scatter": "reduce-scatter buffers",
    "communication": "exchange buffers",
    "output": "outputs",
    "temporary": "temporaries",
}
_PLACES = {kind: place for place, kind in enumerate(CATEGORIES)}


def category(kind: str) -> str:
    """A kind in words."""
    return CATEGORIES.get(kind, kind)


def in_order(kinds: Iterable[Kind]) -> list[Kind]:
    """Distinct kinds in the order of ``CATEGORIES``."""
    return sorted(set(kinds), key=lambda kind: (_PLACES.get(kind, len(_PLACES)), kind))
