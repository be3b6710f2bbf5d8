"""Embeddings of any kinds on one device, all tables of a width in one tensor, and what serves their
rows without training: full tables or rows of bytes.

A row of bytes has a scale and an offset of its own.

An entry is read as scale * q + offset. ``int8`` has a byte for each entry, then scale and offset in
fp32; ``int4`` has two entries in a byte, the even one low, then both in fp16: as PyTorch's
``quantized.embedding_bag_*_rowwise_offsets`` and FBGEMM's kernels have them. No entry is further
than half a scale from what it was, but for the rounding of reading it in fp32; what a row has least
of and most of are the ends of its range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import (
    PACKED,
    dense_of,
    is_packed,
    join_of,
    kind_of,
    members_of,
    packed_bytes,
    parts_of,
)
from shardwright.core.model import TableSpec
from shardwright.core.schedule import BAGS_OF_ONE
from shardwright.models.kinds import Kinds
from shardwright.models.start import generator_of

AT_A_TIME = 65_536  # rows that are materialised or packed
_MOST = {"int8": torch.finfo(torch.float32).max, "int4": torch.finfo(torch.float16).max}
_READ = {
    "int8": torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    "int4": torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}


def _key(member: TableSpec) -> str:
    """The name of the weight that has a member's rows: all of a width that are kept alike."""
    return f"{member.dim}_{kind_of(member)}" if is_packed(member) else str(member.dim)


def _empty(rows: int, member: TableSpec, device: torch.device | str) -> nn.Parameter:
    if not is_packed(member):
        return nn.Parameter(torch.empty(rows, member.dim, device=device))
    width = packed_bytes(member.dim, kind_of(member))
    found = torch.empty(rows, width, dtype=torch.uint8, device=device)
    return nn.Parameter(found, requires_grad=False)


