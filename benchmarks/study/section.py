"""What a study of embeddings compares: the ``[study]`` section of a job."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import convert
from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import EmbeddingsSection, check_kind
from shardwright.job.job import Job
from shardwright.job.train import Count

_USUAL = tuple(EmbeddingsSection(kind=kind) for kind in ("full", "hash", "double_hash", "qr"))


class StudySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a study trains and times.

    Attributes:
        kinds (full, hash, double_hash, qr): a list of what ``[embeddings]`` may have, each with its
            ``kind``
        seeds: trainings of each kind, with ``train.seed`` and the numbers after it
        rows (those of the tables): of every table for which lookups are timed and parameters
            counted once more
    """

    kinds: tuple[EmbeddingsSection, ...] = _USUAL
    seeds: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    rows: Count | UnsetType = UNSET


def kind_names(section: StudySection) -> tuple[str, ...]:
    """A name for each kind: its own, with what else is said of it where there are several such."""
    kinds = [each.kind for each in section.kinds]
    return tuple(
        str(each.kind) if kinds.count(each.kind) == 1 else " ".join(_words(each))
        for each in section.kinds
    )


def _words(section: EmbeddingsSection) -> list[str]:
    usual = EmbeddingsSection(kind=section.kind)
    keys = [key for key in section.__struct_fields__ if key != "kind"]
    given = {key: getattr(section, key) for key in keys}
    return [
        str(section.kind),
        *(f"{key}={value}" for key, value in given.items() if value != getattr(usual, key)),
    ]


def section_of(job: Job, where: str = "job") -> StudySection:
    """What a job says of its study; InputError for a key that there is not, and for kinds that
    nobody could compare."""
    section = convert({} if job.study is UNSET else job.study, StudySection, where, "study")
    for index, each in enumerate(section.kinds):
        spot = f"{where}: study.kinds[{index}]"
        if each.kind is UNSET:
            raise InputError(expected(f"{spot}.kind", "the name of a kind", "none"))
        check_kind(each, spot)
    names = kind_names(section)
    if not names or len(set(names)) != len(names):
        wanted = "at least one kind" if not names else "kinds that differ"
        raise InputError(expected(f"{where}: study.kinds", wanted, str(list(names))))
    return section
