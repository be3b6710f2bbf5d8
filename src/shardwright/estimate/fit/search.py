"""The answers of ``fit``, from a function that says what a variant of a job needs.

Each is found between the last size that fits and the first one that does not, with few questions.
Needs are nearly straight lines in a batch and nearly ``a + b / ranks`` in ranks, so a line through
two answers mostly lands on the border at once; halving in between keeps the worst case small.
"""

# An estimate takes from a tenth of a second to minutes (a plan of a large model), so questions are
# what counts, not steps. Between a size that fits and one that does not the guess is always inside,
# and every third one halves: a bent line cannot make it creep. An answer is a true border, not the
# last guess: its neighbour was asked for.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec

from shardwright.core.errors import UnsupportedError
from shardwright.core.footprint import Estimate, Largest, PolicyFit

GROWTH = 8  # times the largest size that fits: no guess goes further at once
HALVE_EVERY = 3  # of so many guesses between two sizes, one halves
SLACK = 0.99  # of a smaller size's need: an allocator's model may make a little less of more
MOST_SCANNED = 32  # sizes looked at one by one where a larger one needs less

Need = Callable[[int], float]  # bytes, infinite of a size that does not run


@dataclass(slots=True)
class _Bracket:
    """Answers so far."""

    need: Need
    limit: int
    answers: dict[int, float] = field(default_factory=dict)

    def fits(self, size: int) -> bool:
        return self.of(size) <= self.limit

    def of(self, size: int) -> float:
        if size not in self.answers:
            self.answers[size] = self.need(size)
        return self.answers[size]


def largest(need: Need, limit: int, most: int, hint: int = 1, *, steady: bool = True) -> Largest:
    """The largest of 1 to ``most`` whose need is within ``limit``, where needs grow with sizes.

    Where a larger one was seen to need less, sizes are looked at one by one from there, so that
    the answer is the first border; not so if they are not ``steady`` anyway.
    """
    asked = _Bracket(need, limit)
    first = min(max(hint, 1), most)
    if not asked.fits(first) and (first == 1 or not asked.fits(1)):
        return Largest(0)
    # The job's own size first: it is estimated anyway, and mostly not far from the border.
    low, high = (first, most + 1) if asked.fits(first) else (1, first)
    guess, between = _on_line(asked, low, high if high <= most else None), 0
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if asked.fits(guess):
            low = guess
        else:
            high = guess
        between += high <= most
        if high <= most and between % HALVE_EVERY == 0:
            guess = (low + high) // 2
        else:
            guess = _on_line(asked, low, high if high <= most else None)
    if not steady or _grows(asked.answers):
        return Largest(low, or_more=low == most)
    return _scanned(asked, low, most)


def smallest(need: Need, limit: int, most: int, hint: int = 1) -> int:
    """The smallest of 1 to ``most`` whose need is within ``limit``, where needs shrink with sizes.

    0 where none is, as far as larger sizes still needed less: padding grows with ranks, so at some
    number of them needs grow again.
    """
    asked = _Bracket(need, limit)
    if asked.fits(1):
        return 1
    low, high, guess, turn = 1, most + 1, max(hint, 2), 0
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if asked.fits(guess):
            high = guess
        # More ranks need no less from here on: what is left does not go down with them
        # (activations), or padding grows. Looking further would only cost estimates.
        elif high > most and asked.of(guess) >= asked.of(low):
            return 0
        else:
            low = guess
        # A need of ``a + b / ranks`` is halved in the logarithm, and the curve through two answers
        # is taken in between.
        turn += high <= most
        if high > most:
            guess = GROWTH * low
        elif turn % HALVE_EVERY == 0:
            guess = math.isqrt(low * high)
        else:
            guess = _on_curve(asked, low, high)
    return 0 if high > most else high


