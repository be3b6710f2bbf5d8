"""``inspect`` finds in a log what it was made up with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.core.timeline import decode, phase_peaks
from shardwright.data.synthetic import ClickModel
from shardwright.job.job import read_job
from shardwright.job.plan import read_plan

JOB = """
[model]
dense_features = 2
bottom = [8]
top = [8, 1]
interaction = "cat"

[cluster]
world_size = 2

[batch]
size = 256

[data]
kind = "columns"
path = "log.csv"
"""
TABLES = """
[[tables]]
name = "large"
rows = 20000
dim = 8

[[tables]]
name = "seen"
rows = 3000
dim = 4
pooling_factors = [3.0]
"""


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB + TABLES)
    return path


def write(folder: Path, zipf: float, rows: int = 8192) -> None:
    model = ClickModel(zipf=zipf).named(["large", "seen"], [20000, 3000], [1.0, 3.0], 2)
    model.write(folder / "log.csv", rows=rows, start=0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("zipf", [0.0, 1.1, 1.5])
def test_the_exponent_of_made_up_ids_is_found_and_can_be_put_into_the_job(
    call: Any, logged: Path, zipf: float
) -> None:
    write(logged.parent, zipf)
    found = call("inspect", logged)
    assert found.code == 0, found
    logged.write_text(JOB + found.out)
    large, seen = read_job(logged).tables
    assert large.zipf == pytest.approx(zipf, abs=0.06)
    assert seen.zipf == pytest.approx(zipf, abs=0.06)
    assert seen.pooling_factors[0] == pytest.approx(3.0, rel=0.02)
    first = call("inspect", logged, "--json", "--rows", "512").json["tables"][0]
    assert (first["table"], first["ids"]) == ("large", 512)
    assert first["distinct"] == first["distinct_per_batch"] <= 512


def test_what_is_printed_keeps_all_that_the_job_says_of_a_table(call: Any, logged: Path) -> None:
    """In whose place it is put: a mean would be a sum, a dtype another one."""
    more = (
        'dtype = "fp16"\noptimizer = "adagrad"\npooling_type = "mean"\nmin_partition = 4\n'
        'sharding_types = ["row_wise", "table_wise"]\ncompute_kernels = ["fused_uvm_caching"]\n'
        'features = ["large"]\ncache = { load_factor = 0.5, stats = [3.0, 0.5, 0.25] }\n'
    )
    logged.write_text(JOB + TABLES.replace("dim = 8\n", f"dim = 8\n{more}"))
    write(logged.parent, 1.1, 512)
    before = read_job(logged).tables
    logged.write_text(JOB + call("inspect", logged).out)
    found = read_job(logged).tables
    for one, other in zip(found, before, strict=True):
        kept = msgspec.structs.replace(one, zipf=other.zipf, pooling_factors=other.pooling_factors)
        assert kept == other


def test_a_job_is_written_in_place_and_keeps_all_else(call: Any, logged: Path) -> None:
    """Comments, keys and their order too; what was found takes the place of what was said."""
    first, second = TABLES.split("\n\n")
    kept = first.replace("dim = 8", 'dim = 8  # wide\npooling_type = "mean"')
    said = second.replace("dim = 4", "zipf = 4.5  # a guess\ndim = 4").replace("3.0", "2.0")
    text = f"# mine\n{JOB}{kept}\n\n# small\n{said}\n[train]\nsteps = 3\n"
    logged.write_text(text)
    write(logged.parent, 1.1, 600)
    found = call("inspect", logged, "--rows", "512", "-o", logged)
    assert found.out == (
        f"wrote zipf of 2 tables and pooling_factors of 1 into {logged}\n"
        "left out: pooling_factors of 1 table, as the job has them\n"
        "left out: rows behind the first 512, as --rows asks\n"
    )
    large, seen = read_job(logged).tables
    wanted = text.replace("dim = 8  # wide", f"dim = 8  # wide\nzipf = {large.zipf}")
    wanted = wanted.replace("zipf = 4.5  # a", f"zipf = {seen.zipf}  # a")
    assert logged.read_text() == wanted.replace("[2.0]", f"{list(seen.pooling_factors)}")
    assert call("inspect", logged, "-o", logged.with_name("other.toml")).code == 0
    assert read_job(logged.with_name("other.toml")).tables[0].pooling_type == "mean"


def test_where_tables_do_not_stand_one_by_one_nothing_is_written(call: Any, logged: Path) -> None:
    write(logged.parent, 1.1, 300)
    listed = 'tables = [{ name = "large", rows = 20000, dim = 8 }]\n'
    for text in (
        listed + JOB,
        JOB + TABLES.replace("[3.0]", "[\n  2.0,\n]"),
    ):
        logged.write_text(text)
        call("inspect", logged, "-o", logged).refuses(2, "each table as a [[tables]] of its own")
        assert logged.read_text() == text
    other = logged.with_name("log.csv")
    call("inspect", logged, "-o", other).refuses(2, f"-o: expected {logged}, or a new file")


def test_bad_rows_that_are_left_out_are_counted_by_file_and_filled_up_by_the_next_ones(
    call: Any, logged: Path
) -> None:
    """As in training: a batch with a bad row is no short one."""
    write(logged.parent, 1.1, 600)
    log = logged.parent / "log.csv"
    header, *rows = log.read_text().splitlines()
    good = call("inspect", logged, "--json").json
    bad = [*rows[:5], "a bad row", *rows[5:400], ",", *rows[400:]]
    log.write_text("\n".join([header, *bad, ""]))
    call("inspect", logged).refuses(2, "log.csv:7")
    skip = ("--set", "data.skip_bad_rows=true")
    found = call("inspect", logged, *skip, "--json").json
    assert found == {"tables": good["tables"], "bad_rows": {"log.csv": 2}}
    assert good["bad_rows"] == {}
    text = call("inspect", logged, *skip).out
    assert text.startswith("# left out: 2 bad rows of log.csv, as data.skip_bad_rows asks\n")
    log.write_text("\n".join([header, rows[0], ",", ""]))
    assert call("inspect", logged, *skip, "--json").json["tables"][0]["ids"] == 1


def test_a_last_batch_that_is_short_counts_in_no_mean_of_batches(call: Any, logged: Path) -> None:
    means = []
    for rows in (1024, 1024 + 10):
        write(logged.parent, 1.1, rows)
        found = call("inspect", logged, "--json").json["tables"]
        assert found[0]["ids"] == rows
        means.append([table["distinct_per_batch"] for table in found])
    assert means[0] == means[1]


def test_a_folder_of_days_is_read_as_training_reads_it(call: Any, logged: Path) -> None:
    model = ClickModel(zipf=1.1).named(["large", "seen"], [20000, 3000], [1.0, 3.0], 2)
    (logged.parent / "days").mkdir()
    for day in range(3):
        model.write(logged.parent / "days" / f"day_{day}", rows=2048, start=2048 * day)
    days = ("--set", "data.path=days", "--set", "data.days=3")
    large, _ = call("inspect", logged, *days, "--json").json["tables"]
    assert (large["table"], large["ids"]) == ("large", 2 * 2048)  # the last day is held out
    assert large["zipf"] == pytest.approx(1.1, abs=0.06)


@pytest.mark.slow
def test_a_plan_counts_fewer_rows_of_an_update_where_ids_repeat(call: Any, logged: Path) -> None:
    peaks = []
    write(logged.parent, 0.0)
    for zipf in (0.0, 2.0):
        logged.write_text(JOB + TABLES.replace("dim", f"zipf = {zipf}\ndim"))
        made = logged.with_suffix(".json")
        assert call("plan", logged, "-o", made, "--set", "train.optimizer=adam").code == 0
        found = phase_peaks(decode(read_plan(made).timeline))
        peaks.append(found[0, "step"].get("temporary", 0))
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.slow
def test_the_exponent_of_a_table_counts_as_that_of_the_data_where_replicas_exchange_rows(
    call: Any, logged: Path
) -> None:
    peaks = []
    kept = TABLES.replace("rows = 20000", "rows = 200000\nsharding_types = ['data_parallel']")
    for own, data in (("zipf = 1.4\n", ""), ("", "zipf = 1.4\n")):
        logged.write_text(JOB + data + kept.replace("dim", f"{own}dim"))
        made = logged.with_suffix(".json")
        assert call("plan", logged, "-o", made).code == 0
        peaks.append(phase_peaks(decode(read_plan(made).timeline))[0, "reduce"])
    assert peaks[0] == peaks[1]


def test_what_has_no_log_is_refused_in_a_line(call: Any, logged: Path) -> None:
    call("inspect", logged).refuses(2, "log.csv", "expected")
    call("inspect", logged, "--rows", "0").refuses(2, "--rows: expected at least 1, got 0")
    other = "model.kind=transformer"
    assert call("inspect", logged, "--set", other).code == 2
