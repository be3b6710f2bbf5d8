"""A study of embeddings as pictures: a figure of quality against what a kind takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardwright.core.measurement import Quality
from shardwright.core.quantities import format_seconds
from shardwright.report.marks import (
    HELD,
    LINE,
    NARROW,
    WIDTH,
    box,
    chart,
    label,
    line,
    text_width,
    ticks,
)
from study.found import KindStudy, Part, Spread, Study, any_quality, spread_of
from study.sheets import BEST, PART_WORDS, Quantity

_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 14.0, 16.0, 250.0
_SIDE = 10.0  # of a point
_NEAR = 14.0  # labels are at least so far apart, upwards


class Axis(NamedTuple):
    """What is across, on a scale of powers of ten."""

    name: str
    of: Callable[[KindStudy], float]
    words: Callable[[float], str]


def _count(number: float) -> str:
    for scale, unit in ((1e9, " billion"), (1e6, " million"), (1e3, ",000")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


PARAMETERS = Axis("parameters of the tables that were trained", lambda k: k.parameters, _count)
SECONDS = Axis("seconds of a lookup", lambda k: k.lookup.seconds, format_seconds)


class _Point(NamedTuple):
    name: str
    across: float
    found: Spread
    fill: int


class _Line(NamedTuple):
    """A level that all kinds are held against."""

    words: str
    value: float
    dashes: str


class _Frame(NamedTuple):
    """The ends of both scales, and where the first of them ends in the picture."""

    least: float
    most: float
    low: float
    high: float
    end: float

    def x(self, value: float) -> float:
        share = math.log(value / self.least) / math.log(self.most / self.least)
        return _LEFT + share * (self.end - _LEFT)

    def y(self, value: float) -> float:
        return _BOTTOM - (value - self.low) / (self.high - self.low) * (_BOTTOM - _TOP)


def scatter(
    study: Study, part: Part, figure: Quantity, axis: Axis, prefix: str, width: float = WIDTH
) -> str:
    """A point for each kind, with a bar of one standard deviation over seeds to either side; the
    best possible, and what needs no tables, as lines where they are near enough."""
    points = [
        _Point(kind.name, axis.of(kind), found, number % len(HELD))
        for number, kind in enumerate(study.kinds)
        if (found := spread_of(kind, part, figure.of)) and axis.of(kind) > 0
    ]
    if not points:
        return ""
    lines = _lines(any_quality(study, part), figure)
    frame, near = _framed(points, lines, width - _RIGHT)
    far = [f"{each.words} {each.value:.4f}" for each in lines if each not in near]
    # Lines of their own: together they are wider than the picture.
    below = [f"{figure.name} against {axis.name}", f"outside: {', '.join(far)}"][: 1 + bool(far)]
    if width <= NARROW:
        below = [f"{figure.name} against", axis.name, *(f"outside: {each}" for each in far)]
    said = [f"{p.name}: {p.found.mean:.4f} at {axis.words(p.across)}." for p in points]
    said += [f"{each.words}: {each.value:.4f}." for each in lines]
    return chart(
        prefix,
        f"{figure.name[0].upper()}{figure.name[1:]} on {PART_WORDS[part]}",
        " ".join(said),
        (width, _BOTTOM + 26 + LINE * len(below)),
        (
            *_grid(frame, axis, near),
            *(label(_LEFT, _BOTTOM + 34 + LINE * k, t, faint=True) for k, t in enumerate(below)),
            *(_bar(frame, point) for point in points),
            *(_mark(frame, point, figure, axis, prefix) for point in points),
            *_names(frame, points, near),
        ),
        HELD,
    )


def _lines(quality: Quality | None, figure: Quantity) -> list[_Line]:
    """What is known of them."""
    if quality is None:
        return []
    best, without = figure.best(quality), figure.without(quality)
    found = [_Line(BEST, best, "9 4")] if best is not None else []
    return found if without is None else [*found, _Line(figure.without_words, without, "2 4")]


def _framed(
    points: Sequence[_Point], lines: Sequence[_Line], end: float
) -> tuple[_Frame, list[_Line]]:
    """Scales for the points, and the lines that are drawn: one far away would press all points
    together."""
    low = min(p.found.mean - p.found.deviation for p in points)
    high = max(p.found.mean + p.found.deviation for p in points)
    reach = 3 * max(high - low, 0.005)
    near = [each for each in lines if low - reach <= each.value <= high + reach]
    low = min(low, *(each.value for each in near), low)
    high = max(high, *(each.value for each in near), high)
    room = (high - low) * 0.08 or 0.01
    least, most = min(p.across for p in points), max(p.across for p in points)
    return _Frame(least / 1.6, most * 1.6, low - room, high + room, end), near


def _grid(frame: _Frame, axis: Axis, lines: Sequence[_Line]) -> Iterator[str]:
    for tick in ticks(frame.high, lowest=frame.low):
        yield line(_LEFT, frame.y(tick), frame.end, frame.y(tick))
        yield label(_LEFT - 8, frame.y(tick) + 4, f"{tick:.4g}", "end", faint=True)
    for tick in log_ticks(frame.least, frame.most, min(7, int(frame.end // 80))):
        yield line(frame.x(tick), _TOP, frame.x(tick), _BOTTOM)
        yield label(frame.x(tick), _BOTTOM + 16, axis.words(tick), "middle", faint=True)
    for words, value, dashes in lines:
        yield line(_LEFT, frame.y(value), frame.end, frame.y(value), dashes, 1.6)
        yield label(frame.end, frame.y(value) - 4, f"{words} {value:.4f}", "end", faint=True)


def _bar(frame: _Frame, point: _Point) -> str:
    mean, deviation = point.found.mean, point.found.deviation
    if not deviation:
        return ""
    x, top, bottom = frame.x(point.across), frame.y(mean + deviation), frame.y(mean - deviation)
    ends = "".join(line(x - 4, at, x + 4, at, weight=1.4) for at in (top, bottom))
    return line(x, top, x, bottom, weight=1.4) + ends


def _mark(frame: _Frame, point: _Point, figure: Quantity, axis: Axis, prefix: str) -> str:
    x, y = frame.x(point.across), frame.y(point.found.mean)
    said = f"{figure.name} {point.found.mean:.4f} ± {point.found.deviation:.4f}"
    tip = f"{point.name}: {said}, {axis.words(point.across)}"
    return box((x - _SIDE / 2, y - _SIDE / 2, _SIDE, _SIDE), point.fill, prefix, HELD, tip)


def _names(frame: _Frame, points: Sequence[_Point], lines: Sequence[_Line]) -> Iterator[str]:
    """A label beside each point, moved up or down where it would lie on another one, on a point, or
    on a line or its label."""
    taken = [  # left, right, baseline
        (frame.end - text_width(f"{words} {value:.4f}"), frame.end, frame.y(value) - 4)
        for words, value, _ in lines
    ]
    taken += [(_LEFT, frame.end, frame.y(each.value) + 4) for each in lines]
    places = [(frame.x(p.across), frame.y(p.found.mean)) for p in points]
    taken += [(x - _SIDE / 2, x + _SIDE / 2, y + 4) for x, y in places]
    for point in sorted(points, key=lambda each: frame.y(each.found.mean)):
        x, at, width = frame.x(point.across), frame.y(point.found.mean) + 4, text_width(point.name)
        is_left = x + _SIDE + width > frame.end
        left = x - _SIDE - width if is_left else x + _SIDE
        at = next((y for y in _around(at) if not _meets(taken, left, left + width, y)), at)
        taken.append((left, left + width, at))
        edge, anchor = (x - _SIDE, "end") if is_left else (x + _SIDE, "start")
        yield label(edge, at, point.name, anchor)


def _around(at: float) -> Iterator[float]:
    """Baselines within the chart, the nearest first."""
    for step in range(0, int(_BOTTOM - _TOP), 2):
        yield from (y for y in dict.fromkeys((at + step, at - step)) if _TOP + 8 < y < _BOTTOM - 4)


def _meets(
    taken: Sequence[tuple[float, float, float]], left: float, right: float, at: float
) -> bool:
    return any(
        left < end and begin < right and abs(at - other) < _NEAR for begin, end, other in taken
    )


def log_ticks(lowest: float, highest: float, most: int = 7) -> list[float]:
    """Powers of ten between two positive numbers; 3 times these too, or 2 and 5 times, where that
    are not more than ``most``."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5)):
        powers = range(first, last + 1)
        marks = [f * 10.0**power for power in powers for f in factors]
        inside = [mark for mark in marks if lowest <= mark <= highest]
        if not found or len(inside) <= most:
            found = inside
    return found
