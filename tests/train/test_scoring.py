"""Figures of sums over rows are those of the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.measurement import scores_text
from shardwright.data import quality
from shardwright.train.steps import BINS, EDGE, SIZE, scores_of

ROWS = st.lists(
    st.tuples(st.floats(-20, 20, allow_subnormal=False), st.booleans()), min_size=2, max_size=60
)


def sums_of(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    p = 1 / (1 + np.exp(-logits))
    bins = np.clip(np.floor((logits + EDGE) * BINS / (2 * EDGE)), 0, BINS - 1).astype(int)
    sums = np.zeros(SIZE)
    np.add.at(sums, bins + BINS * labels.astype(int), 1)
    loss = np.logaddexp(0, -np.where(labels, logits, -logits)).sum()
    sums[2 * BINS :] = len(labels), labels.sum(), loss, p.sum(), ((logits >= 0) == labels).sum()
    return sums


@pytest.mark.slow
@given(ROWS)
def test_every_figure_is_that_of_the_rows_and_auc_is_within_its_error(rows: list) -> None:
    logits, labels = (np.array(column) for column in zip(*rows, strict=True))
    p = 1 / (1 + np.exp(-logits))
    found = scores_of(7, sums_of(logits, labels).tolist())
    assert (found.step, found.rows) == (7, len(rows))
    assert found.majority == pytest.approx(quality.majority(labels))
    assert found.accuracy == pytest.approx(((logits >= 0) == labels).mean())
    assert found.log_loss == pytest.approx(
        np.logaddexp(0, -np.where(labels, logits, -logits)).mean()
    )
    if labels.all() or not labels.any():
        assert found.auc is found.auc_error is found.normalized_entropy is None
        assert (found.calibration is None) == (not labels.any())
        return
    assert found.auc is not None
    assert found.auc_error is not None
    assert abs(found.auc - quality.auc(labels, logits)) <= found.auc_error + 1e-12
    assert found.calibration == pytest.approx(quality.calibration(labels, p))
    assert found.normalized_entropy == pytest.approx(
        found.log_loss / quality.bayes_log_loss([labels.mean()])
    )


def test_with_many_rows_of_usual_logits_auc_is_right_to_a_thousandth() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(-1.5, 1.2, 20_000)
    labels = draw.random(20_000) < 1 / (1 + np.exp(-logits))
    found = scores_of(1, sums_of(logits, labels).tolist())
    assert found.auc_error is not None
    assert found.auc_error < 1e-3
    assert found.auc == pytest.approx(quality.auc(labels, logits), abs=found.auc_error)


def test_scores_are_said_in_one_line() -> None:
    sums = sums_of(np.array([-1.0, 2.0, 0.5, -3.0]), np.array([False, True, True, False]))
    assert scores_text(scores_of(4, sums.tolist())) == (
        "AUC 1.0000, log loss 0.2407, normalized entropy 0.3473, calibration 0.910, "
        "accuracy 1.0000 (0.5000)"
    )
