from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from study.found import (
    SCHEMA,
    KindStudy,
    Lookup,
    Study,
    Trial,
    any_quality,
    read_study,
    spread_of,
    write_study,
)
from study.section import kind_names, section_of

from shardwright.core.errors import InputError
from shardwright.core.kinds import EmbeddingsSection
from shardwright.core.measurement import Quality
from shardwright.job.job import Job, parse_job

LOOKUP = Lookup(parameters=80, nbytes=320, flops=0, seconds=1e-3, calls=30)


def kind(name: str, *aucs: float | None) -> KindStudy:
    trials = (Trial(s, {"all": Quality(10, auc, 0.5)}) for s, auc in enumerate(aucs))
    return KindStudy(name, EmbeddingsSection(), 40, 160, LOOKUP, tuple(trials))


def study(*kinds: KindStudy, seeds: int = 2) -> Study:
    return Study(SCHEMA, "dlrm", 2, 64, 10, tuple(range(seeds)), kinds)


def job(study: Any, **sections: Any) -> Job:
    tables = [{"name": "a", "rows": 1000, "dim": 8}]
    model = {"bottom": [8], "top": [4, 1]}
    return parse_job({"model": model, "tables": tables, "study": study} | sections)


def test_a_study_comes_back_from_its_file(tmp_path: Path) -> None:
    written = study(kind("full", 0.75, 0.8), kind("qr", 0.7))
    write_study(written, tmp_path / "study.json")
    assert read_study(tmp_path / "study.json") == written


def test_nothing_is_left_when_every_kind_has_every_seed() -> None:
    assert study(kind("full", 0.75, 0.8), kind("qr", 0.7)).left == 1
    assert study(kind("full", 0.75, 0.8), kind("qr", 0.7, 0.6)).left == 0


def test_a_figure_spreads_over_seeds_by_its_standard_deviation() -> None:
    found = spread_of(kind("full", 0.7, 0.8), "all", lambda q: q.auc)
    assert found is not None
    assert found.mean == pytest.approx(0.75)
    assert found.deviation == pytest.approx(math.sqrt(0.005))


def test_one_seed_has_no_spread_and_a_figure_that_no_trial_has_is_none() -> None:
    found = spread_of(kind("full", 0.7), "all", lambda q: q.auc)
    assert found is not None
    assert (found.mean, found.deviation) == (0.7, 0.0)
    assert spread_of(kind("full", None), "all", lambda q: q.auc) is None
    assert spread_of(kind("full", 0.7), "often", lambda q: q.auc) is None


def test_what_is_the_same_of_all_kinds_is_read_from_any() -> None:
    found = any_quality(study(kind("full"), kind("qr", 0.7)))
    assert found is not None
    assert found.auc == 0.7
    assert any_quality(study(kind("full"))) is None


def test_a_study_of_before_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    before, again = Path(__file__).with_name("study.json"), tmp_path / "study.json"
    write_study(read_study(before), again)
    assert again.read_bytes() == before.read_bytes()


def test_a_job_without_a_study_has_none_and_one_has_usual_kinds() -> None:
    assert parse_job({"tables": [{"name": "a", "rows": 9, "dim": 8}]}).study is UNSET
    section = section_of(job({}))
    assert kind_names(section) == ("full", "hash", "double_hash", "qr")
    assert section.seeds == 3


def test_kinds_of_one_name_are_told_apart_by_what_is_said_of_them() -> None:
    kinds = [
        {"kind": "full"},
        {"kind": "qr", "collisions": 10},
        {"kind": "qr", "collisions": 10, "operation": "add"},
    ]
    section = section_of(job({"kinds": kinds}))
    assert kind_names(section) == ("full", "qr collisions=10", "qr collisions=10 operation=add")


@pytest.mark.parametrize(
    ("section", "beside", "words"),
    [
        ({"kinds": []}, {}, "study.kinds: expected at least one kind"),
        ({"kinds": [{"kind": "qr"}, {"kind": "qr"}]}, {}, "study.kinds: expected kinds that dif"),
        ({"kinds": [{"rank": 3}]}, {}, "study.kinds[0].kind: expected the name of a kind"),
        ({"kinds": [{"kind": "full", "rank": 3}]}, {}, "study.kinds[0].rank: expected no such key"),
        ({"kinds": [{"kind": "fll"}]}, {}, "study.kinds[0].kind: expected one of full, hash"),
        ({"seeds": 0}, {}, "study.seeds: expected int >= 1"),
        ({"seed": 2}, {}, "unknown key 'study.seed'. Did you mean 'seeds'?"),
        ({}, {"embeddings": {"kind": "qr"}}, "study: expected none beside embeddings"),
        ({}, {"planner": {"kinds": ["full", "qr"]}}, "study: expected none beside planner.kinds"),
    ],
)
def test_a_study_that_compares_nothing_is_refused_by_its_key(
    section: Any, beside: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        section_of(job(section, **beside))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
