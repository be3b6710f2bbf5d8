"""The first step of an optimizer, in which DTensor works out shapes on tensors of global size."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from tracker_tasks import fake_world

from shardwright.tracker import memory
from shardwright.tracker.memory import MemoryTracker

RANKS = 8


def steps(width: int) -> tuple[MemoryTracker, int]:
    """Two steps of FSDP2 on one of eight fake ranks; bytes of the states that the first makes.

    DTensor remembers what it worked out, so every test has a ``width`` of its own.
    """
    with fake_world(0, RANKS) as mesh, FakeTensorMode():
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        batch = torch.ones(1, width)
        with MemoryTracker(model, optimizer, inputs=batch) as tracker:
            for _ in range(2):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            made = tracker.live["optimizer_state"]
    return tracker, made


def test_the_peak_of_a_cold_step_is_that_of_a_warm_one_but_for_the_states_it_makes() -> None:
    tracker, states = steps(80)
    weights = 2 * (80 * 80 + 80) * 4
    cold, warm = tracker.result().iterations
    # beside the states the step has a list of square roots, as large as this rank's weights
    assert tracker.peaks["step"]["optimizer_state"] == states
    assert tracker.peaks["step"]["temporary"] == weights // RANKS
    assert tracker.peaks["step"].keys() <= {
        "weight", "gradient", "optimizer_state", "temporary", "input",
    }  # fmt: skip
    assert warm.bytes == cold.bytes + states
    assert cold.by_category == {k: n for k, n in warm.by_category.items() if k != "optimizer_state"}


def test_it_would_not_be_if_those_tensors_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.private, "quiet_propagation", lambda _: nullcontext())
    tracker, _ = steps(96)
    whole = 2 * (96 * 96 + 96) * 4
    assert sum(tracker.peaks["step"].values()) > whole
