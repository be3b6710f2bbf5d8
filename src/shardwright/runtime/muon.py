"""Muon over sharded parameters: every matrix is orthogonalized on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.cut import Cut, Region
from shardwright.runtime.units.shard_tensor import ShardTensor

Index = tuple[slice, ...]
BUCKET_BYTES = 2**25  # of whole matrices that are exchanged together
OWN = ("lr", "momentum", "nesterov", "weight_decay", "head_rows", "params")  # of an option group


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` for sharded modules, with its arguments and its result.

    Momentum and weight decay need this rank's parts only. Newton-Schulz needs a matrix whole. One
    that lies whole on a rank, as ``Owned``, small ones of a flat cut and blocks do, is
    orthogonalized there, and nothing travels. The others go to one rank each, so that all have
    about as much to do, and come back: two all-to-alls for every 32 MiB of matrices.

    ``head_rows`` of a parameter, or of an option group, makes every so many rows a matrix of their
    own, as the heads of a projection [heads*head_rows, K] are; ``BlockShard(head_rows)`` keeps them
    whole. Parameters are ``model.parameters()`` of two dimensions: others raise ValueError,
    InputError where ``head_rows`` does not divide them, UnsupportedError for DTensors of others.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, head_rows: int = 0, **options: Any
    ) -> None:
        self._exchanges: dict[tuple[Any, ...], _MatrixExchange] = {}
        self._head_rows = head_rows
        super().__init__(params, lr, **options)
        self.defaults["head_rows"] = head_rows

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the errors are those of the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        rows = group.setdefault("head_rows", self._head_rows)
        for parameter in group["params"]:
            if rows < 0 or (rows and parameter.shape[0] % rows):
                wanted = f"a number that divides the {parameter.shape[0]} rows of a parameter"
                raise InputError("head_rows of Muon", wanted, str(rows))
            if isinstance(parameter, DTensor) and _is_cut_by_others(parameter):
                wanted = "whole parameters, or those of fully_shard_flat"
                remedy = "Give those to torch.optim.Muon, or shard with fully_shard_flat."
                found = f"a DTensor of another runtime, {parameter.placements}"
                raise UnsupportedError("Muon", wanted, found, remedy)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient (collective where matrices are cut)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        here: list[_Matrix] = []
        cut: dict[tuple[Any, ...], list[_Matrix]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                gradient, held = local_of(parameter.grad), local_of(state["momentum_buffer"])
                held.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(held, group["momentum"]) if group["nesterov"] else held
                local = local_of(parameter)
                # Before the update is added, as torch does: decay is of the weight that the step
                # began with.
                local.mul_(1 - float(group["lr"]) * group["weight_decay"])
                for matrix in _matrices(parameter, local, update, group):
                    if matrix.cut is None:
                        here.append(matrix)
                    else:
                        # An exchange is among one mesh's ranks, and of one dtype.
                        key = (*matrix.cut.comm.identity, update.dtype)
                        cut.setdefault(key, []).append(matrix)
        for matrix in here:
            matrix.local.add_(_orthogonal(matrix, matrix.update))
        for key, matrices in cut.items():
            for number, bucket in enumerate(_buckets(matrices)):
                self._exchange((*key, number), bucket).update(bucket)
        return loss

    def _exchange(self, key: tuple[Any, ...], matrices: Sequence[_Matrix]) -> _MatrixExchange:
        """The exchange of these very matrices, worked out once for a mesh and dtype."""
        found = self._exchanges.get(key)
        if found is None or found.of != _layout(matrices):
            found = self._exchanges[key] = _MatrixExchange(matrices)
        return found


@dataclass(frozen=True)
class _Matrix:
    """Rows ``first`` to ``first + rows`` of a parameter, of which ``local`` and ``update`` are this
    rank's parts; whole where ``cut`` is None."""

    parameter: torch.Tensor
    local: torch.Tensor
    update: torch.Tensor
    group: Mapping[str, Any]
    first: int
    rows: int
    cut: Cut | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.parameter.shape[1]


