from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
import samples

from shardwright.core.measurement import (
    Awaited,
    ComparedNumber,
    Kernel,
    PhaseTime,
    ProfiledStage,
    Quality,
    Scores,
)
from shardwright.job.model import ModelSection
from shardwright.report.html import render
from shardwright.report.marks import COLOURS

CSP = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Tags, attribute names and text; fails on a tag that closes another."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def full(outcome: str = "") -> str:
    plan = samples.plan()
    return render(plan, samples.measurement(plan), samples.comparison(plan), outcome)


def shown(page: str) -> str:
    return " ".join("".join(read(page).text).split())


def hostile() -> str:
    plan = samples.hostile_plan()
    run = samples.measurement(
        plan, versions={samples.HOSTILE: samples.HOSTILE}, plan_fingerprint=samples.HOSTILE
    )
    compared = samples.comparison(plan, failures=(samples.HOSTILE,))
    lines = tuple(
        msgspec.structs.replace(
            line,
            name=samples.HOSTILE,
            phase=samples.HOSTILE,
            kind=samples.HOSTILE,
            measured=1.0,
        )
        for line in compared.exact
    )
    compared = msgspec.structs.replace(compared, exact=lines, peaks=lines, seconds=lines)
    return render(plan, run, compared, samples.HOSTILE)


def test_the_page_forbids_everything_but_its_own_style() -> None:
    assert CSP in full()


@pytest.mark.parametrize("page", [full(), hostile()], ids=["full", "hostile"])
def test_the_page_reaches_nothing_outside_itself(page: str) -> None:
    reader = read(page)
    assert not reader.tags & {"script", "link", "iframe", "object", "embed", "img", "base"}
    assert not reader.attributes & {"src", "href", "xlink:href", "action"}
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_hostile_names_are_text_and_nothing_else() -> None:
    page = hostile()
    reader = read(page)
    assert "<script" not in page
    assert not [name for name in reader.attributes if name.startswith("on")]
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert '<script>alert(1)</script>"onload=x' in "".join(reader.text)


def test_the_page_has_a_language_a_title_and_a_viewport() -> None:
    page = full()
    assert page.startswith("<!DOCTYPE html>")
    assert '<html lang="en">' in page
    assert "<title>dlrm on 2 ranks – Shardwright report</title>" in page
    assert '<meta name="viewport"' in page


def test_every_chart_of_the_page_is_xml() -> None:
    found = re.findall(r"<svg.*?</svg>", full(), re.DOTALL)
    assert len(found) == 8  # four, for a window and for a telephone
    for svg in found:
        ElementTree.fromstring(svg)


def test_the_headline_is_the_verdict() -> None:
    text = shown(full("Finished: 390 steps."))
    assert "Memory as predicted: exact bytes equal on 2 of 2 ranks, peak within 3.5 %." in text
    assert "Finished: 390 steps." in text
    assert "48,211" in text


def test_a_step_is_compared_in_the_phases_that_are_predicted() -> None:
    whole = samples.plan()
    run = samples.measurement(whole)
    text = shown(render(whole, run, samples.comparison(whole)))
    figure = re.search(r"Step on the slowest rank(\S+ ms)predicted ", text)
    assert figure is not None
    left = tuple(run for run in whole.timeline if run.event.phase != "forward")
    assert len(left) < len(whole.timeline)
    part = msgspec.structs.replace(whole, timeline=left)
    text = shown(render(part, run, samples.comparison(part)))
    compared = re.search(rf"slowest rank{figure[1]}(\S+ ms) of it predicted as ", text)
    assert compared is not None
    assert float(compared[1].split()[0]) < float(figure[1].split()[0])


@pytest.mark.parametrize(("measured", "state"), [(0.008, "held"), (0.08, "open")])
def test_a_step_far_from_its_prediction_is_not_called_held(measured: float, state: str) -> None:
    plan = samples.plan()
    lines = (ComparedNumber(0, "forward", "time", "forward", 0.008, measured),)
    page = render(plan, samples.measurement(plan), samples.comparison(plan, seconds=lines))
    assert f'<div class="verdict {state}">' in page
    assert "Step on rank 0, the slowest:" in shown(page)


def test_quality_stands_beside_the_optimum() -> None:
    text = shown(full())
    assert "AUC0.77120.790493.4 % of the way from 0.5 to the best" in text
    assert "+0.0176 nats from the best" in text


