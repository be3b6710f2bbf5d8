"""Which layout is fastest and fits, in a terminal, and all layouts as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.console import RenderableType

from shardwright.core.advice import Advice, Advised, OfEngine, Priced
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.report.marks import (
    LINE,
    NARROW,
    VERDICTS,
    chart,
    element,
    label,
    legend,
    line,
    text_width,
    ticks,
)
from shardwright.report.memory_timeline import standalone
from shardwright.report.sheet import Cell, Sheet, number, sheet_of, text
from shardwright.report.table import assumed_line, drawn, listed, prose, spaced
from shardwright.report.wording import (
    TEXT_LIMIT,
    about_seconds,
    mfu_text,
    percent,
    printable,
    range_text,
    shortened,
    step_time_sentence,
    tokens_sentence,
    two_digits,
)

FIRST_ROWS, FIRST_FASTER = 6, 3  # of a first screen
LACKS = 120  # letters of what an engine lacks
NOISE = 0.01  # of a step: what is slower by less is told as that
COMPUTING = ("products", "attention", "elementwise", "optimizer", "launches", "fixed")


def advice_report(
    advice: Advice, *, tokens: float | None = None, full: bool = False
) -> RenderableType:
    """The answer with its proof, the next ones and what they lose by, and what faster ones lack."""
    answer = advice.answer
    assumed = tuple(printable(each, TEXT_LIMIT) for each in advice.assumptions)
    rows = advice.rows if full else advice.rows[:FIRST_ROWS]
    faster = advice.faster if full else advice.faster[:FIRST_FASTER]
    return spaced(
        prose(_headline(advice), style="bold"),
        prose(_answer(advice, answer, tokens), style="bold green")
        if answer
        else prose(_nothing(advice), style="bold red"),
        drawn(_engines_sheet(advice), short=not full) if answer and advice.engines else None,
        prose(_proof(advice)) if answer else None,
        drawn(_rows_sheet(advice, rows, full=full), short=not full) if rows[1:] else None,
        drawn(_faster_sheet(advice, faster)) if faster else None,
        listed("Axes", tuple(_axes(advice))) if full else None,
        listed("Assumptions", assumed) if full else assumed_line(assumed, 1),
        prose(_next(advice, answer, full=full), style="dim"),
    )


def _headline(advice: Advice) -> str:
    samples = f"{advice.global_batch:,} samples a step"
    if advice.sequence > 1:
        samples = f"{advice.global_batch:,} x {advice.sequence:,} tokens a step"
    engine = advice.engine or advice.runtime
    if advice.engines:
        engine = ", ".join(each.engine for each in advice.engines if not each.lacks)
    ranks = f"{advice.world_size:,} ranks" if advice.world_size > 1 else "1 rank"
    return (
        f"Layouts of {printable(advice.model)} on {ranks} of "
        f"{printable(advice.device)} for {engine}, {advice.dtype}: {samples}"
    )


def _answer(advice: Advice, answer: Advised, tokens: float | None) -> str:
    spare = advice.capacity - answer.most_bytes
    by = f"{advice.engine} with " if advice.engines else ""
    lines = [
        f"Fastest that fits: {by}{answer.layout.words}",
        step_time_sentence(answer.time),
        f"Needs {range_text(answer.least_bytes, answer.most_bytes)} of "
        f"{format_bytes(advice.capacity)}: {format_bytes(spare)} to spare.",
    ]
    if tokens:
        lines.append(tokens_sentence(answer.time, tokens))
    return "\n".join(lines)


def _proof(advice: Advice) -> str:
    answer = advice.answer
    assert answer is not None
    whole = "" if advice.proven else " The search was ended early."
    unable = f", {advice.unable:,} not of {advice.engine}" if advice.unable else ""
    alike = sum(each.time.seconds <= answer.time.high for each in advice.rows)
    text_of = (
        _planned(advice, answer)
        if advice.planned
        else (
            f"Of {_of_layouts(advice)} none that fits is faster within this model "
            f"({advice.bounded:,} refused by a bound of memory, {advice.exact:,} worked out in "
            f"{format_seconds(advice.seconds)}{unable}).{whole}"
        )
    )
    if alike > 1 and answer.time.low < answer.time.high:
        more = " or more" if alike == len(advice.rows) else ""
        text_of += f" {alike}{more} lie within its range: try them in this order."
    return text_of


def _planned(advice: Advice, answer: Advised) -> str:
    """The same where seconds are those of plans: how far above what no plan can beat."""
    least = advice.lower_bound_seconds or 0.0
    faster = sum(not p.verdict and p.seconds < answer.time.seconds for p in advice.points)
    missed = max(faster - advice.bounded, 0)
    slower = advice.layouts - advice.exact - advice.bounded - missed
    of_all = f"Planned: {advice.exact:,} of {advice.layouts:,} layouts"
    counts = {
        f"in {format_seconds(advice.seconds)}": 1,
        f"{slower:,} cannot be faster": slower,
        f"{advice.bounded:,} refused by a bound of memory": advice.bounded,
        f"{missed:,} left, for the search was ended": missed,
    }
    found = f"{of_all} {', '.join(text for text, count in counts.items() if count)}."
    if advice.proven or not least:
        return found + " None can be faster by any plan." * advice.proven
    best = f"None can take less than {about_seconds(least)} by any plan"
    return f"{found} {best} (gap {percent(advice.gap)})."


def _of_layouts(advice: Advice) -> str:
    return f"{advice.layouts:,} layouts" + f" of {advice.engine}" * bool(advice.engines)


def _engines_sheet(advice: Advice) -> Sheet:
    """The fastest of each engine, and why others have none."""

    def of(show: Callable[[Advised], str]) -> Callable[[OfEngine], str]:
        return lambda each: show(each.best) if each.best else ""

    def why(each: OfEngine) -> str:
        return f"{each.engine}: {printable(each.lacks, LACKS) or 'nothing fits'}"

    cells: list[Cell[OfEngine]] = [
        text("engine", lambda each: each.engine),
        *((column, of(show)) for column, show in _layout_cells(advice) if column.title != "MFU"),
    ]
    some = [each for each in advice.engines if each.best]
    others = [why(each) for each in advice.engines if not each.best]
    return sheet_of("The fastest of each engine", some, cells, "\n".join(others))


def _layout_cells(advice: Advice) -> list[Cell[Advised]]:
    cells: list[Cell[Advised]] = [text("layout", lambda row: row.layout.ranks)]
    if not advice.planned:
        cells.append(number("micro", lambda row: str(row.layout.micro_batch)))
    if "checkpointing" in advice.space:
        cells.append(text("checkpointing", lambda row: row.layout.checkpointing))
    cells.append(number("a step", lambda row: f"{two_digits(row.time.seconds)} s"))
    if advice.answer and advice.answer.time.model_flops:
        cells.append(number("MFU", lambda row: mfu_text(row.time.mfu), spare=1))
    return [*cells, number("needs", lambda row: format_bytes(row.most_bytes))]


def _nothing(advice: Advice) -> str:
    found = f"None of {_of_layouts(advice)} fits."
    if advice.nearest:
        lack = advice.lack(advice.nearest)
        needs = f"needs {format_bytes(lack)} more" if lack > 0 else "lacks memory of its host"
        found += f" Nearest: {advice.nearest.layout.words}, which {needs}."
    if advice.fewest_ranks:
        return f"{found} On {advice.fewest_ranks:,} ranks something fits."
    return f"{found} Nor does anything on more ranks that divide the batch."


def _rows_sheet(advice: Advice, rows: tuple[Advised, ...], *, full: bool) -> Sheet:
    """The rows that fit; with ``full`` also rates, and what they wait for."""
    first = rows[0]
    rate = f"{first.time.counted}/s a device"
    cells: list[Cell[Advised]] = [*_layout_cells(advice)]
    cells += [text("slower by", lambda row: _slower(row, first))]
    if full:
        cells += [
            number(rate, lambda row: two_digits(row.time.tokens_per_second / row.time.devices)),
            number("spare", lambda row: format_bytes(advice.capacity - row.most_bytes)),
            text("waits most for", lambda row: _largest(_exposed(row))),
        ]
    left = len(advice.rows) - len(rows)
    title = f"Fastest that fit{f' of {advice.engine}' * bool(advice.engines)}"
    return sheet_of(title, rows, cells, f"{left} more: --full." if left else "")


def _faster_sheet(advice: Advice, faster: tuple[Advised, ...]) -> Sheet:
    def lacks(row: Advised) -> str:
        missing = format_bytes(advice.lack(row))
        return f"perhaps fits; {missing} to be sure" if row.verdict == "perhaps" else missing

    cells = [each for each in _layout_cells(advice) if each[0].title not in ("MFU", "needs")]
    cells.append(text("lacks", lacks))
    return sheet_of("Faster, that lack least", faster, cells)


def _exposed(row: Advised) -> dict[str, float]:
    return {name: spent for name, spent in row.time.parts.items() if name not in COMPUTING}


def _slower(row: Advised, first: Advised) -> str:
    """How much longer a step takes than in the first row, and what takes longest of that."""
    more = row.time.seconds - first.time.seconds
    if more < NOISE * first.time.seconds:
        return "-" if row is first else f"under {NOISE:.0%}"
    before = _alike(first)
    parts = {name: spent - before.get(name, 0.0) for name, spent in _alike(row).items()}
    return f"{more / first.time.seconds:.0%}: {max(parts, key=parts.__getitem__)}"


def _alike(row: Advised) -> dict[str, float]:
    """The parts of a step with what units send under one name, however they are placed."""
    parts = dict(row.time.parts)
    if "gradients" in parts:
        parts["sharded parameters"] = parts.pop("gradients") + parts.get("sharded parameters", 0.0)
    return parts


def _largest(parts: dict[str, float]) -> str:
    name = max(parts, key=parts.__getitem__, default="")
    return f"{name} {two_digits(parts[name])} s" if name and parts[name] > 0 else "-"


def _axes(advice: Advice) -> Iterator[str]:
    for name, values in advice.space.items():
        if values != ("",):
            yield f"{name}: {', '.join(values)}"


def _next(advice: Advice, answer: Advised | None, *, full: bool) -> str:
    more = "" if full else "More: --full. "
    if advice.engines:
        more += "Of one engine: --engine NAME. "
    if answer is None:
        return f"{more}Other axes: --fix AXIS=VALUE. A smaller batch: --global-batch N."
    if advice.planned:
        return f"{more}As a job: --export shardwright -o FILE; its plan: shardwright plan FILE."
    return f"{more}As a file: --export ENGINE -o FILE. All layouts: --picture x.svg."


# ---- a picture -----------------------------------------------------------------------------------

_LEFT, _TOP, _HEIGHT, _PREFIX = 66.0, 40.0, 320.0, "advice"
KINDS = ("fits", "perhaps", "does not fit", "may fit, and is slower")
FARTHEST = 4.0  # times the answer, or the capacity, that are drawn


def picture(advice: Advice) -> str:
    """Every layout by the seconds of its step and the bytes that it needs at least, with those that
    no other beats in both, as an SVG of its own."""
    return standalone(lambda width: _layouts(advice, width))


def _layouts(advice: Advice, width: float) -> str:
    answer = advice.answer
    fastest = answer.time.seconds if answer else min(each.seconds for each in advice.points)
    wide, high = FARTHEST * fastest, FARTHEST * advice.capacity
    shown = [p for p in advice.points if p.seconds <= wide and p.nbytes <= high]
    least = min((p.seconds for p in shown), default=fastest) * 0.95

    def x(seconds: float) -> float:
        return _LEFT + (width - _LEFT - 8) * math.log(seconds / least) / math.log(wide / least)

    def y(nbytes: float) -> float:
        return _TOP + _HEIGHT * (1 - nbytes / high)

    bottom = _TOP + _HEIGHT
    swatches, height = legend(
        [(name, k) for k, name in enumerate(KINDS)], bottom + 40, _PREFIX, VERDICTS, width
    )
    beside = width > NARROW
    beyond = f"{len(advice.points) - len(shown):,} beyond the axes"
    parts = [
        label(0, 12, f"{advice.layouts:,} layouts: time of a step against memory", bold=True),
        label(width if beside else 0, 12 if beside else 27, beyond, "end" * beside, faint=True),
    ]
    for nbytes in ticks(high, binary=True):
        parts += [line(_LEFT, y(nbytes), width, y(nbytes))]
        words = format_bytes(nbytes).replace(".00 ", " ")
        parts += [label(_LEFT - 6, y(nbytes) + 4, words, "end", faint=True)]
    for times in (1, 1.5, 2, 3, FARTHEST) if beside else (1, 2, FARTHEST):
        at = x(fastest * times)
        parts += [line(at, _TOP, at, bottom)]
        anchor = "end" if times == FARTHEST else "middle"
        parts += [label(at, bottom + LINE, f"{fastest * times:.3g} s", anchor, faint=True)]
    parts += [_dot(x(p.seconds), y(p.nbytes), _kind(advice, p)) for p in shown]
    edge = [f"{x(p.seconds):.1f},{y(p.nbytes):.1f}" for p in _frontier(shown)]
    parts.append(
        element(
            "polyline",
            {"points": " ".join(edge), "fill": "none", "stroke": "currentColor"},
        )
    )
    parts.append(line(_LEFT, y(advice.capacity), width, y(advice.capacity), dashes="4 3"))
    parts.append(label(width, y(advice.capacity) - 5, "capacity", "end"))
    if answer:
        place = x(answer.time.seconds), y(answer.least_bytes)
        ring: dict[str, str | float] = {"cx": place[0], "cy": place[1], "r": 7, "fill": "none"}
        parts.append(element("circle", {**ring, "stroke": "currentColor", "stroke-width": 2}))
        # Its words stand above the plot, where no layout lies under them.
        parts.append(line(place[0], _TOP - 4, place[0], place[1] - 7, dashes="1 3"))
        right = place[0] > (_LEFT + width) / 2
        anchor, at = ("end", place[0] - 6) if right else ("start", place[0] + 6)
        left = at if right else width - at
        words = shortened(answer.layout.words, int(left / text_width("0")))
        parts.append(label(at, _TOP + 4, words, anchor, bold=True))
    parts.append(swatches)
    said = _proof(advice) if answer else _nothing(advice)
    total = bottom + 40 + height
    return chart(_PREFIX, "Layouts", said, (width, total), parts, VERDICTS)


def _kind(advice: Advice, point: Priced) -> int:
    if point.verdict in KINDS:
        return KINDS.index(point.verdict)
    return 2 if point.nbytes > advice.capacity else 3


def _dot(x: float, y: float, kind: int) -> str:
    place: dict[str, str | float] = {"cx": x, "cy": y, "r": 4 if kind == 0 else 2}
    return element("circle", {**place, "style": VERDICTS[kind].style, "fill-opacity": 0.7})


def _frontier(points: list[Priced]) -> list[Priced]:
    """Those that no other is both faster and smaller than."""
    found: list[Priced] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.nbytes)):
        if not found or point.nbytes < found[-1].nbytes:
            found.append(point)
    return found
