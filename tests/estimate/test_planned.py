"""The memory of a job that is planned is that of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.core.footprint import Footprint
from shardwright.core.timeline import decode, phase_peaks
from shardwright.estimate.footprint import footprint
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job, read_job
from shardwright.job.plan import Plan

ROOT = Path(__file__).parents[2]
EXAMPLES = (
    "demo",
    "transformer",
    "llama_tiny",
    "llama_experts",
    "own_model",
    "vision",
    "recommender",
)
LLAMA: dict[str, Any] = {
    "model": {"kind": "llama", "layers": 3, "dim": 64, "heads": 4, "vocab": 512},
    "cluster": {"preset": "h100-8", "world_size": 4},
    "batch": {"size": 2, "sequence": 64},
    "memory": {"param_dtype": "bf16"},
}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def example(name: str, *overrides: str) -> Job:
    return read_job(ROOT / "examples" / f"{name}.toml", overrides)


def llama(**sections: dict[str, Any]) -> Job:
    return parse_job({k: LLAMA.get(k, {}) | sections.get(k, {}) for k in {**LLAMA, **sections}})


def by_rank(found: Footprint, made: Plan) -> None:
    """Every rank is in one class, whose peaks are those of the plan to the byte."""
    peaks: dict[int, dict[str, dict[str, int]]] = {}
    for (rank, phase), kinds in phase_peaks(decode(made.timeline)).items():
        peaks.setdefault(rank, {})[phase] = kinds
    assert sum(each.ranks for each in found.ranks) == len(made.ranks)
    for each in found.ranks:
        first = made.ranks[each.coordinates["rank"]]
        assert (each.peak_bytes, each.peak_phase) == (first.peak_bytes, first.peak_phase)
        assert each.by_category == first.at_peak
        assert {p.phase: p.by_category for p in each.phases} == peaks[first.rank]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_rank_has_the_peaks_of_the_plan_to_the_byte(name: str, world_size: int) -> None:
    roomy = ("cluster.ddr_cap=80 MiB",) if world_size == 1 else ()
    job = example(name, f"cluster.world_size={world_size}", *roomy)
    by_rank(footprint(job), plan(job))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["demo", "llama_tiny"])
def test_the_class_with_the_highest_peak_is_followed_event_by_event(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.heap.classes.LARGEST", 10_000)
    worst = footprint(example(name), details=True).worst
    assert sum(alive.bytes for alive in worst.largest) == worst.peak_bytes
    kept = {alive.module for alive in worst.largest if alive.name == "weight"}
    assert {"demo": "tables.C3", "llama_tiny": "tok_embeddings"}[name] in kept
    assert max(sum(sample.bytes) for sample in worst.timeline) == worst.peak_bytes
    root = next(module for module in worst.modules if not module.name)
    assert root.parameters == pytest.approx(worst.by_category["weight"], rel=1e-3)  # but alignment


@pytest.mark.slow
def test_tables_are_modules_of_the_ranks_that_hold_them() -> None:
    held = []
    for rank in ("rank 0", "rank 1"):
        found = footprint(example("demo"), details=True, rank=rank)
        (asked,) = (each for each in found.ranks if each.name == rank)
        held.append({module.name: module.parameters for module in asked.modules})
    (of_c3,) = {each["tables.C3"] for each in held}  # cut by rows between the two
    assert 2 * of_c3 == 500_000 * 16 * 4
    assert ("tables.C16" in held[0]) != ("tables.C16" in held[1])  # on one of them


def test_on_an_accelerator_the_allocator_and_what_is_outside_are_added() -> None:
    found = footprint(llama())
    assert found.worst.reserved_bytes >= found.worst.peak_bytes
    assert [extra.name for extra in found.outside] == ["CUDA context", "1 communicator"]
    assert {found.worst.certainty[kind] for kind in ("weight", "activation")} == {
        "exact",
        "modelled",
    }


def test_a_plan_with_more_shards_is_told_by_its_own_sharding() -> None:
    sharded = llama(planner={"units": {"layers": "shard"}})
    replicated = llama(planner={"units": {"layers": "replicate"}})
    for job in (sharded, replicated):
        by_rank(footprint(job), plan(job))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"memory": {"runtime": "fsdp2"}}, "memory.runtime = 'fsdp2'"),
        ({"memory": {"compile": True}}, "memory.compile = True"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor = 2"),
        ({"train": {"optimizer": "adamw_bf16"}}, "train.optimizer = 'adamw_bf16'"),
        ({"cluster": {"world_size": 32768}}, "cluster.world_size = 32768"),
    ],
)
def test_a_job_that_no_plan_follows_is_estimated_and_says_why(
    sections: dict[str, Any], key: str
) -> None:
    assert (
        footprint(llama(**sections)).source == f"Estimated without a plan, for none follows {key}."
    )


def test_where_no_plan_fits_it_is_shown_what_asks_least() -> None:
    found = footprint(example("demo", "cluster.ddr_cap=8 MiB"))
    assert found.verdict == "does not fit"
    assert found.worst.peak_bytes > 8 * 2**20
    assert found.source.startswith("No plan was found that fits")


@pytest.mark.slow
def test_the_search_of_a_plan_is_heard_and_one_that_was_stopped_is_not_called_its_plan() -> None:
    job = example("demo")
    assert "searched" not in footprint(job, hear=lambda watch: None).source
    stopped = footprint(job, hear=lambda watch: watch.stop() if watch.best else None)
    assert stopped.source.endswith("Not searched to its end: the search, which was stopped.")


def test_tables_alone_are_held_against_what_the_reservation_leaves() -> None:
    job = parse_job(
        {
            "tables": [{"name": "t", "rows": 1000, "dim": 8}],
            "cluster": {"preset": "h100-8", "hbm_cap": 2**30},
            "planner": {"reservation": {"kind": "percentage", "percentage": 0.25}},
        }
    )
    found = footprint(job)
    assert found.capacity == plan(job).reserved.hbm_left == 3 * 2**28
    assert found.source.endswith("what the reservation leaves of 1.00 GiB.")
