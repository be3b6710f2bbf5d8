from __future__ import annotations

import functools
import io
import re
from typing import Any

import msgspec
import pytest
import samples
from rich.console import Console

from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.planner.statistics import statistics
from shardwright.planner.statistics.records import MemoryPrice
from shardwright.report.plan_report import plan_report


def units_plan(count: int) -> Plan:
    """So many units, each slower than the one before."""
    made = samples.plan()
    first = made.units[0]
    units = tuple(
        msgspec.structs.replace(first, name=f"unit{k}", seconds=first.seconds * (k + 1))
        for k in range(count)
    )
    return msgspec.structs.replace(made, units=units)


KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "key_value")


@functools.cache
def tables_plan(ranks: int = 16, count: int = 26, kernels: bool = False) -> Plan:
    """Tables alone, of sizes over six decades."""
    tables: list[dict[str, Any]] = [
        {"name": f"C{i}", "rows": 3 + 7**i % 40_000_003, "dim": 128, "optimizer": "rowwise_adagrad"}
        for i in range(count)
    ]
    if kernels:
        for table, kernel in zip(tables, KERNELS, strict=False):
            table |= {"compute_kernels": [kernel], "sharding_types": ["table_wise", "row_wise"]}
            table |= {"cache": {"load_factor": 0.25}, "name": f"a_table_with_{kernel}_kernel"}
        tables[-1] |= {"pooling_factors": [20.0, 0.5], "module_weighted": True}
    return plan(
        parse_job(
            {
                "tables": tables,
                "cluster": {"world_size": ranks, "local_world_size": 8, "compute_device": "cuda"},
                "batch": {"size": 512},
                "planner": {"constants": "torchrec-1.9"},
            }
        )
    )


def printed(made: Plan, width: int = 120, full: bool = False, falls: float = 0.0) -> str:
    out = io.StringIO()
    prices = (MemoryPrice("hbm", falls, falls), MemoryPrice("ddr", 0.0, 0.0))
    report = plan_report(made, statistics(made), prices, full=full)
    Console(width=width, no_color=True, file=out).print(report)
    return out.getvalue()


def flowed(made: Plan, **options: Any) -> str:
    """The same on one line, however it was wrapped."""
    return " ".join(printed(made, **options).split())


@functools.cache
def layers_plan(cap: str) -> Plan:
    """A small transformer in so much memory."""
    return plan(
        parse_job(
            {
                "model": {"kind": "transformer", "layers": 2, "dim": 32, "ffn_dim": 64},
                "batch": {"size": 4, "sequence": 32},
                "cluster": {"preset": "local", "world_size": 2, "ddr_cap": cap},
            }
        )
    )


@pytest.mark.slow
def test_checkpointing_is_shown_with_what_was_tried() -> None:
    made = layers_plan("600 KiB")
    text = flowed(made)
    assert "checkpointing" in text.partition("Memory and time per rank")[0]
    assert "By checkpointing: none needs " in text
    assert f"at a peak of {format_bytes(max(r.peak_bytes for r in made.ranks))}" in text
    assert "no plan with this checkpointing can take less than" in text


