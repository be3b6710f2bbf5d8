from __future__ import annotations

from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.job.job import parse_job
from shardwright.job.parallel import (
    Degrees,
    ParallelSection,
    degrees,
    expert_load,
    fixed_world,
    local_shape,
)

TABLE = {"name": "a", "rows": 10, "dim": 16}
SHAPE = LlamaShape(
    layers=4,
    dim=64,
    heads=8,
    kv_heads=4,
    head_dim=8,
    ffn_dim=96,
    vocab=128,
    experts=8,
    experts_per_token=2,
    expert_ffn_dim=48,
    moe_layers=(0, 1, 2, 3),
)


def _degrees(world_size: int, batch: int = 1, **section: Any) -> Degrees:
    return degrees(ParallelSection(**section), world_size, batch)


def _refused(world_size: int, batch: int = 1, **section: Any) -> str:
    with pytest.raises(InputError) as caught:
        _degrees(world_size, batch, **section)
    return str(caught.value)


def test_data_ranks_share_what_nothing_else_divides() -> None:
    found = _degrees(16384, tensor=8, pipeline=16, batch=16)
    assert (found.data_shard, found.shards, found.world_size) == (128, 128, 16384)


def test_context_ranks_share_parameters_too() -> None:
    found = _degrees(32, context=4, data_replicate=2)
    assert (found.data_shard, found.shards) == (4, 16)


def test_experts_are_shared_by_the_ranks_that_are_left_of_their_group() -> None:
    assert _degrees(32, tensor=2, expert=8).expert_shards == 4
    assert _degrees(32, tensor=2).expert_shards == 16


def test_sequence_parallelism_comes_with_tensor_parallelism() -> None:
    assert _degrees(8, tensor=2).sequence
    assert not _degrees(8, tensor=2, sequence=False).sequence
    assert not _degrees(8).sequence


def test_the_ranks_follow_from_the_degrees() -> None:
    assert fixed_world(ParallelSection(data_shard=4, tensor=2, data_replicate=3)) == 24
    assert fixed_world(ParallelSection(tensor=2)) is None


def test_a_pipeline_takes_one_sample_at_a_time_and_others_the_whole_batch() -> None:
    assert _degrees(4, batch=8, pipeline=4).microbatches == 8
    assert _degrees(4, batch=8).microbatches == 1
    assert _degrees(4, batch=8, pipeline=4, microbatches=2).microbatches == 2


def test_a_schedule_has_its_usual_chunks() -> None:
    assert _degrees(4, batch=8, pipeline=4).chunks == 1
    assert _degrees(4, batch=8, pipeline=4, schedule="interleaved_1f1b").chunks == 2
    assert _degrees(4, batch=8, pipeline=4, schedule="interleaved_1f1b", chunks=4).chunks == 4


@pytest.mark.parametrize(
    ("world_size", "section", "message"),
    [
        (
            12,
            {"tensor": 8},
            "job: cluster.world_size: expected a multiple of 8, which is data_replicate 1 x "
            "tensor 8 x pipeline 1 x context 1, got 12.",
        ),
        (
            16,
            {"tensor": 2, "data_shard": 4},
            "job: cluster.world_size: expected 8, which is data_shard 4 x data_replicate 1 x "
            "tensor 2 x pipeline 1 x context 1, got 16. Leave one of them out, or set "
            "data_shard = -1.",
        ),
        (
            8,
            {"data_shard": 0},
            "job: parallel.data_shard: expected at least 1, or -1 for all that is left, got 0.",
        ),
        (
            8,
            {"tensor": 2, "expert": 3},
            "job: parallel.expert: expected a divisor of 8, which is data_shard 4 x context 1 x "
            "tensor 2, got 3.",
        ),
        (
            8,
            {"microbatches": 3},
            "job: parallel.microbatches: expected a divisor of the 4 samples of a rank, "
            "batch.size, got 3.",
        ),
    ],
)
def test_degrees_that_do_not_multiply_are_named(
    world_size: int, section: dict[str, Any], message: str
) -> None:
    assert _refused(world_size, 4, **section) == message


@pytest.mark.parametrize(
    ("kind", "section", "message"),
    [
        ("tables", {}, "job: parallel: expected no such section for kind 'tables', got one."),
        (
            "transformer",
            {"tensor": 2},
            "job: parallel.tensor: expected 1 for kind 'transformer', got 2. A llama is divided "
            "by it, or a module of your own.",
        ),
        (
            "dlrm",
            {"parallelize_plan": {"top": "colwise"}},
            "job: parallel.parallelize_plan: expected no such key for kind 'dlrm', got one.",
        ),
        (
            "llama",
            {"sequence": True},
            "job: parallel.sequence: expected false where tensor is 1, got true.",
        ),
        (
            "llama",
            {"capacity_factor": 1.5},
            "job: parallel.capacity_factor: expected it only beside routing = 'capacity', got "
            "routing = 'even'.",
        ),
        ("llama", {"chunks": 2}, "job: parallel.chunks: expected 1 without a pipeline, got 2."),
        (
            "llama",
            {"pipeline": 2, "schedule": "2f2b"},
            "[parallel] schedule: expected one of gpipe, 1f1b",
        ),
    ],
)
def test_keys_that_say_nothing_are_refused(
    kind: str, section: dict[str, Any], message: str
) -> None:
    model = {"model": {"kind": kind}} if kind != "tables" else {}
    tables = {"tables": [TABLE]} if kind in ("dlrm", "tables") else {}
    with pytest.raises(InputError) as caught:
        parse_job({**model, **tables, "parallel": section})
    assert str(caught.value).startswith(message)


def test_skewed_routing_loads_one_rank_in_a_hundred_more() -> None:
    section = ParallelSection(expert=4, routing="skewed", skew=0.5)
    median, high = (expert_load(section, SHAPE.experts, quantile) for quantile in ("p50", "p99"))
    assert 0.9 < median < 1 < high < 3
    wide = ParallelSection(expert=2, routing="skewed", skew=0.5)
    assert expert_load(wide, SHAPE.experts, "p99") < high


def test_the_mean_of_skewed_loads_is_even() -> None:
    section = ParallelSection(expert=8, routing="skewed", skew=0.0)
    assert expert_load(section, SHAPE.experts, "p99") == 1.0


def test_a_section_gives_the_part_of_a_rank() -> None:
    section = ParallelSection(
        tensor=2, context=2, expert=4, pipeline=2, routing="capacity", capacity_factor=1.5
    )
    found = degrees(section, 16, 4)
    stage = LocalShape(layers=(0, 2), last=False, loss="parallel")
    local = local_shape(section, found, SHAPE, stage)
    assert (local.tensor, local.context, local.expert, local.sequence_parallel) == (2, 2, 4, True)
    assert (local.layers, local.first, local.last) == ((0, 2), True, False)
    assert (local.capacity_factor, local.expert_load, local.loss) == (1.5, 1.0, "parallel")


def test_a_model_that_the_degrees_do_not_divide_is_refused() -> None:
    section = ParallelSection(tensor=16)
    with pytest.raises(InputError, match=r"job: parallel\.tensor: expected a divisor of the 8"):
        local_shape(section, degrees(section, 16), SHAPE, LocalShape())
