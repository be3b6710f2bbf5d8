"""A job: the TOML file a person writes. Sizes are per rank unless a name says global."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardwright.core.document import read_bytes
from shardwright.core.errors import InputError, expected
from shardwright.core.model import DenseOptimizer, TableSpec
from shardwright.core.planning import PlannerSection
from shardwright.core.tables import check_constraints, check_tables, read_tables

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Multiplier = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The built-in model and the widths of its layers, or tables alone, perhaps from a file.

    A job that names neither layers nor ``[data]`` nor ``[train]`` is of tables alone.
    """

    kind: Literal["dlrm", "tables"] = "dlrm"
    tables: str = ""
    dense_features: Width = 13
    bottom: tuple[Width, ...] = (64, 16)
    top: tuple[Width, ...] = (64, 1)
    interaction: Literal["dot", "cat"] = "dot"


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset, and what this job's machine has instead; capacities are per rank.

    The bandwidths and multipliers are those of TorchRec's topology, in bytes per millisecond.
    """

    preset: str = ""
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


class BatchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples per rank and step."""

    size: Count = 128
    sequence: Count = 1


class DataSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Click logs: a Criteo file, or the synthetic generator that writes one."""

    kind: Literal["criteo", "synthetic"] = "criteo"
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
    """Where a job's rows are; ``test`` is empty where nothing is held out."""

    train: str
    test: str


def data_files(job: Job) -> DataFiles:
    """The files a run reads: those the job names, or where its synthetic rows are written."""
    data = job.data
    if data.kind == "criteo":
        return DataFiles(data.path, data.test_path)
    folder = Path(job.train.out) / "data"
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
    document = _with_tables(document, where, path)
    _refuse_unknown_keys(document, Job, where, "")
    try:
        job = msgspec.convert(document, Job)
    except msgspec.ValidationError as error:
        raise InputError(_explain(str(error), document, where)) from None
    check_tables(job.tables, where, identifiers=job.model.kind == "dlrm")
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


def _refuse_unknown_keys(value: Any, kind: Any, where: str, path: str) -> None:
    """Walk the document beside its type and name the first key that does not exist."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not isinstance(value, dict):
            return
        fields = _fields(kind)
        for key, inner in value.items():
            spot = f"{path}.{key}" if path else key
            if key not in fields or (kind is TableSpec and key == "fqn"):
                known = sorted(set(fields) - {"fqn"})
                near = [name for name in known if name.startswith(key)]
                near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
                raise InputError(
                    f"{where}: unknown key '{spot}'. Did you mean '{near[0] if near else ''}'? "
                    f"Known here: {', '.join(known)}."
                )
            _refuse_unknown_keys(inner, fields[key], where, spot)
    elif typing.get_origin(kind) is types.UnionType:  # a section that may be left out
        for inner in typing.get_args(kind):
            _refuse_unknown_keys(value, inner, where, path)
    elif typing.get_origin(kind) is tuple and isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_unknown_keys(inner, typing.get_args(kind)[0], where, f"{path}[{index}]")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The fields of a struct by name, with their types."""
    return typing.get_type_hints(kind)


def _explain(message: str, document: dict[str, Any], where: str) -> str:
    """Turn ``Expected `int` >= 1 - at `$.tables[0].rows``` into our form, with what was found."""
    text, _, place = message.partition(" - at `$")
    keys = [k for k in re.split(r"[.\[\]`]+", place) if k]
    found: Any = document
    kind: Any = Job
    for key in keys:
        kind = _inner(kind, key)
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return f"{where}: {place.strip('`.') or 'job'}: {text.replace('`', '')}."
    spot = place.strip("`.") or "job"
    shown = repr(found) if len(repr(found)) < 60 else type(found).__name__
    if text.startswith("Object missing required field"):
        inside = f"{spot}." if keys else ""
        return expected(f"{where}: {inside}{text.split('`')[1]}", "a value", "none")
    wanted = text.replace("`", "").removeprefix("Expected ")
    if text.startswith("Invalid enum value"):
        wanted = f"one of {', '.join(dict.fromkeys(_choices(kind)))}"
    if ", got" in wanted:
        wanted = wanted.partition(", got")[0]
    return expected(f"{where}: {spot}", wanted, shown)


def _inner(kind: Any, key: str) -> Any:
    """The type of a field of a struct, or of the elements of a tuple."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _fields(kind).get(key)
    arguments = typing.get_args(kind)
    return arguments[0] if arguments else None


def _choices(kind: Any) -> list[str]:
    """The texts that a type allows, wherever they stand in it."""
    if typing.get_origin(kind) is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    return [choice for inner in typing.get_args(kind) for choice in _choices(inner)]
