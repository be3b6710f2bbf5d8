"""Every answer of ``fit`` from a function that says what a variant of a job needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwright.core.errors import UnsupportedError
from shardwright.core.fit import Estimate, Largest, PolicyFit
from shardwright.lab.fit.bracket import largest, smallest


@dataclass(frozen=True, slots=True)
class Point:
    """A variant of a job: samples per rank, tokens per sample, degree of data sharding, policy."""

    batch: int
    sequence: int
    shards: int
    policy: str


@dataclass(frozen=True, slots=True)
class Space:
    """Which variants there are: multiples of the steps up to the limits. A limit of 0: the job has
    no such size. ``steady``: larger sizes need more; a planner spends what there is."""

    policies: Sequence[str]
    batch_step: int = 1
    batch_limit: int = 4096
    sequence_step: int = 1
    sequence_limit: int = 2**20
    shard_step: int = 1
    shard_limit: int = 2**20
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """Rows by policy; of the job's own policy the longest sequence and the fewest shards (0 where
    no number of them is enough, None where they cannot be chosen)."""

    rows: tuple[PolicyFit, ...]
    skipped: tuple[str, ...]
    sequence: Largest | None
    shards: int | None


Ask = Callable[[Point], Estimate]


def search(ask: Ask, at: Point, space: Space, capacity: int) -> Findings:
    """All answers around the job, which is ``at``. A policy that ``ask`` refuses as unsupported is
    skipped, but not the job's own."""
    rows, skipped = [], []
    for policy in space.policies:
        here = replace(at, policy=policy)
        try:
            estimate = ask(here)
        except UnsupportedError as error:
            if policy == at.policy:
                raise
            skipped.append(f"{policy}: {error}")
            continue
        rows.append(PolicyFit(policy, estimate, _batch(ask, here, space, capacity)))
    return Findings(
        tuple(rows),
        tuple(skipped),
        _sequence(ask, at, space, capacity),
        _shards(ask, at, space, capacity),
    )


def _batch(ask: Ask, at: Point, space: Space, capacity: int) -> Largest:
    step = space.batch_step

    def here(size: int) -> Estimate:
        return ask(replace(at, batch=size * step))

    return _largest(here, capacity, step, space.batch_limit, at.batch, space.steady)


def _sequence(ask: Ask, at: Point, space: Space, capacity: int) -> Largest | None:
    step = space.sequence_step

    def here(size: int) -> Estimate:
        return ask(replace(at, sequence=size * step))

    if not space.sequence_limit:
        return None
    return _largest(here, capacity, step, space.sequence_limit, at.sequence, space.steady)


def _largest(
    here: Callable[[int], Estimate], capacity: int, step: int, limit: int, hint: int, steady: bool
) -> Largest:
    """The largest multiple of ``step`` that fits; ``here`` takes how many steps."""
    most = max(limit // step, 1)
    found = largest(lambda size: here(size).most_bytes, capacity, most, hint // step, steady=steady)
    perhaps = not found.or_more and here(found.size + 1).verdict == "perhaps"
    return Largest(found.size * step, step, found.or_more, perhaps, found.even)


def _shards(ask: Ask, at: Point, space: Space, capacity: int) -> int | None:
    step = space.shard_step
    if space.shard_limit < step:
        return None
    found = smallest(
        lambda size: ask(replace(at, shards=size * step)).most_bytes,
        capacity,
        space.shard_limit // step,
        at.shards // step,
    )
    return found.size * step
