"""One pool of workers for a session's distributed tests, and which of them are slow."""

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on 1 and 2 ranks alike is slow on 3 and 4; of the combinations of several
    parameters those are slow that show no value of any which another one does not show."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if "distributed" not in item.path.parts or not isinstance(item, pytest.Function):
            continue
        given = getattr(item, "callspec", None)
        sizes = [] if given is None else [given.params.get(n, 0) for n in ("world_size", "size")]
        if max(sizes, default=0) > 2:
            item.add_marker(pytest.mark.slow)
        elif given is not None and item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        for item in _repeating(combinations):
            item.add_marker(pytest.mark.slow)


def _repeating(combinations: list[pytest.Function]) -> list[pytest.Function]:
    """Those of ``combinations`` without which every value of every parameter is still there."""
    values = {
        item: {(name, repr(value)) for name, value in item.callspec.params.items()}
        for item in combinations
    }
    missing = set().union(*values.values())
    left = list(combinations)
    while missing:
        most = max(left, key=lambda item: len(values[item] & missing))
        missing -= values[most]
        left.remove(most)
    return left
