"""Recordings of a module of the user's own: what a function returns, run once on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.recording import Recording
from shardwright.estimate.expert_parallel import Routing, cut_experts
from shardwright.estimate.own_model import (
    Built,
    Call,
    built_of,
    check_call,
    importable,
    make,
    python_function,
)
from shardwright.estimate.own_stages import Blocks, StageOf, blocks_of
from shardwright.estimate.routed import Routed
from shardwright.estimate.stages import Stage
from shardwright.estimate.tensor_parallel import cut
from shardwright.estimate.with_tables import BESIDE_TABLES
from shardwright.job.job import Job, parallel_of
from shardwright.job.model_of_job import step_dtypes
from shardwright.job.parallel import ParallelSection, Style
from shardwright.runtime.deferred_init import Deferred
from shardwright.runtime.embeddings.modules import NoTableError
from shardwright.trace.checkpointing import policy, treated
from shardwright.trace.checks import (
    Untraceable,
    check_module,
    explained,
    without_log,
    without_pointers,
)
from shardwright.trace.composed import Composer, Shortened
from shardwright.trace.faked import FakeMode, faked, settle
from shardwright.trace.module import TracedModule, held_tensors, record, storage_bytes
from shardwright.trace.treatment import Treatment
from shardwright.tracker.tensors import DTYPES, NAMES

PLAN = "parallel.parallelize_plan"
POINTER = "Accessing the data pointer of FakeTensor"  # torch's words, 2.11 to 2.13


class Request(msgspec.Struct, frozen=True):
    """All that a recording of a function's module depends on; ``routed`` are paths of embeddings
    that are tables, or None for all that can be; ``cut`` are layers that ``tensor`` ranks share,
    and experts that those of ``routing`` do; with ``stage`` a pipeline's ranks have one each."""

    call: Call
    dtype: str
    treatment: Treatment
    full: bool = False
    planned: bool = False
    routed: tuple[str, ...] | None = ()
    tensor: int = 1
    cut: tuple[tuple[str, Style], ...] = ()
    routing: Routing = Routing()
    stage: Stage | None = None


class Recorded(NamedTuple):
    """A recording, the parameters of the whole module, and the bytes that a stage receives."""

    recording: Recording
    parameters: int
    received: int = 0


def module_recording(
    function: Callable[[], Any],
    name: str,
    dtype: str,
    treatment: Treatment,
    routed: tuple[str, ...] | None,
) -> Recording:
    """The recording of what ``function`` gives, to be planned; errors call it ``name``."""
    request = Request(Call(name, "{}", 1, 1), dtype, treatment, planned=True, routed=routed)
    return _recorded.__wrapped__(request, function).recording


def python_recording(
    job: Job,
    treatment: Treatment,
    batch: int,
    *,
    full: bool = False,
    planned: bool = False,
    routed: tuple[str, ...] | None = (),
    stage: Stage | None = None,
    parallel: ParallelSection | None = None,
) -> Recorded:
    """The recording of a job's own module for ``batch`` samples, or of one ``stage`` of it.

    Parameters compute in ``memory.param_dtype``, as they are in a job without the section; the
    units have the dtypes they were made in. With ``full`` every part is recorded, not a few of each
    kind. Of a model to be ``planned`` large parts that do not repeat are units of their own; FSDP2
    has them in the root's. Embeddings that are ``routed`` are tables of the recording. ``parallel``
    stands in for the job's own section.
    InputError where the function or its module cannot be used, in one line that says why.
    """
    request = _request(job, treatment, batch, parallel)
    more = {"full": full, "planned": planned, "routed": routed, "stage": stage}
    request = msgspec.structs.replace(request, **more)
    with importable():
        return _recorded(request, python_function(request.call.name, request.call.where))


def python_blocks(job: Job, treatment: Treatment, batch: int) -> Blocks:
    """The blocks of a job's own module, for a pipeline to share out; UnsupportedError where they
    do not repeat in one place."""
    request = _request(job, treatment, batch)
    with importable():
        return _blocks(request, python_function(request.call.name, request.call.where))


def _request(
    job: Job, treatment: Treatment, batch: int, parallel: ParallelSection | None = None
) -> Request:
    parallel = parallel or parallel_of(job)
    layers = tuple((parallel.parallelize_plan or {}).items())
    call, dtype = Call.of(job, batch), step_dtypes(job)[0]
    routing = Routing.of(parallel)
    return Request(call, dtype, treatment, tensor=parallel.tensor, cut=layers, routing=routing)


@lru_cache(maxsize=64)
def _blocks(request: Request, function: Callable[..., Any]) -> Blocks:
    with _made(request, function) as (built, _):
        return blocks_of(built.module)


@lru_cache(maxsize=64)
def _recorded(request: Request, function: Callable[..., Any]) -> Recorded:
    with _made(request, function) as (built, mode), without_pointers(), without_log():
        return _traced(request, built, mode)


@contextmanager
def _made(request: Request, function: Callable[..., Any]) -> Iterator[tuple[Built, FakeTensorMode]]:
    """What the function returns, on fake tensors, and their mode."""
    # a module may have kept real tensors that it made when it was imported
    mode, default = FakeMode(allow_non_fake_inputs=True), torch.get_default_dtype()
    try:
        with mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", POINTER)  # copies of modules ask for it
            with Deferred(mode), _without_sampling():
                made = make(request.call, function, "It runs on fake CPU tensors.")
                built = built_of(made, request.call.where)
            yield built, mode
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _without_sampling() -> Iterator[None]:
    """``trunc_normal_``, which draws until all numbers are within its bounds, draws none inside."""
    name = "_no_grad_trunc_normal_"
    sampling = getattr(nn.init, name)
    setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        setattr(nn.init, name, sampling)


