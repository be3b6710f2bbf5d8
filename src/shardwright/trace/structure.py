"""Parts of a module that repeat: children of a list, a dict or a sequence of modules that are built
alike, one after the other or in a pattern of a few.

Two parts are alike if their classes, the shapes and dtypes of their tensors and their plain
attributes are. A number that goes up evenly from part to part, as that of a layer does, says where
a part is and not how it is built. Parts that share parameters with others are like none, nor are
parts without a forward that have parameters beside those of their own parts that run.
"""

# Why parts are compared by all that they have and not by class and shapes: two layers of one
# class may differ by a flag, a function or a number, and one would be recorded for both. Whatever
# cannot be compared makes parts different, which costs time only; alike parts that are not would
# cost a wrong estimate. A number that goes up evenly is the exception, since nearly every layer
# knows its place.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.core.recording import Series
from shardwright.trace.checkpointing import Policy
from shardwright.tracker.private import hook_counts, own_buffers, own_children, own_parameters

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
DEEPEST = 4  # objects within objects that are compared
EVENLY = 1e-5  # of their range: how far numbers may be from going up evenly, for those of fp32
# What a module keeps of itself, beside which its own attributes stand
_KEPT_BY_TORCH = frozenset(vars(nn.Module())) - {"training"}


class Container(NamedTuple):
    """A list, dict or sequence of modules: its children in order, cut into stretches; ``units`` are
    the children that are gathered one by one."""

    path: str
    module: nn.Module
    names: tuple[str, ...]
    children: tuple[nn.Module, ...]
    stretches: tuple[PartRange, ...]
    units: tuple[int, ...]


def containers(model: nn.Module, chosen: Policy | None = None) -> list[Container]:
    """Where parts of ``model`` repeat, outermost first.

    Parts inside of a part that repeats belong to it. Of a ``chosen`` policy that picks some by
    their places, units are distinguished by these.
    """
    found = list(_walk(model, "", _Sharing(model)))
    # A policy that picks some of the parts makes parts different that are built alike, so this is
    # part of what is compared. Places go on from container to container, as the policy counts.
    if chosen is None or not chosen.picks_some:
        return found
    begin, cuts = 0, []
    for container in found:
        places = {child: begin + k for k, child in enumerate(container.units)}
        keys = _keys(container.children, _Sharing(model))
        picked = {k for k, place in places.items() if chosen.turn(place) == 0}
        cut = stretches([(key, k in picked) for k, key in enumerate(keys)])
        cuts.append(container._replace(stretches=tuple(cut)))
        begin += len(container.units)
    return cuts


SHARE = 8  # of a model without parts that repeat, a unit of its own has at least one in so many


