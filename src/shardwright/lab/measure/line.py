"""The line latency + bytes / rate through the seconds of a collective at many sizes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 16 * 2**10  # a buffer up to which latency is nearly all there is
_TURNS = 10  # latency and rate are found in turns, and settle at once
_LEAST_SLOPE = 1e-15  # seconds per byte; no link is faster


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds, bytes per second, and how far a size lies from the line at most, as a share."""

    latency: float
    rate: float
    misfit: float


def fit(buffers: Sequence[float], crossing: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line for ``crossing`` bytes of full ``buffers`` bytes that took ``seconds``.

    The latency is that of the small buffers, for large ones drown it, and no more than any size
    took; the rate is the one of the least sum of relative errors, so that every size counts the
    same and no outlier much.
    """
    points = list(zip(crossing, seconds, strict=True))
    small = [k for k, nbytes in enumerate(buffers) if nbytes <= SMALL]
    slope, least = 0.0, min(seconds)
    for _ in range(_TURNS):
        near = statistics.median(points[k][1] - slope * points[k][0] for k in small)
        latency = min(max(near, 0.0), least)
        slopes = [((t - latency) / x, x / t) for x, t in points]
        slope = max(_weighted_median(slopes), _LEAST_SLOPE)
    misfit = max(abs(latency + slope * x - t) / t for x, t in points)
    return Line(latency, 1 / slope, misfit)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """The value below and above which half of the weight lies."""
    half = sum(weight for _, weight in pairs) / 2
    ordered = sorted(pairs)
    reached = itertools.accumulate(weight for _, weight in ordered)
    return next(value for (value, _), total in zip(ordered, reached, strict=True) if total >= half)
