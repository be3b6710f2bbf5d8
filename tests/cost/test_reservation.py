from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.batch import Batch
from shardwright.core.errors import NoPlanError, UnsupportedError
from shardwright.core.model import TableSpec
from shardwright.cost import reservation
from shardwright.cost.reservation import reserve
from shardwright.job.planner import ReservationSection

GIB = 2**30
BATCH = Batch(512)
TABLES = (
    TableSpec("late", 100, 8, pooled=False, pooling_factors=(2.5,)),
    TableSpec("early", 100, 8, pooling_factors=(3.0, 0.5), num_poolings=(4.0, 4.0)),
)
RANK = (10 * GIB, 20 * GIB, 30 * GIB)
INPUTS = 512 * 6 * 8 * 20  # ids of a batch, bytes of an id, 2 batches in 10 copies each

OF_A_JOB = {"reserve", "ids_of_batch"}
CASES: dict[str, Callable[[Any], Any]] = {
    "share_left": lambda v: reservation.share_left(v.capacity, v.share),
    "amount_left": lambda v: reservation.amount_left(v.capacity, v.nbytes),
    "batch_ids": lambda v: reservation.batch_ids((v.length, 2.0), (v.size, v.size)),
    "input_bytes": lambda v: reservation.input_bytes(v.length * v.size, 2, 10),
    "dense_bytes": lambda v: reservation.dense_bytes(v.nbytes, v.multiplier),
    "left_for_tables": lambda v: reservation.left_for_tables(v.capacity, v.nbytes, v.nbytes),
    "shortage": lambda v: reservation.shortage(v.capacity - v.nbytes),
}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "capacity": st.integers(0, 2**40),
            "share": st.floats(0, 0.99),
            "nbytes": st.integers(0, 2**40),
            "length": st.floats(0, 100, allow_subnormal=False),
            "size": st.integers(1, 2**16),
            "multiplier": st.sampled_from([0.0, 1.0, 2.5, 6.0]),
        }
    ),
    min_size=1,
    max_size=3,
)


def test_every_formula_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert set(CASES) | OF_A_JOB == public_functions(reservation)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES)
@settings(max_examples=8)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]]
) -> None:
    agree(CASES[name], samples, "local")


def _reserve(device: Any = "cuda", ranks: int = 2, **section: Any) -> reservation.Reservation:
    return reserve(ReservationSection(**section), [RANK] * ranks, device, TABLES, BATCH)


def test_a_percentage_leaves_whole_bytes_of_hbm_and_all_of_the_rest() -> None:
    found = _reserve(kind="percentage", percentage=0.15)
    assert found.capacities == ((int(0.85 * 10 * GIB), 20 * GIB, 30 * GIB),) * 2
    assert type(found.capacities[0][0]) is int
    assert (found.dense, found.kjt) == (None, (INPUTS, 0))


def test_an_absolute_amount_leaves_no_less_than_nothing() -> None:
    assert _reserve(kind="absolute", nbytes=GIB).capacities[0][0] == 9 * GIB
    assert _reserve(kind="absolute", nbytes=11 * GIB).capacities[0][0] == 0


def test_none_leaves_everything() -> None:
    assert _reserve(kind="none") == reservation.Reservation((RANK, RANK))


def test_a_heuristic_takes_a_share_then_dense_parameters_and_inputs() -> None:
    found = _reserve(kind="heuristic", percentage=0.5, dense_bytes=1000, multiplier=6.0)
    assert (found.dense, found.kjt) == ((6000, 0), (INPUTS, 0))
    assert found.capacities[0] == (5 * GIB - 6000 - INPUTS, 20 * GIB, 30 * GIB)


def test_a_section_without_a_kind_is_a_heuristic() -> None:
    assert _reserve() == _reserve(kind="heuristic")


def test_inference_counts_dense_parameters_and_inputs_once() -> None:
    found = _reserve(kind="inference", percentage=0.5, dense_bytes=1000, multiplier=6.0)
    assert (found.dense, found.kjt) == ((1000, 0), (INPUTS // 20, 0))


def test_on_a_cpu_dense_parameters_and_inputs_come_from_the_host() -> None:
    found = reserve(
        ReservationSection("heuristic", dense_bytes=1000), [(0, GIB, 0)], "cpu", TABLES, BATCH
    )
    assert found.capacities == ((0, GIB - 6000 - INPUTS, 0),)
    assert (found.dense, found.kjt) == ((0, 6000), (0, INPUTS))


def test_ids_count_by_the_batch_size_of_their_feature() -> None:
    table = TableSpec("t", 10, 4, pooling_factors=(2.0, 1.5), batch_sizes=(10, 100))
    assert reservation.ids_of_batch([table], BATCH) == 2 * 10 + 1.5 * 100
    assert reservation.ids_of_batch([], BATCH) == 0


def test_a_heuristic_that_leaves_less_than_nothing_names_the_rank_and_the_bytes() -> None:
    section = ReservationSection("heuristic", percentage=0.0, dense_bytes=GIB, multiplier=2.0)
    ranks = [RANK, (GIB, GIB, GIB), RANK]
    with pytest.raises(NoPlanError) as caught:
        reserve(section, ranks, "cuda", TABLES, BATCH)
    told = str(caught.value)
    assert "on rank 1" in told
    assert f"{2 * GIB:,} B (2.00 GiB) for dense parameters" in told
    assert f"{INPUTS:,} B" in told
    assert f"{GIB + INPUTS:,} B" in told
    assert "\n" not in told


def test_inference_may_leave_less_than_nothing() -> None:
    found = _reserve(kind="inference", percentage=0.0, dense_bytes=11 * GIB)
    assert found.capacities[0][0] == -GIB - INPUTS // 20


def test_a_traced_reservation_needs_more_than_numbers() -> None:
    with pytest.raises(UnsupportedError, match=r"planner\.reservation\.kind: .*'traced'"):
        _reserve(kind="traced")
