"""No key of a job is ignored: another value changes the plan or is refused with the key's name,
or is of a run or an estimate alone, which is said here. None is lost where a job is written."""

from __future__ import annotations

import ast
import contextlib
import itertools
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from json_schema import wrong

import shardwright
from shardwright.core.document import encode_document, encode_toml
from shardwright.core.errors import InputError, NoPlanError
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.memory import MemorySection
from shardwright.job.parallel import ParallelSection
from shardwright.job.planner import PlannerSection
from shardwright.job.schema import job_schema
from shardwright.job.train import CheckpointSection, DataSection, TrainSection
from shardwright.train.sources import source_of

HERE = Path(__file__).parent
SMALL = {"layers": 2, "dim": 8, "heads": 2, "ffn_dim": 8}
TABLES = [{"name": name, "rows": 40, "dim": 8} for name in "abc"]
BASES: dict[str, dict[str, Any]] = {
    "tables": {"model": {"kind": "tables"}, "tables": TABLES},
    "dlrm": {
        "model": {"bottom": [4, 8], "top": [2, 1]},
        "tables": TABLES,
        "data": {"kind": "synthetic", "rows": 200, "test_rows": 50},
    },
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
    "data.kind": "python",
    "data.python": "own:good",
    "data.label": "clicked",
    "data.dense": ["age"],
    "data.ids": "modulo",
    "data.logarithm": ["I1"],
    "data.scale": {"I1": [3.0, 2.0]},
    "data.missing": ["NULL"],
    "data.header": ["label", "I1"],
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
    "parallel.expert_tensor": 2,
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
    "memory.fp32_logits": True,
    "memory.attention": "eager",
    "memory.rms_norm": "composite",
    "memory.fsdp2": {"reduce_scatter_max_input_buffers": 2},
    "memory.megatron": {"attention_backend": "flash"},
    "checkpoint.every": "20 steps",
    "checkpoint.keep": 3,
    "checkpoint.folder": "saved",
    "checkpoint.overlap": False,
    "checkpoint.grace": 7.0,
    "checkpoint.restarts": 1,
}


