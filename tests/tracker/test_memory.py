from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.tracker.memory import MemoryTracker

FLOAT = 4


def test_a_storage_counts_once_however_many_views_it_has() -> None:
    with MemoryTracker() as tracker:
        x = torch.ones(100)
        views = [x[:50], x.view(10, 10), x.t(), x.detach()]
        assert tracker.total == 100 * FLOAT
        del x
        assert tracker.total == 100 * FLOAT
        del views
        assert tracker.total == 0
    tracker.close()


def test_what_is_freed_stays_in_the_peak_of_its_phase() -> None:
    with MemoryTracker() as tracker:
        with tracker.during("forward"):
            x = torch.ones(100)
            y = torch.ones(50)
            del y
        with tracker.during("backward"):
            z = torch.ones(10)
        assert sum(tracker.peaks["forward"].values()) == 150 * FLOAT
        assert sum(tracker.peaks["backward"].values()) == 110 * FLOAT
        assert tracker.peaks["backward"] == {"activation": 100 * FLOAT, "temporary": 10 * FLOAT}
        del x, z
    tracker.close()


def test_a_peak_that_is_the_last_thing_of_a_phase_is_of_that_phase() -> None:
    with MemoryTracker() as tracker:
        with tracker.during("forward"):
            x = torch.ones(100)
        with tracker.during("backward"):
            del x
        assert (tracker.peak.phase, tracker.peak.bytes) == ("forward", 100 * FLOAT)
    tracker.close()


def test_an_adopted_tensor_keeps_its_kind() -> None:
    weight = torch.ones(7)
    with MemoryTracker() as tracker:
        tracker.adopt(weight, "weight")
        tracker.adopt(weight, "weight")
        doubled = weight * 2
        assert tracker.live == {"weight": 7 * FLOAT, "temporary": 7 * FLOAT}
        tracker.adopt(doubled, "gradient")
        assert tracker.live["gradient"] == 7 * FLOAT
        assert tracker.live["temporary"] == 0
    tracker.close()


def test_a_resized_storage_is_followed() -> None:
    buffer = torch.ones(100)
    with MemoryTracker() as tracker:
        tracker.adopt(buffer, "gathered_weight")
        buffer.untyped_storage().resize_(0)
        assert tracker.total == 0
        buffer.untyped_storage().resize_(400)
        assert tracker.total == 400
    tracker.close()


def test_an_output_argument_that_grows_is_counted_at_its_new_size() -> None:
    ones = torch.ones(1000)
    with MemoryTracker() as tracker:
        given = torch.empty(0)
        torch.add(ones, ones, out=given)
        assert tracker.total == 1000 * FLOAT
    tracker.close()


def test_a_resized_tensor_is_counted_at_its_new_size() -> None:
    with MemoryTracker() as tracker:
        grown = torch.empty(10).resize_(100)
        assert tracker.total == grown.nbytes == 100 * FLOAT
    assert tracker.peak.bytes == 110 * FLOAT  # for torch copies from one to the other
    tracker.close()


def test_resize_is_torchs_own_again_outside() -> None:
    before = torch.UntypedStorage.resize_
    tracker = MemoryTracker()
    with tracker:
        assert torch.UntypedStorage.resize_ is not before
    tracker.close()
    assert torch.UntypedStorage.resize_ is before


def test_the_memory_of_a_training_step_comes_and_goes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    weights = sum(p.numel() for p in model.parameters()) * FLOAT
    batch = torch.ones(32, 8)
    with MemoryTracker() as tracker:
        for parameter in model.parameters():
            tracker.adopt(parameter, "weight")
        tracker.adopt(batch, "input")
        start = tracker.total
        assert start == weights + 32 * 8 * FLOAT
        with tracker.during("forward"):
            loss = model(batch).sum()
        kept = 32 * 16 * FLOAT  # of the two linear layers and the ReLU, only its output is saved
        assert tracker.total == start + kept + FLOAT
        loss.backward()
        assert tracker.total == start + weights + FLOAT
    tracker.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("batch", "length", "wide", "hidden"), [(8, 64, 64, 100), (3, 5, 70, 33), (4, 2, 16, 256)]
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_lstm_on_fake_tensors_keeps_what_a_real_one_does(
    batch: int, length: int, wide: int, hidden: int, batch_first: bool
) -> None:
    def most() -> int:
        model = nn.LSTM(wide, hidden, 2, batch_first=batch_first)
        size = (batch, length, wide) if batch_first else (length, batch, wide)
        x = torch.zeros(size)
        for tracked in (False, True):  # torch keeps gradients of the first step otherwise
            tracker = MemoryTracker(model, inputs=x)
            with tracker if tracked else nullcontext():
                model(x)[0].sum().backward()
            model.zero_grad()
        return tracker.peak.bytes

    with FakeTensorMode():
        fake = most()
    # to the byte with oneDNN's AVX2 kernels; others may pad their rows otherwise
    assert fake == pytest.approx(most(), rel=0.03)
