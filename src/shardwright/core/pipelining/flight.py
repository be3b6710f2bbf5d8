"""How few microbatches show what passes of a pipeline find alive."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.pipelining import orders
from shardwright.core.pipelining.orders import Pass, Run
from shardwright.core.pipelining.schedules import checked, named, order_in_runs

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
    if found.growing:
        return microbatches
    step = orders.per_round(stages, microbatches) if found.rounds else 1
    steady = STEADY_PIPELINES * (1 if found.rounds else stages)
    first = found.fewest_microbatches(stages)
    most = min(microbatches // step, first + steady)
    wanted = _highest(schedule, stages, most * step, chunks)
    least, enough = first - 1, most
    while enough - least > 1:
        middle = (least + enough) // 2
        if _highest(schedule, stages, middle * step, chunks) == wanted:
            enough = middle
        else:
            least = middle
    return enough * step


def _highest(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> list[dict[tuple[str, int], set[State]]]:
    """Rank by rank and by kind and chunk of a pass: the states before it that no other exceeds."""
    ranks = order_in_runs(schedule, stages, microbatches, chunks)
    return [
        {key: _maximal(states) for key, states in _states(runs, chunks).items()} for runs in ranks
    ]


def _states(runs: Sequence[Run], chunks: int) -> dict[tuple[str, int], set[State]]:
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
            grows, falls = min(change) >= 0, max(change) <= 0
            if left > 0 and done > 1 and (grows or falls):  # those between lie between
                for place, each in enumerate(change):
                    now[place] += left * each
                done += left
    return found


def _repeat(
    passes: Sequence[Pass], now: list[int], chunks: int, found: dict[tuple[str, int], set[State]]
) -> None:
    for kind, chunk, _ in ((p.kind, p.chunk, p.microbatch) for p in passes):
        found.setdefault((kind, chunk), set()).add(tuple(now))
        if kind == "forward":
            now[chunk] += 1
            now[chunks + chunk] += 1
        if kind in ("backward", "weight_backward"):
            now[chunk] -= 1
            now[2 * chunks + chunk] = 1
        if kind in ("backward", "input_backward"):
            now[chunks + chunk] -= 1


def _maximal(states: set[State]) -> set[State]:
    found: list[State] = []
    for one in sorted(states, key=sum, reverse=True):  # what exceeds a state has a larger sum
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in found):
            found.append(one)
    return set(found)
