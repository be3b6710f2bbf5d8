"""The profile of a run as sheets: seconds by kernel, and by phase with waiting and moving apart."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.measurement import PhaseTime, ProfiledStage, by_phase
from shardwright.core.quantities import counted, format_seconds
from shardwright.report.sheet import Sheet, number, sheet_of, text
from shardwright.report.wording import percent, printable

MOST_KERNELS = 20
_ALL = "all"


def profile_sheets(stages: Sequence[ProfiledStage], most: int = MOST_KERNELS) -> tuple[Sheet, ...]:
    """Both tables of every stage."""
    return tuple(
        sheet for stage in stages for sheet in (_phases_sheet(stage), _kernels_sheet(stage, most))
    )


def _phases_sheet(stage: ProfiledStage) -> Sheet:
    """Means over ranks; what waits longest is named."""
    ranks = sorted({line.rank for line in stage.phases})
    phases = {**by_phase(stage), _ALL: _totals(stage.phases, ranks)}

    def mean(of: str, lines: Sequence[PhaseTime]) -> float:
        found: float = sum(getattr(line, of) for line in lines) / len(ranks)
        return found

    def working(lines: Sequence[PhaseTime]) -> float:
        return mean("seconds", lines) - mean("waiting", lines) - mean("moving", lines)

    return sheet_of(
        f"Profile of {printable(stage.name)}, by phase",
        phases.items(),
        (
            text("phase", lambda each: printable(each[0])),
            number("of a step", lambda each: format_seconds(mean("seconds", each[1]))),
            number("works", lambda each: format_seconds(working(each[1]))),
            number("waits", lambda each: format_seconds(mean("waiting", each[1]))),
            number("moves bytes", lambda each: format_seconds(mean("moving", each[1]))),
            text("waits longest", lambda each: _longest(each[1])),
        ),
        _phases_note(stage),
    )


def _longest(lines: Sequence[PhaseTime]) -> str:
    longest = max(lines, key=lambda line: line.waiting)
    return f"rank {longest.rank}, {format_seconds(longest.waiting)}" if longest.waiting else ""


def _totals(lines: Sequence[PhaseTime], ranks: Sequence[int]) -> list[PhaseTime]:
    own = {rank: [line for line in lines if line.rank == rank] for rank in ranks}
    return [
        PhaseTime(
            rank,
            _ALL,
            sum(line.seconds for line in found),
            sum(line.waiting for line in found),
            sum(line.moving for line in found),
        )
        for rank, found in own.items()
    ]


def _phases_note(stage: ProfiledStage) -> str:
    note = (
        f"Means over ranks and {counted(stage.steps, 'step')}. A rank waits in a collective until "
        "the last rank has come, and moves bytes after. Clocks agree within "
        f"{format_seconds(stage.clock_error)}."
    )
    if stage.awaited:
        last = max(stage.awaited, key=lambda found: found.seconds)
        seconds = format_seconds(last.seconds)
        note += f" Others wait most for rank {last.rank}: {seconds} a step, all together."
    if stage.unmatched:
        note += f" {counted(stage.unmatched, 'collective')} could not be matched across ranks."
    return note


def _kernels_sheet(stage: ProfiledStage, most: int) -> Sheet:
    shown = stage.kernels[:most]
    left = stage.kernels[most:]
    note = "Of a collective a mean far above the median is waiting rather than bytes."
    if left:
        note += f" {counted(len(left), 'line')} with less are not shown, together "
        note += f"{percent(sum(kernel.share for kernel in left))}."
    return sheet_of(
        f"Profile of {printable(stage.name)}, by kernel",
        shown,
        (
            text("kernel", lambda k: printable(k.name)),
            number("calls", lambda k: f"{k.calls:,}"),
            number("mean", lambda k: format_seconds(k.mean)),
            number("median", lambda k: format_seconds(k.median)),
            number("longest", lambda k: format_seconds(k.longest)),
            number("share", lambda k: percent(k.share)),
        ),
        note,
    )
