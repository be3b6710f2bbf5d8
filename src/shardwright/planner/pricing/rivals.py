"""Which options another kernel would serve faster, by a profile's formulas over arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.planner.pricing.group import Group

Floats = NDArray[np.float64]
S = TypeVar("S", bound=Hashable)


def faster_kernels(
    cases: Sequence[tuple[TableSpec, Option]],
    kernels: Sequence[str],
    facts_of: Callable[[TableSpec], Sequence[Any]],
    scheme_of: Callable[[TableSpec, str, str], S],
    seconds: Callable[[S, list[Floats]], Floats],
) -> set[tuple[int, str]]:
    """Cases of which some shard takes less time with one of ``kernels``: number and kernel.

    :param facts_of: the quantities of a table.
    :param scheme_of: what formulas branch on, by table, sharding type and kernel.
    :param seconds: of shards by scheme, from their rows, columns and quantities.
    """
    numbers: dict[int, int] = {}
    facts: list[Sequence[Any]] = []
    known: dict[tuple[int, str, str], tuple[Group[tuple[S, ...]], list[int]]] = {}
    groups: dict[tuple[S, ...], tuple[Group[tuple[S, ...]], list[int]]] = {}
    for case, (table, option) in enumerate(cases):
        number = numbers.setdefault(id(table), len(facts))
        if number == len(facts):
            facts.append(facts_of(table))
        place = number, option.sharding_type, option.compute_kernel
        if place not in known:
            own = (option.compute_kernel, *kernels)
            schemes = tuple(scheme_of(table, option.sharding_type, kernel) for kernel in own)
            known[place] = groups.setdefault(schemes, (Group(schemes), []))
        group, owners = known[place]
        group.add(number, option)
        owners += [case] * (len(group.tables) - len(owners))
    found: set[tuple[int, str]] = set()
    for schemes, (group, owners) in groups.items():
        quantities = np.array(facts, dtype=np.float64).T[:, group.tables]
        sizes = (np.array(group.rows, dtype=np.float64), np.array(group.columns, dtype=np.float64))
        own_seconds, *others = (seconds(scheme, [*sizes, *quantities]) for scheme in schemes)
        for kernel, other in zip(kernels, others, strict=True):
            found |= {(owners[i], kernel) for i in np.flatnonzero(other < own_seconds)}
    return found
