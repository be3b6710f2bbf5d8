"""A DeepSpeed configuration in JSON beside a job, as a job whose memory is estimated."""

# The file says how a script's model is shared and cast, how batches are cut and what the optimizer
# is, and nothing of the model or its tokens. "auto" is what transformers' trainer fills in from its
# own arguments: the job says it here. What a stage of ZeRO keeps is that of one of our runtimes,
# and where DeepSpeed keeps something else beside it, it is said among what is assumed.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwright.core.errors import InputError, expected
from shardwright.job.engines.own import document_of, given
from shardwright.job.imported import Document, Imported, Keys
from shardwright.job.job import Job, memory_of, parallel_of

ALL = ""  # keys outside of a section
ZERO = "zero_optimization"
STATES, PARAMETERS = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
AUTO = "auto"
BATCH, MICRO, TIMES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}
# DeepSpeed's Adam decouples the decay of weights unless adam_w_mode is false.
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "adagrad": "adagrad",
    "muon": "muon",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
FUSED = ("adam", "adamw")  # by a kernel of DeepSpeed's
# What changes memory or time and no estimate follows, by section and key, and what it brings.
REFUSED = {
    (ALL, "sequence_parallel_size"): "tokens that ranks share as Ulysses does",
    (ALL, "sparse_attention"): "attention of some tokens alone",
    (ALL, "curriculum_learning"): "sequences that grow",
    (ALL, "data_efficiency"): "sequences that grow, and tokens that are left out",
    (ALL, "progressive_layer_drop"): "layers that are left out",
    (ALL, "elasticity"): "batches that ranks decide",
    (ALL, "hybrid_engine"): "inference between the steps",
    (ALL, "eigenvalue"): "eigenvalues of layers",
    (ALL, "amp"): "Apex",
    (ALL, "torch_autocast"): "autocast over parameters in fp32",
    (ALL, "graph_harvesting"): "graphs of CUDA",
    (ALL, "expert_parallel"): "experts that AutoEP shares",
    ("compile", "deepcompile"): "DeepCompile",
    ("data_types", "grad_accum_dtype"): "gradients that add up in another dtype",
    ("tensor_parallel", "autotp_size"): "tensor ranks of AutoTP",
    ("bf16", "bf16_master_weights_and_grads"): "weights to update in bf16",
    ("bf16", "bf16_optimizer_states"): "states in bf16",
    ("fp16", "fp16_master_weights_and_grads"): "weights to update in fp16",
    (ZERO, "zero_quantized_weights"): "parameters that travel in 8 bits",
    (ZERO, "zero_quantized_gradients"): "gradients that travel in 4 bits",
    (ZERO, "zero_quantized_nontrainable_weights"): "frozen parameters in 8 bits",
    (ZERO, "zenflow"): "ZenFlow",
    (STATES, "super_offload"): "SuperOffload",
    ("activation_checkpointing", "partition_activations"): "activations shared by tensor ranks",
    ("activation_checkpointing", "cpu_checkpointing"): "activations on the host",
    ("activation_checkpointing", "contiguous_memory_optimization"): "a buffer of activations",
}
UNSWITCHED = ("sparse_attention", "zenflow")  # sections that are on by being there
DECIDED = ("zero", "reshard_after_forward", "fsdp2", "megatron")  # of a job's memory, by a stage
OFF = (None, False, 0, 1, "none", AUTO)  # one of these, {} or { enabled = false }: none
HARMLESS = re.compile(
    "steps_per_print|wall_clock_breakdown|dump_state|memory_breakdown|gradient_clipping|"
    "prescale_gradients|gradient_predivide_factor|gradient_allreduce_op|sparse_gradients|"
    "zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|dataloader_drop_last|"
    "managed_gradient_accumulation|seq_parallel_communication_data_type|vocabulary_size|log_level|"
    "use_data_before_expert_parallelism|disable_allgather|seed|scheduler|flops_profiler|comms_logger|comms_config|tensorboard|wandb|"
    "csv_monitor|comet|monitor_config|checkpoint|nebula|autotuning|aio|communication_backend|"
    r"scheduler\..*|autotuning\..*|optimizer\.params.*|optimizer\.legacy_fusion|"
    "activation_checkpointing.*|"
    r"(fp16|bf16)\.(auto_cast|loss_scale|initial_scale_power|loss_scale_window|hysteresis|"
    r"consecutive_hysteresis|min_loss_scale|fused_mode|immediate_grad_update|check_(grad_)?overflow)|"
    r"zero_optimization\.(load_from_fp32_weights|elastic_checkpoint|ignore_unused_parameters|"
    r"stage3_gather_(16bit|fp16)_weights_on_model_save|legacy_stage1|log_trace_cache_warnings|"
    r"grad_hooks|save_muon_momentum_buffer_in_memory|cpu_offload_use_pin_memory|"
    r"enable_sanity_checks|pipeline_loading_checkpoint|override_module_apply|round_robin_gradients|"
    r"offload_(optimizer|param)\.(pin_memory|nvme_path|buffer_count|buffer_size|max_in_cpu|"
    r"fast_init|pipeline.*|cpuadam_cores_perc))"
)
"""Keys that change no memory and no time of a step, as far as these are worked out."""


