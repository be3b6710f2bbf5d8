"""The measures of a predictor, against their definitions and against drawn labels."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.data import quality

PROBABILITY = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000001, 0.9, 1.0]) | st.floats(0, 1)


def slow_auc(labels: list[int], scores: list[float]) -> float:
    pairs = [
        (s > t) + 0.5 * (s == t)
        for y, s in zip(labels, scores, strict=True)
        for x, t in zip(labels, scores, strict=True)
        if y > x
    ]
    return sum(pairs) / len(pairs)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_the_right_order_with_ties_half(
    rows: list[tuple[int, int]],
) -> None:
    labels, scores = [y for y, _ in rows], [float(s) for _, s in rows]
    if len(set(labels)) == 2:
        assert quality.auc(labels, scores) == pytest.approx(slow_auc(labels, scores), abs=1e-12)
    else:
        with pytest.raises(InputError, match="labels: expected both ones and zeros"):
            quality.auc(labels, scores)


def test_auc_of_equal_scores_is_exactly_one_half() -> None:
    assert quality.auc([0, 1, 1, 0, 0], np.full(5, 0.3, dtype=np.float32)) == 0.5


def test_auc_depends_on_the_order_of_scores_only() -> None:
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 5000), random.normal(size=5000)
    assert quality.auc(labels, scores) == quality.auc(labels, np.exp(scores))
    assert quality.auc(labels, scores) + quality.auc(labels, -scores) == pytest.approx(1.0)


def test_log_loss_is_the_mean_surprise_in_nats() -> None:
    loss = quality.log_loss([1, 0, 1], [0.5, 0.2, 0.9])
    assert loss == pytest.approx(-(math.log(0.5) + math.log(0.8) + math.log(0.9)) / 3)


def test_accuracy_is_that_of_the_likelier_label() -> None:
    labels, p = [1, 0, 1, 0], [0.5, 0.2, 0.4, 0.9]
    assert quality.accuracy(labels, p) == 0.5
    assert quality.majority([1, 0, 0, 0]) == quality.majority([0, 1, 1, 1]) == 0.75


def test_normalized_entropy_is_1_of_what_knows_the_share_of_clicks_alone() -> None:
    labels = [1, 0, 0, 0]
    assert quality.normalized_entropy(labels, [0.25] * 4) == pytest.approx(1.0)
    assert quality.normalized_entropy(labels, [0.7, 0.1, 0.1, 0.1]) < 0.5
    with pytest.raises(InputError, match="labels: expected both ones and zeros"):
        quality.normalized_entropy([1, 1], [0.5, 0.5])


def test_calibration_is_predicted_clicks_over_real_ones() -> None:
    assert quality.calibration([1, 0, 1, 0], [0.5, 0.25, 0.5, 0.25]) == 0.75
    with pytest.raises(InputError, match="labels: expected a click, got none"):
        quality.calibration([0, 0], [0.5, 0.5])


def test_a_saturated_probability_costs_a_finite_amount() -> None:
    assert quality.log_loss([0], np.ones(1, dtype=np.float32)) == pytest.approx(15.94, abs=0.01)
    assert quality.log_loss([1], [0.0]) == pytest.approx(36.04, abs=0.01)


@given(st.lists(PROBABILITY, min_size=2, max_size=7))
def test_bayes_auc_is_expected_ordered_pairs_over_expected_pairs(p: list[float]) -> None:
    ordered = pairs = 0.0
    for i, j in itertools.permutations(range(len(p)), 2):
        chance = p[i] * (1 - p[j])
        pairs += chance
        ordered += chance * ((p[i] > p[j]) + 0.5 * (p[i] == p[j]))
    assume(pairs > 1e-9)
    assert quality.bayes_auc(p) == pytest.approx(ordered / pairs, rel=1e-5)


@given(st.lists(PROBABILITY, min_size=1, max_size=8))
def test_bayes_loss_and_accuracy_are_expectations_over_all_labels(p: list[float]) -> None:
    loss = sum(-q * math.log(q) for x in p for q in (x, 1 - x) if q > 0) / len(p)
    assert quality.bayes_log_loss(p) == pytest.approx(loss, abs=1e-9)
    assert quality.bayes_accuracy(p) == pytest.approx(sum(max(x, 1 - x) for x in p) / len(p))


def test_bayes_values_agree_with_drawn_labels() -> None:
    random = np.random.default_rng(1)
    p = np.round(random.beta(0.6, 1.8, size=20_000), 3)  # rounded: with ties
    drawn = [(random.random(p.size) < p).astype(int) for _ in range(40)]
    aucs = [quality.auc(labels, p) for labels in drawn]
    losses = [quality.log_loss(labels, p) for labels in drawn]
    accuracies = [((p > 0.5) == labels).mean() for labels in drawn]
    for measured, exact in (
        (aucs, quality.bayes_auc(p)),
        (losses, quality.bayes_log_loss(p)),
        (accuracies, quality.bayes_accuracy(p)),
    ):
        error = np.std(measured, ddof=1) / math.sqrt(len(measured))
        assert abs(np.mean(measured) - exact) < 4 * error


def test_no_score_beats_the_true_probability() -> None:
    random = np.random.default_rng(2)
    p = random.random(20_000)
    labels = random.random(p.size) < p
    noisy = np.clip(p + random.normal(scale=0.2, size=p.size), 0.01, 0.99)
    assert quality.auc(labels, noisy) < quality.auc(labels, p)
    assert quality.log_loss(labels, noisy) > quality.log_loss(labels, p)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quality.auc([0, 1], [0.1, math.nan]), "scores: expected numbers, got 1 NaN"),
        (lambda: quality.auc([0, 1, 1], [0.1, 0.2]), "scores: expected 3 rows, one per label, got"),
        (lambda: quality.auc([0, 2], [0.1, 0.2]), "labels: expected 0 or 1 in every row, got 2"),
        (lambda: quality.auc([0.0, math.nan], [0.1, 0.2]), "labels: expected numbers, got 1 NaN"),
        (lambda: quality.log_loss([0], [math.nan]), "probabilities: expected numbers, got 1 NaN"),
        (lambda: quality.log_loss([0, 1], [0.5, 1.5]), "from 0 to 1, got 1.5 in row 1"),
        (lambda: quality.log_loss([], []), r"expected a column of at least one row, got shape \[0"),
        (lambda: quality.bayes_auc([0.5]), "can make a click and a no click, got one row"),
        (lambda: quality.bayes_auc([1.0, 1.0]), "got 2 rows whose labels are all certain"),
        (lambda: quality.bayes_log_loss([-0.1]), "p: expected probabilities from 0 to 1, got -0.1"),
        (lambda: quality.bayes_accuracy([math.nan]), "p: expected numbers, got 1 NaN, the first"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
