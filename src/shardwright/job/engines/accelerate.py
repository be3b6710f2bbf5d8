"""A layout as the YAML of Hugging Face's Accelerate, for FSDP2, and such a file beside a job."""

# The file says how a script's model is divided and cast, and nothing of the model, its batches or
# its optimizer, which the script has. So it is read beside a job that says these.

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import UNSET

from shardwright.core.errors import InputError, expected
from shardwright.job.engines.layout import (
    ANY,
    HEAD,
    PORT,
    Engine,
    EngineLayout,
    layout_of,
)
from shardwright.job.engines.own import document_of, given
from shardwright.job.imported import Document, Imported, Keys
from shardwright.job.job import Job, memory_of, parallel_of

ALL = ""  # keys outside of a section

SIZES = {
    "data_replicate": "parallelism_config_dp_replicate_size",
    "data_shard": "parallelism_config_dp_shard_size",
    "tensor": "parallelism_config_tp_size",
    "context": "parallelism_config_cp_size",
}
# "no" computes in the dtypes of the parameters.
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
SWITCHES = {
    "fsdp_activation_checkpointing": ("checkpointing", {False: "none", True: "full"}),
    "fsdp_offload_params": ("offload", {False: "none", True: "all"}),
}
HARMLESS = re.compile(
    "--("
    "compute_environment|debug|downcast_bf16|enable_cpu_affinity|gpu_ids|machine_rank|num_machines|"
    "main_(process_ip|process_port|training_function)|rdzv_backend|same_network|tpu_.*|use_cpu"
    ")|"
    r"fsdp_config\.fsdp_(auto_wrap_policy|transformer_layer_cls_to_wrap|cpu_ram_efficient_loading|"
    "state_dict_type|sync_module_states|use_orig_params)"
)


def _more(layout: EngineLayout) -> Iterator[str]:
    degrees, memory = layout.degrees, layout.memory
    if memory.param_dtype != memory.reduce_dtype and memory.param_dtype is not UNSET:
        wanted = f"param_dtype {memory.param_dtype}, in which Accelerate sums too"
        yield expected("memory.reduce_dtype", wanted, str(memory.reduce_dtype))
    if layout.job.parallel is not UNSET and layout.job.parallel.parallelize_plan:
        yield expected("parallel.parallelize_plan", "none, for a model has its own", "one")
    if degrees.data_replicate > 1 and degrees.data_shard == 1:
        yield expected("parallel.data_shard", "at least 2 beside data_replicate, else DDP", "1")


