"""Live bytes of a step from event to event as a picture, whose axis counts moments."""

# The axis counts moments and not seconds, because an estimate has an order and no clock for every
# allocation. Of a step with more moments than the picture has columns the fullest of each column is
# drawn, so that the peak is never between two. It has to be readable without colour, in light and
# in dark, and as a file of its own in viewers that know no variables.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from shardwright.core.footprint import Footprint, RankMemory, Sample
from shardwright.core.quantities import counted, format_bytes
from shardwright.core.timeline import Kind, category, in_order
from shardwright.report.marks import (
    LINE,
    MEMORY,
    NARROW,
    WIDTH,
    FillStyle,
    both,
    chart,
    element,
    escaped,
    label,
    legend,
    line,
    text_width,
    ticks,
)
from shardwright.report.wording import headline, peak_text, shortened, verdict_sentence

SHADES = {"setup": 0.08, "forward": 0.12, "backward": 0.26, "step": 0.4}
LEFT, TOP, HEIGHT = 66.0, 58.0, 300.0
LONGEST = 64  # characters of what is said of the peak
MARGIN = 14  # around a file of its own
BAND = 16.0  # height of the row of phases
COLUMNS = 420  # of a window that moments are drawn in; the fullest of each is
FAR = 2.5  # a capacity this many times the peak is written, not drawn
AXIS = "left to right: allocations and frees, not time"
_PREFIX = "timeline"
_SAID = re.compile(r'role="img" aria-label="[^"]*"')
_VARIABLE = re.compile(r"var\(--[\w-]+,(#[0-9a-fA-F]+)\)")
# A window that is narrow and high is a telephone's; the box of a picture in a page is never high.
_STYLE = (
    "svg{color:#1d2125}.paper{fill:#fff}.narrow{display:none}"
    "@media (prefers-color-scheme:dark){svg{color:#e4e6e8}.paper{fill:#1b1f24}}"
    "@media (max-width:40rem) and (max-aspect-ratio:1/1)"
    "{.picture{width:100%;height:auto;aspect-ratio:ASPECT}.wide{display:none}.narrow{display:inline}}"
)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where moments and bytes are drawn; ``last`` is one past the last moment."""

    last: int
    highest: float
    width: float

    def x(self, moment: float) -> float:
        return LEFT + (self.width - LEFT) * moment / self.last

    def y(self, nbytes: float) -> float:
        return TOP + HEIGHT * (1 - nbytes / self.highest)


def timeline_chart(
    footprint: Footprint, rank: RankMemory | None = None, width: float = WIDTH
) -> str:
    """The picture of a class of ranks, or of the one with the highest peak; an empty text where no
    timeline was kept."""
    rank = rank or footprint.worst
    if not rank.timeline:
        return ""
    totals = [sum(sample.bytes) for sample in rank.timeline]
    top = max(totals)
    capacity = footprint.capacity or 0
    # A capacity far above would press the picture into its lowest tenth.
    drawn = 0 < capacity <= FAR * top
    frame = _Axes(len(totals), max(top * 1.04, capacity * 1.02 if drawn else 0, 1), width)
    bands = _bands(frame, rank.timeline)
    most = {kind: max(s.bytes[i] for s in rank.timeline) for i, kind in enumerate(rank.kinds)}
    kinds = [kind for kind in in_order(rank.kinds) if most[kind]]
    bottom = TOP + HEIGHT
    swatches, height = legend(
        [(category(kind), place) for place, kind in enumerate(kinds)],
        bottom + BAND + 24,
        _PREFIX,
        _fills(kinds),
        width,
    )
    shades, more = _phase_legend(bands, bottom + BAND + 26 + height)
    title = shortened(f"Live memory of a step: {footprint.model}, {rank.name}", _longest(width))
    beside = width > NARROW
    parts = [
        label(0, 12, title, bold=True),
        label(width if beside else 0, 12 if beside else 26, AXIS, "end" * beside, faint=True),
        *(_grid(frame, t) for t in ticks(frame.highest, binary=True)),
        *_areas(frame, rank, kinds),
        _capacity(frame, capacity, frame.x(totals.index(top))) if drawn else "",
        _peak(frame, rank, totals, top),
        *_phases(bands),
        swatches,
        shades,
    ]
    said = f"{headline(footprint)}. Most is alive in {peak_text(rank)}: {format_bytes(top)}. "
    said += f"{counted(len(totals), 'event')} from left to right. {verdict_sentence(footprint)}"
    total = bottom + BAND + 24 + height + more
    return chart(_PREFIX, title, said, (width, total), parts, fills=_fills(kinds))


def _longest(width: float) -> int:
    """Characters of a line across the picture."""
    return min(LONGEST, int(width / text_width("0")) - 2)


def standalone(draw: Callable[[float], str]) -> str:
    """A chart as a file of its own, readable in light and dark, in a window and on a telephone;
    colours are written out for viewers that know no variables."""
    wide, narrow = both(draw)
    (width, height), (small, long) = map(_size, (wide, narrow))
    # In a page none of this is needed; a file is no SVG without the namespace, and has no size of
    # its own without the others. What is behind the lower edge of the box of a window is seen on a
    # telephone alone, whose drawing is as wide as that box.
    room = f'viewBox="{-MARGIN} {-MARGIN} {width + 2 * MARGIN} {height + 2 * MARGIN}"'
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * MARGIN}" '
        f'height="{height + 2 * MARGIN}" {room} {_SAID.findall(wide)[0]} '
        'class="picture" preserveAspectRatio="xMidYMin">'
    )
    low = long * width / small
    aspect = f"{width + 2 * MARGIN}/{low + 2 * MARGIN:.0f}"
    place: dict[str, str | float] = {"x": -MARGIN, "y": -MARGIN, "fill": "#fff"}
    paper = element("rect", {**place, "width": "400%", "height": "400%", "class": "paper"})
    style = element("style", {}, _STYLE.replace("ASPECT", aspect))
    drawn = wide.replace("<svg ", f'<svg overflow="visible" width="{width}" height="{height}" ', 1)
    drawn += narrow.replace("<svg ", f'<svg overflow="visible" width="{width}" height="{low:.0f}" ')
    # Browsers know var() with a fallback, many other viewers draw black instead.
    return _VARIABLE.sub(r"\1", f"{opened}{style}{paper}{_SAID.sub('', drawn)}</svg>") + "\n"


def _size(picture: str) -> tuple[int, int]:
    ((width, height),) = re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)
    return int(width), int(height)


def _fills(kinds: Sequence[Kind]) -> tuple[FillStyle, ...]:
    return tuple(MEMORY.get(kind, MEMORY["other"]) for kind in kinds)


def _grid(frame: _Axes, nbytes: float) -> str:
    y = frame.y(nbytes)
    words = format_bytes(nbytes).replace(".00 ", " ")
    return line(LEFT, y, frame.width, y) + label(LEFT - 8, y + 4, words, "end", faint=True)


def _capacity(frame: _Axes, capacity: int, peak: float) -> str:
    """A line with its words on the side where the peak's line does not run through them."""
    y = frame.y(capacity)
    words = f"capacity {format_bytes(capacity)}"
    # The peak's own line is drawn from top to bottom, through whatever is written there.
    clear = LEFT + 24 + text_width(words) < peak
    x, anchor = (LEFT + 4, "start") if clear else (frame.width, "end")
    return line(LEFT, y, frame.width, y, "6 3", 1.5) + label(x, y - 5, words, anchor, bold=True)


