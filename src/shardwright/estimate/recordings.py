"""The recording of a job's model: made once on fake tensors, then read from a cache.

A recording that the cache has needs no torch. It is kept under ``$SHARDWRIGHT_CACHE`` (by default
``~/.cache/shardwright``, none where that is empty) by everything it depends on: the model, the
batch, how a step is run, the version of torch, and the files of this package that record.
"""

# A wrong entry of the cache would be a wrong plan that nobody could explain, so an entry is named
# by a digest of all that the recording depends on, the sources that record included, and has a
# digest of its own content: a file that was cut off or edited is as if it were not there. What a
# function of the user's own returns is never kept, for its code is not among the sources.

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from shardwright import __version__
from shardwright.core.cluster import Cluster
from shardwright.core.document import decode_json, write_atomically
from shardwright.core.errors import InputError, UnsupportedError, check_type, did_you_mean, expected
from shardwright.core.kinds import kind_of
from shardwright.core.model import ModelSpec
from shardwright.core.quantities import MOST_GIB
from shardwright.core.recording import Recording, without_shapes
from shardwright.cost.clock import has_clock
from shardwright.estimate.with_tables import (
    Paths,
    Recorded,
    find_with_tables,
    ways_with_tables,
)
from shardwright.job.asked import SHORT
from shardwright.job.cluster import check_units, in_one_word
from shardwright.job.job import (
    A_JOB,
    Job,
    checkpointing_of,
    degrees_of,
    memory_of,
    parallel_of,
    parse_job,
    table_optimizer,
)
from shardwright.job.model_of_job import (
    check_model,
    model_of,
    reads_bags,
    step_dtypes,
    unplanned,
)
from shardwright.job.plan import Plan
from shardwright.planner.draft import Found
from shardwright.planner.planner import find, find_kinds, surely_or_perhaps, watch_of, written
from shardwright.planner.profiles import cluster_of
from shardwright.planner.search.watch import Hear, Watch
from shardwright.planner.variation import ModelOf, as_recorded, once

if TYPE_CHECKING:
    from torch import nn

    from shardwright.core.footprint import Footprint

RECORDERS = ("core", "job", "models", "tracker", "trace", "estimate")  # whose code records


def plan(job: Job, hear: Hear | None = None) -> Plan:
    """The best plan found for ``job``: placements of its tables and dense units.

    ``hear`` is called in every round of the search and may stop it, which keeps the best plan.
    Raises NoPlanError with the shortfall if none fits, InputError for what cannot be planned.
    """
    check_type(job, Job, "job", A_JOB)
    watch = watch_of(job, hear)
    return written(found_for(job, watch), watch)


def found_for(job: Job, watch: Watch, record: Recorded | None = None) -> Found:
    """What the search of ``job`` brings back, with a draft of its plan or without; ``record`` gives
    the step of a module of the user's own in place of ``recorded``."""
    if not job.model.traits.is_function:
        return found_among(job, [once(described)], watch)
    at_all, own = bool(table_optimizer(job)), _once(record or recorded)

    def look(sure: bool) -> Found:
        return find_with_tables(job, own, watch, found_at_all=at_all, sure=sure)

    return surely_or_perhaps(look)


def found_among(job: Job, models: Sequence[ModelOf], watch: Watch) -> Found:
    """The same of a job whose ``models`` are known."""
    return surely_or_perhaps(
        lambda sure: find_kinds(job, lambda its: find(its, models, watch, sure))
    )


def models_of(job: Job) -> tuple[ModelOf, ...]:
    """What describes the model of every job that is recorded as this one, a way each; none of a
    module of the user's own that has no tables."""
    if not job.model.traits.is_function:
        return (once(described),)
    at_all = bool(table_optimizer(job))
    ways = ways_with_tables(job, _once(recorded), found_at_all=at_all)
    return ways.models if ways.everything.tables else ()


def _once(record: Recorded) -> Recorded:
    """``record`` that traces no step twice."""
    known: dict[tuple[bytes, Paths | None], Recording] = {}

    def recorded(job: Job, routed: Paths | None) -> Recording:
        key = as_recorded(job), routed
        if key not in known:
            known[key] = record(job, routed)
        return known[key]

    return recorded


