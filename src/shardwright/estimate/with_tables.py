"""Embeddings in a module of the user's own: which are tables of a plan, and which stay in units.

Where tables are updated as units are, both ways of every embedding train alike, and the faster plan
is taken. Where a job says how tables are updated, all that can be tables are.
"""

# Which of the ways is the fastest cannot be told beforehand: a table saves the gradient and states
# of rows that no batch asks for, and costs an exchange that a small one never earns. So all, all
# but the small, and none are planned. Tables that learn otherwise than units would change what is
# trained: where a job says how tables learn, the choice is no longer the plan's.

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, ShardwrightError, expected
from shardwright.core.model import DENSE, ModelSpec
from shardwright.core.optimizers import TableOptimizer
from shardwright.core.quantities import format_bytes
from shardwright.core.recording import Recording
from shardwright.job.job import Job
from shardwright.job.model_of_job import check_model, model_of, step_dtypes
from shardwright.planner.draft import Found
from shardwright.planner.planner import find
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.variation import ModelOf, changed, once

Paths = tuple[str, ...]
Recorded = Callable[[Job, Paths | None], Recording]
LARGE = 2**20  # bytes of an embedding that a table may be worth
NOTE = "embedding "  # begins what a recording says of one that can be no table
COULD = "could be tables:"  # and of those that a job leaves in dense units
UNSAID = (
    "Embeddings are tables beside train.optimizer 'sgd', or where train.table_optimizer says how "
    "their rows learn."
)
TRIED: TableOptimizer = "rowwise_adagrad"
SECONDS_FOR_TABLES = 5.0  # of a search that only says what would help
MOST_REASONS = 3  # of a longer list
BESIDE_TABLES = ("", "fp32", "bf16")  # that units compute in beside tables


class Ways(NamedTuple):
    """A description of a module for each way to have its embeddings; its step with all of them that
    can be tables, and why others can not."""

    models: tuple[ModelOf, ...]
    everything: Recording
    reasons: Paths


def find_with_tables(
    job: Job, recorded: Recorded, watch: Watch, *, found_at_all: bool, sure: bool = True
) -> Found:
    """What the search of a module brings back, of all its :func:`ways_with_tables`. What perhaps
    fits is enough where it need not be ``sure``."""
    models, everything, reasons = ways_with_tables(job, recorded, found_at_all=found_at_all)
    best = find(job, models, watch, sure)
    if best.draft is None:
        best = replace(best, remark=_no_tables(everything, reasons))
    if best.draft is None and any(note.startswith(COULD) for note in everything.notes):
        return replace(best, helps=partial(_tables_help, job, recorded))
    return best


def ways_with_tables(job: Job, recorded: Recorded, *, found_at_all: bool) -> Ways:
    """The ways to plan a module; ``recorded`` gives its step with the embeddings at some paths as
    tables, or at None with all that can be. Unless some are ``found_at_all`` there are none.

    InputError for what is said of tables that there are not.
    """
    check_model(job)
    # Rows are updated in a backward, before a scaler could say that a step overflowed: beside fp16
    # there are no tables.
    wanted = found_at_all and step_dtypes(job)[0] in BESIDE_TABLES
    everything = recorded(job, None if wanted else ())
    tables = tuple(table.name for table in everything.tables or ())
    asked = bool(job.planner.tables) and not found_at_all  # in vain: each has a reason of its own
    notes = recorded(job, None).notes if asked else everything.notes
    reasons = tuple(note for note in notes if note.startswith(NOTE))
    collected = {table.name for table in everything.tables or () if table.collected}
    _check_said(job, tables, collected, reasons, () if found_at_all else (UNSAID,))
    # All that can be is one recording, which is made already: asked for by paths it would be made
    # again under another key. A way without some may be none: a sparse gradient goes to a table
    # alone.
    ways = _ways(job, tables, collected, everything)
    given = (None if paths == tables and wanted else paths for paths in ways)
    models = tuple(_described(recorded, paths, reasons, wanted) for paths in given)
    return Ways(models, everything, reasons)


def _no_tables(recording: Recording, reasons: Paths) -> str:
    """Says of the largest embeddings that can be no tables why not; empty where all are small."""
    tensors = (tensor for unit in recording.units for tensor in unit.tensors)
    sizes = {f"'{tensor.fqn.removesuffix('.weight')}'": tensor.nbytes for tensor in tensors}
    large = []
    for note in reasons:
        path, _, why = note.removeprefix(NOTE).partition(" ")
        size = sizes.get(path, 0)
        if size >= LARGE:
            large.append((size, f"{NOTE.title()}{path} ({format_bytes(size)}) {why}."))
    return " ".join(text for _, text in sorted(large, reverse=True)[:MOST_REASONS])


