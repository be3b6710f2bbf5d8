"""The embeddings of a checkpoint, out of which serving tables are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwright.core.kinds import dense_of
from shardwright.core.model import TableSpec
from shardwright.models.embeddings import Embeddings
from shardwright.runtime.checkpoint.held import whole
from shardwright.runtime.checkpoint.read import read_parts


def saved_embeddings(
    folder: Path | str, tables: Sequence[TableSpec], step: int | None = None
) -> Embeddings:
    """What a DLRM's ``tables``, those of its job, learned until ``step`` of the checkpoints in
    ``folder``, by default the newest, however they were cut; ``materialised("int8")`` packs it.

    InputError or MismatchError for what is no checkpoint of theirs.
    """
    found = Embeddings(tables, start=False)
    parts = [
        whole(f"tables.{member.name}.weight", found.rows_of(member).detach())
        for member in found.kinds.members
    ]
    for table in tables:
        for each in dense_of(table):
            name = f"{table.name}.{each.name}"
            parts.append(whole(f"kinds.{name}", found.kinds.get_parameter(name).detach()))
    read_parts(folder, parts, step)
    return found
