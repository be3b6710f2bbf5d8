"""How long a search may take, who hears how it goes, and who may end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Hear = Callable[["Watch"], None]


@dataclass
class Watch:
    """Looked at in every round of a search.

    ``seconds`` is its time limit; ``hear`` is called at every look and may :meth:`stop` the search,
    which then keeps the best that it has: ``best`` seconds of a step, above a ``bound`` that no
    plan of the options looked at so far beats (0 where there is none yet).
    """

    seconds: float = float("inf")
    hear: Hear | None = None
    clock: Callable[[], float] = time.perf_counter
    best: float | None = None
    bound: float = 0.0
    stopped: bool = False
    ended: bool = False
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.begun

    @property
    def left(self) -> float:
        """Seconds until the limit; 0 where it is past, or the search was stopped."""
        return 0.0 if self.stopped else max(self.seconds - self.elapsed, 0.0)

    @property
    def late(self) -> bool:
        """Whether the limit is past."""
        return self.elapsed >= self.seconds

    @property
    def cut_short(self) -> str:
        """What ended the search before its time; empty if nothing did."""
        if self.stopped:
            return "the search, which was stopped"
        return f"the search, at planner.time_limit = {self.seconds:g} s" if self.ended else ""

    def over(self) -> bool:
        """A look: whether to end."""
        if self.hear is not None:
            self.hear(self)
        self.ended = self.ended or self.stopped or self.late
        return self.ended

    def stop(self) -> None:
        """End the search at its next look."""
        self.stopped = True

    def found(self, seconds: float, bound: float = 0.0) -> None:
        """A plan is found that takes ``seconds`` per step."""
        self.best = seconds if self.best is None else min(self.best, seconds)
        self.bound = min(self.bound or bound, bound or self.bound)  # of fewer options it is higher

    def part(self, seconds: float = float("inf")) -> Watch:
        """One of a part of the search: it has at most ``seconds``, what it finds is no plan, and it
        ends with the whole."""

        def hear(inner: Watch) -> None:
            if self.over():
                inner.stop()

        return Watch(seconds, hear, self.clock)
