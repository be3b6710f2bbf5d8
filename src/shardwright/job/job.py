"""A job: the TOML file a person writes. Sizes are per rank unless a name says global."""

# A job is checked in one order, for each check rests on those before: names of keys and types
# (convert), what would be read at all (refuse_unread), the model's shape, then what keys have to
# have in common. An error that is found later than it could be would name a consequence.

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.cluster import MAX_PLANNED
from shardwright.core.document import convert, parse_toml
from shardwright.core.errors import InputError, check_type, expected, there_are
from shardwright.core.kinds import EmbeddingsSection, members_of
from shardwright.core.model import TableSpec
from shardwright.core.quantities import parse_bytes
from shardwright.job.asked import document_of, said_dtype
from shardwright.job.cluster import (
    ClusterSection,
    check_units,
    device_of,
    in_one_word,
    with_calibration,
)
from shardwright.job.memory import (
    ComputeDtype,
    MemorySection,
    check_memory,
    check_policy,
)
from shardwright.job.model import (
    ModelSection,
    beside,
    check_defined,
    check_function,
    completed,
    traits_of,
    with_kind,
)
from shardwright.job.parallel import (
    Degrees,
    ParallelSection,
    check_divides,
    check_parallel,
    degrees,
    fixed_world,
)
from shardwright.job.planner import PlannerSection
from shardwright.job.rules import refuse_unread
from shardwright.job.tables import check_constraints, check_tables, read_tables, with_kinds
from shardwright.job.train import (
    CheckpointSection,
    Count,
    DataSection,
    Overlap,
    TrainSection,
    check_schedule,
    every,
)

MAX_TABLES = 100_000
A_JOB = "read_job reads a file, parse_job a mapping."  # what to do without one
# Filled in here, never by a file.
HIDDEN = ("TableSpec.fqn", "ClusterSection.measured", "ModelSection.shape")


class BatchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples per rank and step, and tokens per sample.

    Attributes:
        size: samples per rank and step
        sequence: tokens per sample of a transformer or a llama; 1 for dlrm
    """

    size: Count = 128
    sequence: Count = 1


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that is asked for; defaults filled in. A section that is ``UNSET`` is not written:
    documents of jobs without it stay as they were.

    Attributes:
        model: without it, and without ``[data]`` and ``[train]``, a job is of tables alone
        tables: one entry per table; Criteo's logs need 26
        embeddings: the kind of every table with more than ``above`` rows that names none; also all
            keys of kinds
        study: what [the study of kinds](#comparing-kinds) compares; commands do not look at it.
            Beside it neither ``[embeddings]`` nor ``planner.kinds``
        cluster: what the ranks run on
        batch: what a rank has in a step
        data: what a run reads
        planner: how plans are made; [planner.md](planner.md) explains it
        parallel: by what the model and the batch of an estimate of memory without a plan are
            divided; without it data ranks share everything. Plans follow ``data_replicate`` and
            ``data_shard``. The degrees multiply to ``world_size``, all but ``expert``
        memory: how the steps of an estimate of memory without a plan are run. Of a llama and a
            module of your own a plan and a run follow ``checkpointing``, ``param_dtype``,
            ``reduce_dtype``, ``zero``, ``offload`` and ``lowering``, have ``allocator`` for what
            ``shardwright memory`` adds to the plan, and refuse the rest but for its defaults. Of
            dlrm, transformer and tables only ``param_dtype = "fp32"`` and the other defaults are
            not refused, of a transformer also ``checkpointing``, and of both models ``zero`` and
            ``offload``
        train: the run
        checkpoint: with this section, also an empty one, a run is
            [saved](runtime.md#runs-that-last) as it goes on, at its end, and where a signal ends it
    """

    tables: tuple[TableSpec, ...]
    model: ModelSection = ModelSection()
    cluster: ClusterSection = ClusterSection()
    batch: BatchSection = BatchSection()
    data: DataSection = DataSection()
    planner: PlannerSection = PlannerSection()
    train: TrainSection = TrainSection()
    parallel: ParallelSection | UnsetType = UNSET
    memory: MemorySection | UnsetType = UNSET
    checkpoint: CheckpointSection | UnsetType = UNSET
    embeddings: EmbeddingsSection | UnsetType = UNSET
    study: dict[str, Any] | UnsetType = UNSET  # read by benchmarks/study alone


def parallel_of(job: Job) -> ParallelSection:
    """How a job's model is divided; among data ranks alone where it does not say."""
    return ParallelSection() if job.parallel is UNSET else job.parallel


