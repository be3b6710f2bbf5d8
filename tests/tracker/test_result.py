"""What a tracker hands out: peaks, what was alive, a table, one value."""

from __future__ import annotations

import msgspec
import torch
from torch import nn
from tracker_nets import train

from shardwright.core.footprint import AllocatorMemory, PhasePeak, Tracked
from shardwright.tracker.memory import MemoryTracker
from shardwright.tracker.reading import as_text


def test_the_peak_is_the_highest_of_all_phases_and_says_where() -> None:
    tracker = train(steps=2)
    highest = max(tracker.peaks.values(), key=lambda kinds: sum(kinds.values()))
    assert tracker.peak.by_category == highest
    assert tracker.peak.bytes == sum(highest.values())
    assert tracker.peaks[tracker.peak.phase] == highest
    assert tracker.peak.at == "blocks.1: aten.threshold_backward"


def test_the_largest_tensors_of_the_peak_are_named() -> None:
    tracker = train(steps=2)
    alive = tracker.alive_at_peak(1000)
    assert sum(a.bytes for a in alive) == tracker.peak.bytes
    assert [a.bytes for a in alive] == sorted((a.bytes for a in alive), reverse=True)
    names = {a.name: a.kind for a in alive}
    assert names["blocks.0.up.weight"] == "weight"
    assert names["blocks.0.up.weight.exp_avg"] == "optimizer_state"
    assert names["head.weight.grad"] == "gradient"
    assert names["scale"] == "buffer"
    assert tracker.alive_at_peak(3) == alive[:3]


def test_what_has_no_name_is_shown_by_module_and_operation() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    with MemoryTracker(model, inputs=batch) as tracker:
        kept = [model(batch), model(batch)]
    del kept
    found = {a.name: a for a in tracker.alive_at_peak()}
    assert found["0: aten.addmm"].module == "0"
    assert found["1: aten.relu"].count == 2


def test_the_timeline_ends_with_what_is_alive() -> None:
    tracker = train()
    kinds, samples = tracker.timeline()
    assert max(sum(sample.bytes) for sample in samples) == tracker.peak.bytes
    last = {kind: n for kind, n in zip(kinds, samples[-1].bytes, strict=True) if n}
    assert last == {kind: n for kind, n in tracker.live.items() if n}
    assert [sample.phase for sample in samples][-1] == "setup"


def test_the_value_survives_json() -> None:
    result = train(steps=2, fake=True).result()
    assert result.fake
    assert msgspec.json.decode(msgspec.json.encode(result), type=Tracked) == result


def test_the_report_names_phases_categories_modules_and_tensors() -> None:
    text = train(steps=2).report()
    assert text.startswith("Net: peak ")
    for word in ("optimizer states", "backward", "iteration 2", "blocks.1.up", "idle", "Linear"):
        assert word in text
    assert "blocks.0.up.weight.exp_avg" in text
    assert max(map(len, text.splitlines())) < 140


def test_a_device_stands_beside_it_with_the_accuracy() -> None:
    device = AllocatorMemory("some GPU", 0, 1000, 900, 2000, 1, 0)
    peak = PhasePeak("backward", 950, {"weight": 950})
    tracked = Tracked("Net", False, peak, (peak,), (peak,), device=device)
    assert tracked.accuracy == 0.95
    lines = as_text(tracked).splitlines()
    assert any(line.split() == ["accuracy", "0.950"] for line in lines)
    assert any(line.split() == ["retries", "1"] for line in lines)


def test_without_a_device_there_is_no_accuracy() -> None:
    assert train(fake=True).result().accuracy is None


def test_a_tracker_that_saw_nothing_has_an_empty_peak() -> None:
    with MemoryTracker() as tracker:
        pass
    assert tracker.peak == PhasePeak("setup", 0, {})
    assert tracker.report()
