"""A DeepSpeed configuration beside a job becomes the job that shares as its stage does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.job.engines.deepspeed import job_of
from shardwright.job.job import Job, parse_job

BF16 = {"bf16": {"enabled": True}}
SIZES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
# What every key is by default, read from DeepSpeed's source by the version that stands in it.
DEFAULTS: dict[str, Any] = json.loads((Path(__file__).parent / "deepspeed.json").read_text())[
    "defaults"
]
# Of these the sizes of buckets, what is fetched ahead and what stays, which no estimate follows.
TOLD = re.compile(
    r"zero_optimization\.(contiguous_gradients|reduce_scatter|.*_bucket_size|overlap_comm|"
    "use_multi_rank_bucket_allreduce|allgather_partitions|sub_group_size|zeropp_loco_param|"
    "stage3_(param_persistence_threshold|model_persistence_threshold|max_.*|module_granularity.*|"
    "use_all_reduce_for_fetch_params|allgather_sequential)|mics_hierarchical_params_gather|"
    r"memory_efficient_linear)|data_types\.(param|buffer)_dtype|pipeline.*"
)
CPU = {"device": "cpu", "pin_memory": True}


def job(**sections: dict[str, Any]) -> Job:
    document: dict[str, Any] = {
        "model": {"kind": "llama", "layers": 2, "dim": 64, "heads": 4, "vocab": 256},
        "cluster": {"compute_device": "cuda", "world_size": 8},
        "batch": {"size": 3, "sequence": 32},
        "memory": {"param_dtype": "bf16", "checkpointing": "full"},
    }
    return parse_job(document | sections)


def read(config: dict[str, Any], beside: Job | None = None) -> Job:
    return parse_job(job_of(config, beside or job(), None).document)


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({"stage": 1}, ("shardwright", 1, "none", 1, 8)),
        ({"stage": 2}, ("shardwright", 2, "none", 1, 8)),
        ({"stage": 3}, ("fsdp2", 3, "none", 1, 8)),
        ({"stage": 0}, ("shardwright", 1, "none", 8, 1)),  # whole bf16 beside whole fp32
        ({"stage": 2, "offload_optimizer": CPU}, ("shardwright", 2, "all", 1, 8)),
        ({"stage": 2, "cpu_offload": True}, ("shardwright", 2, "all", 1, 8)),
        ({"stage": 3, "offload_optimizer": CPU}, ("fsdp2", 3, "states", 1, 8)),
        (
            {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
            ("fsdp2", 3, "all", 1, 8),
        ),
        ({"stage": 3, "mics_shard_size": 4}, ("fsdp2", 3, "none", 2, 4)),
        ({"stage": 3, "zero_hpz_partition_size": 2}, ("shardwright", (2, 3), "none", 4, 2)),
        ({"stage": 3, "zero_hpz_partition_size": 8}, ("fsdp2", 3, "none", 1, 8)),
    ],
)
def test_a_stage_is_what_shares_as_it_does(zero: dict[str, Any], wanted: Any) -> None:
    found = read({"zero_optimization": zero, **BF16, **SIZES})
    memory, parallel = found.memory, found.parallel
    assert memory
    assert parallel
    shared = parallel.data_replicate, parallel.data_shard
    assert (memory.runtime, memory.zero, memory.offload, *shared) == wanted
    assert (memory.param_dtype, memory.checkpointing) == ("bf16", "full")


def test_without_half_precision_stage_0_is_ddp() -> None:
    memory = read({"fp16": {"enabled": False}, **SIZES}).memory
    assert memory
    assert (memory.runtime, memory.param_dtype) == ("ddp", "fp32")


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((64, 2, 4), (8, 4)),
        ((None, 2, 4), (8, 4)),
        ((64, None, 4), (8, 4)),
        ((64, 2, None), (8, 4)),
        ((64, None, None), (8, None)),
        ((None, 2, None), (2, None)),
        (("auto", "auto", "auto"), (3, None)),
        (("auto", "auto", 2), (6, 2)),
    ],
)
def test_of_three_sizes_two_say_the_third(sizes: Any, wanted: Any) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    found = read(given | BF16)
    assert found.parallel
    assert (found.batch.size, found.parallel.microbatches) == wanted


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({"type": "AdamW"}, ("adamw", "fused")),
        ({"type": "Adam"}, ("adamw", "fused")),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, ("adam", "fused")),
        ({"type": "Adam", "params": {"torch_adam": True}}, ("adamw", None)),
        ({"type": "SGD", "params": {"momentum": 0.9}}, ("sgd_momentum", None)),
        ({"type": "Muon"}, ("muon", None)),
    ],
)
def test_an_optimizer_has_our_name(optimizer: dict[str, Any], wanted: Any) -> None:
    found = read({"optimizer": optimizer, "zero_optimization": {"stage": 3}, **BF16, **SIZES})
    assert found.memory
    assert (found.train.optimizer, found.memory.implementation) == wanted


def test_a_plan_is_left_its_own_kernels() -> None:
    adam = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}} | BF16
    assert job_of(adam | SIZES, job(), None).document["memory"]["implementation"] == "fused"
    once = adam | {"train_micro_batch_size_per_gpu": 2}
    assert "implementation" not in job_of(once, job(), None).document["memory"]


def test_what_the_trainer_fills_in_is_the_job_s_and_is_said() -> None:
    auto = {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    found = job_of(auto | {"zero_optimization": {"stage": 2}}, job(), None)
    assert found.document["memory"]["param_dtype"] == "bf16"
    said = "; ".join(found.assumed)
    assert "bf16.enabled true, as the job computes" in said
    assert "train_micro_batch_size_per_gpu 3, as the job has it" in said
    assert "the optimizer of the job" in said


def test_degrees_of_the_model_stay_the_job_s() -> None:
    beside = job(parallel={"tensor": 2})
    found = read(
        {"train_batch_size": 32, "zero_optimization": {"stage": 1}} | BF16, beside
    ).parallel
    assert found
    assert (found.tensor, found.data_shard) == (2, 4)


def test_what_changes_nothing_and_what_is_not_read_are_said_apart() -> None:
    config = {
        "steps_per_print": 10,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False, "loss_scale": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        "curriculum_learning": {"enabled": False},
    }
    found = job_of(config | BF16 | SIZES, job(), None)
    assert found.unread == ("zero_optimization.reduce_bucket_size",)
    assert "gradient_clipping" in found.harmless
    assert "scheduler" in found.harmless


def test_all_that_no_estimate_follows_is_named_at_once() -> None:
    config = {
        "bf16": {"enabled": True, "bf16_optimizer_states": True},
        "train_batch_size": 17,
        "optimizer": {"type": "OneBitAdam"},
        "zero_optimization": {
            "stage": 5,
            "zero_quantized_weights": True,
            "offload_param": {"device": "nvme"},
        },
        "sparse_attention": {"mode": "fixed"},
        "tensor_parallel": {"autotp_size": 4},
        **SIZES,
    }
    with pytest.raises(UnsupportedError) as error:
        job_of(config, job(), None)
    for said in (
        "bf16.bf16_optimizer_states: expected none",
        "train_batch_size: expected train_micro_batch_size_per_gpu x gradient_accumulation_steps "
        "x 8 data ranks, got 17 and 2 x 4 x 8",
        "optimizer.type: expected adam or adamw",
        "zero_optimization.stage: expected 0, 1, 2 or 3, got 5",
        "zero_optimization.zero_quantized_weights: expected none",
        "zero_optimization.offload_param.device: expected none or cpu",
        "sparse_attention: expected none",
        "tensor_parallel.autotp_size: expected none, for no estimate follows tensor ranks",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bf16": True}, "bf16: expected a section, got True"),
        (BF16 | {"fp16": {"enabled": True}}, "fp16.enabled: expected false beside bf16"),
        ({"bf16": {"enabled": 3}}, "bf16.enabled: expected true or false, got 3"),
        ({"zero_optimization": True}, "zero_optimization: expected a section, got True"),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 3}},
            "mics_shard_size: expected a divisor of the 8 data ranks, got 3",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": CPU, "offload_optimizer": CPU}},
            "offload_param.device: expected none, for stage 3 alone",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "zero_hpz_partition_size": 2,
                    "offload_optimizer": CPU,
                }
            },
            "offload_optimizer.device: expected none, or offload_param too, beside zero_hpz",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": CPU | {"ratio": 0.3}}},
            "offload_optimizer.ratio: expected 1, all of the updates on the host, got 0.3",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        job_of(config | SIZES, job(), None)


def test_ranks_are_asked_for_where_nobody_says_them() -> None:
    beside = job(cluster={"compute_device": "cuda"})
    with pytest.raises(InputError, match="Say how many ranks there are with -n"):
        job_of(SIZES | BF16, beside, None)
    assert job_of(SIZES | BF16, beside, 4).document["cluster"]["world_size"] == 4


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys by their paths as sections."""
    found: dict[str, Any] = {}
    for path, value in keys.items():
        *way, name = path.split(".")
        section = found
        for step in way:
            section[step] = section.get(step) or {}
            section = section[step]
        section.setdefault(name, value)
    return found


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_default_that_is_written_out_changes_nothing_and_is_known(key: str) -> None:
    plain = {"zero_optimization": {"stage": 2}} | BF16 | SIZES
    plain = {name: value for name, value in plain.items() if name != key}
    given = nested({key: DEFAULTS[key]})
    whole = plain | {
        name: {**plain.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in given.items()
    }
    if key in ("zero_optimization.stage", "bf16.enabled"):
        plain = whole
    found = job_of(whole, job(), None)
    assert found.document == job_of(plain, job(), None).document
    assert bool(found.unread) is bool(TOLD.fullmatch(key))


def test_all_defaults_together_are_those_of_an_empty_file() -> None:
    found = job_of(nested(DEFAULTS), job(), None)
    assert found.document == job_of({}, job(), None).document
    assert all(map(TOLD.fullmatch, found.unread))


@pytest.mark.parametrize(
    ("key", "value", "brings"),
    [
        ("expert_parallel.enabled", True, "experts that AutoEP shares"),
        ("data_types.grad_accum_dtype", "fp32", "gradients that add up in another dtype"),
        ("zero_optimization.offload_optimizer.super_offload", True, "SuperOffload"),
    ],
)
def test_what_brings_something_else_is_refused(key: str, value: Any, brings: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no estimate follows {brings}"):
        job_of(nested({key: value}) | SIZES, job(), None)


def test_a_section_of_offload_without_a_device_is_as_the_code_has_it() -> None:
    zero = {"stage": 3, "offload_optimizer": {"pin_memory": True}}
    found = job_of({"zero_optimization": zero} | BF16 | SIZES, job(), None)
    assert found.document["memory"]["offload"] == "none"
    assert "zero_optimization.offload_optimizer.device none, for it names none" in found.assumed
