"""What all ranks wait for together in a step, as TorchRec's statistics count it (1.9.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.core.statistics import CriticalTerm
from shardwright.planner.tally import Placed, tally
from shardwright.torchrec.candidate import module_of


def modules(tables: Iterable[Placed]) -> dict[str, list[Placed]]:
    """Tables that exchange their rows together, by module and sharding type."""
    groups: dict[str, list[Placed]] = {}
    for placed in tables:
        name = f"{module_of(placed.choice.table)} {placed.choice.option.sharding_type}"
        groups.setdefault(name, []).append(placed)
    return groups


def critical_terms(tables: tuple[Placed, ...], ranks: int) -> Iterator[CriticalTerm]:
    """Ranks meet after the communication of each module and sharding type, forward and backward,
    and after all compute, forward and backward: each takes as long as its slowest rank."""
    for name, group in modules(tables).items():
        for part in ("fwd_comms", "bwd_comms"):
            yield _term(f"{name} {part}", True, group, part, ranks)
    for part in ("fwd_compute", "bwd_compute"):
        yield _term(part, False, tables, part, ranks)


def _term(
    name: str, communication: bool, tables: Iterable[Placed], part: str, ranks: int
) -> CriticalTerm:
    found = tally(tables, ranks).seconds.get(part)
    values = [0.0] * ranks if found is None else found.tolist()
    return CriticalTerm(name, communication, max(values), values.index(max(values)))
