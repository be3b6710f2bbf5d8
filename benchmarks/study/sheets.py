"""A study of embeddings as sheets: quality, quality by how often ids were seen, what kinds take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import UNSET
from rich.console import RenderableType

from shardwright.core.measurement import Quality
from shardwright.core.quantities import format_seconds
from shardwright.report.sheet import Column, Sheet
from shardwright.report.table import drawn, prose, spaced
from shardwright.report.wording import counted, percent, printable
from study.found import KindStudy, Part, Spread, Study, any_quality, spread_of

PART_WORDS: dict[Part, str] = {
    "all": "all held-out rows",
    "often": "rows whose ids were seen often",
    "rarely": "rows whose ids were seen rarely",
}


class Quantity(NamedTuple):
    """A figure of quality: what a kind reached, the best possible, and what knows nothing of a row
    but how common clicks are."""

    name: str
    of: Callable[[Quality], float | None]
    best: Callable[[Quality], float | None]
    without: Callable[[Quality], float | None]
    without_words: str


AUC = Quantity("AUC", lambda q: q.auc, lambda q: q.best_auc, lambda _: 0.5, "guessing")
LOG_LOSS = Quantity(
    "log loss",
    lambda q: q.log_loss,
    lambda q: q.best_log_loss,
    lambda q: q.log_loss / q.normalized_entropy if q.normalized_entropy else None,
    "share of clicks alone",
)
ACCURACY = Quantity(
    "accuracy",
    lambda q: q.accuracy,
    lambda q: q.best_accuracy,
    lambda q: q.majority,
    "majority class alone",
)
FIGURES = (AUC, LOG_LOSS, ACCURACY)
BEST, WITHOUT = "best possible", "majority class"


def study_summary(study: Study) -> RenderableType:
    """What is compared, and every sheet."""
    return spaced(
        prose(headline(study), style="bold"),
        *(drawn(sheet) for sheet in study_sheets(study)),
    )


def headline(study: Study) -> str:
    """What is compared, in a sentence."""
    together = study.batch * study.world_size
    seeds = counted(len(study.seeds), "seed")
    left, every = study.left, study.left + study.trials
    unfinished = f"; {counted(left, 'run')} of {every} left" if left else ""
    return (
        f"{counted(len(study.kinds), 'kind')} of embeddings of a {printable(study.model)}, "
        f"{study.steps:,} steps of {together:,} samples, {seeds}{unfinished}"
    )


def study_sheets(study: Study) -> tuple[Sheet, ...]:
    """Quality on all held-out rows, on both quarters, and what kinds take."""
    found = [_quality_sheet(study)]
    if study.seen is not UNSET:
        found.append(_quarters_sheet(study, study.seen))
    return (*found, _cost_sheet(study))


def _quality_sheet(study: Study) -> Sheet:
    quality = any_quality(study)
    rows = [
        (printable(kind.name), *(_spread(spread_of(kind, "all", f.of)) for f in FIGURES))
        for kind in study.kinds
    ]
    if quality:
        rows.append((BEST, *(plain(figure.best(quality)) for figure in FIGURES)))
        rows.append((WITHOUT, *(plain(figure.without(quality)) for figure in FIGURES)))
    note = (
        "Mean and standard deviation over seeds. "
        if len(study.seeds) > 1
        else "One seed: how far figures vary is not known. "
    )
    return Sheet(
        f"On {counted(quality.rows if quality else 0, 'held-out row')}",
        (Column("kind"), *(Column(figure.name, numeric=True) for figure in FIGURES)),
        tuple(rows),
        f"{note}'{WITHOUT}': always the majority class, or the share of clicks, or a guess."
        f"{_untaught(study)}",
    )


def _untaught(study: Study) -> str:
    """Runs that are in no mean."""
    runs = "; ".join(map(printable, study.untaught))
    return f" Learned nothing, and in no mean: {runs}." if runs else ""


def _quarters_sheet(study: Study, seen: tuple[float, float]) -> Sheet:
    parts: tuple[Part, Part] = ("often", "rarely")
    rows = []
    for kind in study.kinds:
        cells = (_spread(spread_of(kind, p, f.of)) for p in parts for f in (AUC, LOG_LOSS))
        rows.append((printable(kind.name), *cells))
    qualities = [any_quality(study, part) for part in parts]
    for name, figure_of in ((BEST, "best"), (WITHOUT, "without")):
        cells = (
            plain(getattr(figure, figure_of)(quality)) if quality else "-"
            for quality in qualities
            for figure in (AUC, LOG_LOSS)
        )
        rows.append((name, *cells))
    titles = [f"{part}:\n{figure.name}" for part in parts for figure in (AUC, LOG_LOSS)]
    return Sheet(
        "By how often the ids of a row were seen in training",
        (Column("kind"), *(Column(title, numeric=True) for title in titles)),
        tuple(rows),
        "The quarter of the held-out rows whose ids were seen most often, "
        f"{_times(seen[0])} times, and the one of those seen least often, {_times(seen[1])} times "
        "(geometric means, over tables whose kind differs).",
    )


def _cost_sheet(study: Study) -> Sheet:
    full = next((kind for kind in study.kinds if kind.section.kind == "full"), None)
    sized = study.rows is not UNSET
    columns = [Column("kind"), Column("parameters\ntrained", numeric=True)]
    if sized:
        columns.append(Column("at that\nsize", numeric=True))
    columns += [
        Column("of full", numeric=True),
        Column("lookup", numeric=True),
        Column("of full", numeric=True),
        Column("operations\na sample", numeric=True),
    ]
    rows = tuple(_costs(kind, full, sized=sized) for kind in study.kinds)
    of = f"tables of {study.rows:,} rows each" if sized else "the tables that were trained"
    return Sheet(
        f"What they take: lookups in {of}",
        tuple(columns),
        rows,
        f"A lookup is forward, of one id of every table for {counted(study.batch, 'sample')}: the "
        "median of CPU seconds of one thread, kinds taking turns.",
    )


def _costs(kind: KindStudy, full: KindStudy | None, *, sized: bool) -> tuple[str, ...]:
    lookup = kind.lookup
    shares = ("-", "-")
    if full:
        time = lookup.seconds / full.lookup.seconds if full.lookup.seconds else 0.0
        shares = (percent(lookup.parameters / full.lookup.parameters), f"{time:,.3g}x")
    return (
        printable(kind.name),
        f"{kind.parameters:,}",
        *((f"{lookup.parameters:,}",) if sized else ()),
        shares[0],
        format_seconds(lookup.seconds),
        shares[1],
        f"{lookup.flops:,}",
    )


def _spread(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:.4f} ±{found.deviation:.4f}" if found.deviation else f"{found.mean:.4f}"


def plain(value: float | None) -> str:
    """A figure, if it is known."""
    return "not known" if value is None else f"{value:.4f}"


def _times(count: float) -> str:
    return f"{count - 1:,.3g}" if count < 1000 else f"{count - 1:,.0f}"
