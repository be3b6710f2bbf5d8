"""A random search on an interval: Luus and Jaakola's, held inside its bounds."""

from __future__ import annotations

import math

import numpy as np

SEED = 42
SHRINK = 0.95  # of the radius, after each improvement
DRAW_BITS = 24  # of a single-precision uniform number, the low ones of a draw of 32
MAX_DRAWS = 1_000  # for one probe; more are needed only where there is nothing left to probe


class LuusJaakola:
    """Looks for the smallest cost on [``left``, ``right``] with ``probes`` evaluations.

    A probe lies within a radius of the best point so far. A bound whose cost is known is not
    probed again.
    """

    def __init__(self, left: float, right: float, probes: int, left_cost: float | None) -> None:
        self._left, self._right = left, right
        self._left_known, self._right_known = left_cost is not None, False
        self._probes = probes
        self._asked = 0
        self._draws = np.random.RandomState(SEED)
        self._best = self._uniform(left, right)
        self._best_cost = 0.0
        self._probe = math.nan
        self._radius = right - left

    def shrink(self, right: float) -> None:
        """Move the right bound: from there on the cost is known to be infinite."""
        self._right, self._right_known = right, True
        self._radius = right - self._left
        self._best = self._clamp(self._best)

    def next(self, cost: float) -> float | None:
        """The next point to evaluate, given the cost of the one before; None at the end.

        The first call's cost is ignored.
        """
        self._asked += 1
        if self._asked == 1:
            return self._best
        if self._asked == 2:  # the first point was the best one by definition
            self._best_cost = cost
        elif self._asked > self._probes:
            return None
        elif cost <= self._best_cost:
            self._best, self._best_cost = self._probe, cost
            self._radius *= SHRINK
        if self._probe == self._left:
            self._left_known = True
        elif self._probe == self._right:
            self._right_known = True
        return self._draw()

    def _draw(self) -> float | None:
        for _ in range(MAX_DRAWS):
            probe = self._clamp(self._best + self._uniform(-self._radius, self._radius))
            known = (probe == self._left and self._left_known) or (
                probe == self._right and self._right_known
            )
            if not known:
                self._probe = probe
                return probe
        return None

    def _clamp(self, point: float) -> float:
        if point < self._left:
            return self._left
        return self._right if point > self._right else point

    def _uniform(self, low: float, high: float) -> float:
        """An even draw; the generator is MT19937, whose stream PyTorch has for the same seed."""
        bits = int(self._draws.randint(2**32, dtype=np.uint32)) & (2**DRAW_BITS - 1)
        share: float = bits / 2**DRAW_BITS
        return low + (high - low) * share
