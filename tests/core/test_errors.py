from __future__ import annotations

import pickle

import pytest

from shardwright.core import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ShardwrightError, 1),
        (errors.InputError, 2),
        (errors.UnsupportedError, 2),
        (errors.NoPlanError, 3),
        (errors.MismatchError, 4),
        (errors.RunError, 5),
    ],
)
def test_an_error_has_its_exit_code(kind: type[errors.ShardwrightError], code: int) -> None:
    assert kind.exit_code == code


def test_bad_input_is_a_value_error() -> None:
    assert issubclass(errors.InputError, ValueError)


def test_a_message_says_where_what_was_expected_and_what_was_found() -> None:
    assert errors.expected("batch.size", "int", "'x'") == "batch.size: expected int, got 'x'."


def test_a_message_ends_with_what_to_do() -> None:
    text = errors.expected("batch.size", "int", "'x'", "Write a number.")
    assert text == "batch.size: expected int, got 'x'. Write a number."


def test_an_error_is_given_the_parts_of_its_message_or_all_of_it() -> None:
    error = errors.InputError("batch.size", "int", "'x'", "Write a number.")
    assert str(error) == "batch.size: expected int, got 'x'. Write a number."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(errors.RunError("rank 1 has ended")) == "rank 1 has ended"


def test_the_nearest_names_are_suggested_whatever_their_case() -> None:
    many = [f"feat_{k}" for k in range(800)]
    assert errors.there_are("x3", ["c1", "c2"]) == "There are 'c1', 'c2'."
    assert errors.there_are("FEAT_44", many).startswith(
        "Did you mean 'feat_44'? There are 'feat_44', "
    )
    assert errors.there_are("feat_44", many).endswith(" and 795 more.")
    assert errors.there_are("zzz", many).startswith("There are 'feat_0', ")
    assert errors.there_are("x", []) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("row-wise", "row_wise"),  # but for separators
        ("torch.bfloat16", "bf16"),  # as the field says it
        ("col", "column_wise"),  # its beginning
        ("grid_shards", "grid_shard"),  # one letter more
        ("bf16_mixed", "bf16"),  # begins with it
        ("zzz", ""),
        ("", ""),
        ("--", ""),
    ],
)
def test_the_likeliest_name_is_the_one_that_was_meant(name: str, meant: str) -> None:
    assert errors.likeliest(name, ["row_wise", "column_wise", "grid_shard", "bf16"]) == meant


def test_every_alias_is_written_as_it_is_looked_up() -> None:
    assert [name for name in errors.ALIASES if name != "".join(filter(str.isalnum, name))] == []