class Way(NamedTuple):
    """What runs as a stage of ZeRO does, and what DeepSpeed keeps beside it."""

    memory: Mapping[str, Any]
    beside: str


WAYS = {
    0: Way({"runtime": "ddp"}, ""),
    1: Way(
        {"runtime": "shardwright", "zero": 1},
        "no whole gradient from a single backward until the step, which stage 1 keeps",
    ),
    2: Way({"runtime": "shardwright", "zero": 2}, ""),
    3: Way(
        {"runtime": "fsdp2"},
        "shares of parameters in fp32 alone, as FSDP2 has them, not in the dtype of compute beside",
    ),
}
BUCKETS = "units of a block each in place of DeepSpeed's buckets"
WHOLE = Way(  # of stage 0 in half precision, whose parameters have copies in fp32
    {"runtime": "shardwright", "zero": 1}, ""
)


def job_of(config: Mapping[str, Any], job: Job, world_size: int | None) -> Imported:
    """``job`` as a decoded configuration has it run, on ``world_size`` ranks or as many as its
    cluster has.

    InputError: a value that is none; UnsupportedError: one that no estimate follows.
    """
    keys = Keys(dict(_sections(config)), HARMLESS, dashes="")
    for name in ("bf16", "bfloat16", "fp16", "optimizer", ZERO, STATES, PARAMETERS):
        section, _, key = name.rpartition(".")
        if keys.value(section, key, None) not in (None, False):
            keys.refuse(section, key, "a section")
    for (section, key), brings in REFUSED.items():
        if not _is_off(keys, section, key):
            keys.refuse(section, key, f"none, for no estimate follows {brings}")
    return keys.imported(lambda: _document(keys, job, world_size))


