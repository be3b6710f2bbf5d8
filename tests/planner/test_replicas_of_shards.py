"""Plans on several hosts may share units within each of them, or over them too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from plans import plan

from shardwright.core.block import check_tiling
from shardwright.core.errors import InputError, NoPlanError
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner import explain
from shardwright.planner.explain.recompute import draft_of
from shardwright.report.plan_sheets import checkpointing_line

SHARED = {"units": dict.fromkeys(("embed", "layers", "head"), "shard")}
# Whole parameters that go after a forward are gathered twice.
FREED = {**SHARED, "dense": {"reshard": True, "checkpointing": ["none"]}}
ROOM = 2**32  # in which a further communicator is little


def _job(
    zero: Any,
    memory: int = 2**30,
    ranks: int = 32,
    units: dict[str, Any] = SHARED,
    widths: Mapping[str, Any] = MappingProxyType({}),
    **parallel: int,
) -> Job:
    return parse_job(
        {
            "model": {"kind": "transformer", "layers": 8, "dim": 256, "heads": 4, **widths},
            "batch": {"size": 4, "sequence": 64},
            "cluster": {"preset": "h100-8", "world_size": ranks, "hbm_cap": memory},
            "memory": {"param_dtype": "fp32", "zero": zero},
            "parallel": parallel,
            "planner": {"dense": {"checkpointing": ["none"]}, **units},
            "train": {"optimizer": "adamw"},
        }
    )


def _peak(made: Plan) -> int:
    return max(totals.peak_bytes for totals in made.ranks)


def test_hosts_share_units_where_memory_is_there_and_states_over_hosts_where_it_is_not() -> None:
    """Ranks of one host alone gather both times."""
    everywhere, within, twice = (
        plan(_job(3, units=FREED)),
        plan(_job(3, units=FREED, data_replicate=4)),
        plan(_job([2, 3], units=FREED, data_replicate=4)),
    )
    assert within.max_rank_seconds < everywhere.max_rank_seconds
    assert within.max_rank_seconds < twice.max_rank_seconds
    assert _peak(everywhere) < _peak(twice) < _peak(within)


def test_a_plan_takes_replicas_where_that_is_fastest_and_fits() -> None:
    made, everywhere = (plan(_job(zero, ROOM, units=FREED)) for zero in ("auto", 3))
    assert (made.grid.replicas, made.grid.twice) == (4, False)
    assert made.max_rank_seconds < everywhere.max_rank_seconds
    assert "HSDP, none" in checkpointing_line(made)
    assert "HFSDP, none" in checkpointing_line(made)
    draft_of(made)  # comes out again


def test_one_host_is_not_cut() -> None:
    assert plan(_job("auto", ranks=8)).grid.replicas == 1


@pytest.mark.parametrize("zero", [3, 2, 1, [2, 3]])
def test_every_number_of_a_unit_is_derived(zero: Any) -> None:
    made = plan(_job(zero, ranks=16, data_replicate=2))
    found = [each for unit in made.units for each in explain.explain_tensor(made, unit.name)]
    assert found
    blocks = made.expanded()
    check_tiling(blocks, made.model.tensors, 16)
    largest = max(made.model.tensors, key=lambda tensor: tensor.numel).fqn
    states = [b for b in blocks if (b.tensor, b.role) == (largest, "optimizer_state")]
    copies = len(states) / len({b.offsets for b in states})
    assert copies == (1 if zero == [2, 3] else 2)


@pytest.mark.parametrize(("wanted", "zero"), [("hsdp", "3"), ("hfsdp", "[2, 3]")])
def test_why_not_says_what_to_write(wanted: str, zero: str) -> None:
    answer = explain.why_not(plan(_job(3)), "head", wanted)
    assert answer.replanned is not None
    assert answer.replanned.option.endswith(wanted)
    assert answer.option.startswith("all sharded units: ")
    tight = explain.why_not(plan(_job(3, ROOM, units=FREED)), "layers.0", wanted)
    assert tight.replanned is not None
    key = f"memory.zero = {zero} and parallel.data_replicate = 4, which is of all units"
    assert (key in tight.replanned.reason) == ("faster" in tight.replanned.reason)
    assert ("faster" in tight.replanned.reason) == (wanted == "hsdp")


def test_a_pair_of_stages_needs_replicas() -> None:
    with pytest.raises(InputError, match=r"memory\.zero: expected one stage, or a pair beside"):
        _job([2, 3])


def test_what_does_not_fit_is_said_to_fit_with_fewer_replicas_or_in_host_memory() -> None:
    least = {"layers_per_unit": 1, "prefetch": 0, "reshard": True, "checkpointing": ["none"]}
    frugal = {**SHARED, "dense": least}
    how: Any = {"units": frugal, "widths": {"dim": 2048, "layers": 24}}
    _, most = plan(_job(3, 2**40, **how)).needed
    least, _ = plan(_job(3, 2**40, **how, data_replicate=4)).needed
    assert most < least
    with pytest.raises(NoPlanError) as refused:
        plan(_job(3, (most + least) // 2, **how, data_replicate=4))
    assert "parallel.data_replicate = 1 fits" in str(refused.value)
    assert "memory.offload = 'auto' fits" in str(refused.value)
