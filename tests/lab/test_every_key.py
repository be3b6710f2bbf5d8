"""No key of a job is ignored: another value changes the plan or is refused with the key's name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.core.checkpoint_section import CheckpointSection
from shardwright.core.data_section import DataSection
from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.job import Job, parse_job
from shardwright.core.memory_section import MemorySection
from shardwright.core.parallel import ParallelSection
from shardwright.core.planning import PlannerSection
from shardwright.core.train_section import TrainSection
from shardwright.lab.recordings import plan
from shardwright.lab.sources import source_of

HERE = Path(__file__).parent
SMALL = {"layers": 2, "dim": 8, "heads": 2, "ffn_dim": 8}
TABLES = [{"name": name, "rows": 40, "dim": 8} for name in "abc"]
BASES: dict[str, dict[str, Any]] = {
    "tables": {"model": {"kind": "tables"}, "tables": TABLES},
    "dlrm": {"model": {"bottom": [4, 8], "top": [2, 1]}, "tables": TABLES},
    "transformer": {"model": {"kind": "transformer", **SMALL}, "batch": {"sequence": 4}},
    "llama": {
        "model": {"kind": "llama", **SMALL},
        "batch": {"sequence": 4},
        "memory": {"param_dtype": "fp32"},
    },
    "python": {"model": {"python": "own:build"}, "memory": {"param_dtype": "fp32"}},
}
SECTIONS = {
    "data": DataSection,
    "train": TrainSection,
    "planner": PlannerSection,
    "parallel": ParallelSection,
    "memory": MemorySection,
    "checkpoint": CheckpointSection,
}
# Another value than the default of every key, and what has to stand beside it.
VALUES: dict[str, Any] = {
    "data.kind": "synthetic",
    "data.python": "own:good",
    "data.label": "clicked",
    "data.dense": ["age"],
    "data.ids": "modulo",
    "data.path": "no_such_file",
    "data.test_path": "no_such_file",
    "data.skip_bad_rows": True,
    "data.rows": 77,
    "data.test_rows": 7,
    "data.test_batch": 7,
    "data.seed": 3,
    "data.days": 7,
    "data.drop_negatives": 0.5,
    "data.cache": "rows",
    "data.zipf": 1.5,
    "data.drift": 0.5,
    "train.steps": 7,
    "train.optimizer": "adagrad",
    "train.learning_rate": 0.5,
    "train.table_learning_rate": 0.5,
    "train.table_optimizer": "rowwise_adagrad",
    "train.seed": 3,
    "train.out": "runs/other",
    "train.timeout": 7.0,
    "train.not_finite": "skip",
    "train.metrics_every": 3,
    "train.log": ["wandb"],
    "train.schedule": {"warmup_steps": 2},
    "train.overlap": "rows",
    "train.table_folder": "elsewhere",
    "train.forward": "parallel",
    "planner.constants": "torchrec-1.9",
    "planner.search": "proposers",
    "planner.options": "torchrec",
    "planner.time_limit": 1e-9,
    "planner.estimator": {"count_ephemeral": True},
    "planner.reservation": {"kind": "absolute", "nbytes": 9},
    "planner.proposers": [{"kind": "uniform"}],
    "planner.partitioner": {"kind": "memory_balanced"},
    "planner.constraints": {"apart": [["a", "b"]]},
    "planner.units": {"root": "shard"},
    "planner.dense": {"prefetch": 1},
    "planner.tables": {"a": "row_wise"},
    "planner.kinds": ["hash"],
    "planner.dedup": True,
    "parallel.data_replicate": 2,
    "parallel.data_shard": 3,
    "parallel.tensor": 2,
    "parallel.sequence": True,
    "parallel.pipeline": 2,
    "parallel.context": 2,
    "parallel.expert": 2,
    "parallel.schedule": "gpipe",
    "parallel.microbatches": 2,
    "parallel.chunks": 2,
    "parallel.routing": "capacity",
    "parallel.capacity_factor": 2.0,
    "parallel.skew": 0.5,
    "parallel.expert_load": "p50",
    "parallel.parallelize_plan": {"layers.*": "colwise"},
    "memory.checkpointing": "full",
    "memory.lowering": "cuda",
    "memory.runtime": "fsdp2",
    "memory.param_dtype": "fp16",
    "memory.reduce_dtype": "bf16",
    "memory.implementation": "foreach",
    "memory.reshard_after_forward": False,
    "memory.zero": 1,
    "memory.compile": True,
    "memory.float8": True,
    "memory.offload": "states",
    "memory.allocator": "expandable_segments:True",
    "memory.loss": "chunked",
    "checkpoint.every": "20 steps",
    "checkpoint.keep": 3,
    "checkpoint.folder": "saved",
    "checkpoint.overlap": False,
    "checkpoint.grace": 7.0,
    "checkpoint.restarts": 1,
}


# What a plan does not depend on, for it acts when a job is run: what is read, and how it learns.
RUN = (
    *("steps", "learning_rate", "table_learning_rate", "seed", "out", "timeout"),
    *("not_finite", "table_folder", "metrics_every", "log", "schedule", "forward"),
)
AT_RUN_TIME = {f"train.{key}" for key in RUN} | {
    f"{name}.{key}"
    for name, section in (("data", DataSection), ("checkpoint", CheckpointSection))
    for key in section.__struct_fields__
}
# What is a limit, or a choice that a small job has no use for.
OF_LARGER_JOBS = {
    *("planner.time_limit", "planner.options", "planner.dense", "planner.dedup", "train.overlap"),
    "parallel.data_replicate",
}
# What an estimate of memory shows, not a plan.
IN_AN_ESTIMATE = {"memory.allocator", "parallel.parallelize_plan"}
# Keys that a run of the kind does not read are no excuse: they are refused.
UNREAD = {
    "tables": ("train.table_optimizer", "planner.tables", "data.label"),
    "dlrm": ("data.label", "data.dense", "data.ids"),
    "transformer": (
        "train.table_learning_rate",
        "train.overlap",
        "data.ids",
        "data.rows",
        "data.test_rows",
        "data.test_batch",
        "data.python",
    ),
    "llama": ("train.table_learning_rate", "data.rows", "data.skip_bad_rows", "data.test_path"),
    "python": (
        "train.table_learning_rate",
        "train.overlap",
        "data.rows",
        "data.test_rows",
        "data.path",
    ),
}


def job_of(kind: str, key: str = "") -> Job:
    section, _, name = key.partition(".")
    document = {"cluster": {"preset": "local", "world_size": 2, "ddr_cap": "8 MiB"}, **BASES[kind]}
    if key:
        document[section] = {**document.get(section, {}), name: VALUES[key]}
    return parse_job(document)


def outcome(job: Job) -> Any:
    """What a plan says, but for the job in it; what a run refuses first is refused."""
    if job.model.kind in ("transformer", "llama", "python"):
        source_of(job).check(job)
    made = msgspec.to_builtins(plan(job))
    for name in ("job", "fingerprint"):
        del made[name]
    del made["search"]["wall_seconds"]
    return made


@pytest.fixture(autouse=True)
def _beside_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def test_every_key_has_another_value() -> None:
    keys = {
        f"{s}.{f.name}" for s, section in SECTIONS.items() for f in msgspec.structs.fields(section)
    }
    assert set(VALUES) == keys


def changed(kind: str, key: str) -> tuple[Any, str]:
    """What a plan with another value of the key says, and what is said where it is refused."""
    try:
        return outcome(job_of(kind, key)), ""
    except (InputError, NoPlanError) as error:
        return None, str(error)


def refusal(kind: str, key: str) -> str:
    """What is said to another value of the key; empty where it is taken."""
    return changed(kind, key)[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", BASES)
def test_another_value_changes_the_plan_or_is_refused(kind: str) -> None:
    usual = outcome(job_of(kind))
    known = OF_LARGER_JOBS | IN_AN_ESTIMATE | (set() if kind == "tables" else AT_RUN_TIME)
    ignored, unnamed = [], {}
    for key in sorted(set(VALUES) - known):
        found, said = changed(kind, key)
        if found == usual:
            ignored.append(key)
        names = (key, f": {key.partition('.')[0]}: ", key.partition(".")[2])
        if said and not any(name in said for name in names):
            unnamed[key] = said
    assert ignored == []
    assert unnamed == {}


@pytest.mark.parametrize(("kind", "key"), [(k, key) for k, keys in UNREAD.items() for key in keys])
def test_a_key_that_no_run_of_the_kind_reads_is_refused_by_name(kind: str, key: str) -> None:
    said = refusal(kind, key)
    assert key in said


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *itertools.product(["dlrm", "transformer", "python"], ["sequence"]),
        *itertools.product(
            ["dlrm", "transformer"], ["schedule", "chunks", "routing", "expert_load"]
        ),
    ],
)
def test_what_divides_a_llama_is_refused_of_other_kinds(kind: str, key: str) -> None:
    assert f"parallel.{key}: expected no such key for kind '{kind}'" in refusal(
        kind, f"parallel.{key}"
    )
