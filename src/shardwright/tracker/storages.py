"""The storages that are alive, and what each is for.

A storage counts once however many views it has, from its first tensor until it is freed or resized
to nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.timeline import Kind, Phase
from shardwright.tracker.collectives import buffers_of
from shardwright.tracker.device import granularity_of
from shardwright.tracker.log import GUESSED, INFERRED, MOVED, Holding, Log, operation_name
from shardwright.tracker.private import FakeTensor, FakeTensorMode, key_of, plain_parts

_BEFORE = "made before"  # in place of an operation
_OTHERS = " and others"  # of one storage


class Scene(Protocol):
    """What is going on while a storage is made."""

    @property
    def phase(self) -> Phase:
        """The phase that is on."""

    @property
    def module(self) -> str | None:
        """The path of the module at work, None outside of all."""

    def made_by(self, operation: object) -> Holding:
        """A holding of what ``operation`` makes now."""


class Storages:
    """Follows storages and writes the log. ``mode`` is whose fake tensors count, None for real
    ones; ``mixed``: all count. ``device_type`` "" is any but meta."""

    def __init__(self, log: Log, scene: Scene, *, granularity: int | None, mixed: bool) -> None:
        self.log = log
        self.scene = scene
        self.mode: FakeTensorMode | None = None
        self.mixed = mixed
        self.device_type = ""
        self._granularity = granularity
        self._known: dict[int, Holding] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # ---- what is alive ---------------------------------------------------------------------------

    def live(self) -> Counter[Kind]:
        """Bytes alive by kind."""
        found: Counter[Kind] = Counter()
        for held in list(self._known.values()):
            found[held.kind] += held.size
        return found

    def total(self) -> int:
        """Bytes alive."""
        return sum(held.size for held in list(self._known.values()))

    def kind_of(self, tensor: torch.Tensor) -> Kind | None:
        """What a tensor counts as now; None for one that is not followed."""
        for part in plain_parts(tensor):
            held = self._known.get(key_of(part.untyped_storage()))
            if held is not None:
                return held.kind
        return None

    def release(self) -> None:
        """Follow nothing any more; what is alive stays as it was."""
        self._references.clear()

    # ---- what is known ---------------------------------------------------------------------------

    def assign(self, tensor: torch.Tensor, kind: Kind, certainty: int, name: str = "") -> None:
        """A storage is of ``kind``, if nothing surer is known.

        What was less sure before was wrong all the time; what was as sure is over.
        """
        for part, storage, held in self._counted(tensor):
            if held is None:
                held = self._add(storage, part, Holding(kind, certainty, _BEFORE, None))
            elif certainty > held.certainty:
                held.kind, held.certainty = kind, certainty
            elif certainty == held.certainty >= INFERRED and kind != held.kind:
                held = self._change(key_of(storage), held, kind)
            if name and name != held.name and not held.name.endswith(_OTHERS):
                held.name = f"{held.name}{_OTHERS}" if held.name else name

    def assign_buffers(self, arguments: Any, kind: Kind, *, earlier: bool) -> None:
        """Count the buffers of a collective as what they are for, if they are nothing surer."""
        for buffer in buffers_of(arguments):
            self.meet(buffer, earlier=earlier)
            self.assign(buffer, kind, MOVED)

    # ---- what comes and goes ---------------------------------------------------------------------

    def see(self, tensor: torch.Tensor, operation: Any, given: tuple[Any, ...] | None) -> None:
        """An operation returned ``tensor``. With ``given``, what is of a storage that it was given
        and that nobody counts is not counted now."""
        for part, storage, held in self._counted(tensor):
            if held is None:
                if given is None or not _is_of(storage, given):
                    self._add(storage, part, self.scene.made_by(operation))
            elif held.raw != storage.nbytes():  # grown by an out= argument
                self._measure(held, storage)

    def meet(self, tensor: torch.Tensor, *, earlier: bool = False) -> None:
        """Count a storage that turns up without having been made; ``earlier``: it was there from
        the beginning."""
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            if key_of(storage) in self._known or not self._counts(part):
                continue
            held = self._add(storage, part, Holding("input", GUESSED, _BEFORE, None))
            if earlier and held.size and self.log.entries[-1][0] is held:
                self.log.entries.pop()
                self.log.earlier.append((held, held.size))

    def resized(self, storage: torch.UntypedStorage, *, take_up: bool) -> None:
        """A storage was resized; ``take_up`` one that was not followed."""
        held = self._known.get(key_of(storage))
        if held is not None:
            self._measure(held, storage)
        elif take_up:
            is_fake = storage.device.type == "meta"  # as the storages of fake tensors say
            if is_fake == (self.mode is not None):
                self._add(storage, None, self.scene.made_by("resize_"))

    def _counted(
        self, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage, Holding | None]]:
        """The parts of a tensor that count, their storages, and what these are known for."""
        for part in plain_parts(tensor):
            if self._counts(part):
                storage = part.untyped_storage()
                yield part, storage, self._known.get(key_of(storage))

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor, as it is or as it would be, is what is asked for."""
        if not self.mixed:
            mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
            if mode is not self.mode:
                return False
        found = self._device_type_of(tensor)
        return found == self.device_type if self.device_type else found != "meta"

    def _device_type_of(self, tensor: torch.Tensor | None) -> str:
        if tensor is None:
            return self.device_type
        return device_type_of(tensor)

    def _add(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor | None, held: Holding
    ) -> Holding:
        key = key_of(storage)
        held.grain = self._granularity or granularity_of(self._device_type_of(tensor))
        self._known[key] = held
        self._references[key] = weakref.ref(storage, partial(self._freed, key))
        self._measure(held, storage)
        return held

    def _measure(self, held: Holding, storage: torch.UntypedStorage) -> None:
        held.raw = size = storage.nbytes()
        if not isinstance(size, int):
            raise _unknown_size(size, held)
        self.log.turn(self.scene.phase)
        self.log.resize(held, -(-size // held.grain) * held.grain, self.scene.module)

    def _change(self, key: int, held: Holding, kind: Kind) -> Holding:
        """The storage is used for something else from now on."""
        new = Holding(kind, held.certainty, held.operation, held.module)
        new.name, new.raw, new.grain, size = held.name, held.raw, held.grain, held.size
        self._known[key] = new
        self.log.resize(held, 0, None)
        self.log.resize(new, size, None)
        return new

    def _freed(self, key: int, _: object = None) -> None:
        self._references.pop(key, None)
        held = self._known.pop(key, None)
        if held is not None:
            self.log.go(held)


def _unknown_size(size: object, held: Holding) -> UnsupportedError:
    made = operation_name(held.operation)
    return UnsupportedError(
        expected(
            f"module '{held.module}'" if held.module else "MemoryTracker",
            "tensors of known size",
            f"one of {size} bytes ({made if made == _BEFORE else f'by {made}'})",
            "Give the fake mode static shapes.",
        )
    )


def device_type_of(tensor: torch.Tensor) -> str:
    """Where a tensor is, or as a fake one says it would be."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return str(device.type)


def _is_of(storage: torch.UntypedStorage, given: tuple[Any, ...]) -> bool:
    """Whether an operation was given ``storage``, rather than having made it."""
    key = key_of(storage)
    return any(
        key_of(part.untyped_storage()) == key
        for tensor in given_tensors(given)
        for part in plain_parts(tensor)
    )


def given_tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, also in lists."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(leaf for leaf in argument if isinstance(leaf, torch.Tensor))
    return found
