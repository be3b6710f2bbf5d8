"""Heaps that keep every change: for timelines, for the tensors that are alive at the peak and for
what each module takes, or for an allocator to replay."""

# Why two of them: an allocator is asked by numbers, millions of times, and what for does not
# matter; a timeline needs every name, place and kind. Why a step is asked for twice: the first
# one finds an empty cache, so only the second shows what a steady step leaves in segments that it
# cannot use.
#
# What must stay true: a gradient that stays where autograd left it is a storage that some piece
# took and that the runtime frees later by its unit's name. The two meet in ``hold``, which gives
# bytes that the last piece left to a name, in the order in which they came. A piece whose
# gradients are counted (``Ledger.run``) must be followed by ``hold`` of as many bytes, or frees
# go to others.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardwright.core.footprint import Alive
from shardwright.core.recording import Piece
from shardwright.core.slots import Slots
from shardwright.core.timeline import Kind, StorageChange
from shardwright.heap.ledger import STAYING, GradientRule, Ledger, Scene, Summary

# Which stream FSDP allocates a kind of buffer on: gathers and reduces have their own.
STREAMS: dict[Kind, int] = {"all_gather": 1, "gradient": 2}
Asked = tuple[int, int, int, int]  # a request of an allocator, whose name is a number
_OfBlock = tuple[int, int, int, int]  # a number, how much it moves with a block, bytes, stream
PASS, AGAIN = 2**40, 2**60  # between numbers of storages in passes and in steps


class StepRequests(NamedTuple):
    """What an allocator is asked for ``before`` a steady step, and in one."""

    before: list[Asked]
    step: list[Asked]

    def twice(self) -> list[Asked]:
        """With two steps, in which every storage has another number."""
        return [*self.before, *self.step, *_again(self.step)]


class _Followed(Ledger):
    """A ledger that is told of every storage that comes, under a key, and goes."""

    keeps_events = True

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0
        self._parts: dict[str, list[tuple[Hashable, int]]] = {}
        self._fresh: list[tuple[Hashable, int]] = []

    def take(self, name: str, kind: Kind, nbytes: int) -> None:
        """Allocate."""
        super().take(name, kind, nbytes)
        self._come(name, kind, nbytes)

    def hold(self, name: str, kind: Kind, nbytes: int) -> None:
        """Gradients that have just been counted belong to ``name``."""
        super().hold(name, kind, nbytes)
        # In the order in which they came: a later hold of another unit takes what this one left.
        parts = self._parts.setdefault(name, [])
        wanted = nbytes
        while wanted > 0 and self._fresh:
            key, size = self._fresh.pop(0)
            parts.append((key, size))
            wanted -= size

    def free(self, name: str) -> int:
        """Free, part by part where it was counted so."""
        nbytes = super().free(name)
        # One name, several storages: a unit's gradients are freed as one by the runtime but are as
        # many blocks of the allocator, whose sizes decide what fits into their place.
        for key, size in self._parts.pop(name, [(name, nbytes)]):
            self._gone(key, size)
        return nbytes

    def become(self, name: str, to: str, kind: Kind) -> None:
        """Every part is another kind, in its storage."""
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
            self._come(key, kind, nbytes)
            yield
            self._gone(key, nbytes)

    @abstractmethod
    def _come(self, key: Hashable, kind: Kind, nbytes: int) -> None:
        """A storage of the runtime's comes."""

    @abstractmethod
    def _gone(self, key: Hashable, nbytes: int) -> None:
        """It goes; one that never came is nothing."""

    def _turn(self, key: Hashable, kind: Kind) -> None:
        """It is another kind of bytes from here on, where it was."""


