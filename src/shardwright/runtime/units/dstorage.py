"""What users hold of a sharded unit: its bytes, its views, its states and settings; which module
has which storage."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from shardwright.core.errors import InputError, check_type, expected
from shardwright.core.placement import describe
from shardwright.core.quantities import format_bytes
from shardwright.runtime.comm import CutTwice
from shardwright.runtime.units.arrivals import Arrivals
from shardwright.runtime.units.buffers import Buffers, CachedViews
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.rebind import absorb, follow_objects
from shardwright.runtime.units.structure import Structure
from shardwright.runtime.units.unit import FULL_PRECISION, SHARDED, UNSHARDED, Unit


class DStorage(Unit):
    """One unit's storage on this rank. Made by ``fully_shard_flat`` and by ``apply``.

    ``state`` is SHARDED or UNSHARDED, ``mesh`` where it is sharded, ``param_infos`` has the place
    of every parameter by fqn. Its ``repr`` is the table of all units of the same model.
    """

    flow: Flow

    @property
    def byte_storage(self) -> torch.Tensor:
        """This rank's bytes [layout.stored_bytes], uint8: its shares, of what stays the whole."""
        self.absorb()
        return self.buffers.shard

    def get_local_view(self, fqn: str) -> torch.Tensor:
        """This rank's part of a parameter [local_shape], possibly empty; shares the shard."""
        self.absorb()
        return self.buffers.locals[self._index(fqn)]

    def get_unsharded_view(self, fqn: str) -> torch.Tensor:
        """The full parameter, a view that dies with the UNSHARDED state: clone it to keep it."""
        index = self._index(fqn)
        if self.state is not UNSHARDED and not self.is_current:
            raise InputError(
                expected(f"{fqn} of unit '{self.name}'", "state UNSHARDED", "SHARDED")
                + " Call unshard() first."
            )
        return self.buffers.parameters[index].detach()

    def views(self) -> CachedViews:
        """The views of shards, whole tensors and gradients that steps use and never make: how many,
        their bytes, how often they were made anew, and that each lies in its buffer."""
        self.absorb()
        gradients = itertools.chain(*(g.cached() for g in self.gradients.segments))
        cached = itertools.chain(self.buffers.cached(), gradients)
        return CachedViews.of(cached, self.laid_out - 1)

    def all_gather(self) -> torch.Tensor:
        """The unsharded byte buffer [layout.nbytes], gathered into new memory (collective).

        Parameters lie at their ``unsharded_byte_offset`` in their own dtype.
        """
        self.absorb()
        shard = self.buffers.shard
        if shard.is_meta:
            raise self.on_meta()
        device, offloaded = self.buffers.device, self.offloaded
        buffers = Buffers(
            self.layout, self.comm, device, FULL_PRECISION, shard, offloaded=offloaded
        )
        buffers.finish_gather(buffers.start_gather(f"{self.name} all_gather"))
        nothing = shard[:0].to(device)  # all there is of a root whose units have everything
        return torch.cat([nothing, *(v.whole.view(torch.uint8) for v in buffers.segments)])

    def absorb(self) -> None:
        """Take over what was done to the sharded parameters behind the unit's back."""
        absorb(self)

    def show_sharded(self) -> None:
        """Let every module have its sharded parameters, whatever the state."""
        state = self.state
        self.absorb()
        self._show(SHARDED)
        self.state = state

    def show_again(self) -> None:
        """After ``show_sharded``: the parameters of the state."""
        self._show(self.state)

    def start_gather(self) -> None:
        """Begin to gather (collective), a unit that was on the meta device with its new memory."""
        if self.buffers.shard.is_meta:
            self.absorb()
        super().start_gather()

    def unshard(self) -> None:
        """Gather the unit and show full parameters (collective); nothing if already so.

        Driven by hand and with gradients on, the next ``reshard()`` reduces, on every rank alike.
        """
        if self.driven_by_hand and torch.is_grad_enabled():
            self.gradients.expect()
        if not self.is_present:
            self.start_gather()
        self.finish_gather()

    def reshard(self) -> None:
        """Reduce gradients if a backward left some (collective), then free the full parameters."""
        if self.gradients.expected and not self.holds:
            self.start_reduce()
            self.finish_reduce()
            self.land()
        self.free()
        self.buffers.let_change()

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Full parameters inside (collective); with ``write`` every rank keeps its part of what is
        in them at the end, so all ranks must have written the same."""
        self.absorb()
        was = self.state
        if self.buffers.shard.is_meta:
            raise self.on_meta()
        if not self.is_present:
            self.start_gather()
        self.finish_gather()
        try:
            yield
            if write:
                self.writes.keep(self.name)
        finally:
            self.writes.forget()
            if was is SHARDED:
                self.free()

    def set_requires_gradient_sync(self, synchronise: bool) -> None:
        """Whether backwards reduce gradients; else they are held, whole, until one does. Applies to
        every unit of the same model."""
        self.flow.set("synchronise", bool(synchronise))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside hold their gradients back instead of reducing them."""
        before = {unit: unit.synchronise for unit in self.flow.units()}
        settings = dict(self.flow.settings)
        self.flow.set("synchronise", False)
        try:
            yield
        finally:
            self.flow.set("synchronise", settings.get("synchronise", True))
            self.flow.settings = settings
            for unit, synchronise in before.items():
                unit.synchronise = synchronise

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks; 1.0 is their sum.
        Applies to every unit of the same model."""
        self.flow.set("divisor", divide_factor(factor))

    def reset(self) -> None:
        """Drop whatever an exception or an abandoned backward left, in every unit of the same
        model: afterwards all are SHARDED and hold no unreduced gradient."""
        self.flow.recover()
        for unit in self.flow.units():
            unit.gradients.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> DStorage:
        """Of modules that are being copied: memory and flow are its own, the ranks the same. No
        optimizer has its parameters yet."""
        made = memo[id(self)] = object.__new__(DStorage)
        self.free()
        self.absorb()
        made.__dict__.update(self.__dict__)
        made.ahead = {"forward": None, "backward": None}
        made.placements = dict(self.placements)
        made.takers, made.structure, made.laid_out = {}, Structure(), 0
        made.arrivals = None if self.arrivals is None else Arrivals()
        made._gathering = made._narrow = None
        made.members = [member.copied(memo) for member in self.members]
        made.lay_out(self.buffers.shard.device)
        made.buffers.shard.copy_(self.buffers.shard)
        follow_objects(made)
        flow = copy.deepcopy(self.flow, memo)
        if self.flow.is_led_by(self) or not flow.has_units:
            flow.lead(made)
        flow.add(made)
        return made

    def __reduce__(self) -> NoReturn:
        raise InputError(
            expected(
                f"a pickle of unit '{self.name}'",
                "a module that is not sharded",
                "a sharded one, which needs its ranks",
                "Pickle state_dict(), or full_state_dict() for use anywhere.",
            )
        )

    def __repr__(self) -> str:
        return table(self.flow)


def divide_factor(factor: float) -> float:
    """A number that gradients can be divided by."""
    if not factor > 0:
        raise InputError(expected("gradient divide factor", "a number above 0", f"{factor}"))
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
                f"{layout.stored_padding(unit.comm.rank)} B",
                str(moved.collectives),
                format_bytes(moved.nbytes),
                ", ".join(dict.fromkeys(segment.dtype for segment in layout.segments)),
            )
        )
        notes.extend(f"{unit.name}: {fqn} ignored, not reduced" for fqn in unit.ignored)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *notes])


def _cut_text(placements: Collection[str], unit: Unit) -> str:
    """How a unit is cut, under which stage of ZeRO where not all of it is, and where that lies."""
    cut = next(iter(placements)) if len(placements) == 1 else f"{len(placements)} placements"
    if isinstance(unit.comm, CutTwice):
        cut += ", states over replicas too"
    elif unit.zero != 3:
        cut += f", ZeRO-{unit.zero}"
    return f"{cut}, on the host" if unit.offloaded else cut


_STORAGES: weakref.WeakKeyDictionary[nn.Module, list[DStorage]] = weakref.WeakKeyDictionary()
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, DStorage] = weakref.WeakKeyDictionary()


def get_dstorage(module: nn.Module) -> DStorage | None:
    """The storage attached to ``module`` itself, of buckets the first one, or None."""
    check_type(module, nn.Module, "module")
    return next(iter(storages_of(module)), None)


def storages_of(module: nn.Module) -> Sequence[DStorage]:
    """The storages attached to ``module`` itself: one, or all of its buckets, or none."""
    return _STORAGES.get(module, ())


def register(module: nn.Module, storage: DStorage) -> None:
    """Attach ``storage`` to ``module``, after those that are."""
    _STORAGES.setdefault(module, []).append(storage)
    for inner in module.modules():
        _HOLDERS.setdefault(inner, storage)


def holder_of(module: nn.Module) -> DStorage | None:
    """The storage whose unit ``module`` is a part of, the innermost one, or None."""
    return _HOLDERS.get(module)


def storages_in(module: nn.Module) -> Iterator[DStorage]:
    """The storages of ``module`` and of every module below it, each once, in module order."""
    check_type(module, nn.Module, "model")
    seen: set[int] = set()
    for inner in module.modules():
        for storage in storages_of(inner):
            if id(storage) not in seen:
                seen.add(id(storage))
                yield storage
