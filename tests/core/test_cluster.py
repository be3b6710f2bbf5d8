from __future__ import annotations

import pytest

from shardwright.core.cluster import TIERS, Cluster, Constant, Device

CONSTANTS = {"ddr_rate": Constant(2.5, "B/s", "a sheet", "2026-11")}


def _cluster(device: Device) -> Cluster:
    return Cluster("x", 4, 2, device, 5, 7, 11, 4, CONSTANTS)


@pytest.mark.parametrize(("device", "bytes_"), [("cpu", 7), ("cuda", 5)])
def test_a_rank_fills_the_memory_of_its_device(device: Device, bytes_: int) -> None:
    assert _cluster(device).memory_per_rank == bytes_


def test_capacities_are_shown_in_the_order_of_the_tiers() -> None:
    cluster = _cluster("cuda")
    assert cluster.capacity == tuple(getattr(cluster, f"{tier}_cap") for tier in TIERS)


def test_constants_are_read_by_name() -> None:
    assert _cluster("cuda").values == {"ddr_rate": 2.5}
