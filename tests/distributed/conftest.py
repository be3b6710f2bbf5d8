"""One pool of workers for a session's distributed tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool, Threads


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def threads() -> Threads:
    return Threads()
