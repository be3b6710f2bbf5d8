"""Which parameters and modules a unit has, who shows them, and where their elements lie."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.layout import UnitLayout
from shardwright.core.placement import Owned, Placement
from shardwright.core.tensor import TensorSpec
from shardwright.runtime.torch_private import address_of, is_plain, local_of, storage_of
from shardwright.runtime.units.cut import Parallel
from shardwright.runtime.units.linked import LinkedParameter
from shardwright.runtime.units.shard_tensor import ShardTensor
from shardwright.tracker.private import has_still, own_buffers, own_children, own_parameters
from shardwright.tracker.tensors import DTYPES, NAMES

# Names stay the same with and without such a wrapper, or a checkpoint of one would not fit the
# other.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def plain_name(path: str) -> str:
    """A path without what recomputation and compilation wrappers add to it."""
    if not any(wrapper in path for wrapper in _WRAPPERS):
        return path
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter's place: shapes, dtype, placement, and byte offsets in both buffers.

    ``local_shape`` is what this rank holds: under ``Flat()`` the 1-D range of elements that lies in
    its slice. ``owner_rank`` is None unless the placement is ``Owned``.
    """

    fqn: str
    global_shape: torch.Size
    local_shape: torch.Size
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    byte_offset: int
    unsharded_byte_offset: int
    requires_grad: bool = True

    @property
    def owner_rank(self) -> int | None:
        """The rank that has all of it, under ``Owned``."""
        placement = self.placements[-1]
        return placement.rank if isinstance(placement, Owned) else None


def infos_of(layout: UnitLayout, rank: int) -> Iterator[ParamInfo]:
    """The places of a unit's parameters on a rank, in layout order."""
    for segment in layout.segments:
        dtype = DTYPES[segment.dtype]
        for slot in segment.slots:
            piece = segment.piece(slot, rank)
            yield ParamInfo(
                slot.tensor.fqn,
                torch.Size(slot.tensor.shape),
                torch.Size(piece.sizes),
                dtype,
                (slot.placement,),
                piece.shard_offset,
                segment.offset + slot.start * dtype.itemsize,
                segment.trainable,
            )


@dataclass(slots=True)
class Member:
    """A parameter of a unit, the names it has, and every place where a module shows it.

    Until the unit is built ``parameter`` is the module's own, from then on what the module shows
    while the unit is sharded. Modules are not kept alive: a place is their dictionary of
    parameters, or where a module has a ``__setattr__`` of its own a weak reference to it. Of what
    tensor parallelism has cut, ``shape`` is that of the local tensor.
    """

    fqn: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    aliases: list[str] = field(default_factory=list)
    parallel: Parallel | None = None
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    setters: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)

    def add_place(self, module: nn.Module, name: str) -> None:
        """One more module that shows this parameter."""
        self.places.append((own_parameters(module), name))
        # nn.RNN and its like keep a list of their weights, which their __setattr__ renews. Shown
        # only by their dictionary of parameters, they would compute with the weights of before.
        if type(module).__setattr__ is not nn.Module.__setattr__:
            self.setters.append((weakref.ref(module), name))

    def copied(self, memo: dict[int, Any]) -> Member:
        """The same of the copies of modules that ``memo`` collects."""
        made = Member(self.fqn, copy.deepcopy(self.parameter, memo), self.shape, self.dtype)
        made.aliases, made.parallel = list(self.aliases), self.parallel
        made.places = [(copy.deepcopy(shown, memo), name) for shown, name in self.places]
        for reference, name in self.setters:
            module = reference()
            if module is not None:
                made.setters.append((weakref.ref(copy.deepcopy(module, memo)), name))
        return made

    def shown(self) -> Any:
        """What the first module shows now."""
        parameters, name = self.places[0]
        return parameters.get(name)

    @property
    def spec(self) -> TensorSpec:
        """Name, shape and dtype, without data."""
        if self.dtype not in NAMES:
            known = ", ".join(NAMES.values())
            found = str(self.dtype).removeprefix("torch.")
            raise UnsupportedError(self.fqn, f"one of the dtypes {known}", found)
        return TensorSpec(self.fqn, tuple(self.shape), NAMES[self.dtype])


