"""The report as one HTML file: no scripts, no network, every name escaped."""

# One file, no scripts, nothing fetched: it is opened years later, from a mail, behind a firewall.
# Jinja escapes whatever is no Markup, and only our own charts and style are Markup, whose text was
# escaped where it was made. Undefined names fail (StrictUndefined), or a renamed field would leave
# a hole in the page that nobody sees.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import islice
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from msgspec import UNSET

from shardwright.core.measurement import Comparison, Curve, Measurement, Quality, Saved, Scores
from shardwright.core.quantities import counted, format_bytes, format_seconds
from shardwright.job.plan import Plan
from shardwright.report import comparison_sheets, plan_sheets, svg
from shardwright.report.marks import dark_colours, fitted
from shardwright.report.profile_sheets import profile_sheets
from shardwright.report.sheet import Cell, Column, Sheet, number, sheet_of, text
from shardwright.report.svg import measured_peaks, slowest, step_seconds
from shardwright.report.table_map import sharding_map
from shardwright.report.wording import (
    TEXT_LIMIT,
    percent,
    printable,
    saved_text,
    slower_text,
    straggler_text,
)

MOST_SCORES = 20


@dataclass(frozen=True, slots=True)
class HeadlineFigure:
    """A number of the headline."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands above every page's own sections."""

    title: str
    subtitle: str
    state: str
    verdict: str
    outcome: str
    warnings: tuple[str, ...]
    figures: tuple[HeadlineFigure, ...]


@dataclass(frozen=True, slots=True)
class Page(Frame):
    """What the template shows. Charts are markup; everything else is text, escaped there."""

    quality: tuple[Sheet, ...]
    memory: Markup
    memory_caption: str
    map: Markup
    map_caption: str
    phases: Markup
    phases_caption: str
    profile: tuple[Sheet, ...]
    loss: Markup
    loss_caption: str
    search: str
    tables: Sheet
    units: Sheet
    ranks: Sheet
    compared: tuple[Sheet, ...]
    assumptions: tuple[str, ...]
    versions: Sheet
    fingerprint: str


def render(
    plan: Plan,
    measurement: Measurement | None,
    comparison: Comparison | None,
    outcome_text: str = "",
    curve: Curve | None = None,
) -> str:
    """The report of a plan, and of its run where there is one, as a whole HTML document.

    ``curve`` is the loss so far of a run without a measurement.
    """
    page = _page(plan, measurement, comparison, outcome_text, curve)
    environment, css = templates()
    return environment.get_template("report.html.j2").render(page=page, css=css).lstrip()


