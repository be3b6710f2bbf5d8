"""FSDP2's schedule on a symbolic heap, moment by moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwright.core.tensor import TensorSpec
from shardwright.heap.fsdp2 import FSDP2, cut_dim, local_chunk
from shardwright.heap.ledger import STAYING, Ledger
from shardwright.heap.machine import Sharding

ROWS, COLUMNS = 10, 6
NAMES = ("first", "middle", "last")
NUMEL = ROWS * COLUMNS
PADDED = 12 * COLUMNS  # rows on 4 ranks
Make = Callable[..., FSDP2]


@pytest.fixture
def machine() -> Make:
    """A rank of 4 with three units of one fp32 matrix each, computed in bf16, summed in fp32."""

    def make(**changes: Any) -> FSDP2:
        settings: dict[str, Any] = {"shards": 4, "param_dtype": "bf16", "reduce_dtype": "fp32"}
        units = {name: (TensorSpec(name, (ROWS, COLUMNS)),) for name in NAMES}
        found = FSDP2(Ledger(), units, Sharding(**{**settings, **changes}))
        for kind, nbytes in found.resident().items():
            found.heap.take(kind, kind, nbytes)
        found.begin(NAMES, NAMES, last=True)
        return found

    return make


def forward(machine: FSDP2) -> None:
    for name in NAMES:
        machine.enter(name)
        machine.leave(name)
    machine.finish()


def backward(machine: FSDP2, *, upto: str = "") -> None:
    """Backwards from the last unit on, each of which leaves a gradient in bf16."""
    for name in reversed(NAMES):
        machine.enter_backward(name)
        if not machine.adding:
            machine.heap.take(f"{name}.unreduced", STAYING, 2 * NUMEL)
        machine.leave_backward(name)
        if name == upto:
            return
    machine.finish_backward()


def test_ranks_keep_the_longest_chunk_of_rows(machine: Make) -> None:
    assert machine().resident() == {"weight": 3 * 3 * COLUMNS * 4}
    assert [each.shape for each in machine().updated()] == [(3, COLUMNS)] * 3


def test_a_unit_is_gathered_into_one_buffer_and_copied_out_of_it(machine: Make) -> None:
    found = machine()
    found.enter("first")
    assert found.heap.live["all_gather"] == found.heap.live["gathered_weight"] == 2 * PADDED


def test_a_buffer_stays_in_the_forward_until_the_next_copy_is_made(machine: Make) -> None:
    found = machine()
    found.enter("first")
    found.leave("first")
    assert found.heap.live["gathered_weight"] == 0
    assert found.heap.live["all_gather"] == 2 * PADDED
    with found.heap.during("forward"):
        found.enter("middle")
    assert found.heap.peaks["forward"]["all_gather"] == 2 * 2 * PADDED
    assert found.heap.live["all_gather"] == 2 * PADDED


def test_nothing_but_the_shares_is_left_after_a_forward(machine: Make) -> None:
    found = machine()
    before = found.heap.total
    forward(found)
    assert found.heap.total == before


def test_kept_units_are_whole_after_a_forward(machine: Make) -> None:
    found = machine(kept=frozenset(["last"]))
    forward(found)
    assert found.heap.live["gathered_weight"] == 2 * PADDED
    found = machine(reshard_after_forward=False)
    forward(found)
    assert found.heap.live["gathered_weight"] == 3 * 2 * PADDED


def test_a_backward_fills_the_buffer_of_the_unit_before(machine: Make) -> None:
    found = machine()
    forward(found)
    found.enter_backward("last")
    assert found.heap.live["gathered_weight"] == 2 * PADDED
    assert found.filled == {"middle"}
    assert found.heap.live["all_gather"] == 2 * PADDED


def test_the_reduced_buffer_stays_until_the_next_unit_reduces(machine: Make) -> None:
    found = machine()
    forward(found)
    backward(found, upto="last")
    assert found.heap.live["reduce_scatter"] == 4 * PADDED
    assert found.heap.live["gradient"] == 4 * PADDED // 4
    assert found.heap.live[STAYING] == 0
    backward_of_middle = found.heap.total
    found.enter_backward("middle")
    found.heap.take("middle.unreduced", STAYING, 2 * NUMEL)
    found.leave_backward("middle")
    assert found.heap.live["reduce_scatter"] == 4 * PADDED
    assert found.heap.total > backward_of_middle


def test_a_backward_that_brings_no_gradient_reduces_nothing(machine: Make) -> None:
    """Of a unit that is called again: its first call's backward, the last, has the sum of all."""
    found = machine()
    found.enter("last")
    found.leave("last")
    forward(found)
    found.enter_backward("last")
    found.leave_backward("last")
    assert not {"reduce_scatter", "gradient"} & {k for k, n in found.heap.live.items() if n}
    assert "last" not in found.present
    backward(found)
    assert found.heap.live["gradient"] == 3 * 4 * PADDED // 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_keep_a_sum_of_another_dtype_until_the_backward_ends(
    machine: Make, replicas: int
) -> None:
    found = machine(reduce_dtype="bf16", replicas=replicas)
    forward(found)
    backward(found, upto="last")
    buffer, share = 2 * PADDED, 2 * PADDED // 4
    assert found.heap.live["reduce_scatter"] == buffer + (share if replicas > 1 else 0)
    assert found.heap.live["gradient"] == 4 * PADDED // 4


