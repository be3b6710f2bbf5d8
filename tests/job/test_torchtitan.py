"""A TorchTitan configuration becomes the job that takes the same memory, or is refused by name."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from shardwright.core.document import encode_toml
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.llama import LlamaShape
from shardwright.job.job import parse_job
from shardwright.job.torchtitan import FLAVORS, job_of

MODEL = {"name": "llama3", "flavor": "8B"}
EIGHT = {"data_parallel_shard_degree": 8}


def config(**sections: Any) -> dict[str, Any]:
    return {"model": MODEL, "parallelism": EIGHT, **sections}


def test_what_nobody_says_is_titan_s_default() -> None:
    found = job_of(config(), None).document
    assert found["cluster"]["world_size"] == 8
    assert found["batch"] == {"size": 8, "sequence": 2048}
    memory = found["memory"]
    assert (memory["param_dtype"], memory["reduce_dtype"]) == ("bf16", "fp32")
    assert (memory["runtime"], memory["checkpointing"]) == ("fsdp2", "layers:2")
    assert (memory["compile"], memory["float8"], memory["loss"]) == (False, False, "gathered")


@pytest.mark.parametrize("name", FLAVORS)
def test_every_flavor_is_a_job(name: str) -> None:
    for flavor in FLAVORS[name]:
        found = job_of(config(model={"name": name, "flavor": flavor}), None)
        assert parse_job(found.document).model.kind == "llama"


@pytest.mark.parametrize(
    ("model", "flavor", "billions"),
    [
        ("llama3", "8B", 8.03),
        ("llama3", "405B", 405.85),
        ("qwen3", "0.6B", 0.60),
        ("qwen3", "32B", 32.8),
        ("qwen3", "30B-A3B", 30.5),
        ("qwen3", "235B-A22B", 235.1),
        ("deepseek_v3", "16B", 15.7),
        ("deepseek_v3", "236B", 235.7),
        ("deepseek_v3", "671B", 671.0),
    ],
)
def test_flavors_have_the_published_numbers_of_parameters(
    model: str, flavor: str, billions: float
) -> None:
    job = parse_job(job_of(config(model={"name": model, "flavor": flavor}), None).document)
    assert isinstance(job.model.shape, LlamaShape)
    assert job.model.shape.parameter_count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("section", "keys", "where", "wanted"),
    [
        ("activation_checkpoint", {"mode": "full"}, "checkpointing", "full"),
        ("activation_checkpoint", {"mode": "none"}, "checkpointing", "none"),
        ("activation_checkpoint", {"selective_ac_option": "op"}, "checkpointing", "selective_op"),
        ("training", {"mixed_precision_reduce": "bfloat16"}, "reduce_dtype", "bf16"),
        ("training", {"compile": True}, "compile", True),
        ("compile", {"enable": True, "components": ["model"]}, "compile", "blocks"),
        ("compile", {"enable": True, "components": ["loss"]}, "compile", False),
        ("training", {"enable_cpu_offload": True}, "offload", "all"),
        ("optimizer", {"implementation": "for-loop"}, "implementation", "for_loop"),
    ],
)
def test_what_changes_memory_is_followed(
    section: str, keys: dict[str, Any], where: str, wanted: object
) -> None:
    assert job_of(config(**{section: keys}), None).document["memory"][where] == wanted


def test_products_in_8_bits_are_those_of_its_recipe() -> None:
    model = MODEL | {"converters": ["quantize.linear.float8"]}
    quantize = {"linear": {"float8": {"recipe_name": "rowwise"}}}
    found = job_of(config(model=model, quantize=quantize), None).document["memory"]
    assert found["float8"] == "rowwise"
    old = job_of(config(model=MODEL | {"converters": "float8"}), None).document["memory"]
    assert old["float8"] == "tensorwise"
    oldest = job_of(config(float8={"enable_float8_linear": True}), None).document["memory"]
    assert oldest["float8"] == "tensorwise"


def test_degrees_of_earlier_versions_may_say_that_there_are_none() -> None:
    old = {"data_parallel_degree": -1, "tensor_parallel_degree": 1}
    assert job_of(config(training=old), None).document["parallel"]["tensor"] == 1


def test_ranks_that_are_left_share() -> None:
    parallelism = {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 8}
    found = job_of(config(parallelism=parallelism), 128).document
    assert (found["parallel"]["data_shard"], found["parallel"]["tensor"]) == (16, 8)
    assert found["memory"]["loss"] == "parallel"


def test_a_larger_global_batch_is_accumulated() -> None:
    training = {"local_batch_size": 2, "global_batch_size": 64}
    found = job_of(config(training=training), None).document
    assert (found["batch"]["size"], found["parallel"]["microbatches"]) == (8, 4)


def test_a_pipeline_has_its_microbatches() -> None:
    parallelism = {
        "data_parallel_shard_degree": 2,
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_microbatch_size": 2,
    }
    found = job_of(config(parallelism=parallelism, training={"local_batch_size": 16}), None)
    parallel = found.document["parallel"]
    assert (parallel["schedule"], parallel["microbatches"]) == ("interleaved_1f1b", 8)
    assert found.document["cluster"]["world_size"] == 8


def test_what_is_not_read_is_said() -> None:
    more = {"job": {"description": "x"}, "training": {"seq_len": 4096, "max_norm": 1.0}}
    found = job_of(config(**more), None)
    assert (found.harmless, found.unread) == (("job",), ("training.max_norm",))


@pytest.mark.parametrize(
    ("sections", "ranks", "error", "words"),
    [
        ({"model": {"name": "flux", "flavor": "dev"}}, None, UnsupportedError, "model.name"),
        ({"model": {"name": "llama3", "flavor": "9B"}}, None, UnsupportedError, "model.flavor"),
        ({"parallelism": {}}, None, InputError, "with -n"),
        ({}, 12, InputError, "-n: expected ranks that the degrees 8 come to, got 12"),
        ({"training": {"seq_len": "long"}}, None, InputError, "training.seq_len"),
        ({"training": {"dtype": "bfloat16"}}, None, UnsupportedError, "training.dtype"),
        ({"training": 3}, None, InputError, "training: expected a section"),
        ({"training": {"global_batch_size": 65}}, None, InputError, "training.global_batch_size"),
        ({"optimizer": {"name": "Shampoo"}}, None, UnsupportedError, "optimizer.name"),
        (
            {"optimizer": {"early_step_in_backward": True}},
            None,
            UnsupportedError,
            "optimizer.early_step_in_backward",
        ),
        (
            {"activation_checkpoint": {"mode": "memory_budget"}},
            None,
            UnsupportedError,
            "activation_checkpoint.mode",
        ),
        ({"model": MODEL | {"converters": ["mx"]}}, None, UnsupportedError, "model.converters"),
        (
            {"experimental": {"pipeline_parallel_degree": 2}},
            None,
            UnsupportedError,
            "experimental.pipeline_parallel_degree: expected 1, for degrees are read from",
        ),
        (
            {"parallelism": EIGHT | {"expert_tensor_parallel_degree": 2}},
            None,
            UnsupportedError,
            "parallelism.expert_tensor_parallel_degree",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_key(
    sections: dict[str, Any], ranks: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        job_of(config(**sections), ranks)


def test_a_job_is_written_as_it_is_read() -> None:
    found = job_of(config(), None).document
    assert tomllib.loads(encode_toml(found)) == found


def test_all_that_is_missing_or_wrong_is_named_at_once() -> None:
    wrong = {
        "model": {"name": "llama3"},
        "parallelism": {"tensor_parallel_degree": 0},
        "training": {"seq_len": "long", "dtype": "bfloat16"},
        "optimizer": {"early_step_in_backward": True},
    }
    with pytest.raises(UnsupportedError) as error:
        job_of(wrong, None)
    for said in (
        "parallelism.tensor_parallel_degree: expected a number from 1, got 0",
        "Say how many ranks there are with -n",
        "model.flavor: expected 8B or 70B or 405B, got none",
        "training.dtype: expected float32, got bfloat16",
        "optimizer.early_step_in_backward: expected false, got True",
        "training.seq_len: expected a number from 1, got 'long'",
    ):
        assert said in str(error.value)