@cache
def templates() -> tuple[Environment, Markup]:
    """What reads the templates of this folder, and the style of their pages."""
    here = files("shardwright.report")
    environment = Environment(
        # Through importlib.resources, for a package may lie in an archive where there are no paths.
        loader=FunctionLoader(lambda name: here.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment, Markup(here.joinpath("report.css").read_text("utf-8") + dark_colours())


def _page(
    plan: Plan,
    measurement: Measurement | None,
    comparison: Comparison | None,
    outcome: str,
    curve: Curve | None,
) -> Page:
    state, said = _verdict(measurement, comparison)
    so_far = measurement is None and curve is not None
    # A run's own curve is complete; the other one was read while it was going on.
    if measurement:
        curve = measurement.curve
    return Page(
        title=f"{printable(plan.job.model.name)} on {counted(plan.world_size, 'rank')}",
        subtitle=_subtitle(plan, measurement),
        state=state,
        verdict=said,
        outcome=printable(outcome, TEXT_LIMIT),
        warnings=_warnings(plan, measurement, comparison),
        figures=_figures(plan, measurement),
        quality=quality_sheets(measurement) if measurement else (),
        memory=_picture(svg.memory_chart, plan, measurement),
        memory_caption=_memory_caption(plan, measurement),
        map=_picture(sharding_map, plan),
        map_caption="Each cell is a whole table, its rows downwards and its columns across; the "
        "filled part lies on that rank. Sizes count every copy.",
        phases=_picture(svg.phase_chart, plan, measurement),
        phases_caption=_phases_caption(plan, measurement),
        profile=profile_sheets(measurement.profile or ()) if measurement else (),
        loss=_picture(svg.loss_curve, curve, measurement.quality if measurement else None)
        if curve
        else Markup(""),
        loss_caption="Loss on rank 0 so far." if so_far else _loss_caption(plan, measurement),
        search=f"{plan_sheets.speed_line(plan)} {plan_sheets.search_line(plan)}",
        tables=plan_sheets.tables_sheet(plan),
        units=plan_sheets.units_sheet(plan),
        ranks=plan_sheets.ranks_sheet(plan),
        compared=_compared(comparison),
        assumptions=plan_sheets.assumptions(plan),
        versions=_versions_sheet(plan, measurement),
        fingerprint=printable(plan.fingerprint),
    )


def _picture(draw: Callable[..., str], *of: Any) -> Markup:
    return Markup(fitted(partial(draw, *of)))


def _loss_caption(plan: Plan, measurement: Measurement | None) -> str:
    """What the curve is of, and its lines."""
    own = plan.job.model.traits.is_function
    text = "The model's own loss" if own else "Log-loss"
    text += " of the global batch." if own else " of the global batch, in nats."
    if measurement is None or not measurement.quality:
        return text
    return f"{text} The lines for held-out rows use data the model was not trained on."


def _verdict(measurement: Measurement | None, comparison: Comparison | None) -> tuple[str, str]:
    """The banner's class and its sentence."""
    if comparison is not None:
        verdict = comparison_sheets.verdict(comparison)
        times = comparison_sheets.time_verdict(comparison)
        said = f"{verdict.sentence} {times.sentence}" if times else verdict.sentence
        # Memory as predicted is not called missed because of seconds, which are no gate without a
        # calibrated cluster; nor is it called held while they are far off.
        if verdict.held and times and not times.held:
            return "open", said
        return "held" if verdict.held else "missed", said
    if measurement is not None:
        return "open", "Measured, but not compared with the plan."
    return "open", "A plan only: nothing has been measured."


def _subtitle(plan: Plan, measurement: Measurement | None) -> str:
    text = f"{plan_sheets.headline(plan)}."
    return f"{text} {counted(measurement.steps, 'step')} were run." if measurement else text


def _warnings(
    plan: Plan, measurement: Measurement | None, comparison: Comparison | None
) -> tuple[str, ...]:
    """Failures of the comparison, and documents that belong to another plan."""
    found = list(comparison_sheets.failures(comparison)) if comparison else []
    # Files of one folder may be of different runs, and the page would put them side by side without
    # a word.
    for what, document in (("measurement", measurement), ("comparison", comparison)):
        if document is not None and document.plan_fingerprint != plan.fingerprint:
            other = printable(document.plan_fingerprint[:12]) or "(none)"
            found.append(f"This {what} belongs to another plan, fingerprint {other}.")
    if measurement and measurement.straggler is not UNSET:
        found.append(f"{straggler_text(measurement.straggler)}.")
    if measurement and measurement.bad_rows:
        found.append(f"{counted(measurement.bad_rows, 'bad row')} of the data were skipped.")
    return tuple(found)


def _figures(plan: Plan, measurement: Measurement | None) -> tuple[HeadlineFigure, ...]:
    peak = max((totals.peak_bytes for totals in plan.ranks), default=0)
    budget = plan.budget
    used = f"{percent(peak / budget)} of {format_bytes(budget)}" if budget else ""
    step = plan_sheets.step_text(plan)
    if measurement is None:
        return (
            HeadlineFigure("Highest peak of a rank", format_bytes(peak), used),
            HeadlineFigure(
                "Step on the slowest rank", step, f"gap to the bound {percent(plan.gap)}"
            ),
        )
    found = []
    peaks = measured_peaks(measurement)
    if peaks:
        highest = max(p.nbytes for p in peaks.values())
        remark = f"predicted {format_bytes(peak)}"
        found.append(HeadlineFigure("Highest peak of a rank", format_bytes(highest), remark))
    seconds = step_seconds(measurement.timeline)
    # The slowest as measured, beside what was predicted of the slowest as planned: a step is as
    # long as that, whichever rank it is.
    rank = slowest(seconds)
    if rank is not None:
        took = sum(seconds[rank].values())
        predicted = step_seconds(plan.timeline).get(rank, {})
        # A run may have phases that no plan predicts: beside a prediction their seconds would look
        # like an error of it.
        compared = sum(each for phase, each in seconds[rank].items() if phase in predicted)
        part = f"{format_seconds(compared)} of it " if compared < took else ""
        remark = f"{part}predicted as {step}" if part else f"predicted {step}"
        remark += f", {slower_text(sum(predicted.values()), compared)}" if predicted else ""
        found.append(HeadlineFigure("Step on the slowest rank", format_seconds(took), remark))
    found.append(HeadlineFigure("Samples per second", f"{measurement.samples_per_second:,.0f}"))
    if measurement.saved is not UNSET:
        found.append(_saving_figure(measurement.saved))
    if measurement.quality:
        found.extend(_quality_figures(measurement.quality))
    return tuple(found)


def _saving_figure(saved: Saved) -> HeadlineFigure:
    stood = f"{format_seconds(saved.stall_seconds)} of standstill"
    return HeadlineFigure("Checkpoints", stood, saved_text(saved))


def _quality_figures(quality: Quality) -> tuple[HeadlineFigure, ...]:
    return tuple(
        HeadlineFigure(name, f"{reached:.4f}", "" if best is None else f"best possible {best:.4f}")
        for name, reached, best, _ in islice(reached(quality), 2)
    )


def _memory_caption(plan: Plan, measurement: Measurement | None) -> str:
    text = "Live bytes of each rank at its peak."
    if len(plan.ranks) > svg.MOST_RANKS:
        text += (
            f" Of {len(plan.ranks)} ranks the {svg.MOST_RANKS} with the highest peaks are drawn."
        )
    if measurement and measurement.memory_steps:
        steps = ", ".join(str(step) for step in measurement.memory_steps[:8])
        text += f" Measured on step {steps}."
    return f"{text} {plan_sheets.budget_sentence(plan)}"


def _phases_caption(plan: Plan, measurement: Measurement | None) -> str:
    rank = slowest(step_seconds(measurement.timeline if measurement else plan.timeline))
    text = f"Seconds on rank {rank}, the slowest."
    return f"{text} Measured seconds are medians over steps." if measurement else text


def _compared(comparison: Comparison | None) -> tuple[Sheet, ...]:
    if comparison is None:
        return ()
    unequal = comparison_sheets.unequal_sheet(comparison)
    sheets = (
        comparison_sheets.exact_sheet(comparison),
        *((unequal,) if unequal else ()),
        comparison_sheets.peaks_sheet(comparison),
        *comparison_sheets.phase_sheets(comparison),
        comparison_sheets.exchanges_sheet(comparison),
    )
    return tuple(sheet for sheet in sheets if sheet is not None and sheet.rows)


def _versions_sheet(plan: Plan, measurement: Measurement | None) -> Sheet:
    made = {"plan made by shardwright": plan.version, "cluster": plan.cluster.name}
    if measurement is None:
        return versions_sheet(made)
    return versions_sheet(made, measurement.versions, measurement.machine)


def versions_sheet(*facts: Mapping[str, str]) -> Sheet:
    """Versions and machine, row by row."""
    rows = [(printable(k), printable(v, TEXT_LIMIT)) for each in facts for k, v in each.items()]
    return Sheet("Versions and machine", (Column("what"), Column("which")), tuple(rows))


def quality_sheets(measurement: Measurement) -> tuple[Sheet, ...]:
    """Held-out rows, those for validation, and what was trained on."""
    found = []
    if measurement.quality:
        found.append(_held_out_sheet(measurement.quality))
    if measurement.validation is not UNSET:
        found.append(_held_out_sheet(measurement.validation, " for validation"))
    if measurement.scores:
        found.append(_scores_sheet(measurement.scores))
    return tuple(found)


def _scores_sheet(scores: tuple[Scores, ...]) -> Sheet:
    """In order; of many every so many, and the last."""
    stride = -(-len(scores) // MOST_SCORES)
    # From the end, so that the last line, which a reader looks for, is always among them.
    shown = scores[::-1][::stride][::-1]
    worst = max((each.auc_error or 0.0 for each in scores), default=0.0)
    left = f" {len(shown)} of {len(scores):,} are shown." if len(shown) < len(scores) else ""
    return sheet_of(
        "While training",
        shown,
        (
            number("up to step", lambda s: f"{s.step:,}"),
            number("rows", lambda s: f"{s.rows:,}"),
            number("AUC", lambda s: _figure(s.auc)),
            number("log-loss", lambda s: _figure(s.log_loss)),
            number("normalized\nentropy", lambda s: _figure(s.normalized_entropy)),
            number("calibration", lambda s: _figure(s.calibration)),
            number("accuracy", lambda s: _figure(s.accuracy)),
            number("majority\nclass", lambda s: _figure(s.majority)),
        ),
        "Rows of all ranks since the line before, each as it was predicted before it was learned. "
        f"AUC is off by {worst:.1g} at most.{left}",
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def reached(quality: Quality) -> Iterator[tuple[str, float, float | None, str]]:
    """Each figure of held-out rows with the best that is known, and how far it is from there."""
    if (auc := quality.auc) is not None:
        yield "AUC", auc, quality.best_auc, _share_of_way(auc, 0.5, quality.best_auc)
    loss, best = quality.log_loss, quality.best_log_loss
    if (bits := quality.bits_per_byte) is not None:
        # A byte is a token, so nats per token are bits per byte but for the logarithm.
        best_bits = None if best is None else best / math.log(2)
        yield "Nats per token", loss, best, _beyond(loss, best, "nats")
        yield "Bits per byte", bits, best_bits, _beyond(bits, best_bits, "bits")
        return
    yield "Log-loss", loss, best, _beyond(loss, best, "nats")
    if (share := quality.accuracy) is not None and quality.majority is not None:
        best = quality.best_accuracy
        yield "Accuracy", share, best, _share_of_way(share, quality.majority, best)
    if (entropy := quality.normalized_entropy) is not None:
        yield "Normalized entropy", entropy, None, "1 is the share of clicks alone"
    if (clicks := quality.calibration) is not None:
        yield "Calibration", clicks, 1.0, f"{percent(clicks - 1, signed=True)} of clicks"


def _share_of_way(reached: float, start: float, best: float | None) -> str:
    # Where the best possible is no better than guessing there is no way to be a share of.
    if best is None or best <= start:
        return ""
    return f"{percent((reached - start) / (best - start))} of the way from {start:.4g} to the best"


def _beyond(reached: float, best: float | None, unit: str) -> str:
    return "" if best is None else f"{reached - best:+.4f} {unit} from the best"


def _held_out_sheet(quality: Quality, of: str = "") -> Sheet:
    """Held-out figures beside the optimum; AUC also as a share of the way from chance."""
    of_text = quality.bits_per_byte is not None
    note = (
        "The best possible is known where the text was made up: no model of what came before can "
        "do better."
        if of_text
        else "AUC does not depend on how rare clicks are: 0.5 is guessing. The best possible is "
        "known where the rows were generated from a known click model."
    )
    figures = list(reached(quality))
    cells: list[Cell[tuple[str, float, float | None, str]]] = [
        text("figure", lambda each: each[0]),
        number("reached", lambda each: f"{each[1]:.4f}"),
    ]
    if any(best is not None for _, _, best, _ in figures):
        cells.append(number("best possible", lambda e: "" if e[2] is None else _figure(e[2])))
    if any(far for *_, far in figures):
        cells.append(text("how far", lambda each: each[3]))
    of_rows = "held-out token" if of_text else "held-out row"
    return sheet_of(f"On {counted(quality.rows, of_rows)}{of}", figures, cells, note)
