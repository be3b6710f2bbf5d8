"""Shards that are priced together: those of one scheme, shape by shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardwright.core.option import Option
from shardwright.planner.choice import Cost

S = TypeVar("S")


@dataclass
class Group(Generic[S]):
    """Shards of one scheme: for each a table's number, rows and columns; then its cost."""

    scheme: S
    tables: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def add(self, table: int, option: Option) -> list[int]:
        """Note an option's shards; returns the place of each run, one for equal shapes."""
        seen: dict[tuple[int, int], int] = {}
        slots = []
        for run in option.runs:
            shape = run.rows, run.columns
            if shape not in seen:
                seen[shape] = len(self.tables)
                self.tables.append(table)
                self.rows.append(run.rows)
                self.columns.append(run.columns)
            slots.append(seen[shape])
        return slots
