from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster import Calibration, Device
from shardwright.cost.constants import calibrated, cluster
from shardwright.cost.network import CROSSINGS
from shardwright.cost.presets import LOCAL, PRESETS
from shardwright.job.cluster import ClusterSection
from shardwright.train.calibrate import DEVICE_SHARE, HOST_SHARE, calibrate, calibration, fit
from shardwright.train.calibrate.cases import (
    BUFFERS,
    FLOAT,
    OVERLAPPED,
    PARTS,
    SCHEMA,
    WIDTHS,
    Case,
    Samples,
    Times,
    collective_case,
    host_bytes,
    overlap_case,
    row_case,
    spread,
)

DAY = "2026-11-21"
RANKS = 2
# What a made-up machine is like; its samples follow from it.
TRUTH = {
    "compute_rate": 60e9,
    "memory_rate": 10e9,
    "fresh_memory_rate": 2e9,
    "operation_latency": 8e-6,
    "index_cost": 2e-9,
    "sort_cost": 40e-9,
    "parse_cost": 11e-6,
    "row_latency": 8e-9,
    "sgd_passes": 3.0,
    "rowwise_adagrad_passes": 12.0,
    "overlap": 0.25,
    **{f"{name}_latency": 1e-4 * (k + 1) for k, name in enumerate(CROSSINGS)},
    **{f"{name}_rate": 1e9 / (k + 1) for k, name in enumerate(CROSSINGS)},
}
ROWS, COUNT, BYTES = 1000.0, 50.0, 2**27


def _cases(ranks: int, rounds: int = 4) -> dict[str, Case]:
    found = {}

    def case(name: str, amount: float, seconds: float, together: bool = False) -> None:
        found[name] = Case(amount, together, (seconds,) * rounds)

    case("update", BYTES, BYTES / TRUTH["memory_rate"])
    case("copy", BYTES, BYTES / TRUTH["memory_rate"])
    case("fresh", BYTES, BYTES / TRUTH["fresh_memory_rate"])
    case("layer 1", 3e9, 3e9 / TRUTH["compute_rate"])
    case("layer 2", 6e9, 6e9 / TRUTH["compute_rate"])
    case("operations", COUNT, COUNT * TRUTH["operation_latency"])
    case("ids addressed", ROWS, ROWS * TRUTH["index_cost"])
    case("ids sorted", ROWS, ROWS * TRUTH["sort_cost"])
    case("click rows", ROWS, ROWS * TRUTH["parse_cost"])
    touches = {w: w * FLOAT / TRUTH["memory_rate"] + TRUTH["row_latency"] for w in WIDTHS}
    for width, touch in touches.items():
        case(row_case(width), ROWS, ROWS * touch)
    for kind in ("sgd", "rowwise_adagrad"):
        case(kind, ROWS, ROWS * touches[WIDTHS[0]] * TRUTH[f"{kind}_passes"])
    if ranks == 1:
        return found
    for name, crossings in CROSSINGS.items():
        for nbytes in BUFFERS:
            crossing = nbytes * crossings * (ranks - 1) / ranks
            seconds = TRUTH[f"{name}_latency"] + crossing / TRUTH[f"{name}_rate"]
            case(collective_case(name, nbytes), nbytes, seconds, together=True)
    both = (1e-3, 1e-3, 2e-3 - TRUTH["overlap"] * 1e-3)
    for collective, nbytes in OVERLAPPED:
        for part, seconds in zip(PARTS, both, strict=True):
            case(overlap_case(collective, nbytes, part), nbytes, seconds, together=True)
    return found


def _samples(rank: int = 0, ranks: int = RANKS, device: Device = "cpu") -> Samples:
    cases, memory = _cases(ranks), {"ddr_cap": 10**10}
    if device == "cuda":
        cases["link"] = Case(1e9, False, (0.02,) * 3)
        cases["host"] = Case(1e9, False, (0.01,) * 3)
        memory["hbm_cap"] = 10**9
    backend = "gloo" if device == "cpu" else "nccl"
    return Samples(SCHEMA, rank, ranks, device, backend, {"cores": "2"}, memory, cases)


def _calibration(ranks: int = RANKS, device: Device = "cpu") -> Calibration:
    return calibration([_samples(rank, ranks, device) for rank in range(ranks)], DAY)


@pytest.mark.parametrize("name", TRUTH)
def test_a_constant_comes_back_from_the_times_it_makes(name: str) -> None:
    figure = _calibration().constants[name]
    assert figure.value == pytest.approx(TRUTH[name], rel=1e-6)
    assert figure.source.startswith("measured: ")
    assert (figure.unit, figure.date, figure.median_of) == (LOCAL[name].unit, DAY, 4)
    assert figure.spread == pytest.approx(0, abs=1e-6)


