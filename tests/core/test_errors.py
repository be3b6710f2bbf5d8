from __future__ import annotations

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


def test_the_nearest_names_are_suggested_whatever_their_case() -> None:
    many = [f"feat_{k}" for k in range(800)]
    assert errors.nearest("C3", ["c1", "c2"]) == "'c1', 'c2'"
    assert errors.nearest("FEAT_44", many).startswith("'feat_44', ")
    assert errors.nearest("feat_44", many).endswith(" and 795 more")
    assert errors.nearest("zzz", many).startswith("'feat_0', ")
    assert errors.nearest("x", []) == ""
