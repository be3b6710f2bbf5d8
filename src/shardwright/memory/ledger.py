"""A symbolic heap: named allocations come and go, the peak of each phase is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.core.timeline import Kind, Phase


class Ledger:
    """Live bytes by kind; ``peaks`` maps a phase to the kinds at its highest total."""

    def __init__(self) -> None:
        self.phase: Phase = "setup"
        self.live: dict[Kind, int] = {}
        self.total = 0
        self.peaks: dict[Phase, dict[Kind, int]] = {}
        self._highest: dict[Phase, int] = {}
        self._held: dict[str, tuple[Kind, int]] = {}

    def take(self, name: str, kind: Kind, nbytes: int) -> None:
        """Allocate; a name may be held once."""
        assert name not in self._held, f"{name} is held already"
        self._held[name] = (kind, nbytes)
        self._change(kind, nbytes)

    def free(self, name: str) -> None:
        """Free an allocation; one that was never taken is nothing."""
        kind, nbytes = self._held.pop(name, ("temporary", 0))
        self._change(kind, -nbytes)

    @contextmanager
    def passing(self, kind: Kind, nbytes: int) -> Iterator[None]:
        """Bytes that live as long as the block."""
        self._change(kind, nbytes)
        yield
        self._change(kind, -nbytes)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """What happens inside belongs to ``phase``."""
        outer, self.phase = self.phase, phase
        self._mark()
        yield
        self.phase = outer
        self._mark()

    def _change(self, kind: Kind, nbytes: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + nbytes
        self.total += nbytes
        if nbytes > 0:
            self._mark()

    def _mark(self) -> None:
        if self.total > self._highest.get(self.phase, -1):
            self._highest[self.phase] = self.total
            self.peaks[self.phase] = {kind: n for kind, n in self.live.items() if n}
