"""DLRM (Naumov et al., 2019), with one id per table and sample or bags of any features.

Weights start as in the original: MLPs normal with variance 2/(in + out), tables uniform
within 1/sqrt(rows), those of other kinds as ``core/kinds.py`` says. Each 4,096 rows of a table have
a generator of their own, so that any rectangle can be made on the rank that keeps it and comes out
the same under every plan.
"""

# Modules are made on "meta" and emptied onto the device: nothing draws starting values only to have
# them overwritten, and nothing of a table's size is ever there but the table. Any rectangle of a
# table must start the same whoever makes it: 4,096 rows have one generator, so that a row shard
# draws at most as many rows too many at each end, and a column shard draws all columns of its rows.

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.core.kinds import dense_of, kind_of, members_of, parts_of
from shardwright.core.model import TableSpec
from shardwright.job.job import Job
from shardwright.job.model import cross_of
from shardwright.job.model_of_job import reads_bags
from shardwright.models.kinds import Bag, Kinds, pooled_rows
from shardwright.models.start import Started, generator_of
from shardwright.tracker.tensors import DTYPES

ROWS_PER_GENERATOR = 4096
Bags = Mapping[str, Bag]  # of each feature: ids, offsets, perhaps weights
Found = Tensor | list[Tensor]


class Tables(nn.Module):
    """One embedding per table.

    Ids [B, F] int64 -> [B, F, D], rows of feature f from table f. Or a mapping of features to ids
    [N], offsets [B + 1] and perhaps weights [N] of bags, or to ids [B], -> one of features to rows
    [B, dim], or [N, dim] of tables that are not pooled.
    """

    def __init__(self, tables: Sequence[TableSpec], device: torch.device | str | None) -> None:
        super().__init__()
        for table in tables:
            dtype = DTYPES[table.dtype]
            embedding = nn.Embedding(table.rows, table.dim, device="meta", dtype=dtype)
            *above, name = table.name.split(".")
            parent: nn.Module = self
            # A part is called TABLE.PART, and a dot in a module's name would be a step of its path.
            for part in above:  # the parts of a table lie in a module of its name
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(name, embedding.to_empty(device=device or "cpu"))
        self.features = [(name, table) for table in tables for name in table.feature_names]

    def forward(self, ids: Tensor | Mapping[str, Tensor | Bag]) -> Tensor | dict[str, Tensor]:
        """Look every feature up in its own table."""
        if isinstance(ids, Tensor):
            found = [self._rows(table, ids[:, f]) for f, (_, table) in enumerate(self.features)]
            return torch.stack(found, 1)
        return {name: self._pooled(table, ids[name]) for name, table in self.features}

    def _rows(self, table: TableSpec, ids: Tensor) -> Tensor:
        rows: Tensor = self.get_submodule(table.name)(ids)
        return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows

    def _pooled(self, table: TableSpec, bag: Tensor | Bag) -> Tensor:
        if isinstance(bag, Tensor):
            return self._rows(table, bag)
        ids, offsets, *weights = bag
        rows = self._rows(table, ids)
        if not table.pooled:
            return rows
        return pooled_rows(rows, offsets, *weights, mean=table.pooling == "mean")


class Dot(nn.Module):
    """Products of all pairs, behind the dense part.

    Of the products [n, n] of a sample those at ``pairs`` are taken; of their gradients
    ``places`` is the one of every product.
    """

    pairs: Tensor
    places: Tensor

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        n = features + 1
        self.width = dim + features * n // 2
        rows, columns = torch.tril_indices(n, n, -1, device="cpu")
        places = torch.zeros(n, n, dtype=torch.int64, device="cpu")
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows), device="cpu")
        # Fixed places instead of a mask: index_select takes only what is wanted, in a buffer of
        # that size.
        self.register_buffer("pairs", rows * n + columns, persistent=False)
        self.register_buffer("places", places.view(-1), persistent=False)

    def forward(self, dense: Tensor, sparse: Found) -> Tensor:
        """Bottom output [B, D] and embeddings [B, F, D], or [B, D] each, -> [B, width]."""
        if isinstance(sparse, Tensor):
            stack = torch.cat([dense.unsqueeze(1), sparse], 1)
        else:
            stack = torch.stack([dense, *sparse], 1)
        pairs: Tensor = _Pairs.apply(stack, self.pairs, self.places)
        return torch.cat([dense, pairs], 1)


class _Pairs(torch.autograd.Function):
    """Products of pairs of ``stack`` [B, n, D] -> [B, pairs]. A product of two is one of the
    transposed, too, so one multiplication gives the gradient."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, pairs: Tensor, places: Tensor) -> Any:
        ctx.save_for_backward(stack, places)
        products = torch.bmm(stack, stack.transpose(1, 2))
        return products.flatten(1).index_select(1, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stack, places = ctx.saved_tensors
        n = stack.shape[1]
        products = gradient.index_select(1, places).view(-1, n, n)
        # `places` has a 0 on the diagonal, which is the first pair's gradient and not theirs:
        # nobody asked for a product of a feature with itself.
        products.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(products, stack), None, None


class Cat(nn.Module):
    """Everything side by side."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.width = sum(dims)

    def forward(self, dense: Tensor, sparse: Found) -> Tensor:
        """Bottom output [B, D] and embeddings [B, F, D], or [B, dim] each, -> [B, width]."""
        if isinstance(sparse, Tensor):
            return torch.cat([dense, sparse.flatten(1)], 1)
        return torch.cat([dense, *sparse], 1)


