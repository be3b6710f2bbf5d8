"""The model that a job describes: its tables with everything filled in, and its recording."""

# What a job asks for and what a plan follows are compared here, key by key with the defaults of the
# sections. A new key of [memory] or [parallel] is refused for planned jobs until somebody adds it
# to HONOURED: a plan that leaves out what was asked for would look like one that does it.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from shardwright.core.cluster import MAX_PLANNED
from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import kind_of, members_of
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.optimizers import TRAINED, UPDATED, trained
from shardwright.core.recording import RecordedTable, Recording
from shardwright.job.asked import config_document, config_name, positions_of
from shardwright.job.job import Job, memory_of, parallel_of, table_optimizer
from shardwright.job.memory import MemorySection
from shardwright.job.parallel import ParallelSection

# Of [memory] and [parallel], what a plan follows or what changes nothing in it.
HONOURED = (
    "checkpointing",
    "lowering",
    "param_dtype",
    "reduce_dtype",
    "zero",
    "offload",
    "allocator",
    "data_replicate",
    "data_shard",
    "parallelize_plan",  # which parallel.tensor reads, that no plan follows
)
HALVES = ("fp16", "bf16")  # of weights of tables, whose states and updates are fp32
# A DLRM's interaction takes one row of each feature and sample, in fp32. By key of a table: what to
# do where it asks for something else.
PLAIN = {
    "pooled": "It has no place for a sequence: pool it by sum or mean, or use your own module.",
    "num_poolings": "Name as many features of the table: each has a bag of its own.",
    "batch_sizes": "Every sample has a bag of each feature, which may be empty.",
    "output_dtype": "What rows travel in is planner.estimator.communication.",
}


def model_of(job: Job, recording: Recording | None = None) -> ModelSpec:
    """The model of ``job`` with the recording of its step; tables alone have none."""
    check_model(job)
    size = job.planner.dense.bucket_size
    return ModelSpec(
        job.model.kind,
        tables_of(job, recording),
        recording,
        job.train.optimizer,
        size if isinstance(size, int) else 0,
    )


def tables_of(job: Job, recording: Recording | None = None) -> tuple[TableSpec, ...]:
    """The tables of a job, or those in the recording of its module, by the names of their
    parameters, with every optimizer filled in."""
    # A module of the user's own says what its tables are only once it has run, so they come from
    # the recording. Those of a DLRM stand in the job, which is known before.
    if recording is not None and recording.tables:
        return tuple(_found(job, table) for table in recording.tables)
    if not job.model.traits.has_step:
        return tuple(
            msgspec.structs.replace(table, fqn=table.name, optimizer=table.optimizer or "none")
            for table in placed_tables(job)
        )
    usual = table_optimizer(job) or None
    return tuple(
        msgspec.structs.replace(
            table,
            fqn=f"tables.{table.name}.weight",
            optimizer=table.optimizer or usual,
            # rows of halves are asked for as fp32, which others are anyway
            output_dtype="fp32" if table.dtype in HALVES else table.output_dtype,
        )
        for table in placed_tables(job)
    )


def early_tables(job: Job, model: ModelSpec) -> tuple[str, ...]:
    """Modules of tables whose lookups may begin with the forward: they are asked for what it is
    given, which a DLRM's are where every table is one of rows."""
    if not job.model.traits.reads_clicks:
        return (model.recording.early or ()) if model.recording else ()
    return model.step.lookups if all(kind_of(table) == "full" for table in job.tables) else ()


def placed_tables(job: Job) -> tuple[TableSpec, ...]:
    """The tables that are placed: a job's, or what those of other kinds are made of."""
    # Whether rows of parts come back one by one or pooled: it decides their bytes on the wire, so
    # the plan, the model and the reader of logs all ask the same function.
    bags = reads_bags(job) if job.model.traits.has_step else any(tables_of_bags(job))
    return tuple(member for table in job.tables for member in members_of(table, bags=bags))


