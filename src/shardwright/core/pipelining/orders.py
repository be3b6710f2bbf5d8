"""The passes of one rank, schedule by schedule; ranks are counted from the input of the model.

The orders are those of ``torch.distributed.pipelining`` where it has the schedule. Its sources:
GPipe arXiv:1811.06965, 1F1B and interleaved 1F1B arXiv:2104.04473, breadth first arXiv:2211.05953,
zero bubble arXiv:2401.10241, DualPipe arXiv:2412.19437.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
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


Slot = tuple[int, int]  # chunk, microbatch


def fill_and_drain(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """GPipe: every forward, then every backward."""
    return [Pass("forward", 0, m) for m in range(microbatches)] + [
        Pass("backward", 0, m) for m in range(microbatches)
    ]


def breadth_first(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """Looped breadth first: all microbatches of a chunk before the next chunk, and back."""
    slots = [(c, m) for c in range(chunks) for m in range(microbatches)]
    return [Pass("forward", *slot) for slot in slots] + [
        Pass("backward", *slot) for slot in reversed(slots)
    ]


def one_f_one_b(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """1F1B: one forward for every rank behind this one, then forward and backward in turn."""
    slots = [(0, m) for m in range(microbatches)]
    return _in_turn(slots, slots, stages - 1 - rank)


def zero_bubble_h1(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """ZB-H1: 1F1B whose weight gradients wait, as long as it costs no more than rank 0 keeps."""
    slots = [(0, m) for m in range(microbatches)]
    return _in_turn(slots, slots, stages - 1 - rank, weights_wait=rank)


def zero_bubble_h2(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """ZB-H2: twice the warm-up of ZB-H1, which fills the bubble before the first backward too."""
    slots = [(0, m) for m in range(microbatches)]
    return _in_turn(slots, slots, 2 * (stages - 1 - rank), weights_wait=2 * rank)


def interleaved(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """Interleaved 1F1B: rounds of microbatches through every chunk, as in Megatron and torch."""
    forwards, backwards = _rounds(stages, microbatches, chunks)
    warmup = (chunks - 1) * per_round(stages, microbatches) + 2 * (stages - 1 - rank)
    return _in_turn(forwards, backwards, warmup)


def interleaved_zero_bubble(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """Interleaved 1F1B with half the warm-up and weight gradients that wait."""
    forwards, backwards = _rounds(stages, microbatches, chunks)
    warmup = (chunks - 1) * per_round(stages, microbatches) + stages - 1 - rank
    return _in_turn(forwards, backwards, warmup, weights_wait=rank)


def zero_bubble_v(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """ZB-V: chunk 0 on the way down, chunk 1 on the way up, so rank 0 has both ends."""
    behind = stages - rank
    # With fewer microbatches the order is that of a full pipeline, without the ones there are not.
    full = max(2 * stages - 1, microbatches)
    work = _Work()
    work.run("F0", 2 * behind - 1)
    work.run("F1 F0", rank)
    work.run("F1 I1 W1", behind)
    while work.forwards[1] < work.forwards[0] or work.forwards[0] < full:
        work.run("F0", int(work.forwards[0] < full))
        work.run("I0 W0 F1 I1 W1")
    work.run("I0 I1", rank)
    work.run("I0 W0", behind)
    work.run("W1", rank)
    work.run("W0", rank)
    return [each for each in work.passes if each.microbatch < microbatches]


def dual_pipe_v(rank: int, stages: int, microbatches: int, chunks: int) -> list[Pass]:
    """DualPipeV: ZB-V's pieces; what it runs at the same time stands forward before backward."""
    behind = stages - rank - 1
    work = _Work()
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
    return work.passes


def per_round(stages: int, microbatches: int) -> int:
    """Microbatches that go through a chunk before the next chunk's turn."""
    return microbatches // max(1, microbatches // stages)


def _rounds(stages: int, microbatches: int, chunks: int) -> tuple[list[Slot], list[Slot]]:
    size = per_round(stages, microbatches)
    starts = range(0, microbatches, size)
    forwards = [(c, s + i) for s in starts for c in range(chunks) for i in range(size)]
    backwards = [(chunks - 1 - c, m) for c, m in forwards]
    return forwards, backwards


def _in_turn(
    forwards: Sequence[Slot],
    backwards: Sequence[Slot],
    warmup: int,
    weights_wait: int | None = None,
) -> list[Pass]:
    """``warmup`` forwards, then a forward and a backward in turn, then the other backwards.

    With ``weights_wait`` backwards are split, and the first weight gradients come after so many
    further input gradients; what is left comes last.
    """
    warmup = min(warmup, len(forwards))
    passes = [Pass("forward", *slot) for slot in forwards[:warmup]]
    whole: PassKind = "backward" if weights_wait is None else "input_backward"
    waiting: deque[Slot] = deque()
    for done, slot in enumerate(backwards):
        if warmup + done < len(forwards):
            passes.append(Pass("forward", *forwards[warmup + done]))
        passes.append(Pass(whole, *slot))
        if weights_wait is not None:
            waiting.append(slot)
            if done >= weights_wait:
                passes.append(Pass("weight_backward", *waiting.popleft()))
    passes.extend(Pass("weight_backward", *slot) for slot in waiting)
    return passes


class _Work:
    """Passes named by letter and chunk: F, B (whole backward), I (input), W (weights; without a
    chunk that of the oldest I). Each takes the next microbatch of its chunk."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.forwards: dict[int, int] = defaultdict(int)
        self._backwards: dict[int, int] = defaultdict(int)
        self._waiting: list[Slot] = []

    def run(self, letters: str, times: int = 1) -> None:
        """The passes of ``letters``, ``times`` over."""
        for _ in range(times):
            self._each(letters.split())

    def _each(self, letters: Iterable[str]) -> None:
        for letter in letters:
            if letter[0] == "W":
                self._weights(letter[1:])
                continue
            chunk = int(letter[1:])
            if letter[0] == "F":
                self._add("forward", chunk, self.forwards)
            elif letter[0] == "B":
                self._add("backward", chunk, self._backwards)
            else:
                self._waiting.append((chunk, self._backwards[chunk]))
                self._add("input_backward", chunk, self._backwards)

    def _add(self, kind: PassKind, chunk: int, counts: dict[int, int]) -> None:
        self.passes.append(Pass(kind, chunk, counts[chunk]))
        counts[chunk] += 1

    def _weights(self, chunk: str) -> None:
        """The oldest weight gradient that waits, of any chunk or of this one."""
        for k, slot in enumerate(self._waiting):
            if not chunk or slot[0] == int(chunk):
                self.passes.append(Pass("weight_backward", *slot))
                del self._waiting[k]
                return
