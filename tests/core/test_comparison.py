from __future__ import annotations

import pytest

from shardwright.core.measurement import ComparedNumber


@pytest.mark.parametrize(
    ("predicted", "measured", "difference", "error"),
    [
        (80.0, 100.0, -20.0, -0.2),
        (100.0, 80.0, 20.0, 0.25),
        (5.0, None, 5.0, None),
        (None, 5.0, -5.0, -1.0),
        (5.0, 0.0, 5.0, None),
        (None, None, 0, None),
    ],
)
def test_a_line_has_its_difference_relative_to_the_measurement(
    predicted: float | None, measured: float | None, difference: float, error: float | None
) -> None:
    line = ComparedNumber(0, "forward", "weight", "a", predicted, measured)
    assert (line.difference, line.error) == (difference, error)