def key_of(job: Job, name: str, field: str) -> str:
    """The key of a job for ``field`` of a table that is placed: of a part, that of its table."""
    owners = (t.name for t in job.tables if any(part.name == name for part in members_of(t)))
    return f"tables.{next(owners, name)}.{field}"


def rows_dtype(job: Job, table: TableSpec) -> str:
    """What a model is given a table's rows in: of a module of one's own what its units compute in,
    or what the embedding was made in."""
    return (step_dtypes(job)[0] or table.dtype) if job.model.traits.is_estimated else "fp32"


def _found(job: Job, table: RecordedTable) -> TableSpec:
    """An embedding of the user's own: its ids are those of a step, and its rows come back one by
    one, for bags are pooled where they are used. A table of a collection has its bags."""
    # "dense" keeps an embedding in a unit and is no sharding type.
    forced = (job.planner.tables or {}).get(table.name)
    found = TableSpec(
        table.name,
        table.rows,
        table.dim,
        fqn=table.fqn,
        optimizer=table_optimizer(job) or None,
        dtype=table.dtype,
        output_dtype="fp32" if table.dtype in HALVES else None,  # as rows travel
        # An embedding of the user's own gives rows, whatever the module does with them: only of a
        # collection is it known that they are pooled.
        pooled=False,
        batch_sizes=(table.ids,),
        sharding_types=None if forced is None or forced == "dense" else (forced,),
    )
    of = table.collected
    if not of:
        return found
    return msgspec.structs.replace(
        found,
        pooled=of.pooling != "none",
        pooling_factors=of.lengths,
        batch_sizes=(of.bags,) * len(of.features),
        module_weighted=of.weighted,
        features=of.features,
        pooling_type="mean" if of.pooling == "mean" else UNSET,
    )


def reads_bags(job: Job) -> bool:
    """Whether the tables of a DLRM are given bags, feature by feature, and not one id each."""
    return job.data.kind == "columns" or any(tables_of_bags(job))


def tables_of_bags(job: Job) -> Iterator[str]:
    """Names of tables that one unweighted id for each sample and the first table's dim are not
    enough for."""
    for table in job.tables:
        # Anything else than one plain id a sample needs offsets or weights beside the ids, and rows
        # of different widths are no single [B, F, D].
        if table.pooling_factors != (1.0,) or table.weighted or table.dim != job.tables[0].dim:
            yield table.name


def step_dtypes(job: Job) -> tuple[str, str]:
    """What units compute in and what gradients are summed in; empty where each tensor keeps its
    own."""
    if not job.model.traits.is_estimated:
        return "", ""
    section = memory_of(job)
    return section.param_dtype or "", section.reduce_dtype or ""


def check_model(job: Job) -> None:
    """InputError where the widths of a built-in model do not go together, or where no run has the
    optimizer."""
    trained(job.train.optimizer)
    if job.model.traits.reads_text and job.model.shape is UNSET and job.model.dim % job.model.heads:
        wanted = f"a divisor of model.dim = {job.model.dim}"
        raise InputError(expected("model.heads", wanted, str(job.model.heads)))
    if job.model.traits.reads_clicks:
        _check_dlrm(job)
    if job.model.traits.has_step:
        _check_steps(job)


def unplanned(job: Job) -> Iterator[tuple[str, str, str]]:
    """What no plan follows of a job that is more than tables: keys, what a plan has, the values."""
    if job.train.optimizer not in TRAINED:
        yield "train.optimizer", f"one of {', '.join(TRAINED)}", repr(job.train.optimizer)
    for section, own, run in (
        ("memory", memory_of(job), MemorySection()),
        ("parallel", parallel_of(job), ParallelSection()),
    ):
        for key in msgspec.structs.fields(own):
            value, usual = getattr(own, key.name), getattr(run, key.name)
            if key.name not in HONOURED and value != usual:
                yield f"{section}.{key.name}", repr(usual), repr(value)
    if (world := job.cluster.world_size or 0) > MAX_PLANNED:
        yield "cluster.world_size", f"at most {MAX_PLANNED}", str(world)