class Cross(Cat):
    """The cross network of DCN v2 (Wang et al., 2021) on everything side by side, of low rank:
    ``layers`` times x + x0 * (W (V x) + b), with V [rank, width] and W [width, rank]."""

    def __init__(
        self, dims: Sequence[int], layers: int, rank: int, device: torch.device | str | None
    ) -> None:
        super().__init__(dims)
        self.narrow, self.wide = nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            self.narrow.append(_linear(self.width, rank, device, bias=False))
            self.wide.append(_linear(rank, self.width, device))

    def forward(self, dense: Tensor, sparse: Found) -> Tensor:
        """As without the cross network: [B, width]."""
        first = x = super().forward(dense, sparse)
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            # One operation and one buffer for x + x0 * (...), which is kept for the backward layer
            # by layer.
            x = torch.addcmul(x, first, wide(narrow(x)))
        return x


def interaction(job: Job, device: torch.device | str | None) -> Dot | Cat | Cross:
    """How the dense part and the embeddings of ``job``'s model meet."""
    section = job.model
    embedded = [table.dim for table in job.tables for _ in table.feature_names]
    if section.interaction == "dot":
        return Dot(len(embedded), embedded[0])
    dims = (section.bottom[-1], *embedded)
    return Cat(dims) if section.interaction == "cat" else Cross(dims, *cross_of(section), device)


class DLRM(Started):
    """Bottom MLP, tables, interaction, top MLP; gives logits [B] for one output."""

    def __init__(self, job: Job, device: torch.device | str | None = None) -> None:
        super().__init__()
        section = job.model
        self.seed = job.train.seed
        self.bottom = mlp((section.dense_features, *section.bottom), last_relu=True, device=device)
        bags = reads_bags(job)
        members = [m for table in job.tables for m in members_of(table, bags=bags)]
        self.tables = Tables(members, device)
        plain = all(kind_of(table) == "full" for table in job.tables)
        self.kinds = None if plain else Kinds(job.tables, device or "cpu", bags=bags)
        self.interact = interaction(job, device)
        self.top = mlp((self.interact.width, *section.top), last_relu=False, device=device)
        self.starts = _starts(job)
        # Before anything is sharded: afterwards a parameter has its local shape.
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def forward(self, dense: Tensor, ids: Tensor | Bags) -> Tensor:
        """Dense features [B, D] fp32, ids or bags as ``Tables`` takes -> logits [B, outputs]."""
        return self.top(self.interact(self.bottom(dense), self._embedded(ids)))

    def _embedded(self, ids: Tensor | Bags) -> Found:
        if self.kinds is None:
            found = self.tables(ids)
        else:
            rows = self.tables(self.kinds.asked(ids)) if self.kinds.members else {}
            found = self.kinds(rows, ids)
        return list(found.values()) if isinstance(found, dict) else found

    def initial_block(self, fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        if not fqn.startswith("tables."):
            return super().initial_block(fqn, offsets, sizes)
        shape = self.shapes[fqn]
        least, most = self.starts[fqn]
        (row, column), (rows, columns) = offsets, sizes
        found = torch.empty(rows, columns, device="cpu")
        first = row // ROWS_PER_GENERATOR
        for index in range(first, -(-(row + rows) // ROWS_PER_GENERATOR)):
            low = index * ROWS_PER_GENERATOR
            count = min(ROWS_PER_GENERATOR, shape[0] - low)
            values = torch.empty(count, shape[1], device="cpu")
            values.uniform_(least, most, generator=self._generator(fqn, index))
            begin, end = max(row, low), min(row + rows, low + count)
            found[begin - row : end - row] = values[
                begin - low : end - low, column : column + columns
            ]
        return found

    def _start(self, fqn: str) -> Tensor:
        shape = self.shapes[fqn]
        if fqn in self.starts:
            return torch.empty(shape).uniform_(*self.starts[fqn], generator=self._generator(fqn, 0))
        if fqn.startswith("interact.") and len(shape) == 1:
            return torch.zeros(shape)  # as DCN v2's biases
        values = torch.empty(shape)
        deviation = math.sqrt(2.0 / sum(shape)) if len(shape) == 2 else math.sqrt(1.0 / shape[0])
        return values.normal_(0.0, deviation, generator=self._generator(fqn, 0))

    def _generator(self, fqn: str, index: int) -> torch.Generator:
        return generator_of(self.seed, fqn, index)


def _starts(job: Job) -> dict[str, tuple[float, float]]:
    """Where the values of every table, and of what belongs to one, start."""
    found = {}
    for table in job.tables:
        for part, member in zip(parts_of(table), members_of(table), strict=True):
            ends = part.centre - part.bound, part.centre + part.bound
            found[f"tables.{member.name}.weight"] = ends
        for each in dense_of(table):
            found[f"kinds.{table.name}.{each.name}"] = -each.bound, each.bound
    return found


def mlp(
    widths: Sequence[int], *, last_relu: bool, device: torch.device | str | None
) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last if asked."""
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        layers.append(_linear(fan_in, fan_out, device))
        if last_relu or index < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _linear(
    fan_in: int, fan_out: int, device: torch.device | str | None, *, bias: bool = True
) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, bias, device="meta")
    return layer.to_empty(device=device or "cpu")
