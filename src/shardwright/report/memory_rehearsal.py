"""An estimate beside what was measured of the same step on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.categories import category, in_order
from shardwright.core.footprint import Footprint
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import Kind
from shardwright.core.tracked import Tracked
from shardwright.report.sheet import Column, Sheet
from shardwright.report.table import drawn, spaced
from shardwright.report.wording import percent, printable, signed_bytes

TITLE = "Run on this machine: two steps as one CPU rank, whole fp32 parameters"
# What a tracker tells apart and an estimate does not: a model's last activation, and gradients of
# parameters that nothing shards.
SAME: dict[Kind, Kind] = {"output": "activation", "unreduced_gradient": "gradient"}


def rehearsal_report(predicted: Footprint, measured: Tracked) -> RenderableType:
    """Phases, and categories at the measured peak."""
    return spaced(
        Text(TITLE, style="bold"),
        drawn(phases_sheet(predicted, measured)),
        drawn(kinds_sheet(predicted, measured)),
    )


def phases_sheet(predicted: Footprint, measured: Tracked) -> Sheet:
    """The peak of every phase."""
    found = {phase.phase: phase.bytes for phase in measured.phases}
    return Sheet(
        "Peak of each phase, all categories together",
        (Column("phase"), *_COLUMNS),
        tuple(
            (printable(p.phase), *_figures(p.bytes, found[p.phase]))
            for p in predicted.worst.phases
            if p.phase in found
        ),
    )


def kinds_sheet(predicted: Footprint, measured: Tracked) -> Sheet:
    """Categories at the peak of the phase whose measured peak is highest."""
    phase = measured.peak.phase
    told = {p.phase: p.by_category for p in predicted.worst.phases}
    before, after = _merged(told.get(phase, {})), _merged(measured.peak.by_category)
    kinds = [k for k in in_order({*before, *after}) if before.get(k) or after.get(k)]
    return Sheet(
        f"By category at the peak, in {printable(phase)}",
        (Column("category"), *_COLUMNS),
        tuple((category(k), *_figures(before.get(k, 0), after.get(k, 0))) for k in kinds),
        "Outputs count as activations, and gradients that nobody shards as sharded.",
    )


_COLUMNS = (
    Column("predicted", numeric=True),
    Column("measured", numeric=True),
    Column("difference", numeric=True),
    Column("error", numeric=True),
)


def _figures(predicted: int, measured: int) -> tuple[str, str, str, str]:
    error = percent(predicted / measured - 1, signed=True) if measured else "-"
    return (
        format_bytes(predicted),
        format_bytes(measured),
        signed_bytes(predicted - measured),
        error,
    )


def _merged(kinds: Mapping[Kind, int]) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for kind, nbytes in kinds.items():
        shown = SAME.get(kind, kind)
        found[shown] = found.get(shown, 0) + nbytes
    return found