def plan_module(
    build: Callable[[], nn.Module],
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    cluster: str | Mapping[str, Any] = "local",
    optimizer: str = "adamw",
    **sections: Mapping[str, Any],
) -> Plan:
    """The best plan found for the module that ``build()`` makes, for ``sw.apply(build(), plan,
    mesh)``.

    It is called with ``example_inputs`` (a tensor, a tuple of arguments or a mapping of keywords)
    on fake tensors: nothing is computed and no weight allocated. ``loss`` is a function of its
    result, or with ``targets`` of both; without one the mean of the result stands for it.
    ``cluster`` is a preset's name or the keys of a job's ``[cluster]``, ``optimizer`` a name of
    ``[train] optimizer``; ``sections`` are others of a job: ``memory={"param_dtype": "bf16"}``,
    ``planner={"dense": {"prefetch": 1}}``. Embeddings are tables where ``train`` says how these
    learn, ``{"table_optimizer": "sgd", "table_learning_rate": 0.1}``, and only there.

    Raises NoPlanError with the shortfall if no plan fits, InputError for what cannot be traced.
    """
    from torch import nn

    if isinstance(build, nn.Module) or not callable(build):
        found, remedy = type(build).__name__, "Pass one, such as lambda: Net(64)."
        raise InputError(expected("build", "a function that returns the module", found, remedy))
    _check_takes_nothing(build, "build")
    keys = {"cluster": cluster, "optimizer": optimizer, **sections}
    job = _module_job("plan_module", build, example_inputs, keys)
    said = job.train.table_optimizer is not UNSET
    if said and job.train.table_learning_rate is None:
        wanted = "the rate of tables, which no optimizer of a loop of your own has"
        raise InputError(expected("plan_module: train.table_learning_rate", wanted, "none"))
    watch = watch_of(job)
    record = _module_record(job, build, (example_inputs, loss, targets))
    look = partial(find_with_tables, job, record, watch, found_at_all=said)
    return written(surely_or_perhaps(lambda sure: look(sure=sure)), watch)


def module_memory(
    module: Any,
    inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    on: str = "1xcpu",
    optimizer: str = "adamw",
    **keys: Any,
) -> Footprint:
    """What a training step of a module takes on every rank of a machine in one word (``on``), with
    details. It stays as it is: a copy without numbers is called with ``inputs`` on fake tensors.
    ``module`` may also be a function that makes it; other arguments are those of
    :func:`plan_module`, or short ones of ``sw.memory``: ``checkpointing="full"``.

    UnsupportedError for ``keys`` that no plan follows (another runtime, tensor ranks):
    ``sw.memory("package.module:function")`` estimates with them.
    """
    from torch import nn

    from shardwright.estimate.footprint import footprint
    from shardwright.trace.faked import likeness

    if not callable(module):
        wanted, found = "a module, or a function that returns one", type(module).__name__
        raise InputError(expected("module", wanted, found))
    if not isinstance(module, nn.Module):
        _check_takes_nothing(module, "module")
    given = {"cluster": in_one_word(on, "on"), "optimizer": optimizer, **keys}
    job = _module_job("estimate_memory", module, inputs, given)
    for key, wanted, found in unplanned(job):
        remedy = (
            "sw.memory('package.module:function') takes it, of a function that makes the module."
        )
        wanted = f"{wanted} for a module at hand"
        where = f"estimate_memory: {_argument(key, given)}"
        raise UnsupportedError(expected(where, wanted, found, remedy))
    build = partial(likeness, module) if isinstance(module, nn.Module) else module
    record = _module_record(job, build, (inputs, loss, targets))
    return footprint(job, details=True, record=record)


def _module_job(where: str, build: Any, inputs: Any, keys: dict[str, Any]) -> Job:
    """The job of a module that a program has: its ``cluster``, what is short for a key, such as
    ``optimizer``, and sections; errors name what the program gave."""
    sections, cluster = {**keys}, keys["cluster"]
    del sections["cluster"]
    if not isinstance(cluster, str | Mapping):
        wanted = "a preset's name or the keys of a job's [cluster]"
        raise InputError(expected("cluster", wanted, type(cluster).__name__))
    check_units(cluster, where, MOST_GIB)  # a program may have worked out few bytes
    short = {key: sections.pop(key) for key in SHORT if not isinstance(keys.get(key, {}), Mapping)}
    for name, each in sections.items():
        if not isinstance(each, Mapping):
            near = did_you_mean(name, (*SHORT, "loss", "targets", "cluster", "on"))
            wanted = "the keys of a job's section, such as memory={'loss': 'chunked'}"
            raise InputError(expected(f"{where}: {name}", wanted, repr(each), near))
    of = build if hasattr(build, "__qualname__") else type(build)
    name = f"{of.__module__}:{of.__qualname__}"
    document = {
        "model": {"python": re.sub(r"[^\w.:]", "", name)},
        "cluster": {"preset": cluster} if isinstance(cluster, str) else dict(cluster),
        **{section: dict(each) for section, each in sections.items()},
    }
    document["batch"] = {"size": _samples(inputs), **document.get("batch", {})}
    for name, value in short.items():
        section, _, key = SHORT[name].partition(".")
        document[section] = {key: value, **document.get(section, {})}
    try:
        return parse_job(document, where)
    except InputError as error:
        text = str(error).removeprefix(f"{where}: ")
        key, _, rest = text.partition(":")
        raise type(error)(f"{where}: {_argument(key, keys)}:{rest}") from None


def _argument(key: str, given: Mapping[str, Any]) -> str:
    """The argument that a program gave for a key of a job, where there is one."""
    names = {each: name for name, each in SHORT.items() if name in given}
    return names.get(key, key)


