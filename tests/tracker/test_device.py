"""Beside the allocator of a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.tracker.memory import MemoryTracker, device_meter, meter_for
from shardwright.tracker.storages import granularity_of


def test_only_real_tensors_on_a_gpu_are_metered() -> None:
    assert meter_for(torch.device("cpu"), fake=False) is None
    assert meter_for(torch.device("cuda"), fake=True) is None
    assert meter_for(None, fake=False) is None


def test_a_gpu_rounds_up_to_512_bytes() -> None:
    assert granularity_of("cuda") == 512
    assert granularity_of("cpu") == 1


def test_retries_of_the_allocator_count_from_the_making_of_a_meter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"active_bytes.all.current": 7, "num_alloc_retries": 3, "num_ooms": 1}
    stats |= {f"{kind}_bytes.all.peak": 9 for kind in ("active", "allocated", "reserved")}
    for name, answer in {
        "memory_stats": stats,
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "get_device_name": "a GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    read = device_meter(torch.device("cuda"))
    stats |= {"active_bytes.all.current": 8, "num_alloc_retries": 5, "num_ooms": 1}
    found = read()
    assert (found.before, found.retries, found.out_of_memory) == (7, 2, 0)


@pytest.mark.gpu
def test_the_tracked_peak_is_what_the_allocator_says() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(512, 1024, device="cuda")
    for _ in range(2):  # the first makes the workspaces of cuBLAS, which are no tensors
        with MemoryTracker(model, optimizer, inputs=batch) as tracker:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    result = tracker.result()
    assert result.device is not None
    begin, _ = tracker.log.iterations[0]
    workspaces = result.device.before - tracker.log.totals()[begin]
    assert workspaces >= 0
    assert result.peak.bytes + workspaces == pytest.approx(result.device.active_peak, rel=0.01)
    assert result.device.retries == 0
    assert "accuracy" in tracker.report()
