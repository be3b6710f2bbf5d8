"""Pipeline schedules by name: what each asks for, and the order of passes it gives every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from shardwright.core.errors import InputError, expected
from shardwright.core.pipelining import orders
from shardwright.core.pipelining.orders import Pass, Run, expanded

Shape = Literal["loop", "v"]
Order = Callable[[int, int, int, int], list[Run]]


class Schedule(msgspec.Struct, frozen=True):
    """``title`` is PyTorch's name, or the paper's. In a ``loop`` chunk ``c`` of rank ``r`` is stage
    ``c * ranks + r`` of the model; in a ``v`` chunk 1 comes back the other way.

    With ``rounds`` the microbatches go through the chunks in rounds of equal size; with ``growing``
    every microbatch is in flight at once.
    """

    name: str
    title: str
    order: Order
    chunks: Literal["one", "two", "several"] = "one"
    shape: Shape = "loop"
    rounds: bool = False
    growing: bool = False

    @property
    def usual_chunks(self) -> int:
        """Chunks of a rank where nobody says how many."""
        return 1 if self.chunks == "one" else 2

    def fewest_microbatches(self, stages: int) -> int:
        """What the order needs to exist at all."""
        return 2 * stages if self.name == "dualpipev" else 1


_ALL = (
    Schedule("gpipe", "GPipe", orders.fill_and_drain, growing=True),
    Schedule("1f1b", "1F1B", orders.one_f_one_b),
    Schedule(
        "interleaved_1f1b", "Interleaved1F1B", orders.interleaved, chunks="several", rounds=True
    ),
    Schedule("looped_bfs", "LoopedBFS", orders.breadth_first, chunks="several", growing=True),
    Schedule("zbh1", "ZB-H1", orders.zero_bubble_h1),
    Schedule("zbh2", "ZB-H2", orders.zero_bubble_h2),
    Schedule(
        "interleaved_zero_bubble",
        "InterleavedZeroBubble",
        orders.interleaved_zero_bubble,
        chunks="several",
        rounds=True,
    ),
    Schedule("zbv", "ZBVZeroBubble", orders.zero_bubble_v, chunks="two", shape="v"),
    Schedule("dualpipev", "DualPipeV", orders.dual_pipe_v, chunks="two", shape="v"),
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
        names = ", ".join(SCHEDULES)
        raise InputError(expected("[parallel] schedule", f"one of {names}", repr(schedule)))
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
) -> tuple[tuple[Run, ...], ...]:
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
