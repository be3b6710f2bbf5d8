"""Every storage that came, grew, shrank and went, in order; what was alive when is read off it.

A moment is a number of entries: 0 before the first, ``len(entries)`` now. What a storage is for is
often found out after it was made (a gradient, when it is put in its place), so kinds are looked up
when the log is read and hold from the storage's first byte on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from shardwright.core.timeline import Kind, Phase
from shardwright.tracker.private import schema_of

GUESSED = 0  # by the phase that a storage was made in
MOVED = 1  # by the collective that moved it
INFERRED = 2  # by the place it was found in
DECLARED = 3  # by the model, the optimizer or the runtime that owns it


class Holding:
    """A storage: what it is for, how sure that is, its bytes now, and who made it.

    ``raw`` are its own bytes, ``size`` those that count: rounded up to ``grain``. ``operation``
    is what made it, until ``name`` says which tensor it is.
    """

    __slots__ = ("certainty", "grain", "kind", "module", "name", "operation", "raw", "size")

    def __init__(self, kind: Kind, certainty: int, operation: object, module: str | None) -> None:
        self.kind: Kind = kind
        self.certainty = certainty
        self.operation = operation
        self.module = module  # None outside of modules
        self.name = ""
        self.raw = -1
        self.grain = 1
        self.size = 0

    @property
    def label(self) -> str:
        """Its name, or the operation that made it."""
        return self.name or operation_name(self.operation)


def operation_name(operation: object) -> str:
    """``aten.mm`` for an operator, ``resize_`` for a text."""
    if isinstance(operation, str):
        return operation
    schema = schema_of(operation)
    name = schema.name if schema is not None else getattr(operation, "__name__", str(operation))
    return str(name).replace("::", ".")


class Log:
    """``entries`` (a storage, bytes more or less, the module at work), and at which of them a phase
    or an iteration began.

    ``earlier`` are holdings that were there before the first entry and were found later.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Holding, int, str | None]] = []
        self.earlier: list[tuple[Holding, int]] = []
        self.turns: list[tuple[int, Phase]] = []
        self.iterations: list[tuple[int, int]] = []
        self._phase: Phase | None = None

    @property
    def now(self) -> int:
        """The present moment."""
        return len(self.entries)

    def turn(self, phase: Phase) -> None:
        """What comes belongs to ``phase``."""
        if phase != self._phase:
            self._phase = phase
            self.turns.append((len(self.entries), phase))

    def resize(self, held: Holding, size: int, module: str | None) -> None:
        """A storage has ``size`` bytes from now on."""
        before, held.size = held.size, size
        if before == size:
            return
        # Torch takes memory of the new size and copies, before it frees the old one.
        self.entries.append((held, size or -before, module))
        if before and size:
            self.entries.append((held, -before, None))

    def go(self, held: Holding) -> None:
        """A storage is freed; any thread may say so."""
        # A bare append: a storage may go in any thread, and appending to a list is the one thing
        # here that needs no lock.
        if held.size:
            self.entries.append((held, -held.size, None))

    def put_earlier(self, held: Holding) -> None:
        """What came last was there from the beginning."""
        if held.size and self.entries[-1][0] is held:
            self.entries.pop()
            self.earlier.append((held, held.size))

    # ---- reading ---------------------------------------------------------------------------------

    def totals(self) -> list[int]:
        """Live bytes at every moment."""
        base = sum(size for _, size in self.earlier)
        return list(accumulate((change for _, change, _ in list(self.entries)), initial=base))

    def kinds_at(self, moments: Iterable[int]) -> dict[int, dict[Kind, int]]:
        """Live bytes by kind at some moments, kinds without any left out."""
        live: Counter[Kind] = Counter()
        for held, size in self.earlier:
            live[held.kind] += size
        found: dict[int, dict[Kind, int]] = {}
        position = 0
        for moment in sorted(set(moments)):
            for held, change, _ in self.entries[position:moment]:
                live[held.kind] += change
            position = moment
            found[moment] = {kind: size for kind, size in live.items() if size}
        return found

    def alive_at(self, moment: int) -> dict[Holding, int]:
        """Bytes of every holding that was alive at ``moment``."""
        sizes = Counter(dict(self.earlier))
        for held, change, _ in self.entries[:moment]:
            sizes[held] += change
        return {held: size for held, size in sizes.items() if size}
