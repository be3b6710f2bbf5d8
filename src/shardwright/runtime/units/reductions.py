"""Sums, norms and the like of sharded tensors: of the local parts, then of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.runtime.comm import Comm
from shardwright.runtime.units.cut import Cut

aten = torch.ops.aten
Bound = Mapping[str, Any]  # the arguments of the operator by name
Reduction = Callable[[torch.Tensor, Cut, Bound], Any]


def is_full(bound: Bound, dims: int) -> bool:
    """Whether everything is reduced, not some dimensions."""
    given = bound.get("dim")
    if given is None or given == []:
        return True
    wanted = [given] if isinstance(given, int) else list(given)
    return sorted(d % max(dims, 1) for d in wanted) == list(range(dims))


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What numbers of ``dtype`` are added up in."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _over_ranks(value: torch.Tensor, comm: Comm, label: str, *, largest: bool = False) -> None:
    """In place; replicas of the mesh's first dimension hold the same and are not counted."""
    flat = torch.view_as_real(value) if value.is_complex() else value
    comm.all_reduce(label, flat.view(-1), largest=largest, replicas=False)


def _sum(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    usual = local.dtype if local.is_floating_point() or local.is_complex() else torch.int64
    dtype = bound.get("dtype") or usual
    # In bf16 a rank's sum would be rounded to 8 bits before others are added. These are added in
    # fp64, so that adding ranks rounds nothing more.
    wide = local.sum(dtype=torch.float32) if local.dtype in _HALVES else local.sum()
    total = wide.to(_exact(dtype))
    _over_ranks(total, cut.comm, f"sum of {cut.fqn}")
    return total.to(dtype)


def _mean(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    dtype = bound.get("dtype") or local.dtype
    return (_sum(local, cut, {"dtype": _exact(dtype)}) / cut.shape.numel()).to(dtype)


_HALVES = (torch.float16, torch.bfloat16)


def _largest(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    """Two numbers travel, for not every backend lets a NaN win."""
    if not local.is_floating_point():
        info = torch.iinfo(torch.int64)
        found = local.to(torch.int64).amax() if local.numel() else torch.tensor(info.min)
        found = found.to(local.device)
        _over_ranks(found, cut.comm, f"maximum of {cut.fqn}", largest=True)
        return found.to(local.dtype)
    lowest = local.new_full((), -math.inf, dtype=torch.float64)
    found = local.amax().to(torch.float64) if local.numel() else lowest
    number = found.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    pair = torch.stack([number, found.isnan().double()])
    _over_ranks(pair, cut.comm, f"maximum of {cut.fqn}", largest=True)
    return torch.where(pair[1] > 0, math.nan, pair[0]).to(local.dtype)


def _smallest(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    if local.is_floating_point():
        return -_largest(-local, cut, bound)
    # ~x turns the order of integers around; -x does not, as the smallest one is its own negative.
    if local.dtype is torch.bool:
        return ~_largest((~local).to(torch.int8), cut, bound).bool()
    return ~_largest(~local.to(torch.int64), cut, bound).to(local.dtype)


def _any(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    return _largest((local != 0).any().to(torch.int64).view(1), cut, bound).bool()


def _all(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    return ~_any(local == 0, cut, bound)


def _count(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    return _sum(local != 0, cut, {})


def _dot(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    return _sum(local * bound["other"], cut, {})


def _vdot(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    return _sum(local.conj() * bound["other"], cut, {})


def _equal(local: torch.Tensor, cut: Cut, bound: Bound) -> bool:
    same = torch.tensor([torch.equal(local, bound["other"])], device=local.device)
    return bool(_all(same, cut, {}))


def norm(local: torch.Tensor, cut: Cut, bound: Bound) -> torch.Tensor:
    """The norm of everything."""
    order = bound.get("ord", bound.get("p"))
    (found,) = norms([(local, cut.comm)], 2.0 if order is None else float(order))
    real = local.dtype.to_real() if local.is_complex() else local.dtype
    return found.to(bound.get("dtype") or real)


WHOLE: dict[Any, Reduction] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.max: _largest,
    aten.amax: _largest,
    aten.min: _smallest,
    aten.amin: _smallest,
    aten.any: _any,
    aten.all: _all,
    aten.count_nonzero: _count,
    aten.dot: _dot,
    aten.vdot: _vdot,
    aten.equal: _equal,
    aten.norm: norm,
    aten.linalg_vector_norm: norm,
}
WITH_INDICES = {aten.max.dim, aten.min.dim, aten.max.other, aten.min.other}
# Of every element of a list, without a rule of their own.
OF_LISTS = {aten._foreach_max, aten._foreach_powsum}


def norms(tensors: Sequence[tuple[torch.Tensor, Comm | None]], order: float) -> list[torch.Tensor]:
    """The norm of every tensor, a part of one on the ranks of a Comm or whole (None): 0-D, fp64.

    One all-reduce for each Comm, whatever the number of tensors.
    """
    largest = math.isinf(order)
    powers = _powers([tensor for tensor, _ in tensors], order)
    for comm in {id(c): c for _, c in tensors if c is not None}.values():
        places = [place for place, (_, c) in enumerate(tensors) if c is comm]
        own = powers[places]
        if largest:  # with a mark for NaN, which not every backend lets win
            own = torch.stack([own.nan_to_num(posinf=math.inf), own.isnan().double()])
        _over_ranks(own, comm, "norms", largest=largest)
        powers[places] = torch.where(own[1] > 0, math.nan, own[0]) if largest else own
    if order < 0 and largest:
        powers = -powers
    elif order and not largest:
        powers = powers.pow(1.0 / order)
    return list(powers.unbind())


def _powers(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """What adds up over parts (or is the largest of them) to the norm's power, [n] fp64."""
    device = tensors[0].device
    least = -math.inf if order == -math.inf else 0.0
    powers = torch.full((len(tensors),), least, dtype=torch.float64, device=device)
    places = [place for place, tensor in enumerate(tensors) if tensor.numel()]
    if not places:
        return powers
    filled = [tensors[place] for place in places]
    wide = [t.float() if t.dtype in _HALVES else t for t in filled]
    found = torch.stack([n.double() for n in torch._foreach_norm(wide, order)])
    if order == -math.inf:
        found = -found
    elif order and not math.isinf(order):
        found = found.pow(order)
    powers[places] = found
    return powers
