"""What a study of embeddings found: quality by kind and seed, beside what each kind takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import read_document, write_document
from shardwright.core.kinds import EmbeddingsSection
from shardwright.core.measurement import Quality

SCHEMA = "shardwright.study/1"
Part = Literal["all", "often", "rarely"]
PARTS: tuple[Part, ...] = ("all", "often", "rarely")
LEARNED = 0.99  # of normalized entropy; what stays above has learned nothing


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training: quality on all held-out rows, on the quarter of them whose ids were seen most
    often in training, and on the one whose ids were seen least often."""

    seed: int
    quality: dict[Part, Quality]

    @property
    def learned(self) -> bool:
        """Whether rows are told apart at all: log loss is at least a hundredth below what always
        giving the share of clicks comes to. A network whose units are all off stays there."""
        entropy = self.quality["all"].normalized_entropy
        return entropy is None or entropy <= LEARNED


class Lookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rows for a batch of one id of every table take, forward: the median of ``calls``
    ``seconds`` of CPU time of one thread, operations of a sample, and parameters and bytes of
    tables of this size."""

    parameters: int
    nbytes: int
    flops: int
    seconds: float
    calls: int


class KindStudy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind: what it was made of, parameters and bytes of the tables that were trained, its
    ``lookup`` at the study's size, and a trial for each seed so far."""

    name: str
    section: EmbeddingsSection
    parameters: int
    nbytes: int
    lookup: Lookup
    trials: tuple[Trial, ...] = ()


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kinds of embeddings on the same data. ``rows`` of each table that lookups were timed for, if
    not those that were trained; ``seen`` is how often ids of these two quarters were
    seen in training, the geometric mean (of the count and one)."""

    schema: Literal["shardwright.study/1"]
    model: str
    world_size: int
    batch: int
    steps: int
    seeds: tuple[int, ...]
    kinds: tuple[KindStudy, ...]
    rows: int | UnsetType = UNSET
    seen: tuple[float, float] | UnsetType = UNSET
    versions: dict[str, str] = {}
    machine: dict[str, str] = {}

    @property
    def untaught(self) -> tuple[str, ...]:
        """Kind and seed of every trial that learned nothing, which is in no mean."""
        return tuple(
            f"{k.name}, seed {t.seed}" for k in self.kinds for t in k.trials if not t.learned
        )

    @property
    def trials(self) -> int:
        """How many were trained so far."""
        return sum(len(kind.trials) for kind in self.kinds)

    @property
    def left(self) -> int:
        """How many are still to be trained: 0 once every kind was with every seed."""
        return len(self.kinds) * len(self.seeds) - self.trials


class Spread(msgspec.Struct, frozen=True):
    """A figure over seeds with which something was learned: its mean, and its standard deviation, 0
    of one alone."""

    mean: float
    deviation: float


def spread_of(
    kind: KindStudy, part: Part, figure: Callable[[Quality], float | None]
) -> Spread | None:
    """A figure of a kind on a part of the held-out rows; None where no trial has it that learned
    anything."""
    found = [figure(t.quality[part]) for t in kind.trials if t.learned and part in t.quality]
    values = [value for value in found if value is not None]
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), deviation)


def any_quality(study: Study, part: Part = "all") -> Quality | None:
    """Some trial's quality on a part: the best possible and the labels are the same of all."""
    qualities = (t.quality.get(part) for kind in study.kinds for t in kind.trials)
    return next((quality for quality in qualities if quality), None)


def write_study(study: Study, path: Path) -> None:
    """Write ``study.json``."""
    write_document(study, path)


def read_study(path: Path) -> Study:
    """Read what ``write_study`` wrote."""
    return read_document(path, Study, SCHEMA, "PYTHONPATH=benchmarks python -m study")