class PieceRequests:
    """What the pieces of a recording ask an allocator for, found once however often they run."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._found: dict[tuple[int, GradientRule], tuple[list[_OfBlock], list[_OfBlock]]] = {}

    def of(self, piece: Piece, rule: GradientRule) -> tuple[list[_OfBlock], list[_OfBlock]]:
        """Requests of a piece, and gradients that stay where they are: nobody is asked."""
        found = self._found.get((id(piece), rule))  # by identity, as Slots has them
        if found is None:
            asked, fresh = found = list[_OfBlock](), list[_OfBlock]()
            for number, more, touch, _ in self._slots.touched(piece):
                stays = touch.what == "gradient" and rule == "stays"
                nbytes = touch.nbytes if touch.what == "take" else -touch.nbytes
                (fresh if stays else asked).append(
                    (number, more, abs(nbytes) if stays else nbytes, STREAMS.get(touch.kind, 0))
                )
            self._found[id(piece), rule] = found
        return found


class RequestTape(_Followed):
    """A ledger that writes down what an allocator is asked for. ``asks`` are those of a rank's
    chunks."""

    def __init__(self, asks: Sequence[PieceRequests]) -> None:
        super().__init__()
        self._asks = asks
        self._before: list[Asked] = []
        self._step: list[Asked] = []
        self._numbers: dict[Hashable, int] = {}  # below 0, of what no piece takes
        self._passes: dict[tuple[int, int], int] = {}

    def requests(self) -> StepRequests:
        """What was there before, then the step."""
        there: set[int] = set()
        return StepRequests(_happening(self._before, there), _happening(self._step, there))

    def run(self, summary: Summary, scene: Scene, rule: GradientRule) -> None:
        """Every touch of the piece."""
        super().run(summary, scene, rule)
        asked, fresh = self._asks[scene.chunk].of(scene.piece, rule)
        here = scene.chunk, scene.microbatch
        # The numbers of a piece are the same in every microbatch. Two of them may be alive at once
        # in a pipeline, so each pass has a range of its own.
        first, block = PASS * self._passes.setdefault(here, len(self._passes)), scene.block
        self._list().extend([(first + k + more * block, n, s, 0) for k, more, n, s in asked])
        self._fresh.extend([(first + k + more * block, n) for k, more, n, _ in fresh])

    def _list(self) -> list[Asked]:
        return self._before if self.phase == "setup" else self._step

    def _come(self, key: Hashable, kind: Kind, nbytes: int) -> None:
        number = self._numbers.setdefault(key, -1 - len(self._numbers))
        self._list().append((number, nbytes, STREAMS.get(kind, 0), 0))

    def _gone(self, key: Hashable, nbytes: int) -> None:
        number = key if isinstance(key, int) else self._numbers.get(key)
        if number is not None:
            self._list().append((number, -nbytes, 0, 0))


def _happening(asked: Sequence[Asked], there: set[int]) -> list[Asked]:
    """What comes, and goes of what is there; but not what goes and at once is there again."""
    found: list[Asked] = []
    for each in asked:
        number, nbytes, _, _ = each
        if nbytes > 0:
            there.add(number)
            # What is freed and taken again at once, under one number and as large, stays where it
            # is in the run: the ledger does that where of a name's bytes none has to go. An
            # allocator would otherwise be asked for a block that nobody asks for.
            if found and found[-1][0] == number and found[-1][1] == -nbytes:
                found.pop()
                continue
        elif number in there:
            there.remove(number)
        else:
            continue
        found.append(each)
    return found


def _again(step: Sequence[Asked]) -> Iterator[Asked]:
    """A step once more. What it frees without having taken it the step before has left, which has
    that from the one before it in turn: a batch that was fetched ahead."""
    left: dict[int, int] = {}
    closed = True
    for number, nbytes, _, _ in step:
        if nbytes > 0:
            left[number] = nbytes
        elif left.pop(number, None) is None:
            closed = False
    # A replay is made of every layout that is looked at, and nearly every step frees its own alone.
    if closed:
        yield from [(AGAIN + number, nbytes, stream, 0) for number, nbytes, stream, _ in step]
        return
    own: set[int] = set()
    for number, nbytes, stream, _ in step:
        if nbytes > 0:
            own.add(number)
        elif number in own:
            own.remove(number)
        else:
            # Another name, for it was another batch, but as many bytes.
            found = next((k for k, size in left.items() if size == -nbytes), None)
            if found is not None:
                del left[found]
                yield found, nbytes, stream, 0
            continue
        yield AGAIN + number, nbytes, stream, 0


class Tape(_Followed):
    """A ledger that writes down every change. ``slots`` are those of a rank's chunks."""

    def __init__(self, slots: Sequence[Slots]) -> None:
        super().__init__()
        self.changes: list[StorageChange] = []
        self._slots = slots
        self._units = {name: folded for its in slots for name, folded in its.units()}
        self._microbatch = 0
        self._alive: dict[Hashable, StorageChange] = {}

    def run(self, summary: Summary, scene: Scene, rule: GradientRule) -> None:
        """Every touch of the piece."""
        super().run(summary, scene, rule)
        chunk, self._microbatch = scene.chunk, scene.microbatch
        for number, more, touch, module in self._slots[chunk].touched(scene.piece):
            key = (chunk, scene.microbatch, number + more * scene.block)
            if touch.what == "take":
                self._note(key, touch.nbytes, touch.kind, touch.name, module)
            elif touch.what == "gradient" and rule == "stays":
                path, _, what = module.rpartition(".")
                self._turn(key, STAYING, f"gradient of {what}", path)
                self._fresh.append((key, touch.nbytes))
            else:
                self._gone(key, touch.nbytes)

    def alive_at_peak(self) -> list[Alive]:
        """What is alive when most is, largest first; equal tensors of a name together."""
        live: dict[Hashable, StorageChange] = {}
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
            # The first of equally high moments, as in the ledger, or the tensors that are shown
            # would be those of another one.
            if total > highest:
                highest, where = total, index + 1
        return where

    def _come(self, key: Hashable, kind: Kind, nbytes: int) -> None:
        if not isinstance(key, str):
            self._note(key, nbytes, kind, kind, self._units.get(self.unit, ""))
            return
        unit, _, what = key.rpartition(".")
        if what.isdigit():  # one of several of a name
            what = unit.rpartition(".")[2]
        self._note(key, nbytes, kind, what, self._units.get(unit, ""))

    def _note(self, key: Hashable, nbytes: int, kind: Kind, label: str, module: str) -> None:
        if nbytes:
            change = StorageChange(
                key, nbytes, kind, label, module, self.phase, self.unit, self._microbatch
            )
            self._alive[key] = change
            self.changes.append(change)

    def _gone(self, key: Hashable, nbytes: int) -> None:
        taken = self._alive.pop(key, None)
        if taken is not None:
            _, size, kind, _, module, _, _, microbatch = taken
            where = module, self.phase, self.unit, microbatch
            self.changes.append(StorageChange(key, -size, kind, "", *where))

    def _turn(self, key: Hashable, kind: Kind, label: str = "", module: str = "") -> None:
        """A storage is another kind of bytes from here on, with another name where one is given."""
        old = self._alive.get(key)
        if old is not None:
            self._gone(key, old.bytes)
            label, module = (label, module) if label else (old.name, old.module)
            self._note(key, old.bytes, kind, label, module)
