from __future__ import annotations

import io
import subprocess
import sys

import msgspec
import pytest
import samples
from rich.console import Console, RenderableType

from shardwright.core.cluster import SCHEMA, Calibration, SourcedFigure
from shardwright.core.measurement import ComparedNumber, Saved
from shardwright.core.option import ShardRun
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import PHASES
from shardwright.job.plan import Plan
from shardwright.planner.statistics import statistics
from shardwright.report.comparison_sheets import time_verdict
from shardwright.report.plan_report import plan_report
from shardwright.report.plan_sheets import fits_line, longest_seconds
from shardwright.report.table import (
    calibration_summary,
    comparison_summary,
    differences,
    plan_difference,
)
from shardwright.report.wording import error_text, mfu_text, percent, saved_text


def printed(renderable: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, no_color=True, file=out).print(renderable)
    return out.getvalue()


def first_screen(plan: Plan) -> RenderableType:
    """The first screen of a plan."""
    return plan_report(plan, statistics(samples.plan()), ())


def flowed(renderable: RenderableType, width: int = 80) -> str:
    """The same on one line, however it was wrapped."""
    return " ".join(printed(renderable, width).split())


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_plan_fits_the_width_and_no_number_is_cut_short(width: int) -> None:
    text = printed(first_screen(samples.plan()), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for table in samples.plan().tables:
        assert f"{table.rows:,} x {table.dim}" in text
        assert format_bytes(sum(table.nbytes)) in text


def test_huge_tables_with_the_longest_words_still_fit_80_columns() -> None:
    plan = samples.plan()
    halves = (ShardRun(40_000_000, 64), ShardRun(40_000_000, 64, column=64))
    big = msgspec.structs.replace(
        plan.tables[0],
        name="item_identifier_embedding",
        rows=40_000_000,
        dim=128,
        sharding_type="table_column_wise",
        compute_kernel="fused_uvm_caching",
        shards=tuple(samples.shard(rank, run, 2**43) for rank, run in enumerate(halves)),
    )
    text = printed(first_screen(msgspec.structs.replace(plan, tables=(big,))))
    assert max(len(line) for line in text.splitlines()) <= 80
    for shown in ("40,000,000 x 128", "16.00 TiB", "table_column_wise"):
        assert shown in text
    made = msgspec.structs.replace(plan, tables=(big,))
    full = printed(plan_report(made, statistics(samples.plan()), (), full=True))
    for shown in ("2 x 40,000,000 x 64", "fused_uvm_caching"):
        assert shown in full


def test_a_terminal_of_40_columns_folds_numbers_but_keeps_every_digit() -> None:
    text = printed(first_screen(samples.plan()), 40)
    assert max(len(line) for line in text.splitlines()) <= 40
    assert "…" not in text


def test_a_plan_shows_budget_peak_phase_gap_and_assumptions() -> None:
    plan = samples.plan()
    full = flowed(plan_report(plan, statistics(plan), (), full=True))
    assert "the budget is 14.00 MiB (14,680,064 B) per rank" in full
    assert "tried 214 proposals, 180 of which fit, in 31 ms" in full
    text = flowed(first_screen(plan))
    for shown in (
        "of 14.00 MiB DDR (56.3 %)",
        "backward",
        "gap 3.8 %",
        "Copy bandwidth of this machine is assumed to be 10 GB/s",
    ):
        assert shown in text


def test_placements_are_shown_in_words() -> None:
    text = printed(first_screen(samples.plan()), 120)
    assert "replicated" in text
    assert "sharded (flat)" in text


def test_what_lies_in_slower_memory_is_said_beside_what_fits() -> None:
    plan = samples.plan()
    assert "Beside it" not in fits_line(plan)
    ranks = tuple(msgspec.structs.replace(r, ddr_bytes=3 * 2**20) for r in plan.ranks)
    on_gpus = msgspec.structs.replace(plan.cluster, compute_device="cuda", hbm_cap=2**30)
    left = msgspec.structs.replace(plan.reserved, hbm_left=2**30)
    moved = msgspec.structs.replace(plan, ranks=ranks, cluster=on_gpus, reserved=left)
    assert fits_line(moved).endswith(" Beside it all ranks together have 6.00 MiB in DDR.")


def test_a_rank_over_its_budget_says_so_in_words() -> None:
    plan = samples.plan()
    full = msgspec.structs.replace(plan.ranks[0], peak_bytes=15 * samples.MIB)
    text = flowed(first_screen(msgspec.structs.replace(plan, ranks=(full,))), 120)
    assert "107.1 %, too much" in text


def test_a_hundred_equal_tables_share_one_row() -> None:
    plan = samples.plan()
    many = tuple(msgspec.structs.replace(plan.tables[2], name=f"t{k}") for k in range(100))
    text = printed(first_screen(msgspec.structs.replace(plan, tables=many)), 120)
    assert "t0 and 99 alike" in text
    assert format_bytes(100 * sum(plan.tables[2].nbytes)) in text


def test_hundreds_of_different_tables_show_the_largest_and_sum_the_rest() -> None:
    plan = samples.plan()
    many = tuple(
        samples.table(f"t{k}", k + 1, "table_wise", (0,), nbytes=k * 64) for k in range(300)
    )
    text = printed(first_screen(msgspec.structs.replace(plan, tables=many)), 120)
    assert "294 smaller tables" in text
    assert len(text.splitlines()) < 80


def test_a_plan_without_units_or_tables_is_still_printed() -> None:
    bare = msgspec.structs.replace(samples.plan(), units=(), tables=(), assumptions=())
    text = printed(first_screen(bare))
    assert "Dense units" not in text
    assert "Assumed" not in text


def test_names_are_never_markup_nor_terminal_codes() -> None:
    plan = samples.plan()
    nasty = msgspec.structs.replace(plan.tables[0], name="[red]x[/red]\x1b[2J\nrow")
    text = printed(first_screen(msgspec.structs.replace(plan, tables=(nasty,))), 120)
    assert "[red]x[/red]\ufffd[2J row" in text
    assert "\x1b" not in text


def test_a_kept_prediction_says_equal_and_within() -> None:
    text = flowed(comparison_summary(samples.comparison()))
    assert "Memory as predicted: exact bytes equal on 2 of 2 ranks, peak within 3.5 %." in text
    assert "-300,000 B -3.5 %" in text
    full = flowed(comparison_summary(samples.comparison(), full=True))
    assert "all weights 5,946,944 5,946,944 equal" in full


def test_a_comparison_fits_80_columns() -> None:
    text = printed(comparison_summary(samples.comparison()))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_one_byte_too_many_is_named_with_rank_and_tensor() -> None:
    good = samples.comparison()
    wrong = msgspec.structs.replace(good.exact[0], measured=2_973_473)
    failing = msgspec.structs.replace(
        good, exact=(wrong, *good.exact[1:]), failures=("rank 0: tables.C3 is 1 B too large.",)
    )
    text = flowed(comparison_summary(failing))
    assert "Memory not as predicted: exact bytes equal on 1 of 2 ranks" in text
    assert "tables.C3 2,973,472 2,973,473 -1 B" in text
    assert "-1 B (1 of 2 differ)" in flowed(comparison_summary(failing, full=True))
    assert "- rank 0: tables.C3 is 1 B too large." in text


def test_differences_that_cancel_are_not_called_equal() -> None:
    good = samples.comparison()
    a = msgspec.structs.replace(good.exact[0], measured=2_973_473)
    b = msgspec.structs.replace(good.exact[1], measured=2_973_471)
    both = msgspec.structs.replace(good, exact=(a, b, *good.exact[2:]))
    text = flowed(comparison_summary(both, full=True))
    assert "+0 B (2 of 2 differ)" in text


def test_missing_sides_are_named() -> None:
    good = samples.comparison()
    lines = (
        ComparedNumber(0, "setup", "weight", "a", None, 64.0),
        ComparedNumber(1, "setup", "weight", "b", 64.0, None),
    )
    text = flowed(comparison_summary(msgspec.structs.replace(good, exact=lines)), 120)
    assert "not predicted" in text
    assert "not measured" in text
    assert "equal on 0 of 2 ranks" in text


def test_a_peak_outside_tolerance_names_both_numbers() -> None:
    text = flowed(comparison_summary(samples.comparison(tolerance=0.02)))
    assert "Memory not as predicted" in text
    assert "peak off by 3.5 % (tolerance 2.0 %)" in text


def test_a_failure_of_time_alone_leaves_memory_as_predicted() -> None:
    text = flowed(comparison_summary(samples.comparison(failures=("rank 1: step is slow.",))))
    assert "peak within 3.5 %; but 1 other check failed." in text
    assert "What failed - rank 1: step is slow." in text


def test_nothing_to_compare_is_not_a_success() -> None:
    empty = samples.comparison(exact=(), peaks=(), phase_peaks=(), seconds=())
    assert "Nothing was compared" in printed(comparison_summary(empty))


@pytest.mark.parametrize(
    ("predicted", "measured", "shown", "style"),
    [
        (1.0, 1.25, "1.25 s measured, 1 s predicted (25.0 % slower than predicted)", ""),
        (1.0, 9.0, "9 s measured, 1 s predicted (9 times slower than predicted)", "yellow"),
        (5.0, 2.0, "2 s measured, 5 s predicted (2.5 times faster than predicted)", "yellow"),
    ],
)
def test_a_step_is_shown_with_its_error_and_as_so_many_times_beyond_twice(
    predicted: float, measured: float, shown: str, style: str
) -> None:
    line = ComparedNumber(1, "forward", "time", "forward", predicted, measured)
    made = samples.comparison(seconds=(line,))
    assert f"Step on rank 1, the slowest: {shown}." in flowed(comparison_summary(made))
    found = time_verdict(made)
    assert found is not None
    assert found.held == (style == "")
    plan = samples.plan()
    hint = "shardwright calibrate -o cluster.toml measures this machine's"
    assert (hint in flowed(comparison_summary(made, plan))) == (not found.held)
    measured_by = Calibration(SCHEMA, "2026-11", 2, "cpu", "gloo", {}, {}, {})
    cluster = msgspec.structs.replace(plan.job.cluster, measured=measured_by)
    job = msgspec.structs.replace(plan.job, cluster=cluster)
    assert hint not in flowed(comparison_summary(made, samples.plan(job=job)))


def test_the_slowest_rank_is_the_one_that_was_measured_so() -> None:
    lines = (
        ComparedNumber(0, "forward", "time", "forward", 2.0, 1.0),
        ComparedNumber(1, "forward", "time", "forward", 1.0, 5.0),
    )
    found = time_verdict(samples.comparison(seconds=lines))
    assert found is not None
    assert not found.held
    assert found.sentence.startswith("Step on rank 1, the slowest: 5 s measured, 1 s predicted")


def test_a_comparison_of_many_ranks_and_failures_is_one_screen() -> None:
    lines = tuple(
        ComparedNumber(r, phase, "time", phase, 1.0, 1.0 + r)
        for r in range(64)
        for phase in PHASES[:9]
    )
    peaks = tuple(ComparedNumber(r, "forward", "total", "peak", 100.0, 150.0) for r in range(64))
    failed = tuple(f"rank {r}: peak" for r in range(64))
    made = samples.comparison(seconds=lines, phase_peaks=peaks, peaks=peaks, failures=failed)
    text = printed(comparison_summary(made))
    assert len(text.splitlines()) <= 40
    assert "58 more: --full" in text


def test_of_many_ranks_only_the_slowest_shows_its_phases() -> None:
    lines = tuple(ComparedNumber(r, "forward", "time", "forward", 1.0, 1.0 + r) for r in range(8))
    text = printed(comparison_summary(samples.comparison(seconds=lines)))
    assert "Phases on rank 7, the slowest of 8" in text
    assert "Phases on rank 0" not in text


def test_equal_plans_have_no_differences() -> None:
    assert differences(samples.plan(), samples.plan()) == []
    assert "equal" in printed(plan_difference(samples.plan(), samples.plan()))


def test_differences_name_table_unit_rank_and_job_key() -> None:
    a = samples.plan()
    b = samples.plan(job=samples.job(batch={"size": 512}))
    shards = tuple(msgspec.structs.replace(shard, rank=1) for shard in b.tables[0].shards)
    moved = msgspec.structs.replace(b.tables[0], sharding_type="table_wise", shards=shards)
    fuller = msgspec.structs.replace(b.ranks[0], peak_bytes=2 * b.ranks[0].peak_bytes)
    b = msgspec.structs.replace(
        b,
        tables=(moved, *b.tables[1:-1]),
        units=(b.units[0], samples.unit("head", True)),
        ranks=(fuller, b.ranks[1]),
    )
    found = {(d.group, d.name, d.key): (d.before, d.after) for d in differences(a, b)}
    peak = a.ranks[0].peak_bytes
    assert found == {
        ("table", "C3", "sharding"): ("row_wise", "table_wise"),
        ("table", "C3", "ranks"): ("all", "1"),
        ("table", "C3", "seconds"): (longest_seconds(a.tables[:1]), longest_seconds((moved,))),
        ("table", "C9", "presence"): ("there", None),
        ("unit", "top", "presence"): ("there", None),
        ("unit", "head", "presence"): (None, "there"),
        ("rank", "0", "peak"): (peak, 2 * peak),
        ("job", "", "batch.size"): (256, 512),
    }
    text = flowed(plan_difference(a, b))
    assert "rank 0 peak 7.89 MiB 15.78 MiB +100.0 %" in text
    assert "8 differences" in text


def test_a_section_of_defaults_differs_by_what_is_no_default_and_settings_have_no_percent() -> None:
    a = samples.plan()
    b = msgspec.structs.replace(a, job=samples.job(memory={"zero": 2}))
    for one, other in ((a, b), (b, a)):
        (found,) = (d for d in differences(one, other) if d.group == "job")
        assert (found.key, {found.before, found.after}) == ("memory.zero", {2, 3})
        assert "%" not in flowed(plan_difference(one, other))


def test_what_is_nearly_equal_is_said_to_be_below_a_hundredth_of_a_percent() -> None:
    assert error_text(10**6 + 3, 10**6) == error_text(10**6 - 3, 10**6) == "<0.01 %"
    assert error_text(10**6, 10**6) == "equal"
    assert error_text(10**6 + 100, 10**6) == "+0.01 %"
    assert error_text(10**6 - 3 * 10**4, 10**6) == "-3.0 %"


def test_what_changed_alike_is_one_row_of_a_difference() -> None:
    plan = samples.plan()
    tables = tuple(samples.table(f"t{k}", k + 9, "table_wise", (0,)) for k in range(800))
    ranks = tuple(msgspec.structs.replace(plan.ranks[0], rank=r) for r in range(64))
    a = msgspec.structs.replace(plan, tables=tables, ranks=ranks)
    b = msgspec.structs.replace(
        a,
        tables=tuple(msgspec.structs.replace(t, compute_kernel="fused_uvm") for t in tables),
        ranks=tuple(msgspec.structs.replace(r, seconds=r.rank * 1e-3) for r in ranks),
    )
    text = flowed(plan_difference(a, b))
    assert "864 differences" in text
    assert "800 tables kernel fused fused_uvm" in text
    assert "64 ranks seconds, largest 8.1 ms 63 ms" in text
    assert len(printed(plan_difference(a, b)).splitlines()) <= 40
    assert "t799" in printed(plan_difference(a, b, full=True))


def test_tables_that_moved_to_many_ranks_are_one_row_beside_what_they_have_in_common() -> None:
    plan = samples.plan()
    tables = [samples.table(f"t{k}", 9, "table_wise", (k % 2,)) for k in range(90)]
    moved = [samples.table(t.name, 9, "table_wise", (2 + k // 4,)) for k, t in enumerate(tables)]
    moved[50:] = [samples.table(t.name, 9, "table_wise", (7,)) for t in tables[50:]]
    a = msgspec.structs.replace(plan, tables=tuple(tables))
    b = msgspec.structs.replace(a, tables=tuple(moved))
    text = flowed(plan_difference(a, b))
    assert "22 tables ranks 0 7 22 tables ranks 1 7 46 tables ranks all among 2-6, 8-14" in text
    assert "t49" in printed(plan_difference(a, b, full=True))


def test_keys_of_a_table_that_one_job_has_not_are_no_differences_of_their_own() -> None:
    job = samples.plan().job
    a, fewer = samples.plan(job=job), msgspec.structs.replace(job, tables=job.tables[1:])
    assert job.tables
    assert differences(a, msgspec.structs.replace(a, job=fewer)) == []


def test_printing_a_plan_imports_neither_templates_nor_torch() -> None:
    code = (
        "import sys, shardwright.report.table; "
        "print([m for m in ('jinja2', 'torch', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_table_of_the_usual_size_takes_one_line_at_80_columns() -> None:
    plan = samples.plan()
    table = samples.table("C3", 500_000, "row_wise", (0, 1))
    text = printed(first_screen(msgspec.structs.replace(plan, tables=(table, *plan.tables[3:]))))
    row = next(line for line in text.splitlines() if line.startswith("C3"))
    for shown in ("500,000 x 16", "row_wise", "fused", "2 x 250,000 x 16", "30.52 MiB"):
        assert shown in row


def test_many_equal_ranks_share_a_row_and_many_different_ones_show_the_fullest() -> None:
    plan = samples.plan()
    cluster = msgspec.structs.replace(plan.cluster, world_size=64)
    equal = tuple(msgspec.structs.replace(plan.ranks[0], rank=r) for r in range(64))
    text = printed(first_screen(msgspec.structs.replace(plan, cluster=cluster, ranks=equal)))
    assert "all  5.00 MiB 40.00 KiB" in text
    uneven = tuple(msgspec.structs.replace(t, seconds=t.rank / 1e3) for t in equal)
    text = flowed(first_screen(msgspec.structs.replace(plan, cluster=cluster, ranks=uneven)))
    assert "Memory and time per rank, those with the highest peak and the slowest" in text
    assert "63 ms" in text
    assert "12 ms" not in text


def test_a_rank_without_exact_bytes_is_not_counted_as_equal() -> None:
    good = samples.comparison()
    one = msgspec.structs.replace(good, exact=tuple(e for e in good.exact if e.rank == 0))
    assert "exact bytes equal on 1 of 2 ranks" in flowed(comparison_summary(one))


def test_what_saving_took_names_saves_that_failed_and_where_a_run_went_on() -> None:
    saved = Saved(2, 1, 2048, 0.5, 0.25, (4, 7))
    said = "saved 2 times; 2.00 KiB in 250 ms; training stood still for 500 ms; 1 save failed"
    assert saved_text(saved) == f"{said}; resumed 2 times, after step 4, 7"
    assert "failed" not in saved_text(msgspec.structs.replace(saved, failed=0))


def test_a_machine_is_shown_in_ten_lines_with_what_varies_and_all_in_the_full_report() -> None:
    figures = {
        name: SourcedFigure(2e9, "B/s", "two ranks", "2026-11", 9, spread)
        for name, spread in (
            ("compute_rate", 0.1),
            ("memory_rate", 0.97),
            *((f"other_{k}_rate", 0.2) for k in range(30)),
        )
    }
    found = Calibration(SCHEMA, "2026-11", 2, "cpu", "gloo", {"cores": "2"}, {}, figures)
    text, full = printed(calibration_summary(found)), printed(calibration_summary(found, full=True))
    assert len(text.splitlines()) <= 12
    assert "memory_rate" in text
    assert "97.0 % !" in text
    assert "Above 30.0 % (!): memory_rate. 30 more constants: --full." in text
    assert "other_29_rate" not in text
    assert "other_29_rate" in full
    assert "two ranks" in full


def test_what_would_round_to_nothing_is_below_something() -> None:
    assert [percent(share) for share in (0, 4e-5, 6e-5, 4e-4)] == [
        "0 %",
        "<0.01 %",
        "0.01 %",
        "0.04 %",
    ]
    assert error_text(1e9 - 1, 1e9) == "<0.01 %"
    assert [mfu_text(share) for share in (0, 0.004, 0.006)] == ["0%", "<1%", "1%"]
