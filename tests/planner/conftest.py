"""Small jobs for the planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shardwright.cost.presets import PRESETS
from shardwright.job.job import Job, parse_job


def _make_job(*rows: int, dim: int = 16, table: dict[str, Any] | None = None, **more: Any) -> Job:
    tables = [
        {"name": f"t{i}", "rows": count, "dim": dim} | (table or {}) for i, count in enumerate(rows)
    ]
    model = {"bottom": [8, dim], "top": [16, 1]}
    return parse_job({"tables": tables, "model": model, "cluster": {"world_size": 2}} | more)


def _random_job(seed: int, tables: int = 0, ranks: int = 0) -> Job:
    """Sizes over four decades, both optimizers, budgets from tight to plenty."""
    draw = random.Random(seed)
    rows = [round(10 ** draw.uniform(0, 5.5)) for _ in range(tables or draw.randint(1, 8))]
    dim = draw.choice([4, 8, 16, 32])
    world_size = ranks or draw.choice([1, 2, 3, 4, 8])
    share = sum(rows) * dim * 4 / world_size
    floor = 3_000_000 if draw.random() < 0.7 else 300_000
    return _make_job(
        *rows,
        dim=dim,
        cluster={"world_size": world_size, "ddr_cap": int(share * draw.uniform(1, 4)) + floor},
        batch={"size": draw.choice([1, 32, 256, 2048])},
        train={"optimizer": draw.choice(["sgd", "adagrad", "adam"])},
        model={"bottom": [draw.choice([8, 256]), dim], "top": [draw.choice([16, 512]), 1]},
    )


def _make_tables(
    *rows: int, dim: int = 16, table: dict[str, Any] | None = None, **more: Any
) -> Job:
    tables = [
        {"name": f"t{i}", "rows": count, "dim": dim} | (table or {}) for i, count in enumerate(rows)
    ]
    return parse_job({"tables": tables, "cluster": {"preset": "h100-8", "world_size": 2}} | more)


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """A job of tables ``t0``, ``t1``, ... with the given rows; keywords replace sections."""
    return _make_job


@pytest.fixture(scope="session")
def make_tables() -> Callable[..., Job]:
    """A job of tables alone on two accelerators, made like the others."""
    return _make_tables


@pytest.fixture(scope="session")
def random_job() -> Callable[..., Job]:
    """A job drawn from a seed, optionally of so many tables and ranks."""
    return _random_job


@pytest.fixture
def data_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 at the rates of its data sheet, at which problems were drawn that a search finds hard
    whatever machines are said to be."""
    monkeypatch.setitem(PRESETS, "h100-8", msgspec.structs.replace(PRESETS["h100-8"], clock={}))