def large_parts(model: nn.Module, found: Sequence[Container]) -> list[str]:
    """Paths of the modules beside parts that repeat that have as many bytes as the largest of
    those, or where nothing repeats a good share of the model; outermost first."""
    blocks = [container.children[k] for container in found for k in container.units]
    sharing = _Sharing(model)
    least = max(map(_bytes, blocks), default=-(-_bytes(model) // SHARE))
    return list(_large(model, "", set(blocks), least, sharing))


def _large(
    module: nn.Module, path: str, blocks: set[nn.Module], least: int, sharing: _Sharing
) -> Iterator[str]:
    for name, child in module.named_children():
        if child in blocks or _bytes(child) < max(least, 1):
            continue
        inside = any(part in blocks for part in child.modules())
        if inside or called(child) != [child] or sharing.is_bound(child):
            yield from _large(child, _joined(path, name), blocks, least, sharing)
        else:
            yield _joined(path, name)


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


class _Sharing:
    """Which modules and parameters stand in several places of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.places = Counter(_places(model))

    def is_bound(self, part: nn.Module) -> bool:
        """Whether a part has a parameter that also stands outside of it."""
        inside = Counter(_places(part))
        return any(self.places[parameter] > count for parameter, count in inside.items())


def _places(module: nn.Module) -> Iterator[nn.Parameter]:
    for _, part in module.named_modules(remove_duplicate=False):
        yield from (p for p in own_parameters(part).values() if p is not None)


def _walk(module: nn.Module, path: str, sharing: _Sharing) -> Iterator[Container]:
    inside: Mapping[str, nn.Module] = dict(module.named_children())
    if isinstance(module, CONTAINERS):
        found = _container(module, path, sharing)
        if found is not None:
            yield found
            # What is inside of a part that repeats belongs to it: a list of heads in every layer is
            # not a series of its own.
            repeated = {k for cut in found.stretches if repeats(cut) for k in cut.every}
            left = set(range(len(found.children))) - repeated - set(found.units)
            inside = {found.names[k].rpartition(".")[2]: found.children[k] for k in sorted(left)}
    for name, child in inside.items():
        yield from _walk(child, _joined(path, name), sharing)


def _container(module: nn.Module, path: str, sharing: _Sharing) -> Container | None:
    """``module`` with the stretches of its children, if any repeats that has parameters."""
    items = [(name, child) for name, child in own_children(module).items() if child is not None]
    children = tuple(child for _, child in items)
    cut = stretches(_keys(children, sharing))
    repeated = [k for each in cut if repeats(each) for k in each.every]
    classes = {type(children[k]) for k in repeated if _has_parameters(children[k])}
    units = tuple(
        k
        for k, child in enumerate(children)
        if type(child) in classes and _has_parameters(child) and not sharing.is_bound(child)
    )
    if not units:
        return None
    names = tuple(_joined(path, name) for name, _ in items)
    return Container(path, module, names, children, tuple(cut), units)


def repeats(cut: PartRange) -> bool:
    """Whether a stretch comes at least twice."""
    return cut.length >= 2 * cut.period


def called(part: nn.Module) -> list[nn.Module]:
    """What of a part runs: itself, or where it has no forward, as lists have none, what is in it,
    as far as that has parameters."""
    if type(part).forward is not nn.Module.forward:
        return [part]
    return [p for child in part.children() if _has_parameters(child) for p in called(child)]


def _runs_whole(part: nn.Module) -> bool:
    """Whether all parameters of a part are of what runs, and none is read by whoever has it."""
    running = {p for module in called(part) for p in module.parameters()}
    return all(parameter in running for parameter in part.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ---- whether parts are alike ---------------------------------------------------------------------


def _keys(children: Sequence[nn.Module], sharing: _Sharing) -> list[Hashable]:
    """A key for every part, equal for those that are alike."""
    kinds: dict[Hashable, list[int]] = {}
    numbers: list[list[float]] = []
    for place, child in enumerate(children):
        found: list[float] = []
        kind: Hashable = _built(child, found)
        numbers.append(found)
        # Such a part is like none: a parameter belongs to the first unit that has it, so of two
        # parts that share one only the first gathers and reduces it.
        if sharing.is_bound(child) or not _runs_whole(child):
            kind = (kind, place)
        kinds.setdefault(kind, []).append(place)
    keys: list[Hashable] = [None] * len(children)
    for number, places in enumerate(kinds.values()):
        columns = zip(*(numbers[place] for place in places), strict=True)
        varying = [column for column in columns if not _goes_up(places, column)]
        rows = zip(*varying, strict=True) if varying else ((),) * len(places)
        for place, row in zip(places, rows, strict=True):
            keys[place] = (number, row)
    return keys


def _goes_up(places: Sequence[int], values: Sequence[float]) -> bool:
    """Whether numbers go up or down evenly with the places of at least three parts; those of two
    have to be the places, for any two differ evenly."""
    if len(places) < 3 or values[0] == values[-1]:
        return len(places) == 2 and list(values) == list(places)
    step = (values[-1] - values[0]) / (places[-1] - places[0])
    far = EVENLY * abs(values[-1] - values[0])
    pairs = zip(places, values, strict=True)
    return all(abs(values[0] + step * (p - places[0]) - value) <= far for p, value in pairs)


def _built(module: nn.Module, numbers: list[float]) -> Hashable:
    """How a part is built, without the numbers, which are added to ``numbers`` in order."""
    own = vars(module)
    attributes = tuple(
        (name, _plain(own[name], numbers, DEEPEST))
        for name in sorted(own)
        if name not in _KEPT_BY_TORCH
    )
    return (
        type(module),
        attributes,
        tuple((name, _tensor(p)) for name, p in own_parameters(module).items()),
        tuple((name, _tensor(b)) for name, b in own_buffers(module).items()),
        tuple((name, _child(c, numbers)) for name, c in own_children(module).items()),
        hook_counts(module),
    )


def _child(module: nn.Module | None, numbers: list[float]) -> Hashable:
    return None if module is None else _built(module, numbers)


def _tensor(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor)


def _plain(value: Any, numbers: list[float], depth: int) -> Hashable:
    """An attribute, as far as it can decide what a forward does."""
    if isinstance(value, (bool, str, bytes, Enum, torch.dtype, torch.device, type(None), type)):
        return value
    # Numbers are compared apart from the rest, for whether one is the part's place can only be said
    # beside those of the other parts.
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            return repr(value)
        numbers.append(value)
        return type(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if depth == 0 or isinstance(value, nn.Module):
        return type(value)
    into: Callable[[Any], Hashable] = partial(_inside, numbers=numbers, depth=depth - 1)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(into(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((repr(key), into(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value), tuple(sorted(map(repr, value)))
    return _called(value, into) or (type(value), into(getattr(value, "__dict__", None)))


def _inside(value: Any, numbers: list[float], depth: int) -> Hashable:
    return _plain(value, numbers, depth)


def _called(value: Any, into: Callable[[Any], Hashable]) -> Hashable:
    """A function by its code and what it has about it; nothing for what is none."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, into([value.__defaults__, cells])
    if isinstance(value, MethodType):
        return value.__func__, type(value.__self__)
    if isinstance(value, partial):
        return partial, into([value.func, value.args, value.keywords])
    return None


__all__ = ["CONTAINERS", "Container", "called", "containers", "large_parts", "repeats"]


LONGEST_PERIOD = 8
FEW = 3  # periods that are recorded: the first, one between, the last


class PartRange(NamedTuple):
    """``length`` layers from ``start`` on, the same again after ``period``."""

    start: int
    length: int
    period: int

    @property
    def every(self) -> range:
        """All of its layers."""
        return range(self.start, self.start + self.length)

    @property
    def recorded(self) -> list[int]:
        """The layers that a recording needs: three periods, and what is over at the end."""
        return self.kept(FEW)

    def kept(self, periods: int) -> list[int]:
        """Its layers without as many periods in the middle as leave ``periods``."""
        few = periods * self.period + self.length % self.period
        if self.length <= few:
            return list(self.every)
        head = (periods - 1) * self.period
        return [*self.every[:head], *self.every[head - few :]]

    @property
    def left_out(self) -> int:
        """Periods that a recording does without."""
        return max(0, self.length // self.period - FEW)


def stretches(signatures: Sequence[Hashable]) -> list[PartRange]:
    """Cut layers into stretches that repeat, longest first where there is a choice."""
    found, start = [], 0
    while start < len(signatures):
        best = PartRange(start, 1, 1)
        for period in range(1, LONGEST_PERIOD + 1):
            end = start + period
            while end < len(signatures) and signatures[end] == signatures[end - period]:
                end += 1
            if end > len(signatures):
                break
            length = end - start
            # By what repeats beyond the first period, not by length, for that is what a recording
            # can leave out; of equal ones the shorter period is taken.
            if length > period and length - period > best.length - best.period:
                best = PartRange(start, length, period)
        found.append(best)
        start += best.length
    return found


def series_of(
    stretch: PartRange, names: Sequence[str], recorded: Sequence[str], title: str
) -> Series:
    """The series of a stretch of layers: all their ``names``, and those in a recording."""
    return Series(title, tuple(names), tuple(recorded), stretch.period)
