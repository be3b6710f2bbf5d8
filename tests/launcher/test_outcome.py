from __future__ import annotations

import pytest

from shardwright.core.errors import InputError
from shardwright.launcher.ending import OUTCOME_SCHEMA, RunOutcome, decode_outcome, encode_outcome
from shardwright.launcher.heartbeat import RankOutcome


def _outcome() -> RunOutcome:
    ranks = (RankOutcome(0, "finished", 0, 9, None, ""), RankOutcome(1, "lost", -9, 3, "load", "x"))
    return RunOutcome(
        OUTCOME_SCHEMA, 0, "finished", 9, 2, ranks, ("torchrun",), 1.25, {"torch": "2"}
    )


def test_an_outcome_comes_back_from_its_json() -> None:
    assert decode_outcome(encode_outcome(_outcome())) == _outcome()


def test_an_outcome_ends_with_a_newline() -> None:
    assert encode_outcome(_outcome()).endswith(b"}\n")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "Input data was truncated"),
        (b"{}", "Object missing required field `schema`"),
        (b'{"schema": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (
            encode_outcome(_outcome()).replace(b'"lost"', b'"mislaid"'),
            "Invalid enum value 'mislaid' - at `$.ranks[1].state`",
        ),
        (
            encode_outcome(_outcome()).replace(b"outcome/1", b"outcome/2"),
            "Invalid enum value 'shardwright.outcome/2' - at `$.schema`",
        ),
    ],
)
def test_what_is_no_outcome_is_refused_with_its_file(data: bytes, found: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_outcome(data, "runs/a/outcome.json")
    assert str(caught.value).startswith(
        f"runs/a/outcome.json: expected JSON of shardwright.outcome/1, got {found}"
    )
