"""What the memory of a training step is for, on one rank without any runtime."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tracker_nets import FLOAT, LENGTH, ROWS, WIDTH, WORDS, Net, adam, bytes_of, train, words

from shardwright.tracker.memory import MemoryTracker
from shardwright.tracker.tensors import tensors_in

WEIGHTS = bytes_of(Net().parameters())
IDLE = bytes_of(Net().idle.parameters())


def test_what_was_there_before_is_known_by_its_owners() -> None:
    model = Net()
    optimizer = adam(model)
    model(words()).sum().backward()
    optimizer.step()
    batch = (words(), {"targets": words()})
    with MemoryTracker(model, optimizer, inputs=batch) as tracker:
        steps = 4 * sum(1 for p in model.parameters() if p.grad is not None)
        assert tracker.live == {
            "weight": WEIGHTS,
            "gradient": WEIGHTS - IDLE,
            "optimizer_state": 2 * (WEIGHTS - IDLE) + steps,
            "buffer": WIDTH * FLOAT,
            "input": 2 * ROWS * LENGTH * 8,
        }


def test_everything_has_its_kind_after_forward_backward_and_step() -> None:
    model, batch = Net(), words()
    optimizer = adam(model)
    hidden = ROWS * LENGTH * FLOAT
    with MemoryTracker(model, optimizer, inputs=batch) as tracker:
        out = model(batch)
        # each block keeps its input and its wide activation, the head its scaled input
        kept = (2 * (WIDTH + 4 * WIDTH) + WIDTH) * hidden
        assert tracker.live["activation"] == kept
        assert tracker.live["output"] == WORDS * hidden
        out.sum().backward()
        assert tracker.live["activation"] == 0
        assert tracker.live["temporary"] == 0
        assert tracker.live["gradient"] == WEIGHTS - IDLE
        optimizer.step()
        assert tracker.live["optimizer_state"] >= 2 * (WEIGHTS - IDLE)
        optimizer.zero_grad()
        assert tracker.live["gradient"] == 0


def test_a_gradient_is_one_from_its_first_byte_on() -> None:
    model = nn.Linear(64, 64, bias=False)
    with MemoryTracker(model, inputs=(x := torch.ones(1, 64))) as tracker:
        model(x).sum().backward()
    # the product that becomes the gradient is the largest thing that a backward makes here
    assert tracker.peaks["backward"]["gradient"] == 64 * 64 * FLOAT


def test_states_are_states_at_the_peak_of_the_step_that_makes_them() -> None:
    tracker = train()
    assert tracker.peaks["step"]["optimizer_state"] >= 2 * (WEIGHTS - IDLE)


def test_tied_weights_count_once() -> None:
    tracker = train(lambda: Net(tied=True))
    assert tracker.peak.by_category["weight"] == WEIGHTS - WORDS * WIDTH * FLOAT
    assert {a.name for a in tracker.alive_at_peak(100)} >= {"embedding.weight"}


def test_tensors_that_nobody_declared_are_inputs_once_they_are_used() -> None:
    model, batch, mask = nn.Linear(4, 4), torch.ones(2, 4), torch.ones(2, 4)
    with MemoryTracker(model) as tracker:
        assert tracker.live["input"] == 0
        loss = (model(batch) * mask).sum()
        assert tracker.live["input"] == 2 * 8 * FLOAT
        del loss


def test_what_is_made_between_steps_is_input() -> None:
    model = nn.Linear(4, 4)
    with MemoryTracker(model) as tracker:
        batch = torch.ones(2, 4)
        assert tracker.live["input"] == 8 * FLOAT
        del batch
        assert tracker.live["input"] == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "again", "reentrant"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_fake_tensors_show_what_real_ones_do(reentrant: bool | None, microbatches: int) -> None:
    real, fake = (
        train(lambda: Net(reentrant), steps=2, microbatches=microbatches, fake=fake)
        for fake in (False, True)
    )
    assert not real.is_fake
    assert fake.is_fake
    assert fake.peaks == real.peaks
    assert fake.snapshots == real.snapshots
    assert fake.alive_at_peak() == real.alive_at_peak()


def test_a_tracker_outside_of_the_fake_mode_sees_the_same() -> None:
    with FakeTensorMode() as mode:
        model, batch = Net(), words()
    inside, outside = [], []
    with mode, MemoryTracker(model, inputs=batch) as tracker:
        model(batch).sum().backward()
        inside.append(tracker.peaks)
    model.zero_grad()
    with MemoryTracker(model, inputs=batch) as tracker:
        with mode:
            model(batch).sum().backward()
        outside.append(tracker.peaks)
    assert inside == outside
    assert inside[0]["forward"]["activation"] > 0


def test_real_tensors_do_not_count_beside_a_fake_model() -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 4)
    with MemoryTracker(model) as tracker:
        real = torch.ones(1000)
        assert tracker.total == bytes_of(model.parameters())
        del real


def test_fake_tensors_do_not_count_beside_a_real_model() -> None:
    model = nn.Linear(4, 4)
    with MemoryTracker(model) as tracker, FakeTensorMode():
        fake = torch.ones(1000)
        assert tracker.total == bytes_of(model.parameters())
        del fake


def test_meta_tensors_have_no_memory() -> None:
    with MemoryTracker() as tracker:
        made = torch.empty(1000, device="meta")
        assert tracker.total == 0
        del made


def test_sparse_gradients_count_by_their_parts() -> None:
    model, batch = nn.Embedding(100, 4, sparse=True), torch.tensor([1, 2, 3])
    with MemoryTracker(model, inputs=batch) as tracker:
        model(batch).sum().backward()
        assert tracker.live["gradient"] == 3 * 8 + 3 * 4 * FLOAT


def test_bytes_can_be_rounded_up() -> None:
    with MemoryTracker(granularity=512) as tracker:
        x = torch.ones(3)
        y = torch.ones(200)
        nothing = torch.ones(0)
        assert tracker.total == 512 + 1024
        del x, y, nothing
        assert tracker.total == 0


def test_checkpointing_keeps_less_and_says_what_is_computed_again() -> None:
    kept, again = train(warm=True), train(lambda: Net(False), warm=True)
    assert again.peaks["forward"]["activation"] < kept.peaks["forward"]["activation"]
    states = {s.state for s in again.snapshots if s.module == "blocks.0.up"}
    assert {"before recompute", "after recompute"} <= states
    assert not {s.state for s in kept.snapshots} & {"before recompute", "after recompute"}


@dataclass(slots=True)
class Held:
    one: torch.Tensor


@dataclass(slots=True)
class Both(Held):
    other: torch.Tensor


def test_tensors_in_slots_of_a_base_class_are_found() -> None:
    one, other = torch.ones(1), torch.ones(2)
    found = tensors_in([Both(one, other)])
    assert {id(tensor) for tensor in found} == {id(one), id(other)}
