"""When a bucket has all its gradients."""

from __future__ import annotations

from shardwright.runtime.units.flow import Arrivals


def backward(bucket: Arrivals, places: list[int], trains: int = 3) -> list[bool]:
    bucket.begin(range(trains))
    return [bucket.come(place) for place in places]


def test_a_first_backward_is_complete_at_its_end_only() -> None:
    bucket = Arrivals()
    assert backward(bucket, [2, 1, 0]) == [False] * 3
    assert not bucket.is_complete


def test_the_last_gradient_completes_a_bucket_in_any_order() -> None:
    bucket = Arrivals()
    backward(bucket, [2, 1, 0])
    assert backward(bucket, [0, 2, 1]) == [False, False, True]
    assert bucket.is_complete


def test_a_gradient_is_waited_for_as_often_as_it_ever_came() -> None:
    bucket = Arrivals()
    backward(bucket, [2, 1, 2, 0])
    assert backward(bucket, [2, 1, 0, 2]) == [False, False, False, True]
    assert backward(bucket, [2, 1, 0]) == [False] * 3
    assert backward(bucket, [2, 1, 0, 2]) == [False, False, False, True]


def test_what_is_not_used_is_waited_for_until_the_end() -> None:
    bucket = Arrivals()
    backward(bucket, [2, 0])
    assert backward(bucket, [2, 0]) == [False, False]


def test_what_does_not_train_is_not_waited_for() -> None:
    bucket = Arrivals()
    bucket.begin([])
    assert bucket.is_complete


def test_what_nothing_announced_waits_for_the_end() -> None:
    bucket = Arrivals()
    backward(bucket, [0, 1, 2])
    bucket.begin(range(3))
    bucket.wait_for_end()
    assert [bucket.come(place) for place in (0, 1, 2)] == [False] * 3
