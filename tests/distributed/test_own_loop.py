"""The example of a model and a loop of one's own plans, learns, and takes what was predicted."""

from __future__ import annotations

import os
import subprocess
import sys

import example_tasks as tasks
import pytest
from pool import Pool


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_one_s_own_learns_and_takes_what_was_predicted(pool: Pool, ranks: int) -> None:
    for losses, predicted, measured in pool.run(ranks, tasks.train_own, steps=40):
        assert measured == pytest.approx(predicted, rel=0.01)
        assert losses[0] > 2.0  # of ten classes: 2.3
        assert sum(losses[-5:]) / 5 < 1.5


@pytest.mark.slow
def test_it_says_both_peaks_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(tasks.OWN_LOOP)]
    done = subprocess.run(
        command,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: peak " in done.stdout
    assert "step 100: loss " in done.stdout
