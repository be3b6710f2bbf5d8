"""A process in which models are made and deleted keeps nothing of them."""

from __future__ import annotations

from pathlib import Path

import cycle_tasks as tasks
import pytest
from plans import plan
from pool import Pool
from reference import small_job
from test_shard_embeddings import planned_tables

MIXED = ("data_parallel", "table_wise", "row_wise") * 2


def _hold(pool: Pool, folder: Path, name: str, cycles: int, most: float) -> None:
    """On two ranks torch keeps some of what gloo did, for models of others, too."""
    for ranks in (1, 2):
        made = None
        if name == "applied":
            made = plan(small_job(MIXED, ("shard", "shard"), ranks, batch=4))
        elif name == "tables":
            made = planned_tables(ranks)
        options = {"name": name, "folder": str(folder / str(ranks)), "cycles": cycles}
        for found in pool.run(ranks, tasks.left, made=made, **options):
            assert found.objects < 1, found
            assert found.bytes <= most or ranks > 1, found


@pytest.mark.parametrize("name", ["optimizer_parameters", "tracked", "applied"])
def test_nothing_is_left_of_a_few(pool: Pool, tmp_path: Path, name: str) -> None:
    """Of three; what is kept once for all is more than what is too much for each of a hundred."""
    _hold(pool, tmp_path, name, 9, 20_000)


@pytest.mark.product
@pytest.mark.parametrize("name", [*tasks.USES, "applied", "tables"])
def test_nothing_is_left_of_a_hundred(pool: Pool, tmp_path: Path, name: str) -> None:
    """safetensors keeps an object for every tensor that it reads, some 35 of a checkpoint here."""
    _hold(pool, tmp_path, name, 99, 6000 if name == "saved" else 1000)
