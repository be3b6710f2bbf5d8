"""A plan takes the buckets that are fastest among those that fit, and says what others do."""

from __future__ import annotations

from typing import Any

import pytest
from plans import plan

from shardwright.core.errors import InputError, NoPlanError
from shardwright.estimate.recordings import found_for
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner import explain
from shardwright.planner.explain.basis import basis
from shardwright.planner.explain.recompute import draft_of
from shardwright.planner.planner import bucket_sizes_of
from shardwright.planner.search.watch import Watch
from shardwright.report.plan_sheets import checkpointing_line

AMPLE = 2**30


def _job(size: Any, zero: Any = 2, cap: int = AMPLE, **dense: Any) -> Job:
    given = {} if size is None else {"bucket_size": size}
    document = {
        "model": {"kind": "transformer", "layers": 3, "dim": 32, "heads": 4, "ffn_dim": 64},
        "batch": {"size": 2, "sequence": 16},
        "cluster": {"preset": "local", "world_size": 2, "ddr_cap": cap},
        "planner": {"dense": {**given, **dense}},
        "memory": {"param_dtype": "fp32", "zero": zero},
    }
    return parse_job(document)


def _elements(made: Plan) -> int:
    return sum(tensor.numel for tensor in made.model.tensors)


def _peak(made: Plan) -> int:
    return max(totals.peak_bytes for totals in made.ranks)


@pytest.mark.parametrize("share", [2.0, 0.85, 0.75])
@pytest.mark.parametrize("zero", [2, "auto"])
def test_the_buckets_are_those_that_are_fastest_and_fit(zero: Any, share: float) -> None:
    ample = plan(_job(None))
    job = _job("auto", zero, round(_peak(ample) * share))
    sizes = bucket_sizes_of(job, _elements(ample))
    assert sizes[0] == 0
    assert len(sizes) == 7
    drafts = [
        found_for(_job(size or None, stage, round(_peak(ample) * share)), Watch()).draft
        for stage in ((zero,) if zero != "auto" else (3, 2, 1))
        for size in (sizes if stage != 3 else (0,))
    ]
    alone = [draft.max_rank_seconds for draft in drafts if draft is not None]
    if not alone:
        with pytest.raises(NoPlanError):
            plan(job)
        return
    made = plan(job)
    assert made.max_rank_seconds == min(alone)
    assert made.model.bucket_size == (made.job.planner.dense.bucket_size or 0)
    draft_of(made)  # every number comes out again


def test_what_was_tried_is_told() -> None:
    made = plan(_job("auto"))
    assert made.search.tried
    assert len({row.bucket_size for row in made.search.tried}) == 7
    told = checkpointing_line(made)
    assert told.startswith("By stage, elements of a bucket and checkpointing: ZeRO-2, none ")
    assert f"; ZeRO-2, buckets of {_elements(made):,}, none " in told
    origins = {fact.what: (fact.value, fact.origin) for fact in basis(made)}
    assert origins["units"] == (
        f"1 bucket of {_elements(made):,} elements, as their gradients come",
        "planner.dense.bucket_size not given: the fastest that fits",
    )


def test_a_size_that_is_given_is_told_as_given() -> None:
    made = plan(_job(5_000))
    facts = {fact.what: (fact.value, fact.origin) for fact in basis(made)}
    told = f"{len(made.units)} buckets of 5,000 elements, as their gradients come"
    assert facts["units"] == (told, "planner.dense.bucket_size")
    assert all(unit.modules == ("",) for unit in made.units)
    assert sum(len(unit.tensors) for unit in made.units) == len(made.model.tensors)


def test_smaller_buckets_take_less_and_more_calls() -> None:
    rows = [plan(_job(size)) for size in (10**6, 10_000, 2_000)]
    assert [_peak(made) for made in rows] == sorted(map(_peak, rows), reverse=True)
    calls = [sum(unit.collectives for unit in made.units) for made in rows]
    assert calls == sorted(calls)
    assert calls[0] == 2


@pytest.mark.parametrize("size", [5_000, "auto"])
def test_where_parameters_do_not_stay_whole_there_are_none(size: Any) -> None:
    told = r"bucket_size: expected nothing beside memory.zero = 3, got .*\. Name 1 or 2"
    with pytest.raises(InputError, match=told):
        plan(_job(size, 3))


def test_layers_share_no_bucket_by_number() -> None:
    told = "bucket_size: expected nothing beside planner.dense.layers_per_unit, got 5000"
    with pytest.raises(InputError, match=told):
        plan(_job(5_000, layers_per_unit=2))


@pytest.mark.parametrize("wanted", ["zero1", "zero2"])
def test_why_not_keeps_buckets_at_another_stage(wanted: str) -> None:
    made, asked = plan(_job(5_000, 3 - int(wanted[-1]))), plan(_job(5_000, int(wanted[-1])))
    found = explain.why_not(made, "bucket-0", wanted)
    assert found.verdict in ("as good", "slower", "faster")
    assert found.replanned is not None
    assert found.replanned.seconds == asked.max_rank_seconds


def test_why_not_tells_that_stage_3_has_none() -> None:
    found = explain.why_not(plan(_job(5_000)), "bucket-0", "zero3")
    assert found.verdict == "impossible"
    assert "planner.dense.bucket_size: expected a stage that keeps parameters whole" in found.reason
