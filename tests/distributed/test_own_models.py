"""A model of the user's own, planned and trained on ranks, trains as on one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from combinations import rare, slow
from own_tasks import bytes_of_applying, exact_bytes, planned_apart
from pool import Pool
from public_models import MODELS

# One, and those that no recording plans.
DAILY = {("GPT2", "adam"), ("LSTM", "adam"), ("Mixtral", "sgd"), ("Wav2Vec2", "adam")}


def architectures() -> Iterator[Any]:
    """Every one with both optimizers, and which of them run daily."""
    for case in product(MODELS, ("sgd", "adam")):
        yield slow(*case) if case in DAILY else rare(*case)


@pytest.mark.parametrize(("name", "optimizer"), [*architectures()])
def test_trains_as_on_one_process(pool: Pool, name: str, optimizer: str) -> None:
    for found in pool.run(2, planned_apart, name=name, optimizer=optimizer, options={}):
        assert found == {}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "options",
    [
        {"replicated": ["rest"]},
        {"replicated": ["h.1"], "prefetch": 1},
        {"kept": ["rest"], "prefetch": 1},
        {"kept": ["rest", "h.0", "h.1", "h.2"]},
    ],
)
def test_trains_so_whatever_the_plan(pool: Pool, options: dict[str, object]) -> None:
    for found in pool.run(2, planned_apart, name="GPT2", optimizer="sgd", options=options):
        assert found == {}


@pytest.mark.slow
def test_applying_a_plan_never_has_much_more_than_this_rank_s_share(pool: Pool) -> None:
    for most, share, whole in pool.run(2, bytes_of_applying):
        assert share == pytest.approx(whole / 2, rel=0.01)
        assert most - share < whole / 3  # of twelve layers some two, with what draws their numbers


@pytest.mark.slow
def test_what_is_frozen_has_weights_alone(pool: Pool) -> None:
    for measured, true in pool.run(2, exact_bytes, name="Wav2Vec2"):
        assert {kind: measured[kind] for kind in true} == true
