"""One pool of workers for a session's distributed tests, of which those on many ranks are slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on 1 and 2 ranks alike is slow on 3 and 4."""
    for item in items:
        given = getattr(item, "callspec", None)
        sizes = [] if given is None else [given.params.get(n, 0) for n in ("world_size", "size")]
        if "distributed" in item.path.parts and max(sizes, default=0) > 2:
            item.add_marker(pytest.mark.slow)
