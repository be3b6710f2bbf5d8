"""Predicted beside measured as sheets, and the verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.measurement import ComparedNumber, Comparison
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.core.timeline import BESIDE, PHASES, category
from shardwright.job.plan import Plan
from shardwright.report.sheet import Column, Sheet, number, sheet_of, text
from shardwright.report.wording import (
    TEXT_LIMIT,
    counted,
    error_text,
    percent,
    printable,
    ranks_text,
    seconds_text,
    signed_bytes,
)

MOST_RANKS = 4
MOST_DIFFERENCES = 20
MOST_PEAKS = 16
_NOTE = (
    "Errors are (predicted - measured) / measured; where one is more than twice the other, "
    "predicted / measured."
)
CALIBRATE = (
    "Seconds rest on constants of a preset: shardwright calibrate -o cluster.toml measures this "
    "machine's, and a job names that file as cluster.file."
)
TIMES_OFF = 2.0  # a prediction of time that is further off is not called good


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the prediction held, and the sentence that says so."""

    held: bool
    sentence: str


def verdict(comparison: Comparison) -> Verdict:
    """Exact bytes equal and peaks within tolerance, counted by rank; then any other failure."""
    unequal = {line.rank for line in comparison.exact if not _equal(line)}
    ranks = {line.rank for line in (*comparison.exact, *comparison.peaks)}
    unequal |= ranks - {line.rank for line in comparison.exact} if comparison.exact else set()
    errors = [_distance(line) for line in comparison.peaks]
    worst = max(errors, default=0.0)
    within = worst <= comparison.tolerance
    parts = []
    if comparison.exact:
        parts.append(
            f"exact bytes equal on {len(ranks - unequal)} of {counted(len(ranks), 'rank')}"
        )
    if errors and within:
        parts.append("peak equal" if worst == 0 else f"peak within {percent(worst)}")
    elif errors:
        off = "missing" if worst == float("inf") else f"off by {percent(worst)}"
        parts.append(f"peak {off} (tolerance {percent(comparison.tolerance)})")
    if not parts and comparison.failures:
        return Verdict(False, f"{comparison.failures[0]}.")
    if not parts:
        return Verdict(False, "Nothing was compared: the two timelines share no rank.")
    facts = ", ".join(parts)
    if unequal or not within:
        return Verdict(False, f"Memory not as predicted: {facts}.")
    if comparison.failures:
        failed = counted(len(comparison.failures), "other check")
        return Verdict(False, f"Memory as predicted: {facts}; but {failed} failed.")
    return Verdict(True, f"Memory as predicted: {facts}.")


def time_verdict(comparison: Comparison) -> Verdict | None:
    """The predicted step of the slowest rank beside its measured one; None where neither is known.

    Seconds are no gate, but a prediction that is off by more than a factor is never called held.
    """
    known = [line for line in comparison.seconds if line.predicted and line.measured]
    totals = [_total(rank, lines) for rank, lines in _by_rank(known).items()]
    if not totals:
        return None
    measured, predicted, rank = max((t.measured or 0, t.predicted or 0, t.rank) for t in totals)
    shared = {line.phase for line in known if line.rank == rank}
    others = [x.phase for x in comparison.seconds if x.rank == rank and x.phase not in shared]
    without = f", without {', '.join(map(printable, others))}" if others else ""
    return Verdict(
        1 / TIMES_OFF <= predicted / measured <= TIMES_OFF,
        f"Step on rank {rank}, the slowest: {format_seconds(measured)} measured, "
        f"{format_seconds(predicted)} predicted ({error_text(predicted, measured)}){without}.",
    )


def uncalibrated(comparison: Comparison, plan: Plan) -> bool:
    """Whether seconds are far off, and the plan's are of no machine that was measured."""
    times = time_verdict(comparison)
    return times is not None and not times.held and plan.job.cluster.measured is None


def _by_rank(lines: Iterable[ComparedNumber]) -> dict[int, list[ComparedNumber]]:
    found: dict[int, list[ComparedNumber]] = {}
    for line in lines:
        found.setdefault(line.rank, []).append(line)
    return found


def failures(comparison: Comparison) -> tuple[str, ...]:
    """Why the comparison failed, printable."""
    return tuple(printable(text, TEXT_LIMIT) for text in comparison.failures)


