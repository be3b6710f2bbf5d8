"""Habits of FSDP2's users on sharded models, beside the same on whole ones: right, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import outside_tasks
import pytest
import torch
from habit_tasks import HABITS, several
from pool import Pool

from shardwright.runtime.torch_private import HEARS_OF_OPERATORS

WAYS = ("flat", "per_param", "param_boundary", "owned", "offloaded")
REFUSED = {  # and how
    "a_backward_of_weights_before_a_step": "modified by an inplace operation",  # as on one process
    "a_parameter_is_replaced": "weight of unit '2': expected the sharded parameter",
    "a_module_that_trains_is_added": "2.1.weight of unit 'Sequential': expected a parameter that "
    "was there when the unit was sharded",
    "weights_change_between_the_passes": "backward of unit '2': expected the weights of its "
    "forward",
    "an_optimizer_from_before_sharding": "weight of unit 'Linear': expected the sharded parameter",
    "a_number_initialised_by_data": "expected one that only reads its parameters",
    "a_number_initialised_without_gradients": "expected one that only reads its parameters",
    "an_input_changed_in_place": "is a view and is being modified inplace",
    "weights_of_the_first_rank_sent": "0.weight: expected a use that a sharded tensor has",
    "gradients_summed_by_hand": "0.weight: expected a use that a sharded tensor has",
    "gradients_of_the_root_by_autograd": "a backward through unit 'Sequential': expected",
    "the_roots_weights_change_between_the_passes": "backward of unit '_Own': expected the weights "
    "of its forward",
}
FSDP2_DIFFERS = {  # torch 2.13: wrong, silent, or refused
    "a_backward_of_weights_before_a_step",
    "accumulation_under_no_sync",  # a method of DDP's
    *("a_module_that_trains_is_added", "a_parameter_is_replaced", "adafactor"),
    *("averaged_model", "copied_and_trained_apart", "from_the_meta_device"),
    *("weights_change_between_the_passes", "weights_drawn_by_init"),
    *("weights_swapped_for_their_average", "the_methods_of_fsdp2"),
    *("the_roots_weights_change_between_the_passes",),
    "an_auxiliary_loss_of_the_last_of_three_modules_of_a_unit",
    "a_loss_kept_by_a_forward_that_returns_nothing",
}


FSDP2_IS_RIGHT = {  # of what reaches in from outside
    "a_leaf_in_the_callers_dictionary",
    *("a_later_part_of_a_list_alone", "a_loss_on_a_captured_activation", "a_vectorized_model"),
    *("a_vectorized_model_of_units", "a_second_derivative_by_torch_func"),
    "optimizer_in_the_backward_of_replicas",
}

REFUSED_BY_RANGES = {  # which are no slices of a tensor, and cut numbers too
    "a_number_used_by_another_method": "scale: expected a use that a sharded tensor has",
    "full_state_from_one_rank": "weight: expected a part that is a slice of the whole tensor",
}
if not HEARS_OF_OPERATORS:  # torch 2.11 asks no tensor about operators of a backward
    REFUSED_BY_RANGES["a_number_copied_alone"] = "expected torch 2.13 or later"

REFUSED_OF_REPLICAS = {  # what a flat buffer cuts, others have whole
    "a_counter_that_acts_with_a_temperature_in_the_loss": "scale of unit '_Scaled': expected hooks "
    "on its gradient, or a use outside",
}


def _is_right(habit: str, way: str, found: Any) -> bool:
    ranges = way in ("flat", "offloaded")
    refused = {**REFUSED, **(REFUSED_BY_RANGES if ranges else REFUSED_OF_REPLICAS)}
    if habit in refused:
        return isinstance(found, str) and refused[habit] in found and "\n" not in found
    return bool(found == {})


QUICK = (  # what says no, and one habit of every kind
    *REFUSED,
    *("freezing_after_sharding", "grad_scaler_with_one_bad_rank", "muon"),
    *("torchs_clipping_over_flat_tensors", "full_optimizer_state_by_torchs_calls"),
    *("another_order_every_step", "accumulation_by_the_module", "from_the_meta_device"),
    *("copied_and_trained_apart", "complex_parameters", "tied_after_sharding"),
    "an_auxiliary_loss_of_the_last_of_three_modules_of_a_unit",
    "a_loss_kept_by_a_forward_that_returns_nothing",
)
EACH = list(HABITS)
REST = [habit for habit in EACH if habit not in QUICK]
LISTS = {
    "flat, one of every kind": ("flat", QUICK),
    "flat, the others": ("flat", REST),
    **{way: (way, EACH[number::4]) for number, way in enumerate(WAYS[1:])},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("way", "habits"), LISTS.values(), ids=LISTS)
def test_habits_are_right_or_refused(pool: Pool, way: str, habits: list[str]) -> None:
    _hold(pool, 2, way, habits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "way", "habits"),
    [(1, "per_param", EACH[::4]), (3, "flat", EACH[2::4])],
    ids=["1 per_param", "3 flat"],
)
def test_some_are_on_other_numbers_of_ranks(
    pool: Pool, size: int, way: str, habits: list[str]
) -> None:
    _hold(pool, size, way, habits)


@pytest.mark.product
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_are_on_any_number_of_ranks(pool: Pool, size: int, way: str) -> None:
    _hold(pool, size, way, EACH)


def test_gradients_taken_inside_of_a_forward_leave_the_weights_of_its_unit_whole(
    pool: Pool,
) -> None:
    _hold(pool, 1, "flat", ["forces_inside_of_a_forward"])


def _hold(pool: Pool, size: int, way: str, habits: Sequence[str]) -> None:
    wrong = []
    for of_rank in pool.run(size, several, habits=habits, way=way):
        wrong += [
            f"{habit}: {found}"
            for habit, found in of_rank.items()
            if not _is_right(habit, way, found)
        ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="figures of torch 2.13")
def test_fsdp2_differs_where_the_guide_says_so(pool: Pool) -> None:
    every_rank = pool.run(2, several, habits=EACH, way="fsdp2")
    differs = {habit for found in every_rank for habit, each in found.items() if each != {}}
    assert differs == FSDP2_DIFFERS | (set(outside_tasks.HABITS) - FSDP2_IS_RIGHT)
