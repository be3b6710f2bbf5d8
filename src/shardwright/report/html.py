"""The report as one HTML file: no scripts, no network, every name escaped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from msgspec import UNSET

from shardwright.core.measurement import Comparison, Curve, Measurement, Quality, Saved
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.job.plan import Plan
from shardwright.report import comparison_sheets, plan_sheets, svg
from shardwright.report.profile_sheets import profile_sheets
from shardwright.report.quality_sheets import quality_sheets, reached
from shardwright.report.sheet import Column, Sheet
from shardwright.report.svg import measured_peaks, slowest, step_seconds
from shardwright.report.wording import (
    TEXT_LIMIT,
    counted,
    percent,
    printable,
    saved_text,
    straggler_text,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the headline."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands above the parts of every page."""

    title: str
    subtitle: str
    state: str
    verdict: str
    outcome: str
    warnings: tuple[str, ...]
    figures: tuple[Figure, ...]


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
    return document("report", _page(plan, measurement, comparison, outcome_text, curve))


def document(template: str, page: object) -> str:
    """``page`` as a template of this folder shows it, as a whole HTML document."""
    environment, css = _templates()
    return environment.get_template(f"{template}.html.j2").render(page=page, css=css).lstrip()


@cache
def _templates() -> tuple[Environment, Markup]:
    here = files("shardwright.report")
    environment = Environment(
        loader=FunctionLoader(lambda name: here.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment, Markup(here.joinpath("report.css").read_text("utf-8"))


def _page(
    plan: Plan,
    measurement: Measurement | None,
    comparison: Comparison | None,
    outcome: str,
    curve: Curve | None,
) -> Page:
    state, said = _verdict(measurement, comparison)
    so_far = measurement is None and curve is not None
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
        memory=Markup(svg.memory_chart(plan, measurement)),
        memory_caption=_memory_caption(plan, measurement),
        map=Markup(svg.sharding_map(plan)),
        map_caption="Each cell is a whole table, its rows downwards and its columns across; the "
        "filled part lies on that rank. Sizes count every copy.",
        phases=Markup(svg.phase_chart(plan, measurement)),
        phases_caption=_phases_caption(plan, measurement),
        profile=profile_sheets(measurement.profile or ()) if measurement else (),
        loss=Markup(svg.loss_curve(curve, measurement.quality if measurement else None))
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
    for what, document in (("measurement", measurement), ("comparison", comparison)):
        if document is not None and document.plan_fingerprint != plan.fingerprint:
            other = printable(document.plan_fingerprint[:12]) or "(none)"
            found.append(f"This {what} belongs to another plan, fingerprint {other}.")
    if measurement and measurement.straggler is not UNSET:
        found.append(f"{straggler_text(measurement.straggler)}.")
    if measurement and measurement.bad_rows:
        found.append(f"{counted(measurement.bad_rows, 'bad row')} of the data were skipped.")
    return tuple(found)


def _figures(plan: Plan, measurement: Measurement | None) -> tuple[Figure, ...]:
    peak = max((totals.peak_bytes for totals in plan.ranks), default=0)
    budget = plan.budget
    used = f"{percent(peak / budget)} of {format_bytes(budget)}" if budget else ""
    step = format_seconds(plan.max_rank_seconds)
    if measurement is None:
        return (
            Figure("Peak of the fullest rank", format_bytes(peak), used),
            Figure("Step on the slowest rank", step, f"gap to the bound {percent(plan.gap)}"),
        )
    found = []
    peaks = measured_peaks(measurement)
    if peaks:
        highest = max(p.nbytes for p in peaks.values())
        remark = f"predicted {format_bytes(peak)}"
        found.append(Figure("Peak of the fullest rank", format_bytes(highest), remark))
    seconds = step_seconds(measurement.timeline)
    rank = slowest(seconds)
    if rank is not None:
        took = sum(seconds[rank].values())
        predicted = step_seconds(plan.timeline).get(rank, {})
        compared = sum(each for phase, each in seconds[rank].items() if phase in predicted)
        part = f"{format_seconds(compared)} of it " if compared < took else ""
        remark = f"{part}predicted as {step}" if part else f"predicted {step}"
        found.append(Figure("Step on the slowest rank", format_seconds(took), remark))
    found.append(Figure("Samples per second", f"{measurement.samples_per_second:,.0f}"))
    if measurement.saved is not UNSET:
        found.append(_saving_figure(measurement.saved))
    if measurement.quality:
        found.extend(_quality_figures(measurement.quality))
    return tuple(found)


def _saving_figure(saved: Saved) -> Figure:
    stood = f"{format_seconds(saved.stall_seconds)} of standstill"
    return Figure("Checkpoints", stood, saved_text(saved))


def _quality_figures(quality: Quality) -> tuple[Figure, ...]:
    return tuple(
        Figure(name, f"{reached:.4f}", "" if best is None else f"best possible {best:.4f}")
        for name, reached, best, _ in islice(reached(quality), 2)
    )


def _memory_caption(plan: Plan, measurement: Measurement | None) -> str:
    text = "Live bytes of each rank at its fullest moment."
    if len(plan.ranks) > svg.MOST_RANKS:
        text += f" The {svg.MOST_RANKS} fullest of {len(plan.ranks)} ranks are drawn."
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
    rows = [("plan made by shardwright", printable(plan.version))]
    rows.append(("cluster", printable(plan.cluster.name)))
    if measurement is not None:
        for facts in (measurement.versions, measurement.machine):
            rows.extend((printable(k), printable(v, TEXT_LIMIT)) for k, v in facts.items())
    return Sheet("Versions and machine", (Column("what"), Column("which")), tuple(rows))