def find_members(
    modules: Sequence[nn.Module],
    prefixes: Sequence[str],
    ignored: Collection[nn.Parameter],
    is_taken: Callable[[nn.Module], bool],
) -> list[Member]:
    """The parameters below ``modules`` that no inner unit has; tied names share one member.

    ``is_taken`` is true of the modules of inner units, whose whole subtree is theirs.
    """
    left_out = {id(parameter) for parameter in ignored}  # the caller keeps them alive meanwhile
    found: dict[int, Member] = {}
    for module, prefix in zip(modules, prefixes, strict=True):
        for path, owner in own_modules(module, prefix, is_taken):
            for name, parameter in own_parameters(owner).items():
                if parameter is None or id(parameter) in left_out:
                    continue
                fqn = plain_name(f"{path}.{name}" if path else name)
                if is_lazy(parameter):
                    raise InputError(
                        fqn,
                        "a parameter with a shape",
                        "one of a lazy module that has not run yet",
                        "Run a batch through the model before sharding it.",
                    )
                member = found.get(id(parameter))
                if member is None:
                    parallel = Parallel.of(parameter, fqn)
                    shape = local_of(parameter).shape if parallel else parameter.shape
                    member = found[id(parameter)] = Member(
                        fqn, parameter, shape, parameter.dtype, parallel=parallel
                    )
                else:
                    member.aliases.append(fqn)
                member.add_place(owner, name)
    return list(found.values())


def own_modules(
    module: nn.Module, path: str, is_taken: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """``module`` and what is below it but for inner units, by path."""
    seen: set[int] = set()
    stack = [(path, module)]
    while stack:
        path, current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in own_children(current).items()
            if child is not None and not is_taken(child)
        ]
        # The order of named_modules(). Layouts follow it, so it has to be one that every rank
        # finds.
        stack.extend(reversed(children))


def _refuse_overlaps(members: Sequence[Member], unit: str) -> None:
    """Two parameters over one piece of memory would become two tensors."""
    places: dict[int, list[tuple[int, int, str]]] = {}
    for member in members:
        data = local_of(member.parameter).detach()
        if data.numel() and not data.is_meta:
            begin = address_of(data)
            # By extent and not by number of elements: a column of a matrix reaches across all of
            # it.
            extent = sum((n - 1) * abs(s) for n, s in zip(data.shape, data.stride(), strict=True))
            end = begin + (extent + 1) * data.element_size()
            places.setdefault(storage_of(data), []).append((begin, end, member.fqn))
    for found in places.values():
        found.sort()
        for (_, end, first), (begin, _, second) in pairwise(found):
            if begin < end:
                where = f"{second} of unit '{unit}'"
                wanted = "memory of its own, or to be the same parameter"
                remedy = f"Tie them (let both modules have one Parameter), or clone {second}."
                raise InputError(where, wanted, f"memory of {first} in another parameter", remedy)


def check_materials(members: Sequence[Member], unit: str) -> None:
    """Raise for parameters that cannot live in a buffer."""
    if not members:
        raise InputError(f"unit '{unit}'", "at least one parameter of its own", "none")
    real = next((m.fqn for m in members if not m.parameter.is_meta), None)
    for member in members:
        parameter = member.parameter
        if parameter.is_meta and real is not None:
            raise InputError(
                f"{member.fqn} of unit '{unit}'",
                f"a real tensor, as {real} is",
                "one on the meta device",
                "Build all of a unit on the meta device, or nothing of it.",
            )
        if member.parallel is None and not is_plain(parameter.data):
            raise UnsupportedError(
                member.fqn,
                "a plain tensor",
                f"a {type(parameter.data).__name__}",
                "Shard modules before anything else is applied to their parameters.",
            )
        kind = type(parameter)
        if nn.Parameter in kind.__mro__ and kind is not nn.Parameter:
            remedy = (
                "Pass it in ignored_params, or keep what it says as attributes of an nn.Parameter, "
                "which stay."
            )
            found = f"a {kind.__name__}, whose type would be gone in a forward"
            raise UnsupportedError(member.fqn, "an nn.Parameter", found, remedy)
        if parameter.layout != torch.strided:
            raise UnsupportedError(member.fqn, "a dense tensor", str(parameter.layout))
        strides = zip(parameter.shape, parameter.stride(), strict=True)
        if parameter.requires_grad and any(n > 1 and not stride for n, stride in strides):
            found = "an expanded tensor, of which several elements are one and no step can be made"
            remedy = "Clone it: nn.Parameter(tensor.clone())."
            raise UnsupportedError(member.fqn, "memory for each element", found, remedy)
        # Such tensors have no version counter, by which writes to a unit are noticed.
        if parameter.is_inference():
            raise InputError(
                member.fqn,
                "a tensor made outside of inference mode",
                "one made inside",
                "Build the module outside of torch.inference_mode().",
            )
    _refuse_overlaps(members, unit)


