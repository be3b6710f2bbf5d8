"""Which pass a rank of a pipeline runs when: schedules by name, the passes that each gives a rank,
how few microbatches show all that they find alive. Ranks are counted from the model's input.

A rank repeats itself: an order is written in runs, so that neither it nor the work of who reads it
grows with the number of microbatches.

The orders are those of ``torch.distributed.pipelining`` where it has the schedule. Its sources:
GPipe arXiv:1811.06965, 1F1B and interleaved 1F1B arXiv:2104.04473, breadth first arXiv:2211.05953,
zero bubble arXiv:2401.10241, DualPipe arXiv:2412.19437.
"""

# Memory of a stage is how many microbatches are in flight on it, so the order has to be the
# engine's own, pass by pass: a test compares with torch.distributed.pipelining's tables. Orders
# are in runs because a job may have thousands of microbatches, of which all but a few repeat.

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from shardwright.core.errors import InputError, expected, not_one_of

# A backward may be split: the gradient of the input first, for the rank before waits for it, the
# gradients of the weights when there is time.
PassKind = Literal["forward", "backward", "input_backward", "weight_backward"]


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """``chunk`` counts the pieces of the model on one rank, from its first to its last stage."""

    kind: PassKind
    chunk: int
    microbatch: int


class PassRun(msgspec.Struct, frozen=True, array_like=True):
    """The same passes over and over: at repetition ``k`` each with a microbatch ``k * step``
    further on."""

    passes: tuple[Pass, ...]
    times: int = 1
    step: int = 1

    def repeated(self, k: int) -> tuple[Pass, ...]:
        """The passes of a repetition."""
        on = k * self.step
        return tuple(Pass(p.kind, p.chunk, p.microbatch + on) for p in self.passes)


def expanded(runs: Iterable[PassRun]) -> Iterator[Pass]:
    """Pass after pass."""
    for run in runs:
        for k in range(run.times):
            yield from run.repeated(k)


Slots = tuple[int, int, int]  # a chunk, the first of its microbatches, and how many follow


