"""``shardwright explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.plan import read_plan, sealed, write_plan


def test_a_plan_alone_says_what_it_rests_on_and_where_each_rank_peaks(call: Any, plan: Any) -> None:
    answer = call("explain", plan)
    assert answer.code == 0
    assert answer.err == ""
    for word in ("optimizer", "memory_rate", "rank 0: peak", "rank 1: peak", "s per step"):
        assert word in answer.out


def test_one_rank_leaves_the_other_out(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--rank", 1)
    assert "rank 1: peak" in answer.out
    assert "rank 0: peak" not in answer.out


def test_a_table_is_derived_from_its_rows(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big")
    assert answer.code == 0
    assert "rows" in answer.out
    assert "100000" in answer.out
    assert "tables.big.weight on rank 0: bytes" in answer.out
    assert "tables.big.weight on rank 1: seconds per step" in answer.out


def test_a_table_goes_by_its_full_name_too(call: Any, plan: Any) -> None:
    short = call("explain", plan, "--tensor", "big")
    assert call("explain", plan, "--tensor", "tables.big.weight") == short


def test_a_table_on_one_rank(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big", "--rank", 1)
    assert "on rank 1:" in answer.out
    assert "on rank 0:" not in answer.out


def test_a_unit_and_one_of_its_tensors_have_the_same_derivation(call: Any, plan: Any) -> None:
    unit = call("explain", plan, "--tensor", "bottom")
    assert "unit bottom on rank 0: bytes" in unit.out
    assert call("explain", plan, "--tensor", "bottom.0.weight") == unit


def test_the_json_of_a_tensor_ends_in_its_value(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--tensor", "big", "--json").json
    assert found
    for entry in found:
        assert entry["steps"][-1]["value"] == entry["value"]


def test_the_json_of_a_plan_has_its_ranks(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--json").json
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["basis"]


def test_why_not_gives_a_reason(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big", "--why-not", "data_parallel")
    assert answer.code == 0
    assert answer.out.startswith("big is row_wise.")
    assert "does not fit" in answer.out


def test_why_not_of_what_was_chosen(call: Any, plan: Any) -> None:
    found = call("explain", plan, "--tensor", "big", "--why-not", "row_wise", "--json").json
    assert found["chosen"] == found["wanted"] == "row_wise"
    assert found["reason"]


def test_why_not_needs_a_table(call: Any, plan: Any) -> None:
    call("explain", plan, "--why-not", "row_wise").refuses(2, "--why-not", "--tensor")
    call("explain", plan, "--why-not", "row_wise", "--tensor", "top").refuses(2, "--tensor", "big")


def test_why_not_of_no_sharding_type_is_refused(call: Any, plan: Any) -> None:
    answer = call("explain", plan, "--tensor", "big", "--why-not", "rowwise")
    answer.refuses(2, "--why-not", "row_wise", "'rowwise'")


def test_an_unknown_tensor_is_answered_with_the_known_ones(call: Any, plan: Any) -> None:
    call("explain", plan, "--tensor", "huge").refuses(2, "big, middle, small", "bottom", "'huge'")


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
    path = edit(schema="shardwright.plan/2")
    call("explain", path).refuses(2, "'shardwright.plan/1'", "'shardwright.plan/2'")


def test_an_unknown_field_is_refused(call: Any, edit: Any) -> None:
    call("explain", edit(colour="red")).refuses(2, "colour")


def test_half_a_plan_is_refused(call: Any, plan: Path) -> None:
    plan.write_bytes(plan.read_bytes()[:1000])
    call("explain", plan).refuses(2, str(plan), "plan JSON")


def test_a_job_is_no_plan(call: Any, job: Path) -> None:
    call("explain", job).refuses(2, str(job), "plan JSON")


def test_json_that_is_no_object_is_no_plan(call: Any, plan: Path) -> None:
    plan.write_text(json.dumps([1, 2]))
    call("explain", plan).refuses(2, str(plan), "plan object")


def test_a_missing_plan_says_how_to_make_one(call: Any) -> None:
    call("explain", "none.json").refuses(2, "none.json", "shardwright plan JOB.toml")
