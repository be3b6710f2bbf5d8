"""Embeddings of every kind: which rows of which tables an id asks for, and what these make.

The tables themselves are somewhere else: on this rank, sharded over many, or in ``Embeddings``.
Formulas, sizes and starting values are those of ``core/kinds.py``.
"""

# A table of another kind is a few smaller tables and some dense parameters. Here ids of the table
# become ids of those (``asked``), and their rows become its rows (the call); in between anybody may
# look the parts up: this rank, or an exchange. So a plan knows full tables alone. Hashes are
# arithmetic on integers, which wraps around alike on every device.

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.core.kinds import (
    LINEAR,
    Join,
    cores_of,
    dense_of,
    join_of,
    kind_of,
    members_of,
    parts_of,
)
from shardwright.core.model import TableSpec
from shardwright.models.start import generator_of

Bag = tuple[Tensor, ...]  # ids, offsets, perhaps weights
Asked = Tensor | dict[str, Tensor | Bag]
Rows = Tensor | Mapping[str, Tensor]
Distinct = Callable[[Tensor], tuple[Tensor, Tensor]]

_BY_ENTRY: tuple[Join, ...] = ("one", "multiply", "add", "concat")
_ODD = -7046029254386353131  # 2^64 over the golden ratio, as int64
_CHUNK = 256  # ids whose hashes stay in a cache
_ALL_OF_IT = 20.0  # Mish of more is the number itself


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids of [N], and the place of every one among them [N]."""
    found, places = torch.unique(ids, return_inverse=True)
    return found, places


def pooled_rows(
    rows: Tensor, offsets: Tensor, weights: Tensor | None = None, *, mean: bool
) -> Tensor:
    """Rows [N, D] of bags that begin at ``offsets`` [B + 1] -> their sums or means [B, D]."""
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    lengths = offsets.diff()
    bag = torch.arange(len(lengths), device=rows.device)
    bag = bag.repeat_interleave(lengths, output_size=len(rows))
    pooled = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bag, rows)
    return pooled / lengths.clamp(min=1).unsqueeze(1) if mean else pooled


def _mixed(ids: Tensor, rows: Tensor | int) -> Tensor:
    """Ids below 2^31 -> rows, as the high bits of a product say."""
    # Fibonacci hashing. int64 has an arithmetic shift, so the sign is masked away; 31 bits times at
    # most 2^31 rows still fit, and the high bits give a row without a modulo.
    return (((ids * _ODD) >> 33) & 0x7FFFFFFF) * rows >> 31


class Projection(nn.Module):
    """Narrow rows [..., W] -> [..., D], without a bias."""

    def __init__(self, table: TableSpec, device: torch.device | str) -> None:
        super().__init__()
        ((_, shape, _),) = dense_of(table)
        self.weight = nn.Parameter(torch.empty(shape, device=device))

    def forward(self, rows: Tensor) -> Tensor:
        """One matrix product."""
        return functional.linear(rows, self.weight)


class HashNetwork(nn.Module):
    """Ids [N] -> rows [N, D]: hashes of an id in [-1, 1) go through linear layers with Mish between
    them (deep hash embeddings, Kang et al., 2021). Hash k is the wrapped 32-bit integer
    a_k id + b_k. Ids that repeat are computed once."""

    def __init__(self, table: TableSpec, device: torch.device | str) -> None:
        super().__init__()
        random = generator_of("hashes", table.name)
        hashes = table.hashes
        assert isinstance(hashes, int)
        draw = torch.randint(-(2**31), 2**31, (2, hashes), generator=random).int()
        # Odd factors: only those give different ids different numbers modulo 2^32.
        self.register_buffer("factors", draw[0] | 1, persistent=False)
        self.register_buffer("shifts", draw[1], persistent=False)
        self.layers = nn.ModuleList()
        for each in dense_of(table)[::2]:
            layer = nn.Linear(each.shape[1], each.shape[0], device="meta")
            self.layers.append(layer.to_empty(device=device))
        self.distinct: Distinct = distinct

    def encoded(self, ids: Tensor) -> Tensor:
        """The hashes [N, K] of ids [N]."""
        low = ids.int()
        found = self.factors.new_empty(len(ids), len(self.factors), dtype=torch.float32)
        for part, out in zip(low.split(_CHUNK), found.split(_CHUNK), strict=True):
            # int32 on purpose: it wraps around, on every device alike, which is the modulo of the
            # hash.
            hashed = torch.addcmul(self.shifts, part.unsqueeze(1), self.factors)
            torch.mul(hashed, 2.0**-31, out=out)
        return found.to(self.layers[0].weight.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of the different ids, at the places of all."""
        # Popular ids come often in a batch and the network is what costs. `distinct` can be
        # replaced: under a trace shapes may not depend on values.
        ids, places = self.distinct(ids)
        rows = self.encoded(ids)
        trains = torch.is_grad_enabled()
        for number, layer in enumerate(self.layers):
            if number:
                is_wide = rows.dtype.itemsize >= 4  # narrow ones would be rounded on the way
                rows = mish_(rows) if is_wide and not trains else functional.mish(rows)
            rows = layer(rows)
        return functional.embedding(places, rows)


