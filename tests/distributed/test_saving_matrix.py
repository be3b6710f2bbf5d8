"""What one job saved, another has bit by bit: any form, cut, number of ranks, wrapped or not."""

from __future__ import annotations

from pathlib import Path

import matrix_tasks as tasks
import probe_tasks
import pytest
import torch
from pool import Pool

WRAPPER = "_checkpoint_wrapped_module."
STRATEGIES = ("flat", "per_param", "param_boundary")


@pytest.mark.slow
def test_replicas_that_share_their_states_are_read_and_read(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, probe_tasks.make_grids)
    ways = {2: "flat", 4: "hfsdp"}
    for size, way in ways.items():
        folder = str(tmp_path / way)
        saved = pool.run(size, tasks.save, folder=folder, strategy=way, wrapped=False)[0]
        options = {"folder": folder, "wrapped": False}
        for other, reader in ways.items():
            for form in tasks.FORMS if way != reader else tasks.FORMS[::2]:
                for found in pool.run(other, tasks.load, strategy=reader, form=form, **options):
                    assert all(torch.equal(found[name], saved[name]) for name in found), form


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("source", "wrapped"), [("flat", True), ("per_param", False), ("param_boundary", True)]
)
def test_every_form_is_read_bit_by_bit(
    pool: Pool, tmp_path: Path, source: str, wrapped: bool
) -> None:
    """Each form by two of three."""
    _hold(pool, tmp_path, source, wrapped, STRATEGIES.index(source))


@pytest.mark.product
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("source", STRATEGIES)
def test_every_form_is_read_by_all(pool: Pool, tmp_path: Path, source: str, wrapped: bool) -> None:
    _hold(pool, tmp_path, source, wrapped, None)


def _hold(pool: Pool, folder: Path, source: str, wrapped: bool, turn: int | None) -> None:
    saved = pool.run(2, tasks.save, folder=str(folder), strategy=source, wrapped=wrapped)[0]
    for number, form in enumerate(tasks.FORMS):
        for size, target in enumerate(STRATEGIES, 1):
            if turn is not None and (number + size + turn) % 3 == 0:
                continue
            arguments = {"strategy": target, "wrapped": wrapped is (size == 2), "form": form}
            for found in pool.run(size, tasks.load, folder=str(folder), **arguments):
                plain = {n.replace(WRAPPER, ""): value for n, value in found.items()}
                assert all(torch.equal(plain[name], saved[name]) for name in plain)
                assert set(plain) >= {name for name in saved if " " not in name}
                assert form == "torch" or set(plain) == set(saved)


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "flat"), (2, "owned"), (3, "flat"), (3, "per_param")],
)
def test_torch_saves_asynchronously_what_was_there_when_it_was_asked_to(
    pool: Pool, tmp_path: Path, world_size: int, strategy: str
) -> None:
    options = {"folder": str(tmp_path), "strategy": strategy}
    for wrong in pool.run(world_size, tasks.save_asynchronously, **options):
        assert wrong == []


@pytest.mark.product
@pytest.mark.parametrize("strategy", [*STRATEGIES, "owned"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_strategy_is_saved_asynchronously(
    pool: Pool, tmp_path: Path, world_size: int, strategy: str
) -> None:
    options = {"folder": str(tmp_path), "strategy": strategy}
    for wrong in pool.run(world_size, tasks.save_asynchronously, **options):
        assert wrong == []