def fill_and_drain(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """GPipe: every forward, then every backward."""
    return [
        PassRun((Pass("forward", 0, 0),), microbatches),
        PassRun((Pass("backward", 0, 0),), microbatches),
    ]


def breadth_first(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """Looped breadth first: all microbatches of a chunk before the next chunk, and back."""
    last = microbatches - 1
    return [PassRun((Pass("forward", c, 0),), microbatches) for c in range(chunks)] + [
        PassRun((Pass("backward", c, last),), microbatches, -1) for c in reversed(range(chunks))
    ]


def one_f_one_b(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """1F1B: one forward for every rank behind this one, then forward and backward in turn."""
    slots = [(0, 0, microbatches)]
    return _in_turn(slots, slots, stages - 1 - rank)


def zero_bubble_h1(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """ZB-H1: 1F1B whose weight gradients wait, as long as it costs no more than rank 0 keeps."""
    slots = [(0, 0, microbatches)]
    return _in_turn(slots, slots, stages - 1 - rank, weights_wait=rank)


def zero_bubble_h2(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """ZB-H2: twice the warm-up of ZB-H1, which fills the bubble before the first backward too."""
    slots = [(0, 0, microbatches)]
    return _in_turn(slots, slots, 2 * (stages - 1 - rank), weights_wait=2 * rank)


def interleaved(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """Interleaved 1F1B: rounds of microbatches through every chunk, as in Megatron and torch."""
    forwards, backwards = _rounds(stages, microbatches, chunks)
    warmup = (chunks - 1) * per_round(stages, microbatches) + 2 * (stages - 1 - rank)
    return _in_turn(forwards, backwards, warmup)


def interleaved_zero_bubble(
    rank: int, stages: int, microbatches: int, chunks: int
) -> list[PassRun]:
    """Interleaved 1F1B with half the warm-up and weight gradients that wait."""
    forwards, backwards = _rounds(stages, microbatches, chunks)
    warmup = (chunks - 1) * per_round(stages, microbatches) + stages - 1 - rank
    return _in_turn(forwards, backwards, warmup, weights_wait=rank)


def zero_bubble_v(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """ZB-V: chunk 0 on the way down, chunk 1 on the way up, so rank 0 has both ends."""
    behind = stages - rank
    # With fewer microbatches the order is that of a full pipeline, without the ones there are not.
    full = max(2 * stages - 1, microbatches)
    work = _PassWriter(microbatches)
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


def dual_pipe_v(rank: int, stages: int, microbatches: int, chunks: int) -> list[PassRun]:
    """DualPipeV: ZB-V's pieces; what it runs at the same time stands forward before backward."""
    behind = stages - rank - 1
    work = _PassWriter(microbatches)
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
) -> list[PassRun]:
    """``warmup`` forwards, then a forward and a backward in turn, then the other backwards.

    With ``weights_wait`` backwards are split, and the first weight gradients come after so many
    further input gradients; what is left comes last.
    """
    # Of fewer microbatches than that every forward is warm-up.
    warmup = min(warmup, sum(count for _, _, count in forwards))
    lanes = [_Lane("forward", forwards, -warmup)]
    if weights_wait is None:
        lanes.append(_Lane("backward", backwards, 0))
    else:
        lanes.append(_Lane("input_backward", backwards, 0))
        lanes.append(_Lane("weight_backward", backwards, weights_wait))
    # Between two of these turns every lane does the same over and over: that is one run.
    turns = sorted({turn for lane in lanes for turn in lane.turns})
    runs = []
    for begin, end in pairwise(turns):
        passes = tuple(found for lane in lanes if (found := lane.at(begin)) is not None)
        if passes:
            runs.append(PassRun(passes, end - begin))
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


class _PassWriter:
    """Passes named by letter and chunk: F, B (whole backward), I (input), W (weights; without a
    chunk that of the oldest I). Each takes the next microbatch of its chunk, and is left out from
    ``microbatches`` on."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.runs: list[PassRun] = []
        self.forwards: dict[int, int] = defaultdict(int)
        self._backwards: dict[int, int] = defaultdict(int)
        self._waiting: list[tuple[int, int]] = []

    def run(self, letters: str, times: int = 1) -> None:
        """The passes of ``letters``, ``times`` over."""
        for _ in range(times):
            passes = (self._pass(letter) for letter in letters.split())
            found = tuple(p for p in passes if p and p.microbatch < self.microbatches)
            # Joined as they are written: V schedules are loops over letters, and most of them
            # repeat.
            if self.runs and self.runs[-1].repeated(self.runs[-1].times) == found:
                before = self.runs.pop()
                self.runs.append(PassRun(before.passes, before.times + 1))
            elif found:
                self.runs.append(PassRun(found))

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
        # The oldest first, as torch has it: it holds the oldest activations.
        for k, slot in enumerate(self._waiting):
            if not chunk or slot[0] == int(chunk):
                del self._waiting[k]
                return Pass("weight_backward", *slot)
        return None


Shape = Literal["loop", "v"]
Order = Callable[[int, int, int, int], list[PassRun]]


class Schedule(msgspec.Struct, frozen=True):
    """``title`` is PyTorch's name, or the paper's. In a ``loop`` chunk ``c`` of rank ``r`` is stage
    ``c * ranks + r`` of the model; in a ``v`` chunk 1 comes back the other way.

    With ``rounds`` the microbatches go through the chunks in rounds of equal size; with ``growing``
    every microbatch is in flight at once. With ``split`` backwards gradients of weights may come
    later than those of inputs.
    """

    name: str
    title: str
    order: Order
    chunks: Literal["one", "two", "several"] = "one"
    shape: Shape = "loop"
    rounds: bool = False
    growing: bool = False
    split: bool = False

    @property
    def usual_chunks(self) -> int:
        """Chunks of a rank where nobody says how many."""
        return 1 if self.chunks == "one" else 2

    def fewest_microbatches(self, stages: int) -> int:
        """What the order needs to exist at all."""
        return 2 * stages if self.name == "dualpipev" else 1


_ALL = (
    Schedule("gpipe", "GPipe", fill_and_drain, growing=True),
    Schedule("1f1b", "1F1B", one_f_one_b),
    Schedule("interleaved_1f1b", "Interleaved1F1B", interleaved, chunks="several", rounds=True),
    Schedule("looped_bfs", "LoopedBFS", breadth_first, chunks="several", growing=True),
    Schedule("zbh1", "ZB-H1", zero_bubble_h1, split=True),
    Schedule("zbh2", "ZB-H2", zero_bubble_h2, split=True),
    Schedule(
        "interleaved_zero_bubble",
        "InterleavedZeroBubble",
        interleaved_zero_bubble,
        chunks="several",
        rounds=True,
        split=True,
    ),
    Schedule("zbv", "ZBVZeroBubble", zero_bubble_v, chunks="two", shape="v", split=True),
    Schedule("dualpipev", "DualPipeV", dual_pipe_v, chunks="two", shape="v", split=True),
)
SCHEDULES: dict[str, Schedule] = {each.name: each for each in _ALL}
_BY_ANY_NAME = {
    name.lower().replace("-", "").replace("_", ""): each
    for each in _ALL
    for name in (each.name, each.title)
}


def named(schedule: str) -> Schedule:
    """The schedule of a name, in our spelling or PyTorch's, capitals and dashes apart."""
    plain = schedule.lower().replace("-", "").replace("_", "")
    if plain not in _BY_ANY_NAME:
        raise InputError(not_one_of("[parallel] schedule", schedule, SCHEDULES))
    return _BY_ANY_NAME[plain]


def chunk_count(schedule: str, chunks: int | None = None) -> int:
    """Chunks of the model on a rank; the schedule's usual number where none is given."""
    found = named(schedule)
    wanted = {"one": "1", "two": "2", "several": "2 or more"}[found.chunks]
    if chunks is None:
        return found.usual_chunks
    if chunks < found.usual_chunks or (found.chunks != "several" and chunks > found.usual_chunks):
        remedy = f"The schedule {found.name} has {wanted}."
        if chunks == 1:
            remedy += " With one chunk take 1f1b or zbh1."
        elif chunks > 1:
            remedy += " With several chunks take interleaved_1f1b."
        raise InputError(expected("[parallel] chunks", wanted, str(chunks), remedy))
    return chunks


def order(
    schedule: str, stages: int, microbatches: int, chunks: int | None = None
) -> tuple[tuple[Pass, ...], ...]:
    """The passes of every rank of a pipeline of ``stages`` ranks.

    Each rank holds ``chunks`` pieces of the model (by default as many as the schedule usually has).
    Raises InputError where the schedule cannot be run with these numbers.
    """
    return tuple(
        tuple(expanded(runs)) for runs in order_in_runs(schedule, stages, microbatches, chunks)
    )


def order_in_runs(
    schedule: str, stages: int, microbatches: int, chunks: int | None = None
) -> tuple[tuple[PassRun, ...], ...]:
    """The same, as what each rank does over and over."""
    chunks = checked(schedule, stages, microbatches, chunks)
    found = named(schedule)
    return tuple(tuple(found.order(r, stages, microbatches, chunks)) for r in range(stages))


def stage_of(schedule: str, stages: int, rank: int, chunk: int) -> int:
    """Which of the ``stages * chunks`` pieces of the model is chunk ``chunk`` of rank ``rank``."""
    if named(schedule).shape == "v" and chunk % 2 == 1:
        return (chunk + 1) * stages - 1 - rank
    return chunk * stages + rank


def checked(schedule: str, stages: int, microbatches: int, chunks: int | None) -> int:
    """The chunks of a rank, if the schedule can be run with these numbers."""
    found = named(schedule)
    if stages < 1:
        raise InputError(expected("[parallel] pipeline", "at least 1 rank", str(stages)))
    chunks = chunk_count(schedule, chunks)
    fewest = found.fewest_microbatches(stages)
    if microbatches < fewest:
        remedy = f"{found.name} on {stages} ranks needs {fewest}." if fewest > 1 else ""
        raise InputError(
            expected("[parallel] microbatches", f"at least {fewest}", str(microbatches), remedy)
        )
    if found.rounds:
        _check_rounds(found.name, stages, microbatches)
    return chunks


def _check_rounds(name: str, stages: int, microbatches: int) -> None:
    rounds = max(1, microbatches // stages)
    if microbatches % rounds:
        below = microbatches // stages * stages
        raise InputError(
            expected(
                "[parallel] microbatches",
                f"a multiple of {rounds}, for {name} on {stages} ranks goes in {rounds} rounds",
                str(microbatches),
                f"{below} and {below + stages} will do.",
            )
        )


# After so many pipelines full of microbatches (warm-up, a steady part, the end) nothing new comes.
STEADY_PIPELINES = 4

# Before a pass: by chunk what is kept for a backward, of it what still waits for the gradient of
# its input, and 1 where a backward has left gradients of the weights.
State = tuple[int, ...]


def representative(schedule: str, stages: int, microbatches: int, chunks: int | None = None) -> int:
    """The fewest microbatches that are in flight like ``microbatches`` of them.

    Alike on every rank are the highest counts, chunk by chunk, that each kind of pass of each chunk
    meets, and whether gradients of weights are there: so is what the passes find alive, whatever a
    chunk's activations take. The cost does not grow with ``microbatches``.
    """
    chunks = checked(schedule, stages, microbatches, chunks)
    found = named(schedule)
    # Every microbatch is in flight at once, so no smaller number is like it.
    if found.growing:
        return microbatches
    step = per_round(stages, microbatches) if found.rounds else 1
    steady = STEADY_PIPELINES * (1 if found.rounds else stages)
    first = found.fewest_microbatches(stages)
    most = min(microbatches // step, first + steady)
    wanted = highest(schedule, stages, most * step, chunks)
    least, enough = first - 1, most
    while enough - least > 1:
        middle = (least + enough) // 2
        if highest(schedule, stages, middle * step, chunks) == wanted:
            enough = middle
        else:
            least = middle
    return enough * step


def highest(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> list[dict[tuple[str, int], set[State]]]:
    """Rank by rank and by kind and chunk of a pass: the states before it that no other exceeds."""
    ranks = order_in_runs(schedule, stages, microbatches, chunks)
    return [
        {key: maximal(states) for key, states in _states(runs, chunks).items()} for runs in ranks
    ]


def _states(runs: Sequence[PassRun], chunks: int) -> dict[tuple[str, int], set[State]]:
    """By kind and chunk of a pass: the states before it, but for such as others exceed."""
    found: dict[tuple[str, int], set[State]] = {}
    now = [0] * (3 * chunks)
    for run in runs:
        done = 0
        while done < run.times:
            before = tuple(now)
            _repeat(run.passes, now, chunks, found)
            done += 1
            change = [b - a for a, b in zip(before, now, strict=True)]
            left = run.times - done - 1  # the last repetition is looked at
            # Repetitions that only add or only remove have their highest state at an end; what lies
            # between need not be walked, which is what keeps the cost apart from the number of
            # microbatches.
            grows, falls = min(change) >= 0, max(change) <= 0
            if left > 0 and done > 1 and (grows or falls):
                for place, each in enumerate(change):
                    now[place] += left * each
                done += left
    return found


def _repeat(
    passes: Sequence[Pass], now: list[int], chunks: int, found: dict[tuple[str, int], set[State]]
) -> None:
    for kind, chunk in ((each.kind, each.chunk) for each in passes):
        found.setdefault((kind, chunk), set()).add(tuple(now))
        if kind == "forward":
            now[chunk] += 1
            now[chunks + chunk] += 1
        if kind in ("backward", "weight_backward"):
            now[chunk] -= 1
            now[2 * chunks + chunk] = 1
        if kind in ("backward", "input_backward"):
            now[chunks + chunk] -= 1


def maximal(states: set[State]) -> set[State]:
    """Those that no other exceeds."""
    found: list[State] = []
    for one in sorted(states, key=sum, reverse=True):  # what exceeds a state has a larger sum
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in found):
            found.append(one)
    return set(found)
