from __future__ import annotations

import io

import msgspec
from footprints import MIB, footprint
from rich.console import Console

from shardwright.core.footprint import PhasePeak, Snapshot, State, Tracked
from shardwright.report.memory_report import rehearsal_report


def flowed(measured: Tracked, *, full: bool = False) -> str:
    out = io.StringIO()
    shown = rehearsal_report(footprint(), [measured], full=full)
    Console(width=120, no_color=True, file=out).print(shown)
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


def test_a_full_report_has_every_step_and_modules_as_they_are_entered_and_left() -> None:
    told = measured()
    moments: dict[State, int] = {
        "before pre-forward": 1,
        "peak forward": 3,
        "after post-forward": 2,
    }
    seen = [
        Snapshot(name, state, step, call, size * more * MIB, {})
        for name, more in (("", 1), ("head", 10))
        for step, call in ((1, 1), (2, 1), (2, 2))
        for state, size in moments.items()
    ]
    steps = tuple(PhasePeak(f"iteration {k}", k * MIB, {}, f"at {k}") for k in (1, 2))
    told = msgspec.structs.replace(told, iterations=steps, snapshots=tuple(seen))
    text = flowed(told, full=True)
    assert "1 1.00 MiB at 1 2 2.00 MiB at 2 A step before them" in text
    assert "around every module, in step 2" in text
    assert "head 10.00 MiB 30.00 MiB 20.00 MiB - - -" in text
    assert "every step" not in flowed(told)