# What a plan does not depend on, for it acts when a job is run: what it says of a run, and a file
# that reads it there.
IN_A_RUN = {
    "train.steps": ("how long it is", "train/training.py"),
    "train.learning_rate": ("how far an update goes", "runtime/apply.py"),
    "train.table_learning_rate": ("how far an update of a table goes", "runtime/apply.py"),
    "train.seed": ("the first weights", "train/training.py"),
    "train.out": ("where its files lie", "cli/train.py"),
    "train.timeout": ("how long a rank may keep others waiting", "train/session.py"),
    "train.not_finite": ("what becomes of a bad step", "train/training.py"),
    "train.metrics_every": ("when it says how good clicks are foreseen", "train/sources/clicks.py"),
    "train.log": ("where its progress goes", "train/writers.py"),
    "train.schedule": ("how rates change", "train/resuming.py"),
    "train.table_folder": ("where tables on disk lie", "job/job.py"),
    "train.forward": ("whether ranks are threads", "job/train.py"),
    "data.python": ("the batches of one's own", "train/sources/python.py"),
    "data.seed": ("the batches of one's own", "train/sources/python.py"),
    "data.skip_bad_rows": ("whether a bad row ends it", "train/sources/clicks.py"),
    "data.test_batch": ("held-out rows at a time", "train/sources/clicks.py"),
    "checkpoint.every": ("when it is saved", "runtime/saves.py"),
    "checkpoint.keep": ("how many are kept", "runtime/saves.py"),
    "checkpoint.folder": ("where", "job/job.py"),
    "checkpoint.overlap": ("whether ranks train on meanwhile", "runtime/saves.py"),
    "checkpoint.grace": ("how long it may take after a signal", "train/session.py"),
    "checkpoint.restarts": ("how often it goes on by itself", "train/session.py"),
}
OF_RUNS = {
    *(f"train.{name}" for name in ("steps", "learning_rate", "seed", "out", "timeout")),
    *("train.not_finite", "train.log", "train.schedule", "train.table_folder"),
    *(f"checkpoint.{name}" for name in CheckpointSection.__struct_fields__),
}
OF_SMALL_JOBS = {"planner.options", "parallel.data_replicate"}  # which are as fast without it
# Keys of which another value neither changes the plan nor is refused, by kind.
TAKEN = {
    "tables": {"planner.dedup"},  # is by itself where it is faster
    "dlrm": {
        *OF_RUNS,
        *OF_SMALL_JOBS,
        *("train.table_learning_rate", "train.metrics_every", "train.forward"),
        *("data.skip_bad_rows", "data.test_batch", "planner.dedup"),
    },
    "transformer": {*OF_RUNS, *OF_SMALL_JOBS, "planner.dense"},  # fetches ahead by itself
    "llama": {*OF_RUNS, *OF_SMALL_JOBS, "planner.dense", "memory.allocator"},  # of an estimate
    "python": {
        *OF_RUNS,
        *OF_SMALL_JOBS,
        *("data.python", "data.seed"),
        *("memory.allocator", "parallel.parallelize_plan"),  # of an estimate
    },
}
# Refusals that name a section, or what a key's value has to make with others.
UNNAMED = {
    "job: parallel: expected no such section for kind 'tables', got one.": "parallel.",
    "job: cluster.world_size: expected 3, which is data_shard 3 x ": "parallel.data_shard",
}
# Keys that a run of the kind does not read are no excuse: they are refused.
UNREAD = {
    "tables": ("train.table_optimizer", "planner.tables", "data.label"),
    "dlrm": tuple(
        f"data.{key}" for key in ("label", "dense", "ids", "logarithm", "scale", "missing")
    ),
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


def document_of(kind: str, key: str = "") -> dict[str, Any]:
    section, _, name = key.partition(".")
    document = {"cluster": {"preset": "local", "world_size": 2, "ddr_cap": "2 GiB"}, **BASES[kind]}
    if key:
        own = (kind, key) == ("python", "data.kind")
        document[section] = {**document.get(section, {}), name: "text" if own else VALUES[key]}
    return document


def job_of(kind: str, key: str = "") -> Job:
    return parse_job(document_of(kind, key))


# What stands in sections whose keys are not all listed here.
BESIDE: dict[str, Any] = {
    "batch": {"size": 8, "sequence": 4},
    "cluster": {
        "compute_device": "cuda",
        "world_size": 6,
        "hbm_cap": "3 GiB",
        "inter_host_bw": 1e16,
    },
    "embeddings": {"kind": "hash", "above": 30},
    "study": {"kinds": [{"kind": "hash"}, {"kind": "qr", "operation": "add"}], "seeds": 3},
}


WRITTEN = BASES | {
    "columns": {**BASES["dlrm"], "data": {"kind": "columns", "path": "x.csv"}},
    "days": {
        **BASES["dlrm"],
        "data": {"kind": "synthetic", "days": 3, "rows": 200},
        "planner": {"kinds": ["hash"]},
        "embeddings": {"above": 30},
    },
    "stages": {
        **BASES["llama"],
        "model": {"kind": "llama", **SMALL, "layers": 4, "experts": 3},
        "parallel": {
            "pipeline": 2,
            "expert": 3,
            "routing": "skewed",
            "schedule": "interleaved_1f1b",
            "chunks": 2,
        },
        "memory": {"param_dtype": "fp32", "fp32_logits": True},
    },
    "capacity": {
        **BASES["llama"],
        "model": {"kind": "llama", **SMALL, "experts": 2},
        "parallel": {"expert": 2, "routing": "capacity"},
    },
    "megatron": {
        **BASES["llama"],
        "model": {"kind": "llama", **SMALL, "experts": 3},
        "parallel": {"tensor": 2, "expert": 3},
        "memory": {"runtime": "megatron"},
    },
}


def longest_job(kind: str) -> dict[str, Any]:
    """A document with every section and key that a job of the kind takes beside the others."""
    found = {**WRITTEN[kind]}
    every = list(BESIDE.items())
    every += [(s, {name: VALUES[key]}) for key in VALUES for s, _, name in [key.partition(".")]]
    for section, keys in every:
        tried = {**found, section: {**keys, **found.get(section, {})}}
        with contextlib.suppress(InputError):
            parse_job(tried)
            found = tried
    return found


def outcome(job: Job) -> Any:
    """What a plan says, but for the job in it; what a run refuses first is refused."""
    if job.model.kind != "tables":
        source_of(job).check()
    made = msgspec.to_builtins(plan(job))
    for name in ("job", "fingerprint"):
        del made[name]
    del made["search"]["wall_seconds"]
    return made


def made_up(job: Job, folder: Path) -> list[Any]:
    """The files of rows that a run of ``job`` makes up in its folder, and how many it reads."""
    folder.mkdir()
    job = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, out=str(folder)))
    with contextlib.chdir(folder):  # where a cache is made, too
        source_of(job).prepare()
        read = source_of(job).samples()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [*((path.name, path.read_bytes()) for path in files), read]


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
def test_another_value_changes_the_plan_or_is_refused(kind: str, tmp_path: Path) -> None:
    usual, rows = outcome(job_of(kind)), None
    ignored, unnamed = set(), {}
    for key in VALUES:
        found, said = changed(kind, key)
        if said and not any(said.startswith(u) and key.startswith(k) for u, k in UNNAMED.items()):
            unnamed |= {} if key in said else {key: said}
        elif not said and found == usual:
            if key.startswith("data.") and kind != "python":
                rows = rows or made_up(job_of(kind), tmp_path / "usual")
                if made_up(job_of(kind, key), tmp_path / key) != rows:
                    continue
            ignored.add(key)
    assert unnamed == {}
    assert ignored == TAKEN[kind]


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_job_that_is_written_is_read_as_it_was(kind: str) -> None:
    document = longest_job(kind)
    job = parse_job(document)
    assert parse_job(tomllib.loads(encode_toml(document))) == job
    assert msgspec.json.decode(encode_document(job), type=Job) == job  # as a plan has it


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_schema_takes_every_job_that_is_read(kind: str) -> None:
    schema = job_schema()
    assert list(wrong(longest_job(kind), schema, schema)) == []
    named = {"kind": kind, **BASES[kind]["model"]} if kind in BASES else {}
    for key in VALUES if named else ():
        document = document_of(kind, key) | {"model": named}
        with contextlib.suppress(InputError):
            parse_job(document)
            assert list(wrong(document, schema, schema)) == [], key


