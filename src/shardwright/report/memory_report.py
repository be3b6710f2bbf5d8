"""A footprint in a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.footprint import Footprint, RankMemory
from shardwright.report import memory_sheets as sheets
from shardwright.report.memory_wording import (
    VERDICT_STYLES,
    headline,
    settings_lines,
    verdict_sentence,
)
from shardwright.report.table import drawn, listed, spaced
from shardwright.report.wording import TEXT_LIMIT, printable

EVERYTHING = 10**6  # rows that a full report may have
SURE = (
    "exact: arithmetic or a trace; modelled: rests on a model of the device; assumed: on a "
    "constant that may be replaced."
)
MORE = "Every class, module and tensor: --full. Over time: --timeline memory.svg."
TRY = "Largest batch, fewest ranks, other checkpointing: shardwright fit JOB.toml."


def memory_report(
    footprint: Footprint, rank: RankMemory | None = None, *, full: bool = False
) -> RenderableType:
    """Every class of ranks, then one of them in detail: ``rank``, or the one with the highest
    peak."""
    rank = rank or footprint.worst
    tensors = sheets.tensors_sheet(rank, EVERYTHING if full else sheets.MOST_TENSORS)
    modules = sheets.modules_sheet(rank, EVERYTHING if full else sheets.MOST_MODULES)
    lines = "\n".join(settings_lines(footprint))
    return spaced(
        Text(headline(footprint), style="bold"),
        Text(lines) if lines else None,
        drawn(sheets.classes_sheet(footprint, EVERYTHING if full else sheets.MOST_CLASSES)),
        drawn(sheets.categories_sheet(footprint, rank)),
        Text(SURE, style="dim"),
        drawn(modules) if modules else None,
        drawn(tensors) if tensors else None,
        None if modules or tensors else _untold(footprint),
        drawn(sheets.device_sheet(footprint, rank)),
        listed("Assumptions", tuple(printable(t, TEXT_LIMIT) for t in footprint.assumptions)),
        Text(verdict_sentence(footprint), style=VERDICT_STYLES[footprint.verdict]),
        Text(f"{TRY}\n{MORE}", style="dim"),
    )


def _untold(footprint: Footprint) -> Text | None:
    """Which class has its modules and tensors told, where this one has not."""
    told = [rank.name for rank in footprint.ranks if rank.modules or rank.largest]
    if not told:
        return None
    name = printable(told[0])
    return Text(f"Modules, tensors and the timeline are followed for '{name}' only.", style="dim")
