from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import msgspec
import pytest
import samples
from footprints import footprint

from shardwright.core.measurement import Curve, Quality
from shardwright.report.marks import (
    COLOURS,
    HELD,
    MEMORY,
    NARROW,
    WIDTH,
    fitted,
    text_width,
    ticks,
)
from shardwright.report.memory_timeline import timeline_chart
from shardwright.report.svg import loss_curve, memory_chart, phase_chart
from shardwright.report.table_map import sharding_map


def charts(hostile: bool = False, width: float = WIDTH) -> dict[str, str]:
    plan = samples.hostile_plan() if hostile else samples.plan()
    run = samples.measurement(plan)
    return {
        "memory": memory_chart(plan, run, width),
        "map": sharding_map(plan, width),
        "phases": phase_chart(plan, run, width),
        "loss": loss_curve(run.curve, run.quality, width),
    }


def words_placed(svg: str) -> list[tuple[float, float, float, str]]:
    """Left, right and baseline of all words, and the words; moved groups' as they are moved."""
    root, found = ElementTree.fromstring(svg), []
    for each in root.iter("text"):
        words = "".join(each.itertext())
        x, room = float(each.get("x", "")), text_width(words)
        left = x - room * {"end": 1.0, "middle": 0.5}.get(each.get("text-anchor", ""), 0.0)
        found.append((left, left + room, float(each.get("y", "")), words))
    return found


def texts(svg: str, tag: str = "text") -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(tag)]


@pytest.mark.parametrize("name", ["memory", "map", "phases", "loss"])
def test_a_chart_is_xml_with_a_role_a_label_a_title_and_a_description(name: str) -> None:
    root = ElementTree.fromstring(charts()[name])
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert root.find("title") is not None
    assert root.find("desc") is not None


@pytest.mark.parametrize("name", ["memory", "map", "phases", "loss"])
def test_hostile_names_stay_text(name: str) -> None:
    svg = charts(hostile=True)[name]
    tags = {e.tag for e in ElementTree.fromstring(svg).iter()}
    assert "script" not in tags
    assert "onload" not in {a for e in ElementTree.fromstring(svg).iter() for a in e.attrib}
    assert "<script" not in svg
    assert "\x1b" not in svg
    assert "\u202e" not in svg


def test_a_hostile_table_is_shown_under_its_own_name() -> None:
    assert any(
        "<script>alert(1)</script>" in t for t in texts(charts(hostile=True)["map"], "title")
    )


def test_memory_shows_both_sides_of_each_rank_and_the_budget() -> None:
    words = texts(charts()["memory"])
    assert words.count("predicted") == words.count("measured") == 2
    for shown in ("rank 0", "rank 1", "7.89 MiB", "8.03 MiB", "8.17 MiB", "budget 14.00 MiB"):
        assert shown in words


def test_memory_bars_are_as_long_as_their_bytes() -> None:
    root = ElementTree.fromstring(memory_chart(samples.plan()))
    lengths: dict[int, float] = {}
    for group in root.iter("g"):
        title, shape = group.find("title"), group.find("rect")
        if title is not None and title.text and shape is not None and "rank 0" in title.text:
            found = re.search(r" ([\d,]+) B\b", title.text)
            assert found
            nbytes = int(found.group(1).replace(",", ""))
            lengths[nbytes] = float(shape.get("width", 0))
    largest = max(lengths)
    assert sum(lengths) == sum(samples.AT_PEAK.values())
    for nbytes, length in lengths.items():
        assert length / lengths[largest] == pytest.approx(nbytes / largest, abs=1e-4)


def test_the_budget_is_what_a_reservation_leaves_and_both_are_said() -> None:
    plan = samples.plan()
    left = msgspec.structs.replace(plan.reserved, ddr_left=12 * 2**20)
    svg = memory_chart(msgspec.structs.replace(plan, reserved=left))
    assert "budget 12.00 MiB" in texts(svg)
    said = "The budget is 12.00 MiB per rank, what the reservation of 2.00 MiB leaves of 14.00 MiB."
    assert said in texts(svg, "desc")[0]


def test_a_budget_far_beyond_the_bars_is_written_instead_of_drawn() -> None:
    plan = samples.plan()
    wide = msgspec.structs.replace(plan.cluster, ddr_cap=2**40)
    left = msgspec.structs.replace(plan.reserved, ddr_left=2**40)
    svg = memory_chart(msgspec.structs.replace(plan, cluster=wide, reserved=left))
    assert not any("budget" in t for t in texts(svg))
    assert "The budget is 1.00 TiB per rank." in texts(svg, "desc")[0]


def test_of_many_ranks_the_fullest_are_drawn() -> None:
    plan = samples.plan()
    ranks = tuple(
        msgspec.structs.replace(plan.ranks[0], rank=r, peak_bytes=plan.ranks[0].peak_bytes + r)
        for r in range(40)
    )
    svg = memory_chart(msgspec.structs.replace(plan, ranks=ranks))
    assert "rank 39" in texts(svg)
    assert "rank 3" not in texts(svg)
    assert "Of 40 ranks the 16 with the highest peaks." in texts(svg, "desc")[0]


def test_the_map_draws_each_block_where_it_lies() -> None:
    titles = texts(charts()["map"], "title")
    for shown in (
        "C3 on rank 0, row_wise: rows 0 to 46,460, columns 0 to 15, 50.0 %",
        "C3 on rank 1, row_wise: rows 46,461 to 92,920, columns 0 to 15, 50.0 %",
        "C12 on rank 1, column_wise: rows 0 to 85,184, columns 0 to 7, 50.0 %",
        "C16 on rank 1, table_wise: rows 0 to 70,363, columns 0 to 15, 100.0 %",
    ):
        assert shown in titles
    assert sum(t.startswith("C9 on rank") for t in titles) == 2


