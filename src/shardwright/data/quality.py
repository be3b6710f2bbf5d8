"""How good a click predictor is, and how good the best one could be.

The first kind of figure compares labels with predictions. The ``bayes_`` kind is known only for
generated data: with p the true probability of a click, p itself is the best score there is, and
its expected AUC, loss and accuracy follow from the p of the rows alone, without label noise.
"""

# AUC is counted in integers of pairs, so ties are halves exactly and the order of rows does not
# matter: models are compared by its third decimal. NaN is refused, for it sorts last: a model that
# diverged would be scored as if it were surest of a click there.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.core.errors import InputError, expected


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve: the share of (click, no click) pairs ordered rightly, ties half.

    ``labels`` [n] of 0 and 1, ``scores`` [n] of any scale. Exact: the pairs are counted in
    integers, in O(n log n). Raises InputError on NaN, unequal lengths, or labels of one class.
    """
    clicked = _labels(labels)
    score = _column("scores", scores)
    _same_length("scores", score, clicked)
    clicks = int(clicked.sum())
    others = clicked.size - clicks
    if not clicks or not others:
        found = f"{clicks} ones and {others} zeros"
        raise InputError(expected("labels", "both ones and zeros", found, "Use more rows."))
    # Ties are groups: rows of one score are counted together, whatever order a sort would put them
    # in.
    _, group = np.unique(score, return_inverse=True)
    ones = np.bincount(group, weights=clicked).astype(np.int64)
    zeros = np.bincount(group, weights=~clicked).astype(np.int64)
    zeros_below = np.cumsum(zeros) - zeros
    doubled = int((ones * (2 * zeros_below + zeros)).sum())
    return doubled / (2 * clicks * others)


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean of -ln(probability given to what happened), in nats.

    ``labels`` [n] of 0 and 1, ``probabilities`` [n] in [0, 1]. A probability is kept one machine
    epsilon of its type away from 0 and 1, so that a saturated sigmoid costs a finite amount (at
    most 15.9 in float32, 36.0 in float64). Raises InputError on NaN or anything out of range.
    """
    given = np.asarray(probabilities)
    clicked, p = _predicted(labels, given)
    kind = given.dtype if np.issubdtype(given.dtype, np.floating) else np.dtype(np.float64)
    edge = float(np.finfo(kind).eps)
    p = np.clip(p, edge, 1.0 - edge)
    return float(-np.where(clicked, np.log(p), np.log1p(-p)).mean())


def accuracy(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Share of rows whose likelier label, a click from 1/2 on, is the one that happened."""
    clicked, p = _predicted(labels, probabilities)
    return float(((p >= 0.5) == clicked).mean())


def majority(labels: ArrayLike) -> float:
    """Accuracy of the majority class everywhere."""
    share = float(_labels(labels).mean())
    return max(share, 1.0 - share)


def normalized_entropy(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Log loss over that of predicting the share of clicks everywhere (He et al., 2014).

    Raises InputError on labels of one class, which can be predicted without loss.
    """
    share = float(_labels(labels).mean())
    if share in (0.0, 1.0):
        raise InputError(expected("labels", "both ones and zeros", "one kind", "Use more rows."))
    return log_loss(labels, probabilities) / bayes_log_loss([share])


def calibration(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Predicted clicks over real ones. Raises InputError where there is no click."""
    clicked, p = _predicted(labels, probabilities)
    if not clicked.any():
        raise InputError(expected("labels", "a click", "none", "Use more rows."))
    return float(p.sum() / clicked.sum())


def bayes_auc(p: ArrayLike) -> float:
    """Expected AUC of the score p when row i is a click with probability p[i], ``p`` [n].

    The expected number of rightly ordered pairs, sum over p_j < p_i of p_i (1 - p_j) with ties
    half, divided by the expected number of (click, no click) pairs; a row makes no pair with
    itself. O(n log n). Raises InputError if no such pair can happen.
    """
    prob = _probabilities("p", p)
    values, counts = np.unique(prob, return_counts=True)
    ones = values * counts
    zeros = (1.0 - values) * counts
    itself = float((values * (1.0 - values) * counts).sum())
    pairs = float(ones.sum() * zeros.sum()) - itself
    if prob.size < 2 or pairs <= 0.0:
        found = f"{prob.size} rows whose labels are all certain to be equal"
        found = found if prob.size > 1 else "one row"
        raise InputError(expected("p", "rows that can make a click and a no click", found))
    zeros_below = np.cumsum(zeros) - zeros
    ordered = float((ones * (zeros_below + 0.5 * zeros)).sum()) - 0.5 * itself
    return ordered / pairs


def bayes_log_loss(p: ArrayLike) -> float:
    """Expected log loss of the prediction p in nats, mean of -(p ln p + (1-p) ln(1-p)); p [n]."""
    prob = _probabilities("p", p)
    inner = prob[(prob > 0.0) & (prob < 1.0)]  # a certain row costs nothing, and has no logarithm
    return float(-(inner * np.log(inner) + (1.0 - inner) * np.log1p(-inner)).sum() / prob.size)


def bayes_accuracy(p: ArrayLike) -> float:
    """Expected accuracy of answering the likelier label, mean of max(p, 1 - p); ``p`` [n]."""
    prob = _probabilities("p", p)
    return float(np.maximum(prob, 1.0 - prob).mean())


def _column(name: str, values: ArrayLike) -> NDArray[np.float64]:
    column = np.asarray(values)
    if column.ndim != 1 or not column.size:
        found = f"shape {list(column.shape)}"
        raise InputError(expected(name, "a column of at least one row", found))
    column = column.astype(np.float64)
    missing = np.flatnonzero(np.isnan(column))
    if missing.size:
        found = f"{missing.size} NaN, the first in row {missing[0]}"
        raise InputError(expected(name, "numbers", found, "Check that the training has converged."))
    return column


def _labels(values: ArrayLike) -> NDArray[np.bool_]:
    column = _column("labels", values)
    _refuse("labels", "0 or 1 in every row", column, (column != 0.0) & (column != 1.0))
    return column == 1.0


def _probabilities(name: str, values: ArrayLike) -> NDArray[np.float64]:
    column = _column(name, values)
    _refuse(name, "probabilities from 0 to 1", column, (column < 0.0) | (column > 1.0))
    return column


def _predicted(
    labels: ArrayLike, probabilities: ArrayLike
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Both as columns, of one length."""
    clicked, p = _labels(labels), _probabilities("probabilities", probabilities)
    _same_length("probabilities", p, clicked)
    return clicked, p


def _refuse(name: str, wanted: str, column: NDArray[np.float64], wrong: NDArray[np.bool_]) -> None:
    rows = np.flatnonzero(wrong)
    if rows.size:
        raise InputError(expected(name, wanted, f"{column[rows[0]]:g} in row {rows[0]}"))


def _same_length(name: str, column: NDArray[np.float64], labels: NDArray[np.bool_]) -> None:
    if column.size != labels.size:
        raise InputError(expected(name, f"{labels.size} rows, one per label", f"{column.size}"))