def degrees_of(job: Job, world_size: int, where: str = "job") -> Degrees:
    """The degrees of a job on as many ranks as its cluster has; InputError where they do not
    multiply to them, or do not divide the model."""
    found = degrees(parallel_of(job), world_size, job.batch.size, where)
    if job.model.shape is not UNSET:
        shape, tokens = job.model.shape, job.batch.sequence
        # Megatron-LM may leave a stage to embedding or head alone.
        settings = memory_of(job).megatron_settings
        ends = sum(settings.ends) if settings else 0
        check_divides(parallel_of(job), found, shape, tokens, where, ends)
    return found


def memory_of(job: Job) -> MemorySection:
    """How a job's steps are run, with the dtypes of its model where it names none.

    A model of a configuration computes in what that says; a llama of given widths in bf16 on
    accelerators and in fp32 on a CPU. Gradients are summed in fp32. A module of the user's own has
    dtypes of its own, which stay UNSET, and beside a ``param_dtype`` sums in fp32, too. Other
    models are fp32.
    """
    # Filled in on reading and not in the job: a plan embeds its job, and one that names no dtype
    # must keep the bytes, and the fingerprint, that it had before there was such a key.
    section = MemorySection() if job.memory is UNSET else job.memory
    param, reduce = section.param_dtype, section.reduce_dtype
    param = param or _said_dtype(job)
    reduce = reduce or ("fp32" if param else UNSET)
    return msgspec.structs.replace(section.bare, param_dtype=param, reduce_dtype=reduce)


def _said_dtype(job: Job) -> ComputeDtype | UnsetType:
    if job.model.traits.is_function:
        return said_dtype(job.model.of_transformers) or UNSET
    if job.model.shape is UNSET:
        return "fp32"
    said = job.model.shape.dtype
    return said or ("fp32" if device_of(job.cluster) == "cpu" else "bf16")


def table_optimizer(job: Job) -> str:
    """How a job's tables are updated that name no optimizer. Empty where it does not say so and no
    update of rows is like that of its units."""
    if job.train.table_optimizer is not UNSET:
        return job.train.table_optimizer
    if job.train.optimizer == "sgd":
        return "sgd"
    return "" if job.model.traits.is_function else "rowwise_adagrad"


CHOSEN_FROM = ("none", "selective", "full")  # where a job says nothing of checkpointing


def overlap_of(job: Job, ranks: int) -> Overlap:
    """What of the tables travels while one of ``ranks`` computes."""
    return job.train.overlap or "none" if ranks > 1 else "none"


def checkpointing_of(job: Job) -> tuple[str, ...]:
    """The checkpointing policies that a plan of the job may have, none first, which is tried first;
    the others as the job lists them."""
    if not job.model.traits.has_blocks:
        return ("none",)
    open_, given = job.planner.dense.checkpointing, memory_of(job).checkpointing
    if open_ is not UNSET:
        return tuple(sorted(dict.fromkeys(open_), key=lambda name: name != "none"))
    return CHOSEN_FROM if given is UNSET else (given,)


class DataFiles(msgspec.Struct, frozen=True):
    """Where a job's rows are; ``test`` is empty where nothing is held out, and the same file where
    its last part is."""

    train: str
    test: str


def data_files(job: Job) -> DataFiles:
    """The files a run reads: those the job names, or in the run folder those that are made up."""
    data = job.data
    if data.kind in ("criteo", "columns", "python"):
        return DataFiles(data.path, data.test_path)
    folder = Path(job.train.out) / "data"
    if data.kind == "text":
        text = data.path or str(folder / "text.txt")
        return DataFiles(text, text)
    if data.days is not UNSET:
        return DataFiles(str(folder / "train.tsv"), "")
    test = str(folder / "test.tsv") if data.test_rows else ""
    return DataFiles(str(folder / "train.tsv"), test)


def run_in(job: Job, folder: Path) -> Job:
    """The job with ``folder`` as its run folder: what is made up lies there."""
    train = msgspec.structs.replace(job.train, out=str(folder))
    return msgspec.structs.replace(job, train=train)


def checkpoint_folder(job: Job, folder: Path) -> Path:
    """Where a run in ``folder`` is saved."""
    named = "" if job.checkpoint is UNSET else job.checkpoint.folder
    return Path(named) if named else folder / "checkpoints"


def table_folder(job: Job, folder: Path) -> Path:
    """Where a run in ``folder`` has its tables on disk."""
    named = job.train.table_folder
    return Path(named) if named else folder / "tables"


def named_files(job: Job, path: Path | None = None) -> tuple[Path, ...]:
    """The files that a job names, of which none is ever written; ``path`` is the job's own."""
    model = job.model
    config = model.hf_config if isinstance(model.hf_config, str) else ""
    named = [beside(name, path) for name in (job.cluster.file, model.tables, config) if name]
    return (*named, *(Path(name) for name in (job.data.path, job.data.test_path) if name))


