"""Jobs whose memory is estimated: llamas, modules of one's own, and how they are divided."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shardwright
from shardwright.core.errors import InputError
from shardwright.estimate.recordings import described
from shardwright.job.job import (
    Job,
    degrees_of,
    memory_of,
    parallel_of,
    parse_job,
    read_job,
)
from shardwright.job.memory import PLANNED
from shardwright.job.parallel import ParallelSection

LLAMA = {"kind": "llama"}
TABLE = {"name": "a", "rows": 10, "dim": 16}


def _job(**sections: Any) -> Job:
    return parse_job({"model": LLAMA} | sections)


def _refused(**sections: Any) -> str:
    with pytest.raises(InputError) as caught:
        _job(**sections)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_llama_needs_neither_tables_nor_data() -> None:
    shape = _job().model.shape
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.ffn_dim) == (4, 4, 32, 512)


def test_every_layer_of_a_llama_with_experts_has_them() -> None:
    model = LLAMA | {"experts": 8, "ffn_dim": 96}
    shape = _job(model=model).model.shape
    assert (shape.moe_layers, shape.experts_per_token, shape.expert_ffn_dim) == (
        (0, 1, 2, 3),
        2,
        96,
    )
    some = _job(model=model | {"moe_layers": [1, 3], "expert_ffn_dim": 32}).model.shape
    assert (some.moe_layers, some.expert_ffn_dim) == ((1, 3), 32)


def test_ranks_may_share_the_width_of_experts_where_megatron_runs_them() -> None:
    sections = {
        "model": LLAMA | {"experts": 8},
        "batch": {"sequence": 16},
        "parallel": {"tensor": 2, "data_shard": 4, "expert": 2, "expert_tensor": 2},
    }
    job = _job(**sections, memory={"runtime": "megatron"})
    assert degrees_of(job, 8).expert_shards == 2
    assert "expert_tensor: expected none beside memory.runtime 'shard" in _refused(**sections)
    sections["parallel"]["expert"] = 8
    said = _refused(**sections, memory={"runtime": "megatron"})
    assert "parallel.expert: expected a divisor of 8" in said
    assert "got 8 x expert_tensor 2" in said


def test_a_gpt_is_a_llama_with_options() -> None:
    gpt = {"norm": "layernorm", "mlp": "gelu", "positions": 1024, "bias": True, "dropout": 0.1}
    widths = {"layers": 12, "dim": 768, "heads": 12, "vocab": 50257, "tied_embeddings": True}
    shape = _job(model=LLAMA | widths | gpt, batch={"sequence": 1024}).model.shape
    assert shape.parameter_count == 124_439_808  # as GPT-2's smallest is counted


def test_what_a_llama_has_anyway_changes_nothing_of_it() -> None:
    said = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "dropout": 0.0}
    assert _job(model=LLAMA | said).model.shape == _job().model.shape


def test_more_tokens_than_learned_positions_are_refused() -> None:
    said = _refused(model=LLAMA | {"positions": 8}, batch={"sequence": 16})
    assert "batch.sequence: expected at most the 8 positions of the model, got 16" in said


def test_a_configuration_is_found_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    path = tmp_path / "job.toml"
    path.write_text('[model]\nhf_config = "config.json"\n')
    job = read_job(path)
    assert job.model.kind == "llama"
    assert job.model.shape.parameter_count == 7_241_732_096


def test_a_module_of_ones_own_is_named_with_its_arguments() -> None:
    model = _job(model={"python": "package.module:make", "arguments": {"layers": 3}}).model
    assert (model.kind, model.python, model.arguments) == (
        "python",
        "package.module:make",
        {"layers": 3},
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"kind": "transformer", "kv_heads": 2},
            "job: model.kv_heads: expected no such key for kind 'transformer', got 2. "
            "It belongs to kind 'llama'.",
        ),
        (
            {"kind": "transformer", "hf_config": "config.json"},
            "job: model.hf_config: expected no such key for kind 'transformer'",
        ),
        (
            {"kind": "llama", "bottom": [8]},
            "job: model.bottom: expected no such key for kind 'llama', got [8].",
        ),
        (
            {"kind": "llama", "python": "a:b"},
            "job: model.python: expected no such key for kind 'llama', got 'a:b'.",
        ),
        (
            {"hf_config": "config.json", "layers": 3},
            "job: model.layers: expected no widths beside hf_config, which has them all, got 3.",
        ),
        (
            {"hf_config": "none.json"},
            "none.json: expected a model configuration file, got no such file.",
        ),
        ({"hf_config": ""}, "job: model.hf_config: expected the name of a file, got ''."),
        ({"kind": "python"}, "job: model.python: expected 'package.module:function'"),
        ({"python": "module"}, "job: model.python: expected 'package.module:function'"),
        (
            {"kind": "llama", "experts_per_token": 2},
            "job: model.experts: expected at least 1 beside experts_per_token, got none.",
        ),
        (
            {"kind": "llama", "kv_heads": 3},
            "job: model.kv_heads: expected a divisor of the 4 heads, got 3.",
        ),
        (
            {"kind": "llama", "heads": 3},
            "job: model.heads: expected a divisor of dim 128, or model.head_dim beside it, got 3.",
        ),
        (
            {"kind": "llama", "shape": {}},
            "job: unknown key 'model.shape'. Known here: ",
        ),
    ],
)
def test_widths_that_do_not_belong_together_are_refused(
    model: dict[str, Any], message: str
) -> None:
    assert _refused(model=model).startswith(message)


def test_a_llama_has_no_tables() -> None:
    assert _refused(tables=[TABLE]) == "job: tables: expected none for a llama, got 1."


def test_the_number_of_ranks_follows_from_the_degrees() -> None:
    model = LLAMA | {"heads": 8, "layers": 32}
    parallel = {"data_shard": 64, "tensor": 8, "pipeline": 32}
    job = _job(model=model, parallel=parallel, batch={"size": 32, "sequence": 64})
    assert job.cluster.world_size == 16384


def test_as_many_ranks_as_there_are_share_what_is_left() -> None:
    job = _job(parallel={"tensor": 2}, cluster={"world_size": 8}, batch={"sequence": 2})
    assert degrees_of(job, 8).data_shard == 4


def test_degrees_that_do_not_multiply_to_the_ranks_are_refused() -> None:
    assert _refused(parallel={"tensor": 3}, cluster={"world_size": 8}) == (
        "job: cluster.world_size: expected a multiple of 3, which is data_replicate 1 x tensor 3 "
        "x pipeline 1 x context 1, got 8."
    )


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"data_shard": 1, "tensor": 3},
            "job: parallel.tensor: expected a divisor of the 4 heads, got 3.",
        ),
        (
            {"data_shard": 2, "expert": 2},
            "job: parallel.expert: expected 1 for a model without experts, got 2.",
        ),
        (
            {"data_shard": 1, "pipeline": 8},
            "job: parallel.pipeline: expected at most 4 pieces, one layer each, got 8 ranks of 1.",
        ),
        (
            {"data_shard": 1, "tensor": 2, "context": 3},
            "job: batch.sequence: expected a multiple of 6, which is context 3 x tensor 2, got 8.",
        ),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(
    parallel: dict[str, Any], message: str
) -> None:
    assert _refused(parallel=parallel, batch={"sequence": 8}) == message


def test_a_job_without_the_sections_has_their_defaults() -> None:
    job = _job(cluster={"world_size": 16384})
    assert (parallel_of(job), memory_of(job)) == (ParallelSection(), PLANNED)
    assert degrees_of(job, 16384).data_shard == 16384


def test_a_job_without_the_sections_is_written_without_them() -> None:
    document = msgspec.to_builtins(parse_job({"tables": [TABLE]}))
    assert {"parallel", "memory"} & set(document) == set()
    assert {"kv_heads", "hf_config", "python", "shape"} & set(document["model"]) == set()


def test_a_job_with_the_sections_comes_back_as_it_was() -> None:
    job = _job(
        model=LLAMA | {"experts": 4},
        parallel={"data_shard": 2, "expert": 2},
        memory={"checkpointing": "layers:2", "float8": "rowwise", "reshard_after_forward": True},
    )
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            {"optimizer": "adamw"},
            "job: memory.optimizer: expected no such key, got 'adamw'. "
            "Name the optimizer as train.optimizer.",
        ),
        ({"runtime": "fsdp"}, "job: memory.runtime: expected one of shardwright, fsdp2, ddp"),
        ({"checkpointing": "some"}, "job: memory.checkpointing: expected one of none, full"),
        ({"zero": 4}, "job: memory.zero: expected one of 1, 2, 3, auto, got 4."),
        ({"lowerin": "cpu"}, "job: unknown key 'memory.lowerin'. Did you mean 'lowering'?"),
    ],
)
def test_a_bad_value_of_memory_is_named(memory: dict[str, Any], message: str) -> None:
    assert _refused(memory=memory).startswith(message)


@pytest.mark.parametrize("model", [LLAMA, {"python": "package.module:make"}])
def test_what_is_only_estimated_learns_with_adamw_unless_it_says_otherwise(
    model: dict[str, Any],
) -> None:
    assert _job(model=model).train.optimizer == "adamw"
    assert _job(model=model, train={"optimizer": "muon"}).train.optimizer == "muon"


def test_what_is_planned_learns_with_sgd_unless_it_says_otherwise() -> None:
    assert _job(model={"kind": "transformer"}).train.optimizer == "sgd"


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw_8bit_torchao", "adamw_bf16"])
def test_an_optimizer_that_no_run_has_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError) as caught:
        described(_job(model={"kind": "transformer"}, train={"optimizer": name}))
    assert str(caught.value).startswith(
        "train.optimizer: expected one of sgd, sgd_momentum, adam, adamw, adamw_8bit, adagrad, "
        f"got '{name}'."
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("param_dtype", "bf16"), ("reduce_dtype", "bf16")],
)
def test_what_is_planned_refuses_other_steps_than_it_runs(key: str, value: Any) -> None:
    message = _refused(model={"kind": "transformer"}, memory={key: value})
    assert message.startswith(f"job: memory.{key}: expected ")
    assert message.endswith(f"as steps of kind 'transformer' are planned and run, got {value!r}.")


def test_checkpointing_of_a_model_without_blocks_is_refused() -> None:
    table = {"name": "a", "rows": 9, "dim": 16}
    steps = {"train": {"steps": 1}, "memory": {"checkpointing": "full"}}
    message = _refused(model={}, tables=[table], **steps)
    assert message.startswith("job: memory.checkpointing: expected 'none', as steps of kind 'dlrm'")


def test_what_is_planned_computes_in_fp32() -> None:
    job = _job(model={"kind": "transformer"}, memory={"runtime": "shardwright"})
    assert memory_of(job) == memory_of(
        _job(model={"kind": "transformer"}, memory={"param_dtype": "fp32", "reduce_dtype": "fp32"})
    )


def test_no_file_but_the_one_of_kinds_asks_for_the_name_of_a_kind() -> None:
    package = Path(shardwright.__file__).parent
    asks = re.compile(r"model\.kind (==|!=|in|not in) |model\.kind\]")
    found = [path for path in package.rglob("*.py") if asks.search(path.read_text())]
    assert [str(path.relative_to(package)) for path in found] == []
