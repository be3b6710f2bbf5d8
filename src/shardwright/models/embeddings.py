"""Embeddings of any kinds on one device, all tables of a width in one tensor, and full tables of
their rows, for inference."""

# All tables of a width are one parameter, so that a batch is one gather and not one call for each
# of hundreds of tables. State dicts therefore have weights by width; `rows_of` gives a table its
# rows. Starting values are drawn on the CPU, table by table, each from a generator of its own: they
# depend neither on the device nor on the other tables.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.kinds import dense_of, is_packed, join_of, kind_of, members_of, parts_of
from shardwright.core.model import TableSpec
from shardwright.core.schedule import BAGS_OF_ONE
from shardwright.models.kinds import Kinds
from shardwright.models.start import generator_of

AT_A_TIME = 65_536  # rows that are drawn, or made of another kind's


class Embeddings(nn.Module):
    """Ids [B, F] int64, one for each of F settled ``tables`` of one dim -> rows [B, F, D].

    One gather for all parts of a width, then the joins of the kinds. ``sparse`` gradients are those
    of ``torch.nn.Embedding``. Without ``start`` parameters have no values yet. UnsupportedError for
    rows of bytes.
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
        for table in tables:
            if is_packed(table):
                wanted, got = "a kind that is trained", f"'{kind_of(table)}'"
                remedy = "examples/packing.py looks rows of bytes up."
                raise UnsupportedError(f"table '{table.name}'.kind", wanted, got, remedy)
        self.kinds, self.sparse, self.seed = Kinds(tables, device, bags=False), sparse, seed
        # Parts of a tensor train are wider than its rows: they are best gone before the next ones'.
        self.is_widened = any(join_of(table) == "tensor_train" for table in tables)
        self.weights = nn.ParameterDict()
        self.bases: dict[str, int] = {}  # the first row of every member in its weight
        ends: dict[str, int] = {}
        for member in self.kinds.members:
            key = str(member.dim)
            self.bases[member.name] = ends.get(key, 0)
            ends[key] = self.bases[member.name] + member.rows
        for key, rows in ends.items():
            self.weights[key] = nn.Parameter(torch.empty(rows, int(key), device=device))
        alone = all(kind_of(table) == "full" for table in tables)
        self.is_plain = alone and len(self.weights) == 1  # one gather, of rows as they are asked
        # Buffers that are not saved: they follow from the tables, and a state dict has parameters
        # alone.
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
                # In parts: a table of many rows would be there twice while it is drawn.
                for some in own.split(AT_A_TIME):
                    rows = torch.empty(some.shape, dtype=own.dtype, device="cpu")
                    some.copy_(rows.uniform_(low, high, generator=random))
            for each in dense_of(table):
                random = generator_of(self.seed, table.name, each.name)
                own = self.kinds.get_submodule(table.name).get_parameter(each.name)
                values = torch.empty(own.shape, dtype=own.dtype, device="cpu")
                own.copy_(values.uniform_(-each.bound, each.bound, generator=random))

    def rows_of(self, member: TableSpec) -> Tensor:
        """The weight [rows, dim] of one of ``kinds.members``."""
        return self.weights[str(member.dim)].narrow(0, self.bases[member.name], member.rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of every table; InputError for an id that is none."""
        self._check(ids)
        if self.is_plain:
            # table after table, as what a processor knows of where pages lie is soon forgotten
            # (a copy in any case: the ids of one sample are contiguous the other way round as well)
            places = ids.t().clone(memory_format=torch.contiguous_format)
            places += self.first.unsqueeze(1)
            return self._looked(places, self.kinds.members[0].dim).transpose(0, 1)
        # One table after the other, so that the wide parts of one are gone before the next one's
        # are made. A backward would keep them all in any case, and then one gather is faster.
        if self.is_widened and not torch.is_grad_enabled():
            return torch.stack([self.made(n, own) for n, own in enumerate(ids.unbind(1))], 1)
        asked = self.kinds.asked(ids)
        if isinstance(asked, Tensor):
            found = self._looked(asked.add_(self.first), self.kinds.members[0].dim)
            rows = self.kinds(found, ids)
        else:
            rows = self.kinds(self._by_width(asked), ids)
        return rows if isinstance(rows, Tensor) else torch.stack(list(rows.values()), 1)

    def _by_width(self, asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows [B, dim] of every member, one gather for each weight."""
        found = {}
        for dim in map(int, self.weights):
            members = [member for member in self.kinds.members if member.dim == dim]
            ids = torch.stack([asked[m.name] + self.bases[m.name] for m in members])
            rows = self._looked(ids, dim).unbind()
            found.update(zip((member.name for member in members), rows, strict=True))
        return found

    def _looked(self, ids: Tensor, dim: int) -> Tensor:
        """Rows of the weight of a width."""
        weight = self.weights[str(dim)]
        # Where nothing is trained, bags of one id: embedding_bag fetches rows ahead on a CPU,
        # embedding does not.
        if torch.is_grad_enabled() or ids.device.type != "cpu" or ids.numel() < BAGS_OF_ONE:
            return functional.embedding(ids, weight, sparse=self.sparse)
        flat = ids.reshape(-1)
        rows = functional.embedding_bag(flat, weight, torch.arange(len(flat)), mode="sum")
        return rows.view(*ids.shape, dim)

    def _check(self, ids: Tensor) -> None:
        tables = self.kinds.tables
        if ids.dim() != 2 or ids.shape[1] != len(tables):
            raise InputError("ids", f"shape [batch, {len(tables)}]", str([*ids.shape]))
        # All at once where nothing is wrong; only then is the first bad one looked for. An id
        # beyond its table would be a row of the next one, without an error: they lie in one weight.
        if not ids.numel() or (int(ids.min()) >= 0 and bool((ids.amax(0) < self.limits).all())):
            return
        sample, place = (int(x) for x in ((ids < 0) | (ids >= self.limits)).nonzero()[0])
        spot = f"ids of table '{tables[place].name}', sample {sample}"
        wanted = f"ids from 0 to {tables[place].rows - 1}"
        raise InputError(spot, wanted, str(int(ids[sample, place])))

    @torch.no_grad()
    def materialised(self) -> Embeddings:
        """Full tables with the rows that these make, for inference: a gather and nothing else.

        Every row is computed once; full tables take their bytes whatever these take.
        """
        tables = [
            TableSpec(table.name, table.rows, table.dim, kind="full") for table in self.kinds.tables
        ]
        device = self.limits.device
        full = Embeddings(tables, device=device, start=False)
        for place, member in enumerate(full.kinds.members):
            every = torch.arange(member.rows, device=device).split(AT_A_TIME)
            for ids, own in zip(every, full.rows_of(member).split(AT_A_TIME), strict=True):
                own.copy_(self.made(place, ids))
        return full.eval()

    def made(self, number: int, ids: Tensor) -> Tensor:
        """Rows [N, D] of one table, by its place."""
        table = self.kinds.tables[number]
        asked = zip(members_of(table), self.kinds.rows_of(number, ids), strict=True)
        parts = [self._looked(i + self.bases[m.name], m.dim) for m, i in asked]
        return self.kinds.joined(table, parts, ids)
