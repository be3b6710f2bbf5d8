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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.report.wording import NAME_LIMIT, TEXT_LIMIT, printable

WIDTH = 720
LINE = 18
# Text cannot be measured here: nobody knows the reader's font. A guess a little too wide leaves
# gaps, one too narrow lets words run into each other.
_GLYPH = 6.6  # pixels an average character of 12 px text takes


@dataclass(frozen=True, slots=True)
class FillStyle:
    """A colour variable with its fallback, and the path of a 6 x 6 texture, empty for none."""

    variable: str
    colour: str
    texture: str = ""

    @property
    def style(self) -> str:
        return f"fill:var(--{self.variable},{self.colour})"


FILLS = (
    FillStyle("sw-blue", "#0072b2"),
    FillStyle("sw-orange", "#e69f00", "M-1,7L7,-1M-1,1L1,-1M5,7L7,5"),
    FillStyle("sw-green", "#009e73", "M3,0V6"),
    FillStyle("sw-grey", "#7f868f", "M0,0L6,6M6,0L0,6"),
    FillStyle("sw-purple", "#cc79a7", "M0,3H6"),
    FillStyle("sw-sky", "#56b4e9", "M-1,-1L7,7M-1,5L1,7M5,-1L7,1"),
    FillStyle("sw-vermilion", "#d55e00", "M0,3H6M3,0V6"),
)


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
    tooltip: str = "",
    fills: Sequence[FillStyle] = FILLS,
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


def legend(
    items: Sequence[tuple[str, int]],
    y: float,
    prefix: str,
    x: float = 0,
    fills: Sequence[FillStyle] = FILLS,
) -> tuple[str, float]:
    """Swatches with their words, in as many lines as they need; also the height they take."""
    parts: list[str] = []
    across, down = x, y
    for words, fill in items:
        width = 34 + text_width(words)
        # The first of a line stays there, however long it is.
        if across > x and across + width > WIDTH:
            across, down = x, down + LINE + 2
        parts.append(box((across, down, 12, 12), fill, prefix, fills=fills))
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
    height: float,
    parts: Iterable[str],
    fills: Sequence[FillStyle] = FILLS,
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
            "viewBox": f"0 0 {WIDTH} {math.ceil(height)}",
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
