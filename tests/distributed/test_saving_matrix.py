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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", tasks.FORMS)
def test_replicas_that_share_their_states_are_read_and_read(
    pool: Pool, tmp_path: Path, form: str
) -> None:
    pool.run(4, probe_tasks.make_grids)
    ways = {2: "flat", 4: "hfsdp"}
    for size in ways:
        saved = pool.run(
            size, tasks.save, folder=str(tmp_path / ways[size]), strategy=ways[size], wrapped=False
        )[0]
        options = {"folder": str(tmp_path / ways[size]), "wrapped": False, "form": form}
        for other, way in ways.items():
            for found in pool.run(other, tasks.load, strategy=way, **options):
                assert all(torch.equal(found[name], saved[name]) for name in found)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("source", STRATEGIES)
def test_every_form_is_read_bit_by_bit(
    pool: Pool, tmp_path: Path, source: str, wrapped: bool
) -> None:
    saved = pool.run(2, tasks.save, folder=str(tmp_path), strategy=source, wrapped=wrapped)[0]
    for form in tasks.FORMS:
        for size, target in enumerate(STRATEGIES, 1):
            arguments = {"strategy": target, "wrapped": wrapped is (size == 2), "form": form}
            for found in pool.run(size, tasks.load, folder=str(tmp_path), **arguments):
                plain = {n.replace(WRAPPER, ""): value for n, value in found.items()}
                assert all(torch.equal(plain[name], saved[name]) for name in plain)
                assert set(plain) >= {name for name in saved if " " not in name}
                assert form == "torch" or set(plain) == set(saved)