def _written(layout: EngineLayout) -> str:
    degrees, memory = layout.degrees, layout.memory
    precision = next(
        (name for name, ours in PRECISIONS.items() if ours == memory.param_dtype), "no"
    )
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": memory.reshard_after_forward is not False,
        **{
            theirs: layout.said[f"memory.{ours}"] == values[True]
            for theirs, (ours, values) in SWITCHES.items()
        },
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    sizes = {theirs: getattr(degrees, ours) for ours, theirs in SIZES.items()}
    parts = f"{degrees.microbatches} microbatch{'es' * (degrees.microbatches > 1)}"
    each = f"{layout.samples} x {layout.job.batch.sequence}"
    head = [f"# Of the script: the model, and per rank and step {parts} of {each}."]
    if layout.said["memory.checkpointing"] == "full":
        head.append(
            "# Parts of a block are checkpointed one by one, which keeps more than a block."
        )
    plain = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": precision,
        "num_machines": layout.hosts,
        "num_processes": degrees.world_size,
    }
    if layout.hosts > 1:
        head.append("# machine_rank: 0 on HOST, and on every other host a number of its own.")
        plain |= {"machine_rank": 0, "main_process_ip": HEAD, "main_process_port": PORT}
    sections = {"fsdp_config": fsdp, "parallelism_config": sizes}
    lines = [*head, *(f"{key}: {_yaml(value)}" for key, value in plain.items())]
    for name, keys in sections.items():
        lines += [f"{name}:", *(f"  {key}: {_yaml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'no'" if value == "no" else str(value)  # else a false one


ACCELERATE = Engine(
    "Accelerate",
    "1.15.0.dev0, 16cb6eb, 2026-07-24",
    {
        **{f"parallel.{key}": (ANY,) for key in SIZES},
        "parallel.microbatches": (ANY,),
        "memory.runtime": ("fsdp2",),
        "memory.checkpointing": ("none", "full"),
        "memory.offload": ("none", "all"),
        "memory.param_dtype": ("bf16", "fp16", "fp32", UNSET),
        "memory.reduce_dtype": ("bf16", "fp16", "fp32", UNSET),
        # Its root has the head, and keeps it until backward, as our default does.
        "memory.reshard_after_forward": ("default", False),
        # The script's own:
        "memory.implementation": (ANY,),
        "memory.loss": ("gathered", "chunked"),
        "memory.fp32_logits": (ANY,),
        "train.optimizer": (ANY,),
        "model": (ANY,),
        "model.kind": ("llama", "python"),
    },
    _more,
    _written,
    {
        "memory.reduce_dtype": lambda job: memory_of(job).param_dtype,
        "parallel.sequence": lambda job: False if parallel_of(job).tensor > 1 else UNSET,
    },
)


def job_of(text: str, job: Job, world_size: int | None) -> Imported:
    """``job`` as the YAML in ``text`` divides it, on ``world_size`` ranks or as many as it says.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    sections = {name: keys for name, keys in parsed(text).items() if isinstance(keys, Mapping)}
    plain = {name: value for name, value in parsed(text).items() if name not in sections}
    keys = Keys({ALL: plain, **sections}, HARMLESS)
    return keys.imported(lambda: _document(keys, job, world_size))


def _document(keys: Keys, job: Job, world_size: int | None) -> Document:
    keys.one_of(ALL, "distributed_type", {"FSDP": ""}, "none")
    if keys.number("fsdp_config", "fsdp_version", default=1) != 2:
        keys.refuse("fsdp_config", "fsdp_version", "2", "1, its default")
    if keys.number("parallelism_config", "parallelism_config_sp_size", default=1) > 1:
        keys.refuse("parallelism_config", "parallelism_config_sp_size", "1")
    document = document_of(job)
    ranks = world_size or keys.number(ALL, "num_processes", default=job.cluster.world_size or 1)
    document["parallel"] = _degrees(keys, ranks)
    document["parallel"]["microbatches"] = layout_of(job).degrees.microbatches
    document.setdefault("cluster", {})["world_size"] = ranks
    document["memory"] = given(memory_of(job)) | _memory(keys, job)
    return document


def _degrees(keys: Keys, ranks: int) -> dict[str, Any]:
    sizes = {
        ours: keys.number("parallelism_config", theirs, default=1) for ours, theirs in SIZES.items()
    }
    if "parallelism_config" not in keys.config:
        return {"data_shard": ranks}
    if math.prod(sizes.values()) != ranks:
        found = " x ".join(map(str, sizes.values()))
        wanted = f"sizes that multiply to the {ranks} ranks"
        raise InputError(expected("parallelism_config", wanted, found))
    return sizes | ({"sequence": False} if sizes["tensor"] > 1 else {})


def _memory(keys: Keys, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {"runtime": "fsdp2"}
    for theirs, (ours, values) in SWITCHES.items():
        value = keys.value("fsdp_config", theirs, False)
        if value not in values:
            keys.refuse("fsdp_config", theirs, "true or false")
        found[ours] = values.get(value)
    reshards = keys.value("fsdp_config", "fsdp_reshard_after_forward", True)
    if not isinstance(reshards, bool):
        keys.refuse("fsdp_config", "fsdp_reshard_after_forward", "true or false")
    found["reshard_after_forward"] = "default" if reshards else False
    keys.config[ALL].setdefault("mixed_precision", "no")
    if keys.config[ALL]["mixed_precision"] is False:
        keys.config[ALL]["mixed_precision"] = "no"
    dtype = keys.one_of(ALL, "mixed_precision", PRECISIONS, "no")
    if dtype == "fp32" and job.model.traits.is_function:
        return found
    return found | {"param_dtype": dtype, "reduce_dtype": dtype}


def parsed(text: str) -> dict[str, Any]:
    """A YAML file of plain values and of sections of them, which is all that Accelerate writes."""
    found: dict[str, Any] = {}
    target = found
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not plain.strip() or plain == "---":
            continue
        key = re.fullmatch(r"(\s*)([\w-]+):(?:\s+(.*))?", plain)
        if key is None or (key[1] and target is found and not _open(found)):
            wanted = "a key and its plain value, or a section of them"
            raise InputError(expected(f"line {number}", wanted, f"'{line.strip()}'"))
        if not key[1]:
            target = found
        elif target is found:
            target = found[[*found][-1]] = {}
        target[key[2]] = _value(key[3])
    return found


def _open(found: Mapping[str, Any]) -> bool:
    """Whether the last key has no value yet."""
    return bool(found) and found[[*found][-1]] is None


def _value(text: str | None) -> Any:
    plain = (text or "").strip()
    if plain[:1] in "'\"" and plain[1:]:
        return plain[1:-1]
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if plain.lower() in ("", "null", "~"):
        return None
    if plain.lower() in words:
        return words[plain.lower()]
    return int(plain) if re.fullmatch(r"-?\d+", plain) else plain
