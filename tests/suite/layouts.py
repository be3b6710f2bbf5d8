"""Random layouts of published models, to be sent to an engine and back."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from random import Random
from typing import Any

from shardwright.core.errors import InputError
from shardwright.job import megatron, torchtitan
from shardwright.job.engines import accelerate
from shardwright.job.exported import cannot
from shardwright.job.job import Job, parse_job
from shardwright.job.torchtitan import FLAVORS

FAMILIES = [(family, flavor) for family, flavors in FLAVORS.items() for flavor in flavors]
OF_ENGINE: dict[str, dict[str, list[Any]]] = {
    "torchtitan": {"loss": ["chunked"], "float8": [False, False, False, "rowwise"]},
    "torchtitan-toml": {"loss": ["gathered", "parallel"], "float8": [False, "tensorwise"]},
    "megatron": {
        "runtime": ["megatron"],
        "loss": ["parallel"],
        "zero": [1, 1, 3],
        "checkpointing": ["none", "full", "core_attention", "first:2"],
        "param_dtype": ["bf16", "bf16", "fp16", "fp32"],
        "reduce_dtype": ["fp32", "fp32", "bf16", "fp16"],
        "implementation": ["fused"],
        "compile": [False],
        "offload": ["none"],
    },
    "accelerate": {
        "loss": ["gathered"],
        "checkpointing": ["none", "full"],
        "param_dtype": ["bf16", "fp16", "fp32"],
        "reduce_dtype": ["bf16", "fp16", "fp32"],
        "reshard_after_forward": [False, "default"],
        "compile": [False],
        "offload": ["none", "all"],
    },
    "shardwright": {
        "runtime": ["shardwright"],
        "zero": [1, 2, 3],
        "reduce_dtype": ["fp32", "bf16"],
        "implementation": [None],
        "reshard_after_forward": ["default"],
        "compile": [False],
    },
}
OF_ENGINE["fsdp2"] = OF_ENGINE["torchtitan-toml"] | {
    "checkpointing": ["none", "full", "selective", "layers:2", "first:2", "save:aten.mm"],
    "float8": [False],
}
# What Megatron-LM's models and their layers may have otherwise; half of it is left out.
OF_MODEL: dict[str, list[Any]] = {
    "norm": ["layernorm"],
    "mlp": ["geglu", "gelu", "squared_relu"],
    "positions": ["none", 8192, 16_384],
    "bias": [True],
    "dropout": [0.1],
    "attention_dropout": [0.1, 0.05],
    "tied_embeddings": [True],
    "qk_norm": [True],
    "mtp_layers": [1, 2],
}
OF_LAYERS: dict[str, list[Any]] = {
    "attention_backend": ["flash", "unfused", "local"],
    "cross_entropy_loss_fusion": ["native", "te"],
    "fp8_format": ["hybrid", "e4m3"],
    "masked_softmax_fusion": [False],
    "bias_activation_fusion": [False],
    "gradient_accumulation_fusion": [False],
    "create_attention_mask_in_dataloader": [False],
    "fp8_param_gather": [True],
    "deterministic_mode": [True],
    "account_for_embedding_in_pipeline_split": [True],
    "account_for_loss_in_pipeline_split": [True],
}
USUAL: dict[str, list[Any]] = {
    "runtime": ["fsdp2"],
    "checkpointing": ["none", "full", "selective", "selective_op"],
    "param_dtype": ["bf16", "bf16", "fp32"],
    "reduce_dtype": ["fp32"],
    "implementation": ["fused", "foreach", "for_loop", None],
    "reshard_after_forward": ["default", True, False],
    "compile": [False, True, "blocks"],
    "offload": ["none", "none", "all"],
}


def jobs(engine: str, count: int) -> Iterator[Job]:
    """So many jobs that an engine runs."""
    draw = Random(engine)
    while count:
        try:
            job = parse_job(_document(draw, engine))
        except InputError:  # degrees that do not divide the model or one another
            continue
        if not cannot(job, engine):
            count -= 1
            yield job


def _document(draw: Random, engine: str) -> dict[str, Any]:
    family, flavor = draw.choice(FAMILIES)
    sizes = FLAVORS[family][flavor]
    plain, divided = (
        engine == "shardwright",
        engine in ("torchtitan", "torchtitan-toml", "megatron"),
    )
    degrees = {
        "data_replicate": draw.choice([1, 1, 2, 4]),
        "data_shard": draw.choice([1, 2, 4, 8]),
        "tensor": 1 if plain else draw.choice([1, 1, 2, 4, 8]),
        "pipeline": draw.choice([1, 1, 2, 4, 8]) if divided else 1,
        "context": draw.choice([1, 1, 2, 4]) if divided or engine == "accelerate" else 1,
        "expert": draw.choice([1, 2, 8]) if divided and "experts" in sizes else 1,
    }
    parallel: dict[str, Any] = dict(degrees)
    if degrees["tensor"] > 1:
        parallel["sequence"] = draw.choice([True, True, False]) if engine != "accelerate" else False
    if degrees["pipeline"] > 1:
        orders = ["1f1b", "interleaved_1f1b"]
        if engine != "megatron":
            orders += ["gpipe", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]
        parallel["schedule"] = draw.choice(orders)
        if parallel["schedule"] in ("interleaved_1f1b", "looped_bfs"):
            parallel["chunks"] = draw.choice([2, 3, 4])
    if degrees["expert"] > 1 and engine == "megatron":
        parallel["routing"] = draw.choice(["even", "capacity"])
        parallel["expert_tensor"] = draw.choice([None, 2])
    parts = 1 if plain else draw.choice([1, 2, 4, 8, 16])
    parallel["microbatches"] = None if plain else parts
    choices = USUAL | OF_ENGINE[engine]
    memory = {name: draw.choice(values) for name, values in choices.items()}
    model = {"kind": "llama"} | sizes
    optimizer = "adamw"
    if engine == "megatron":
        model |= _some(draw, OF_MODEL)
        memory["megatron"] = _some(draw, OF_LAYERS)
        optimizer = draw.choice(["adamw", "adamw", "sgd_momentum", "muon"])
        memory["implementation"] = "foreach" if optimizer == "muon" else "fused"
    return {
        "model": model,
        "cluster": {"compute_device": "cuda"},
        "batch": {"size": parts * draw.choice([1, 2, 3]), "sequence": draw.choice([2048, 8192])},
        "parallel": {key: value for key, value in parallel.items() if value is not None},
        "memory": {key: value for key, value in memory.items() if value is not None},
        "train": {"optimizer": optimizer},
    }


def _some(draw: Random, choices: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: draw.choice(values) for key, values in choices.items() if draw.random() < 0.5}


def read_back(engine: str, text: str, job: Job) -> Job:
    """What our importer makes of it; of Accelerate's beside the ``job``."""
    if engine == "torchtitan":
        return parse_job(torchtitan.job_of_flags(text, None).document)
    if engine == "torchtitan-toml":
        return parse_job(torchtitan.job_of(tomllib.loads(text), None).document)
    if engine == "megatron":
        ranks = job.cluster.world_size
        return parse_job(megatron.job_of(text, ranks).document)
    if engine == "accelerate":
        return parse_job(accelerate.job_of(text, job, None).document)
    return parse_job(tomllib.loads(text))
