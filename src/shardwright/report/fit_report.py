"""What of a job fits, in a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.fit import Estimate, Fit, Largest
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.report.sheet import Column, Sheet
from shardwright.report.table import drawn, listed, spaced
from shardwright.report.wording import (
    TEXT_LIMIT,
    VERDICT_STYLES,
    counted,
    largest_text,
    printable,
    range_text,
)

HOW = (
    "Fits: live bytes, what the allocator holds and the upper end of what else is on the device. "
    "Keep a margin of your own for what is not predicted: data loaders, evaluation, libraries."
)


def fit_report(fit: Fit) -> RenderableType:
    """The job as it is, a row per policy, the longest sequence, the fewest ranks, and ways out."""
    fits = fit.own.largest_batch.size > 0
    return spaced(
        Text(headline(fit), style="bold"),
        Text(job_line(fit), style=VERDICT_STYLES[fit.own.estimate.verdict]),
        drawn(policies_sheet(fit)),
        Text("\n".join(answers(fit))),
        None if fits else Text(refusal(fit), style="bold red"),
        drawn(remedies_sheet(fit)) if fit.remedies else None,
        listed("Not looked at", tuple(printable(text, TEXT_LIMIT) for text in fit.skipped)),
        listed("Assumptions", tuple(printable(text, TEXT_LIMIT) for text in fit.assumptions)),
        Text(HOW, style="dim"),
        Text(
            f"{counted(fit.estimates, 'estimate')} in {format_seconds(fit.seconds)}. "
            "One of them in detail: shardwright memory JOB.toml.",
            style="dim",
        ),
    )


def headline(fit: Fit) -> str:
    """What is looked for, in one line."""
    capacity = format_bytes(fit.capacity)
    ranks = counted(fit.world_size, "rank")
    return f"What fits of {printable(fit.model)} on {ranks} of {capacity} each"


def job_line(fit: Fit) -> str:
    """The job as it is."""
    estimate = fit.own.estimate
    needs = range_text(estimate.least_bytes, estimate.most_bytes)
    return f"As it is ({_batch_text(fit)}, {fit.checkpointing}): {estimate.verdict}, needs {needs}."


def policies_sheet(fit: Fit) -> Sheet:
    """One row per checkpointing policy."""
    columns: tuple[Column, ...] = (
        Column("checkpointing"),
        Column(f"peak, batch {fit.batch}", numeric=True),
        Column("needs of its device", numeric=True),
        Column("verdict"),
        Column("largest batch", numeric=True),
        Column("tokens per rank", numeric=True),
    )
    rows: list[tuple[str, ...]] = [
        (
            printable(row.checkpointing) + (" (the job's)" if row is fit.own else ""),
            format_bytes(row.estimate.peak_bytes),
            range_text(row.estimate.least_bytes, row.estimate.most_bytes),
            row.estimate.verdict,
            largest_words(row.largest_batch),
            f"{row.largest_batch.size * fit.sequence:,}" if row.largest_batch.size else "-",
        )
        for row in fit.policies
    ]
    if fit.sequence == 1:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Sheet("By checkpointing policy", columns, tuple(rows))


def answers(fit: Fit) -> list[str]:
    """The longest sequence and the fewest ranks, of the job's own policy."""
    lines = []
    if fit.longest_sequence is not None:
        longest = fit.longest_sequence
        unit = f" (in steps of {longest.step:,})" if longest.step > 1 and longest.size else ""
        words = f"{largest_words(longest)} tokens{unit}" if longest.size else "none fits"
        lines.append(f"Longest sequence with batch {fit.batch}, {fit.checkpointing}: {words}.")
    if fit.fewest_ranks is not None:
        none = "no number is enough that only shares data"
        ranks = counted(fit.fewest_ranks, "rank") if fit.fewest_ranks else none
        lines.append(f"Fewest ranks for {_batch_text(fit)} each, {fit.checkpointing}: {ranks}.")
    if not all(row.largest_batch.even for row in fit.policies):
        lines.append("A larger batch was seen to need less: sizes were tried one by one there.")
    return lines


def refusal(fit: Fit) -> str:
    """Why not even the smallest batch fits: what fills the rank."""
    estimate = fit.own.estimate
    step = fit.own.largest_batch.step
    return (
        f"Not even {counted(step, 'sample')} per rank fits under the job's own settings. At batch "
        f"{fit.batch} the peak is in {printable(estimate.peak_phase)}; the largest are "
        f"{largest_text(estimate.by_category)}."
    )


def remedies_sheet(fit: Fit) -> Sheet:
    """What was tried, what fits first."""
    return Sheet(
        f"What helps, tried with {counted(fit.own.largest_batch.step, 'sample')} per rank",
        (
            Column("change"),
            Column("peak", numeric=True),
            Column("needs of its device", numeric=True),
            Column("verdict"),
        ),
        tuple(
            (
                printable(" and ".join(remedy.changes), TEXT_LIMIT),
                format_bytes(remedy.estimate.peak_bytes),
                _needs(remedy.estimate),
                remedy.estimate.verdict,
            )
            for remedy in fit.remedies
        ),
        "Each alone, but for a row that names several.",
    )


def largest_words(found: Largest) -> str:
    """A size or ``none``, that the next one is not sure, or that more were not looked at."""
    words = f"{found.size:,}" if found.size else "none"
    if found.next_perhaps:
        return f"{words}, perhaps {found.size + found.step:,}"
    return f"{words} or more" if found.or_more else words


def _needs(estimate: Estimate) -> str:
    return range_text(estimate.least_bytes, estimate.most_bytes)


def _batch_text(fit: Fit) -> str:
    samples = counted(fit.batch, "sample")
    return samples if fit.sequence == 1 else f"{samples} of {counted(fit.sequence, 'token')}"
