"""The parts SVG charts are made of. Text and attributes are escaped here and nowhere else.

Colours are CSS variables with a fallback, so a page may restate them for dark mode. Every fill has
a texture of its own as well: shades of grey and colour-blind eyes can distinguish them.
"""

# A report is one file without scripts that anybody may be sent, so whatever stands in a plan (names
# come from files) must not become markup: all text goes through `escaped` or `_value`. Ids of
# textures carry the chart's name, since several charts share one page and an id is the page's.

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.report.wording import NAME_LIMIT, TEXT_LIMIT, printable

WIDTH, NARROW = 720.0, 336.0  # of a window, and of what a page leaves on a telephone
LINE = 18
# Text cannot be measured here: nobody knows the reader's font. A guess a little too wide leaves
# gaps, one too narrow lets words run into each other.
_GLYPH = 6.6  # pixels an average character of 12 px text takes


@dataclass(frozen=True, slots=True)
class FillStyle:
    """A colour variable with its fallback and what it is on dark paper, where that is another, and
    the path of a 6 x 6 texture, empty for none."""

    variable: str
    colour: str
    texture: str = ""
    dark: str = ""

    @property
    def style(self) -> str:
        return f"fill:var(--{self.variable},{self.colour})"


# Every colour of a chart, by what it means: no two things have one, on whatever page they are
# drawn. Of memory what belongs together has one hue; a texture distinguishes areas without colour.
MEMORY: dict[str, FillStyle] = {
    "weight": FillStyle("sw-blue", "#0072b2", dark="#2b82c9"),
    "gathered_weight": FillStyle("sw-sky", "#56b4e9", "M-1,-1L7,7M-1,5L1,7M5,-1L7,1"),
    "optimizer_state": FillStyle("sw-green", "#009e73", "M3,2V4"),
    "gradient": FillStyle("sw-orange", "#d98c00", "M-1,7L7,-1M-1,1L1,-1M5,7L7,5"),
    "unreduced_gradient": FillStyle("sw-yellow", "#e3cf3f", "M0,3H3"),
    "activation": FillStyle("sw-vermilion", "#d55e00", dark="#e8762c"),
    "temporary": FillStyle("sw-salmon", "#f0a07a", "M0,3H6M3,0V6"),
    "all_gather": FillStyle("sw-purple", "#a8609a", "M0,3H6"),
    "reduce_scatter": FillStyle("sw-rose", "#cc79a7", "M3,0V3"),
    "communication": FillStyle("sw-plum", "#7a4a8c", "M0,0L6,6M6,0L0,6", "#9a66b0"),
    "buffer": FillStyle("sw-grey", "#7f868f", dark="#98a0a9"),
    "input": FillStyle("sw-silver", "#a9afb6", "M0,0L6,6"),
    "output": FillStyle("sw-slate", "#5d6874", "M2,2H4V4H2Z", "#6f7b88"),
    "other": FillStyle("sw-ash", "#8b8f86", "M0,1H6M0,4H6"),
}
# How a table is held: sharding types, kinds of embeddings.
HELD = (
    FillStyle("sw-brown", "#8c6d31"),
    FillStyle("sw-olive", "#637939", "M-1,7L7,-1M-1,1L1,-1M5,7L7,5", "#8aa552"),
    FillStyle("sw-maroon", "#843c39", "M3,0V6", "#b45f5b"),
    FillStyle("sw-teal", "#17766f", "M0,0L6,6M6,0L0,6", "#2f9c94"),
    FillStyle("sw-magenta", "#b0338f", "M0,3H6", "#cf5bb0"),
    FillStyle("sw-indigo", "#3f4c9a", "M-1,-1L7,7M-1,5L1,7M5,-1L7,1", "#7380d0"),
    FillStyle("sw-lime", "#9aa51f", "M0,3H6M3,0V6"),
)
# Seconds are drawn in ink, those that were predicted hatched.
INK = FillStyle("sw-ink", "#1d2125", dark="#e4e6e8")
SIDES = {"predicted": replace(INK, texture="M-1,7L7,-1M-1,1L1,-1M5,7L7,5"), "measured": INK}
VERDICTS = (
    FillStyle("sw-fits", "#1a7f37", dark="#4fcf70"),
    FillStyle("sw-perhaps", "#b08800", "M-1,7L7,-1M-1,1L1,-1M5,7L7,5"),
    FillStyle("sw-does-not-fit", "#cf222e", "M0,3H6M3,0V6", "#ff6a69"),
    FillStyle("sw-slower", "#8c959f", "M0,0L6,6M6,0L0,6"),
)
COLOURS = (*MEMORY.values(), *HELD, INK, *VERDICTS)


def dark_colours() -> str:
    """What a page has on dark paper instead of some colours."""
    restated = "".join(f"--{c.variable}:{c.dark};" for c in COLOURS if c.dark)
    return f"@media screen and (prefers-color-scheme:dark){{:root{{{restated}}}}}"


def element(tag: str, attributes: dict[str, str | float], *children: str) -> str:
    """An element; attribute values are escaped, ``children`` are markup already."""
    written = "".join(f' {name}="{_value(value)}"' for name, value in attributes.items())
    if not children:
        return f"<{tag}{written}/>"
    return f"<{tag}{written}>{''.join(children)}</{tag}>"


# Two decimals: a hundredth of a pixel shows nowhere, and the page would be half digits otherwise.
def _value(value: str | float) -> str:
    if isinstance(value, str):
        return html.escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def escaped(text: str, limit: int = NAME_LIMIT) -> str:
    """Printable text as XML character data."""
    return html.escape(printable(text, limit), quote=True)


