"""Kinds of sharded models that a step of their own shows, on one fake rank of four."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from tracker_tasks import BATCH, LENGTH, Case, fake_world, sharded

from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.tracker.announce import announce
from shardwright.tracker.memory import MemoryTracker

RANKS = 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(RANKS - 1, RANKS) as mesh, FakeTensorMode():
        yield mesh


def run(model: nn.Module) -> None:
    words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    model(words).float().sum().backward()


def synchronise(model: nn.Module, on: bool) -> None:
    for unit in units_in(model):
        DStorage(unit).set_requires_gradient_sync(on)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)


@pytest.mark.parametrize("runtime", ["per_param", "fsdp2"])
def test_a_gradient_that_is_held_back_is_a_whole_one(mesh: DeviceMesh, runtime: str) -> None:
    model = sharded(mesh, Case(runtime, mixed=True))
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4  # kept in fp32
    with MemoryTracker(model) as tracker:
        synchronise(model, False)
        run(model)
        held = tracker.live
        synchronise(model, True)
        run(model)
        after = tracker.live
    assert held["unreduced_gradient"] == pytest.approx(whole, rel=0.02)  # padding
    assert held["gradient"] == 0
    assert after["unreduced_gradient"] == after["communication"] == after["reduce_scatter"] == 0
    units = list(units_in(model))
    notes = sum(unit.layout.note_bytes for unit in units)  # that came with the sums of ours
    assert after["gradient"] - notes == pytest.approx(whole / RANKS, rel=0.1)


def test_flat_parameters_of_an_optimizer_are_the_weights_and_have_the_gradients(
    mesh: DeviceMesh,
) -> None:
    model = sharded(mesh, Case("flat"))
    optimizer = torch.optim.Adam(optimizer_parameters(model))
    with MemoryTracker(model, optimizer) as tracker:
        assert set(tracker.live) == {"weight", "buffer"}
        run(model)
        units = list(units_in(model))
        assert tracker.live["gradient"] == sum(
            4 * s.sent for unit in units for s in unit.layout.segments
        )
        optimizer.step()
        steps = 4 * len(units)  # an optimizer's tensor each
        assert tracker.live["optimizer_state"] == 2 * tracker.live["weight"] + steps


@pytest.mark.parametrize("runtime", ["per_param", "fsdp2"])
def test_a_unit_is_gathered_freed_and_reduced_between_the_states_of_its_module(
    mesh: DeviceMesh, runtime: str
) -> None:
    model = sharded(mesh, Case(runtime))
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters()) * 4
    with MemoryTracker(model) as tracker:
        run(model)
    found = {(s.module, s.state): s.by_category for s in tracker.snapshots}

    def change(moment: str, kind: str) -> int:
        before, after = (found["blocks.0", f"{side} {moment}"] for side in ("before", "after"))
        return after.get(kind, 0) - before.get(kind, 0)

    assert change("pre-forward", "gathered_weight") == pytest.approx(block, rel=0.05)
    assert change("post-forward", "gathered_weight") == pytest.approx(-block, rel=0.05)
    assert change("post-backward", "gathered_weight") == pytest.approx(-block, rel=0.05)
    note = sum(u.layout.note_bytes for u in units_in(model.blocks[0]))
    assert change("post-backward", "gradient") - note == pytest.approx(block / RANKS, rel=0.05)
    assert change("post-backward", "unreduced_gradient") <= 0


def test_a_model_that_is_left_gathered_shows_its_shards_all_the_same(mesh: DeviceMesh) -> None:
    model = sharded(mesh, Case("fsdp2"))
    model.unshard()
    with MemoryTracker(model) as tracker:
        live = tracker.live
        assert live["gathered_weight"] > 0
        model.reshard()
        assert tracker.live["gathered_weight"] == 0
        assert tracker.live["weight"] == live["weight"] > 0


def test_what_a_runtime_says_is_heard_with_a_model_only() -> None:
    made = torch.ones(4)
    with MemoryTracker() as tracker:
        announce(made, "cache")
        assert tracker.total == 0
    with MemoryTracker(nn.Linear(1, 1)) as tracker:
        announce(made, "cache")
        assert tracker.live["cache"] == 16
    announce(made, "cache")  # nobody listens