def test_there_is_a_job_to_write_with_every_key() -> None:
    said = {
        f"{section}.{key}"
        for document in map(longest_job, WRITTEN)
        for section, given in document.items()
        if section != "tables"
        for key in given
    }
    assert set(VALUES) - said == set()


@pytest.mark.parametrize("key", IN_A_RUN)
def test_what_changes_no_plan_is_read_in_a_run(key: str) -> None:
    _, reader = IN_A_RUN[key]
    tree = ast.parse((Path(shardwright.__file__).parent / reader).read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert key.partition(".")[2] in read


def test_every_key_of_a_run_is_one_that_changes_no_plan() -> None:
    of_plans = {*OF_SMALL_JOBS, "planner.dedup", "planner.dense"}
    of_estimates = {"memory.allocator", "parallel.parallelize_plan"}
    assert set().union(*TAKEN.values()) - of_plans - of_estimates == set(IN_A_RUN)


@pytest.mark.parametrize(("kind", "key"), [(k, key) for k, keys in UNREAD.items() for key in keys])
def test_a_key_that_no_run_of_the_kind_reads_is_refused_by_name(kind: str, key: str) -> None:
    said = refusal(kind, key)
    assert key in said


# A key beside what does not read it, and what stands beside it, in the words of the refusal.
BESIDE_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "parallel.expert_load": (
        "routing = 'capacity'",
        {"expert": 2, "routing": "capacity", "expert_load": "p50"},
    ),
    "parallel.routing": ("parallel.expert", {"routing": "skewed"}),
    "parallel.schedule": ("a pipeline", {"schedule": "gpipe"}),
    "data.rows": ("'criteo'", {"kind": "criteo", "rows": 7}),
    "data.test_rows": ("data.days", {"kind": "synthetic", "days": 3, "test_rows": 7}),
    "data.seed": ("data.drop_negatives", {"kind": "columns", "path": "log", "seed": 7}),
    "planner.reservation.percentage": ("'none'", {"percentage": 0.3}),
    "planner.reservation.nbytes": ("'percentage'", {"kind": "percentage", "nbytes": 7}),
    "planner.reservation.dense_bytes": ("'absolute'", {"kind": "absolute", "dense_bytes": 7}),
    "planner.reservation.multiplier": ("'inference'", {"kind": "inference", "multiplier": 3}),
    "planner.partitioner.sort_by": (
        "'memory_balanced'",
        {"kind": "memory_balanced", "sort_by": "perf"},
    ),
    "planner.partitioner.tolerance": ("'greedy'", {"tolerance": 0.5}),
    "planner.proposers": ("threshold beside kind 'grid'", {"kind": "grid", "threshold": 3}),
    "batch.sequence": ("'tables'", {"sequence": 4}),
    "model.arguments": ("model.python", {"kind": "tables", "arguments": {"a": 1}}),
    "model.python": ("'none'", {"kind": "tables", "python": "own:build"}),
    "planner.estimator.communication": ("'llama'", {"communication": ["fp16", "fp16"]}),
}
KIND_OF = {"parallel": "llama", "data": "dlrm", "planner.estimator": "llama"}


@pytest.mark.parametrize("key", BESIDE_OTHERS)
def test_a_key_beside_what_does_not_read_it_is_refused(key: str) -> None:
    words, given = BESIDE_OTHERS[key]
    section, _, name = key.rpartition(".")
    document: dict[str, Any] = {**BASES[KIND_OF.get(section, "tables")]}
    inner = section.partition(".")[2] or name
    if inner in ("partitioner", "proposers"):
        given = {"search": "proposers", inner: [given] if inner == "proposers" else given}
    elif section.startswith("planner."):
        given = {inner: given}
    document[section.partition(".")[0]] = given
    with pytest.raises(InputError) as caught:
        parse_job(document)
    assert f"job: {key}: expected " in str(caught.value)
    assert words in str(caught.value)


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
