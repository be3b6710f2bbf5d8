"""Wrong names and values that people write, and the right one that the answer names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# what is set on a job that is right, and what was meant
SET = [
    ("cluster.preset=h100", "h100-8"),
    ("cluster.preset=H100", "h100-8"),
    ("cluster.preset=A100-80", "a100-8"),
    ("cluster.preset=rtx4090", "rtx4090-1"),
    ("cluster.preset=mi300", "mi300x-8"),
    ("cluster.preset=loacl", "local"),
    ("cluster.compute_device=gpu", "cuda"),
    ("cluster.compute_device=CUDA", "cuda"),
    ("train.optimizer=AdamW", "adamw"),
    ("train.optimizer=adma", "adam"),
    ("train.optimizer=Adagrad", "adagrad"),
    ("train.table_optimizer=rowwise-adagrad", "rowwise_adagrad"),
    ("model.kind=DLRM", "dlrm"),
    ("model.kind=lama", "llama"),
    ("model.kind=gpt", "transformer"),
    ("memory.param_dtype=bfloat16", "bf16"),
    ("memory.param_dtype=torch.bfloat16", "bf16"),
    ("memory.param_dtype=float16", "fp16"),
    ("memory.param_dtype=half", "fp16"),
    ("memory.param_dtype=float", "fp32"),
    ("memory.reduce_dtype=float32", "fp32"),
    ("memory.runtime=fsdp", "fsdp2"),
    ("memory.runtime=fully_shard", "fsdp2"),
    ("memory.runtime=DDP", "ddp"),
    ("memory.runtime=mcore", "megatron"),
    ("memory.offload=state", "states"),
    ("memory.implementation=Fused", "fused"),
    ("memory.attention=flash_attention", "flash"),
    ("memory.attention=sdpa", "flash"),
    ("memory.loss=chunk", "chunked"),
    ("parallel.tp=2", "tensor"),
    ("parallel.pp=2", "pipeline"),
    ("parallel.dp=2", "data_shard"),
    ("parallel.cp=2", "context"),
    ("parallel.ep=2", "expert"),
    ("parallel.fsdp=2", "data_shard"),
    ("parallel.grad_accum=2", "microbatches"),
    ("parallel.routing=skew", "skewed"),
    ("batch.bs=3", "size"),
    ("batch.seq_len=3", "sequence"),
    ("train.lr=0.1", "learning_rate"),
    ("memory.gradient_checkpointing=full", "checkpointing"),
    ("memory.zero_stage=3", "zero"),
    ("data.kind=critoe", "criteo"),
    ("planner.search=Exact", "exact"),
    ("planner.constants=torchrec", "torchrec-1.9"),
    ("tables.middel.rows=10", "middle"),
    ("tables.BIG.rows=10", "big"),
    ('tables.big.sharding_types=["rowwise"]', "row_wise"),
    ('tables.big.sharding_types=["tw"]', "table_wise"),
    ('tables.big.sharding_types=["grid"]', "grid_shard"),
    ('tables.big.compute_kernels=["uvm"]', "fused_uvm"),
    ('tables.big.compute_kernels=["fused_uvm_cache"]', "fused_uvm_caching"),
    ("tables.big.dtype=bfloat16", "bf16"),
]
# what is set on a transformer
BLOCKS = [
    ("memory.checkpointing=Selective", "selective"),
    ("memory.checkpointing=sac", "selective"),
    ("memory.checkpointing=recompute", "full"),
]
TRANSFORMER = """
model = { kind = "transformer", layers = 1, dim = 8, heads = 2 }
"""
# a command in a folder with job.toml and plan.json
COMMANDS = [
    ("plna job.toml", "plan"),
    ("Plan job.toml", "plan"),
    ("estimate job.toml", "memory"),
    ("benchmark", "calibrate"),
    ("init llamma", "llama"),
    ("plan job.toml --outptu x.json", "--output"),
    ("explain plan.json --tensor bgi", "big"),
    ("explain plan.json --tensor smal", "small"),
    ("explain plan.json --tensor BIG", "big"),
    ("explain plan.json --tensor big --why-not rowwise", "row_wise"),
    ("explain plan.json --tensor big --why-not cw", "column_wise"),
    ("explain plan.json --statistic lowerbound", "lower_bound"),
    ("export job.toml --to titan", "torchtitan"),
    ("export job.toml --to FSDP", "fsdp2"),
    ("plan job.toml --on 8xH10", "H100"),
    ("train job.toml --forward paralel", "parallel"),
    ("completion zhs", "zsh"),
]


@pytest.mark.parametrize(("setting", "meant"), SET, ids=[setting for setting, _ in SET])
def test_of_a_wrong_value_the_right_one_is_named(
    call: Any, job: Path, setting: str, meant: str
) -> None:
    call("plan", job, "--set", setting).refuses(2, f"Did you mean '{meant}'?")


@pytest.mark.parametrize(("setting", "meant"), BLOCKS)
def test_of_a_wrong_policy_the_right_one_is_named(
    call: Any, job: Path, setting: str, meant: str
) -> None:
    job.write_text(TRANSFORMER)
    call("plan", job, "--set", setting).refuses(2, f"Did you mean '{meant}'?")


def test_a_policy_of_another_type_is_answered_with_all(call: Any, job: Path) -> None:
    call("plan", job, "--set", "memory.checkpointing=true").refuses(
        2,
        "expected one of none, full, selective, selective_op, core_attention, layers:N, first:N, ",
    )


@pytest.mark.parametrize(("command", "meant"), COMMANDS, ids=[words for words, _ in COMMANDS])
@pytest.mark.usefixtures("plan")
def test_of_a_wrong_word_the_right_one_is_named(call: Any, command: str, meant: str) -> None:
    call(*command.split()).refuses(2, f"Did you mean '{meant}'?")