def exact_sheet(comparison: Comparison) -> Sheet:
    """Bytes of each exact kind per rank; ranks with the same figures share their rows."""
    by_rank: dict[int, dict[str, list[ComparedNumber]]] = {}
    for line in comparison.exact:
        by_rank.setdefault(line.rank, {}).setdefault(line.kind, []).append(line)
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank in sorted(by_rank):
        rows = tuple(_exact_row(kind, lines) for kind, lines in by_rank[rank].items())
        alike.setdefault(rows, []).append(rank)
    return Sheet(
        "Exact bytes per rank",
        (
            Column("rank"),
            Column("bytes of"),
            Column("predicted", numeric=True),
            Column("measured", numeric=True),
            Column("difference", numeric=True),
        ),
        tuple(
            (ranks_text(ranks, len(by_rank)), *row) for rows, ranks in alike.items() for row in rows
        ),
        "These must be equal to the byte, tensor by tensor.",
    )


def _exact_row(kind: str, lines: list[ComparedNumber]) -> tuple[str, ...]:
    wrong = sum(not _equal(line) for line in lines)
    predicted = [line.predicted for line in lines if line.predicted is not None]
    measured = [line.measured for line in lines if line.measured is not None]
    difference = sum(line.difference for line in lines)
    said = "equal" if not wrong else f"{difference:+,.0f} B ({wrong} of {len(lines)} differ)"
    return (
        printable(category(kind)),
        f"{sum(predicted):,.0f}" if predicted else "not predicted",
        f"{sum(measured):,.0f}" if measured else "not measured",
        said,
    )


def unequal_sheet(comparison: Comparison, most: int = MOST_DIFFERENCES) -> Sheet | None:
    """The exact lines that differ, tensor by tensor; None if all are equal."""
    wrong = [line for line in comparison.exact if not _equal(line)]
    if not wrong:
        return None
    left = len(wrong) - most
    return sheet_of(
        "Exact bytes that differ",
        wrong[:most],
        (
            text("rank", lambda line: str(line.rank)),
            text("phase", lambda line: printable(line.phase)),
            text("bytes of", lambda line: printable(category(line.kind)), spare=1),
            text("name", lambda line: printable(line.name)),
            number("predicted", lambda line: _plain(line.predicted, "not predicted")),
            number("measured", lambda line: _plain(line.measured, "not measured")),
            number("difference", lambda line: signed_bytes(line.difference)),
        ),
        f"And {left:,} more." if left > 0 else "",
    )


def peaks_sheet(comparison: Comparison, most: int = MOST_PEAKS) -> Sheet:
    """The peak of each rank, with its error; of more than ``most`` those furthest off."""
    lines = comparison.peaks
    if len(lines) > most:
        lines = tuple(sorted(lines, key=_distance, reverse=True)[:most])
    left = len(comparison.peaks) - len(lines)
    rest = "rank is" if left == 1 else f"{left:,} ranks are"
    others = f" The other {rest} closer." if left else ""
    return sheet_of(
        "Peak per rank",
        lines,
        (
            text("rank", lambda line: str(line.rank)),
            text("phase", lambda line: printable(line.phase)),
            number("predicted", lambda line: _size(line.predicted, "not predicted")),
            number("measured", lambda line: _size(line.measured, "not measured")),
            number("difference", _difference),
            number("error", _error),
        ),
        f"Within {percent(comparison.tolerance)} is as predicted.{others}",
    )


def exchanges_sheet(comparison: Comparison, most: int = MOST_PEAKS) -> Sheet | None:
    """What tables exchange while ranks compute: hidden and exposed, rank by rank; None where
    nothing does."""
    pairs: dict[tuple[int, str], dict[str, ComparedNumber]] = {}
    for line in comparison.exchanges or ():
        pairs.setdefault((line.rank, line.name), {})[line.kind] = line
    if not pairs:
        return None
    left = len(pairs) - most
    more = f" And {left:,} more rows." if left > 0 else ""
    sides = ("predicted", "measured")

    def seconds(kind: str, side: str) -> Column:
        return Column(f"{kind}\n{side}", numeric=True)

    return Sheet(
        "Exchanges while ranks compute, seconds per step",
        (
            Column("rank"),
            Column("exchange of"),
            *(seconds(kind, side) for kind in reversed(BESIDE) for side in sides),
        ),
        tuple(
            (
                str(rank),
                printable(name.replace("_", " ")),
                *(
                    seconds_text(getattr(lines.get(kind), side, None))
                    for kind in reversed(BESIDE)
                    for side in sides
                ),
            )
            for (rank, name), lines in [*pairs.items()][:most]
        ),
        "Exposed is predicted as all that an exchange costs a step, the cores that it takes from "
        "compute among it, and measured as the time that a rank was held. Hidden is predicted as "
        "what costs nothing, and measured as the time that a rank computed on while the exchange "
        f"was under way, however long it took.{more}",
    )


