"""Cases of a long list of which a sample runs daily."""

from __future__ import annotations

from typing import Any

import pytest


def rare(*values: Any) -> Any:
    """A case that runs in ``make test-products`` alone."""
    return pytest.param(*values, marks=[pytest.mark.product, pytest.mark.slow])


def slow(*values: Any) -> Any:
    """A case that runs daily, and not in ``make test``."""
    return pytest.param(*values, marks=pytest.mark.slow)