def label(
    x: float, y: float, text: str, anchor: str = "start", faint: bool = False, bold: bool = False
) -> str:
    """A line of text with its baseline at ``y``."""
    attributes: dict[str, str | float] = {"x": x, "y": y, "fill": "currentColor"}
    if anchor != "start":
        attributes["text-anchor"] = anchor
    if faint:
        attributes["fill-opacity"] = 0.72
    if bold:
        attributes["font-weight"] = "600"
    return element("text", attributes, escaped(text))


def box(
    place: tuple[float, float, float, float],
    fill: int,
    prefix: str,
    fills: Sequence[FillStyle],
    tooltip: str = "",
) -> str:
    """A filled rectangle (x, y, width, height) in the colour and texture of ``fills[fill]``."""
    x, y, width, height = place
    area: dict[str, str | float] = {"x": x, "y": y, "width": width, "height": height}
    shapes = [element("rect", {**area, "style": fills[fill].style})]
    if fills[fill].texture:
        shapes.append(element("rect", {**area, "fill": f"url(#{prefix}-{fill})"}))
    # A title of the group is what browsers show as a tooltip; there are no scripts that could.
    said = [f"<title>{escaped(tooltip, TEXT_LIMIT)}</title>"] if tooltip else []
    return element("g", {}, *said, *shapes)


def line(x1: float, y1: float, x2: float, y2: float, dashes: str = "", weight: float = 1) -> str:
    """A stroke in the text's colour; thin ones without dashes are faint grid lines."""
    attributes: dict[str, str | float] = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    attributes |= {"stroke": "currentColor", "stroke-width": weight}
    if dashes:
        attributes["stroke-dasharray"] = dashes
    elif weight <= 1:
        attributes["stroke-opacity"] = 0.18
    return element("line", attributes)


def trace(points: list[tuple[float, float]], weight: float, opacity: float) -> str:
    """A line of ink from point to point."""
    return element(
        "polyline",
        {
            "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            "style": f"fill:none;stroke:var(--{INK.variable},{INK.colour})",
            "stroke-width": weight,
            "stroke-opacity": opacity,
            "stroke-linejoin": "round",
        },
    )


def legend(
    items: Sequence[tuple[str, int]],
    y: float,
    prefix: str,
    fills: Sequence[FillStyle],
    limit: float = WIDTH,
) -> tuple[str, float]:
    """Swatches with their words, in as many lines as they need; also the height they take."""
    parts: list[str] = []
    across, down = 0.0, y
    for words, fill in items:
        width = 34 + text_width(words)
        # The first of a line stays there, however long it is.
        if across > 0 and across + width > limit:
            across, down = 0.0, down + LINE + 2
        parts.append(box((across, down, 12, 12), fill, prefix, fills))
        parts.append(label(across + 18, down + 10.5, words))
        across += width
    return "".join(parts), down + LINE - y


def text_width(text: str) -> float:
    """About how many pixels ``text`` takes."""
    return len(text) * _GLYPH


def chart(
    prefix: str,
    title: str,
    description: str,
    size: tuple[float, float],
    parts: Iterable[str],
    fills: Sequence[FillStyle] = (),
) -> str:
    """The whole picture, its textures named after ``prefix`` so that charts can share a page."""
    textures = "".join(
        element(
            "pattern",
            {"id": f"{prefix}-{i}", "width": 6, "height": 6, "patternUnits": "userSpaceOnUse"},
            element(
                "path",
                {
                    "d": fill.texture,
                    "style": "fill:none;stroke:var(--sw-paper,#fff);stroke-opacity:.55",
                },
            ),
        )
        for i, fill in enumerate(fills)
        if fill.texture
    )
    return element(
        "svg",
        {
            "viewBox": f"0 0 {size[0]:g} {math.ceil(size[1])}",
            "role": "img",
            "aria-label": printable(f"{title}. {description}", TEXT_LIMIT),
            "class": "chart",
            "style": "font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums",
        },
        f"<title>{escaped(title)}</title>",
        f"<desc>{escaped(description, TEXT_LIMIT)}</desc>",
        f"<defs>{textures}</defs>",
        *parts,
    )


def both(draw: Callable[[float], str]) -> tuple[str, str]:
    """The picture for a window and for a telephone, whose textures have names of their own."""
    narrow = re.sub(r'(?<=id=")|(?<=url\(#)', "narrow-", draw(NARROW))
    narrow = narrow.replace('class="chart"', 'class="chart narrow"', 1)
    return draw(WIDTH).replace('class="chart"', 'class="chart wide"', 1), narrow


def fitted(draw: Callable[[float], str]) -> str:
    """Both in a page, whose style shows the one that its window has room for."""
    return "".join(both(draw))


def ticks(highest: float, binary: bool = False, most: int = 5, lowest: float = 0.0) -> list[float]:
    """Round numbers from ``lowest`` to ``highest``; ``binary`` ones are round in KiB, MiB, ..."""
    span = highest - lowest
    if not span > 0:
        return [lowest]
    base = 1.0
    # Round in the unit that is written: 1,000 MiB on an axis of GiB would be 0.98.
    while binary and base * 1024 <= span:
        base *= 1024
    scale: float = base * 10.0 ** math.floor(math.log10(span / most / base))
    step = next(scale * m for m in (1, 2, 5, 10, 20, 50) if scale * m * most >= span)
    # With a margin, for a tick at the very end must not be lost to rounding.
    first = math.ceil(lowest / step - 1e-9)
    return [k * step for k in range(first, math.floor(highest / step + 1e-9) + 1)]