def _module_record(job: Job, build: Callable[[], nn.Module], given: tuple[Any, ...]) -> Recorded:
    """Records what ``build()`` makes, with its inputs, loss and targets; its embeddings are tables
    only where the job says how these learn."""
    from shardwright.estimate.recorded import module_recording
    from shardwright.trace.treatment import Treatment

    machine, _ = cluster_of(job)
    device = memory_of(job).lowering or machine.compute_device
    name, dtype = f"module {str(job.model.python).partition(':')[2]}", step_dtypes(job)[0]
    inputs, loss, targets = given
    said = job.train.table_optimizer is not UNSET

    @cache
    def of(routed: Paths | None, policy: str) -> Recording:
        parts = (build(), inputs, loss, targets)[: 4 if targets is not None else 3]
        treatment = Treatment(device, policy)
        return _planned(module_recording(lambda: parts, name, dtype, treatment, routed), machine)

    return lambda its, routed: of(routed if said else (), checkpointing_of(its)[0])


def _check_takes_nothing(build: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # one that Python cannot look into
        return
    try:
        signature.bind()
    except TypeError as error:
        remedy = "Bind them, as lambda: Net(64) does."
        raise InputError(
            expected(name, "a function that takes nothing", f"{error}", remedy)
        ) from None


def _samples(inputs: Any) -> int:
    """The length of the first dimension of the first tensor."""
    from torch.utils._pytree import tree_leaves

    shapes = (getattr(leaf, "shape", ()) for leaf in tree_leaves(inputs))
    return next((int(shape[0]) for shape in shapes if len(shape)), 1)


def described(job: Job) -> ModelSpec:
    """The model of ``job`` with its recording; tables alone have none."""
    check_model(job)
    return model_of(job, recorded(job) if job.model.traits.has_step else None)


def recorded(job: Job, routed: tuple[str, ...] | None = ()) -> Recording:
    """A step of ``job``'s model on one rank, with the checkpointing that it is first tried with; of
    a module of the user's own, embeddings that are ``routed`` are tables, or with None all that can
    be."""
    return _planned(recorded_with_shapes(job, routed), cluster_of(job)[0])


def recorded_with_shapes(job: Job, routed: tuple[str, ...] | None = ()) -> Recording:
    """The same with the shapes of products, whether seconds follow from them or not."""
    device = memory_of(job).lowering or cluster_of(job)[0].compute_device
    path = _path(job, device)
    found = None if path is None else _kept(path)
    if found is None:
        found = _record(job, device, routed)
        if path is not None:
            content = msgspec.json.encode(found)
            with suppress(InputError):  # a folder that cannot be written is none
                write_atomically(path, _digest(content) + b"\n" + content)
    return found


def _planned(recording: Recording, cluster: Cluster) -> Recording:
    """A recording as plans have it: with shapes where seconds follow from them."""
    return recording if has_clock(cluster.constants) else without_shapes(recording)


def _kept(path: Path) -> Recording | None:
    """The recording in a file, unless it is not there as it was written: every figure follows from
    it, so that one changed byte would be another answer."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        return decode_json(content, Recording) if digest == _digest(content) else None
    except (OSError, msgspec.DecodeError):
        return None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _record(job: Job, device: str, routed: tuple[str, ...] | None) -> Recording:
    from shardwright.trace.treatment import Treatment

    treatment = Treatment(device, checkpointing_of(job)[0])
    traits = job.model.traits
    if traits.is_estimated and not traits.is_function:
        from shardwright.estimate.llama import LlamaModel
        from shardwright.estimate.stages import ModelStage

        # as each of its ranks runs it, divided among data ranks alone
        section = msgspec.structs.replace(parallel_of(job), data_replicate=1, data_shard=-1)
        alone = msgspec.structs.replace(job, parallel=section)
        llama = LlamaModel(alone, degrees_of(alone, 1), treatment)
        return llama.recorded(section, ModelStage((0, llama.layers), True, True)).recording
    from shardwright.estimate.recorded import ModuleRequest, built_in_recording
    from shardwright.estimate.recorded import recorded as of_function

    if not traits.is_function:
        return built_in_recording(job, treatment)
    request = ModuleRequest.of(job, treatment, job.batch.size)
    return of_function(msgspec.structs.replace(request, planned=True, routed=routed)).recording


def _path(job: Job, device: str) -> Path | None:
    folder = os.environ.get("SHARDWRIGHT_CACHE", "~/.cache/shardwright")
    if not folder or job.model.traits.is_function:  # whose code may change
        return None
    tables: list[Any] = [
        (t.dim, t.feature_names, t.pooling_factors, t.weighted) for t in job.tables
    ]
    tables += [(job.data, t) for t in job.tables if kind_of(t) != "full"]
    bags = job.model.traits.reads_clicks and reads_bags(job)
    policy = checkpointing_of(job)[0]
    memory = msgspec.structs.replace(memory_of(job), checkpointing=policy, zero=3)
    run = (memory, parallel_of(job), device)
    how = step_dtypes(job)
    of = (job.model, job.batch, tables, bags, *run, how, version("torch"), _recorder())
    digest = hashlib.sha256(msgspec.json.encode(of, order="deterministic")).hexdigest()
    return Path(os.path.expanduser(folder)) / "recordings" / f"{digest}.json"


@cache
def _recorder() -> str:
    """A digest of what decides how a model is recorded: another one makes other recordings."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(__version__.encode())
    for folder in RECORDERS:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