def test_where_memory_is_ample_nothing_is_said_of_checkpointing() -> None:
    assert "heckpointing" not in flowed(layers_plan("1 GiB"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("case", ["dlrm", "tables", "kernels", "many"])
def test_a_report_fits_the_width_and_no_number_is_cut_short(
    case: str, width: int, full: bool
) -> None:
    made = {
        "dlrm": samples.plan,
        "tables": tables_plan,
        "kernels": lambda: tables_plan(8, 12, True),
        "many": lambda: tables_plan(64, 90),
    }[case]()
    text = printed(made, width, full)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert f"{max(t.rows for t in made.tables):,} x {made.tables[0].dim}" in text
    assert format_seconds(made.max_rank_seconds) in text


def test_the_answer_comes_first_and_the_rest_where_it_is_asked_for() -> None:
    text, full = printed(tables_plan()), printed(tables_plan(), full=True)
    order = ("Fits: ", "per step", "Embedding tables", "Memory and time per rank", "Assumed: ")
    places = [text.index(words) for words in (*order, "--statistic NAME")]
    assert places == sorted(places)
    for title in (
        "Time and traffic per rank",
        "How evenly it lies on the ranks",
        "Ranks by peak, HBM",
        "Where the HBM of rank",
        "What the worst ranks hold",
        "Storage per table",
        "Seconds per table",
        "Parts of a step",
        "Critical path",
    ):
        assert title not in text
        assert title in full
    flat = " ".join(full.split())
    assert "low high" in flat
    seconds = flat.partition("Seconds per table")[2].partition("Sums over all")[0]
    assert sum(map(float, re.findall(r"([\d.]+) %", seconds))) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("case", ["dlrm", "tables", "kernels", "layers", "tight", "many", "units"])
def test_the_first_screen_is_one_screen(case: str, width: int) -> None:
    made = {
        "dlrm": samples.plan,
        "tables": tables_plan,
        "kernels": lambda: tables_plan(8, 12, True),
        "layers": lambda: layers_plan("1 GiB"),
        "tight": lambda: layers_plan("600 KiB"),
        "many": lambda: tables_plan(64, 90),
        "units": lambda: units_plan(40),
    }[case]()
    assert len(printed(made, width).splitlines()) <= 40


def test_of_many_units_the_slowest_are_shown_and_the_others_added_up() -> None:
    made = units_plan(40)
    text = flowed(made)
    assert "unit39" in text
    assert "unit0 " not in text
    rest = made.units[:35]
    assert "35 faster units various" in text
    assert format_bytes(sum(unit.bytes_per_step for unit in rest)) in text
    assert "faster" not in flowed(made, full=True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_word_is_broken_and_no_figure_parted_from_its_unit(width: int) -> None:
    for made in (samples.plan(), tables_plan(), layers_plan("600 KiB")):
        for full in (False, True):
            for line in printed(made, width, full).splitlines():
                assert not re.match(r"\s*(KiB|MiB|GiB|B|%|ms|µs|s)(?!\w)", line), line
            text = printed(made, width, full)
            for word in ("weights", "rank", "s/step"):
                assert word in text


def test_a_wide_table_of_a_full_report_goes_on_below_with_its_names() -> None:
    text = printed(samples.plan(), 60, full=True)
    heads = [line.split() for line in text.splitlines() if line.startswith("name ")]
    assert heads[0][1:4] == ["rows", "x", "dim"]
    assert "s/step" in heads[1]
    assert "s/step" not in heads[0]


def test_a_plan_that_fits_says_on_which_rank_there_is_least_left() -> None:
    made = tables_plan()
    fullest = max(made.ranks, key=lambda totals: totals.hbm_bytes)
    assert (
        f"Fits: {format_bytes(fullest.hbm_bytes)} of {format_bytes(made.reserved.hbm_left)} HBM"
    ) in flowed(made)


def test_lookups_of_tables_are_shown_in_full() -> None:
    text = printed(tables_plan(8, 12, True), full=True)
    assert "Lookups per table" in text
    assert "pooled, weighted" in text
    assert "25.0 %" in text


def test_kernels_are_shown_in_full() -> None:
    text = flowed(tables_plan(8, 12, True), full=True)
    assert "Compute kernels kernel tables named weights states rest HBM DDR SSD" in text
    for kernel in KERNELS:
        assert kernel in text


def test_alike_ranks_share_a_row_and_are_named() -> None:
    plan = samples.plan()
    cluster = msgspec.structs.replace(plan.cluster, world_size=64)
    ranks = tuple(
        msgspec.structs.replace(plan.ranks[0], rank=r, peak_bytes=samples.MIB * (1 + r // 32))
        for r in range(64)
    )
    text = printed(msgspec.structs.replace(plan, cluster=cluster, ranks=ranks))
    rows = [line for line in text.splitlines() if line.startswith(("0-31 ", "32-63 "))]
    assert len(rows) == 2


def test_bytes_are_shown_exactly_where_they_matter() -> None:
    made = tables_plan()
    text = flowed(made, full=True)
    fullest = max(totals.hbm_bytes for totals in made.ranks)
    assert f"{format_bytes(fullest)} {fullest:,}" in text
    assert f"({made.reserved.hbm_left:,} B) per rank" in text
    assert f"capacity {format_bytes(made.cluster.hbm_cap)} {made.cluster.hbm_cap:,} 100.0 %" in text


def test_our_names_stand_beside_torchrecs_with_their_ranges() -> None:
    text = flowed(tables_plan(), full=True)
    for told in (
        "The largest deviation (TorchRec: total variation) is at most 0.9375",
        "the sum of all (total distance) at most 1.875",
        "chi-square (chi divergence) and relative entropy (KL divergence) are 1",
        "Each rank's share against 1/16; 0 is even.",
    ):
        assert told in text


def test_letters_of_sharding_types_are_explained() -> None:
    made = tables_plan()
    text = flowed(made, full=True)
    for kind, letters in (("table_wise", "TW"), ("data_parallel", "DP"), ("row_wise", "RW")):
        used = any(table.sharding_type == kind for table in made.tables)
        assert (f"{letters} {kind}" in text) == used


def test_waiting_is_shown_in_words() -> None:
    assert "Ranks wait for rank 1: 50 µs on average (0.6 % of a step), rank 0 longest" in flowed(
        samples.plan(max_rank_seconds=8.2e-3), full=True
    )
    even = tuple(msgspec.structs.replace(t, seconds=8.2e-3) for t in samples.plan().ranks)
    assert "No rank waits for another." in flowed(samples.plan(ranks=even), full=True)


def test_what_more_memory_would_buy_is_shown() -> None:
    made = tables_plan()
    bare, more = (
        msgspec.structs.replace(
            made, search=msgspec.structs.replace(made.search, proved_seconds=seconds)
        )
        for seconds in (0.0, 1e-9)
    )
    fall = "One more GiB of HBM per rank would lower the bound"
    assert f"{fall} by 200 µs." in flowed(bare, falls=2e-4)
    assert f"{fall} of shards spread at will by 200 µs." in flowed(more, falls=2e-4)
    line = "More memory per rank would not lower the bound"
    assert f"{line}: memory is not what limits it." in flowed(bare)
    assert f"{line} of shards spread at will; what single ranks hold may matter." in flowed(more)


def test_no_gap_is_said_as_such() -> None:
    assert "and no plan can take less (gap 0 %)" in flowed(samples.plan(gap=1e-16))
    assert "(gap 3.8 %)" in flowed(samples.plan())


def test_what_was_not_searched_is_listed() -> None:
    search = msgspec.structs.replace(samples.plan().search, skipped=("grid: 10^9 proposals",))
    text = flowed(samples.plan(search=search))
    assert "Not searched to the end - grid: 10^9 proposals" in text
    assert "Not searched" not in flowed(samples.plan())


def test_a_full_report_leaves_no_table_and_no_rank_out() -> None:
    made = tables_plan(64, 90)
    text = printed(made, 160, full=True)
    assert "smaller tables" in printed(made, 160)
    assert "smaller tables" not in text
    for table in made.tables:
        assert any(line.startswith(f"{table.name} ") for line in text.splitlines())
    assert "fullest and slowest are shown" not in text


def test_tables_that_share_a_row_take_what_their_slowest_rank_takes() -> None:
    """Two tables on two ranks at once take no longer than one of them."""
    plan = samples.plan()
    tables = tuple(samples.table(f"t{i}", 2000, "table_wise", (i % 2,)) for i in range(100))
    text = flowed(msgspec.structs.replace(plan, tables=tables, job=_job_of(100)))
    assert "t0 and 99 alike 2,000 x 16 table_wise fused all" in text
    assert format_seconds(50 * tables[0].seconds[0]) in text


def _job_of(count: int) -> Any:
    tables = [{"name": f"t{i}", "rows": 2000, "dim": 16} for i in range(count)]
    return samples.job(tables=tables)


@pytest.mark.parametrize("full", [False, True])
def test_names_are_never_terminal_codes(full: bool) -> None:
    text = printed(samples.hostile_plan(), full=full)
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_without_tables_speaks_of_none(full: bool) -> None:
    model = {"kind": "transformer", "layers": 2, "dim": 32, "heads": 4}
    made = plan(parse_job({"model": model, "batch": {"size": 4, "sequence": 16}}))
    text = flowed(made, full=full)
    assert f"transformer: {len(made.units)} dense units on" in text
    assert "4 samples of 16 tokens per rank and step" in text
    for words in ("mbedding tables", "Lookups", "kernel", "ids in", "--tensor", "for a table"):
        assert words not in text


def test_a_full_report_has_what_each_proposer_did() -> None:
    made = plan(
        parse_job(
            {
                "tables": [{"name": name, "rows": 1000, "dim": 16} for name in "ab"],
                "cluster": {"world_size": 2},
                "planner": {
                    "search": "proposers",
                    "proposers": [{"kind": "greedy"}, {"kind": "uniform"}],
                },
            }
        )
    )
    assert made.search.attempts
    greedy, uniform = made.search.attempts
    assert greedy.proposals + uniform.proposals == made.search.proposals
    for attempt in (greedy, uniform):
        assert f"{attempt.name} {attempt.proposals} {attempt.plans} {attempt.repeats}" in flowed(
            made, full=True
        )
    assert "Proposers, in turn" not in flowed(made)
    assert not tables_plan().search.attempts
