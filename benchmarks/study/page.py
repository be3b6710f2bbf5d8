"""A study of embeddings as one HTML file, like a report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from markupsafe import Markup
from msgspec import UNSET

from shardwright.report.html import Frame, HeadlineFigure, templates, versions_sheet
from shardwright.report.marks import fitted
from shardwright.report.sheet import Sheet
from shardwright.report.wording import counted, printable
from study.charts import PARAMETERS, SECONDS, scatter
from study.found import PARTS, Part, Study, any_quality
from study.sheets import (
    AUC,
    FIGURES,
    LOG_LOSS,
    PART_WORDS,
    Quantity,
    headline,
    plain,
    study_sheets,
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart's markup, and what is said below it."""

    markup: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    title: str
    pictures: tuple[Picture, ...]
    sheets: tuple[Sheet, ...]


@dataclass(frozen=True, slots=True)
class StudyPage(Frame):
    """What the template shows."""

    sections: tuple[Section, ...]


def render_study(study: Study) -> str:
    """The page of a study, finished or not, as a whole HTML document."""
    left = study.left
    warnings = [f"Not finished: {counted(left, 'run')} left."] if left else []
    if study.untaught:
        count = f"{len(study.untaught)} of {counted(study.trials, 'run')}"
        warnings.append(f"Learned nothing, and in no mean: {count}, named below.")
    page = StudyPage(
        title=f"Embeddings of a {printable(study.model)}",
        subtitle=f"{headline(study)}.",
        state="open" if left else "held",
        verdict=f"{counted(study.trials, 'training run')} on the same data.",
        outcome="",
        warnings=tuple(warnings),
        figures=_figures(study),
        sections=_sections(study),
    )
    environment, css = templates()
    template = environment.from_string(Path(__file__).with_name("study.html.j2").read_text())
    return template.render(page=page, css=css).lstrip()


def _figures(study: Study) -> tuple[HeadlineFigure, ...]:
    """The best possible on all held-out rows."""
    quality = any_quality(study)
    if quality is None:
        return ()
    return tuple(
        HeadlineFigure(
            f"Best possible {figure.name}",
            plain(figure.best(quality)),
            f"{figure.without_words} {plain(figure.without(quality))}",
        )
        for figure in FIGURES
    )


def _sections(study: Study) -> tuple[Section, ...]:
    sheets = study_sheets(study)
    found = [
        Section(
            "Quality and parameters",
            _pictures(study, "all", FIGURES),
            sheets[:1],
        ),
        Section("Quality and latency", _latency(study), sheets[-1:]),
    ]
    if study.seen is not UNSET:
        ends = (part for part in PARTS if part != "all")
        pictures = [p for part in ends for p in _pictures(study, part, (AUC, LOG_LOSS))]
        found.insert(1, Section("Ids seen often and rarely", tuple(pictures), sheets[1:2]))
    return (
        *found,
        Section("What this rests on", (), (versions_sheet(study.versions, study.machine),)),
    )


def _pictures(study: Study, part: Part, figures: tuple[Quantity, ...]) -> tuple[Picture, ...]:
    found = []
    for figure in figures:
        prefix = f"{part}-{figure.name.replace(' ', '-')}"
        markup = fitted(partial(scatter, study, part, figure, PARAMETERS, prefix))
        caption = f"{figure.name} on {PART_WORDS[part]}; bars are a standard deviation."
        found.append(Picture(Markup(markup), f"{caption[0].upper()}{caption[1:]}"))
    return tuple(picture for picture in found if picture.markup)


def _latency(study: Study) -> tuple[Picture, ...]:
    found = (fitted(partial(scatter, study, "all", f, SECONDS, "latency")) for f in (AUC, LOG_LOSS))
    markup = next(filter(None, found), "")
    size = f"tables of {study.rows:,} rows" if study.rows is not UNSET else "the tables"
    caption = f"Quality as trained; lookups of {counted(study.batch, 'sample')} in {size}."
    return (Picture(Markup(markup), caption),) if markup else ()
