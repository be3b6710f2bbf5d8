"""A plan has units in host memory where the job says so, or where nothing else fits."""

from __future__ import annotations

from typing import Any

import pytest
from plans import plan

from shardwright.core.errors import InputError, NoPlanError
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner import explain
from shardwright.planner.explain.recompute import draft_of

MIB = 2**20
UNITS = ("embed", "layers", "head")


def _job(offload: str, preset: str = "h100-8", memory: int = 2**30, **sections: Any) -> Job:
    cap = "ddr_cap" if preset == "local" else "hbm_cap"
    document = {
        "model": {"kind": "transformer", "layers": 4, "dim": 64, "heads": 4},
        "batch": {"size": 1, "sequence": 16},
        "cluster": {"preset": preset, "world_size": 2, cap: memory},
        "memory": {"param_dtype": "fp32", "offload": offload},
        "planner": {"dense": {"checkpointing": ["none"]}},
        "train": {"optimizer": "adamw"},
    }
    return parse_job({key: value | sections.get(key, {}) for key, value in document.items()})


def _offloaded(made: Plan) -> set[str]:
    return {unit.name for unit in made.units if unit.offloaded is True}


def _peak(made: Plan) -> int:
    return max(totals.peak_bytes for totals in made.ranks)


def test_an_accelerator_has_only_what_is_on_its_way() -> None:
    made = plan(_job("all"))
    assert _offloaded(made) == {unit.name for unit in made.units}
    numbers = sum(tensor.numel for tensor in made.model.tensors)
    for totals in made.ranks:
        assert "weight" not in totals.at_peak
        assert totals.at_peak.get("optimizer_state", 0) == 0
        counters = totals.ddr_bytes - 4 * 4 * numbers // 2  # weight, gradient, two states
        assert 0 <= counters < 64 * len(made.units)
        assert totals.hbm_bytes == totals.peak_bytes


def test_a_plan_takes_host_memory_where_nothing_else_fits() -> None:
    ample = plan(_job("auto"))
    assert not _offloaded(ample)
    away = plan(_job("all"))
    context = away.needed[0] - _peak(away)  # at least: all that fits here does so perhaps
    small = round(_peak(away) * 1.3) + context
    with pytest.raises(NoPlanError):
        plan(_job("none", memory=small))
    made, every = plan(_job("auto", memory=small)), plan(_job("all", memory=small))
    assert _offloaded(made)
    assert ample.max_rank_seconds < made.max_rank_seconds <= every.max_rank_seconds
    draft_of(made)  # comes out again


def test_host_memory_has_an_end() -> None:
    with pytest.raises(NoPlanError):
        plan(_job("all", cluster={"ddr_cap": MIB}))


def test_on_a_cpu_the_same_bytes_lie_in_the_same_memory_and_are_copied() -> None:
    sharded = {"planner": {"units": dict.fromkeys(UNITS, "shard")}}
    here, there = (plan(_job(way, "local", **sharded)) for way in ("none", "all"))
    exact = [[totals.exact for totals in made.ranks] for made in (here, there)]
    assert exact[0] == exact[1]
    assert there.max_rank_seconds > here.max_rank_seconds
    assert all(totals.hbm_bytes == 0 for totals in there.ranks)


def test_every_number_of_a_unit_in_host_memory_is_explained() -> None:
    made = plan(_job("all"))
    for unit in made.units:
        found = explain.explain_tensor(made, unit.name)
        assert any("host_link_rate" in str(each) for each in found)


def test_why_not_puts_one_unit_into_host_memory() -> None:
    made = plan(_job("none", planner={"units": dict.fromkeys(UNITS, "shard")}))
    why = explain.why_not(made, "head", "offloaded")
    assert why.verdict == "slower"
    assert "offloaded" in why.option
    again = plan(_job("all"))
    why = explain.why_not(again, "head", "offloaded")
    assert why.verdict == "chosen"


def test_replicas_stay_on_the_device() -> None:
    with pytest.raises(InputError, match=r"units\.head: expected 'shard', 'offload' or nothing"):
        plan(_job("all", planner={"units": {"head": "replicate"}}))