def test_a_sum_over_replicas_may_stay_until_the_next_unit_s_is_there(machine: Make) -> None:
    """As where torch's context of all units holds one, not each unit its own."""
    buffer, share = 2 * PADDED, 2 * PADDED // 4
    for holds, sums in ((True, 3), (False, 1)):
        found = machine(reduce_dtype="bf16", replicas=2, holds_all_reduced=holds)
        forward(found)
        backward(found, upto="first")
        assert found.heap.live["reduce_scatter"] == buffer + sums * share
        found.finish_backward()
        assert found.heap.live["reduce_scatter"] == 0


@pytest.mark.parametrize("most", [1, 2, 5])
def test_so_many_inputs_of_reduce_scatters_are_there_at_once(machine: Make, most: int) -> None:
    found = machine(reduce_scatter_inputs=most)
    forward(found)
    backward(found, upto="first")
    assert found.heap.live["reduce_scatter"] == min(most, 3) * 4 * PADDED
    found.finish_backward()
    assert found.heap.live["reduce_scatter"] == 0


def test_gradients_of_several_microbatches_are_kept_whole_in_fp32(machine: Make) -> None:
    found = machine(reduces="last")
    found.begin(NAMES, NAMES, last=False)
    forward(found)
    backward(found)
    assert found.heap.live[STAYING] == 3 * 4 * NUMEL
    assert found.heap.live["gathered_weight"] == 0
    found.begin(NAMES, NAMES, last=True)
    forward(found)
    backward(found)
    assert found.heap.live[STAYING] == 0
    assert found.heap.live["gradient"] == 3 * 4 * PADDED // 4


def test_gradients_of_one_dtype_are_added_where_the_first_are(machine: Make) -> None:
    found = machine(reduces="last", reduce_dtype="bf16")
    found.begin(NAMES, NAMES, last=False)
    assert found.rule() == "stays"
    forward(found)
    backward(found)
    found.begin(NAMES, NAMES, last=True)
    assert found.rule() == "added"
    assert found.heap.live[STAYING] == 3 * 2 * NUMEL


def test_a_pipeline_keeps_all_until_its_last_backward_is_over(machine: Make) -> None:
    found = machine(reduces="end", reshard_after_forward=False)
    forward(found)
    backward(found, upto="middle")
    assert found.heap.live["gathered_weight"] == 3 * 2 * PADDED
    assert found.heap.live[STAYING] == 2 * 4 * NUMEL
    found.enter_backward("first")
    found.heap.take("first.unreduced", STAYING, 2 * NUMEL)
    found.leave_backward("first")
    found.finish_backward()
    assert found.heap.live["gathered_weight"] == found.heap.live[STAYING] == 0
    assert found.heap.live["gradient"] == 3 * 4 * PADDED // 4


def test_one_rank_gathers_nothing_but_copies(machine: Make) -> None:
    found = machine(shards=1)
    with found.heap.during("forward"):
        found.enter("first")
    assert found.heap.live["gathered_weight"] == 2 * NUMEL
    assert found.heap.live.get("all_gather", 0) == 0
    assert found.heap.peaks["forward"]["all_gather"] == 2 * NUMEL  # the cast that is copied


def test_offloaded_shares_are_on_the_device_only_while_they_move(machine: Make) -> None:
    found = machine(offload=True)
    assert found.resident() == {}
    forward(found)
    backward(found)
    assert found.heap.total == 0


@pytest.mark.parametrize("reduces", ["each", "last", "end"])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_step_leaves_what_was_there_before(
    machine: Make, reduces: str, reduce_dtype: str, shards: int
) -> None:
    found = machine(reduces=reduces, reduce_dtype=reduce_dtype, shards=shards)
    before = found.heap.total
    for last in (False, False, True):
        found.begin(NAMES, NAMES, last=last)
        forward(found)
        backward(found)
    found.zero_grad()
    assert found.heap.total == before
    assert not any(nbytes for kind, nbytes in found.heap.live.items() if kind != "weight")


def test_experts_in_a_unit_of_their_own_are_cut_along_rows_where_they_are_few() -> None:
    stacked, router = TensorSpec("w1", (4, 30, 20)), TensorSpec("router", (4, 20))
    assert cut_dim(stacked, 8, experts=True) == 1
    assert cut_dim(stacked, 4, experts=True) == cut_dim(stacked, 8) == 0
    assert cut_dim(router, 8, experts=True) == 0
    assert local_chunk(stacked, 8, experts=True).shape == (4, 4, 20)
    assert local_chunk(stacked, 8).shape == (1, 30, 20)


def test_frozen_tensors_are_gathered_but_have_no_gradients_and_states() -> None:
    units = {"unit": (TensorSpec("trained", (8, 4)), TensorSpec("still", (16, 4)))}
    found = FSDP2(Ledger(), units, Sharding(shards=4), frozenset(["still"]))
    assert found.resident() == {"weight": 4 * (8 + 16)}
    assert [each.fqn for each in found.updated()] == ["trained"]
    assert found.sizes["unit"].unsharded == 4 * (32 + 64)
    assert found.sizes["unit"].reduced == 4 * found.sizes["unit"].gradient == 4 * 32


def test_a_unit_of_frozen_tensors_reduces_nothing() -> None:
    units = {"unit": (TensorSpec("still", (16, 4)),)}
    found = FSDP2(Ledger(), units, Sharding(shards=4), frozenset(["still"]))
    found.begin(["unit"], ["unit"], last=True)
    found.enter("unit")
    found.leave("unit")
    found.finish()
    found.finish_backward()
    assert found.heap.total == 0
    assert found.updated() == []
