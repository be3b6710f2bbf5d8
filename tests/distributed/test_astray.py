"""What would be wrong in silence is caught, and what cannot be is refused in one line."""

from __future__ import annotations

import pytest
from astray_tasks import (
    begun_apart,
    branches,
    buffers_from_meta,
    called_late,
    clipped_over_two_meshes,
    frozen_by_the_group,
    left_out,
    looked_in_another_order,
    lost_in_a_call,
    refusals,
    replicas_diverge,
    saved_by_torch,
    seeded_apart,
    seen_in_a_forward,
    torchs_tensors,
    whole_state_of_tied,
)
from pool import Pool, Threads

STRATEGIES = ("flat", "per_param", "param_boundary")


@pytest.mark.parametrize(
    ("strategy", "orders"),
    [
        *(("flat", {0: [0], 1: [1]}), ("per_param", {0: [0, 1], 1: [1, 0]})),
        pytest.param("param_boundary", {0: [0], 1: [1]}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_run_other_units_are_noticed(
    pool: Pool, orders: dict[int, list[int]], strategy: str
) -> None:
    for error, unchanged in pool.run(2, branches, strategy=strategy, orders=orders):
        assert error.startswith(("MismatchError", "PeerError")), error
        assert unchanged


def test_ranks_that_looked_at_units_in_another_order_are_noticed_in_the_next_sum(
    pool: Pool,
) -> None:
    for error in pool.run(2, looked_in_another_order):
        assert error.startswith("MismatchError"), error


@pytest.mark.parametrize("what", ["backward", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_rank_that_goes_on_without_a_backward_is_told_so_and_no_process_ends(
    pool: Pool, what: str
) -> None:
    waiting, away = pool.run(2, left_out, what=what, ranks=[1])
    assert waiting.startswith("PeerError: 2 gather: expected all 2 ranks at collective ")
    assert "rank 1 at forward of unit 'Sequential', where the last one had no whole" in waiting
    assert away.startswith(
        "MismatchError: forward of unit 'Sequential' on rank 1: expected every rank to be here, "
        "got rank 0 at collective "
    )
    assert away.count("Let all ranks leave out a batch or none") == 1
    assert pool.run(2, left_out, what=what, ranks=[0, 1]) == ["accepted"] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_that_were_seeded_apart_begin_alike(pool: Pool, size: int) -> None:
    assert pool.run(size, seeded_apart, grid=False) == [0.0] * size


def test_replicas_of_shards_that_were_seeded_apart_begin_alike(pool: Pool) -> None:
    assert pool.run(4, seeded_apart, grid=True) == [0.0] * 4


@pytest.mark.parametrize("grid", [False, True])
def test_shards_of_weights_that_were_seeded_apart_are_said_to_be_once(
    threads: Threads, caplog: pytest.LogCaptureFixture, grid: bool
) -> None:
    threads.run(4 if grid else 2, begun_apart, grid=grid)
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if grid else [APART])


APART = (
    "fully_shard_flat: 1.weight: expected the same values on every rank, of which each keeps a "
    "part, got others on some. Call torch.manual_seed(N) before the model is built, or load its "
    "values after."
)


@pytest.mark.parametrize("way", ["left", "written", "replaced"])
def test_buffers_that_nobody_gave_values_after_to_empty_are_said_to_have_none(
    threads: Threads, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    threads.run(2, buffers_from_meta, way=way)
    said = [record.getMessage() for record in caplog.records]
    assert said == ([EMPTY] if way == "left" else [])


EMPTY = (
    "buffer angles of unit '0' and 1 more: expected values, got what to_empty left in memory. "
    "Give buffers their values after to_empty, as __init__ did, or build them on a real device: no "
    "state_dict has one that is not persistent."
)


def test_replicas_that_differ_later_are_refused(pool: Pool) -> None:
    for error in pool.run(2, replicas_diverge):
        assert "replicas of unit 'Linear': expected the same values on every rank" in error


REFUSALS = {
    "a lazy module": "1.weight: expected a parameter with a shape, got one of a lazy module",
    "two parameters over one memory": "1.weight of unit 'Sequential': expected memory of its own, "
    "or to be the same parameter, got memory of 0.weight in another parameter",
    "a parameter of another class": "weight: expected an nn.Parameter, got a Coded",
    "an expanded parameter": "bias: expected memory for each element, got an expanded tensor",
    "an embedding with max_norm": "forward of unit 'Embedding': expected one that only reads",
    "a codebook": "forward of unit '_Book': expected one that only reads",
    "a module pickled": "a pickle of unit 'Sequential': expected a module that is not sharded",
    "tensor parallel first": "weight: expected tensor parallelism on another dimension of the mesh",
    "training outside of the forward": "0.weight: expected a use that a sharded tensor has an "
    "answer to, got mm with a graph",
    "Adafactor over flat tensors": "the norm of a flat tensor",
    "Adafactor over replicated ones": "the norm of a flat tensor",
    "Muon over flat tensors": "2D",
    "half of a flat tensor frozen": "bias of unit '0': expected to be frozen or unfrozen with all",
    "a parameter in two flat tensors": "weight of unit '0': expected a parameter that no other "
    "flat tensor has",
}


@pytest.mark.parametrize("strategy", ["per_param", pytest.param("flat", marks=pytest.mark.slow)])
def test_what_cannot_be_is_refused_in_one_line(pool: Pool, strategy: str) -> None:
    for found in pool.run(2, refusals, strategy=strategy):
        assert found.keys() == REFUSALS.keys()
        for what, error in found.items():
            assert REFUSALS[what] in error, what
            assert "\n" not in error, what


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_set_on_a_parameter_is_seen_in_a_forward(pool: Pool, strategy: str) -> None:
    for found in pool.run(2, seen_in_a_forward, strategy=strategy):
        assert found == ["before", "after"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_goes_through_torch_save(pool: Pool, strategy: str) -> None:
    assert pool.run(2, saved_by_torch, strategy=strategy) == [(True, True)] * 2


def test_a_whole_state_has_the_names_of_the_model_in_order_and_tied_tensors_once(
    threads: Threads,
) -> None:
    for found, names, shared in threads.run(2, whole_state_of_tied):
        assert found == names
        assert {"0.weight", "3.weight"} in shared
        assert {"2.weight", "4.weight"} in shared
        assert len(shared) == len(names) - 2


@pytest.mark.slow
def test_one_norm_over_units_on_different_meshes(pool: Pool) -> None:
    for found, true in pool.run(4, clipped_over_two_meshes):
        assert found == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_by_a_function_are_frozen_and_unfrozen(pool: Pool, strategy: str) -> None:
    for moved in pool.run(2, frozen_by_the_group, strategy=strategy):
        assert moved["0.weight while frozen"] == moved["2.weight while frozen"] == 0.0
        assert moved["2.bias"] == 0.0
        assert min(moved["0.weight"], moved["2.weight"], moved["0.bias"]) > 0.05


def test_parameters_are_tensors_of_the_whole_shape(pool: Pool) -> None:
    assert pool.run(2, torchs_tensors) == [True] * 2


@pytest.mark.parametrize("call", ["sw.full_state_dict", "whole 0.weight"])
def test_a_call_for_whole_tensors_that_waits_says_for_whom_and_goes_on_when_they_come(
    pool: Pool, call: str
) -> None:
    (said, first), (_, other) = pool.run(2, called_late, call=call)
    assert first
    assert other
    assert said[0].startswith(f"{call}: waiting for ")
    assert " s for rank 1. Whole tensors are for all ranks at once: call sw.full_state" in said[0]


def test_a_call_for_whole_tensors_that_loses_a_rank_says_what_to_do(pool: Pool) -> None:
    for said in pool.run(2, lost_in_a_call):
        assert said.startswith("whole weight: expected all 2 ranks, got no sign of rank 1. Whole ")
        assert said.endswith("on every rank, then use what it gives on one.")
