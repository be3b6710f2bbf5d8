"""Our own runtime on a symbolic heap, moment by moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwright.core.tensor import TensorSpec
from shardwright.heap.flat import FlatUnits
from shardwright.heap.ledger import STAYING, Ledger
from shardwright.heap.machine import Sharding

NAMES = ("", "first", "last")  # the root's own parameters come first
BACKWARDS = ("", "last", "first")
NUMEL = 64 * 32
NOTE = 64  # elements that travel with a unit of one tensor
Make = Callable[..., FlatUnits]


@pytest.fixture
def machine() -> Make:
    """A rank of 4 on GPUs with three units of one fp32 matrix each, computed in bf16."""

    def make(**changes: Any) -> FlatUnits:
        settings: dict[str, Any] = {"shards": 4, "param_dtype": "bf16", "reduce_dtype": "fp32"}
        units = {name: (TensorSpec(name, (64, 32)),) for name in NAMES}
        found = FlatUnits(Ledger(), units, Sharding(**{**settings, **changes}))
        for kind, nbytes in found.resident().items():
            found.heap.take(kind, kind, nbytes)
        found.begin(NAMES, BACKWARDS, last=True)
        return found

    return make


def forward(machine: FlatUnits) -> None:
    machine.enter("")
    for name in NAMES[1:]:
        machine.enter(name)
        machine.leave(name)
    machine.leave("")
    machine.finish()


def backward(machine: FlatUnits) -> None:
    machine.enter_backward("")
    for name in reversed(NAMES[1:]):
        machine.enter_backward(name)
        machine.leave_backward(name)
    machine.finish_backward()


def test_a_unit_is_gathered_into_place_from_cast_shares(machine: Make) -> None:
    found = machine(prefetch=0)
    with found.heap.during("forward"):
        found.enter("")
    assert found.heap.live["gathered_weight"] == 2 * NUMEL
    assert found.heap.live["all_gather"] == 0
    assert found.heap.peaks["forward"]["all_gather"] == 2 * NUMEL // 4


def test_the_next_unit_is_on_its_way_while_one_computes(machine: Make) -> None:
    found = machine(prefetch=1)
    found.enter("")
    assert found.heap.live["gathered_weight"] == 2 * 2 * NUMEL
    assert found.heap.live["all_gather"] == 2 * NUMEL // 4  # the cast share of the next unit


def test_parameters_cut_each_by_itself_arrive_in_a_stage(machine: Make) -> None:
    found = machine(prefetch=0, flat=False, param_dtype="fp32")
    with found.heap.during("forward"):
        found.enter("")
    assert found.heap.peaks["forward"]["all_gather"] == 4 * NUMEL
    assert found.heap.live["all_gather"] == 0


def left(machine: FlatUnits, unit: str) -> None:
    """A unit's backward, which leaves its gradient as autograd makes it."""
    machine.enter_backward(unit)
    come(machine, unit)
    machine.leave_backward(unit)


def come(machine: FlatUnits, unit: str) -> None:
    machine.arrive(unit, "fp32", 2 * NUMEL)
    machine.heap.take(f"{unit}.unreduced", STAYING, 2 * NUMEL)


def test_a_gradient_stays_where_it_is_until_its_unit_is_over(machine: Make) -> None:
    found = machine(prefetch=0)
    forward(found)
    found.enter_backward("last")
    assert found.rule() == "stays"
    assert found.heap.live.get(STAYING, 0) == 0
    come(found, "last")
    with found.heap.during("backward"):
        found.leave_backward("last")
    assert found.heap.live[STAYING] == 0
    assert found.heap.peaks["backward"]["reduce_scatter"] == 4 * (NUMEL + 4 * NOTE)