class _Row:
    """A module, and what it had. Nothing is kept alive by it.

    Children are known by ``ids``, which are compared in one go in every forward. One that is gone
    may leave its number to another, so ``ids`` are forgotten as soon as one goes.
    """

    __slots__ = ("__weakref__", "children", "ids", "module", "names", "parameters", "path")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = weakref.ref(module)
        self.names = tuple(own_parameters(module))
        self.parameters = len(self.names)
        children = list(own_children(module).values())
        self.ids: list[int] | None = [*map(id, children)]
        gone = partial(_forget, weakref.ref(self))
        self.children = [weakref.ref(child, gone) for child in children if child is not None]


def _forget(row: weakref.ref[_Row], _: object) -> None:
    found = row()
    if found is not None:
        found.ids = None


class Structure:
    """The modules of a unit when it was sharded, so that a later one with parameters of its own is
    noticed."""

    def __init__(self) -> None:
        self.left_out: tuple[str, ...] = ()  # parameters that stay as they are, by name
        self._rows: list[_Row] = []
        # In one look at all lengths nearly all is seen: parameters, and children where there are
        # none. Modules with children have to be asked; kept here, these would not be freed.
        self._tables: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._nested: list[_Row] = []
        self._empty: list[tuple[str, weakref.ref[torch.Tensor], int]] = []

    def add(self, module: nn.Module, path: str, is_taken: Callable[[nn.Module], bool]) -> None:
        """One more module, with what is below it and not of an inner unit."""
        self._rows.extend(_Row(p, m) for p, m in own_modules(module, path, is_taken))
        self._remember()

    def _remember(self) -> None:
        self._tables, self._nested = [], []
        for row in self._rows:
            module = row.module()
            if module is not None and row.ids == []:
                self._tables += own_parameters(module), own_children(module)
            elif module is not None:
                self._nested.append(row)
        self._lengths = [*map(len, self._tables)]

    @property
    def _is_as_it_was(self) -> bool:
        if [*map(len, self._tables)] != self._lengths:
            return False
        for row in self._nested:
            module = row.module()
            if module is not None and not has_still(module, row.ids, row.parameters):
                return False
        return True

    @contextmanager
    def following_buffers(self) -> Iterator[None]:
        """Modules are moved inside: buffers that leave the meta device, as by ``to_empty``, have
        memory then and no values."""
        before = {place for place, (_, buffer) in self._buffers().items() if buffer.is_meta}
        yield
        now = self._buffers() if before else {}
        for place in before & now.keys():
            path, buffer = now[place]
            if not buffer.is_meta:
                # Whoever gives it values writes in place, which counts a version, or puts another
                # tensor there.
                self._empty.append((path, weakref.ref(buffer), buffer._version))

    @property
    def has_empty(self) -> bool:
        """Whether there are buffers that got memory and were not looked at since."""
        return bool(self._empty)

    def without_values(self) -> list[str]:
        """Paths of the buffers that nobody has written or replaced since they got memory; each is
        told once."""
        empty, self._empty = self._empty, []
        shown = {id(buffer) for _, buffer in self._buffers().values()} if empty else ()
        found = [(path, reference(), version) for path, reference, version in empty]
        return [p for p, b, v in found if b is not None and id(b) in shown and b._version == v]

    def _buffers(self) -> dict[tuple[int, str], tuple[str, torch.Tensor]]:
        """Paths and values by module and name."""
        found = {}
        for row in self._rows:
            module = row.module()
            for name, buffer in own_buffers(module).items() if module is not None else ():
                if buffer is not None:
                    path = plain_name(f"{row.path}.{name}" if row.path else name)
                    found[id(module), name] = path, buffer
        return found

    def check(self, unit: str) -> None:
        """Raise InputError for parameters that train and that nothing would shard or reduce: those
        of modules that were added or replaced."""
        if self._is_as_it_was:
            return
        for index, row in enumerate(self._rows):
            module = row.module()
            if module is not None and not has_still(module, row.ids, row.parameters):
                _refuse_new(module, row, unit)
                # Nothing new trains, so the module is remembered as it is now and looked through
                # once only.
                self._rows[index] = _Row(row.path, module)
        self._remember()


def _refuse_new(module: nn.Module, before: _Row, unit: str) -> None:
    found: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in own_parameters(module).items()
        if parameter is not None and name not in before.names
    }
    for name, child in own_children(module).items():
        if child is not None:
            found.update(child.named_parameters(name))
    for name, parameter in found.items():
        if parameter.requires_grad and not isinstance(parameter, ShardTensor | LinkedParameter):
            path = plain_name(f"{before.path}.{name}" if before.path else name)
            raise InputError(
                f"{path} of unit '{unit}'",
                "a parameter that was there when the unit was sharded",
                "a new one that trains, which nothing would shard or reduce",
                "Change modules before sharding them; freeze what shall not train.",
            )