def _traced(request: Request, built: Built, mode: FakeTensorMode) -> Recorded:
    module = built.module
    routed = Routed(module, request.routed)
    check_module(module, built.where, routed.tables)
    made = {name: NAMES[p.dtype] for name, p in module.named_parameters(remove_duplicate=False)}
    parameters = sum(parameter.numel() for parameter in module.parameters())
    settle(module, mode, DTYPES.get(request.dtype))
    if request.tensor > 1:
        cut(module, dict(request.cut), request.tensor, PLAN)
    experts: dict[nn.Module, str] = {}
    if request.routing.degree > 1:
        paths = cut_experts(module, dict(request.cut), request.routing, PLAN)
        experts = {module.get_submodule(path): path for path in paths}
    seen: dict[int, Any] = {}  # a task's loss has the inputs among its targets
    given = (built.inputs, built.keywords, built.targets)
    inputs, keywords, targets = tree_map(
        lambda leaf: seen.setdefault(id(leaf), faked(leaf, mode)), given
    )
    built = built._replace(inputs=inputs, keywords=keywords, targets=targets)
    check_call(built)
    of = StageOf(module, request.stage) if request.stage else None
    while True:
        try:
            with routed.instead(), of.cut() if of else nullcontext():
                found = _composed(request, built, routed, of, experts)
                more = routed.completed(found)
            break
        except NoTableError as error:
            routed.drop(error)
            check_module(module, built.where, routed.tables)
    units = tuple(
        msgspec.structs.replace(
            unit,
            tensors=tuple(
                msgspec.structs.replace(t, dtype=made.get(t.fqn, t.dtype)) for t in unit.tensors
            ),
        )
        for unit in found.units
    )
    left = (routed.left_dense(),) if request.planned and request.dtype in BESIDE_TABLES else ()
    said = (*built.notes, *found.notes, *routed.notes, *filter(None, left))
    notes = tuple(dict.fromkeys(said))
    found = msgspec.structs.replace(found, units=units, notes=notes, **more)
    return Recorded(found, parameters, of.received if of else 0)


def _composed(
    request: Request,
    built: Built,
    routed: Routed,
    of: StageOf | None,
    experts: Mapping[nn.Module, str],
) -> Recording:
    """A step as the module is just then; ``experts`` that other ranks do not have are units."""
    module = built.module
    whole = [tensor for tensor in held_tensors(module) if not isinstance(tensor, nn.Parameter)]
    subject = TracedModule(
        module,
        built.inputs,
        {},
        loss=lambda result: built.loss_of(result, built.targets),
        keywords=built.keywords,
        extra=[leaf for leaf in tree_leaves(built.targets) if isinstance(leaf, torch.Tensor)],
    )
    every = policy(request.treatment.checkpointing).every
    parts: Sequence[str] | None = None if request.planned else ()
    if of:
        last = of.stage.last
        subject = replace(subject, call=of.run, loss=subject.loss if last else None)
        parts = of.apart(every)
    full = request.full or bool(parts)
    run = _run(request, subject, routed, experts)

    @torch.no_grad()
    def forward() -> None:
        asked = dict(routed.asked)
        routed.asked.clear()
        try:
            module(*subject.inputs, **subject.keywords)
        finally:
            routed.asked = asked

    composer = Composer(module, run, every, full, parts, experts, None if of else forward)
    try:
        found = composer.recording()
    except Untraceable as error:
        raise explained(error, module, built.where, built.called) from error
    found = of.of_stage(found, subject) if of else found
    about = (*_about_units(composer, request), *_not_trained(module, found))
    notes = (*composer.notes, *about, *found.notes)
    return msgspec.structs.replace(found, buffers=storage_bytes(whole), notes=notes)


def _run(
    request: Request, subject: TracedModule, routed: Routed, experts: Collection[nn.Module]
) -> Callable[[Shortened], Recording]:
    """Records the module with the parts that it has just then."""
    treatment, dtype = request.treatment, DTYPES.get(request.dtype)
    every = policy(treatment.checkpointing).every

    def run(shortened: Shortened) -> Recording:
        routed.asked.clear()
        blocks, places = shortened.blocks, shortened.places
        if subject.call and shortened.apart:  # all blocks of a stage, in order
            units = {part for name, parts in shortened.units.items() if name for part in parts}
            blocks = [part for part in subject.module.modules() if part in units - set(experts)]
            places = list(range(len(blocks)))
        picked = treated(places, every)
        with treatment.applied(subject.module, blocks, picked) as applied:
            here = replace(
                subject,
                units=shortened.units,
                series=shortened.series,
                cast=dtype,
                apart=shortened.apart,
                around=applied.around,
                freezes=True,
                checkpointed=applied.checkpointed,
            )
            found = record(here)
        return msgspec.structs.replace(found, notes=tuple(applied.notes))

    return run


def _about_units(composer: Composer, request: Request) -> Iterator[str]:
    if composer.apart or any(container.units for container in composer.containers):
        return
    yield "no part of the module repeats: all of its parameters are one unit"
    if request.treatment.checkpointing != "none":
        yield f"checkpointing '{request.treatment.checkpointing}' has no repeated parts to work on"


def _not_trained(module: nn.Module, found: Recording) -> Iterator[str]:
    frozen = {name for unit in found.units for name in unit.frozen}
    names = [n for n, p in module.named_parameters() if p.requires_grad and n in frozen]
    if names:
        more = " and others get" if names[1:] else " gets"
        yield f"'{names[0]}'{more} no gradient in a step: counted and run as frozen"


# ---- tensors of one fake mode --------------------------------------------------------------------
