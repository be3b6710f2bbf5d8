"""The fast path for dense optimizers: few flat tensors instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.core.model import DenseOptimizer
from shardwright.runtime.torch_private import address_of
from shardwright.runtime.units.dstorage import DStorage
from shardwright.runtime.units.moved import rebase
from shardwright.runtime.units.registry import storages_in

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``begin:end`` of a segment's share that one flat tensor has at ``offset``."""

    unit: DStorage
    segment: int
    begin: int
    end: int
    flat: nn.Parameter
    offset: int


class FlatSink:
    """Takes a unit's reduced gradients into the ``.grad`` of flat tensors."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches: dict[int, list[Stretch]] = {}
        for stretch in stretches:
            self.stretches.setdefault(stretch.segment, []).append(stretch)
        self._written: dict[tuple[int, int], int] = {}

    @property
    def all(self) -> list[Stretch]:
        """Every stretch of the unit."""
        return [stretch for found in self.stretches.values() for stretch in found]

    def part(self, index: int, first: int, numel: int) -> torch.Tensor | None:
        """The gradient of ``numel`` elements from ``first`` of a segment's share."""
        for stretch in self.stretches.get(index, ()):
            if stretch.begin <= first < stretch.end and stretch.flat.grad is not None:
                begin = stretch.offset + first - stretch.begin
                return stretch.flat.grad[begin : begin + numel]
        return None

    def room(self, index: int) -> torch.Tensor | None:
        """The stretch of the flat gradient, if one tensor takes all and has nothing there yet."""
        found = self.stretches.get(index, ())
        if len(found) != 1:
            return None
        only = found[0]
        share = only.unit.buffers.segments[index].share
        if only.flat.numel() == share.numel() or only.end - only.begin != share.numel():
            return None
        gradient = _gradient_of(only.flat)
        if self._written.get((index, only.begin)) == address_of(gradient):
            return None
        return gradient[only.offset : only.offset + share.numel()]

    def accept(self, index: int, share: torch.Tensor) -> None:
        """Set or add to the flat gradients."""
        for stretch in self.stretches.get(index, ()):
            part = share[stretch.begin : stretch.end]
            flat = stretch.flat
            if flat.grad is None and flat.numel() == part.numel():
                flat.grad = part
                continue
            gradient = _gradient_of(flat)
            target = gradient[stretch.offset : stretch.offset + part.numel()]
            if address_of(target) != address_of(part):
                target.add_(part)
            self._written[index, stretch.begin] = address_of(gradient)


def _gradient_of(flat: nn.Parameter) -> torch.Tensor:
    """The gradient of a flat tensor, zero where no unit has written."""
    if flat.grad is None:
        flat.grad = torch.zeros_like(flat)
    return flat.grad


@overload
def optimizer_parameters(
    model: nn.Module, groups: None = None, *, per_unit: bool = False
) -> list[nn.Parameter]: ...


@overload
def optimizer_parameters(
    model: nn.Module, groups: Groups, *, per_unit: bool = False
) -> list[dict[str, Any]]: ...


