"""The passes of one rank, schedule by schedule; ranks are counted from the input of the model.

A rank repeats itself: an order is written in runs, so that neither it nor the work of who reads it
grows with the number of microbatches.

The orders are those of ``torch.distributed.pipelining`` where it has the schedule. Its sources:
GPipe arXiv:1811.06965, 1F1B and interleaved 1F1B arXiv:2104.04473, breadth first arXiv:2211.05953,
zero bubble arXiv:2401.10241, DualPipe arXiv:2412.19437.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

# A backward may be split: the gradient of the input first, for the rank before waits for it, the
# gradients of the weights when there is time.
PassKind = Literal["forward", "backward", "input_backward", "weight_backward"]


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """``chunk`` counts the pieces of the model on one rank, from its first to its last stage."""

    kind: PassKind
    chunk: int
    microbatch: int


class Run(msgspec.Struct, frozen=True, array_like=True):
    """The same passes over and over: at repetition ``k`` each with a microbatch ``k * step``
    further on."""

    passes: tuple[Pass, ...]
    times: int = 1
    step: int = 1

    def repeated(self, k: int) -> tuple[Pass, ...]:
        """The passes of a repetition."""
        on = k * self.step
        return tuple(Pass(p.kind, p.chunk, p.microbatch + on) for p in self.passes)


def expanded(runs: Iterable[Run]) -> Iterator[Pass]:
    """Pass after pass."""
    for run in runs:
        for k in range(run.times):
            yield from run.repeated(k)


Slots = tuple[int, int, int]  # a chunk, the first of its microbatches, and how many follow


def fill_and_drain(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """GPipe: every forward, then every backward."""
    return [
        Run((Pass("forward", 0, 0),), microbatches),
        Run((Pass("backward", 0, 0),), microbatches),
    ]


def breadth_first(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """Looped breadth first: all microbatches of a chunk before the next chunk, and back."""
    last = microbatches - 1
    return [Run((Pass("forward", c, 0),), microbatches) for c in range(chunks)] + [
        Run((Pass("backward", c, last),), microbatches, -1) for c in reversed(range(chunks))
    ]


def one_f_one_b(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """1F1B: one forward for every rank behind this one, then forward and backward in turn."""
    slots = [(0, 0, microbatches)]
    return _in_turn(slots, slots, stages - 1 - rank)


def zero_bubble_h1(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """ZB-H1: 1F1B whose weight gradients wait, as long as it costs no more than rank 0 keeps."""
    slots = [(0, 0, microbatches)]
    return _in_turn(slots, slots, stages - 1 - rank, weights_wait=rank)


def zero_bubble_h2(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """ZB-H2: twice the warm-up of ZB-H1, which fills the bubble before the first backward too."""
    slots = [(0, 0, microbatches)]
    return _in_turn(slots, slots, 2 * (stages - 1 - rank), weights_wait=2 * rank)


def interleaved(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """Interleaved 1F1B: rounds of microbatches through every chunk, as in Megatron and torch."""
    forwards, backwards = _rounds(stages, microbatches, chunks)
    warmup = (chunks - 1) * per_round(stages, microbatches) + 2 * (stages - 1 - rank)
    return _in_turn(forwards, backwards, warmup)


def interleaved_zero_bubble(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """Interleaved 1F1B with half the warm-up and weight gradients that wait."""
    forwards, backwards = _rounds(stages, microbatches, chunks)
    warmup = (chunks - 1) * per_round(stages, microbatches) + stages - 1 - rank
    return _in_turn(forwards, backwards, warmup, weights_wait=rank)


def zero_bubble_v(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """ZB-V: chunk 0 on the way down, chunk 1 on the way up, so rank 0 has both ends."""
    behind = stages - rank
    # With fewer microbatches the order is that of a full pipeline, without the ones there are not.
    full = max(2 * stages - 1, microbatches)
    work = _Work(microbatches)
    work.run("F0", 2 * behind - 1)
    work.run("F1 F0", rank)
    work.run("F1 I1 W1", behind)
    while work.forwards[1] < work.forwards[0] or work.forwards[0] < full:
        ahead = "F0 " if work.forwards[0] < full else ""
        work.run(f"{ahead}I0 W0 F1 I1 W1")
    work.run("I0 I1", rank)
    work.run("I0 W0", behind)
    work.run("W1", rank)
    work.run("W0", rank)
    return work.runs


def dual_pipe_v(rank: int, stages: int, microbatches: int, chunks: int) -> list[Run]:
    """DualPipeV: ZB-V's pieces; what it runs at the same time stands forward before backward."""
    behind = stages - rank - 1
    work = _Work(microbatches)
    work.run("F0", 2 * behind)
    work.run("F0 F1", rank + 1)
    work.run("I1 W F1", behind)
    work.run("F0 B1 F1 B0", microbatches - 2 * stages + rank + 1)
    work.run("B1 F1 B0", behind)
    ends = [f"{chunk}" for _ in range(rank + 1) for chunk in (1, 0)]
    whole = rank + 1  # of these 2 * (rank + 1) backwards the first half is not split
    work.run(" ".join(f"B{chunk}" for chunk in ends[:whole]))
    work.run(" ".join(f"I{chunk}" for chunk in ends[whole:]))
    work.run("W I0", behind)
    work.run("W", rank + 1)
    return work.runs