class Embeddings(nn.Module):
    """Ids [B, F] int64, one for each of F settled ``tables`` of one dim -> rows [B, F, D].

    One gather for all parts of a width, then the joins of the kinds. ``sparse`` gradients are those
    of ``torch.nn.Embedding``. Without ``start`` parameters have no values yet.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        seed: int = 0,
        sparse: bool = False,
        device: torch.device | str = "cpu",
        start: bool = True,
    ) -> None:
        super().__init__()
        self.kinds, self.sparse, self.seed = Kinds(tables, device, bags=False), sparse, seed
        # Parts of a tensor train are wider than its rows: they are best gone before the next ones'.
        self.is_widened = any(join_of(table) == "tensor_train" for table in tables)
        self.weights = nn.ParameterDict()
        self.bases: dict[str, int] = {}  # the first row of every member in its weight
        ends: dict[str, int] = {}
        like: dict[str, TableSpec] = {}
        for member in self.kinds.members:
            key = _key(member)
            self.bases[member.name] = ends.get(key, 0)
            ends[key] = self.bases[member.name] + member.rows
            like[key] = member
        for key, rows in ends.items():
            self.weights[key] = _empty(rows, like[key], device)
        alone = all(kind_of(table) == "full" or is_packed(table) for table in tables)
        self.is_plain = alone and len(self.weights) == 1  # one gather, of rows as they are asked
        limits = torch.tensor([table.rows for table in tables], device=device)
        first = torch.tensor(list(self.bases.values()), dtype=torch.int64, device=device)
        self.register_buffer("limits", limits, persistent=False)
        self.register_buffer("first", first, persistent=False)
        self.kinds.to(device)
        if start and torch.device(device).type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its starting values, which are drawn on the CPU: the same on every
        device."""
        for table in self.kinds.tables:
            for part, member in zip(parts_of(table), members_of(table), strict=True):
                random = generator_of(self.seed, member.name)
                low, high = part.centre - part.bound, part.centre + part.bound
                own = self.rows_of(member)
                dtype = torch.float32 if is_packed(member) else own.dtype
                for first in range(0, member.rows, AT_A_TIME):
                    count = min(AT_A_TIME, member.rows - first)
                    rows = torch.empty(count, member.dim, dtype=dtype, device="cpu")
                    rows.uniform_(low, high, generator=random)
                    self._keep(member, first, rows.to(own.device))
            for each in dense_of(table):
                random = generator_of(self.seed, table.name, each.name)
                own = self.kinds.get_submodule(table.name).get_parameter(each.name)
                values = torch.empty(own.shape, dtype=own.dtype, device="cpu")
                own.copy_(values.uniform_(-each.bound, each.bound, generator=random))

    def rows_of(self, member: TableSpec) -> torch.Tensor:
        """The weight [rows, dim] of one of ``kinds.members``; of packed rows their bytes."""
        return self.weights[_key(member)].narrow(0, self.bases[member.name], member.rows)

    def _keep(self, member: TableSpec, first: int, rows: torch.Tensor) -> None:
        """Have ``rows`` [N, dim] for those of a member from ``first`` on."""
        own = self.rows_of(member).narrow(0, first, len(rows))
        if is_packed(member):
            rows = packed(rows, kind_of(member), f"table '{member.name}'")
        own.copy_(rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of every table; InputError for an id that is none."""
        self._check(ids)
        if self.is_plain:
            # table after table, as what a processor knows of where pages lie is soon forgotten
            # (a copy in any case: the ids of one sample are contiguous the other way round as well)
            places = ids.t().clone(memory_format=torch.contiguous_format)
            places += self.first.unsqueeze(1)
            return self._looked(places, self.kinds.members[0]).transpose(0, 1)
        if self.is_widened and not torch.is_grad_enabled():
            return torch.stack([self._one(n, own) for n, own in enumerate(ids.unbind(1))], 1)
        asked = self.kinds.asked(ids)
        if isinstance(asked, torch.Tensor):
            found = self._looked(asked.add_(self.first), self.kinds.members[0])
            rows = self.kinds(found, ids)
        else:
            rows = self.kinds(self._by_width(asked), ids)
        return rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows.values()), 1)

    def _by_width(self, asked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rows [B, dim] of every member, one gather for each weight."""
        found = {}
        for key in self.weights:
            members = [member for member in self.kinds.members if _key(member) == key]
            ids = torch.stack([asked[m.name] + self.bases[m.name] for m in members])
            rows = self._looked(ids, members[0]).unbind()
            found.update(zip((member.name for member in members), rows, strict=True))
        return found

    def _looked(self, ids: torch.Tensor, member: TableSpec) -> torch.Tensor:
        """Rows of the weight that has those of ``member``."""
        weight = self.weights[_key(member)]
        if is_packed(member):
            return looked_up(weight, ids, kind_of(member), member.dim)
        if torch.is_grad_enabled() or ids.device.type != "cpu" or ids.numel() < BAGS_OF_ONE:
            return functional.embedding(ids, weight, sparse=self.sparse)
        flat = ids.reshape(-1)
        rows = functional.embedding_bag(flat, weight, torch.arange(len(flat)), mode="sum")
        return rows.view(*ids.shape, member.dim)

    def _check(self, ids: torch.Tensor) -> None:
        tables = self.kinds.tables
        if ids.dim() != 2 or ids.shape[1] != len(tables):
            raise InputError(expected("ids", f"shape [batch, {len(tables)}]", str([*ids.shape])))
        if not ids.numel() or (int(ids.min()) >= 0 and bool((ids.amax(0) < self.limits).all())):
            return
        sample, place = (int(x) for x in ((ids < 0) | (ids >= self.limits)).nonzero()[0])
        spot = f"ids of table '{tables[place].name}', sample {sample}"
        wanted = f"ids from 0 to {tables[place].rows - 1}"
        raise InputError(expected(spot, wanted, str(int(ids[sample, place]))))

    @torch.no_grad()
    def materialised(self, kind: Literal["full", "int8", "int4"] = "full") -> Embeddings:
        """Tables of ``kind`` with the rows that these make, for inference: a gather and nothing
        else.

        Every row is computed once; full tables take their bytes whatever these take.
        """
        tables = [
            TableSpec(table.name, table.rows, table.dim, kind=kind) for table in self.kinds.tables
        ]
        device = self.limits.device
        full = Embeddings(tables, device=device, start=False)
        for place, member in enumerate(full.kinds.members):
            for ids in torch.arange(member.rows, device=device).split(AT_A_TIME):
                full._keep(member, int(ids[0]), self._one(place, ids))
        return full.eval()

    def _one(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows [N, D] of one table."""
        table = self.kinds.tables[number]
        asked = zip(members_of(table), self.kinds.rows_of(number, ids), strict=True)
        parts = [self._looked(i + self.bases[m.name], m) for m, i in asked]
        return self.kinds.joined(table, parts, ids)


# ---- rows of bytes -------------------------------------------------------------------------------


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
