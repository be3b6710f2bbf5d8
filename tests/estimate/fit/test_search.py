"""Every answer of ``fit`` on a job whose needs are one formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.errors import UnsupportedError
from shardwright.core.footprint import Estimate, Largest, PolicyFit
from shardwright.estimate.fit.search import (
    Limits,
    Point,
    by_policy,
    fewest_shards,
    longest_sequence,
)

CAPACITY = 1000
KEPT = {"none": 8, "selective": 4, "full": 1}  # bytes of a token
AT = Point(batch=4, sequence=16, shards=4, policy="none")
LIMITS = Limits(tuple(KEPT), sequence_step=4)
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


def rows(at: Point = AT, limits: Limits = LIMITS) -> tuple[PolicyFit, ...]:
    return by_policy(estimate, at, limits, CAPACITY)[0]


def longest(at: Point = AT, limits: Limits = LIMITS) -> Largest | None:
    return longest_sequence(estimate, at, limits, CAPACITY)


def fewest(at: Point = AT, limits: Limits = LIMITS) -> int | None:
    return fewest_shards(estimate, at, limits, CAPACITY)


def test_every_policy_has_its_own_largest_batch() -> None:
    sizes = {row.checkpointing: row.largest_batch.size for row in rows()}
    assert sizes == {"none": 6, "selective": 12, "full": 50}


def test_a_policy_that_keeps_less_never_fits_less() -> None:
    sizes = [row.largest_batch.size for row in rows()]
    assert sizes == sorted(sizes)


def test_the_job_as_it_is_stands_in_each_row() -> None:
    assert [row.estimate.most_bytes for row in rows()] == [712, 456, 264]


def test_the_longest_sequence_is_a_multiple_of_the_step() -> None:
    assert longest() == Largest(24, step=4)


def test_the_next_size_may_be_in_doubt() -> None:
    narrow = replace(AT, batch=1, sequence=199, shards=1, policy="full")
    assert estimate(narrow).verdict == "fits"
    found = longest(narrow, replace(LIMITS, sequence_step=1))
    assert found == Largest(200, next_perhaps=True)


def test_the_fewest_shards_hold_the_job() -> None:
    assert fewest() == 2
    assert fewest(replace(AT, batch=40)) == 0


def test_shards_are_multiples_of_what_experts_need() -> None:
    assert fewest(limits=replace(LIMITS, shard_step=4)) == 4


def test_a_batch_is_a_multiple_of_its_microbatches() -> None:
    row = rows(limits=replace(LIMITS, batch_step=4))[1]
    assert row.largest_batch.size == 12
    assert row.largest_batch.step == 4


def test_a_job_without_tokens_has_no_longest_sequence() -> None:
    assert longest(limits=replace(LIMITS, sequence_limit=0)) is None


def test_a_policy_that_cannot_be_followed_is_skipped_with_its_reason() -> None:
    limits = replace(LIMITS, policies=("none", "magic"))
    told, skipped = by_policy(estimate, AT, limits, CAPACITY)
    assert [row.checkpointing for row in told] == ["none"]
    assert skipped == ("magic: no such policy",)


def test_policies_that_are_skipped_for_one_reason_are_named_together() -> None:
    limits = replace(LIMITS, policies=("none", "magic", "witchcraft"))
    _, skipped = by_policy(estimate, AT, limits, CAPACITY)
    assert skipped == ("magic, witchcraft: no such policy",)


def test_the_jobs_own_policy_is_not_skipped() -> None:
    with pytest.raises(UnsupportedError, match="no such policy"):
        rows(replace(AT, policy="magic"), replace(LIMITS, policies=("magic",)))


@pytest.mark.parametrize("runs", [16, 20, 24, 28])
def test_a_sequence_that_the_model_does_not_run_with_is_no_answer(runs: int) -> None:
    asked: list[Point] = []

    def ask(point: Point) -> Estimate:
        asked.append(point)
        if point.sequence > runs:
            raise UnsupportedError("positions end")
        return estimate(point)

    assert by_policy(ask, AT, LIMITS, CAPACITY)[0] == rows()
    found = longest_sequence(ask, AT, LIMITS, CAPACITY)
    assert found is not None
    assert found.size == min(runs, 24)
    assert found.refused == (runs <= 24)
    assert len({point.sequence for point in asked}) <= 8


def test_a_model_that_runs_with_no_small_batch_is_not_said_to_need_too_much() -> None:
    """As of one whose layers want statistics over several samples."""

    def ask(point: Point) -> Estimate:
        if point.batch < 2:
            raise UnsupportedError("more than one sample")
        return estimate(point)

    with pytest.raises(UnsupportedError, match="more than one sample"):
        by_policy(ask, replace(AT, batch=64), LIMITS, CAPACITY)


def test_few_variants_are_estimated() -> None:
    asked: list[Point] = []

    def ask(point: Point) -> Estimate:
        asked.append(point)
        return estimate(point)

    for search in (by_policy, longest_sequence, fewest_shards):
        search(ask, AT, LIMITS, CAPACITY)
    assert len(set(asked)) <= 25
