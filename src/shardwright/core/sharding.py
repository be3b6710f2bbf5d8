"""The sharding types of embedding tables, and what each does to its table.

The only place that knows the types by name: other code asks for a trait, so that a type that cuts
and lies as another one does needs a row here and nothing else.
"""

# Other code asks for a trait and never for a name: before, a new type had to be added to fifteen
# files, and one that was missed planned tables that could not be run.

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

ShardingType = Literal[
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]

# Which ranks the shards of a type may go to: shard k to rank k; each to any rank; all to the ranks
# of one host; each column block to the ranks of one of several hosts.
Partition = Literal["uniform", "device", "host", "multi_host"]

Number = TypeVar("Number")


class Traits(msgspec.Struct, frozen=True):
    """What a sharding type does to a table.

    ``rows_over``: its rows are cut over all ranks, over those of a host, or not at all.
    ``replicated``: every rank holds the whole table. ``sequences``: it is for tables that are not
    pooled, too. ``freer``: the type that has its shards and lays them anywhere.
    """

    name: ShardingType
    letters: str
    partition: Partition
    rows_over: Literal["", "ranks", "host"] = ""
    cuts_columns: bool = False
    replicated: bool = False
    sequences: bool = True
    freer: ShardingType | None = None

    @property
    def cuts_rows(self) -> bool:
        """Whether shards share the rows of a table, and so its ids."""
        return bool(self.rows_over)

    @property
    def whole(self) -> bool:
        """Whether one rank holds all of the table and no other has any."""
        return not (self.replicated or self.cuts_rows or self.cuts_columns)

    @property
    def within_hosts(self) -> bool:
        """Whether its shards keep to a host, or each of its column blocks does."""
        return self.partition in ("host", "multi_host")

    def row_parts(self, ranks: Number, local: Number) -> Number:
        """Shards that share the rows of a column block, of ``ranks`` with ``local`` on a host."""
        assert self.cuts_rows
        return ranks if self.rows_over == "ranks" else local


_ROWS: tuple[Traits, ...] = (
    Traits("data_parallel", "DP", "uniform", replicated=True),
    Traits("table_wise", "TW", "device"),
    Traits("row_wise", "RW", "uniform", "ranks"),
    Traits("column_wise", "CW", "device", cuts_columns=True),
    Traits("table_row_wise", "TWRW", "host", "host", sequences=False),
    Traits(
        "table_column_wise", "TWCW", "host", cuts_columns=True, sequences=False, freer="column_wise"
    ),
    Traits("grid_shard", "GS", "multi_host", "host", cuts_columns=True, sequences=False),
)
_BY_NAME: dict[str, Traits] = {row.name: row for row in _ROWS}

TYPES: tuple[ShardingType, ...] = tuple(row.name for row in _ROWS)
# What any number of hosts has: the others keep to a host, and are one of these where there is one.
FREE: tuple[ShardingType, ...] = tuple(row.name for row in _ROWS if not row.within_hosts)


def traits(sharding_type: str) -> Traits:
    """What ``sharding_type`` does to a table."""
    return _BY_NAME[sharding_type]