def test_with_prefetch_a_reduce_is_under_way_until_the_next_one(machine: Make) -> None:
    found = machine(prefetch=1)
    forward(found)
    found.enter_backward("")
    left(found, "last")
    assert found.heap.live["reduce_scatter"] == 4 * (NUMEL + 4 * NOTE)
    assert found.heap.live[STAYING] == 0
    found = machine(prefetch=0)
    forward(found)
    left(found, "last")
    assert found.heap.live["reduce_scatter"] == found.heap.live[STAYING] == 0
    assert found.heap.live["gradient"] == 4 * (NUMEL // 4 + NOTE)


def test_a_gradient_held_back_is_held_in_the_dtype_of_sums(machine: Make) -> None:
    found = machine(prefetch=0, reduces="last")
    found.begin(NAMES, BACKWARDS, last=False)
    forward(found)
    left(found, "last")
    assert found.heap.live[STAYING] == 4 * NUMEL


def test_gloo_receives_what_it_sums(machine: Make) -> None:
    on_gpu, on_gloo = machine(), machine(on_gpu=False)
    for found in (on_gpu, on_gloo):
        forward(found)
        left(found, "last")
    assert on_gloo.heap.total == on_gpu.heap.total + 4 * (NUMEL + 4 * NOTE)
    assert on_gloo.heap.live["communication"] == 4 * (NUMEL + 4 * NOTE)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("reduces", ["each", "last"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_leaves_what_was_there_before(
    machine: Make, prefetch: int, flat: bool, shards: int, reduces: str, reshard: bool
) -> None:
    for reduce_dtype in ("fp32", "bf16"):
        found = machine(
            prefetch=prefetch,
            flat=flat,
            shards=shards,
            reduces=reduces,
            reshard_after_forward=reshard,
            reduce_dtype=reduce_dtype,
            on_gpu=False,
        )
        before = found.heap.total
        for last in (False, False, True):
            found.begin(NAMES, BACKWARDS, last=last)
            forward(found)
            backward(found)
        found.zero_grad()
        assert found.heap.total == before
        assert not any(nbytes for kind, nbytes in found.heap.live.items() if kind != "weight")


def test_a_reduce_before_a_later_call_brings_the_gradient_leaves_none(machine: Make) -> None:
    found = machine(prefetch=0)
    forward(found)
    found.enter_backward("last")
    with found.heap.during("backward"):
        found.leave_backward("last")
    assert found.heap.peaks["backward"]["reduce_scatter"] == 4 * (NUMEL + 4 * NOTE)
    assert found.heap.live["gradient"] == 0
    left(found, "last")
    assert found.heap.live["gradient"] == 4 * (NUMEL // 4 + NOTE)
    left(found, "last")  # to which a third one is added
    assert found.heap.live["gradient"] == 4 * (NUMEL // 4 + NOTE)


def test_frozen_tensors_are_gathered_but_have_no_gradients_and_states() -> None:
    units = {"unit": (TensorSpec("trained", (64, 4)), TensorSpec("still", (128, 4)))}
    found = FlatUnits(Ledger(), units, Sharding(shards=2), frozenset(["still"]))
    assert found.resident() == {"weight": 4 * (256 + 512) // 2}
    assert [each.numel for each in found.updated()] == [256 // 2]
    assert found.sizes["unit"].room == 4 * (256 + 512)
    assert [way.row for way in found.sizes["unit"].trained] == [4 * (256 // 2 + NOTE)]


@pytest.mark.parametrize("param_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_that_stay_are_gathered_once_a_step(
    machine: Make, zero: int, param_dtype: str
) -> None:
    """Shares are parts of the whole parameters, unless these compute in another dtype."""
    reduces = "last" if zero == 1 else "each"
    found = machine(zero=zero, param_dtype=param_dtype, reduces=reduces, prefetch=0)
    cast = param_dtype == "bf16"
    weights = (4 * NUMEL * 3 // 4, 2 * NUMEL * 3) if cast else (4 * NUMEL * 3, 0)
    for last in (False, True):
        found.begin(NAMES, BACKWARDS, last=last)
        assert set(found.flow.gathered) == (set(NAMES) if last else set())
        forward(found)
        backward(found)
        live = found.heap.live
        assert (live["weight"], live.get("gathered_weight", 0)) == weights
    found.zero_grad()
    assert not found.flow.gathered
