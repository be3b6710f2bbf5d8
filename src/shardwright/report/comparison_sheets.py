"""Predicted beside measured as sheets, and the verdict in one sentence."""

# Bytes are a gate and seconds are not: what is allocated follows from the plan alone, while seconds
# rest on constants that may be of another machine. So exact bytes must be equal to the byte, peaks
# within the tolerance, and a verdict never calls something good that was only looked at in part: a
# side that is missing is infinitely far off, and a rank without exact bytes is not as predicted.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shardwright.core.measurement import ComparedNumber, Comparison
from shardwright.core.quantities import counted, format_bytes, format_seconds
from shardwright.core.timeline import BESIDE, PHASES, category
from shardwright.job.plan import Plan
from shardwright.report.sheet import Cell, Sheet, number, sheet_of, text
from shardwright.report.wording import (
    TEXT_LIMIT,
    about_seconds,
    error_text,
    percent,
    printable,
    ranks_text,
    seconds_text,
    signed_bytes,
    slower_text,
)

# Its name, its peak and its seconds.
_Phase = tuple[str, ComparedNumber | None, ComparedNumber | None]

MOST_RANKS = 4
MOST_DIFFERENCES = 20
MOST_PEAKS = 16
_NOTE = "Errors are (predicted - measured) / measured."
CALIBRATE = (
    "Seconds rest on constants of a preset: shardwright calibrate -o cluster.toml measures this "
    "machine's, and a job names that file as cluster.file."
)
TIMES_OFF = 2.0  # a prediction of time that is further off is not called good


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the prediction held, and the sentence that says so."""

    held: bool
    sentence: str


def verdict(comparison: Comparison) -> Judgement:
    """Exact bytes equal and peaks within tolerance, counted by rank; then any other failure."""
    unequal = {line.rank for line in comparison.exact if not _equal(line)}
    ranks = {line.rank for line in (*comparison.exact, *comparison.peaks)}
    # A rank that has peaks and no exact bytes was not compared, which is not the same as equal.
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
        # Rounded up: what is not equal is not within nothing.
        parts.append("peak equal" if worst == 0 else f"peak within {percent(max(worst, 1e-4))}")
    elif errors:
        off = "missing" if worst == float("inf") else f"off by {percent(worst)}"
        parts.append(f"peak {off} (tolerance {percent(comparison.tolerance)})")
    if not parts and comparison.failures:
        return Judgement(False, f"{comparison.failures[0]}.")
    if not parts:
        return Judgement(False, "Nothing was compared: the two timelines share no rank.")
    facts = ", ".join(parts)
    if unequal or not within:
        return Judgement(False, f"Memory not as predicted: {facts}.")
    if comparison.failures:
        failed = counted(len(comparison.failures), "other check")
        return Judgement(False, f"Memory as predicted: {facts}; but {failed} failed.")
    return Judgement(True, f"Memory as predicted: {facts}.")


def time_verdict(comparison: Comparison) -> Judgement | None:
    """The predicted step of the slowest rank beside its measured one; None where neither is known.

    Seconds are no gate, but a prediction that is off by more than a factor is never called held,
    unless the machine was too busy to say so.
    """
    # Phases that one side lacks are left out of both sums: a total with a hole would be compared
    # with one without.
    known = [line for line in comparison.seconds if line.predicted and line.measured]
    totals = [_total(rank, lines) for rank, lines in _by_rank(known).items()]
    if not totals:
        return None
    # The slowest as measured: a step takes as long as its slowest rank, and the plan may have been
    # wrong about which that is.
    measured, predicted, rank = max((t.measured or 0, t.predicted or 0, t.rank) for t in totals)
    shared = {line.phase for line in known if line.rank == rank}
    others = [x.phase for x in comparison.seconds if x.rank == rank and x.phase not in shared]
    without = f"; {', '.join(map(printable, others))} not counted" if others else ""
    why = comparison.unjudged or ""
    unjudged = f" Not judged: {printable(why, TEXT_LIMIT)}." if why else ""
    return Judgement(
        bool(why) or 1 / TIMES_OFF <= predicted / measured <= TIMES_OFF,
        f"Step on rank {rank}, the slowest: {format_seconds(measured)} measured, "
        f"{about_seconds(predicted)} predicted ({slower_text(predicted, measured)}){without}."
        f"{unjudged}",
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
    cells: list[Cell[tuple[str, list[ComparedNumber]]]] = [
        text("bytes of", lambda own: printable(category(own[0]))),
        number("predicted", lambda own: _sum([line.predicted for line in own[1]], "not predicted")),
        number("measured", lambda own: _sum([line.measured for line in own[1]], "not measured")),
        number("difference", lambda own: _sum_of_differences(own[1])),
    ]
    by_rank: dict[int, dict[str, list[ComparedNumber]]] = {}
    for line in comparison.exact:
        by_rank.setdefault(line.rank, {}).setdefault(line.kind, []).append(line)
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank in sorted(by_rank):
        # Compared as they are shown: ranks that read alike share their rows, whatever differs in no
        # cell.
        rows = sheet_of("", by_rank[rank].items(), cells).rows
        alike.setdefault(rows, []).append(rank)
    return sheet_of(
        "Exact bytes per rank",
        [(ranks_text(ranks, len(by_rank)), *row) for rows, ranks in alike.items() for row in rows],
        (text("rank", itemgetter(0)), *((c, itemgetter(k)) for k, (c, _) in enumerate(cells, 1))),
        "These must be equal to the byte, tensor by tensor.",
    )


def _sum(sides: Sequence[float | None], absent: str) -> str:
    known = [side for side in sides if side is not None]
    return f"{sum(known):,.0f}" if known else absent


def _sum_of_differences(lines: Sequence[ComparedNumber]) -> str:
    wrong = sum(not _equal(line) for line in lines)
    if not wrong:
        return "equal"
    return f"{sum(line.difference for line in lines):+,.0f} B ({wrong} of {len(lines)} differ)"


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

    def seconds(kind: str, side: str) -> Cell[tuple[tuple[int, str], dict[str, ComparedNumber]]]:
        title = f"{kind}\n{side}"
        return number(title, lambda each: seconds_text(getattr(each[1].get(kind), side, None)))

    return sheet_of(
        "Exchanges while ranks compute, seconds per step",
        [*pairs.items()][:most],
        (
            text("rank", lambda each: str(each[0][0])),
            text("exchange of", lambda each: printable(each[0][1].replace("_", " "))),
            *(
                seconds(kind, side)
                for kind in reversed(BESIDE)
                for side in ("predicted", "measured")
            ),
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
    rows = [(printable(p), peaks.get(p), seconds.get(p)) for p in _ordered((*peaks, *seconds))]
    if len(seconds) > 1:
        rows.append(("all", None, _total(rank, seconds.values())))

    def peak(row: _Phase, said: Callable[[ComparedNumber], str]) -> str:
        return said(row[1]) if row[1] else "" if row[0] == "all" else "-"

    def time(row: _Phase, said: Callable[[ComparedNumber], str]) -> str:
        return said(row[2]) if row[2] else "-"

    return sheet_of(
        title,
        rows,
        (
            text("phase", lambda row: row[0]),
            number("peak predicted", lambda row: peak(row, lambda x: _size(x.predicted, "-"))),
            number("measured", lambda row: peak(row, lambda x: _size(x.measured, "-"))),
            number("error", lambda row: peak(row, _error)),
            number("time predicted", lambda row: time(row, lambda x: seconds_text(x.predicted))),
            number("measured", lambda row: time(row, lambda x: seconds_text(x.measured))),
            number("error", lambda row: time(row, _error)),
        ),
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


def _both(line: ComparedNumber) -> bool:
    return line.predicted is not None and line.measured is not None


def _equal(line: ComparedNumber) -> bool:
    return _both(line) and line.predicted == line.measured


def _distance(line: ComparedNumber) -> float:
    """How far a peak is off, as a share; infinite where a side is missing."""
    # An error relative to nothing has no value; it must not pass as 0.
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
