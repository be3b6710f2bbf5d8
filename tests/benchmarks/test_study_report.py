"""A study of embeddings as sheets, pictures and a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest
from study.charts import PARAMETERS, SECONDS, log_ticks, scatter
from study.found import SCHEMA, KindStudy, Lookup, Study, Trial
from study.page import render_study
from study.sheets import AUC, LOG_LOSS, study_sheets, study_summary

from shardwright.core.kinds import EmbeddingsSection
from shardwright.core.measurement import Quality
from shardwright.report.marks import NARROW, WIDTH, text_width
from shardwright.report.table import text_of


def quality(auc: float, best: float | None = 0.85) -> Quality:
    return Quality(
        rows=20_000,
        auc=auc,
        log_loss=1.25 - auc,
        best_auc=best,
        best_log_loss=None if best is None else 0.4,
        accuracy=auc - 0.03,
        best_accuracy=None if best is None else 0.82,
        majority=0.75,
        normalized_entropy=(1.25 - auc) / 0.56,
        calibration=1.0,
    )


def kind(name: str, parameters: int, seconds: float, aucs: tuple[float, ...]) -> KindStudy:
    trials = (
        Trial(s, {"all": quality(a), "often": quality(a + 0.01), "rarely": quality(a - 0.02)})
        for s, a in enumerate(aucs)
    )
    lookup = Lookup(100 * parameters, 400 * parameters, 112, seconds, 30)
    section = EmbeddingsSection(kind="qr" if name.startswith("qr") else "full")
    return KindStudy(name, section, parameters, 4 * parameters, lookup, tuple(trials))


def study(**changes: object) -> Study:
    kinds = (
        kind("full", 1_000_000, 4e-4, (0.83, 0.834)),
        kind("qr collisions=10", 100_000, 6e-4, (0.82, 0.823)),
        kind("qr collisions=11", 99_000, 6e-4, (0.82, 0.823)),
    )
    found = Study(SCHEMA, "dlrm", 2, 256, 390, (0, 1), kinds, rows=1_000_000, seen=(3705.0, 3.5))
    return msgspec.structs.replace(found, **changes)


def words(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter("text")]


def test_sheets_have_each_kind_the_best_possible_and_the_commoner_label() -> None:
    first, quarters, costs = study_sheets(study())
    assert [row[0] for row in first.rows][-2:] == ["best possible", "majority class"]
    assert first.rows[0] == ("full", "0.8320 ±0.0028", "0.4180 ±0.0028", "0.8020 ±0.0028")
    assert first.rows[-2] == ("best possible", "0.8500", "0.4000", "0.8200")
    assert first.rows[-1] == ("majority class", "0.5000", "0.5600", "0.7500")
    assert quarters.rows[0][1] == "0.8420 ±0.0028"
    assert quarters.rows[0][3] == "0.8120 ±0.0028"
    assert "most often, 3,704 times, and the one of those seen least often, 2.5 times" in (
        quarters.note
    )
    assert costs.rows[1] == (
        *("qr collisions=10", "100,000", "10,000,000", "10.0 %", "600 µs", "1.5x", "112"),
    )


def test_a_run_that_learned_nothing_is_named_and_in_no_mean() -> None:
    full, *others = study().kinds
    share = quality(0.5).log_loss / quality(0.5).normalized_entropy  # type: ignore[operator]
    flat = msgspec.structs.replace(quality(0.5), log_loss=share, normalized_entropy=0.9999)
    dead = Trial(2, dict.fromkeys(("all", "often", "rarely"), flat))
    with_dead = msgspec.structs.replace(full, trials=(*full.trials, dead))
    found = study(kinds=(with_dead, *others), seeds=(0, 1, 2))
    before, after = study_sheets(study()), study_sheets(found)
    assert after[0].rows == before[0].rows
    assert after[1].rows == before[1].rows
    assert "Learned nothing, and in no mean: full, seed 2." in after[0].note
    assert "Learned nothing" not in before[0].note
    assert "Learned nothing, and in no mean: 1 of 7 runs" in render_study(found)
    alone = msgspec.structs.replace(full, trials=(dead,))
    assert study_sheets(study(kinds=(alone,), seeds=(2,)))[0].rows[0] == ("full", "-", "-", "-")


def test_a_best_that_is_not_known_is_said_to_be() -> None:
    bare = kind("full", 10, 1e-3, ())
    trial = Trial(0, {"all": quality(0.8, None)})
    bare = msgspec.structs.replace(bare, trials=(trial,))
    (first, costs) = study_sheets(study(kinds=(bare,), seeds=(0,), seen=msgspec.UNSET))
    assert first.rows[1] == ("best possible", "not known", "not known", "not known")
    assert "One seed" in first.note
    assert costs.rows[0][0] == "full"


def test_the_terminal_has_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = text_of(study_summary(study())).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("3 kinds of embeddings of a dlrm, 390 steps of 512 samples, 2 seeds")


def test_a_picture_places_kinds_by_parameters_and_quality() -> None:
    svg = scatter(study(), "all", AUC, PARAMETERS, "p")
    root = ElementTree.fromstring(svg)
    boxes = {}
    for group in root.iter("g"):
        title = group.find("title")
        rect = group.find("rect")
        if title is not None and rect is not None:
            place = (float(rect.get("x", "")), float(rect.get("y", "")))
            boxes[str(title.text).partition(":")[0]] = place
    assert boxes["full"][0] > boxes["qr collisions=10"][0] > boxes["qr collisions=11"][0]
    assert boxes["full"][1] < boxes["qr collisions=10"][1]  # higher up
    assert "best possible 0.8500" in words(svg)
    assert "outside: guessing 0.5000" in words(svg)  # it would press the points together
    texts = ElementTree.fromstring(svg).iter("text")
    axis = [t for t in texts if re.search("outside|against", t.text or "")]
    below = [float(t.get("y", "")) for t in axis]
    assert len(below) == len(set(below)) == 2  # on lines of their own


def test_names_in_a_picture_do_not_lie_on_one_another() -> None:
    root = ElementTree.fromstring(scatter(study(), "all", LOG_LOSS, SECONDS, "p"))
    at = {str(t.text): float(t.get("y", "")) for t in root.iter("text")}
    assert abs(at["qr collisions=10"] - at["qr collisions=11"]) >= 14


@pytest.mark.parametrize("width", [WIDTH, NARROW])
def test_names_of_a_crowd_lie_on_no_point_and_on_no_line(width: float) -> None:
    crowd = tuple(kind(f"qr {n}", 100_000 + n * 1500, 1e-3, (0.83,)) for n in range(5))
    far = kind("full", 90_000_000, 1e-3, (0.84,))
    svg = scatter(study(kinds=(*crowd, far)), "all", AUC, PARAMETERS, "p", width)
    root = ElementTree.fromstring(svg)
    assert root.get("viewBox", "").startswith(f"0 0 {width:g} ")
    names = [t for t in root.iter("text") if str(t.text).startswith("qr ")]
    points = [
        (float(r.get("x", "")), float(r.get("y", "")))
        for g in root.iter("g")
        if g.find("title") is not None
        for r in [g.find("rect")]
        if r is not None
    ]
    assert len(names) == 5
    assert len(points) == 6
    (best,) = [t for t in root.iter("text") if str(t.text).startswith("best possible")]
    for name in names:
        left, base = float(name.get("x", "")), float(name.get("y", ""))
        right = left + text_width(str(name.text))
        for x, y in points:
            assert right < x or left > x + 10 or not y - 4 < base < y + 18
        assert abs(float(best.get("y", "")) + 4 - (base - 4)) > 8  # its line


def test_a_study_without_a_trial_has_no_picture() -> None:
    bare = study(kinds=(kind("full", 10, 1e-3, ()),), seen=msgspec.UNSET)
    assert scatter(bare, "all", AUC, PARAMETERS, "p") == ""
    assert "<svg" not in render_study(bare)


def test_the_page_has_the_pictures_and_says_what_is_left() -> None:
    page = render_study(study(seeds=(0, 1, 2)))
    assert page.startswith("<!DOCTYPE html>")
    assert "Shardwright report</title>" in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 16  # eight, for a window and for a telephone
    for picture in pictures:
        assert ElementTree.fromstring(picture).get("aria-label")
    ids = re.findall(r'<pattern id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "Not finished: 3 runs left." in page
    assert "Not finished" not in render_study(study())
    assert "<script" not in page


def test_a_hostile_name_stays_text() -> None:
    hostile = kind("<script>alert(1)</script>\x1b", 10, 1e-3, (0.8,))
    page = render_study(study(kinds=(hostile,)))
    assert "<script" not in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("lowest", "highest", "found"),
    [(8e4, 2e6, [1e5, 2e5, 5e5, 1e6, 2e6]), (1, 1e9, [10.0**k for k in range(10)])],
)
def test_ticks_of_a_logarithmic_scale_are_round(
    lowest: float, highest: float, found: list[float]
) -> None:
    assert log_ticks(lowest, highest) == pytest.approx(found)