def _tables_help(job: Job, recorded: Recorded, watch: Watch) -> str:
    """Says that a plan fits once embeddings are tables; empty where none is found."""
    its = changed(job, {"train.table_optimizer": TRIED})
    try:
        found = find_with_tables(its, recorded, watch.part(SECONDS_FOR_TABLES), found_at_all=True)
    except ShardwrightError:  # as tables they are used as no table can be
        return ""
    fits = f"train.table_optimizer of '{TRIED}' fits, for embeddings are tables then"
    return fits if found.draft is not None else ""


def _described(recorded: Recorded, paths: Paths | None, reasons: Paths, said: bool) -> ModelOf:
    """Describes models with the embeddings at ``paths`` as tables; those that could be are not
    named where a job has ``said`` how tables learn."""

    def described(job: Job) -> ModelSpec:
        found = recorded(job, paths)
        notes = tuple(dict.fromkeys((*found.notes, *reasons)))
        notes = tuple(note for note in notes if not (said and note.startswith(COULD)))
        return model_of(job, msgspec.structs.replace(found, notes=notes))

    return once(described)


def _ways(job: Job, tables: Paths, collected: Set[str], everything: Recording) -> Iterator[Paths]:
    """The embeddings that are tables: all but those that shall be dense; without those that are so
    small that an exchange takes longer; none that need not be. The ``collected`` always are."""
    forced = job.planner.tables or {}
    most = tuple(path for path in tables if forced.get(path) != "dense")
    yield most
    # Where a job says how tables learn, or forces some, nothing is left to choose: then one way is
    # all.
    free = set(most) - set(forced) - collected
    if free and not is_said(job):
        small = _small(make_problem(job, model_of(job, everything))) & free
        for without in dict.fromkeys((small, frozenset(free))):
            if without:
                yield tuple(path for path in most if path not in without)


def _small(problem: Problem) -> frozenset[str]:
    """Names of tables whose replica with a dense gradient takes less time of a step than the
    latencies of an exchange of its own: in a unit with others it needs none."""
    least = sum(problem.context.latencies(["routed"]).values())
    return frozenset(
        choice.table.name
        for choices in problem.tables
        for choice in choices
        if choice.is_replicated
        and choice.option.compute_kernel == DENSE
        and choice.costs[0].total_seconds < least
    )


def is_said(job: Job) -> bool:
    """Whether a job says how tables learn, so that units would learn otherwise."""
    train = job.train
    return train.table_optimizer is not UNSET or train.table_learning_rate is not None


def _check_said(
    job: Job, tables: Paths, collected: Set[str], reasons: Paths, unsaid: Paths
) -> None:
    """InputError where a job speaks of tables that there are not, or wants some that are
    ``collected`` in a unit. Of one that never could be a table its own reason is given, of others
    that the job has ``unsaid`` how tables learn, if it has."""
    names = ", ".join(tables) or "embeddings that can be tables, of which there are none"
    if not tables and step_dtypes(job)[0] not in BESIDE_TABLES:
        reasons = ("Their updates take no scaled gradients: let memory.param_dtype be bf16.",)
    forced = job.planner.tables or {}
    unknown = [path for path in forced if path not in tables]
    if unknown:
        about = [note for note in reasons if note.startswith(f"{NOTE}'{unknown[0]}'")]
        remedy = "; ".join(about or unsaid or reasons[:MOST_REASONS])
        raise InputError(expected("planner.tables", names, f"'{unknown[0]}'", remedy))
    dense = [path for path in forced if path in collected and forced[path] == "dense"]
    if dense:
        wanted = "a sharding type, for its collection looks its tables up at once"
        raise InputError(expected(f"planner.tables.'{dense[0]}'", wanted, "'dense'"))
    train = job.train
    of_tables = {
        "table_optimizer": train.table_optimizer is not UNSET,
        "table_learning_rate": train.table_learning_rate is not None,
        "overlap": train.overlap not in (UNSET, "none"),
    }
    key = next((f"train.{key}" for key, given in of_tables.items() if given), None)
    if key and not tables:
        wanted = "an embedding that can be a table"
        remedy = "; ".join(unsaid or reasons[:MOST_REASONS])
        raise InputError(expected(key, wanted, "none", remedy))
