"""What users hold of a sharded unit: its bytes, its views, its states and settings; which module
has which storage."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import InputError, check_type
from shardwright.core.layout import UnitLayout
from shardwright.core.placement import describe
from shardwright.core.quantities import format_bytes
from shardwright.runtime.comm import Comm
from shardwright.runtime.units.buffers import Buffers, CachedViews
from shardwright.runtime.units.cutting import FULL_PRECISION
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.parameter import ParamInfo
from shardwright.runtime.units.rebind import absorb, start_gather
from shardwright.runtime.units.unit import SHARDED, UNSHARDED, State, Unit


class DStorage:
    """One unit's storage on this rank. Made by ``fully_shard_flat`` and by ``apply``.

    ``state`` is SHARDED or UNSHARDED, ``mesh`` where it is sharded, ``comm`` what its ranks do
    together, ``layout`` where its elements lie, ``param_infos`` the place of every parameter by
    fqn. Its ``repr`` is the table of all units of the same model.
    """

    __slots__ = ("__weakref__", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    @property
    def name(self) -> str:
        """The path of the unit's module from the one that was sharded last, or its class."""
        return self.unit.name

    @property
    def state(self) -> State:
        """Which bytes are there now."""
        return self.unit.state

    @property
    def mesh(self) -> DeviceMesh:
        """Of one dimension, or of replicas x shards."""
        return self.unit.mesh

    @property
    def comm(self) -> Comm:
        """The unit's ranks; ``comm.paths`` tells how collectives travel."""
        return self.unit.comm

    @property
    def layout(self) -> UnitLayout:
        """Segments and slots, without memory."""
        return self.unit.layout

    @property
    def param_infos(self) -> dict[str, ParamInfo]:
        """Where every parameter lies, by fqn."""
        return self.unit.param_infos

    def __getattr__(self, name: str) -> Any:
        """What the unit has besides, which is the runtime's own and may change with it."""
        if name.startswith("_") or name == "unit":
            raise AttributeError(name)
        found = getattr(self.unit, name)
        text = f"DStorage.{name} is the runtime's own and will go. Ask DStorage.unit.{name}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return found

    @property
    def byte_storage(self) -> torch.Tensor:
        """This rank's bytes [layout.stored_bytes], uint8: its shares, of what stays the whole."""
        return self._settled().shard

    def _settled(self) -> Buffers:
        absorb(self.unit)
        return self.unit.buffers

    def get_local_view(self, fqn: str) -> torch.Tensor:
        """This rank's part of a parameter [local_shape], possibly empty; shares the shard."""
        return self._settled().locals[self.unit.index(fqn)]

    def get_unsharded_view(self, fqn: str) -> torch.Tensor:
        """The full parameter, a view that dies with the UNSHARDED state: clone it to keep it."""
        unit = self.unit
        index = unit.index(fqn)
        if unit.state is not UNSHARDED and not unit.is_current:
            where, remedy = f"{fqn} of unit '{unit.name}'", "Call unshard() first."
            raise InputError(where, "state UNSHARDED", "SHARDED", remedy)
        return unit.buffers.parameters[index].detach()

    def views(self) -> CachedViews:
        """The views of shards, whole tensors and gradients that steps use and never make: how many,
        their bytes, how often they were made anew, and that each lies in its buffer."""
        buffers, gradients = self._settled(), self.unit.gradients.segments
        cached = itertools.chain(buffers.cached(), *(each.cached() for each in gradients))
        return CachedViews.of(cached, self.unit.laid_out - 1)

    def all_gather(self) -> torch.Tensor:
        """The unsharded byte buffer [layout.nbytes], gathered into new memory (collective).

        Parameters lie at their ``unsharded_byte_offset`` in their own dtype.
        """
        unit, present = self.unit, self._settled()
        shard, device = present.shard, present.device
        if shard.is_meta:
            raise unit.on_meta()
        how = {"shard": shard, "offloaded": unit.offloaded}
        buffers = Buffers(unit.layout, unit.comm, device, FULL_PRECISION, **how)
        buffers.finish_gather(buffers.start_gather(f"{unit.name} all_gather"))
        nothing = shard[:0].to(device)  # all there is of a root whose units have everything
        return torch.cat([nothing, *(v.whole.view(torch.uint8) for v in buffers.segments)])

    def unshard(self) -> None:
        """Gather the unit and show full parameters (collective); nothing if already so.

        Driven by hand and with gradients on, the next ``reshard()`` reduces, on every rank alike.
        """
        unit = self.unit
        if unit.driven_by_hand and torch.is_grad_enabled():
            unit.gradients.expect()
        if not unit.is_present:
            start_gather(unit)
        unit.finish_gather()

    def reshard(self) -> None:
        """Reduce gradients if a backward left some (collective), then free the full parameters."""
        unit = self.unit
        if unit.gradients.expected and not unit.holds:
            unit.start_reduce()
            unit.finish_reduce()
            unit.land()
        unit.free()
        unit.buffers.let_change()

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Full parameters inside (collective); with ``write`` every rank keeps its part of what is
        in them at the end, so all ranks must have written the same."""
        unit = self.unit
        absorb(unit)
        was = unit.state
        if unit.buffers.shard.is_meta:
            raise unit.on_meta()
        if not unit.is_present:
            unit.start_gather()
        unit.finish_gather()
        try:
            yield
            if write:
                unit.writes.keep(unit.name)
        finally:
            # What was written and is not to be kept goes now. Still counted, ``free`` would keep
            # it.
            unit.writes.forget()
            if was is SHARDED:
                unit.free()

    def set_requires_gradient_sync(self, synchronise: bool) -> None:
        """Whether backwards reduce gradients; else they are held, whole, until one does. Applies to
        every unit of the same model."""
        self.unit.flow.set(synchronise=bool(synchronise))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside hold their gradients back instead of reducing them."""
        return self.unit.flow.no_sync()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks; 1.0 is their sum.
        Applies to every unit of the same model."""
        self.unit.flow.set(divisor=divide_factor(factor))

    def reset(self) -> None:
        """Drop whatever an exception or an abandoned backward left, in every unit of the same
        model: afterwards all are SHARDED and hold no unreduced gradient."""
        self.unit.flow.recover()
        for unit in self.unit.flow.units():
            unit.gradients.drop()

    def __reduce__(self) -> NoReturn:
        where = f"a pickle of unit '{self.unit.name}'"
        wanted = "a module that is not sharded"
        remedy = "Pickle state_dict(), or full_state_dict() for use anywhere."
        raise InputError(where, wanted, "a sharded one, which needs its ranks", remedy)

    def __repr__(self) -> str:
        return table(self.unit.flow)


def divide_factor(factor: float) -> float:
    """A number that gradients can be divided by."""
    if not factor > 0:
        raise InputError("gradient divide factor", "a number above 0", f"{factor}")
    return float(factor)


class UnitTraffic(NamedTuple):
    """Collectives of a unit in a step with one forward and one backward, and their bytes."""

    collectives: int
    nbytes: int


def traffic(unit: Unit, reshards: bool) -> UnitTraffic:
    """What the unit moves in a step: bytes of the full buffer of each call."""
    buffers, gradients = unit.buffers, unit.gradients
    gathers = len(buffers.direct) + bool(buffers.chunked)
    gathered = buffers.stage.nbytes + sum(target.nbytes for _, target, _ in buffers.direct)
    passes = 1 if unit.keeps_whole else 1 + reshards
    sums = [gradient for gradient in gradients.segments if gradient.trains]
    summed = sum(gradient.send.nbytes for gradient in sums)
    return UnitTraffic(passes * gathers + len(sums), passes * gathered + summed)


def table(flow: Flow) -> str:
    """Units, one per line: parameters, bytes per rank, padding, collectives and bytes per step."""
    rows = [("unit", "cut", "params", "per rank", "padding", "collectives", "per step", "dtypes")]
    notes: list[str] = []
    for unit in flow.units():
        layout, moved = unit.layout, traffic(unit, flow.reshards(unit.key))
        placements = {describe(info.placements[0]) for info in unit.param_infos.values()}
        rows.append(
            (
                unit.name,
                _cut_text(placements, unit),
                str(len(unit.param_infos)),
                format_bytes(layout.stored_bytes),
                f"{layout.paddings(stored=True)[unit.comm.rank]} B",
                str(moved.collectives),
                format_bytes(moved.nbytes),
                ", ".join(dict.fromkeys(segment.dtype for segment in layout.segments)),
            )
        )
        notes.extend(f"{unit.name}: {fqn} ignored, not reduced" for fqn in unit.structure.left_out)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *notes])


def _cut_text(placements: Collection[str], unit: Unit) -> str:
    """How a unit is cut, under which stage of ZeRO where not all of it is, and where that lies."""
    cut = next(iter(placements)) if len(placements) == 1 else f"{len(placements)} placements"
    if unit.comm.twice:
        cut += ", states over replicas too"
    elif unit.cutting.zero != 3:
        cut += f", ZeRO-{unit.cutting.zero}"
    return f"{cut}, on the host" if unit.offloaded else cut


# Modules hold their units, and nothing here a module: what a user deletes is gone. A unit does not
# know its DStorage, so that the two are no circle that only a garbage collector frees.
_STORAGES: weakref.WeakKeyDictionary[nn.Module, list[DStorage]] = weakref.WeakKeyDictionary()
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, Unit] = weakref.WeakKeyDictionary()
_OF_UNITS: weakref.WeakValueDictionary[Unit, DStorage] = weakref.WeakValueDictionary()


def get_dstorage(module: nn.Module) -> DStorage | None:
    """The storage attached to ``module`` itself, of buckets the first one, or None."""
    check_type(module, nn.Module, "module")
    return next(iter(storages_of(module)), None)


def storages_of(module: nn.Module) -> Sequence[DStorage]:
    """The storages attached to ``module`` itself: one, or all of its buckets, or none."""
    return _STORAGES.get(module, ())


def units_of(module: nn.Module) -> list[Unit]:
    """Their units."""
    return [storage.unit for storage in storages_of(module)]


def register(module: nn.Module, unit: Unit) -> None:
    """Attach the storage of ``unit`` to ``module``, after those that are."""
    storage = _OF_UNITS.get(unit)
    if storage is None:
        storage = _OF_UNITS[unit] = DStorage(unit)
    _STORAGES.setdefault(module, []).append(storage)
    for inner in module.modules():
        # Modules are sharded from the inside out, so the first one to claim a module is the
        # innermost.
        _HOLDERS.setdefault(inner, unit)


def holder_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is a part of, the innermost one, or None."""
    return _HOLDERS.get(module)


def units_in(module: nn.Module) -> Iterator[Unit]:
    """The units of ``module`` and of every module below it, each once, in module order."""
    check_type(module, nn.Module, "model")
    seen: set[int] = set()
    for inner in module.modules():
        for unit in units_of(inner):
            if id(unit) not in seen:
                seen.add(id(unit))
                yield unit
