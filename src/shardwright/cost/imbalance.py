"""How unevenly something lies on ranks, by the measures of TorchRec's statistics (1.9.2).

A measure looks at each rank's share of the sum and at the even share 1/k of k ranks; 0 is even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The four measures of one distribution over ranks, named as TorchRec names them.

    ``total_variation`` is the largest deviation from the even share, not half of their sum, and
    less than 1; ``total_distance`` is their sum, less than 2. ``chi`` and ``kl`` are from 0 to 1.
    """

    total_variation: float
    total_distance: float
    chi: float
    kl: float


def imbalance(values: Sequence[float]) -> Imbalance | None:
    """All measures of ``values``, one for each rank and none negative; None if their sum is 0."""
    whole = sum(values)
    if not whole:
        return None
    shares = [value / whole for value in values]
    return Imbalance(
        total_variation(shares), total_distance(shares), chi(shares), kullback_leibler(shares)
    )


def total_variation(shares: Sequence[float]) -> float:
    """The largest deviation of a share from the even one, at most (k - 1) / k."""
    return max(_deviations(shares))


def total_distance(shares: Sequence[float]) -> float:
    """The sum of all deviations from the even share, at most 2 (k - 1) / k."""
    return sum(_deviations(shares))


def chi(shares: Sequence[float]) -> float:
    """The chi-square divergence from even shares, by the one where a single rank has all."""
    ranks = len(shares)
    most = _chi_square([1.0] + [0.0] * (ranks - 1))
    return _chi_square(shares) / most if most else 0.0


def kullback_leibler(shares: Sequence[float]) -> float:
    """The relative entropy to even shares, by the one where a single rank has all, ln k."""
    ranks = len(shares)
    if ranks == 1:
        return 0.0
    return sum(p * math.log(ranks * p) for p in shares if p > 0) / math.log(ranks)


def _deviations(shares: Sequence[float]) -> list[float]:
    return [abs(share - 1 / len(shares)) for share in shares]


def _chi_square(shares: Sequence[float]) -> float:
    return sum(deviation**2 * len(shares) for deviation in _deviations(shares))