def asked(model: Path | str, overrides: Iterable[str] = (), on: str = "") -> dict[str, Any]:
    """The document of a job file, or of what stands for one (:func:`document_of`): with ``on``, a
    machine in one word (:func:`shardwright.job.cluster.in_one_word`), in place of its cluster, and
    ``overrides``, ``section.key=value`` texts that win over the file."""
    document = document_of(model)
    if on:
        document["cluster"] = in_one_word(on)
    for override in overrides:
        set_key(document, override)
    return document


def read_job(path: Path | str, overrides: Iterable[str] = (), on: str = "") -> Job:
    """The job that is :func:`asked` for."""
    return job_in(asked(path, overrides, on), path)


def job_in(document: dict[str, Any], path: Path | str) -> Job:
    """Check the document of a job; errors say ``path``, which is where it comes from."""
    check_units(document.get("cluster"), str(path))
    job = parse_job(document, str(path), Path(path))
    if isinstance(job.data.python, str):  # which only a run imports
        check_defined(job.data.python, f"{path}: data.python")
    return job


def parse_job(document: dict[str, Any], where: str = "job", path: Path | None = None) -> Job:
    """Check a decoded job; every error names the key, what was expected and what was found.
    ``path`` is the job's own, for files that it names."""
    check_type(document, dict, where, "read_job reads a file, parse_job what is read of one.")
    document = _with_kinds(_with_tables(document, where, path), where)
    document = _with_bytes(document, where)
    tables = document.get("tables", ())
    if isinstance(tables, list) and len(tables) > MAX_TABLES:
        most = f"at most {MAX_TABLES:,}"
        raise InputError(expected(f"{where}: tables", most, f"{len(tables):,}"))
    job = convert({"tables": [], **document}, Job, where, hidden=HIDDEN)
    # Last: "no tables" would be said of every job in which a section is misspelt, and is then no
    # help.
    if "tables" not in document:  # after what is wrong in the sections that there are
        wanted = "[[tables]], or a [model] that needs none"
        raise InputError(
            expected(where, wanted, "neither", "A job to begin with: shardwright init.")
        )
    if job.cluster.file:
        section = with_calibration(job.cluster, where, path)
        job = msgspec.structs.replace(job, cluster=section)
    if job.data.python is not UNSET:
        check_function(job.data.python, f"{where}: data.python")
    # Before widths are completed: a width of another kind of model is refused as such, and not by
    # what it would make of the shape.
    refuse_unread(job, where)
    job = msgspec.structs.replace(job, model=completed(job.model, where, path))
    _check_positions(job, where)
    check_schedule(job.train, where)
    check_tables(job.tables, where, job.model.kind)
    # Constraints name what is placed: of a table of another kind its parts, which are known only
    # now.
    tables = with_kinds(job.tables, job.embeddings, job.planner, where, job.model.kind)
    job = msgspec.structs.replace(job, tables=tables)
    members = tuple(member for table in tables for member in members_of(table))
    check_constraints(job.planner.constraints, members, where)
    if job.memory is not UNSET:
        check_memory(job.memory, where)
    _check_checkpointing(job, where)
    if job.checkpoint is not UNSET:
        every(job.checkpoint.every, f"{where}: checkpoint.every")
    return _with_world(job, where)


def _check_positions(job: Job, where: str) -> None:
    """Refuse more tokens than a decoder has learned positions for."""
    rows = 0 if job.model.shape is UNSET else job.model.shape.learned_positions
    if 0 < rows < job.batch.sequence:
        wanted = f"at most the {rows} positions of the model"
        raise InputError(expected(f"{where}: batch.sequence", wanted, str(job.batch.sequence)))


def _check_checkpointing(job: Job, where: str) -> None:
    """Refuse policies for a plan to choose from that there are not, or beside one that is given."""
    open_ = job.planner.dense.checkpointing
    if open_ is UNSET:
        return
    key, given = f"{where}: planner.dense.checkpointing", memory_of(job).checkpointing
    for name in open_:
        check_policy(name, key)
    wanted = "at least one policy"
    if given is not UNSET and open_ != (given,):
        wanted = f"none beside memory.checkpointing {given!r}"
    elif open_:
        return
    raise InputError(expected(key, wanted, repr(list(open_))))


def _with_world(job: Job, where: str) -> Job:
    """The job with the number of ranks that its degrees multiply to, where it names none."""
    world = job.cluster.world_size
    if job.parallel is UNSET:
        if world is not None and world > MAX_PLANNED and not job.model.traits.is_estimated:
            raise InputError(
                expected(f"{where}: cluster.world_size", f"int <= {MAX_PLANNED}", str(world))
            )
        return job
    check_parallel(job.parallel, job.model.traits.is_function, where)
    # Only where the file names no number: a file that names one has to agree with its degrees,
    # which degrees_of sees to.
    world = fixed_world(job.parallel) if world is None else world
    if world is None:
        return job
    degrees_of(job, world, where)
    cluster = msgspec.structs.replace(job.cluster, world_size=world)
    return msgspec.structs.replace(job, cluster=cluster)


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
    model = with_kind(model, bool({"data", "train"} & set(document)), where, path)
    return {**document, "model": model} if model else document


