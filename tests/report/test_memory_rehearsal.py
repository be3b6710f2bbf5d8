from __future__ import annotations

import io

import msgspec
from footprints import MIB, footprint
from rich.console import Console

from shardwright.core.footprint import PhasePeak, Tracked
from shardwright.report.memory_report import rehearsal_report


def flowed(measured: Tracked) -> str:
    out = io.StringIO()
    Console(width=120, no_color=True, file=out).print(rehearsal_report(footprint(), [measured]))
    return " ".join(out.getvalue().split())


def measured(more: int = 0) -> Tracked:
    """What was predicted, as a tracker tells it, with ``more`` bytes of temporaries."""
    phases = []
    for phase in footprint().worst.phases:
        kinds = dict(phase.by_category)
        kinds["temporary"] += more
        kinds["output"] = MIB  # a tracker tells outputs apart
        if "activation" in kinds:
            kinds["activation"] -= MIB
        phases.append(PhasePeak(phase.phase, phase.bytes + more, kinds))
    peak = max(phases, key=lambda phase: phase.bytes)
    return Tracked("Llama", False, peak, tuple(phases), ())


def test_equal_bytes_are_said_to_be_equal() -> None:
    text = flowed(measured())
    assert "backward 22.98 GiB 22.98 GiB equal equal" in text
    assert "activations 7.47 GiB 7.47 GiB equal equal" in text
    assert "+" not in text


def test_a_difference_is_shown_to_the_byte() -> None:
    text = flowed(measured(more=4096))
    assert "-4,096 B" in text
    assert "temporaries 1.96 GiB 1.96 GiB -4,096 B" in text


def test_a_phase_that_was_not_measured_is_left_out() -> None:
    told = measured()
    text = flowed(msgspec.structs.replace(told, phases=told.phases[:2]))
    assert "forward 22.12 GiB" in text
    assert "step 12" not in text
