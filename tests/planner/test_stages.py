"""A plan takes the stage of ZeRO that is fastest among those that fit, and says what others do."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from plans import plan

from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.placement import Zero
from shardwright.estimate.recordings import found_for
from shardwright.job.job import Job, parse_job
from shardwright.planner import explain
from shardwright.planner.explain.recompute import draft_of
from shardwright.planner.search.watch import Watch
from shardwright.report.plan_sheets import checkpointing_line, speed_line

AMPLE = 2**30
SIZES = {"layers": 3, "dim": 32, "heads": 4, "ffn_dim": 64}
SHARED = {"units": dict.fromkeys(("embed", "layers", "head"), "shard")}


def _job(zero: Any, cap: int = AMPLE, planner: dict[str, Any] | None = None, **keys: Any) -> Job:
    document = {
        "model": {"kind": "transformer", **SIZES, **keys},
        "batch": {"size": 2, "sequence": 16},
        "cluster": {"preset": "local", "world_size": 2, "ddr_cap": cap},
        "planner": planner or {},
        "memory": {"param_dtype": "fp32", "zero": zero},
    }
    return parse_job(document)


def _alone(cap: int, planner: dict[str, Any], **keys: Any) -> dict[Zero, float | None]:
    """Seconds of the plan of each stage; None where none fits."""
    drafts = {
        zero: found_for(_job(zero, cap, planner, **keys), Watch()).draft for zero in get_args(Zero)
    }
    return {zero: draft and draft.max_rank_seconds for zero, draft in drafts.items()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(8))
def test_the_stage_is_the_fastest_of_those_that_fit(seed: int) -> None:
    draw = random.Random(seed)
    keys = {"layers": draw.randint(2, 4), "dim": 16 * draw.randint(1, 3)}
    planner = draw.choice([{}, SHARED])
    ample = plan(_job("auto", AMPLE, planner, **keys))
    peak = max(totals.peak_bytes for totals in ample.ranks)
    cap = round(peak * draw.uniform(0.5, 1.1))
    alone = _alone(cap, planner, **keys)
    fitting = [seconds for seconds in alone.values() if seconds is not None]
    if not fitting:
        with pytest.raises(NoPlanError):
            plan(_job("auto", cap, planner, **keys))
        return
    made = plan(_job("auto", cap, planner, **keys))
    assert made.max_rank_seconds == min(fitting)
    assert made.search.tried
    for zero, its in alone.items():
        rows = [row.max_rank_seconds for row in made.search.tried if row.zero == zero]
        best = min((seconds for seconds in rows if seconds is not None), default=None)
        assert best == its
    draft_of(made)  # every number comes out again


def test_whole_parameters_need_no_second_buffer_where_memory_is_short() -> None:
    kept = plan(_job(2, AMPLE, SHARED))
    cap = max(totals.peak_bytes for totals in kept.ranks)
    made = plan(_job("auto", cap, SHARED))
    assert {unit.roles.zero for unit in made.units} == {2}
    assert made.job.memory == _job(2).memory
    assert made.max_rank_seconds == kept.max_rank_seconds
    assert made.search.tried
    assert {row.zero for row in made.search.tried} == {1, 2, 3}
    assert checkpointing_line(made).startswith("By stage and checkpointing: ZeRO-3, none ")
    assert "no plan at this stage can take less than" in speed_line(made)


@pytest.mark.parametrize("wanted", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("zero", [2, 3])
def test_why_not_plans_another_stage_anew(zero: Zero, wanted: str) -> None:
    other: Any = int(wanted.removeprefix("zero"))
    made, asked = plan(_job(zero, AMPLE, SHARED)), plan(_job(other, AMPLE, SHARED))
    found = explain.why_not(made, "layers.0", wanted)
    if zero == other:
        assert found.verdict == "chosen"
        return
    assert found.verdict in ("as good", "slower", "faster")
    assert found.missing == 0
    assert found.replanned is not None
    assert found.replanned.seconds == asked.max_rank_seconds
    assert "all sharded units: sharded" in found.option


def test_why_not_tells_by_how_much_another_stage_does_not_fit() -> None:
    free: dict[str, Any] = {**SHARED, "dense": {"checkpointing": ["none"]}}
    dense = {**free["dense"], "reshard": True, "layers_per_unit": 1, "prefetch": 0}
    ample = plan(_job(3, AMPLE, {**SHARED, "dense": dense}))
    made = plan(_job(3, max(totals.peak_bytes for totals in ample.ranks), free))
    found = explain.why_not(made, "layers.0", "zero2")
    assert found.verdict == "does not fit"
    assert found.missing > 0


def test_a_unit_that_is_replicated_is_shared_at_a_stage() -> None:
    found = explain.why_not(plan(_job(3)), "layers.0", "zero3")
    assert found.chosen == "replicated"
    assert found.replanned is not None
    assert found.replanned.option == "sharded, kept"


def test_units_that_are_resharded_are_cut_in_every_role() -> None:
    resharded = {"dense": {"reshard": True}}
    assert plan(_job("auto", AMPLE, resharded)).units == plan(_job(3, AMPLE, resharded)).units
    with pytest.raises(InputError, match=r"reshard: expected false or nothing beside memory.zero"):
        plan(_job(2, AMPLE, resharded))


def test_a_stage_that_is_left_open_needs_a_plan() -> None:
    with pytest.raises(InputError, match=r"memory.zero: expected 1, 2 or 3 where no plan chooses"):
        _ = _job("auto").memory.stage  # type: ignore[union-attr]
    document = {
        "model": {"kind": "llama", "layers": 2, "dim": 64, "heads": 4},
        "batch": {"sequence": 64},
    }
    memory = {"runtime": "fsdp2", "zero": "auto"}
    with pytest.raises(InputError, match=r"memory.zero: expected a stage, or nothing, beside"):
        parse_job({**document, "memory": memory})