def mish_(rows: Tensor) -> Tensor:
    """Mish in place, x n / (n + 2) with n = e^x (e^x + 2): half the time of torch's, which takes
    an exponential, a logarithm and a hyperbolic tangent. Elsewhere than on a CPU torch's, one
    kernel for all, is faster than asking for parts."""
    if rows.device.type != "cpu":
        return functional.mish(rows, inplace=True)
    # In parts that stay in a cache, for every line below goes over all of them.
    for part in rows.split(_CHUNK // 4):
        # Clamped, since e^(2x) overflows in fp32 from 44 on, and inf / inf is no number.
        power = part.clamp(max=_ALL_OF_IT).exp_()
        power.addcmul_(power, power, value=0.5)
        part.mul_(power.div_(power + 1))
    return rows


class SharedArray(nn.Module):
    """Ids [N] -> rows [N, D] of blocks of numbers from one array, each at a place that the id and
    the block's number hash to, going round at its end (ROBE, Desai et al., 2022)."""

    def __init__(self, table: TableSpec, device: torch.device | str) -> None:
        super().__init__()
        ((_, shape, _),) = dense_of(table)
        assert isinstance(table.block, int)
        self.block, self.blocks = table.block, table.dim // table.block
        self.weight = nn.Parameter(torch.empty(shape, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        """Block by block; with gradients, which blocks that overlap share, number by number."""
        size, device = len(self.weight), ids.device
        salt = torch.arange(1, self.blocks + 1, device=device) * 0x9E3779B1
        starts = _mixed(ids.unsqueeze(1) ^ salt, size)
        if torch.is_grad_enabled():
            return self._numbers(starts).flatten(1)
        last = size - self.block
        blocks = self.weight.unfold(0, self.block, 1)  # all that there are, without a copy
        rows = blocks.index_select(0, starts.clamp(max=last).view(-1)).view(*starts.shape, -1)
        # Blocks that reach beyond the end are few, and only these go number by number.
        over = starts > last
        if over.any():
            rows[over] = self._numbers(starts[over])
        return rows.flatten(1)

    def _numbers(self, starts: Tensor) -> Tensor:
        """Blocks [..., Z] number by number, going round."""
        size = len(self.weight)
        places = starts.unsqueeze(-1) + torch.arange(self.block, device=starts.device)
        places = torch.where(places >= size, places - size, places)
        return functional.embedding(places, self.weight.unsqueeze(1)).squeeze(-1)


MODULES: dict[Join, Callable[[TableSpec, torch.device | str], nn.Module]] = {
    "project": Projection,
    "network": HashNetwork,
    "array": SharedArray,
}


class _JoinedAlike(NamedTuple):
    """Tables one after the other whose rows are joined alike, with ``parts`` each."""

    join: Join
    tables: tuple[TableSpec, ...]
    parts: int


def _alike(table: TableSpec) -> tuple[Join, int, str]:
    """The same of neighbours whose rows can be joined together."""
    join = join_of(table)
    return join, len(parts_of(table)), "" if join in _BY_ENTRY else table.name


class Kinds(nn.Module):
    """What turns ids of ``tables`` into ids of their ``members``, and rows of these into theirs.

    Ids [B, F] int64 of F tables, or a mapping of features to bags. It has the dense parameters.
    """

    def __init__(
        self, tables: Sequence[TableSpec], device: torch.device | str, *, bags: bool
    ) -> None:
        super().__init__()
        self.tables, self.bags = tuple(tables), bags
        self.members = tuple(m for table in tables for m in members_of(table, bags=bags))
        self.of_table: dict[str, nn.Module] = {}
        for table in tables:
            if make := MODULES.get(join_of(table)):
                module = make(table, device)
                # By the table's name, so that a parameter is kinds.NAME.weight wherever the table
                # stands in the job.
                self.add_module(table.name, module)
                self.of_table[table.name] = module
        # Neighbours that are joined alike are joined in one operation: a job has hundreds of tables
        # of one kind, and each operation of its own costs more than its numbers.
        self.runs = [
            _JoinedAlike(key[0], run, key[1])
            for key, group in itertools.groupby(tables, _alike)
            for run in [tuple(group)]
        ]
        parts = [(f, t, part) for f, t in enumerate(tables) for part in parts_of(t)]
        self.starts = [0, *itertools.accumulate(len(parts_of(table)) for table in tables)]
        self.mixes = [place for place, (_, _, part) in enumerate(parts) if part.mixed]
        columns = {
            "source": [f for f, _, _ in parts],
            "divisors": [part.divisor for _, _, part in parts],
            "moduli": [part.rows for _, _, part in parts],
            "limits": [table.rows for _, table, _ in parts],
        }
        for name, values in columns.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    @property
    def is_uniform(self) -> bool:
        """Whether rows of all members are alike in width and come one for each id."""
        return not self.bags and len({(m.dim, kind_of(m)) for m in self.members}) == 1

    def asked(self, ids: Tensor | Mapping[str, Bag]) -> Asked:
        """What ``ids`` ask of the members: [B, M], or a mapping of their features. An id that is no
        row of its table stays as it is, and is none of its members either."""
        if isinstance(ids, Tensor):
            rows = self._rows(ids.index_select(1, self.source), slice(None))
            if self.is_uniform:
                return rows
            return {m.feature_names[0]: rows[:, k] for k, m in enumerate(self.members)}
        found: dict[str, Tensor | Bag] = {}
        for number, table in enumerate(self.tables):
            members = members_of(table, bags=self.bags)
            for place, name in enumerate(table.feature_names):
                values, offsets, *weights = ids[name]
                for member, rows in zip(members, self.rows_of(number, values), strict=True):
                    own = weights if member.weighted else ()
                    found[member.feature_names[place]] = (rows, offsets, *own)
        return found

    def rows_of(self, number: int, ids: Tensor) -> tuple[Tensor, ...]:
        """The row of every member of one table for ids [N]."""
        first = self.starts[number]
        parts = slice(first, first + len(parts_of(self.tables[number])))
        return self._rows(ids.unsqueeze(1).expand(-1, parts.stop - first), parts).unbind(1)

    def _rows(self, ids: Tensor, members: slice) -> Tensor:
        """Ids [N, M] of the tables of ``members`` as rows of these. Quotients are exact: of
        integers below 2^53 no quotient in doubles is rounded up to an integer."""
        # Division of doubles is several times faster than of int64, which has no vector
        # instruction; the docstring says why it is exact.
        whole = ids.double().div_(self.divisors[members]).floor_()
        moduli = self.moduli[members]
        whole -= whole.div(moduli).floor_().mul_(moduli)
        rows = whole.long()
        first = members.start or 0
        for place in self.mixes:
            if 0 <= place - first < rows.shape[1]:
                rows[:, place - first] = _mixed(ids[:, place - first], self.moduli[place])
        # An id that is none must not be folded into a row that exists: whoever looks it up refuses
        # it.
        return torch.where((ids >= 0) & (ids < self.limits[members]), rows, ids)

    def forward(self, rows: Rows, ids: Tensor | Mapping[str, Bag]) -> Rows:
        """Rows of the members, for what ``ids`` asked of them: [B, F, D] where all are alike, else
        [B, dim] of every feature."""
        if isinstance(rows, Tensor) and isinstance(ids, Tensor):
            return self._side_by_side(rows, ids)
        found = {}
        for number, table in enumerate(self.tables):
            for place, name in enumerate(table.feature_names):
                members = members_of(table, bags=self.bags)
                parts = [rows[member.feature_names[place]] for member in members]
                bag = None if isinstance(ids, Tensor) else ids[name]
                own = ids[:, number] if isinstance(ids, Tensor) else ids[name][0]
                joined = self.joined(table, parts, own)
                if bag is not None and join_of(table) not in LINEAR:
                    joined = pooled_rows(joined, *bag[1:], mean=table.pooling == "mean")
                found[name] = joined
        return found

    def _side_by_side(self, rows: Tensor, ids: Tensor) -> Tensor:
        found, column, number = [], 0, 0
        for run in self.runs:
            count = len(run.tables)
            own = rows[:, column : column + count * run.parts]
            if run.join in _BY_ENTRY:
                parts = own.unflatten(1, (count, run.parts)).unbind(2) if run.parts > 1 else [own]
                found.append(self.joined(run.tables[0], parts, ids))
            else:
                parts = own.unbind(1)
                found.append(self.joined(run.tables[0], parts, ids[:, number]).unsqueeze(1))
            column, number = column + count * run.parts, number + count
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def joined(self, table: TableSpec, parts: Sequence[Tensor], ids: Tensor) -> Tensor:
        """The rows that ``parts`` [..., dims] come to."""
        match join_of(table):
            case "one":
                return parts[0]
            case "multiply":
                return parts[0] * parts[1]
            case "add":
                return parts[0] + parts[1]
            case "concat":
                return torch.cat(list(parts), -1)
            case "tensor_train":
                return _trained(table, parts)
            case "project":
                return self.of_table[table.name](parts[0])
        return self.of_table[table.name](ids)


def _trained(table: TableSpec, parts: Sequence[Tensor]) -> Tensor:
    """The products of three cores' slices [N, ...] -> [N, D], the smaller product first."""
    _, (a, b, c) = cores_of(table)
    first, second, third = parts
    count, rank = len(first), table.rank
    assert isinstance(rank, int)
    # The core in the middle has fewest columns (cores_of), so this is the smaller intermediate.
    right = torch.bmm(second.reshape(count, rank * b, rank), third.reshape(count, rank, c))
    found = torch.bmm(first.reshape(count, a, rank), right.view(count, rank, b * c))
    return found.view(count, a * b * c)
