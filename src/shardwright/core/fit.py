"""What of a job fits: largest batch, longest sequence, fewest ranks, by checkpointing."""

from __future__ import annotations

import msgspec

from shardwright.core.footprint import Verdict
from shardwright.core.timeline import Kind

SCHEMA = "shardwright.fit/1"


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a variant of a job asks of its fullest rank: live bytes at the peak, and the least and
    the most that it needs of its device."""

    peak_bytes: int
    peak_phase: str
    rank_class: str
    least_bytes: int
    most_bytes: int
    verdict: Verdict
    by_category: dict[Kind, int]


class Largest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest size that fits, 0 where the smallest does not. ``or_more``: it is also the
    largest that was asked for; ``next_perhaps``: one ``step`` more hangs on what is given as a
    range. Sizes between two multiples of ``step`` were not looked at. ``even`` is false where a
    larger size was seen to need less; ``refused``: with one ``step`` more the model does not
    run."""

    size: int
    step: int = 1
    or_more: bool = False
    next_perhaps: bool = False
    even: bool = True
    refused: bool = False


class PolicyFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpointing policy: the job as it is under it, and how many samples per rank fit then."""

    checkpointing: str
    estimate: Estimate
    largest_batch: Largest


class Remedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that was tried where not even the smallest batch fits, and what it came to."""

    changes: tuple[str, ...]
    estimate: Estimate


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All answers, and what they are about. ``checkpointing`` is the job's own policy, which the
    sequence, the ranks and the remedies keep unless they say otherwise; ``skipped`` are policies
    that this model or runtime does not have, ``dtype`` is what it computes in."""

    model: str
    capacity: int
    batch: int
    sequence: int
    world_size: int
    checkpointing: str
    policies: tuple[PolicyFit, ...]
    longest_sequence: Largest | None = None
    fewest_ranks: int | None = None
    remedies: tuple[Remedy, ...] = ()
    skipped: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    estimates: int = 0
    seconds: float = 0.0
    dtype: str = ""
    schema: str = SCHEMA

    @property
    def own(self) -> PolicyFit:
        """The row of the job's own policy."""
        return next(row for row in self.policies if row.checkpointing == self.checkpointing)