def _is_cut_by_others(parameter: DTensor) -> bool:
    """Whether it is a DTensor that no unit has made, and no rank has all of it."""
    axes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    in_parts = any(size > 1 and not placement.is_replicate() for placement, size in axes)
    return in_parts and not isinstance(parameter, ShardTensor)


def _matrices(
    parameter: torch.Tensor, local: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]
) -> Iterator[_Matrix]:
    """A parameter, or its heads."""
    cut = parameter.cut if isinstance(parameter, ShardTensor) else None
    every = parameter.shape[0]
    rows = group["head_rows"] or every
    for first in range(0, every, rows) if parameter.numel() else ():
        if cut is None:
            part = slice(first, first + rows)
            yield _Matrix(parameter, local[part], update[part], group, first, rows, None)
        else:
            yield _Matrix(parameter, local, update, group, first, rows, cut)


def _buckets(matrices: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
    """Neighbours whose matrices together have ``BUCKET_BYTES`` at most, or are one."""
    bucket: list[_Matrix] = []
    nbytes = 0
    for matrix in matrices:
        own = matrix.rows * matrix.shape[1] * matrix.update.itemsize
        if bucket and nbytes + own > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(matrix)
        nbytes += own
    if bucket:
        yield bucket


def _orthogonal(matrix: _Matrix, update: torch.Tensor) -> torch.Tensor:
    """What a whole update adds to its matrix: torch's step from zero, without momentum."""
    # By torch's own class and not by a copy of its Newton-Schulz, so that results are torch's in
    # every version.
    delta = torch.zeros(matrix.shape, dtype=matrix.parameter.dtype, device=update.device)
    delta.grad = update.to(delta.dtype)
    options = {name: value for name, value in matrix.group.items() if name not in OWN}
    once = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    torch.optim.Muon([delta], lr=matrix.group["lr"], **once, **options).step()
    return delta


@dataclass(frozen=True)
class _MatrixPart:
    """Where a rank's part of a matrix is: in its local tensor, and in the matrix, which is flat
    where the part is a range of elements."""

    local: Index
    whole: Index
    numel: int

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The part, of a whole matrix."""
        return (matrix.view(-1) if len(self.whole) == 1 else matrix)[self.whole]


def _part(matrix: _Matrix, region: Region) -> _MatrixPart | None:
    """What of ``matrix`` is in a rank's ``region`` of the parameter."""
    (offset, *across), (size, *columns) = region
    width = 1 if columns else matrix.parameter.shape[1]
    first, end = matrix.first * width, (matrix.first + matrix.rows) * width
    begin, stop = max(offset, first), min(offset + size, end)
    numel = max(0, stop - begin) * (columns[0] if columns else 1)
    if not numel:
        return None
    local, whole = [slice(begin - offset, stop - offset)], [slice(begin - first, stop - first)]
    if columns:
        local.append(slice(0, columns[0]))
        whole.append(slice(across[0], across[0] + columns[0]))
    return _MatrixPart(tuple(local), tuple(whole), numel)


Layout = list[tuple[Cut, int, int]]


def _layout(matrices: Sequence[_Matrix]) -> Layout:
    """What an exchange depends on."""
    return [(matrix.cut, matrix.first, matrix.rows) for matrix in matrices if matrix.cut]


class _MatrixExchange:
    """Which rank orthogonalizes each matrix, and what it needs of the others: of each matrix its
    ``parts`` by rank, and its home; the same on all ranks.

    Of this rank: ``mine`` are the matrices that have their home here, ``own`` its parts by matrix,
    ``away`` the matrices of these that are elsewhere, by home, and ``visitors`` what others have of
    its own, (rank, matrix), by rank."""

    def __init__(self, matrices: Sequence[_Matrix]) -> None:
        self.of = _layout(matrices)
        self.comm: Comm = self.of[0][0].comm
        self.parts: list[dict[int, _MatrixPart]] = [
            {
                rank: part
                for rank in range(self.comm.size)
                if (part := _part(matrix, cut.region_of(rank))) is not None
            }
            for matrix, (cut, _, _) in zip(matrices, self.of, strict=True)
        ]
        # By layout and work alone, so that all ranks come to the same homes without a word.
        self.homes = self._homes([m.rows * m.shape[1] * min(m.shape) for m in matrices])
        self.travels = any(len(parts) > 1 for parts in self.parts)
        rank = self.comm.rank
        self.mine = [place for place, home in enumerate(self.homes) if home == rank]
        self.own = {p: parts[rank] for p, parts in enumerate(self.parts) if rank in parts}
        self.away = sorted(
            self.own.keys() - self.mine, key=lambda place: (self.homes[place], place)
        )
        # In the order in which senders have them (``away``: by home, then by matrix), so nothing
        # has to be said about which is which.
        self.visitors = sorted(
            (source, place) for place in self.mine for source in self.parts[place] if source != rank
        )

    def _homes(self, work: Sequence[int]) -> list[int]:
        """The rank that has all of it, or of the others the one that has least to do so far."""
        load = [0] * self.comm.size
        homes = [next(iter(parts)) if len(parts) == 1 else -1 for parts in self.parts]
        for home, cost in zip(homes, work, strict=True):
            if home >= 0:
                load[home] += cost
        # The largest first, as small ones even out what is left.
        for place in sorted(range(len(work)), key=lambda place: -work[place]):
            if homes[place] < 0:
                homes[place] = min(range(len(load)), key=load.__getitem__)
                load[homes[place]] += work[place]
        return homes

    def update(self, matrices: Sequence[_Matrix]) -> None:
        """Orthogonalize and add (collective if anything travels)."""
        like = matrices[0].update
        wholes = {place: like.new_empty(matrices[place].shape) for place in self.mine}
        if self.travels:
            self._there(matrices, wholes, like)
        deltas = {}
        for place in self.mine:
            part, matrix = self.own.get(place), matrices[place]
            if part is not None:
                part.of(wholes[place]).copy_(matrix.update[part.local])
            # Whole updates go one by one; all of them together with their results would be two
            # buckets of memory.
            delta = deltas[place] = _orthogonal(matrix, wholes.pop(place))
            if part is not None:
                matrix.local[part.local].add_(part.of(delta))
        if self.travels:
            self._back(matrices, deltas, matrices[0].local)

    def _there(
        self, matrices: Sequence[_Matrix], wholes: Mapping[int, torch.Tensor], like: torch.Tensor
    ) -> None:
        """Updates to where they are made orthogonal."""
        sent = [(self.homes[p], matrices[p].update[self.own[p].local]) for p in self.away]
        wanted = [(source, self.parts[place][source].numel) for source, place in self.visitors]
        received = self._all_to_all(sent, wanted, like)
        for (source, place), values in zip(self.visitors, received, strict=True):
            target = self.parts[place][source].of(wholes[place])
            target.copy_(values.view_as(target))

    def _back(
        self, matrices: Sequence[_Matrix], deltas: Mapping[int, torch.Tensor], like: torch.Tensor
    ) -> None:
        """What they came to, back to who has a part."""
        received = self._all_to_all(
            [(s, self.parts[place][s].of(deltas[place])) for s, place in self.visitors],
            [(self.homes[place], self.own[place].numel) for place in self.away],
            like,
        )
        for place, values in zip(self.away, received, strict=True):
            target = matrices[place].local[self.own[place].local]
            target.add_(values.view_as(target))

    def _all_to_all(
        self,
        sent: Sequence[tuple[int, torch.Tensor]],
        wanted: Sequence[tuple[int, int]],
        like: torch.Tensor,
    ) -> Sequence[torch.Tensor]:
        """Tensors to ranks, in their order, and as many elements from ranks as are wanted."""
        out, back = [0] * self.comm.size, [0] * self.comm.size
        for rank, values in sent:
            out[rank] += values.numel()
        for rank, numel in wanted:
            back[rank] += numel
        packed = [values.reshape(-1) for _, values in sent]
        row = torch.cat(packed) if packed else like.new_empty(0)
        received = row.new_empty(sum(back))
        self.comm.all_to_all("matrices of Muon", received, row, back, out)
        return received.split([numel for _, numel in wanted]) if wanted else ()