def test_numbers_assumptions_versions_and_fingerprint_are_there() -> None:
    text = shown(full())
    for number in ("92,921 x 16", "46,461 x 16", "14,680,064 B", "5,946,944", "2.13.0"):
        assert number in text
    assert samples.plan().fingerprint in text
    assert "it has not been calibrated" in text


def test_a_plan_alone_is_a_report() -> None:
    page = render(samples.plan(), None, None)
    text = shown(page)
    assert "A plan only: nothing has been measured." in text
    assert "Predicted and measured" not in text
    assert "AUC" not in text
    assert len(re.findall('<svg[^>]*class="chart wide"', page)) == 3


def test_a_run_without_a_comparison_says_so() -> None:
    plan = samples.plan()
    text = shown(render(plan, samples.measurement(plan, quality=None), None))
    assert "Measured, but not compared with the plan." in text


def test_the_loss_is_called_what_it_is_and_only_lines_that_are_there_are_explained() -> None:
    plan = samples.plan()
    held = shown(render(plan, samples.measurement(plan), None))
    assert "Log-loss of the global batch, in nats. The lines for held-out rows use data" in held
    job = msgspec.structs.replace(plan.job, model=ModelSection("python", python="mine:build"))
    own = msgspec.structs.replace(plan, job=job)
    text = shown(render(own, samples.measurement(own, quality=None), None))
    assert "The model's own loss of the global batch." in text
    assert "held-out rows use" not in text


def test_a_plan_without_tables_is_a_report() -> None:
    bare = msgspec.structs.replace(samples.plan(), tables=(), units=(), ranks=(), timeline=())
    text = shown(render(bare, None, None))
    assert "Sharding map" not in text
    assert "Embedding tables" not in text


@pytest.mark.parametrize(
    ("quality", "told"),
    [
        (
            Quality(30_000, None, 1.4, best_log_loss=0.7, bits_per_byte=2.0),
            "On 30,000 held-out tokens figure reached best possible how far "
            "Nats per token 1.4000 0.7000 +0.7000 nats from the best "
            "Bits per byte 2.0000 1.0099 +0.9901 bits from the best",
        ),
        (
            Quality(30_000, None, 1.4, bits_per_byte=2.0),
            "figure reached Nats per token 1.4000 Bits per byte 2.0000 The",
        ),
        (Quality(9, None, 0.4), "On 9 held-out rows figure reached Log-loss"),
    ],
)
def test_held_out_text_is_shown_in_nats_and_bits_and_without_auc(
    quality: Quality, told: str
) -> None:
    plan = samples.plan()
    page = render(plan, samples.measurement(plan, quality=quality), None)
    text = " ".join(" ".join(read(page).text).split())
    assert told in text
    assert "AUC 0" not in text


def test_held_out_clicks_are_shown_beside_what_is_reached_without_learning() -> None:
    plan = samples.plan()
    clicks = Quality(
        9,
        0.75,
        0.4,
        accuracy=0.8,
        best_accuracy=0.85,
        majority=0.75,
        normalized_entropy=0.9,
        calibration=1.02,
    )
    page = render(plan, samples.measurement(plan, quality=clicks), None)
    text = " ".join(" ".join(read(page).text).split())
    assert "Accuracy 0.8000 0.8500 50.0 % of the way from 0.75 to the best" in text
    assert "Normalized entropy 0.9000 1 is the share of clicks alone" in text
    assert "Calibration 1.0200 1.0000 +2.0 % of clicks" in text


def test_scores_while_training_and_rows_for_validation_have_tables_of_their_own() -> None:
    plan = samples.plan()
    scores = tuple(
        Scores(step, 800, 0.5 - step / 10_000, 0.8, 0.75, 0.7, 4e-4, 0.95, 1.01)
        for step in range(10, 310, 10)
    )
    validation = Quality(5000, 0.7612, 0.4487)
    run = samples.measurement(plan, scores=scores, validation=validation)
    text = " ".join(" ".join(read(render(plan, run, None)).text).split())
    assert "On 5,000 held-out rows for validation" in text
    assert "0.7612" in text
    assert "While training (15 rows)" in text
    assert "300 800 0.7000 0.4700 0.9500 1.0100 0.8000 0.7500" in text
    assert "AUC is off by 0.0004 at most. 15 of 30 are shown." in text


