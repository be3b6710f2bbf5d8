"""Embeddings of any kinds on one device, all tables of a width in one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import dense_of, join_of, kind_of, members_of, parts_of
from shardwright.core.model import TableSpec
from shardwright.models.kinds import Kinds
from shardwright.models.start import generator_of

AT_A_TIME = 65_536  # rows that are materialised


class Embeddings(nn.Module):
    """Ids [B, F] int64, one for each of F settled ``tables`` of one dim -> rows [B, F, D].

    One gather for all parts of a width, then the joins of the kinds. ``sparse`` gradients are those
    of ``torch.nn.Embedding``.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        seed: int = 0,
        sparse: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.kinds, self.sparse, self.seed = Kinds(tables, device, bags=False), sparse, seed
        self.is_full = all(kind_of(table) == "full" for table in tables)
        # Parts of a tensor train are wider than its rows: they are best gone before the next ones'.
        self.is_widened = any(join_of(table) == "tensor_train" for table in tables)
        self.weights = nn.ParameterDict()
        self.bases: dict[str, int] = {}  # the first row of every member in the weight of its width
        ends: dict[int, int] = {}
        for member in self.kinds.members:
            self.bases[member.name] = ends.get(member.dim, 0)
            ends[member.dim] = self.bases[member.name] + member.rows
        for width, rows in ends.items():
            self.weights[str(width)] = nn.Parameter(torch.empty(rows, width, device=device))
        limits = torch.tensor([table.rows for table in tables], device=device)
        first = torch.tensor(list(self.bases.values()), dtype=torch.int64, device=device)
        self.register_buffer("limits", limits, persistent=False)
        self.register_buffer("first", first, persistent=False)
        self.kinds.to(device)
        if torch.device(device).type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its starting values."""
        for table in self.kinds.tables:
            for part, member in zip(parts_of(table), members_of(table), strict=True):
                random = generator_of(self.seed, member.name)
                low, high = part.centre - part.bound, part.centre + part.bound
                self.rows_of(member).uniform_(low, high, generator=random)
            for each in dense_of(table):
                random = generator_of(self.seed, table.name, each.name)
                own = self.kinds.get_submodule(table.name).get_parameter(each.name)
                own.uniform_(-each.bound, each.bound, generator=random)

    def rows_of(self, member: TableSpec) -> torch.Tensor:
        """The weight [rows, dim] of one of ``kinds.members``."""
        return self.weights[str(member.dim)].narrow(0, self.bases[member.name], member.rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of every table; InputError for an id that is none."""
        self._check(ids)
        if self.is_full:
            return self._looked(ids + self.first, self.kinds.members[0].dim)
        if self.is_widened and not torch.is_grad_enabled():
            return torch.stack([self._one(n, own) for n, own in enumerate(ids.unbind(1))], 1)
        asked = self.kinds.asked(ids)
        if isinstance(asked, torch.Tensor):
            found = self._looked(asked.add_(self.first), self.kinds.members[0].dim)
            rows = self.kinds(found, ids)
        else:
            rows = self.kinds(self._by_width(asked), ids)
        return rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows.values()), 1)

    def _by_width(self, asked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rows [B, dim] of every member, one gather for each width."""
        found = {}
        for width in self.weights:
            members = [member for member in self.kinds.members if member.dim == int(width)]
            ids = torch.stack([asked[m.name] + self.bases[m.name] for m in members])
            rows = self._looked(ids, int(width)).unbind()
            found.update(zip((member.name for member in members), rows, strict=True))
        return found

    def _looked(self, ids: torch.Tensor, width: int) -> torch.Tensor:
        return functional.embedding(ids, self.weights[str(width)], sparse=self.sparse)

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
    def materialised(self) -> Embeddings:
        """Full tables with the rows that these make, for inference: a gather and nothing else.

        Every row is computed once; it takes the bytes of full tables.
        """
        tables = [
            TableSpec(table.name, table.rows, table.dim, kind="full") for table in self.kinds.tables
        ]
        device = self.limits.device
        full = Embeddings(tables, device="meta").to_empty(device=device)
        full.limits.copy_(self.limits)
        full.first.copy_(torch.tensor(list(full.bases.values()), device=device))
        for place, member in enumerate(full.kinds.members):
            out = full.rows_of(member)
            for begin in range(0, member.rows, AT_A_TIME):
                ids = torch.arange(begin, min(begin + AT_A_TIME, member.rows), device=device)
                out[begin : begin + len(ids)] = self._one(place, ids)
        return full.eval()

    def _one(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows [N, D] of one table."""
        table = self.kinds.tables[number]
        asked = zip(members_of(table), self.kinds.rows_of(number, ids), strict=True)
        parts = [self._looked(i + self.bases[m.name], m.dim) for m, i in asked]
        return self.kinds.joined(table, parts, ids)
