"""The orders are those that torch.distributed.pipelining runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from shardwright.job.pipelining import order, stage_of

KIND = {
    "F": "forward",
    "B": "backward",
    "I": "input_backward",
    "W": "weight_backward",
}
SIZES = [(1, 1), (1, 3), (2, 2), (2, 4), (3, 3), (4, 4), (4, 8), (4, 10), (5, 20), (8, 16)]


class _Recorder:
    """Stands where torch's pipeline stage would and writes down what is asked of it."""

    def __init__(self, rank: int) -> None:
        self.stage_index = rank
        self.ran: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.ran.append(("forward", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.ran.append(("backward", self.stage_index, microbatch))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: []  # the operations of a send or a receive: none


def _executed(cls: type, rank: int, stages: int, microbatches: int) -> list[tuple[str, int, int]]:
    """What a schedule of one stage per rank does when it is stepped."""
    schedule = object.__new__(cls)
    stage = _Recorder(rank)
    inputs = ([()] * microbatches, [{}] * microbatches)
    vars(schedule).update(
        _stage=stage,
        _num_stages=stages,
        _n_microbatches=microbatches,
        _has_backward=True,
        _stage_initialized=True,
        _stage_forward_initialized=True,
        _stage_backward_initialized=True,
        scale_grads=True,
        _check_inputs=lambda *a: inputs,
        _initialize_stage=lambda *a: None,
        _maybe_compute_loss=lambda *a: None,
        _maybe_get_loss=lambda *a: None,
        _update_losses=lambda *a: None,
    )
    schedule._step_microbatches()
    return stage.ran


def _table(
    cls: type, rank: int, stages: int, microbatches: int, chunks: int
) -> list[tuple[str, int, int]]:
    """The compute actions that a schedule of several stages per rank writes down for a rank."""
    schedule = object.__new__(cls)
    rounds = max(1, microbatches // stages)
    vars(schedule).update(
        _stages=[None] * chunks,
        _n_microbatches=microbatches,
        pp_group_size=stages,
        n_local_stages=chunks,
        num_stages=stages * chunks,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    actions = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
    single = [each for a in actions for each in (a.sub_actions or (a,))]
    return [(KIND[a.computation_type.value], a.stage_index, a.microbatch_index) for a in single]


def _ours(
    schedule: str, rank: int, stages: int, microbatches: int, chunks: int
) -> list[tuple[str, int, int]]:
    passes = order(schedule, stages, microbatches, chunks)[rank]
    return [(p.kind, stage_of(schedule, stages, rank, p.chunk), p.microbatch) for p in passes]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_schedule_of_one_chunk_is_what_torch_runs(
    schedule: str, stages: int, microbatches: int
) -> None:
    cls = torch_schedules.get_schedule_class(schedule)
    for rank in range(stages):
        executed = _executed(cls, rank, stages, microbatches)
        assert _ours(schedule, rank, stages, microbatches, 1) == executed


@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (4, 2), (4, 3)])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"])
def test_a_schedule_of_several_chunks_is_torchs_table(
    schedule: str, chunks: int, stages: int, microbatches: int
) -> None:
    cls = torch_schedules.get_schedule_class(schedule.replace("_", ""))
    for rank in range(stages):
        table = _table(cls, rank, stages, microbatches, chunks)
        assert _ours(schedule, rank, stages, microbatches, chunks) == table


@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (4, 2), (4, 7)])
def test_zero_bubble_h1_is_torchs_zero_bubble_with_one_chunk(
    stages: int, microbatches: int
) -> None:
    if microbatches % max(1, microbatches // stages):
        microbatches -= microbatches % stages
    cls = torch_schedules.ScheduleInterleavedZeroBubble
    for rank in range(stages):
        table = _table(cls, rank, stages, microbatches, 1)
        assert _ours("zbh1", rank, stages, microbatches, 1) == table


@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (4, 1), (4, 5), (6, 13)])
def test_zero_bubble_v_is_torchs_table(stages: int, microbatches: int) -> None:
    cls = torch_schedules.ScheduleZBVZeroBubble
    for rank in range(stages):
        table = _table(cls, rank, stages, microbatches, 2)
        assert _ours("zbv", rank, stages, microbatches, 2) == table


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (3, 9), (4, 8), (5, 17)])
def test_dual_pipe_v_is_torchs_table(stages: int, microbatches: int) -> None:
    cls = torch_schedules.ScheduleDualPipeV
    for rank in range(stages):
        table = _table(cls, rank, stages, microbatches, 2)
        assert _ours("dualpipev", rank, stages, microbatches, 2) == table
