"""How much memory a training step takes, rank by rank, before it is run; what a tracker saw; how
large a batch fits.

Ranks that hold and do the same are one class, so sixteen thousand of them are described by a few.
Every figure says how sure it is: ``exact`` is arithmetic or a trace, ``modelled`` rests on a model
of the device (what its kernels keep, how its allocator rounds), ``assumed`` on a constant that a
user may replace.
"""

# "Fits" is said here once, for plan, memory, fit and train: a plan that one command makes and the
# next refuses is worse than either. On accelerators what counts is what the allocator holds, not
# what lives, plus what is outside of it. Both are ranges: a job fits for sure if the most does,
# does not if the least does not, and between them the answer is perhaps.

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import Shown
from shardwright.core.quantities import counted, format_bytes
from shardwright.core.timeline import Kind

SCHEMA = "shardwright.memory/1"
TRACKED_SCHEMA = "shardwright.tracked/1"

Certainty = Literal["exact", "modelled", "assumed"]
Verdict = Literal["fits", "perhaps", "does not fit", "unknown"]


class Alive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of one name that are alive together; ``module`` is the module that made them."""

    name: str
    module: str
    kind: Kind
    bytes: int
    count: int = 1


class PhasePeak(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest total of a phase and what it is made of; ``at`` says where in the phase."""

    phase: str
    bytes: int
    by_category: dict[Kind, int]
    at: str = ""


class ModuleMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module, or ``count`` alike ones together: their parameters on this rank and what their
    forwards leave for their backwards, in bytes, and the most that was alive on the rank while one
    of them ran forward and backward."""

    name: str
    kind: str
    parameters: int
    saved: int
    forward_peak: int
    backward_peak: int
    count: int = 1


class Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of the device outside torch's allocator, as a range in bytes with its source."""

    name: str
    low: int
    high: int
    source: str


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A moment of a timeline: after ``name`` happened, live bytes in the order of
    :attr:`RankMemory.kinds`."""

    name: str
    phase: str
    bytes: tuple[int, ...]


# Of the classes some are followed in less detail than others: empty fields mean that nobody looked,
# not that there is nothing. Reports say which class was followed.
class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One class of ranks. ``coordinates`` are those of its first rank on the mesh; ``reserved`` is
    what the allocator holds at most (0 where it was not replayed), ``retries`` how often in two
    steps it first had to give cached memory back."""

    name: str
    ranks: int
    coordinates: dict[str, int]
    peak_bytes: int
    peak_phase: str
    by_category: dict[Kind, int]
    certainty: dict[Kind, Certainty]
    phases: tuple[PhasePeak, ...]
    modules: tuple[ModuleMemory, ...] = ()
    largest: tuple[Alive, ...] = ()
    reserved_bytes: int = 0
    retries: int = 0
    kinds: tuple[Kind, ...] = ()
    timeline: tuple[Sample, ...] = ()


DAY = 24 * 3600.0  # seconds


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step, with the range in which 80 of 100 runs are to lie, and ``parts`` that add
    up to them, of the rank of a pipeline that has most to do.

    A step has ``tokens`` on all ranks, or samples where those are ``counted``. The model takes
    ``model_flops`` (three times a forward's, two where weights are frozen, attention counted in
    full, nothing that is computed again); ``peak_flops`` are those of all devices in a second.
    ``source`` says what the constants rest on.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    tokens: int
    model_flops: int
    peak_flops: float
    devices: int
    source: str
    counted: Literal["tokens", "samples"] = "tokens"

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.seconds

    def days(self, tokens: float) -> float:
        """How long a training on so many tokens takes."""
        return tokens / self.tokens_per_second / DAY

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: what share of the devices' peak the model's own FLOPs are."""
        return self.model_flops / (self.seconds * self.peak_flops)


class Footprint(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every class of ranks of a job; the first is the one with the highest peak. ``source`` says
    whether it is of the job's plan, or why it is of none. So many of the parameters as are
    ``frozen``, where any are known to be, are not trained."""

    model: str
    parameters: int
    world_size: int
    parallel: dict[str, int]
    settings: dict[str, str]
    ranks: tuple[RankMemory, ...]
    capacity: int | None = None
    outside: tuple[Extra, ...] = ()
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0
    source: str = ""
    time: StepTime | UnsetType = UNSET
    frozen: int | UnsetType = UNSET
    schema: str = SCHEMA

    def __repr__(self) -> str:
        return (
            f"<Footprint of {self.model} on {counted(self.world_size, 'rank')}: "
            f"{format_bytes(self.worst.peak_bytes)} at the peak, {self.verdict}>"
        )

    @property
    def worst(self) -> RankMemory:
        """The class with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether every rank fits."""
        found = {self.verdict_of(rank) for rank in self.ranks}
        worst: tuple[Verdict, ...] = ("unknown", "does not fit", "perhaps")
        return next((verdict for verdict in worst if verdict in found), "fits")

    @property
    def fits(self) -> bool:
        """Whether every rank fits for sure."""
        return self.verdict == "fits"

    def verdict_of(self, rank: RankMemory) -> Verdict:
        """Whether ranks of a class fit."""
        return verdict_of(*self.needs(rank), self.capacity)

    def needs(self, rank: RankMemory) -> tuple[int, int]:
        """The least and the most bytes that a rank of a class takes of its device."""
        return needs_of(rank, self.ranks, self.outside)


