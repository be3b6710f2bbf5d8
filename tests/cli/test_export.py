"""``shardwright export``: a job in the words of an engine, and what ``init`` reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.job.exported import ENGINES
from shardwright.job.job import read_job

JOB = """\
[model]
kind = "llama"
layers = 32
dim = 4096
heads = 32
kv_heads = 8
ffn_dim = 14336
vocab = 128256

[cluster]
compute_device = "cuda"
world_size = 8

[batch]
size = 2
sequence = 8192

[memory]
runtime = "fsdp2"
checkpointing = "full"
implementation = "fused"
loss = "chunked"
reduce_dtype = "bf16"
"""
FP32 = ("--set", "memory.reduce_dtype=fp32")


@pytest.fixture(autouse=True)
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_a_layout_is_printed(call: Any) -> None:
    printed = call("export", "job.toml", "--to", "torchtitan", *FP32)
    assert printed.code == 0
    assert "--config llama3_8b \\\n" in printed.out
    assert "\n  --parallelism.data_parallel_shard_degree 8 \\\n" in printed.out
    assert printed.out.endswith("activation-checkpoint:full\n")


def test_ranks_are_those_of_a_machine_in_a_word(call: Any) -> None:
    printed = call("export", "job.toml", "--to", "torchtitan", *FP32, "--on", "2x8xH100")
    assert "\n  --parallelism.data_parallel_shard_degree 16 \\\n" in printed.out


def test_a_layout_is_written_where_no_file_is(call: Any, tmp_path: Path) -> None:
    words = ("export", "job.toml", "--to", "torchtitan", *FP32, "-o", "run.sh")
    assert call(*words).out == "wrote run.sh\n"
    call(*words).refuses(2, "run.sh", "no file yet")
    written = call("init", "--from", "torchtitan", "run.sh", "-n", 8, "-o", "back.toml")
    assert written.code == 0
    back = read_job(tmp_path / "back.toml")
    assert (back.batch.size, back.cluster.world_size) == (2, 8)


def test_yaml_of_accelerate_is_read_beside_a_job(call: Any, tmp_path: Path) -> None:
    assert call("export", "job.toml", "--to", "accelerate", "-o", "fsdp.yaml").code == 0
    call("init", "--from", "accelerate", "fsdp.yaml").refuses(2, "--job", "a job beside")
    call("init", "--from", "megatron", "--num-layers 2", "--job", "job.toml").refuses(
        2, "--job", "one"
    )
    words = ("init", "--from", "accelerate", "fsdp.yaml", "--job", "job.toml", "-o", "back.toml")
    assert call(*words).code == 0
    back = read_job(tmp_path / "back.toml")
    assert back.model == read_job(tmp_path / "job.toml").model


def test_what_an_engine_cannot_do_is_refused_in_one_line(call: Any) -> None:
    refused = call("export", "job.toml", "--to", "megatron")
    refused.refuses(2, "memory.runtime: expected megatron", "memory.loss: expected parallel")
    call("export", "job.toml", "--to", "nemo").refuses(2, "nemo", *ENGINES)


def test_a_job_that_was_asked_by_name_is_written_and_reads_back(call: Any, tmp_path: Path) -> None:
    words = ["llama3-8b", "--to", "torchtitan", "--on", "8xH100", "--tp", "2", "--seq", "512"]
    words += ["--runtime", "fsdp2", "--set", "memory.loss=chunked"]
    path = tmp_path / "asked.toml"
    asked, written = call("export", *words), call("export", *words, "--write", path)
    assert asked.err.startswith("The job: model.hf_config=llama3-8b batch.size=1 batch.sequence=51")
    assert written.err == f"job written to {path}\n"
    assert asked.out == written.out == call("export", path, "--to", "torchtitan").out
    call("export", *words, "--write", path).refuses(2, "--write", "move it away")


def test_a_machine_that_is_not_named_is_said(call: Any, job: Path) -> None:
    hint = "No machine is named: {} (preset local). Name one: --on 8xH100\n"
    for words, ranks in (
        (("gpt2",), "2 CPU ranks of 2.00 GiB each"),
        (("gpt2", "-n", "1"), "1 CPU rank of 2.00 GiB each"),
        (("llama3-8b", "--runtime", "fsdp2"), "2 CPU ranks"),
    ):
        assert hint.format(ranks) in call("export", *words, "--to", "torchtitan").err
    for named in (("gpt2", "--on", "H100"), ("gpt2", "--set", "cluster.ddr_cap=1 GiB"), (job,)):
        assert "No machine" not in call("export", *named, "--to", "torchtitan").err
