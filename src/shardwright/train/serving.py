"""The embeddings of a checkpoint, out of which serving tables are made, and the file of these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from safetensors.torch import save

from shardwright.core.document import decode_json, write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import dense_of, kind_of, packed_bytes
from shardwright.core.model import TableSpec
from shardwright.models.embeddings import Embeddings
from shardwright.runtime.checkpoint.files import open_shard
from shardwright.runtime.checkpoint.read import read_parts
from shardwright.runtime.checkpoint.region import whole

_Dim = Annotated[int, msgspec.Meta(ge=1)]
_TABLES = "shardwright.tables/1"  # in the file's header: the kind and dim of every table, in order


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


def write_packed(embeddings: Embeddings, path: Path | str) -> None:
    """Rows of bytes as a safetensors file: every table a tensor [rows, bytes] of its name."""
    tables = embeddings.kinds.members
    looks = {table.name: (kind_of(table), table.dim) for table in tables}
    header = {_TABLES: msgspec.json.encode(looks).decode()}
    rows = {table.name: embeddings.rows_of(table).detach() for table in tables}
    write_atomically(path, save(rows, header))


def packed_embeddings(path: Path | str) -> Embeddings:
    """The tables of such a file: ids [B, F] -> rows [B, F, D]; InputError for another one."""
    path = Path(path)
    with open_shard(path) as file:
        rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        looks = _looks((file.metadata() or {}).get(_TABLES, ""))
    fits = [
        name in rows
        and rows[name].dtype == torch.uint8
        and rows[name].shape[1:] == (packed_bytes(dim, kind),)
        for name, (kind, dim) in looks.items()
    ]
    if not fits or not all(fits):
        remedy = "shardwright pack RUN_DIR writes one."
        raise InputError(expected(str(path), "packed tables", "a file without", remedy))
    tables = [
        TableSpec(name, len(rows[name]), dim, kind=kind) for name, (kind, dim) in looks.items()
    ]
    found = Embeddings(tables, start=False)
    for member in found.kinds.members:
        found.rows_of(member).copy_(rows[member.name])
    return found.eval()


def _looks(text: str) -> dict[str, tuple[Literal["int8", "int4"], _Dim]]:
    """Kinds and dims by table; none of a header that is not ours."""
    try:
        return decode_json(text, dict[str, tuple[Literal["int8", "int4"], _Dim]])
    except msgspec.MsgspecError:
        return {}
