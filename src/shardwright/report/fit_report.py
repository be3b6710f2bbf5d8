"""What of a job fits, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from rich.console import Group, RenderableType

from shardwright.core.footprint import Fit, PolicyFit, Remedy
from shardwright.core.quantities import counted, format_bytes, format_seconds
from shardwright.report.sheet import Cell, Sheet, number, sheet_of, text
from shardwright.report.table import assumed_line, drawn, listed, prose, spaced
from shardwright.report.wording import (
    TEXT_LIMIT,
    VERDICT_STYLES,
    fitting,
    largest_text,
    largest_words,
    mfu_text,
    policy_words,
    printable,
    range_text,
    step_time_sentence,
    two_digits,
)

MARGIN = "Keep a margin for what is not predicted: data loaders, evaluation, libraries."
HOW = (
    "Fits: live bytes, what the allocator holds and the upper end of what else is on the device. "
    + MARGIN
)
REFUSED = {True: VERDICT_STYLES["perhaps"], False: VERDICT_STYLES["does not fit"]}
FIRST_REMEDIES, FIRST_SKIPPED, FIRST_ASSUMED = 5, 2, 2  # lines of a first screen


def fit_report(fit: Fit, *, full: bool = False) -> RenderableType:
    """The job as it is, a row per policy, the longest sequence, the fewest ranks, and ways out: of
    what is long the beginning unless ``full``."""
    # "Largest 0" is how a search says that not even the smallest size fits.
    fits = fit.own.largest_batch.size > 0
    estimates = f"{counted(fit.estimates, 'estimate')} in {format_seconds(fit.seconds)}."
    one = "One of them in detail: shardwright memory JOB.toml."
    return spaced(
        prose(headline(fit), style="bold"),
        Group(*_as_it_is(fit)),
        drawn(policies_sheet(fit, full=full), short=not full),
        prose("\n".join(answers(fit))),
        None if fits else prose(refusal(fit), style=REFUSED[fit.own.largest_batch.next_perhaps]),
        drawn(remedies_sheet(fit, full=full)) if fit.remedies else None,
        listed("Not looked at", _skipped(fit, full=full)),
        listed("Assumptions", tuple(printable(text, TEXT_LIMIT) for text in fit.assumptions))
        if full
        else assumed_line([printable(text, TEXT_LIMIT) for text in fit.assumptions], FIRST_ASSUMED),
        prose(f"{HOW if full else MARGIN}\n{estimates} {one}", style="dim"),
    )


def _as_it_is(fit: Fit) -> Iterator[RenderableType]:
    yield prose(job_line(fit), style=VERDICT_STYLES[fit.own.estimate.verdict])
    if fit.time:
        yield prose(step_time_sentence(fit.time))


def headline(fit: Fit) -> str:
    """What is looked for, in one line."""
    capacity = format_bytes(fit.capacity)
    ranks = counted(fit.world_size, "rank")
    dtype = f", computing in {printable(fit.dtype)}" if fit.dtype else ""
    dtype += f" and reducing in {printable(fit.reduce_dtype)}" if fit.reduce_dtype else ""
    return f"What fits of {printable(fit.model)} on {ranks} of {capacity} each{dtype}"


def job_line(fit: Fit) -> str:
    """The job as it is."""
    its = fit.own.estimate
    where = f"the fullest rank, in {printable(its.peak_phase)}" if its.peak_phase else "all"
    text = fitting(its.least_bytes, its.most_bytes, fit.capacity, where)
    how = f"{_batch_text(fit)}, checkpointing {policy_words(fit.checkpointing)}"
    return f"As it is ({how}): {text[0].lower()}{text[1:]}"


def policies_sheet(fit: Fit, *, full: bool = True) -> Sheet:
    """One row per checkpointing policy; ``full``: live bytes beside what is needed."""
    cells: list[Cell[PolicyFit]] = [
        text("checkpointing", lambda row: policy_words(row.checkpointing)),
        *_estimate_cells(fit, f"peak, batch {fit.batch}", fit.policies, full=full),
    ]
    found = [row.largest_batch for row in fit.policies]
    if full or any(each.size or each.next_perhaps for each in found):
        cells.append(number("largest batch", lambda row: largest_words(row.largest_batch)))
    if fit.sequence > 1 and any(each.size for each in found):
        cells.append(number("tokens per rank", lambda row: _tokens(row, fit.sequence), 1))
    title = f"By checkpointing policy (this job's: {policy_words(fit.checkpointing)})"
    return sheet_of(title, fit.policies, cells)


def _tokens(row: PolicyFit, sequence: int) -> str:
    return f"{row.largest_batch.size * sequence:,}" if row.largest_batch.size else "-"


def _estimate_cells(
    fit: Fit, peak: str, rows: Sequence[PolicyFit | Remedy], *, full: bool
) -> list[Cell[Any]]:
    """What a policy or a remedy needs, and how fast it is where any of the ``rows`` says so; live
    bytes where everything is shown."""
    cells: list[Cell[Any]] = [
        number("needs", lambda e: range_text(e.estimate.least_bytes, e.estimate.most_bytes)),
        text("verdict", lambda e: e.estimate.verdict),
    ]
    if full:
        cells.insert(0, number(peak, lambda e: format_bytes(e.estimate.peak_bytes)))
    if any(each.estimate.step_seconds for each in rows):
        if full:
            cells.append(number("a step", lambda e: _rounded(e.estimate.step_seconds, " s")))
        rate = f"{_counted(fit)}/s/GPU"
        cells.append(number(rate, lambda e: _rounded(e.estimate.device_tokens_per_second)))
        cells.append(
            number("MFU", lambda e: mfu_text(e.estimate.mfu) if e.estimate.mfu else "-", 2)
        )
    return cells


def _counted(fit: Fit) -> str:
    return "samples" if fit.sequence == 1 else "tokens"


def _rounded(value: float | UnsetType, unit: str = "") -> str:
    return f"{two_digits(value)}{unit}" if value else "-"


def answers(fit: Fit) -> list[str]:
    """The longest sequence and the fewest ranks, of the job's own policy."""
    lines = []
    if fit.longest_sequence is not None:
        longest = fit.longest_sequence
        unit = f" (in steps of {longest.step:,})" if longest.step > 1 and longest.size else ""
        words = f"{largest_words(longest)} tokens{unit}" if longest.size else "none fits"
        words += "; the model does not run with more" if longest.refused else ""
        lines.append(
            f"Longest sequence with batch {fit.batch}, checkpointing "
            f"{policy_words(fit.checkpointing)}: {words}."
        )
    if fit.fewest_ranks is not None:
        none = "no number is enough, for more ranks only divide the data"
        ranks = counted(fit.fewest_ranks, "rank") if fit.fewest_ranks else none
        how = f"{_batch_text(fit)} each, checkpointing {policy_words(fit.checkpointing)}"
        lines.append(f"Fewest ranks for {how}: {ranks}.")
    if not all(row.largest_batch.even for row in fit.policies):
        lines.append("A larger batch was seen to need less: sizes were tried one by one there.")
    return lines