def _on_line(asked: _Bracket, low: int, high: int | None) -> int:
    """Where the line through two answers meets the limit; twice ``low`` where there is none."""
    if high is None:
        before = max((size for size in asked.answers if size < low), default=None)
        if before is None:
            return 2 * low
        steep = asked.of(low) - asked.of(before)
        if steep <= 0:
            return GROWTH * low
        further = (asked.limit - asked.of(low)) * (low - before) // steep
        return int(min(low + further, GROWTH * low))
    steep = asked.of(high) - asked.of(low)
    if math.isinf(steep):
        return (low + high) // 2
    return int(low + (asked.limit - asked.of(low)) * (high - low) // max(steep, 1))


def _on_curve(asked: _Bracket, low: int, high: int) -> int:
    """Where ``a + b / size`` through two answers meets the limit."""
    near, far = asked.of(low), asked.of(high)
    if near <= far:
        return math.isqrt(low * high)
    # The curve through both answers: what ranks share (b) goes down with their number, what each
    # keeps (a) does not.
    b = (near - far) / (1 / low - 1 / high)
    left = asked.limit - (far - b / high)
    return math.ceil(b / left) if left > b / high else high - 1


def _grows(answers: dict[int, float]) -> bool:
    """Whether no larger size was seen to need clearly less."""
    needs = [answers[size] for size in sorted(answers)]
    return not any(after < SLACK * before for before, after in pairwise(needs))


def _scanned(asked: _Bracket, found: int, most: int) -> Largest:
    """Size by size from where order broke, so that all up to the answer fit."""
    # A larger size that needs less (a plan that shards more, an allocator that rounds otherwise)
    # would make the answer depend on which sizes happened to be asked for.
    sizes = sorted(asked.answers)
    broken = next(
        size for size, after in pairwise(sizes) if asked.of(after) < SLACK * asked.of(size)
    )
    at = max(size for size in sizes if size <= broken and asked.fits(size))
    for _ in range(MOST_SCANNED):
        if at == most or not asked.fits(at + 1):
            return Largest(at, or_more=at == most, even=False)
        at += 1
    return Largest(found, or_more=found == most, even=False)


@dataclass(frozen=True, slots=True)
class Point:
    """A variant of a job: samples per rank, tokens per sample, degree of data sharding, policy."""

    batch: int
    sequence: int
    shards: int
    policy: str


@dataclass(frozen=True, slots=True)
class Limits:
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


Ask = Callable[[Point], Estimate]


def by_policy(
    ask: Ask,
    at: Point,
    limits: Limits,
    capacity: int,
    known: Callable[[PolicyFit], None] = lambda _: None,
) -> tuple[tuple[PolicyFit, ...], tuple[str, ...]]:
    """The job, which is ``at``, and its largest batch under each policy, each told as it is
    ``known``; and which policies ``ask`` refuses as unsupported, with the reason. The job's own may
    not be one of them."""
    rows: list[PolicyFit] = []
    skipped: dict[str, list[str]] = {}  # policies by the reason
    for policy in limits.policies:
        here = replace(at, policy=policy)
        try:
            estimate = ask(here)
        except UnsupportedError as error:
            if policy == at.policy:
                raise
            skipped.setdefault(str(error).replace(f", got '{policy}'", ""), []).append(policy)
            continue
        sizes = _along(ask, here, "batch", limits.batch_step)
        most = (limits.batch_step, limits.batch_limit)
        batch = _largest(sizes, capacity, *most, at.batch, limits.steady)
        rows.append(PolicyFit(policy, estimate, batch))
        known(rows[-1])
    whys = (f"{', '.join(policies)}: {reason}" for reason, policies in skipped.items())
    return tuple(rows), tuple(whys)


def longest_sequence(ask: Ask, at: Point, limits: Limits, capacity: int) -> Largest | None:
    """Of the job as it is ``at``; None where it has none."""
    if not limits.sequence_limit:
        return None
    sizes = _along(ask, at, "sequence", limits.sequence_step)
    most = (limits.sequence_step, limits.sequence_limit)
    return _largest(sizes, capacity, *most, at.sequence, limits.steady)


def fewest_shards(ask: Ask, at: Point, limits: Limits, capacity: int) -> int | None:
    """Of the job as it is ``at``; 0 where no number of them is enough, None where they cannot be
    chosen."""
    step = limits.shard_step
    if limits.shard_limit < step:
        return None
    sizes = _along(ask, at, "shards", step)
    most, hint = limits.shard_limit // step, at.shards // step
    return step * smallest(lambda size: sizes(size).most_bytes, capacity, most, hint)


def _along(ask: Ask, at: Point, axis: str, step: int) -> Callable[[int], Estimate]:
    """What so many steps of an axis ask for."""

    def here(size: int) -> Estimate:
        keys: dict[str, Any] = {axis: size * step}
        return ask(replace(at, **keys))

    return here


def _largest(
    here: Callable[[int], Estimate], capacity: int, step: int, limit: int, hint: int, steady: bool
) -> Largest:
    """The largest multiple of ``step`` that fits; ``here`` takes how many steps. Sizes above one
    that ran do not run where it refuses them as unsupported."""
    most = max(limit // step, 1)
    ran: set[int] = set()
    refused: set[int] = set()

    def need(size: int) -> float:
        try:
            nbytes = here(size).most_bytes
        except UnsupportedError:
            # A size that is refused though none smaller has run is no limit of sizes: the job
            # itself is unsupported, and says why.
            if size < min(ran, default=math.inf):
                raise
            refused.add(size)
            return math.inf
        ran.add(size)
        return nbytes

    found = largest(need, capacity, most, hint // step, steady=steady)
    more = found.size + 1
    perhaps = not found.or_more and more not in refused and here(more).verdict == "perhaps"
    return msgspec.structs.replace(
        found,
        size=found.size * step,
        step=step,
        next_perhaps=perhaps,
        refused=more in refused,
    )
