"""How much is done, where a clock would tell how busy the machine is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Fail as soon as the block has made more ``calls`` of Python and C functions; a machine does
    a few million of them a second."""
    made = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal made
        if event in ("call", "c_call"):
            made += 1
            if made > calls:
                sys.setprofile(None)
                pytest.fail(f"more than {calls:,} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
