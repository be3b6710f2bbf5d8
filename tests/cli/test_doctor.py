"""``shardwright doctor``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwright import __version__


@pytest.mark.slow
def test_doctor_shows_versions_and_whether_training_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert found["works"], found["fault"]
    assert done.returncode == 0
    assert done.stderr == ""
    assert found["fault"] == ""
    facts = found["facts"]
    assert facts["shardwright"] == __version__
    assert {"python", "system", "cores", "torch", "numpy", "msgspec", "gloo", "nccl"} <= set(facts)
    assert facts["gloo_all_reduce"] == "True"
