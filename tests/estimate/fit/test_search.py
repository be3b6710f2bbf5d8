"""Every answer of ``fit`` on a job whose needs are one formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.errors import UnsupportedError
from shardwright.core.footprint import Estimate
from shardwright.estimate.fit.search import Findings, Point, Space, search

CAPACITY = 1000
KEPT = {"none": 8, "selective": 4, "full": 1}  # bytes of a token
AT = Point(batch=4, sequence=16, shards=4, policy="none")
SPACE = Space(tuple(KEPT), sequence_step=4)
DOUBT = 20  # between the least and the most of an estimate


def estimate(point: Point) -> Estimate:
    """States that ranks share, and tokens that each has of its own."""
    if point.policy not in KEPT:
        raise UnsupportedError(f"no such policy, got '{point.policy}'")
    most = 800 // point.shards + KEPT[point.policy] * point.batch * point.sequence
    verdict = "fits" if most <= CAPACITY else "perhaps"
    if most - DOUBT > CAPACITY:
        verdict = "does not fit"
    return Estimate(most, "backward", "all ranks", most - DOUBT, most, verdict, {})


def found(at: Point = AT, space: Space = SPACE) -> Findings:
    return search(estimate, at, space, CAPACITY)


def test_every_policy_has_its_own_largest_batch() -> None:
    sizes = {row.checkpointing: row.largest_batch.size for row in found().rows}
    assert sizes == {"none": 6, "selective": 12, "full": 50}


def test_a_policy_that_keeps_less_never_fits_less() -> None:
    sizes = [row.largest_batch.size for row in found().rows]
    assert sizes == sorted(sizes)


def test_the_job_as_it_is_stands_in_each_row() -> None:
    assert [row.estimate.most_bytes for row in found().rows] == [712, 456, 264]


def test_the_longest_sequence_is_a_multiple_of_the_step() -> None:
    longest = found().sequence
    assert longest is not None
    assert longest.size == 24
    assert longest.step == 4


def test_the_next_size_may_be_in_doubt() -> None:
    narrow = replace(AT, batch=1, sequence=199, shards=1, policy="full")
    assert estimate(narrow).verdict == "fits"
    longest = found(narrow, replace(SPACE, sequence_step=1)).sequence
    assert longest is not None
    assert (longest.size, longest.next_perhaps) == (200, True)


def test_the_fewest_shards_hold_the_job() -> None:
    assert found().shards == 2
    assert found(replace(AT, batch=40)).shards == 0


def test_shards_are_multiples_of_what_experts_need() -> None:
    assert found(space=replace(SPACE, shard_step=4)).shards == 4


def test_a_batch_is_a_multiple_of_its_microbatches() -> None:
    row = found(space=replace(SPACE, batch_step=4)).rows[1]
    assert row.largest_batch.size == 12
    assert row.largest_batch.step == 4


def test_a_job_without_tokens_has_no_longest_sequence() -> None:
    assert found(space=replace(SPACE, sequence_limit=0)).sequence is None


def test_a_policy_that_cannot_be_followed_is_skipped_with_its_reason() -> None:
    told = found(space=replace(SPACE, policies=("none", "magic")))
    assert [row.checkpointing for row in told.rows] == ["none"]
    assert told.skipped == ("magic: no such policy",)


def test_policies_that_are_skipped_for_one_reason_are_named_together() -> None:
    told = found(space=replace(SPACE, policies=("none", "magic", "witchcraft")))
    assert told.skipped == ("magic, witchcraft: no such policy",)


def test_the_jobs_own_policy_is_not_skipped() -> None:
    with pytest.raises(UnsupportedError, match="no such policy"):
        found(replace(AT, policy="magic"), replace(SPACE, policies=("magic",)))


@pytest.mark.parametrize("runs", [16, 20, 24, 28])
def test_a_sequence_that_the_model_does_not_run_with_is_no_answer(runs: int) -> None:
    asked: list[Point] = []

    def ask(point: Point) -> Estimate:
        asked.append(point)
        if point.sequence > runs:
            raise UnsupportedError("positions end")
        return estimate(point)

    findings = search(ask, AT, SPACE, CAPACITY)
    assert findings.rows == found().rows
    assert findings.sequence is not None
    assert findings.sequence.size == min(runs, 24)
    assert findings.sequence.refused == (runs <= 24)
    assert len({point.sequence for point in asked}) <= 8


def test_a_model_that_runs_with_no_small_batch_is_not_said_to_need_too_much() -> None:
    """As of one whose layers want statistics over several samples."""

    def ask(point: Point) -> Estimate:
        if point.batch < 2:
            raise UnsupportedError("more than one sample")
        return estimate(point)

    with pytest.raises(UnsupportedError, match="more than one sample"):
        search(ask, replace(AT, batch=64), SPACE, CAPACITY)


def test_few_variants_are_estimated() -> None:
    asked: list[Point] = []

    def ask(point: Point) -> Estimate:
        asked.append(point)
        return estimate(point)

    search(ask, AT, SPACE, CAPACITY)
    assert len(set(asked)) <= 25
