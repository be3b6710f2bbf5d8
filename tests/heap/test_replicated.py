"""Data parallel with whole parameters, on a symbolic heap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwright.core.tensor import TensorSpec
from shardwright.heap.ledger import STAYING, Ledger
from shardwright.heap.machine import Megatron, Replicated, Sharding

SHAPES = [(50, 4), (30, 4), (30, 2), (10, 10), (7,)]
NUMEL = sum(TensorSpec("", shape).numel for shape in SHAPES)
Make = Callable[..., Replicated]


@pytest.fixture
def machine() -> Make:
    """Ranks with one unit of five fp32 tensors."""

    def make(**changes: Any) -> Replicated:
        tensors = tuple(TensorSpec(f"t{k}", shape) for k, shape in enumerate(SHAPES))
        settings = {"shares": "states", **changes}
        return Replicated(Ledger(), {"": tensors}, Sharding(**settings))

    return make


def test_several_ranks_have_buckets_beside_their_gradients(machine: Make) -> None:
    assert machine(shards=2).resident() == {"weight": 4 * NUMEL, "communication": 4 * NUMEL}
    assert machine(replicas=2).resident()["communication"] == 4 * NUMEL
    assert machine().resident()["communication"] == 0


def test_parameters_have_the_dtype_that_is_computed_in(machine: Make) -> None:
    found = machine(param_dtype="bf16")
    assert found.resident()["weight"] == 2 * NUMEL
    assert {each.dtype for each in found.updated()} == {"bf16"}


def test_later_gradients_are_added_to_the_first(machine: Make) -> None:
    found = machine()
    assert found.rule() == "stays"
    found.heap.take(".unreduced", STAYING, 4 * NUMEL)
    found.finish_backward()
    assert found.rule() == "added"
    assert found.heap.live == {STAYING: 0, "gradient": 4 * NUMEL}
    found.finish_backward()
    found.zero_grad()
    assert found.heap.total == 0
    assert found.rule() == "stays"


def test_zero_1_gives_each_tensor_to_one_rank(machine: Make) -> None:
    most = sum(each.numel for each in machine(shards=2).updated())
    assert NUMEL / 2 <= most < NUMEL
    alone = machine(shards=len(SHAPES) + 3).updated()
    assert [each.shape for each in alone] == [max(SHAPES)]


def test_ddp_updates_every_tensor_on_every_rank(machine: Make) -> None:
    found = machine(shards=4, shares="nothing")
    assert [each.shape for each in found.updated()] == SHAPES


def test_frozen_tensors_have_neither_buckets_nor_states() -> None:
    tensors = (TensorSpec("trained", (10,)), TensorSpec("still", (20,)))
    found = Replicated(
        Ledger(), {"": tensors}, Sharding(shards=2, shares="nothing"), frozenset(["still"])
    )
    assert found.resident() == {"weight": 4 * 30, "communication": 4 * 10}


@pytest.mark.parametrize(
    ("shares", "dtype", "weights", "states"),
    [
        ("states", "bf16", 2 * NUMEL + 4 * -(-NUMEL // 8), -(-NUMEL // 8)),
        ("nothing", "bf16", 6 * NUMEL, NUMEL),
        ("states", "fp32", 4 * NUMEL, -(-NUMEL // 8)),
    ],
)
def test_megatron_keeps_gradients_in_fp32_and_copies_where_its_states_are(
    shares: str, dtype: str, weights: int, states: int
) -> None:
    tensors = {"": tuple(TensorSpec(f"t{k}", shape) for k, shape in enumerate(SHAPES))}
    settings: Any = {"shards": 8, "shares": shares, "param_dtype": dtype, "reduce_dtype": "fp32"}
    found = Megatron(Ledger(), tensors, Sharding(**settings))
    assert found.resident() == {"weight": weights, "gradient": 4 * NUMEL}
    assert sum(each.numel for each in found.updated()) == states
    assert found.rule() == "added"


def test_megatron_s_experts_share_their_states_with_those_that_hold_them() -> None:
    experts = {"layers.0.moe.experts": (TensorSpec("w1", (4, 8, 8)),)}
    sharding = Sharding(shards=16, expert_shards=2, shares="states", param_dtype="bf16")
    (part,) = Megatron(Ledger(), experts, sharding).updated()
    assert part.numel == 4 * 8 * 8 // 2