def refusal(fit: Fit) -> str:
    """Why the smallest batch does not fit, or not for sure: what fills the rank."""
    estimate, largest = fit.own.estimate, fit.own.largest_batch
    samples = counted(largest.step, "sample")
    said = f"Not even {samples} per rank fits under the job's own settings."
    if largest.next_perhaps:
        said = f"No more than perhaps {samples} per rank fits under the job's own settings."
    return (
        f"{said} At batch {fit.batch} the peak is in {printable(estimate.peak_phase)}; the largest "
        f"are {largest_text(estimate.by_category)}."
    )


def remedies_sheet(fit: Fit, *, full: bool = True) -> Sheet:
    """What was tried, what fits first."""
    shown = fit.remedies if full else fit.remedies[:FIRST_REMEDIES]
    more = len(fit.remedies) - len(shown)
    rest = f" {more} more: --full." if more else ""
    title = f"What helps, tried with {counted(fit.own.largest_batch.step, 'sample')} per rank"
    named = [each.changes for each in fit.remedies if len(each.changes) == 2]
    pairs = sum(not changes[-1].endswith(" ranks") for changes in named)
    two = f" ({counted(pairs, 'pair')} tried)" if pairs else ""
    note = f"Each alone, but for a row that names several{two}.{rest}"
    cells: list[Cell[Remedy]] = [
        text("change", lambda remedy: printable(" and ".join(remedy.changes), TEXT_LIMIT)),
        *_estimate_cells(fit, "peak", fit.remedies if full else (), full=full),
    ]
    if any(each.longer != UNSET for each in fit.remedies):
        cells.append(number("time", lambda remedy: _longer(remedy.longer)))
        title += f" (time: a device's for as many {_counted(fit)})"
    return sheet_of(title, shown, cells, note)


def _longer(share: float | UnsetType) -> str:
    return "-" if isinstance(share, UnsetType) else f"{round(share * 100):+,} %"


def _skipped(fit: Fit, *, full: bool) -> tuple[str, ...]:
    """What was not looked at, and how much more there is."""
    texts = tuple(printable(text, TEXT_LIMIT) for text in fit.skipped)
    if full or len(texts) <= FIRST_SKIPPED + 1:
        return texts
    return (*texts[:FIRST_SKIPPED], f"{len(texts) - FIRST_SKIPPED} more (--full)")


def _batch_text(fit: Fit) -> str:
    samples = counted(fit.batch, "sample")
    return samples if fit.sequence == 1 else f"{samples} of {counted(fit.sequence, 'token')}"
