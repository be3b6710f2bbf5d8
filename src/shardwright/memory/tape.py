"""A heap that keeps every change: for timelines, for the tensors that are alive at the peak, for
what each module takes, and for an allocator to replay."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from shardwright.core.footprint import Alive
from shardwright.core.recording import Moment
from shardwright.core.slots import Slots
from shardwright.core.timeline import Change, Kind
from shardwright.memory.ledger import GradientRule, Ledger, Scene, Summary
from shardwright.memory.pieces import STAYING


class Tape(Ledger):
    """A ledger that writes down every change. ``slots`` are those of a rank's chunks."""

    keeps_events = True

    def __init__(self, slots: Sequence[Slots]) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self._slots = slots
        self._units = {name: folded for its in slots for name, folded in its.units()}
        self._passed = 0
        self._microbatch = 0
        self._parts: dict[str, list[tuple[Hashable, int]]] = {}
        self._fresh: list[tuple[Hashable, int]] = []
        self._alive: dict[Hashable, Change] = {}

    def take(self, name: str, kind: Kind, nbytes: int) -> None:
        """Allocate, and note it."""
        super().take(name, kind, nbytes)
        unit, _, what = name.rpartition(".")
        if what.isdigit():  # one of several of a name
            what = unit.rpartition(".")[2]
        self._note(name, nbytes, kind, what, self._units.get(unit, ""))

    def hold(self, name: str, kind: Kind, nbytes: int) -> None:
        """Gradients that have just been counted belong to ``name``."""
        super().hold(name, kind, nbytes)
        parts = self._parts.setdefault(name, [])
        wanted = nbytes
        while wanted > 0 and self._fresh:
            key, size = self._fresh.pop(0)
            parts.append((key, size))
            wanted -= size

    def free(self, name: str) -> int:
        """Free, and note it, part by part where it was counted so."""
        kind = self._held.get(name, ("temporary", 0))[0]
        nbytes = super().free(name)
        for key, _ in self._parts.pop(name, [(name, nbytes)]):
            self._gone(key, kind)
        return nbytes

    def become(self, name: str, to: str, kind: Kind) -> None:
        """Note every part as the other kind, in its storage."""
        if name in self._parts:
            self._parts[to] = self._parts.pop(name)
        super().become(name, to, kind)
        for key, _ in self._parts.get(to, []):
            self._turn(key, kind)

    @contextmanager
    def passing(self, kind: Kind, nbytes: int) -> Iterator[None]:
        """Bytes that live as long as the block."""
        self._passed += 1
        key = ("passing", self._passed)
        with super().passing(kind, nbytes):
            self._note(key, nbytes, kind, kind, self._units.get(self.unit, ""))
            yield
            self._gone(key, kind)

    def run(self, summary: Summary, scene: Scene, rule: GradientRule) -> None:
        """Every touch of the piece."""
        super().run(summary, scene, rule)
        slots, self._microbatch = self._slots[scene.chunk], scene.microbatch
        here = Moment(scene.piece, scene.unit, scene.block)
        for touch in scene.piece.touches:
            key = (scene.chunk, scene.microbatch, *slots.key(touch.slot, here))
            if touch.what == "take":
                module = slots.folded(touch.module)
                self._note(key, touch.nbytes, touch.kind, touch.name, module)
            elif touch.what == "free":
                self._gone(key, touch.kind)
            else:
                if rule == "stays":
                    module, _, what = slots.folded(touch.name).rpartition(".")
                    self._turn(key, STAYING, f"gradient of {what}", module)
                    self._fresh.append((key, touch.nbytes))
                else:
                    self._gone(key, touch.kind)

    def alive_at_peak(self) -> list[Alive]:
        """What is alive when most is, largest first; equal tensors of a name together."""
        live: dict[Hashable, Change] = {}
        for change in self.changes[: self.peak()]:
            if change.bytes > 0:
                live[change.storage] = change
            else:
                live.pop(change.storage, None)
        found: dict[tuple[str, str, Kind, int], int] = {}
        for change in live.values():
            name = (change.name, change.module, change.kind, change.bytes)
            found[name] = found.get(name, 0) + 1
        ordered = sorted(found.items(), key=lambda item: -item[0][3] * item[1])
        return [
            Alive(label, module, kind, nbytes * count, count)
            for (label, module, kind, nbytes), count in ordered
        ]

    def peak(self) -> int:
        """How many changes there were when the total is highest."""
        total = highest = where = 0
        for index, change in enumerate(self.changes):
            total += change.bytes
            if total > highest:
                highest, where = total, index + 1
        return where

    def _note(self, key: Hashable, nbytes: int, kind: Kind, label: str, module: str) -> None:
        if nbytes:
            change = Change(
                key, nbytes, kind, label, module, self.phase, self.unit, self._microbatch
            )
            self._alive[key] = change
            self.changes.append(change)

    def _gone(self, key: Hashable, kind: Kind) -> None:
        taken = self._alive.pop(key, None)
        if taken is not None:
            gone = taken._replace(bytes=-taken.bytes, phase=self.phase, unit=self.unit, name="")
            self.changes.append(gone)

    def _turn(self, key: Hashable, kind: Kind, label: str = "", module: str = "") -> None:
        """A storage is another kind of bytes from here on, with another name where one is given."""
        old = self._alive.get(key)
        if old is not None:
            self._gone(key, old.kind)
            label, module = (label, module) if label else (old.name, old.module)
            self._note(key, old.bytes, kind, label, module)
