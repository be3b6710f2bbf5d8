"""``shardwright explain``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.job.plan import read_plan, sealed, write_plan
from shardwright.planner.explain import STATISTICS

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
name = "a"
rows = 120_000
dim = 64
optimizer = "rowwise_adagrad"

[[tables]]
name = "b"
rows = 2_000
dim = 32
optimizer = "sgd"
pooled = false
pooling_factors = [3.0]
"""


def test_a_plan_alone_says_what_it_rests_on_and_where_each_rank_peaks(call: Any, plan: Any) -> None:
    answer = call("explain", plan)
    assert answer.code == 0
    assert answer.err == ""
    for word in ("optimizer", "memory_rate", "rank 0: peak", "rank 1: peak", "s per step"):
        assert word in answer.out


def test_what_was_not_said_is_shown_as_a_default(
    call: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    lines = call("explain", plan).out.splitlines()
    facts = {line.split("  ")[0]: line for line in lines if line.endswith("]")}
    assert "[tables.dtype not given: the default]" in facts["dtype"]
    assert "[batch.size]" in facts["batch"]
    assert "[cluster.ddr_cap]" in facts["DDR of a rank"]
    assert "[tables.optimizer not given: train.optimizer]" in facts["optimizer of tables"]
    assert "[planner.constants not given: the default]" in facts["costs"]
    for what in ("input pipeline", "outputs at the peak", "mode", "rows on the wire"):
        assert "[planner.estimator." in facts[what]


def test_one_rank_leaves_the_other_out(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--rank", 1)
    assert "rank 1: peak" in answer.out
    assert "0-1" not in answer.out


def test_a_table_is_derived_from_its_rows(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big")
    assert answer.code == 0
    assert "table_rows" in answer.out
    assert "100000" in answer.out
    assert "tables.big.weight on ranks 0-1: DDR bytes" in answer.out
    assert "tables.big.weight on ranks 0-1: seconds per step" in answer.out
    assert "(2 shards of 50,000 x 16, row_wise, fused)" in answer.out


def test_a_table_goes_by_its_full_name_too(call: Any, plan: Any) -> None:
    short = call("explain", plan, "--tensor", "big")
    assert call("explain", plan, "--tensor", "tables.big.weight") == short


def test_a_table_on_one_rank(call: Any, plan: Any) -> None:
    bottom = call("explain", plan, "--tensor", "bottom", "--rank", 1)
    assert "on ranks 0-1: bytes" in bottom.out  # as much padding on both: told together
    middle = json.loads(call("explain", plan, "--tensor", "middle", "--json").out)
    (rank,) = {rank for found in middle[:-1] for rank in found["ranks"]}
    other = call("explain", plan, "--tensor", "middle", "--rank", 1 - rank)
    assert "seconds to address its own ids" in other.out
    assert "DDR bytes" not in other.out


def test_a_unit_and_one_of_its_tensors_have_the_same_derivation(call: Any, plan: Any) -> None:
    unit = call("explain", plan, "--tensor", "bottom")
    assert "unit bottom on ranks 0-1: bytes" in unit.out
    assert call("explain", plan, "--tensor", "bottom.0.weight") == unit
    assert call("explain", plan, "--tensor", "bottom.0") == unit, "a module inside"


def test_a_size_of_few_bytes_is_said_once(call: Any, plan: Any) -> None:
    out = call("explain", plan, "--tensor", "small").out
    assert re.search(r"= \d+ B$", out, re.MULTILINE)
    assert not re.search(r"\b(\d+ B) \(\1\)", out)


def test_the_json_of_a_tensor_ends_in_its_value(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--tensor", "big", "--json").json
    assert found
    for entry in found:
        assert entry["steps"][-1]["value"] == entry["value"]


def test_the_json_of_a_plan_has_its_ranks(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--json").json
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["basis"]


@pytest.mark.parametrize(
    "words",
    [
        *("", "--tensor big", "--unit top"),
        *("--statistic lower_bound --full", "--statistic spread --full"),
    ],
)
def test_no_line_is_wider_than_the_terminal_and_nothing_is_left_out(
    call: Any, plan: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    wide = call("explain", plan, *words.split()).out
    monkeypatch.setenv("COLUMNS", "80")
    folded = call("explain", plan, *words.split()).out
    assert max(map(len, folded.splitlines())) <= 80
    assert folded.split() == wide.split()
    assert len(folded.splitlines()) > len(wide.splitlines())


def test_why_not_gives_a_reason(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big", "--why-not", "data_parallel")
    assert answer.code == 0
    first, place, *_ = answer.out.splitlines()
    assert first == "big is row_wise."
    assert place.startswith(
        "data_parallel (fused, 2 x 100,000 x 16) with everything else in place "
    )
    assert " does not fit: rank " in " ".join(answer.out.split())
    assert "\ndata_parallel with the rest planned anew has no plan that fits, " in answer.out
    assert all(len(line) <= 120 for line in answer.out.splitlines())


def test_why_not_of_what_was_chosen(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--tensor", "big", "--why-not", "row_wise", "--json").json
    assert found["chosen"] == found["wanted"] == "row_wise"
    assert (found["verdict"], found["missing_bytes"]) == ("chosen", 0)
    assert found["reason"] == "row_wise is what was chosen."


def test_why_not_takes_kernels_too(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big", "--why-not", "fused_uvm")
    assert answer.code == 0
    assert answer.out.startswith("big is fused.\nfused_uvm is not possible: this version's run")


def test_why_not_needs_a_table_or_a_unit(call: Any, plan: Any) -> None:
    call("explain", plan, "--why-not", "row_wise").refuses(2, "--why-not", "--tensor")
    call("explain", plan, "--why-not", "row_wise", "--tensor", "it").refuses(2, "--tensor", "big")
    of_unit = call("explain", plan, "--why-not", "row_wise", "--unit", "top")
    of_unit.refuses(2, "--why-not of unit 'top'", "replicated")


def test_units_are_asked_why_not_too(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--unit", "top", "--why-not", "sharded", "--json").json
    assert (found["unit"], found["wanted"]) == ("top", "sharded")
    assert found["max_rank_seconds"] > 0
    assert found["replanned"]["max_rank_seconds"] > 0
    inside = call("explain", plan, "--unit", "top.0", "--why-not", "sharded", "--json").json
    assert inside == found
    full = call("explain", plan, "--unit", "top", "--why-not", "full")
    assert "full is not possible: it is no part that repeats." in full.out


@pytest.mark.slow
def test_a_checkpointed_unit_says_what_that_saves(call: Any, tmp_path: Path) -> None:
    job, made = tmp_path / "blocks.toml", tmp_path / "blocks.json"
    job.write_text(
        'model = { kind = "transformer", layers = 3, dim = 16, heads = 2, ffn_dim = 32 }\n'
        'batch = { size = 2, sequence = 8 }\nmemory = { checkpointing = "full" }\n'
    )
    assert "layers.0-2" in call("plan", job, "-o", made).out
    out = " ".join(call("explain", made, "--unit", "layers.1").out.split())
    assert "bytes that checkpointing full saves, beside none = " in out
    assert "seconds that checkpointing full costs, beside none = " in out
    facts = call("explain", made).out
    assert "3 blocks: full   [memory.checkpointing]" in facts


def test_why_not_of_no_sharding_type_is_refused(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big", "--why-not", "rowwise")
    answer.refuses(2, "--why-not", "row_wise", "fused_uvm_caching", "'rowwise'")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_is_shown_in_words_and_as_json(call: Any, plan: Any, name: str) -> None:
    text = call("explain", plan, "--statistic", name, "--full")
    assert (text.code, text.err) == (0, "")
    found = call("explain", plan, "--statistic", name, "--json").json
    assert len(found) == len(text.out.rstrip().split("\n\n"))
    for entry in found:
        assert entry["title"] in text.out
        assert entry["steps"][-1]["value"] == entry["value"]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["critical_path", "ranks", *STATISTICS])
def test_a_statistic_fits_a_screen_with_its_largest_inputs_and_few_digits(
    call: Any, plan: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("explain", plan, "--statistic", name).out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for digits in re.findall(r"\d*\.\d+", "\n".join(lines)):
        assert len(digits.replace(".", "").lstrip("0")) <= 5, digits
    every = call("explain", plan, "--statistic", name, "--full").out
    assert ("Every step: --full" in lines[-1] or "more numbers and every" in lines[-1]) == (
        every.count("\n") > 40
    )


def test_a_figure_stays_with_its_unit_at_the_end_of_a_heading(
    call: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in range(40, 100, 3):
        monkeypatch.setenv("COLUMNS", str(width))
        for line in call("explain", plan, "--unit", "top").out.splitlines():
            assert not re.fullmatch(r" *(B|s|ms|µs|KiB|MiB)( \(.*)?", line), line
            assert not re.search(r" = *$", line), line


def test_an_unknown_statistic_is_answered_with_the_known_ones(call: Any, plan: Any) -> None:
    call("explain", plan, "--statistic", "luck").refuses(2, *STATISTICS, "'luck'")


def test_a_statistic_and_why_not_exclude_each_other(call: Any, plan: Any) -> None:
    words = ("explain", plan, "--statistic", "ranks", "--tensor", "big", "--why-not", "row_wise")
    call(*words).refuses(2, "--why-not", "--statistic")


def test_the_statistic_of_one_rank_and_of_one_table(call: Any, plan: Any) -> None:
    ranks = call("explain", plan, "--statistic", "ranks", "--rank", 1).out
    assert "rank 1: seconds per step" in ranks
    assert "rank 0:" not in ranks
    tables = call("explain", plan, "--statistic", "tables", "--tensor", "big").out
    assert "tables.big.weight, all shards: seconds" in tables
    assert "middle" not in tables
    missing = call("explain", plan, "--statistic", "tables", "--tensor", "huge")
    missing.refuses(2, "--tensor", "'big', 'middle', 'small'", "'huge'")


def test_a_plan_of_tables_alone_is_explained(call: Any, tmp_path: Path) -> None:
    job, path = tmp_path / "tables.toml", tmp_path / "tables.json"
    job.write_text(TABLES_ALONE)
    assert call("plan", job, "-o", path).code == 0
    text = call("explain", path).out
    for told in (
        "tables: 2 tables alone",
        "reservation",
        "heuristic: 15 %",
        "pooled (1), sequence",
    ):
        assert told in text
    assert "HBM bytes" in call("explain", path, "--tensor", "a").out
    assert "input_dist takes" in call("explain", path, "--tensor", "a").out
    reason = call("explain", path, "--tensor", "a", "--why-not", "fused_uvm").out
    assert reason.startswith("a is fused.\nfused_uvm (")
    assert " fits (rank " in reason


def test_an_unknown_tensor_is_answered_with_the_known_ones(call: Any, plan: Any) -> None:
    call("explain", plan, "--tensor", "huge").refuses(2, "'huge'", "'middle'")


def test_a_rank_that_is_not_there_is_refused(call: Any, plan: Any) -> None:
    for rank in (-1, 2):
        call("explain", plan, "--rank", rank).refuses(2, "--rank", "0 to 1", str(rank))


def test_a_number_changed_by_hand_is_4(call: Any, edit: Any) -> None:
    path = edit(max_rank_seconds=1.0)
    call("explain", path).refuses(4, str(path), "fingerprint", "edited")


def test_a_number_changed_under_a_fresh_fingerprint_is_4(call: Any, plan: Path) -> None:
    made = read_plan(plan)
    ranks = (msgspec.structs.replace(made.ranks[0], peak_bytes=1), *made.ranks[1:])
    write_plan(sealed(msgspec.structs.replace(made, ranks=ranks)), plan)
    call("explain", plan).refuses(4, "1 as stored", "recomputed")


def test_blocks_that_leave_a_hole_are_refused(call: Any, plan: Path) -> None:
    made = read_plan(plan)
    write_plan(sealed(msgspec.structs.replace(made, blocks=made.blocks[1:])), plan)
    call("explain", plan).refuses(2, "tables.big.weight", "exactly once")


def test_another_version_of_the_format_is_refused(call: Any, edit: Any) -> None:
    path = edit(schema="shardwright.plan/3")
    call("explain", path).refuses(2, "'shardwright.plan/4'", "'shardwright.plan/3'")


def test_an_unknown_field_is_refused(call: Any, edit: Any) -> None:
    call("explain", edit(colour="red")).refuses(2, "colour")


def test_half_a_plan_is_refused(call: Any, plan: Path) -> None:
    plan.write_bytes(plan.read_bytes()[:1000])
    call("explain", plan).refuses(2, str(plan), "plan JSON")


def test_a_job_is_planned_and_explained(call: Any, job: Path, plan: Path) -> None:
    words = ["--tensor", "big"]
    planned = call("explain", job, "--set", "planner.dedup=false", *words)
    assert planned.out == call("explain", plan, *words).out


def test_json_that_is_no_object_is_no_plan(call: Any, plan: Path) -> None:
    plan.write_text(json.dumps([1, 2]))
    call("explain", plan).refuses(2, str(plan), "plan object")


def test_a_missing_plan_says_how_to_make_one(call: Any) -> None:
    call("explain", "none.json").refuses(2, "none.json", "shardwright plan JOB.toml")


MARKED = """
import pathlib
from torch import nn

pathlib.Path("mark").touch()


def build(batch):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), (torch.randn(batch, 4),)
"""


def test_what_a_plan_names_is_run_by_none_of_the_commands_that_read_it(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name of a function is enough, for a module may do anything when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = MARKED.replace("import pathlib", "import pathlib\nimport torch")
    (tmp_path / "own_of_plan.py").write_text(text.replace('pathlib.Path("mark").touch()', ""))
    (tmp_path / "plan_of_stranger.py").write_text(text)
    (tmp_path / "job.toml").write_text(
        'model.python = "own_of_plan:build"\nbatch.size = 6\ncluster.world_size = 2\n'
    )
    assert call("plan", "job.toml", "-o", "plan.json").code == 0
    made = read_plan(tmp_path / "plan.json")
    model = msgspec.structs.replace(made.job.model, python="plan_of_stranger:build")
    job = msgspec.structs.replace(made.job, model=model)
    write_plan(sealed(msgspec.structs.replace(made, job=job)), tmp_path / "plan.json")
    unit = made.units[0].name
    for words in (
        ("explain", "plan.json"),
        ("explain", "plan.json", "--unit", unit),
        ("explain", "plan.json", "--statistic", "peaks"),
        ("diff", "plan.json", "plan.json"),
        ("reshard", "plan.json", "-n", "1"),
        ("report", "plan.json", "-o", "page.html"),
        ("inspect", "plan.json"),
        ("compare", "."),
        ("memory", "plan.json"),
        ("fit", "plan.json"),
        ("pack", "."),
    ):
        call(*words)
        assert not (tmp_path / "mark").exists(), words
    asked = ("explain", "plan.json", "--unit", unit, "--why-not", "full")
    call(*asked).refuses(2, "'plan_of_stranger:build', which this would import", "--allow-code")
    assert not (tmp_path / "mark").exists()
    assert call(*asked, "--allow-code").code == 0
    assert (tmp_path / "mark").exists()
