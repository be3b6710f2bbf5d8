"""``shardwright fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

JOB = """
[model]
kind = "llama"
layers = 2
dim = 64
heads = 4
ffn_dim = 128
vocab = 256

[cluster]
world_size = 2
compute_device = "cpu"
ddr_cap = "6 MiB"

[batch]
size = 2
sequence = 256

[memory]
runtime = "fsdp2"
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(JOB)
    return path


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(call: Any, llama: Path) -> None:
    told = call("fit", llama, "--json").json
    own = next(row for row in told["policies"] if row["checkpointing"] == "none")
    size = own["largest_batch"]["size"]
    assert size == 1  # of two the context and the allocator may take more than there is
    verdicts = [
        call("memory", llama, "--json", "--set", f"batch.size={batch}").json["verdict"]
        for batch in (size, size + 1)
    ]
    assert verdicts[0] == "fits"
    assert verdicts[1] != "fits"


@pytest.mark.slow
def test_keeping_less_fits_more(call: Any, llama: Path) -> None:
    rows = call("fit", llama, "--json").json["policies"]
    sizes = {row["checkpointing"]: row["largest_batch"]["size"] for row in rows}
    assert sizes["full"] > sizes["none"]
    assert sizes["none"] <= sizes["selective"] <= sizes["full"]


@pytest.mark.slow
def test_the_report_answers_in_sentences(call: Any, llama: Path) -> None:
    answer = call("fit", llama)
    assert answer.code == 0
    for words in ("By checkpointing policy", "Longest sequence with batch 2", "Fewest ranks"):
        assert words in answer.out


@pytest.mark.slow
def test_where_nothing_fits_it_is_3(call: Any, llama: Path) -> None:
    answer = call("fit", llama, "--set", "cluster.ddr_cap=512 KiB")
    assert answer.code == 3
    assert "Not even 1 sample per rank fits" in answer.out


def test_without_a_capacity_it_is_said_how_to_name_one(call: Any, llama: Path) -> None:
    text = llama.read_text().replace('ddr_cap = "6 MiB"\n', "")
    llama.write_text(text)
    call("fit", llama).refuses(2, "job: cluster", "a capacity", "--on 8xH100")
