from __future__ import annotations

import pytest

from shardwright.core.cluster import Cluster, Device


@pytest.mark.parametrize(("device", "bytes_"), [("cpu", 7), ("cuda", 5)])
def test_a_rank_fills_the_memory_of_its_device(device: Device, bytes_: int) -> None:
    assert Cluster("x", 2, 2, device, 5, 7, {}).memory_per_rank == bytes_