def _sections(config: Mapping[str, Any], name: str = ALL) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every section by its path, with what is no section in it."""
    yield name, {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sections(value, f"{name}.{key}" if name else key)


def _is_off(keys: Keys, section: str, key: str) -> bool:
    """Whether a key says nothing, or its section that it is not on."""
    inner, found = keys.spot(section, key), keys.value(section, key, None)
    if keys.config.get(inner):
        found = keys.value(inner, "enabled", key in UNSWITCHED)
    return found is not True and found in OFF


def _document(keys: Keys, job: Job, world_size: int | None) -> Document:
    document = document_of(job)
    ranks = world_size or job.cluster.world_size
    if ranks is None:
        remedy = "Say how many ranks there are with -n."
        keys.wrong(expected("cluster.world_size", "the ranks of the job", "none", remedy))
    section = parallel_of(job)
    others = section.tensor * section.pipeline * section.context
    if (ranks or 1) % others:
        raise InputError(expected("-n", f"a multiple of {others} ranks", str(ranks)))
    data = (ranks or 1) // others
    dtype = _dtype(keys, job)
    document["cluster"] = given(job.cluster) | {"world_size": ranks}
    memory, degrees = _zero(keys, data, dtype)
    kept = {key: value for key, value in given(memory_of(job)).items() if key not in DECIDED}
    document["memory"] = kept | memory
    if dtype == "fp32" and job.model.traits.is_function:  # whose parameters say it
        del document["memory"]["param_dtype"], document["memory"]["reduce_dtype"]
    document["parallel"] = given(section) | degrees
    _batch(keys, document, job, data)
    document["train"] = given(job.train) | _optimizer(keys, document)
    return document


def _dtype(keys: Keys, job: Job) -> str:
    """What is computed in; fp32 where neither of the two is on."""
    usual = memory_of(job).param_dtype or "fp32"
    on: list[str] = []
    # "bfloat16" is what earlier versions called it.
    for name in ("bf16", "bfloat16", "fp16"):
        found = keys.value(name, "enabled", False)
        if found == AUTO:
            keys.assume(f"{name}.enabled {str(usual == DTYPES[name]).lower()}, as the job computes")
            found = usual == DTYPES[name]
        if not isinstance(found, bool):
            keys.refuse(name, "enabled", "true or false")
        elif found:
            on.append(DTYPES[name])
    if len({*on}) > 1:
        keys.refuse("fp16", "enabled", "false beside bf16")
    return on[0] if on else "fp32"


def _zero(keys: Keys, data: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``[memory]`` of a stage on so many data ranks, and the degrees of these."""
    stage = keys.value(ZERO, "stage", 0)
    if type(stage) is not int or stage not in WAYS:
        keys.refuse(ZERO, "stage", "0, 1, 2 or 3", "0")
        stage = 0
    way = WHOLE if stage == 0 and dtype != "fp32" else WAYS[stage]
    memory = {**way.memory, "param_dtype": dtype, "reduce_dtype": dtype}
    named = keys.value(ALL, "communication_data_type", None)
    if named is not None:
        memory["reduce_dtype"] = keys.one_of(ALL, "communication_data_type", DTYPES, "none")
    shards = _shared(keys, data, stage)
    degrees = {"data_replicate": data // shards, "data_shard": shards}
    if way is WHOLE:
        degrees = {"data_replicate": data, "data_shard": 1}
    hpz = _size(keys, "zero_hpz_partition_size", data)
    if hpz > 1 and stage == 3 and hpz < data:
        # Parameters have a second copy inside a host; gradients and states are cut over all.
        memory |= {"runtime": "shardwright", "zero": [2, 3]}
        degrees = {"data_replicate": data // hpz, "data_shard": hpz}
    memory["offload"] = _offload(keys, stage)
    if memory["offload"] == "states" and "zero" in memory:
        wanted = "none, or offload_param too, beside zero_hpz_partition_size"
        keys.refuse(STATES, "device", wanted, "cpu")
    beside = way.beside if memory["runtime"] == way.memory["runtime"] else ""
    for what in filter(None, (BUCKETS if stage else "", beside)):
        keys.assume(what)
    return memory, degrees


def _shared(keys: Keys, data: int, stage: int) -> int:
    """Ranks that share each copy: all, but for MiCS."""
    mics = _size(keys, "mics_shard_size", data)
    return mics if mics > 1 and stage == 3 else data


def _size(keys: Keys, key: str, data: int) -> int:
    """The size of a group of ranks; 1 where there is none."""
    found = keys.value(ZERO, key, 1)
    if found in (-1, 0):
        return 1
    size = keys.number(ZERO, key, default=1)
    if data % size:
        keys.wrong(expected(f"{ZERO}.{key}", f"a divisor of the {data} data ranks", str(size)))
        return 1
    return size


def _offload(keys: Keys, stage: int) -> str:
    """What lies on the host: nothing, states, or all."""
    old = {STATES: "cpu_offload", PARAMETERS: "cpu_offload_param"}
    on = []
    for section, deprecated in old.items():
        # Its documentation says "cpu" where a section names no device; its code has "none".
        usual = "cpu" if keys.value(ZERO, deprecated, False) else "none"
        device = keys.value(section, "device", usual)
        if section in keys.config and "device" not in keys.config[section]:
            keys.assume(f"{section}.device {usual}, for it names none")
        if device not in ("none", "cpu", None):
            keys.refuse(
                section, "device", "none or cpu, for no estimate has anything on NVMe", usual
            )
        if device == "cpu":
            on.append(section)
    if keys.decimal(STATES, "ratio", 1.0) != 1:
        keys.refuse(STATES, "ratio", "1, all of the updates on the host")
    if PARAMETERS in on and stage != 3:
        wanted = "none, for stage 3 alone has parameters on the host"
        keys.refuse(PARAMETERS, "device", wanted, "cpu")
    if STATES in on and stage == 0:
        keys.refuse(STATES, "device", "none at stage 0, which shares no states", "cpu")
    if PARAMETERS in on and STATES not in on:
        keys.refuse(PARAMETERS, "device", "none without offload_optimizer", "cpu")
    if not on:
        return "none"
    # Where a stage leaves parameters whole, they are all that ours then has on the device.
    return "all" if PARAMETERS in on or stage != 3 else "states"


def _optimizer(keys: Keys, document: Document) -> dict[str, Any]:
    """The optimizer, and its kernel in the job's memory; the job's where the script makes it."""
    named = keys.value("optimizer", "type", None)
    if named is None or named == AUTO:
        keys.assume("the optimizer of the job, for the file names none")
        return {}
    params = "optimizer.params"
    lower = str(named).lower()
    if lower not in OPTIMIZERS:
        keys.refuse("optimizer", "type", " or ".join(OPTIMIZERS))
        return {}
    found = OPTIMIZERS[lower]
    if lower == "adam" and keys.value(params, "adam_w_mode", True) is False:
        found = "adam"
    if found == "sgd" and keys.value(params, "momentum", 0) not in (0, AUTO):
        found = "sgd_momentum"
    own = lower in FUSED and not keys.value(params, "torch_adam", False)
    # A plan of ours has its kernels, which are fused, too, and none follows microbatches.
    planned = document["memory"]["runtime"] == "shardwright"
    if own and not (planned and "microbatches" not in document["parallel"]):
        document["memory"]["implementation"] = "fused"
    return {"optimizer": found}


def _batch(keys: Keys, document: Document, job: Job, data: int) -> None:
    """Samples of a rank, and the backwards that they are run in: of the three sizes two say the
    third."""
    in_all, micro, times = (
        None if keys.value(ALL, key, None) in (None, AUTO) else keys.number(ALL, key, default=1)
        for key in (BATCH, MICRO, TIMES)
    )
    said = parallel_of(job).microbatches or 1
    if times is None and (in_all is None or micro is None):
        times = 1
        if keys.value(ALL, TIMES, None) == AUTO:
            times = said
            keys.assume(f"{TIMES} {times}, as the job has it")
    if micro is None and in_all is None:
        micro = max(1, job.batch.size // said)
        keys.assume(f"{MICRO} {micro}, as the job has it")
    if micro is None:
        micro = (in_all or 0) // (data * (times or 1))
    if times is None:
        times = (in_all or 0) // (data * micro)
    if in_all is not None and in_all != micro * times * data:
        wanted = f"{MICRO} x {TIMES} x {data} data ranks"
        keys.wrong(expected(BATCH, wanted, f"{in_all} and {micro} x {times} x {data}"))
    document["batch"] = given(job.batch) | {"size": micro * times}
    document["parallel"].pop("microbatches", None)
    if times > 1 or parallel_of(job).pipeline > 1:
        document["parallel"]["microbatches"] = times