def _with_kinds(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The document with what the kind of its model implies, unless the job says something else.

    A language model has no tables and reads text, a model of the user's own has batches of its own;
    both learn with AdamW, but for the small built-in one, which computes in fp32 as a DLRM does.
    """
    memory = document.get("memory")
    if isinstance(memory, dict) and "optimizer" in memory:
        named = f"{where}: memory.optimizer", "no such key", repr(memory["optimizer"])
        raise InputError(expected(*named, "Name the optimizer as train.optimizer."))
    traits = traits_of(document.get("model", {}))
    # An unknown kind is left to convert, which lists those that there are.
    if traits is None:
        return document
    if not traits.lists_tables:
        data = "python" if traits.is_function else "text"
        document = _with_default({"tables": [], **document}, "data", "kind", data)
    if traits.is_estimated:
        document = _with_default(document, "train", "optimizer", "adamw")
    return document


def _with_bytes(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The document with the sizes of its reservation as numbers, where they are texts."""
    planner = document.get("planner")
    section = planner.get("reservation") if isinstance(planner, dict) else None
    if not isinstance(section, dict):
        return document
    sizes = {
        key: parse_bytes(section[key], f"{where}: planner.reservation.{key}")
        for key in ("nbytes", "dense_bytes")
        if isinstance(section.get(key), str)
    }
    return {**document, "planner": {**document["planner"], "reservation": {**section, **sizes}}}


def _with_default(document: dict[str, Any], section: str, key: str, value: str) -> dict[str, Any]:
    """The document with a key where a section, perhaps none, does not have it."""
    found = document.get(section, {})
    if not isinstance(found, dict):
        return document
    return {**document, section: {key: value, **found}}


def set_key(document: dict[str, Any], text: str) -> None:
    """Set the key of a ``text`` such as ``section.key=value`` at any depth of a job's document: a
    step on the way is a section, or the name of an entry of a list such as ``tables.C3``.

    InputError where there is no such place, or ``text`` is no such assignment.
    """
    check_type(text, str, "override", "Write 'section.key=value'.")
    key, equals, value = text.partition("=")
    # Steps as TOML splits them and not by str.split: a name of a table may have dots of its own.
    *way, name = _steps(key)
    if not (equals and way):
        raise InputError(expected("--set", "section.key=value", f"'{text}'"))
    try:
        # A value that is no TOML is taken as a text, for a shell takes quotes away from --set
        # train.out=DIR.
        parsed = parse_toml(f"value = {value}", "--set", "a value")["value"]
    except InputError:
        parsed = value
    model = document.get("model", {})
    if way[0] == "tables" and "tables" not in document and isinstance(model, dict):
        wanted = f"[[tables]] in the job, not in {model['tables']}" if "tables" in model else ""
        raise InputError(expected(f"--set {key.strip()}", wanted or "a job with tables", "none"))
    target: Any = document
    for depth, step in enumerate(way):
        target = _inside(target, step, ".".join(way[: depth + 1]))
    if isinstance(target, list):
        named = expected(f"--set {key.strip()}", "the name of an entry first", f"'{name}'")
        raise InputError(f"{named} Write {'.'.join(way)}.NAME.{name}=VALUE.")
    if not isinstance(target, dict):
        raise InputError(expected(f"--set {'.'.join(way)}", "a section", repr(target)))
    target[name] = parsed


def _steps(key: str) -> list[str]:
    """The steps of a dotted key as TOML writes it, quotes around steps with dots of their own."""
    try:
        found: Any = parse_toml(f"{key} = 0", "--set", "a key")
    except InputError:
        return [""]
    steps = []
    while isinstance(found, dict) and len(found) == 1:
        (step,) = found
        steps.append(step)
        found = found[step]
    return steps or [""]


def _inside(target: Any, step: str, spot: str) -> Any:
    """The section ``step`` of a section, made where there is none, or a list's entry of a name."""
    if isinstance(target, dict):
        return target.setdefault(step, {})
    if isinstance(target, list):
        entries = {str(e["name"]): e for e in target if isinstance(e, dict) and "name" in e}
        if step in entries:
            return entries[step]
        wanted, near = "the name of an entry", there_are(step, entries)
        raise InputError(expected(f"--set {spot}", wanted, f"'{step}'", near))
    raise InputError(expected(f"--set {spot}", "a section", repr(target)))
