"""What is under way between a rank and the owners of rows: a lookup, its way back, an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.core.errors import UnsupportedError, expected
from shardwright.runtime.embeddings import wire
from shardwright.runtime.embeddings.asking import Sent
from shardwright.runtime.embeddings.bags import Pool, versions_of
from shardwright.runtime.embeddings.guide import Request
from shardwright.runtime.embeddings.replicas import Learnt
from shardwright.runtime.embeddings.update import Looked
from shardwright.runtime.guard import Guard
from shardwright.tracker.announce import thread_rank


@dataclass(slots=True, eq=False, weakref_slot=True)
class Trip:
    """What one forward leaves for its backward: how ids were sent and which rows were served."""

    shares: Sequence[torch.Tensor | None]  # of each feature's pooled rows
    asked: list[Request]  # per group, without its rows
    counts: wire.Counts  # sent to each rank
    served: wire.Counts  # received from each rank
    rows: torch.Tensor  # what was served, as it came
    replicas: list[Request]  # per group of replicas
    adds: bool  # whether units had gradients then, of a backward that no step came after


@dataclass(slots=True, eq=False)
class Lookup:
    """What was ``given`` is asked for, and once it has ``started`` on its way here."""

    given: Any
    whole: bool
    results: Sequence[int]
    pools: Mapping[int, Pool]
    trip: Trip
    sent: Sent | None
    versions: tuple[int, ...] = ()
    started: bool = False
    back: wire.Travelling | None = None
    found: Sequence[torch.Tensor] = ()  # rows of replicas

    def is_for(self, given: Any) -> bool:
        """Whether it is of these ids, unchanged since."""
        return self.given is given and self.versions == versions_of(given)

    def under_way(self) -> Iterator[torch.Tensor]:
        """What it has beside what it was given."""
        trip = self.trip
        yield from _tensors_in((trip.shares, trip.asked, trip.replicas, self.sent))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, Request):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
    elif isinstance(value, Sent):
        yield from _tensors_in(list(vars(value).values()))
    elif isinstance(value, wire.Travelling):
        yield from value.under_way


@dataclass(slots=True)
class Returning:
    """Gradients of rows on their way to the owners, ``into`` [rank][section] of them; ``dense`` is
    what rides. ``guard`` has seen this rank's own, where none is over the step."""

    came: wire.Travelling
    into: wire.Counts
    dense: torch.Tensor | None
    guard: Guard | None


@dataclass(slots=True)
class Arrived:
    """What a backward brings to the owners of rows, summed over ranks."""

    rows: torch.Tensor  # what was served, as it came
    served: wire.Counts
    returning: Returning | None
    learnt: Learnt | None  # of replicas
    gradients: Sequence[torch.Tensor] = ()  # by group, flat, once nothing is returning

    @staticmethod
    def of(trip: Trip) -> Arrived:
        """That of a ``trip``, which keeps nothing of what was served."""
        rows, trip.rows = trip.rows, trip.rows.new_empty(0)
        return Arrived(rows, trip.served, None, None)

    def parted(self, groups: int) -> list[Looked]:
        """What was served of each group; it is not kept as it came."""
        rows, self.rows = self.rows, self.rows.new_empty(0)
        return wire.unpack(rows, self.served, groups)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Waiting:
    """Backwards whose rows are updated when a guard is settled, which alone keeps them."""

    backwards: list[Arrived]


class Steps:
    """Counts the steps of every optimizer of this rank."""

    def __init__(self) -> None:
        self._made: Counter[int | None] = Counter()

    @property
    def made(self) -> int:
        """How many there were."""
        return self._made[thread_rank()]

    def __call__(self, *_: Any) -> None:
        self._made[thread_rank()] += 1


steps = Steps()


@cache
def follow_steps() -> None:
    """Let ``steps`` count, from now on."""
    register_optimizer_step_post_hook(steps)


def refuse_many_lookups(optimizer: str, others: int) -> None:
    """What is not linear is exact on a step's whole gradient only: without a guard there is one
    lookup to a backward."""
    if others and optimizer:
        raise UnsupportedError(
            expected(
                f"lookups before a backward of {optimizer} tables",
                "one",
                f"{others + 1}",
                "Look up once per backward, under no_grad otherwise, train with sgd, or hand a "
                "guard to apply.",
            )
        )


def refuse_accumulation(path: str) -> None:
    """Rows have no gradient that a later backward could add to: without a guard there is one
    backward to an optimizer's step."""
    raise UnsupportedError(
        expected(
            f"gradients of tables in '{path}'",
            "one backward before the optimizer's step, for it updates their rows",
            "gradients that are accumulated over several",
            "Hand a sw.Guard to apply and settle it once, before the optimizer's step.",
        )
    )


def refuse_scaling(path: str, kind: str) -> None:
    """Gradients of float16 are scaled by a factor that rows would be updated with."""
    if torch.is_grad_enabled() and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype == torch.float16:
            raise UnsupportedError(
                expected(
                    f"tables in '{path}' under autocast",
                    "bfloat16, whose gradients need no GradScaler",
                    "float16",
                    "Keep these embeddings dense, or use bfloat16.",
                )
            )


def refuse_second_backward() -> None:
    """A graph whose rows were updated."""
    raise UnsupportedError(
        expected(
            "backward of tables",
            "one per lookup, for rows are updated in it",
            "a second one",
            "Look up again.",
        )
    )