def per_round(stages: int, microbatches: int) -> int:
    """Microbatches that go through a chunk before the next chunk's turn."""
    return microbatches // max(1, microbatches // stages)


def _rounds(stages: int, microbatches: int, chunks: int) -> tuple[list[Slots], list[Slots]]:
    size = per_round(stages, microbatches)
    starts = range(0, microbatches, size)
    forwards = [(chunk, start, size) for start in starts for chunk in range(chunks)]
    backwards = [(chunks - 1 - chunk, start, count) for chunk, start, count in forwards]
    return forwards, backwards


def _in_turn(
    forwards: Sequence[Slots],
    backwards: Sequence[Slots],
    warmup: int,
    weights_wait: int | None = None,
) -> list[Run]:
    """``warmup`` forwards, then a forward and a backward in turn, then the other backwards.

    With ``weights_wait`` backwards are split, and the first weight gradients come after so many
    further input gradients; what is left comes last.
    """
    warmup = min(warmup, sum(count for _, _, count in forwards))
    lanes = [_Lane("forward", forwards, -warmup)]
    if weights_wait is None:
        lanes.append(_Lane("backward", backwards, 0))
    else:
        lanes.append(_Lane("input_backward", backwards, 0))
        lanes.append(_Lane("weight_backward", backwards, weights_wait))
    turns = sorted({turn for lane in lanes for turn in lane.turns})
    runs = []
    for begin, end in pairwise(turns):
        passes = tuple(found for lane in lanes if (found := lane.at(begin)) is not None)
        if passes:
            runs.append(Run(passes, end - begin))
    return runs


class _Lane:
    """Passes of one kind, one in every turn from ``first`` on; ``turns`` are those in which other
    slots begin, and the one after the last."""

    def __init__(self, kind: PassKind, slots: Sequence[Slots], first: int) -> None:
        self.kind, self.slots = kind, slots
        self.turns = list(accumulate((count for _, _, count in slots), initial=first))

    def at(self, turn: int) -> Pass | None:
        """The pass of a turn."""
        place = bisect_right(self.turns, turn) - 1
        if not 0 <= place < len(self.slots):
            return None
        chunk, first, _ = self.slots[place]
        return Pass(self.kind, chunk, first + turn - self.turns[place])


class _Work:
    """Passes named by letter and chunk: F, B (whole backward), I (input), W (weights; without a
    chunk that of the oldest I). Each takes the next microbatch of its chunk, and is left out from
    ``microbatches`` on."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.runs: list[Run] = []
        self.forwards: dict[int, int] = defaultdict(int)
        self._backwards: dict[int, int] = defaultdict(int)
        self._waiting: list[tuple[int, int]] = []

    def run(self, letters: str, times: int = 1) -> None:
        """The passes of ``letters``, ``times`` over."""
        for _ in range(times):
            passes = (self._pass(letter) for letter in letters.split())
            found = tuple(p for p in passes if p and p.microbatch < self.microbatches)
            if self.runs and self.runs[-1].repeated(self.runs[-1].times) == found:
                before = self.runs.pop()
                self.runs.append(Run(before.passes, before.times + 1))
            elif found:
                self.runs.append(Run(found))

    def _pass(self, letter: str) -> Pass | None:
        if letter[0] == "W":
            return self._weights(letter[1:])
        chunk = int(letter[1:])
        if letter[0] == "F":
            return self._next("forward", chunk, self.forwards)
        if letter[0] == "B":
            return self._next("backward", chunk, self._backwards)
        self._waiting.append((chunk, self._backwards[chunk]))
        return self._next("input_backward", chunk, self._backwards)

    def _next(self, kind: PassKind, chunk: int, counts: dict[int, int]) -> Pass:
        counts[chunk] += 1
        return Pass(kind, chunk, counts[chunk] - 1)

    def _weights(self, chunk: str) -> Pass | None:
        """The oldest weight gradient that waits, of any chunk or of this one."""
        for k, slot in enumerate(self._waiting):
            if not chunk or slot[0] == int(chunk):
                del self._waiting[k]
                return Pass("weight_backward", *slot)
        return None
