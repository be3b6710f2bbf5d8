"""A machine in one word, in place of a job's cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.cost.constants import cluster
from shardwright.cost.presets import HARDWARE
from shardwright.job.cluster import DEVICES, in_one_word
from shardwright.job.job import read_job

JOB = """
[model]
kind = "llama"
layers = 2
dim = 64
heads = 4
ffn_dim = 128
vocab = 100

[cluster]
preset = "local"
world_size = 2
ddr_cap = "1 GiB"

[batch]
size = 2
sequence = 16
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("8xH100", {"preset": "h100-8", "world_size": 8}),
        ("8xh100", {"preset": "h100-8", "world_size": 8}),
        ("H100", {"preset": "h100-8", "world_size": 1}),
        ("1xRTX4090", {"preset": "rtx4090-1", "world_size": 1}),
        ("2xRTX4090", {"preset": "rtx4090-1", "world_size": 2, "local_world_size": 2}),
        ("16xRTX4090", {"preset": "rtx4090-1", "world_size": 16}),
        ("16xA100-40", {"preset": "a100-40-8", "world_size": 16}),
        ("2x4xA100", {"preset": "a100-8", "world_size": 8, "local_world_size": 4}),
        ("4xcpu", {"preset": "local", "world_size": 4}),
        ("mi300x-8", {"preset": "mi300x-8"}),
        ("cluster.toml", {"file": "cluster.toml"}),
        ("1x2x3xH100", {"preset": "1x2x3xH100"}),  # there is none
    ],
)
def test_a_machine_is_one_word(text: str, section: dict[str, Any]) -> None:
    assert in_one_word(text) == section


def test_it_replaces_the_whole_cluster_and_other_options_win_over_it(job: Path) -> None:
    found = read_job(job, on="2x8xH100").cluster
    assert (found.preset, found.world_size, found.ddr_cap) == ("h100-8", 16, None)
    assert read_job(job, ["cluster.world_size=4"], on="8xH100").cluster.world_size == 4


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_a_machine(job: Path, name: str) -> None:
    section = read_job(job, on=f"2x{name}").cluster
    assert section.preset in HARDWARE
    assert cluster(section, "cluster")[0].world_size == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "8xH10",
            "--on: expected a known device, a preset or a cluster file, got 'H10'. Did you mean",
        ),
        ("0xH100", "world_size"),
        *(
            (
                text,
                f"--on: expected a machine such as 8xH100, a preset or a cluster file, got "
                f"'{text}'. Did you mean '{meant}'?",
            )
            for text, meant in (
                ("H100x8", "8xH100"),
                ("8 H100", "8xH100"),
                ("8xh100-80gb", "8xH100"),
                ("NVIDIA A100-SXM4-40GB", "1xA100"),
                ("A100-40GB x 8", "8xA100-40"),
                ("2 nodes of 8 h100", "2x8xH100"),
                ("4x4090", "4xRTX4090"),
            )
        ),
    ],
)
def test_what_is_no_machine_is_refused(job: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read_job(job, on=text)
