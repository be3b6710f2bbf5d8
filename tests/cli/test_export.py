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
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d" in printed.out
    alone = call("export", "job.toml", "--to", "torchtitan", *FP32, "--on", "16xGB200")
    assert alone.out.startswith("torchrun --nproc-per-node 16 -m torchtitan.train")  # of 72 a host


def test_a_layout_is_written_where_no_file_is(call: Any, tmp_path: Path) -> None:
    words = ("export", "job.toml", "--to", "torchtitan", *FP32, "-o", "run.sh")
    assert call(*words).out == "wrote run.sh\n"
    call(*words).refuses(2, "run.sh", "no file yet")
    written = call("init", "--from", "torchtitan", "run.sh", "-n", 8, "-o", "back.toml")
    assert written.code == 0
    back = read_job(tmp_path / "back.toml")
    assert (back.batch.size, back.cluster.world_size) == (2, 8)


@pytest.mark.parametrize(
    ("engine", "filled"),
    [
        ("torchtitan", "memory.runtime=fsdp2 memory.implementation=fused memory.loss=chunked"),
        ("torchtitan-toml", "memory.runtime=fsdp2 memory.implementation=fused"),
        ("fsdp2", "memory.runtime=fsdp2 memory.implementation=fused"),
        ("accelerate", "memory.runtime=fsdp2 memory.reduce_dtype=bf16 parallel.sequence=false"),
        (
            "megatron",
            "memory.runtime=megatron memory.implementation=fused memory.loss=parallel "
            "memory.zero=1",
        ),
    ],
)
def test_what_nobody_gives_is_as_the_engine_has_it(call: Any, engine: str, filled: str) -> None:
    words = ["export", "llama3-8b", "--on", "8xH100", "--tp", "2", "--to", engine]
    printed, refused = call(*words), call(*words, "--runtime", "shardwright")
    assert printed.code == 0
    assert printed.err.endswith(f"\nNot given, so as {engine} has it: {filled}\n")
    # What is given is not replaced, also where it is what a job has anyway.
    assert refused.code == 2
    assert " memory.runtime: expected " in refused.err


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
    lines = ("model = { bottom = [4, 8], top = [2, 1] }", "[[tables]]", 'name = "a"', "rows = 9")
    Path("dlrm.toml").write_text("\n".join([*lines, "dim = 8", ""]))
    refused = call("export", "dlrm.toml", "--to", "torchtitan", "-n", 2)
    refused.refuses(2, "model.kind: expected llama for TorchTitan", "got dlrm")
    call("export", "job.toml", "--to", "nemo").refuses(2, "nemo", *ENGINES)


def test_a_job_that_was_asked_by_name_is_written_and_reads_back(call: Any, tmp_path: Path) -> None:
    words = ["llama3-8b", "--to", "torchtitan", "--on", "8xH100", "--tp", "2", "--seq", "512"]
    words += ["--runtime", "fsdp2", "--set", "memory.loss=chunked"]
    path = tmp_path / "asked.toml"
    asked, written = call("export", *words), call("export", *words, "--write", path)
    assert asked.err.startswith("The job: model.hf_config=llama3-8b batch.size=1 batch.sequence=51")
    filled = "Not given, so as torchtitan has it: memory.implementation=fused\n"
    assert written.err == f"job written to {path}\n{filled}"
    assert asked.out == written.out == call("export", path, "--to", "torchtitan").out
    words[0] = "meta-llama/Meta-Llama-3-8B-Instruct"
    taken = f"{words[0]} is taken for llama3-8b, which has its structure.\n"
    assert call("export", *words).err == taken + asked.err
    call("export", *words, "--write", path).refuses(2, "--write", "move it away")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("hbm_cap", "code", "said"), [("40 GiB", 0, "Fits"), ("300 MiB", 3, "Does")]
)
def test_a_layout_is_checked_against_its_device(
    call: Any, hbm_cap: str, code: int, said: str
) -> None:
    sizes = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 128, "vocab": 512}
    words = [f"--set=model.{key}={value}" for key, value in sizes.items()]
    words += ["--seq", "512", f"--set=cluster.hbm_cap={hbm_cap}", "--check"]
    printed = call("export", "job.toml", "--to", "fsdp2", *words, "--set", "memory.loss=gathered")
    assert printed.code == code
    assert said in printed.err.splitlines()[-1]
    assert printed.out.endswith("optimizer.zero_grad()\n")


def test_a_machine_that_is_not_named_is_said(call: Any, job: Path) -> None:
    hint = "No machine is named: {} (preset local). Name one: --on 8xH100\n"
    for words, ranks in (
        (("gpt2",), "2 CPU ranks of 2.00 GiB each"),
        (("gpt2", "-n", "1"), "1 CPU rank of 2.00 GiB each"),
        (("llama3-8b", "--runtime", "fsdp2"), "2 CPU ranks"),
    ):
        assert hint.format(ranks) in call("export", *words, "--to", "shardwright").err
    for named in (("gpt2", "--on", "H100"), ("gpt2", "--set", "cluster.ddr_cap=1 GiB"), (job,)):
        assert "No machine" not in call("export", *named, "--to", "shardwright").err