def _peak(frame: _Axes, rank: RankMemory, totals: Sequence[int], top: int) -> str:
    """A dot on the highest moment and its words above, on the side that has room."""
    moment = totals.index(top)
    x, y = frame.x(moment + 0.5), frame.y(top)
    words = shortened(f"peak {format_bytes(top)}, {peak_text(rank)}", _longest(frame.width))
    room = x + text_width(words) < frame.width
    dot = element("circle", {"cx": x, "cy": y, "r": 3.5, "fill": "currentColor"})
    end = min(max(x + 4, text_width(words)), frame.width)
    at = (x - 4, "start") if room else (end, "end")
    drop = line(x, TOP - 14, x, TOP + HEIGHT, "2 3", 1.2)
    return drop + dot + label(at[0], TOP - 19, words, at[1], bold=True)


def _areas(frame: _Axes, rank: RankMemory, kinds: Sequence[Kind]) -> Iterator[str]:
    """An area per kind between what is below it and what it adds."""
    order = [rank.kinds.index(kind) for kind in kinds]
    columns = _columns(rank.timeline, int(COLUMNS * frame.width / WIDTH))
    starts = [frame.x(moment) for moment, _ in columns] + [frame.x(frame.last)]
    levels = [list(accumulate((s.bytes[i] for i in order), initial=0)) for _, s in columns]
    fills = _fills(kinds)
    for place, kind in enumerate(kinds):
        lower = [frame.y(level[place]) for level in levels]
        upper = [frame.y(level[place + 1]) for level in levels]
        path = f"M{_steps(starts, upper)}L{_steps(starts[::-1], lower[::-1])}Z"
        most = max(sample.bytes[order[place]] for sample in rank.timeline)
        tip = f"<title>{escaped(f'{category(kind)}: at most {format_bytes(most)}')}</title>"
        shapes = [element("path", {"d": path, "style": fills[place].style})]
        if fills[place].texture:
            shapes.append(element("path", {"d": path, "fill": f"url(#{_PREFIX}-{place})"}))
        yield element("g", {}, tip, *shapes)