def needs_of(
    rank: RankMemory, ranks: Sequence[RankMemory], outside: Sequence[Extra]
) -> tuple[int, int]:
    """The least and the most bytes that a rank of one of the classes takes of its device: its live
    bytes or what the allocator holds for them, and the range of what is outside. The allocator of a
    class that was not replayed is taken to hold as many times its peak as that of any other."""
    # An allocator is replayed for few classes of ranks, for it takes the longest. What it held for
    # them beyond their peak is the measure for the others: the worst, since a plan must fit
    # everywhere.
    replayed = [each for each in ranks if each.reserved_bytes]
    held = [rank] if rank in replayed else replayed
    holds = (rank.peak_bytes * each.reserved_bytes // each.peak_bytes for each in held)
    most = max(rank.peak_bytes, *holds, 0) + sum(e.high for e in outside)
    return rank.peak_bytes + sum(e.low for e in outside), most


def verdict_of(least: int, most: int, capacity: int | None) -> Verdict:
    """What "fits" means everywhere: all that a rank needs of its device at most is there.
    ``perhaps`` where it hangs on what is given as a range, what the allocator keeps and what else
    is on the device."""
    if capacity is None:
        return "unknown"
    if most <= capacity:
        return "fits"
    return "does not fit" if least > capacity else "perhaps"


State = Literal[
    "before pre-forward",
    "after pre-forward",
    "peak forward",
    "before post-forward",
    "after post-forward",
    "before pre-backward",
    "after pre-backward",
    "before recompute",
    "after recompute",
    "peak backward",
    "before post-backward",
    "after post-backward",
]
STATES: tuple[State, ...] = State.__args__  # type: ignore[attr-defined]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Live bytes at one moment of a module's step.

    ``pre`` and ``post`` are what hooks do around a forward or backward: where a unit of FSDP is
    gathered, freed and reduced. ``call`` counts the module's forwards of an iteration from 1, and
    its backwards have the number of their forward. A peak is the highest moment of all calls.
    """

    module: str
    state: State
    iteration: int
    call: int
    bytes: int
    by_category: dict[Kind, int]


class AllocatorMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the allocator of an accelerator said for the same time. ``before`` is what was active
    when tracking began; ``retries`` are allocations that first had to give cached memory back."""

    device: str
    before: int
    active_peak: int
    allocated_peak: int
    reserved_peak: int
    retries: int
    out_of_memory: int


class Tracked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was seen. ``iterations`` are the peaks of each, ``phases`` those over all of them;
    ``largest`` is what was alive at the peak."""

    model: str
    fake: bool
    peak: PhasePeak
    phases: tuple[PhasePeak, ...]
    iterations: tuple[PhasePeak, ...]
    modules: tuple[ModuleMemory, ...] = ()
    largest: tuple[Alive, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    device: AllocatorMemory | None = None
    schema: str = TRACKED_SCHEMA

    @property
    def accuracy(self) -> float | None:
        """The tracked peak over the device's active peak: near 1 is good, less means that a
        category is missing; None without a device."""
        if self.device is None or not self.device.active_peak:
            return None
        return self.peak.bytes / self.device.active_peak


FIT_SCHEMA = "shardwright.fit/1"


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a variant of a job asks of its fullest rank: live bytes at the peak, and the least and
    the most that it needs of its device; and how long a step takes, with the tokens of one device
    in a second and its MFU, where that is known."""

    peak_bytes: int
    peak_phase: str
    rank_class: str
    least_bytes: int
    most_bytes: int
    verdict: Verdict
    by_category: dict[Kind, int]
    step_seconds: float | UnsetType = UNSET
    device_tokens_per_second: float | UnsetType = UNSET
    mfu: float | UnsetType = UNSET


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
    """Something that was tried where not even the smallest batch fits, and what it came to; by how
    much ``longer`` a device takes for as many tokens, as a share, where seconds are known."""

    changes: tuple[str, ...]
    estimate: Estimate
    longer: float | UnsetType = UNSET


class Fit(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    reduce_dtype: str = ""
    time: StepTime | UnsetType = UNSET
    schema: str = FIT_SCHEMA

    def __repr__(self) -> str:
        return (
            f"<Fit of {self.model} on {counted(self.world_size, 'rank')}: batch {self.batch} "
            f"{self.own.estimate.verdict}, largest {self.own.largest_batch.size:,}>"
        )

    @property
    def own(self) -> PolicyFit:
        """The row of the job's own policy."""
        return next(row for row in self.policies if row.checkpointing == self.checkpointing)

    @property
    def fits(self) -> bool:
        """Whether the job as it is fits for sure."""
        return self.own.estimate.verdict == "fits"
