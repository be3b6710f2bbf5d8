"""The fastest layout that fits: seconds and bytes held against those that `memory` says, the answer
against every layout worked out one by one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwright.core.advice import Advice, Layout
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.estimate.advise import advise, fewest_ranks, job_of
from shardwright.estimate.advise.pricing import Pricing
from shardwright.estimate.advise.space import Space, global_batch
from shardwright.estimate.unplanned import estimated
from shardwright.job.exported import cannot
from shardwright.job.job import Job, parse_job

WIDTHS = {
    "kind": "llama", "layers": 8, "dim": 2048, "heads": 16, "kv_heads": 8, "ffn_dim": 5632,
    "vocab": 32000,
}  # fmt: skip
EXPERTS = {
    "experts": 8, "experts_per_token": 2, "expert_ffn_dim": 1408, "moe_layers": list(range(8)),
}  # fmt: skip
NEAR = 3e-5  # larger microbatches are drawn by smaller ones


def job_with(
    memory: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **cluster: Any,
) -> Job:
    return parse_job(
        {
            "model": WIDTHS | (model or {}),
            "cluster": {"preset": "h100-8", "world_size": 8, **cluster},
            "batch": {"size": 8, "sequence": 4096},
            "parallel": parallel or {},
            "memory": {"runtime": "fsdp2", **(memory or {})},
        }
    )


def space_of(job: Job, world: int = 8, **fixed: str) -> Space:
    return Space(job, "", (world, 8), global_batch(job, world), fixed)


# Of [memory], [model], [parallel] and the axes that are fixed.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "fsdp2": ({}, {}, {}, {}),
    "megatron": ({"runtime": "megatron", "zero": 1}, {}, {}, {}),
    "ddp": ({"runtime": "ddp"}, {}, {}, {}),
    "the first layers": ({"runtime": "megatron"}, {}, {}, {"checkpointing": "first:2"}),
    "experts": ({}, EXPERTS, {}, {}),
    "tied": ({}, {"tied_embeddings": True}, {}, {}),
    "some experts": ({}, EXPERTS | {"moe_layers": [2, 3, 4, 5, 6, 7]}, {}, {}),
    "offloaded": ({"offload": "all"}, {}, {}, {}),
    "tokens undivided": ({}, {}, {"tensor": 2, "sequence": False}, {"pipeline": "1"}),
    "attention by operators": ({"attention": "eager"}, {}, {}, {"pipeline": "1"}),
    "skewed": ({}, EXPERTS, {"expert": 8, "routing": "skewed"}, {"pipeline": "1"}),
    "a pipeline's job": ({}, {}, {"pipeline": 2, "schedule": "gpipe"}, {"tensor": "1"}),
    "zbh1": ({}, {}, {}, {"schedule": "zbh1", "chunks": "1", "pipeline": "4"}),
    "zbv": ({}, {}, {}, {"schedule": "zbv", "chunks": "2", "pipeline": "4"}),
}


def hold_against_memory(name: str, count: int, seed: int) -> None:
    memory, model, parallel, fixed = CASES[name]
    space = space_of(job_with(memory, model, parallel), **fixed)
    pricing, draw = Pricing(space), random.Random(seed)
    layouts = list(space.layouts())
    for layout in draw.sample(layouts, min(count, len(layouts))):
        # Nobody asks for what an allocator holds, so that none is replayed.
        found = estimated(space.job_of(layout), spare=2**50)
        assert found.time
        time = pricing.time(layout)
        assert time.seconds == pytest.approx(found.time.seconds, rel=NEAR), layout.words
        assert pricing.least_seconds(layout) <= time.seconds * (1 + 1e-9), layout.words
        assert pricing.least_bytes(layout) <= found.worst.peak_bytes, layout.words
        assert time.model_flops == found.time.model_flops


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_priced_as_memory_says_and_bounded_below_it(name: str) -> None:
    hold_against_memory(name, 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_layouts_are_priced_as_memory_says(name: str) -> None:
    hold_against_memory(name, 14, 2)


def every_layout(job: Job, found: Advice, **fixed: str) -> list[tuple[float, str]]:
    """Seconds of the layouts that fit, each worked out by itself as `memory` does it."""
    space = space_of(job, found.world_size, **fixed)
    fits = []
    for layout in space.layouts():
        footprint = estimated(space.job_of(layout))
        if footprint.verdict == "fits":
            assert footprint.time
            fits.append((footprint.time.seconds, layout.words))
    return sorted(fits)


def test_no_layout_that_fits_is_faster_than_the_answer() -> None:
    job = job_with(hbm_cap="9 GiB", world_size=4)
    fixed = {"checkpointing": "none", "context": "1", "data_replicate": "1", "micro_batch": "1"}
    found = advise(job, fixed=fixed)
    best = every_layout(job, found, **fixed)
    assert 5 < len(best) < found.layouts, "some fit and some do not"
    assert found.answer
    assert found.proven
    assert found.answer.time.seconds == pytest.approx(best[0][0], rel=NEAR)
    assert [row.time.seconds for row in found.rows] == pytest.approx(
        [seconds for seconds, _ in best[: len(found.rows)]], rel=NEAR
    )


def test_what_is_faster_does_not_fit_for_sure() -> None:
    fixed = {"pipeline": "1", "context": "1", "tensor": "1"}
    found = advise(job_with(hbm_cap="9 GiB"), fixed=fixed)
    assert found.answer
    assert found.faster
    for each in found.faster:
        assert each.time.seconds < found.answer.time.seconds
        assert each.most_bytes > found.capacity
        assert each.verdict != "fits"
    assert found.exact + found.bounded <= found.layouts + len(found.faster)
    assert sum(point.verdict == "fits" for point in found.points) == len(found.rows)


def test_headroom_stays_free() -> None:
    fixed = {"pipeline": "1", "context": "1", "tensor": "1"}
    job, spare = job_with(hbm_cap="8 GiB"), 2 * 2**30
    with_it = advise(job, fixed=fixed, headroom=spare)
    assert with_it.answer
    assert with_it.answer.most_bytes + spare <= with_it.capacity
    without = advise(job, fixed=fixed)
    assert without.answer
    assert without.answer.most_bytes + spare > without.capacity, "what would have been taken"
    assert without.answer.time.seconds < with_it.answer.time.seconds


def test_measured_steps_scale_all() -> None:
    job, fixed = job_with(), {"pipeline": "1", "context": "1", "tensor": "1"}
    now = estimated(job).time
    assert now
    # Two runs whose scales are 2 and 4.5: what lies between them by their ratio.
    runs = [(job, 2 * now.seconds), (job, 4.5 * now.seconds)]
    found, scaled = advise(job, fixed=fixed), advise(job, fixed=fixed, measured=runs)
    for one, other in zip(found.rows, scaled.rows, strict=True):
        assert other.layout == one.layout
        assert other.time.seconds == pytest.approx(3 * one.time.seconds)
        assert sum(other.time.parts.values()) == pytest.approx(other.time.seconds)


def test_the_job_of_a_layout_asks_for_it() -> None:
    job = job_with()
    layout = Layout(2, 1, 2, 2, "interleaved_1f1b", 2, 1, 1, 0, 2, "full")
    found = job_of(job, layout)
    footprint = estimated(found)
    assert footprint.parallel == {
        "data_replicate": 2, "data_shard": 1, "tensor": 2, "pipeline": 2, "context": 1, "expert": 1,
    }  # fmt: skip
    assert found.batch.size == 64 // 2
    assert footprint.settings["checkpointing"] == "full"


@pytest.mark.parametrize("engine", ["megatron", "fsdp2", "accelerate"])
def test_an_engine_runs_what_is_advised_for_it(engine: str) -> None:
    fixed = {"context": "1", "micro_batch": "1"}
    job = job_with({"reduce_dtype": "bf16"} if engine == "accelerate" else {})
    found = advise(
        job, engine=engine, fixed=fixed | ({"tensor": "2"} if engine == "megatron" else {})
    )
    assert len(found.rows) > 1
    for row in found.rows:
        assert not cannot(job_of(job, row.layout, engine=engine), engine), row.layout.words
    if engine != "megatron":
        assert {row.layout.pipeline for row in found.rows} == {1}


def test_where_nothing_fits_the_nearest_and_more_ranks_are_told() -> None:
    job = job_with(hbm_cap="5 GiB", world_size=2)
    found = advise(job, fixed={"context": "1", "pipeline": "1", "micro_batch": "1"})
    assert not found.rows
    assert not found.proven
    assert found.nearest
    assert found.nearest.most_bytes > found.capacity
    assert found.fewest_ranks
    assert found.fewest_ranks > 2


def test_the_fewest_ranks_that_are_fast_enough() -> None:
    job, fixed = job_with(world_size=4), {"context": "1", "pipeline": "1", "tensor": "1"}
    here = advise(job, fixed=fixed)
    assert here.answer
    rate = here.answer.time.tokens_per_second
    most = fewest_ranks(job, lambda found: found.days(1) <= 1 / rate / 86_400 / 1.5, fixed=fixed)
    assert most
    assert most[1].world_size == 8
    assert most[1].global_batch == here.global_batch


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fixed": {"width": "3"}}, "--fix: expected one of tensor, "),
        ({"fixed": {"tensor": "x"}}, "--fix tensor: expected a whole number"),
        (
            {"fixed": {"tensor": "3"}},
            "advise: expected a layout of 64 samples on 8 ranks, tensor 3",
        ),
        ({"fixed": {"checkpointing": "some"}}, "--fix checkpointing"),
        ({"engine": "megatrom"}, "--engine: expected one of"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        advise(job_with(), **changes)


def test_a_machine_without_a_clock_is_refused() -> None:
    with pytest.raises(InputError, match="accelerator whose seconds are known"):
        advise(parse_job({"model": WIDTHS, "cluster": {"preset": "local"}}))


def test_a_model_of_tables_is_planned_instead() -> None:
    tables = [{"name": "a", "rows": 100, "dim": 8}]
    with pytest.raises(UnsupportedError, match="shardwright plan"):
        advise(parse_job({"tables": tables, "cluster": {"preset": "h100-8"}}))


def test_a_model_that_an_engine_lacks_is_refused_with_its_reasons() -> None:
    with pytest.raises(UnsupportedError, match="model"):
        advise(job_with(), engine="torchtitan", fixed={"pipeline": "1", "context": "1"})