def _columns(timeline: Sequence[Sample], most: int) -> list[tuple[int, Sample]]:
    """Moments to draw with where each begins: all, or of many the fullest of each column."""
    if len(timeline) <= most:
        return list(enumerate(timeline))
    found = []
    for column in range(most):
        begin = column * len(timeline) // most
        end = (column + 1) * len(timeline) // most
        # The fullest moment as a whole and not the most of each kind: kinds peak at different
        # moments, and their sum would be more than ever was alive.
        found.append((begin, max(timeline[begin:end], key=lambda sample: sum(sample.bytes))))
    return found


def _steps(edges: Sequence[float], heights: Sequence[float]) -> str:
    """A line that is level from edge to edge; what does not change is not written again."""
    # Steps and no slopes: bytes are there or not, and nothing lies between two moments.
    written = [f"{edges[0]:.1f},{heights[0]:.1f}"]
    for place in range(1, len(heights)):
        if heights[place] != heights[place - 1]:
            written.append(f"H{edges[place]:.1f}V{heights[place]:.1f}")
    return "".join(written) + f"H{edges[-1]:.1f}"


def _bands(frame: _Axes, timeline: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """Each stretch of a phase: its name, where it begins, how wide it is."""
    found, moment = [], 0
    for phase, samples in groupby(timeline, lambda sample: sample.phase):
        begin, moment = moment, moment + sum(1 for _ in samples)
        found.append((phase, frame.x(begin), frame.x(moment) - frame.x(begin)))
    return found


def _phases(bands: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    """A row below the picture that says which phase is on."""
    y = TOP + HEIGHT + 4
    for phase, x, width in bands:
        title = f"<title>{escaped(phase)}</title>"
        yield element("g", {}, title, _shade(phase, x, y, width, BAND))
        if _named(phase, width):
            yield label(x + width / 2, y + 12, phase, "middle")


def _shade(phase: str, x: float, y: float, width: float, height: float) -> str:
    area: dict[str, str | float] = {"x": x, "y": y, "width": width, "height": height}
    look: dict[str, str | float] = {"fill": "currentColor", "fill-opacity": SHADES.get(phase, 0.18)}
    return element("rect", area | look)


def _named(phase: str, width: float) -> bool:
    """Whether a stretch has room for its name."""
    return text_width(phase) + 6 < width


def _phase_legend(bands: Sequence[tuple[str, float, float]], y: float) -> tuple[str, float]:
    """Phases no stretch of which has room for its name, and the height that they take."""
    named = {phase for phase, _, width in bands if _named(phase, width)}
    left = [phase for phase in dict.fromkeys(phase for phase, _, _ in bands) if phase not in named]
    parts, x = [], 0.0
    for phase in left:
        parts += [_shade(phase, x, y, 12, 12), label(x + 18, y + 10.5, phase)]
        x += 34 + text_width(phase)
    return "".join(parts), LINE if left else 0.0
