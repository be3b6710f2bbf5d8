"""Comparisons in the modules of this folder tell what they compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("plan_cases")
