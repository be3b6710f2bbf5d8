"""The fastest layout that fits: seconds and bytes held against those that `memory` says, the answer
against every layout worked out one by one.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from shardwright.core.advice import Advice, Layout
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.estimate.advise import advise, fewest_ranks, job_of
from shardwright.estimate.advise.pricing import Pricing
from shardwright.estimate.advise.space import Space, global_batch
from shardwright.estimate.unplanned import estimated, timed
from shardwright.job.exported import cannot, exported
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
        job = space.job_of(layout)
        found, told = estimated(job, spare=2**50), timed(job)
        assert told
        time = pricing.time(layout)
        # A whole row more or less of an expert that has few is drawn along.
        near = 10 * NEAR if name == "skewed" else NEAR
        assert time.seconds == pytest.approx(told.seconds, rel=near), layout.words
        assert pricing.least_seconds(layout) <= time.seconds * (1 + 1e-9), layout.words
        assert pricing.least_bytes(layout) <= found.worst.peak_bytes, layout.words
        assert time.model_flops == pytest.approx(told.model_flops, rel=near)


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


def test_where_nobody_names_an_engine_each_is_asked_and_the_fastest_answers() -> None:
    fixed = {"pipeline": "1", "context": "1", "checkpointing": "none", "micro_batch": "8"}
    job = job_with({"runtime": "shardwright"}, {"layers": 2})
    found = advise(job, fixed=fixed)
    # No configuration of TorchTitan has these widths: its place is that of a loop with FSDP2.
    assert {each.engine for each in found.engines} == {"shardwright", "fsdp2", "megatron"}
    seconds = []
    for each in found.engines:
        alone = advise(job, engine=each.engine, fixed=fixed)
        assert each.best == alone.answer
        assert each.layouts == alone.layouts
        assert alone.engines == ()
        seconds.append(each.best.time.seconds if each.best else 0.0)
    assert seconds == sorted(seconds)
    assert found.engine == found.engines[0].engine
    assert found.answer == found.engines[0].best
    assert advise(job_with({}, {"layers": 2}), fixed=fixed).engines == (), "the job names fsdp2"


def test_an_engine_that_does_not_run_the_job_is_told_with_what_it_lacks() -> None:
    fixed = {"pipeline": "1", "context": "1", "checkpointing": "none", "micro_batch": "1"}
    job = job_with({"runtime": "shardwright"}, {"layers": 2})
    found = advise(job, fixed=fixed | {"tensor": "1"})
    lacks = {each.engine: each.lacks for each in found.engines}
    assert "parallel.microbatches: expected None" in lacks.pop("shardwright")
    assert set(lacks.values()) == {""}
    assert found.engine in lacks


def test_no_two_layouts_are_the_same() -> None:
    job = job_with({"runtime": "shardwright"})
    layouts = list(space_of(job, micro_batch="1").layouts())
    whole = [each for each in layouts if each.data_shard == 1]
    assert {each.zero for each in whole} == {3, 2, 1}, "gradients of eight backwards add up"
    small = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=1))
    layouts = list(space_of(small).layouts())
    assert {each.zero for each in layouts if each.data_shard == 1} == {3}
    assert {each.zero for each in layouts if each.data_shard > 1} == {3, 2}
    # Eight layers: of stages with one or two of them no fourth is picked, and a half is one.
    space = space_of(job_with({"runtime": "megatron"}), tensor="1", context="1", micro_batch="1")
    policies = {(each.pipeline * each.chunks, each.checkpointing) for each in space.layouts()}
    usual = {"none", "core_attention", "full"}
    assert {name for stages, name in policies if stages == 8} >= usual
    assert {n for stages, n in policies if stages == 1} == usual | {"first:2", "first:4", "first:6"}
    assert not [n for _, n in policies if n in ("first:0", "first:8") or "%" in n]


def test_layers_that_are_checkpointed_first_are_written_for_megatron() -> None:
    fixed = {"checkpointing": "first:50%", "context": "1", "micro_batch": "1", "pipeline": "1"}
    job = job_with(hbm_cap="24 GiB")
    found = advise(job, engine="megatron", fixed=fixed)
    assert found.answer
    assert found.answer.layout.checkpointing == "first:4"
    text = exported(job_of(job, found.answer.layout, engine="megatron"), "megatron")
    assert "--recompute-method block" in text
    assert "--recompute-num-layers 4" in text


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
