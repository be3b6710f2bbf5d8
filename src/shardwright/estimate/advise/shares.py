"""The parts of a model that layouts are put together from, out of a recording of all of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from shardwright.core.recording import Piece, Recording
from shardwright.core.tensor import TensorSpec
from shardwright.estimate.stages import ModelStage
from shardwright.estimate.step_time import RankClock, StageWork
from shardwright.trace.checkpointing import Policy

NEAR = 1e-3  # by what part of its bytes what is drawn may be off


@dataclass
class Share:
    """What a part of the model is to a rank: ``work``; bytes that a forward leaves for the backward
    (``saved``) and the most that the backward takes beside them (``rise``), or the forward on its
    way (``forward_rise``); its units."""

    work: StageWork = field(default_factory=StageWork)
    saved: int = 0
    rise: int = 0
    forward_rise: int = 0
    units: dict[str, tuple[TensorSpec, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    whole: int = 0  # bytes of its units as they compute

    @property
    def summed(self) -> int:
        """Bytes of its gradients as they are summed."""
        return self.work.units.summed + self.work.experts.summed


class Model(NamedTuple):
    """The shares of a model: before its layers, a layer of each number, behind them; layers of a
    stage that a policy picks by their places (``chosen``) are those of ``picked``. With ``alike``
    all layers but the first are one."""

    begin: Share
    layers: list[Share]
    end: Share
    stream: int  # bytes that a stage sends on
    chosen: Policy | None = None
    picked: list[Share] = []  # noqa: RUF012
    alike: bool = False

    def like(self, stage: ModelStage) -> ModelStage:
        """The first stage that has the same layers: of many ranks few are different."""
        begin, end = stage.layers
        if not self.alike or begin < 2:
            return stage
        return replace(stage, layers=(1, 1 + end - begin))

    def shares(self, stage: ModelStage) -> list[tuple[Share, int]]:
        """What a stage has of it, in order, and how often."""
        first, stop = stage.layers
        found = [self._layer(stage, place) for place in range(stop - first)]
        before, behind = [self.begin] if stage.first else [], [self.end] if stage.last else []
        every = [*before, *found, *behind]
        times = Counter(map(id, every))
        return [(share, times[key]) for key, share in {id(s): s for s in every}.items()]

    def begun(self, stage: ModelStage) -> Share:
        """The last of a stage's layers, or what it has instead."""
        first, stop = stage.layers
        if first == stop:
            return self.begin if stage.first else self.end
        return self._layer(stage, stop - first - 1)

    def _layer(self, stage: ModelStage, place: int) -> Share:
        is_picked = self.chosen is not None and self.chosen.turn(place) == 0
        return (self.picked if is_picked else self.layers)[stage.layers[0] + place]


def share_of(
    forward: Sequence[Piece], backward: Sequence[Piece], clock: RankClock, off: float
) -> Share:
    """What pieces of a part of the model come to."""
    work = StageWork(clock.passed(forward), clock.passed(backward))
    saved, forward_rise = _change(forward)
    sizes = (saved, _change(backward)[1], forward_rise)
    return Share(work, *(math.floor(size - off * abs(size)) for size in sizes))


def near(one: Recording, other: Recording) -> bool:
    """Whether the same pieces of two recordings differ by less than is left room for."""
    if [(p.point, p.unit) for p in one.pieces] != [(p.point, p.unit) for p in other.pieces]:
        return False
    numbers = (
        (*_change([piece]), *msgspec.structs.astuple(piece.work))
        for found in (one, other)
        for piece in found.pieces
    )
    every = [number for its in numbers for number in its]
    half = len(every) // 2
    pairs = zip(every[:half], every[half:], strict=True)
    return all(abs(a - b) <= NEAR / 2 * max(abs(a), abs(b)) for a, b in pairs)


def _change(pieces: Sequence[Piece]) -> tuple[int, int]:
    """What pieces leave, and the most on the way, beside what was there."""
    now = most = 0
    for piece in pieces:
        for touch in piece.touches:
            if touch.what == "take":
                now += touch.nbytes
                most = max(most, now)
            elif touch.what == "free":
                now -= touch.nbytes
    return now, most
