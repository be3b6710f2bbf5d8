"""Tables that a run learned, as rows of bytes for inference: one safetensors file, and its lookups.

    python examples/packing.py RUN_DIR [--kind int8] [--step N] [--out tables.safetensors]

writes them of a run of a DLRM with checkpoints; ``packed_embeddings(FILE)`` looks rows up, in one
process.

Every row has a scale and an offset of its own: an entry is read as scale * q + offset. ``int8`` has
a byte for each entry, then scale and offset in fp32; ``int4`` has two entries in a byte, the even
one low, then both in fp16: as PyTorch's ``quantized.embedding_bag_*_rowwise_offsets`` and FBGEMM's
kernels have them. No entry is further than half a scale from what it was, but for the rounding of
reading it in fp32; what a row has least of and most of are the ends of its range.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional

from shardwright.cli import options as shared
from shardwright.cli.main import Parser, exit_code
from shardwright.core.document import decode_json, write_atomically
from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.kinds import PACKED, dense_of, packed_bytes
from shardwright.core.model import TableSpec
from shardwright.core.outputs import FileKind, check_output
from shardwright.core.quantities import format_bytes
from shardwright.job.job import checkpoint_folder
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import plan_file
from shardwright.models.embeddings import AT_A_TIME, Embeddings
from shardwright.runtime.checkpoint.files import open_shard
from shardwright.runtime.checkpoint.read import read_parts
from shardwright.runtime.checkpoint.region import whole

Bytes = Literal["int8", "int4"]
Looks = dict[str, tuple[Bytes, Annotated[int, msgspec.Meta(ge=1)]]]  # kind and dim by table

TABLES = FileKind(
    "file of tables", re.compile(rb'.{8}\{"__metadata__":\{"shardwright\.tables/', re.DOTALL)
)
_HEADER = "shardwright.tables/1"  # in the file: the kind and dim of every table, in order
_MOST = {"int8": torch.finfo(torch.float32).max, "int4": torch.finfo(torch.float16).max}
_READ = {
    "int8": torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    "int4": torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}


class PackedTables(nn.Module):
    """Ids [B, F] int64 of tables in the order of ``rows``, bytes [N, width] of each by its name ->
    rows [B, F, D] in fp32. ``looks`` are the kind and dim of each."""

    def __init__(self, rows: Mapping[str, torch.Tensor], looks: Looks) -> None:
        super().__init__()
        self.looks = looks
        for name in looks:
            self.register_buffer(name, rows[name])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of every table; InputError for an id that is none."""
        if ids.dim() != 2 or ids.shape[1] != len(self.looks):
            wanted = f"shape [batch, {len(self.looks)}]"
            raise InputError(expected("ids", wanted, str([*ids.shape])))
        found = []
        for (name, (kind, dim)), own in zip(self.looks.items(), ids.unbind(1), strict=True):
            rows = self.get_buffer(name)
            if own.numel() and not (int(own.min()) >= 0 and int(own.max()) < len(rows)):
                worst = int(own.min()) if int(own.min()) < 0 else int(own.max())
                wanted = f"ids from 0 to {len(rows) - 1}"
                raise InputError(expected(f"ids of table '{name}'", wanted, str(worst)))
            found.append(looked_up(rows, own.contiguous(), kind, dim))
        return torch.stack(found, 1)


@torch.no_grad()
def packed_tables(learned: Embeddings, kind: Bytes) -> PackedTables:
    """The rows that ``learned`` makes, of every table, as bytes; each row is computed once."""
    found, device = {}, learned.limits.device
    for place, table in enumerate(learned.kinds.tables):
        own = torch.empty(table.rows, packed_bytes(table.dim, kind), dtype=torch.uint8)
        for ids in torch.arange(table.rows, device=device).split(AT_A_TIME):
            rows = packed(learned.made(place, ids), kind, f"table '{table.name}'")
            own[int(ids[0]) : int(ids[0]) + len(ids)] = rows
        found[table.name] = own
    looks: Looks = {table.name: (kind, table.dim) for table in learned.kinds.tables}
    return PackedTables(found, looks)


def packed(rows: torch.Tensor, kind: str, where: str) -> torch.Tensor:
    """Rows [N, D] of any floating dtype -> bytes [N, ``packed_bytes``]; InputError, naming
    ``where``, for what is not finite, or beyond fp16 in ``int4``."""
    count, dim = rows.shape
    found = rows.new_empty(count, packed_bytes(dim, kind), dtype=torch.uint8)
    if not count:
        return found
    exact = rows.double()
    least, most = exact.amin(1), exact.amax(1)
    if not bool((torch.maximum(most, -least) <= _MOST[kind]).all()):
        wanted = f"numbers up to {_MOST[kind]:.6g} for kind '{kind}'"
        worst = exact.abs().max().item()
        raise InputError(expected(where, wanted, f"{worst:.6g}"))
    steps, ends = 2 ** PACKED[kind].bits - 1, PACKED[kind].ends
    dtype = torch.float32 if kind == "int8" else torch.float16
    offset = _rounded(least, dtype, up=False)
    scale = _rounded((most - offset.double()) / steps, dtype, up=True)
    size = torch.where(scale > 0, scale, 1).double().unsqueeze(1)
    steps_of = ((exact - offset.double().unsqueeze(1)) / size).round_().clamp_(0, steps)
    values = steps_of.to(torch.uint8)
    if kind == "int4":
        values = functional.pad(values, (0, dim % 2)).view(count, -1, 2)
        values = values[:, :, 0] | values[:, :, 1] << 4
    found[:, :-ends] = values
    found[:, -ends:] = torch.stack([scale, offset], 1).view(torch.uint8)
    return found