def phase_sheets(comparison: Comparison, most: int = MOST_RANKS) -> tuple[Sheet, ...]:
    """Peak and seconds of every phase, one sheet per rank; of more than ``most`` only the
    slowest."""
    totals: dict[int, float] = {}
    for line in comparison.seconds:
        totals[line.rank] = totals.get(line.rank, 0.0) + (line.measured or line.predicted or 0.0)
    ranks = sorted({line.rank for line in (*comparison.seconds, *comparison.phase_peaks)})
    if len(ranks) <= most:
        return tuple(_phase_sheet(comparison, rank, f"Phases on rank {rank}") for rank in ranks)
    chosen = max(ranks, key=lambda rank: totals.get(rank, 0.0))
    title = f"Phases on rank {chosen}, the slowest of {len(ranks)}"
    return (_phase_sheet(comparison, chosen, title),)


def _phase_sheet(comparison: Comparison, rank: int, title: str) -> Sheet:
    peaks = {line.phase: line for line in comparison.phase_peaks if line.rank == rank}
    seconds = {line.phase: line for line in comparison.seconds if line.rank == rank}
    rows = [
        (printable(phase), *_peak_cells(peaks.get(phase)), *_second_cells(seconds.get(phase)))
        for phase in _ordered((*peaks, *seconds))
    ]
    if len(seconds) > 1:
        rows.append(("all", "", "", "", *_second_cells(_total(rank, seconds.values()))))
    return Sheet(
        title,
        (
            Column("phase"),
            Column("peak predicted", numeric=True),
            Column("measured", numeric=True),
            Column("error", numeric=True),
            Column("time predicted", numeric=True),
            Column("measured", numeric=True),
            Column("error", numeric=True),
        ),
        tuple(rows),
        _NOTE,
    )


def _ordered(phases: Iterable[str]) -> list[str]:
    known = {phase: index for index, phase in enumerate(PHASES)}
    return sorted(set(phases), key=lambda phase: (known.get(phase, len(known)), phase))  # type: ignore[call-overload]


def _total(rank: int, lines: Iterable[ComparedNumber]) -> ComparedNumber:
    """The sum over phases; a side that any phase lacks is unknown."""
    predicted: float | None = 0.0
    measured: float | None = 0.0
    for line in lines:
        if predicted is not None:
            predicted = None if line.predicted is None else predicted + line.predicted
        if measured is not None:
            measured = None if line.measured is None else measured + line.measured
    return ComparedNumber(rank, "all", "time", "", predicted, measured)


def _peak_cells(line: ComparedNumber | None) -> tuple[str, str, str]:
    if line is None:
        return "-", "-", "-"
    return _size(line.predicted, "-"), _size(line.measured, "-"), _error(line)


def _second_cells(line: ComparedNumber | None) -> tuple[str, str, str]:
    if line is None:
        return "-", "-", "-"
    return seconds_text(line.predicted), seconds_text(line.measured), _error(line)


def _both(line: ComparedNumber) -> bool:
    return line.predicted is not None and line.measured is not None


def _equal(line: ComparedNumber) -> bool:
    return _both(line) and line.predicted == line.measured


def _distance(line: ComparedNumber) -> float:
    """How far a peak is off, as a share; infinite where a side is missing."""
    if not _both(line) or (line.error is None and line.difference):
        return float("inf")
    return abs(line.error or 0.0)


def _difference(line: ComparedNumber) -> str:
    return signed_bytes(line.difference) if _both(line) else "-"


def _error(line: ComparedNumber) -> str:
    if not _both(line):
        return "-"
    if line.difference == 0:
        return "equal"
    return error_text(line.predicted, line.measured)


def _plain(nbytes: float | None, absent: str) -> str:
    return absent if nbytes is None else f"{nbytes:,.0f}"


def _size(nbytes: float | None, absent: str) -> str:
    return absent if nbytes is None else format_bytes(nbytes)
