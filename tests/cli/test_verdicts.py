"""One meaning of "fits": `plan`, `memory` and `fit` say the same of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_verdicts import said_of

from shardwright.core.errors import NoPlanError
from shardwright.core.footprint import Footprint
from shardwright.estimate.footprint import footprint
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.report.first_screen import as_text

SLOW = (pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1))  # a llama, a small GPT


@pytest.mark.parametrize("seed", [3, 4, 6, 7, 8, 10, *SLOW])
def test_commands_do_not_contradict_one_another(seed: int, tmp_path: Path) -> None:
    found = said_of(seed, tmp_path)
    assert not found["wrong"], found


def asked(room: int) -> tuple[Plan | None, Footprint]:
    """A GPT's plan on one accelerator with so much memory, and what it takes there."""
    job = parse_job(
        {
            "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
            "memory": {"checkpointing": "none"},
            "cluster": {"compute_device": "cuda", "world_size": 1, "hbm_cap": f"{room} B"},
        }
    )
    try:
        return plan(job), footprint(job)
    except NoPlanError:
        return None, footprint(job)


def test_what_fits_counts_the_allocator_and_what_else_is_on_the_device() -> None:
    """Live bytes alone are a fraction of a context, which every process has."""
    made, roomy = asked(2**40)
    assert made is not None
    least, most = roomy.needs(roomy.worst)
    assert made.needed == (least, most)
    assert roomy.worst.peak_bytes < least < most
    for room, verdict in ((most, "fits"), (most - 1, "perhaps"), (least, "perhaps")):
        made, found = asked(room)
        assert made is not None
        assert made.verdict == found.verdict == verdict
        words = {"fits": "Fits: ", "perhaps": "Perhaps fits: "}[verdict]
        assert words in as_text(made)
        assert words in as_text(found)
    made, found = asked(least // 2)
    assert (made, found.verdict) == (None, "does not fit")
