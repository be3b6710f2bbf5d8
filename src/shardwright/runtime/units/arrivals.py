"""Which gradients of a bucket a backward still waits for."""

from __future__ import annotations

from collections.abc import Collection

_END = -1  # among places that are waited for: the end of the backward


class Arrivals:
    """The tensors of a bucket by their places, whose gradients come one by one.

    Each is waited for as often as it ever came in a backward: with reentrant checkpoints it comes
    with every use. So nothing is complete before the end of a first backward.
    """

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self._came: dict[int, int] = {}
        self._most: dict[int, int] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is waited for."""
        return not self.awaited

    def begin(self, places: Collection[int]) -> None:
        """A backward begins, in which the tensors at ``places`` train."""
        for place, times in self._came.items():
            self._most[place] = max(times, self._most.get(place, 1))
        self.awaited = set(places)
        if places and not self._came:
            self.awaited.add(_END)
        self._came.clear()

    def wait_for_end(self) -> None:
        """Nothing tells which gradients are still to come."""
        self.awaited.add(_END)

    def come(self, place: int) -> bool:
        """The gradient of the tensor at ``place`` has come; whether it was the last."""
        came = self._came[place] = self._came.get(place, 0) + 1
        if not self.awaited or came < self._most.get(place, 1):
            return False
        self.awaited.discard(place)
        return not self.awaited
