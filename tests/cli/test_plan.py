"""``shardwright plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MIB, GIB = 2**20, 2**30
TABLE = '[[tables]]\nname = "a"\nrows = 100\ndim = 16\n'

TABLES_ALONE = """
[planner]
constants = "torchrec-1.9"

[cluster]
world_size = 4
local_world_size = 2
compute_device = "cuda"
hbm_cap = "64 MiB"

[batch]
size = 32

[[tables]]
name = "big"
rows = 120_000
dim = 64
optimizer = "rowwise_adagrad"

[[tables]]
name = "bags"
rows = 5_000
dim = 128
optimizer = "adam"
pooling_factors = [20.0, 0.5]
module_weighted = true

[[tables]]
name = "list"
rows = 2_000
dim = 32
optimizer = "sgd"
pooled = false
pooling_factors = [3.0]

[[tables]]
name = "small"
rows = 20
dim = 16
optimizer = "sgd"
"""


@pytest.fixture
def tables_job(tmp_path: Path) -> Path:
    """Tables without a dense part, one of each kind of lookup, priced as TorchRec prices them."""
    path = tmp_path / "tables.toml"
    path.write_text(TABLES_ALONE)
    return path


def test_the_table_names_every_table_rank_and_assumption(call: Any, job: Any) -> None:
    answer = call("plan", job)
    assert answer.code == 0
    assert answer.err == ""
    for word in ("big", "middle", "small", "bottom", "top", "100,000 x 16", "Assumed"):
        assert word in answer.out


def test_json_has_the_names_that_scripts_rely_on(call: Any, job: Any) -> None:
    made = call("plan", job, "--json").json
    assert made["max_rank_seconds"] >= made["lower_bound_seconds"] > 0
    assert made["gap"] == pytest.approx(
        made["max_rank_seconds"] / made["lower_bound_seconds"] - 1, abs=1e-9
    )
    assert made["proposals"] >= 1
    assert made["wall_seconds"] > 0
    assert made["assumptions"]
    assert len(made["ranks"]) == 2
    for rank in made["ranks"]:
        assert 0 < rank["seconds"] <= made["max_rank_seconds"]
        assert rank["hbm_bytes"] == 0
        assert 0 < rank["ddr_bytes"] <= 5 * 2**20
    assert [table["name"] for table in made["tables"]] == ["big", "middle", "small"]
    for table in made["tables"]:
        assert {"sharding_type", "compute_kernel", "ranks", "shard_sizes"} <= set(table)
        assert len(table["ranks"]) == len(table["shard_sizes"])


def test_json_of_tables_alone_has_every_part_tier_and_reservation(
    call: Any, tables_job: Path
) -> None:
    made = call("plan", tables_job, "--json").json
    assert made["capacity"] == {"hbm": 64 * MIB, "ddr": 128 * GIB, "ssd": 2048 * GIB}
    assert made["reserved"]["kind"] == "heuristic"
    assert made["units"] == []
    assert 1 <= made["feasible"] <= made["proposals"]
    for rank in made["ranks"]:
        parts = ("fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "prefetch")
        assert rank["seconds"] == pytest.approx(sum(rank["parts"][part] for part in parts))
        assert rank["hbm_bytes"] == rank["peak_bytes"] == sum(rank["at_peak"].values())
        assert rank["hbm_bytes"] <= made["reserved"]["hbm_left"]
        assert rank["ddr_bytes"] == rank["ssd_bytes"] == 0
    for table in made["tables"]:
        assert len(table["ranks"]) == len(table["bytes"]) == len(table["seconds"])
    placed = sum(sum(table["bytes"]) for table in made["tables"])
    assert placed == sum(rank["hbm_bytes"] for rank in made["ranks"])


def test_json_has_the_statistics_and_what_more_memory_would_buy(
    call: Any, tables_job: Path
) -> None:
    made = call("plan", tables_job, "--json").json
    found = made["statistics"]
    assert [rank["seconds"] for rank in found["ranks"]] == [r["seconds"] for r in made["ranks"]]
    assert [table["name"] for table in found["tables"]] == ["big", "bags", "list", "small"]
    assert {price["tier"] for price in made["memory_prices"]} == {"hbm", "ddr", "ssd"}


@pytest.mark.parametrize("arguments", [[], ["--full"]])
def test_the_report_of_tables_alone_has_what_a_reader_looks_for(
    call: Any, tables_job: Path, arguments: list[str]
) -> None:
    text = call("plan", tables_job, *arguments).out
    for title in (
        "4 tables alone on 4 cuda ranks of 2 hosts",
        "Fits: ",
        "Embedding tables",
        "Memory and time per rank",
    ):
        assert title in text
    for title in (
        "Lookups per table",
        "Time and traffic per rank",
        "How evenly it lies on the ranks",
        "Ranks by peak, HBM",
        "Where the HBM of rank",
        "What the worst ranks hold",
        "Storage per table",
        "Parts of a step",
        "Critical path",
        "Assumptions",
    ):
        assert (title in text) == bool(arguments)


def test_row_shards_add_up_to_the_table(call: Any, job: Any) -> None:
    big = call("plan", job, "--json").json["tables"][0]
    assert big["sharding_type"] == "row_wise"
    assert sum(rows for rows, _ in big["shard_sizes"]) == 100_000


def test_the_same_job_gives_the_same_plan(call: Any, job: Any) -> None:
    first, second = (call("plan", job, "--json").json for _ in range(2))
    assert first.pop("wall_seconds")
    assert second.pop("wall_seconds")
    assert first == second


def test_a_written_plan_is_announced_on_stderr(call: Any, job: Any, tmp_path: Path) -> None:
    target = tmp_path / "new" / "plan.json"
    answer = call("plan", job, "-o", target)
    assert answer.code == 0
    assert answer.err == f"plan written to {target} in a new folder, {target.parent}\n"
    assert target.exists()
    assert [p.name for p in target.parent.iterdir()] == ["plan.json"]


def test_json_on_stdout_and_a_file_at_once(call: Any, job: Any, tmp_path: Path) -> None:
    answer = call("plan", job, "--json", "-o", tmp_path / "p.json")
    assert answer.json["schema"] == "shardwright.plan/4"
    assert (tmp_path / "p.json").exists()


def test_ranks_and_keys_can_be_overridden(call: Any, job: Any) -> None:
    made = call("plan", job, "-n", 4, "--set", "batch.size=8", "--json").json
    assert len(made["ranks"]) == 4


def test_a_plan_that_cannot_be_written_says_where(call: Any, job: Any, tmp_path: Path) -> None:
    call("plan", job, "-o", tmp_path).refuses(2, str(tmp_path), "a directory")
    call("plan", job, "-o", job / "p.json").refuses(2, str(job / "p.json"))


def test_a_missing_job_is_named(call: Any) -> None:
    call("plan", "none.toml").refuses(2, "none.toml: expected a job file, got no such file")


def test_a_directory_is_no_job(call: Any, tmp_path: Path) -> None:
    call("plan", tmp_path).refuses(2, str(tmp_path), "a directory")


def test_broken_toml_is_shown_with_its_line(call: Any, job: Path) -> None:
    job.write_text("[model]\nbottom = = [64]\n")
    call("plan", job).refuses(2, "a job in TOML", "line")


def test_bytes_that_are_no_text_are_refused(call: Any, job: Path) -> None:
    job.write_bytes(b"\xff\xfe\x00")
    call("plan", job).refuses(2, "a job in TOML")


def test_a_plan_is_no_job(call: Any, plan: Path) -> None:
    call("plan", plan).refuses(2, "a job in TOML")


@pytest.mark.parametrize(
    ("key", "near"),
    [("batch.sise", "size"), ("train.lerning_rate", "learning_rate"), ("trian.steps", "train")],
)
def test_an_unknown_key_is_answered_with_the_nearest(
    call: Any, job: Path, key: str, near: str
) -> None:
    call("plan", job, "--set", f"{key}=1").refuses(2, "unknown key", f"Did you mean '{near}'?")


def test_an_unknown_key_of_a_table_is_answered_with_the_nearest(call: Any, job: Path) -> None:
    job.write_text(TABLE + "rowz = 3\n")
    call("plan", job).refuses(2, "tables[0].rowz", "Did you mean 'rows'?")


@pytest.mark.parametrize("text", ["batch", "batch.size", "=3", ".size=3", "batch.=3"])
def test_an_override_needs_section_key_and_value(call: Any, job: Path, text: str) -> None:
    call("plan", job, "--set", text).refuses(2, "--set", "section.key=value", f"'{text}'")


@pytest.mark.parametrize(
    ("override", "wanted", "found"),
    [
        ("batch.size=-1", ">= 1", "-1"),
        ("batch.size=0", ">= 1", "0"),
        ("batch.size=1.5", "int", "1.5"),
        ("batch.size=99999999999", "<=", "99999999999"),
        ("batch.size=", "int", "''"),
        ("train.steps=-3", ">= 1", "-3"),
        ("train.learning_rate=0", "> 0", "0"),
        ("train.learning_rate=nan", "> 0", "nan"),
        ("train.optimizer=lion", "", "'lion'"),
        ("model.bottom=[]", "16 as its last width", "no layer"),
        ("model.bottom=[8]", "16 as its last width", "8"),
        ("model.top=[64, 64]", "1 as its last width", "64"),
        ("model.top=[0]", ">= 1", "0"),
        ("cluster.world_size=0", ">= 1", "0"),
        ("cluster.preset=abacus", "one of local", "'abacus'"),
        ("cluster.ddr_cap=-5", "a size", "-5"),
        ("cluster.ddr_cap=3 apples", "bytes", "'3 apples'"),
        ("cluster.ddr_cap=9999999 TiB", "a size", "9999999 TiB"),
    ],
)
def test_an_impossible_value_is_shown_with_key_and_both_values(
    call: Any, job: Path, override: str, wanted: str, found: str
) -> None:
    key = override.partition("=")[0]
    call("plan", job, "--set", override).refuses(2, key, "expected", wanted, found)


@pytest.mark.parametrize(
    ("line", "spot", "found"),
    [
        ("rows = 0", "rows", "0"),
        ("rows = -7", "rows", "-7"),
        ("rows = 10000000000000000000000", "rows", "10000000000000000000000"),
        ('rows = "many"', "rows", "'many'"),
        ("dim = -16", "dim", "-16"),
        ("dim = 70000", "dim", "70000"),
        ('name = "a b"', "name", "'a b'"),
        ('dtype = "fp12"', "dtype", "'fp12'"),
        ("pooling_factors = [-1.0]", "pooling_factors", "-1.0"),
        ("pooling_factors = [nan]", "pooling_factors", "nan"),
        ('sharding_types = ["gridd"]', "sharding_types", "'gridd'"),
        ('compute_kernels = ["magic"]', "compute_kernels[0]", "'magic'"),
    ],
)
def test_an_impossible_table_is_shown_with_its_key(
    call: Any, job: Path, line: str, spot: str, found: str
) -> None:
    key = line.partition(" ")[0]
    rest = [own for own in TABLE.splitlines() if not own.startswith(key)]
    job.write_text("\n".join([*rest, line]))
    call("plan", job).refuses(2, spot, found)


def test_hosts_have_to_fill_up(call: Any, job: Path) -> None:
    answer = call("plan", job, "-n", 4, "--set", "cluster.local_world_size=3")
    answer.refuses(2, "cluster.local_world_size", "a divisor of 4", "3")


def test_a_kernel_that_training_cannot_carry_out_is_refused(call: Any, job: Path) -> None:
    job.write_text(f"[model]\nbottom = [16]\n{TABLE}" + 'compute_kernels = ["fused_uvm"]')
    wanted = "tables.a.compute_kernels: expected any that can be planned for 'a', got fused_uvm"
    call("plan", job).refuses(2, wanted, "this version's runtime carries out fused for routed")


@pytest.mark.parametrize("text", ["", "tables = []", "[model]\nbottom = [16]"])
def test_a_job_without_tables_is_refused(call: Any, job: Path, text: str) -> None:
    job.write_text(text)
    call("plan", job).refuses(2, "tables", "got n")


def test_two_tables_of_one_name_are_refused(call: Any, job: Path) -> None:
    job.write_text(TABLE + TABLE)
    call("plan", job).refuses(2, "tables[1] 'a'.name", "used twice")


def test_a_table_larger_than_all_memory_is_3_with_the_shortfall(call: Any, job: Path) -> None:
    answer = call("plan", job, "--set", "cluster.ddr_cap=1 MiB")
    answer.refuses(
        3, "no plan found that fits", "rank", "of 1,048,576 B", "B too much", "tables.big.weight"
    )
    assert "cluster.ddr_cap of" in answer.err


@pytest.mark.slow
def test_the_way_out_that_is_named_works(call: Any, job: Path) -> None:
    answer = call("plan", job, "--set", "cluster.ddr_cap=1 MiB")
    cap = answer.err.partition("cluster.ddr_cap of ")[2].partition(" B")[0].replace(",", "")
    assert call("plan", job, "--set", f"cluster.ddr_cap={cap}").code == 0


def test_nothing_is_written_when_no_plan_fits(call: Any, job: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    call("plan", job, "--set", "cluster.ddr_cap=1 MiB", "-o", target).refuses(3)
    assert not target.exists()