def is_planned(job: Job) -> bool:
    """Whether a plan can follow all that the job asks for, or the job can have nothing else."""
    return not job.model.traits.is_estimated or next(unplanned(job), None) is None


def _check_steps(job: Job) -> None:
    """Refuse what steps that are planned are not run with, by the key that asks for it."""
    for key, run, value in unplanned(job):
        remedy = ""
        if job.model.traits.is_estimated:
            remedy = "`shardwright memory` and `fit` estimate it without a plan."
        wanted = f"{run}, as steps of kind '{job.model.kind}' are planned and run"
        raise InputError(expected(key, wanted, value, remedy))


def _check_dlrm(job: Job) -> None:
    # A feature is a column of the log and an input of the model: two tables that read one name
    # could not be told apart in a batch.
    names: set[str] = set()
    for table in job.tables:
        _check_table(table, job.batch.size)
        for name in table.feature_names:
            if name in names:
                wanted = "a feature of its own"
                raise InputError(expected(f"tables '{table.name}'.features", wanted, f"'{name}'"))
            names.add(name)
    _check_dim(job)
    if not job.model.top:
        raise InputError(expected("model.top", "at least one width", "no layer"))
    if job.model.top[-1] != 1:
        wanted, found = "1 as its last width, a click's logit", str(job.model.top[-1])
        raise InputError(expected("model.top", wanted, found))


def _check_table(table: TableSpec, batch: int) -> None:
    if table.optimizer not in (None, *UPDATED):
        raise InputError(
            expected(
                f"tables '{table.name}'.optimizer",
                f"one of {', '.join(UPDATED)} for dlrm",
                str(table.optimizer),
            )
        )
    if table.dtype not in ("fp32", *HALVES):
        wanted = f"fp32, {' or '.join(HALVES)} for dlrm"
        raise InputError(expected(f"tables '{table.name}'.dtype", wanted, table.dtype))
    for key, plain in {
        "pooled": True,
        "num_poolings": 1,
        "batch_sizes": batch,
        "output_dtype": "fp32",
    }.items():
        given = getattr(table, key)
        if any(value not in (None, plain) for value in _each(given)):
            wanted = f"{msgspec.json.encode(plain).decode()} for dlrm"
            remedy = f"{PLAIN[key]} Without [model] the tables are planned alone."
            raise InputError(expected(f"tables '{table.name}'.{key}", wanted, str(given), remedy))


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_dim(job: Job) -> None:
    dim, bottom = job.tables[0].dim, job.model.bottom
    if job.model.interaction == "dot":
        for table in job.tables:
            if table.dim != dim:
                raise InputError(
                    expected(
                        f"tables '{table.name}'.dim",
                        f"{dim}, as the first table's",
                        str(table.dim),
                        "Products need equal dims: set model.interaction to 'cat' or 'dcn', or "
                        "model.kind to 'tables' for tables alone.",
                    )
                )
        if not bottom or bottom[-1] != dim:
            raise InputError(
                expected(
                    "model.bottom",
                    f"{dim} as its last width, the tables' dim",
                    str(bottom[-1]) if bottom else "no layer",
                    f"Let model.bottom end with {dim}.",
                )
            )
    if not bottom:
        raise InputError(expected("model.bottom", "at least one width", "no layer"))


def beyond_positions(job: Job) -> tuple[str, ...]:
    """What is to be known of samples that are longer than those that a published model was made
    for; one with learned positions is refused them when its job is read."""
    config = job.model.hf_config
    if config is UNSET:
        return ()
    try:
        positions = positions_of(config_document(config))
    except InputError:  # of a plan whose file is elsewhere
        return ()
    if not 0 < positions < job.batch.sequence:
        return ()
    said = f"the {positions:,} positions that {config_name(config)} was made for"
    return (f"batch.sequence {job.batch.sequence:,} is beyond {said}",)