def test_a_profile_is_shown_by_phase_and_by_kernel() -> None:
    plan = samples.plan()
    stage = ProfiledStage(
        "training",
        20,
        (Kernel("<all_to_all>", 160, 0.111, 694e-6, 53.5e-6, 0.02, 0.733),),
        (
            PhaseTime(0, "exchange_rows", 0.004, 0.003, 0.0005),
            PhaseTime(1, "exchange_rows", 0.002, 0.0, 0.0015),
        ),
        (Awaited(1, 0.003),),
        5e-6,
    )
    page = render(plan, samples.measurement(plan, profile=(stage,)), None)
    text = " ".join(" ".join(read(page).text).split())
    assert "Profile of training, by phase" in text
    assert "exchange_rows 3 ms 500 µs 1.5 ms 1 ms rank 0, 3 ms" in text
    assert "Others wait most for rank 1: 3 ms a step, all together." in text
    assert "<all_to_all> 160 694 µs 53.5 µs 20 ms 73.3 %" in text


def test_a_failed_comparison_is_shown_in_words() -> None:
    plan = samples.plan()
    compared = samples.comparison(plan, tolerance=0.01, failures=("rank 1: peak is 3.5 % off.",))
    text = shown(render(plan, samples.measurement(plan), compared))
    assert "Memory not as predicted" in text
    assert "rank 1: peak is 3.5 % off." in text


def test_a_measurement_of_another_plan_is_pointed_out() -> None:
    run = samples.measurement(plan_fingerprint="feedface0123")
    text = shown(render(samples.plan(), run, None))
    assert "This measurement belongs to another plan, fingerprint feedface0123." in text


def test_skipped_rows_are_pointed_out() -> None:
    plan = samples.plan()
    text = shown(render(plan, samples.measurement(plan, bad_rows=3), None))
    assert "3 bad rows of the data were skipped." in text


def test_long_tables_are_folded_away() -> None:
    plan = samples.plan()
    many = tuple(
        msgspec.structs.replace(plan.tables[2], name=f"t{k}", rows=k + 1) for k in range(30)
    )
    page = render(msgspec.structs.replace(plan, tables=many), None, None)
    assert "<summary>Embedding tables (30 rows)</summary>" in page


def test_the_same_documents_give_the_same_page() -> None:
    assert full() == full()


WIDEST = 390  # pixels of a telephone


class Places(HTMLParser):
    """Widths in pixels that a page asks for, ids, tables and pictures outside of what scrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[float] = []
        self.ids: list[str] = []
        self.loose: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        if tag not in VOID:
            self._open.append(found.get("class", ""))
        inside_picture = any(name.startswith("chart") for name in self._open[:-1])
        if not inside_picture:
            words = f"{found.get('style', '')};width:{found.get('width', '0')}"
            self.widths += [float(px) for px in re.findall(r"width:\s*([\d.]+)(?:px)?", words)]
        if tag == "table" and "scroll" not in self._open:
            self.loose.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()


def test_the_page_fits_a_telephone_and_only_its_tables_scroll() -> None:
    page = full("Finished.")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    places = Places()
    places.feed(page)
    assert places.loose == []
    assert max(places.widths) <= WIDEST
    style = page[page.index("<style>") : page.index("</style>")]
    fixed = re.findall(r"(?<!max-)(?<![-\w])(?:min-)?width:\s*([\d.]+)(rem|px)", style)
    assert all(float(n) * (16 if unit == "rem" else 1) <= WIDEST for n, unit in fixed)
    assert re.search(r"\.scroll \{\s*overflow-x: auto", style)


def test_every_id_of_the_page_is_used_once() -> None:
    places = Places()
    places.feed(full())
    assert places.ids
    assert len(places.ids) == len(set(places.ids))


def test_colours_of_the_page_are_those_of_one_table() -> None:
    page = full()
    known = {(colour.variable, colour.colour) for colour in COLOURS} | {("sw-paper", "#fff")}
    drawn = set(re.findall(r"var\(--(sw-[\w-]+),(#\w+)\)", page))
    assert ("sw-orange", "#d98c00") in drawn
    assert drawn <= known
    bare = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(?:fill|stroke|color)[=:]["']?\s*(?:#|rgb)""", bare)
    restated = re.findall(r"--(sw-[\w-]+):(#\w+);", page)
    assert {(c.variable, c.dark) for c in COLOURS if c.dark} <= set(restated)


def test_the_page_says_how_far_a_step_was_off_in_words() -> None:
    whole = samples.plan()
    run = samples.measurement(whole)
    slow = [
        msgspec.structs.replace(
            each, event=msgspec.structs.replace(each.event, duration=40 * each.event.duration)
        )
        for each in run.timeline
    ]
    text = shown(render(whole, msgspec.structs.replace(run, timeline=tuple(slow)), None))
    assert re.search(r"predicted about [\d.]+ ms, \d+ times slower than predicted", text)
