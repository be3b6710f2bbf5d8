"""Which runs a study of embeddings is made of, and what lookups take."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from study.lookups import LEAST, measure_lookups
from study.runs import study, variants_of
from study.section import section_of

from shardwright.core.errors import InputError
from shardwright.core.kinds import EmbeddingsSection, settled
from shardwright.core.model import TableSpec
from shardwright.job.job import Job, parse_job


def job(section: dict[str, Any] | None = None, **sections: Any) -> Job:
    tables = [{"name": "a", "rows": 1000, "dim": 8}, {"name": "b", "rows": 50, "dim": 8}]
    document = {
        "model": {"bottom": [8], "top": [4, 1]},
        "data": {"kind": "synthetic"},
        "tables": tables,
        "study": section or {},
    }
    return parse_job(document | sections)


def test_a_kind_is_that_of_large_tables_and_its_job_has_no_study() -> None:
    kinds = [{"kind": "full"}, {"kind": "qr", "collisions": 10}]
    made = job({"kinds": kinds, "rows": 5000})
    full, qr = variants_of(made, section_of(made))
    assert [table.kind for table in qr.job.tables] == ["qr", job().tables[1].kind]
    assert [table.rows for table in qr.job.tables] == [1000, 50]
    assert [table.rows for table in qr.sized] == [5000, 5000]
    assert [table.kind for table in qr.sized] == ["qr", "qr"]
    assert full.job.study != job().study
    assert parse_job_again(qr.job)


def parse_job_again(made: Job) -> bool:
    """Whether the job is what a file with these keys would be."""
    section = {"kind": "qr", "collisions": 10}
    tables = [{"name": "a", "rows": 1000, "dim": 8}, {"name": "b", "rows": 50, "dim": 8}]
    document = {
        "model": {"bottom": [8], "top": [4, 1]},
        "data": {"kind": "synthetic"},
        "tables": tables,
        "embeddings": section,
    }
    return parse_job(document) == made


@pytest.mark.parametrize(
    ("section", "sections", "words"),
    [
        ({"kinds": [{"kind": "full", "above": 1000}]}, {}, "tables of more than 1,000 rows"),
        ({"kinds": [{"kind": "robe", "block": 3}]}, {}, "study.kinds[0]: tables[0] 'a'.block"),
        ({}, {"data": {"kind": "synthetic", "test_rows": 0}}, "data.test_rows: expected rows"),
        ({}, {"data": {"kind": "criteo", "path": "no_such"}}, "data.test_path: expected rows"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    section: dict[str, Any], sections: dict[str, Any], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError) as caught:
        study(job(section, **sections), out, io.StringIO(), lambda found: None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_model_without_clicks_is_refused() -> None:
    transformer = parse_job({"model": {"kind": "transformer"}})
    with pytest.raises(InputError, match="expected 'dlrm', which learns from clicks"):
        variants_of(transformer, section_of(transformer))


def test_lookups_are_measured_side_by_side_and_threads_stay_as_they_were() -> None:
    bare = [TableSpec("a", 500, 8), TableSpec("b", 400, 4), TableSpec("c", 300, 8)]
    kinds = {
        name: settled(bare, EmbeddingsSection(kind=name))  # type: ignore[arg-type]
        for name in ("full", "qr", "tt")
    }
    threads = torch.get_num_threads()
    found = measure_lookups(kinds, 64, 1.1)
    assert torch.get_num_threads() == threads
    assert found["full"].parameters == 500 * 8 + 400 * 4 + 300 * 8
    assert found["full"].nbytes == 4 * found["full"].parameters
    assert found["qr"].parameters < found["full"].parameters
    assert found["tt"].flops > found["qr"].flops > found["full"].flops == 0
    for lookup in found.values():
        assert lookup.calls >= LEAST
        assert lookup.seconds > 0
    assert measure_lookups({}, 64, 1.1) == {}
