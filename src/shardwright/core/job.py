"""A job: the TOML file a person writes. Sizes are per rank unless a name says global."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardwright.core.calibration import Calibration, read_calibration
from shardwright.core.document import read_bytes
from shardwright.core.errors import InputError, expected
from shardwright.core.model import DenseOptimizer, TableSpec
from shardwright.core.planning import PlannerSection
from shardwright.core.strict import convert
from shardwright.core.tables import check_constraints, check_tables, read_tables

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Multiplier = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
HIDDEN = ("TableSpec.fqn", "ClusterSection.measured")  # filled in here, never by a file


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The built-in model and the widths of its layers, or tables alone, perhaps from a file.

    A job that names neither layers nor ``[data]`` nor ``[train]`` is of tables alone. ``ffn_dim``
    is 4 times ``dim`` where it is not given.
    """

    kind: Literal["dlrm", "transformer", "tables"] = "dlrm"
    tables: str = ""
    dense_features: Width = 13
    bottom: tuple[Width, ...] = (64, 16)
    top: tuple[Width, ...] = (64, 1)
    interaction: Literal["dot", "cat"] = "dot"
    layers: Depth = 4
    dim: Width = 128
    heads: Width = 4
    ffn_dim: Width | None = None
    vocab: Width = 256


KEYS_OF_KIND = {
    "dlrm": ("dense_features", "bottom", "top", "interaction"),
    "transformer": ("layers", "dim", "heads", "ffn_dim", "vocab"),
}


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset or a cluster file, and what this job's machine has instead; capacities are per rank.

    ``measured`` is what the file said when the job was read. The bandwidths and multipliers are
    those of TorchRec's topology, in bytes per millisecond.
    """

    preset: str = ""
    file: str = ""
    measured: Calibration | None = None
    world_size: Ranks | None = None
    local_world_size: Ranks | None = None
    pod_size: Ranks | None = None
    compute_device: Literal["cpu", "cuda"] | None = None
    hbm_cap: int | str | None = None
    ddr_cap: int | str | None = None
    ssd_cap: int | str | None = None
    hbm_mem_bw: Bandwidth | None = None
    ddr_mem_bw: Bandwidth | None = None
    ssd_mem_bw: Bandwidth | None = None
    hbm_to_ddr_mem_bw: Bandwidth | None = None
    intra_host_bw: Bandwidth | None = None
    inter_host_bw: Bandwidth | None = None
    bwd_compute_multiplier: Multiplier | None = None
    weighted_feature_bwd_compute_multiplier: Multiplier | None = None


def with_calibration(
    section: ClusterSection, where: str = "job", job_path: Path | None = None
) -> ClusterSection:
    """The section with its file read; a relative path starts at the working directory, else
    beside the job."""
    if section.preset:
        raise InputError(
            expected(f"{where}: cluster", "a file or a preset", "both", "Leave one of the two out.")
        )
    if "\0" in section.file:
        raise InputError(
            expected(f"{where}: cluster.file", "the name of a file", repr(section.file))
        )
    path = Path(section.file)
    if not path.exists() and job_path is not None and (job_path.parent / path).exists():
        path = job_path.parent / path
    return msgspec.structs.replace(section, measured=read_calibration(path))


class BatchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples per rank and step, and tokens per sample."""

    size: Count = 128
    sequence: Count = 1


class DataSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Click logs: a Criteo file, or the synthetic generator that writes one. Or text: any file,
    whose bytes are the tokens; a made-up one where none is named."""

    kind: Literal["criteo", "synthetic", "text"] = "criteo"
    path: str = ""
    test_path: str = ""
    skip_bad_rows: bool = False
    rows: Count = 100_000
    test_rows: Whole = 20_000
    seed: Whole = 0


class TrainSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run. ``timeout`` is how long a rank may keep the others waiting, in seconds.

    Tables learn at ``table_learning_rate``, or like the units where it is not given.
    """

    steps: Count = 100
    optimizer: DenseOptimizer = "sgd"
    learning_rate: Rate = 0.1
    table_learning_rate: Rate | None = None
    seed: Whole = 0
    out: Annotated[str, msgspec.Meta(min_length=1)] = "runs/latest"
    timeout: Seconds = 60.0


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that is asked for; defaults filled in."""

    tables: tuple[TableSpec, ...]
    model: ModelSection = ModelSection()
    cluster: ClusterSection = ClusterSection()
    batch: BatchSection = BatchSection()
    data: DataSection = DataSection()
    planner: PlannerSection = PlannerSection()
    train: TrainSection = TrainSection()


class DataFiles(msgspec.Struct, frozen=True):
    """Where a job's rows are; ``test`` is empty where nothing is held out, and the same file where
    its last part is."""

    train: str
    test: str


def data_files(job: Job) -> DataFiles:
    """The files a run reads: those the job names, or where its synthetic rows are written."""
    data = job.data
    if data.kind == "criteo":
        return DataFiles(data.path, data.test_path)
    folder = Path(job.train.out) / "data"
    if data.kind == "text":
        text = data.path or str(folder / "text.txt")
        return DataFiles(text, text)
    test = data.test_path or str(folder / "test.tsv")
    return DataFiles(data.path or str(folder / "train.tsv"), test if data.test_rows else "")


def read_job(path: Path | str, overrides: Iterable[str] = ()) -> Job:
    """Read a job file; ``overrides`` are ``section.key=value`` texts that win over the file."""
    raw = read_bytes(path, "job", "Name a job in TOML, such as examples/demo.toml.")
    try:
        document = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise InputError(expected(str(path), "a job in TOML", f"'{error}'")) from None
    for override in overrides:
        _override(document, override)
    return parse_job(document, str(path), Path(path))


def parse_job(document: dict[str, Any], where: str = "job", path: Path | None = None) -> Job:
    """Check a decoded job; every error names the key, what was expected and what was found.

    ``path`` is the job's own, for files that it names.
    """
    document = _with_kinds(_with_tables(document, where, path))
    job = convert(document, Job, where, hidden=HIDDEN)
    if job.cluster.file:
        section = with_calibration(job.cluster, where, path)
        job = msgspec.structs.replace(job, cluster=section)
    _refuse_foreign_keys(job.model, where)
    check_tables(job.tables, where, job.model.kind)
    check_constraints(job.planner.constraints, job.tables, where)
    return job


def _with_tables(document: dict[str, Any], where: str, path: Path | None) -> dict[str, Any]:
    """The document with the tables of ``model.tables`` in it, and with the kind of its model."""
    model = document.get("model", {})
    if not isinstance(model, dict):
        return document
    named = model.get("tables")
    if isinstance(named, str) and named:
        if "tables" in document:
            raise InputError(
                expected(f"{where}: model.tables", "a file or [[tables]] in the job", "both")
            )
        document = {**document, "tables": read_tables(named, path)}
    if set(model) <= {"tables"} and not {"data", "train"} & set(document):
        document = {**document, "model": {**model, "kind": "tables"}}
    return document


def _with_kinds(document: dict[str, Any]) -> dict[str, Any]:
    """A transformer has no tables and reads text, unless the job says something else."""
    model, data = document.get("model", {}), document.get("data", {})
    if not (isinstance(model, dict) and model.get("kind") == "transformer"):
        return document
    if isinstance(data, dict):
        document = {**document, "data": {"kind": "text", **data}}
    return {"tables": [], **document}


def _refuse_foreign_keys(model: ModelSection, where: str) -> None:
    """Widths of another kind of model would be ignored without a word."""
    for kind, keys in KEYS_OF_KIND.items():
        for field in msgspec.structs.fields(model) if kind != model.kind else ():
            value = getattr(model, field.name)
            if field.name in keys and value != field.default:
                raise InputError(
                    expected(
                        f"{where}: model.{field.name}",
                        f"no such key for kind '{model.kind}'",
                        _shown(value),
                        f"It belongs to kind '{kind}'.",
                    )
                )


def _shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _override(document: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError(expected("--set", "section.key=value", f"'{text}'"))
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value
    target = document.setdefault(section, {})
    if not isinstance(target, dict):
        raise InputError(
            expected(f"--set {section}", "a section with single keys", "a list of tables")
        )
    target[name] = parsed
