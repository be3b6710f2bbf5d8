from __future__ import annotations

import re
from functools import partial
from xml.etree import ElementTree

import footprints
import msgspec
from footprints import GIB, footprint

from shardwright.core.footprint import Footprint, Sample
from shardwright.core.outputs import PICTURE
from shardwright.report.marks import MEMORY
from shardwright.report.memory_timeline import (
    COLUMNS,
    HEIGHT,
    TOP,
    standalone,
    timeline_chart,
)

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str, tag: str = "text") -> list[str]:
    found = ElementTree.fromstring(svg).iter()
    return ["".join(e.itertext()) for e in found if e.tag.removeprefix(SVG) == tag]


def followed(*samples: Sample) -> Footprint:
    """A footprint whose worst class has this timeline."""
    first = msgspec.structs.replace(footprints.worst(), timeline=samples)
    return footprint(ranks=(first,))


def edges(svg: str) -> dict[str, tuple[float, float]]:
    """By category, the highest and the lowest point of its area."""
    found = {}
    for group in ElementTree.fromstring(svg).iter("g"):
        title, path = group.find("title"), group.find("path")
        if title is not None and path is not None:
            heights = [float(y) for y in re.findall(r"(?:,|V)(-?[\d.]+)", path.get("d", ""))]
            found[(title.text or "").split(":")[0]] = (min(heights), max(heights))
    return found


def test_the_picture_is_xml_with_a_role_a_label_a_title_and_a_description() -> None:
    root = ElementTree.fromstring(timeline_chart(footprint()))
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert root.find("title") is not None
    assert root.find("desc") is not None


def test_the_peak_and_the_capacity_are_marked() -> None:
    words = texts(timeline_chart(footprint()))
    assert "peak 22.98 GiB, backward, layers.3" in words
    assert "capacity 40.00 GiB" in words


def test_a_capacity_far_beyond_the_peak_is_written_instead_of_drawn() -> None:
    svg = timeline_chart(footprint(capacity=400 * GIB))
    assert not any("capacity" in word for word in texts(svg))
    assert "Fits: 23.44 to 25.25 GiB of 400.00 GiB" in texts(svg, "desc")[0]


def test_areas_lie_on_each_other_and_reach_the_peak() -> None:
    found = edges(timeline_chart(footprint()))
    assert found["weights"][1] == TOP + HEIGHT
    assert found["optimizer states"][1] == found["weights"][0]
    highest = min(top for top, _ in found.values())
    assert round(TOP + HEIGHT - highest) == round(HEIGHT * 22.98 / (40 * 1.02))


def test_every_category_that_occurs_is_in_the_legend() -> None:
    words = texts(timeline_chart(footprint()))
    for name in ("weights", "unreduced gradients", "reduce-scatter buffers", "inputs"):
        assert name in words
    assert "exchange buffers" not in words


def test_phases_are_named_below() -> None:
    words = texts(timeline_chart(footprint()))
    assert {"forward", "backward"} <= set(words)
    assert "left to right: allocations and frees, not time" in words


def test_phases_without_room_for_their_names_are_in_the_legend() -> None:
    one = footprints.samples()[0]
    phases = ["forward", "backward"] * 100
    words = texts(timeline_chart(followed(*(Sample("a", p, one.bytes) for p in phases))))
    assert words.count("forward") == words.count("backward") == 1
    assert texts(timeline_chart(footprint())).count("forward") == 1


def test_of_many_moments_the_fullest_of_each_column_is_drawn() -> None:
    one = footprints.samples()[0]
    low = Sample("a", "forward", (GIB,) + (0,) * (len(one.bytes) - 1))
    high = Sample("b", "forward", (2 * GIB,) + (0,) * (len(one.bytes) - 1))
    many = [low] * (100 * COLUMNS)
    many[777] = high
    svg = timeline_chart(followed(*many))
    assert len(svg) < 20_000
    assert "peak 2.00 GiB" in "".join(texts(svg))
    assert edges(svg)["weights"][0] < TOP + HEIGHT / 2


def test_a_long_name_is_shortened() -> None:
    rank = msgspec.structs.replace(footprints.worst(), name="stage " + "x" * 500)
    words = texts(timeline_chart(footprint(ranks=(rank,))))
    assert max(len(word) for word in words) <= 64


def test_no_timeline_no_picture() -> None:
    assert timeline_chart(followed()) == ""


def test_hostile_names_stay_text() -> None:
    hostile = "<script>alert(1)</script>\x1b"
    rank = msgspec.structs.replace(footprints.worst(), name=hostile)
    svg = standalone(partial(timeline_chart, footprint(model=hostile, ranks=(rank,)), rank))
    assert "<script" not in svg
    assert "\x1b" not in svg


def test_a_file_of_its_own_needs_no_variables_and_has_a_dark_side() -> None:
    svg = standalone(partial(timeline_chart, footprint(), None))
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert "var(" not in svg
    assert "prefers-color-scheme:dark" in svg
    left, top, width, height = map(float, root.get("viewBox", "").split())
    assert (width, height) == (float(root.get("width", 0)), float(root.get("height", 0)))
    assert left < 0
    assert top < 0
    assert PICTURE.beginning.match(svg.encode())  # a later one may take its place


def test_a_file_of_its_own_has_a_drawing_for_a_telephone_that_windows_do_not_show() -> None:
    svg = standalone(partial(timeline_chart, footprint(), None))
    wide, narrow = ElementTree.fromstring(svg).findall(f"{SVG}svg")
    assert (wide.get("class"), narrow.get("class")) == ("chart wide", "chart narrow")
    assert re.search(r"\}\.narrow\{display:none\}@media", svg)
    assert "{.picture{width:100%;" in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))


def test_neighbours_differ_without_colour() -> None:
    textures = [fill.texture for fill in MEMORY.values() if fill.texture]
    assert len(set(textures)) == len(textures)
    plain = [kind for kind, fill in MEMORY.items() if not fill.texture]
    assert plain == ["weight", "activation", "buffer"]