def test_the_map_names_the_sharding_type_in_words_and_sorts_by_size() -> None:
    words = texts(charts()["map"])
    assert [w for w in words if w in {"C3", "C8", "C9", "C12", "C16", "C21"}] == [
        "C3",
        "C12",
        "C21",
        "C16",
        "C8",
        "C9",
    ]
    assert words.count("row_wise") == 2  # in the row and in the legend


def test_the_map_of_a_thousand_ranks_draws_the_first_and_says_so() -> None:
    plan = samples.plan()
    wide = msgspec.structs.replace(plan.cluster, world_size=1000)
    svg = sharding_map(msgspec.structs.replace(plan, cluster=wide))
    assert "The first 64 ranks are drawn." in texts(svg, "desc")[0]
    ElementTree.fromstring(svg)


def test_no_tables_no_map_and_no_steps_no_curve() -> None:
    bare = msgspec.structs.replace(samples.plan(), tables=(), timeline=(), ranks=())
    assert sharding_map(bare) == ""
    assert phase_chart(bare) == ""
    assert memory_chart(bare) == ""
    assert loss_curve(Curve()) == ""


def test_phases_are_those_of_the_slowest_rank_without_set_up() -> None:
    svg = charts()["phases"]
    assert "rank 1, the slowest" in texts(svg, "title")[0]
    assert "exchange ids" in texts(svg)
    assert "setup" not in texts(svg)
    assert "2.84 ms" in texts(svg)
    assert "3.69 ms" in texts(svg)


def test_a_phase_that_was_not_measured_says_so() -> None:
    plan = samples.plan()
    run = samples.measurement(
        plan, timeline=tuple(r for r in plan.timeline if r.event.phase != "load")
    )
    assert "not measured" in texts(phase_chart(plan, run))


def test_the_loss_curve_shows_held_out_and_best_loss() -> None:
    words = texts(charts()["loss"])
    assert "Held-out log-loss 0.4387" in words
    assert "Best possible log-loss 0.4211" in words


def test_an_unknown_optimum_draws_no_line_for_it() -> None:
    run = samples.measurement()
    words = texts(loss_curve(run.curve, Quality(10, 0.7, 0.44)))
    assert not any("Best" in w for w in words)


def test_a_long_noisy_curve_with_a_hole_stays_small() -> None:
    steps = tuple(range(100_000))
    loss = tuple(float("nan") if s == 5 else 0.5 + s % 7 / 10 for s in steps)
    svg = loss_curve(Curve(steps, loss))
    assert len(svg) < 20_000
    assert "nan" not in svg


def test_a_constant_loss_has_a_scale() -> None:
    ElementTree.fromstring(loss_curve(Curve((1, 2, 3), (0.5, 0.5, 0.5))))


def test_charts_on_one_page_do_not_share_ids() -> None:
    drawn = [fitted(lambda width, name=name: charts(width=width)[name]) for name in charts()]
    ids = re.findall(r' id="([^"]+)"', "".join(drawn))
    assert len(ids) > 10
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", [WIDTH, NARROW])
@pytest.mark.parametrize("name", ["memory", "map", "phases", "loss", "timeline"])
def test_no_words_lie_on_others_or_outside(name: str, width: float) -> None:
    svg = {**charts(width=width), "timeline": timeline_chart(footprint(), width=width)}[name]
    (across,) = re.findall(r'viewBox="0 0 (\d+) \d+"', svg)
    assert float(across) == width
    placed = words_placed(svg)
    slack = 0.1  # of a width that is guessed a little too large
    for left, right, _, words in placed:
        assert left > -slack * (right - left), words
        assert right < width + slack * (right - left), words
    for one, other in itertools.combinations(placed, 2):
        near = abs(one[2] - other[2]) < 10
        overlap = min(one[1], other[1]) - max(one[0], other[0])
        narrower = min(one[1] - one[0], other[1] - other[0])
        assert not near or overlap < slack * narrower, (one[3], other[3])


def test_ways_to_hold_a_table_differ_without_colour() -> None:
    assert len({fill.texture for fill in HELD}) == len(HELD)


def test_one_colour_has_one_meaning() -> None:
    """In light, in dark and by name: no two things share one."""
    for colours in (
        [fill.variable for fill in COLOURS],
        [fill.colour for fill in COLOURS],
        [fill.dark or fill.colour for fill in COLOURS],
    ):
        assert len(colours) == len(set(colours))


def test_a_share_of_memory_has_one_colour_on_every_chart() -> None:
    fills = {"gradients": "gradient", "weights": "weight", "optimizer states": "optimizer_state"}
    for svg in (charts()["memory"], timeline_chart(footprint())):
        for words, kind in fills.items():
            swatch = re.search(rf'style="([^"]+)"/>[^t]*(<rect[^>]*>)?</g><text[^>]*>{words}<', svg)
            assert swatch, words
            assert swatch[1] == MEMORY[kind].style


def test_byte_ticks_are_round_in_binary_units() -> None:
    assert ticks(14 * 2**20, binary=True) == [0, 5 * 2**20, 10 * 2**20]
    assert ticks(900 * 2**10, binary=True) == [k * 200 * 2**10 for k in range(5)]
    assert ticks(0) == [0]