def _rounded(values: torch.Tensor, dtype: torch.dtype, *, up: bool) -> torch.Tensor:
    """Doubles [N] as the nearest numbers of ``dtype`` that are not below them, or not above."""
    found = values.to(dtype)
    wrong = found.double() < values if up else found.double() > values
    if not bool(wrong.any()):
        return found
    bits = found.view(torch.int32 if dtype == torch.float32 else torch.int16)
    away = (found > 0) if up else (found < 0)  # the next number's bits are larger
    smallest = torch.ones_like(bits) if up else torch.ones_like(bits) | torch.iinfo(bits.dtype).min
    moved = torch.where(found == 0, smallest, torch.where(away, bits + 1, bits - 1))
    return torch.where(wrong, moved, bits).view(dtype)


def unpacked(rows: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """Bytes [..., B] -> rows [..., D] in fp32."""
    ends = PACKED[kind].ends
    values, tail = rows[..., :-ends], rows[..., -ends:].contiguous()
    if kind == "int4":
        values = torch.stack([values & 15, values >> 4], -1).flatten(-2)[..., :dim]
    scale, offset = tail.view(torch.float32 if kind == "int8" else torch.float16).float().unbind(-1)
    return torch.addcmul(offset.unsqueeze(-1), values.float(), scale.unsqueeze(-1))


def looked_up(rows: torch.Tensor, ids: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """Rows [..., D] in fp32 of ``ids`` [...], which are all there."""
    if ids.device.type != "cpu":
        return unpacked(rows[ids], kind, dim)
    flat = ids.reshape(-1)
    bags = torch.arange(len(flat) + 1)  # one id in each, which is read in one pass
    found = _READ[kind](rows, flat, bags, False, 0, False, None, None, include_last_offset=True)
    return found[:, :dim].view(*ids.shape, dim)


def saved_embeddings(
    folder: Path | str, tables: Sequence[TableSpec], step: int | None = None
) -> Embeddings:
    """What a DLRM's ``tables``, those of its job, learned until ``step`` of the checkpoints in
    ``folder``, by default the newest, however they were cut.

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


def write_packed(tables: PackedTables, path: Path | str) -> None:
    """Rows of bytes as a safetensors file: every table a tensor [rows, bytes] of its name."""
    header = {_HEADER: msgspec.json.encode(tables.looks).decode()}
    write_atomically(path, save({name: tables.get_buffer(name) for name in tables.looks}, header))


def packed_embeddings(path: Path | str) -> PackedTables:
    """The tables of such a file: ids [B, F] -> rows [B, F, D]; InputError for another one."""
    path = Path(path)
    with open_shard(path) as file:
        rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        looks = _looks((file.metadata() or {}).get(_HEADER, ""))
    fits = [
        name in rows
        and rows[name].dtype == torch.uint8
        and rows[name].shape[1:] == (packed_bytes(dim, kind),)
        for name, (kind, dim) in looks.items()
    ]
    if not fits or not all(fits):
        remedy = "python examples/packing.py RUN_DIR writes one."
        raise InputError(expected(str(path), "packed tables", "a file without", remedy))
    return PackedTables(rows, looks).eval()


def _looks(text: str) -> Looks:
    """Kinds and dims by table; none of a header that is not ours."""
    try:
        return decode_json(text, Looks)
    except msgspec.MsgspecError:
        return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every table of a run as rows of bytes, in one process."""
    return exit_code(lambda: _pack(arguments))


def _pack(arguments: Sequence[str] | None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="packing.py", description=__doc__, formatter_class=form)
    shared.run_argument(parser)
    parser.add_argument("--kind", choices=list(PACKED), default="int8", help="of rows (int8)")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoints (the newest)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="RUN_DIR/tables.safetensors, or another one"
    )
    options = parser.parse_args(arguments)
    folder = shared.run_folder(options)
    job = read_plan(plan_file(folder)).job
    if not job.model.traits.reads_clicks:
        wanted, got = "a run of a DLRM", f"model.kind '{job.model.kind}'"
        remedy = "Pack tables of your own in Python: packed_tables."
        raise UnsupportedError(expected(str(folder), wanted, got, remedy))
    saved = checkpoint_folder(job, folder)
    if not saved.is_dir():
        remedy = "Train with a [checkpoint] section."
        raise InputError(expected(str(saved), "the checkpoints of the run", "none", remedy))
    out = options.out or folder / "tables.safetensors"
    check_output(out, TABLES, option="--out")
    learned = saved_embeddings(saved, job.tables, options.step)
    replaced = shared.beside(out)
    write_packed(packed_tables(learned, options.kind), out)
    rows = sum(table.rows for table in job.tables)
    size = format_bytes(out.stat().st_size)
    print(f"{out}: {len(job.tables):,} tables, {rows:,} rows of {options.kind}, {size}{replaced}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