def optimizer_parameters(
    model: nn.Module, groups: Groups | None = None, *, per_unit: bool = False
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The shards of all units of ``model`` as few flat parameters, for a fused optimizer.

    Without ``groups``: one parameter per dtype. With ``groups``, which are torch's
    (``{"params": [...], "weight_decay": 0.0}``, parameters of the model or their names): the same
    groups with flat parameters in them, one for each stretch of memory that belongs to one group;
    matrices lie before vectors in every unit, so groups by dimension have one stretch a unit. What
    no group names is not optimized.

    ``per_unit`` keeps the units apart: each has gradients only from its reduce on, where one flat
    gradient for all is there from the first reduce of a backward.

    From here on gradients go to these tensors and not to ``model.parameters()``: clear them with
    the optimizer's ``zero_grad``, not the model's. They are shards, so a norm over them is this
    rank's part only. Tables are not among them: they are updated inside their backward. Raises if
    an earlier backward left gradients on ``model.parameters()``.
    """
    units = list(storages_in(model))
    if not units:
        raise InputError(
            expected("model", "units made by apply or fully_shard_flat", "none", "Shard it first.")
        )
    _refuse_gradients(units)
    names = _group_of_parameter(model, groups, units)
    for unit in units:
        unit.free()
        unit.absorb()
    if not per_unit and len(units) > 1:
        _share_one_store(units)
    made: list[tuple[int, nn.Parameter]] = []
    stretches: list[Stretch] = []
    for group, dtype, parts in _runs(units, names, per_unit=per_unit):
        flat = nn.Parameter(_joined(parts, dtype))
        made.append((group, flat))
        offset = 0
        for unit, segment, begin, end in parts:
            stretches.append(Stretch(unit, segment, begin, end, flat, offset))
            offset += end - begin
    for unit in units:
        unit.sink = FlatSink([s for s in stretches if s.unit is unit])
    if groups is None:
        return [flat for _, flat in made]
    return [
        {**group, "params": [flat for number, flat in made if number == index]}
        for index, group in enumerate(groups)
    ]


Part = tuple[DStorage, int, int, int]  # unit, segment, first and last element of the share


def _runs(
    units: Sequence[DStorage], group_of: Mapping[tuple[int, str], int], *, per_unit: bool
) -> Iterator[tuple[int, torch.dtype, list[Part]]]:
    """Stretches of memory of one group and dtype, across units where they touch."""
    run: list[Part] = []
    key: tuple[Any, ...] = ()
    end_address = -1
    for number, unit in enumerate(units):
        for part, group in _parts(unit, group_of):
            views = unit.buffers.segments[part[1]]
            size = views.dtype.itemsize
            address = address_of(views.share) + part[2] * size
            found = (group, views.dtype, number if per_unit else -1)
            if run and found == key and address == end_address:
                run.append(part)
            else:
                if run:
                    yield key[0], key[1], run
                run, key = [part], found
            end_address = address + (part[3] - part[2]) * size
    if run:
        yield key[0], key[1], run


def _parts(unit: DStorage, group_of: Mapping[tuple[int, str], int]) -> Iterator[tuple[Part, int]]:
    """The stretches of each segment's share by group; padding goes with what is before it."""
    pieces = iter(unit.buffers.pieces)
    one_group = set(group_of.values()) == {0} and all(
        (id(unit), member.fqn) in group_of for member in unit.members
    )
    for index, views in enumerate(unit.buffers.segments):
        segment = views.segment
        starts: list[tuple[int, int | None]] = []
        for _ in segment.slots:
            piece = next(pieces)
            if piece.numel:
                group = group_of.get((id(unit), piece.tensor.fqn))
                starts.append((segment.begin(piece), group))
        if not segment.trainable:
            continue
        starts.sort()
        current: int | None = 0 if one_group else None  # also of a share that is all padding
        first = 0
        for begin, group in starts:
            if group != current:
                if current is not None and begin > first:
                    yield (unit, index, first, begin), current
                current, first = group, begin if current is not None or group is None else 0
        if current is not None and segment.share:
            yield (unit, index, first, segment.share), current


def _joined(parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    """One view over parts that touch."""
    unit, segment, begin, _ = parts[0]
    share = unit.buffers.segments[segment].share
    length = sum(end - first for _, _, first, end in parts)
    offset = share.storage_offset() + begin
    return torch.as_strided(share.detach(), (length,), (1,), offset)


def _share_one_store(units: Sequence[DStorage]) -> None:
    """Let the shards of all units be slices of one tensor."""
    total = sum(unit.buffers.shard.numel() for unit in units)
    store = torch.empty(total, dtype=torch.uint8, device=units[0].buffers.shard.device)
    begin = 0
    for unit in units:
        end = begin + unit.buffers.shard.numel()
        rebase(unit, store[begin:end])
        begin = end


def _refuse_gradients(units: Sequence[DStorage]) -> None:
    for unit in units:
        for member in unit.members:
            if unit.sink is None and member.parameter.grad is not None:
                raise InputError(
                    expected(
                        "optimizer_parameters",
                        "to be called before the first backward",
                        f"a gradient on {member.fqn}",
                        "Call it right after sharding, or clear gradients first.",
                    )
                )


def _group_of_parameter(
    model: nn.Module, groups: Groups | None, units: Sequence[DStorage]
) -> dict[tuple[int, str], int]:
    """The number of the group of every member, by unit and fqn."""
    places = {id(m.parameter): (id(unit), m.fqn) for unit in units for m in unit.members}
    if groups is None:
        return dict.fromkeys(places.values(), 0)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    found: dict[tuple[int, str], int] = {}
    for number, group in enumerate(groups):
        for given in group["params"]:
            parameter = by_name.get(given) if isinstance(given, str) else given
            place = places.get(id(parameter))
            if place is None:
                raise InputError(
                    expected(
                        f"groups[{number}]",
                        "sharded parameters of the model, or their names",
                        repr(given)[:60],
                        "Optimize parameters that no unit has with an optimizer of their own.",
                    )
                )
            if place in found:
                raise InputError(
                    expected(f"groups[{number}]", "each parameter in one group", place[1])
                )
            found[place] = number
    return found


def make_optimizer(
    kind: DenseOptimizer, parameters: list[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """The optimizer a plan names for its dense units, in torch's fused form."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate, fused=True)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=learning_rate, fused=True)
    return torch.optim.Adam(parameters, lr=learning_rate, fused=True)