def test_every_constant_is_measured_or_says_where_it_is_from() -> None:
    found = _calibration()
    assert set(found.constants) == set(LOCAL)
    for name in found.carried_over:
        assert found.constants[name].source.startswith(("carried over from preset", "assumed: "))
    assert set(LOCAL) - set(found.carried_over) == {*TRUTH, "host_link_rate", "ddr_rate"}


def test_a_rank_gets_its_share_of_the_hosts_memory_less_a_margin() -> None:
    capacity = _calibration().capacities["ddr_cap"]
    assert capacity.value == int(10**10 * HOST_SHARE / RANKS)
    assert "the margin is assumed" in capacity.source


def test_one_rank_sends_nothing_and_takes_its_links_over() -> None:
    found = _calibration(ranks=1)
    links = {f"{name}_{what}" for name in CROSSINGS for what in ("latency", "rate")}
    assert links | {"overlap"} <= set(found.carried_over)
    assert found.constants["all_reduce_rate"].value == LOCAL["all_reduce_rate"].value


def test_an_accelerator_has_two_memories_and_a_link_between_them() -> None:
    found = _calibration(device="cuda")
    values = {name: figure.value for name, figure in found.constants.items()}
    assert (values["host_link_rate"], values["ddr_rate"]) == (5e10, 1e11)
    assert found.capacities["hbm_cap"].value == int(10**9 * DEVICE_SHARE)
    carried = found.constants["inter_host_rate"]
    assert carried.value == PRESETS["h100-8"].constants["inter_host_rate"].value
    assert carried.source.startswith("carried over from preset 'h100-8'")


@pytest.mark.parametrize(("ranks", "device"), [(1, "cpu"), (2, "cpu"), (2, "cuda")])
def test_what_is_made_can_be_planned_with(ranks: int, device: Device) -> None:
    found = _calibration(ranks, device)
    planned, _ = cluster(ClusterSection(file="c.toml", measured=found), "cluster")
    assert planned.constants == calibrated(found, "c.toml").constants
    assert (planned.world_size, planned.compute_device) == (ranks, device)


def test_ranks_that_work_together_are_as_fast_as_the_slowest() -> None:
    def sample(seconds: tuple[float, ...]) -> Samples:
        cases = {"a": Case(1, True, seconds), "b": Case(1, False, seconds)}
        return Samples(SCHEMA, 0, 2, "cpu", "gloo", {}, {}, cases)

    times = Times([sample((1.0, 5.0, 3.0)), sample((3.0, 2.0, 9.0))])
    assert times.medians() == {"a": 5.0, "b": 3.5}
    assert list(times.rounds(["a"])) == [{"a": 3.0}, {"a": 5.0}, {"a": 9.0}]


def test_spread_is_half_of_the_quartiles_distance() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0], 4.0) == 0.25
    assert spread([1.0], 1.0) == spread([1.0, 2.0], 0.0) == 0.0


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    line = fit(BUFFERS, BUFFERS, [latency + nbytes / rate for nbytes in BUFFERS])
    assert line.latency == pytest.approx(latency, rel=1e-3)
    assert line.rate == pytest.approx(rate, rel=1e-3)
    assert line.misfit < 1e-3


@pytest.mark.parametrize("odd", range(2, len(BUFFERS)))
def test_one_odd_size_hardly_moves_the_rate(odd: int) -> None:
    seconds = [1e-4 + nbytes / 1e9 for nbytes in BUFFERS]
    seconds[odd] *= 5
    line = fit(BUFFERS, BUFFERS, seconds)
    assert (line.latency, line.rate) == (pytest.approx(1e-4, rel=0.05), pytest.approx(1e9, rel=0.2))
    assert line.misfit == pytest.approx(0.8, abs=0.05)


@given(st.lists(st.floats(1e-7, 10.0), min_size=len(BUFFERS), max_size=len(BUFFERS)))
def test_no_times_make_a_line_that_cannot_be(seconds: list[float]) -> None:
    line = fit(BUFFERS, BUFFERS, seconds)
    assert line.latency >= 0
    assert 0 < line.rate < math.inf


@pytest.mark.parametrize(("text", "limited"), [("4096\n", True), ("max\n", False), (None, False)])
def test_memory_is_what_the_control_group_allows(
    tmp_path: Path, text: str | None, limited: bool
) -> None:
    path = tmp_path / "memory.max"
    if text is not None:
        path.write_text(text)
    assert (host_bytes((path,)) == 4096) == limited


@pytest.mark.parametrize("ranks", [0, -1, 257])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks: int, capsys: Any) -> None:
    with pytest.raises(ValueError, match=f"-n: expected from 1 to 256 ranks, got {ranks}"):
        calibrate(ranks, capsys)
