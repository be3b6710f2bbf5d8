"""Recordings of what a function returns, a user's own or ours (DLRM, a small GPT), run once on fake
tensors.
"""

# One road for all: a function gives a module, what it is called with, and its loss, and the module
# runs with few of the parts that repeat in it. Ours say besides which of their parts are units, for
# plans name these; of others the parts that repeat are. Before the run the module is cut down to
# what one rank has: shares of its layers, some of its experts, the blocks of its stage. Embeddings
# that a plan routes are stand-ins while it runs; one that a step turns out to use otherwise (twice,
# say) is an ordinary parameter again, and the step is recorded anew.

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.batch import expected_distinct
from shardwright.core.recording import Recording, Series, Unfolded
from shardwright.estimate.own_model import (
    Built,
    FunctionCall,
    built_of,
    check_call,
    importable,
    make,
    python_function,
)
from shardwright.estimate.parallelize import Routing, cut, cut_experts
from shardwright.estimate.routed import Routed
from shardwright.estimate.stages import (
    ModelStage,
    OwnBlocks,
    RecordedStage,
    StageOf,
    blocks_of,
    moved,
    stages,
)
from shardwright.estimate.with_tables import BESIDE_TABLES
from shardwright.job.job import Job, parallel_of
from shardwright.job.model_of_job import placed_tables, reads_bags, step_dtypes
from shardwright.job.parallel import Degrees, ParallelSection, Style
from shardwright.models.dlrm import DLRM
from shardwright.models.kinds import HashNetwork
from shardwright.models.transformer import Transformer, next_token_loss
from shardwright.planner.problem import batch_of
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
from shardwright.trace.tables import RoutedRows
from shardwright.trace.treatment import Treatment
from shardwright.tracker.tensors import DTYPES, NAMES

PLAN = "parallel.parallelize_plan"
BLOCKS, ENDS = "layers", ("embed", "head")  # of a small GPT
POINTER = "Accessing the data pointer of FakeTensor"  # torch's words, 2.11 to 2.13


class ModuleRequest(msgspec.Struct, frozen=True):
    """All that a recording of a function's module depends on.

    Parameters compute in ``dtype``, where it is empty in the one they were made in, which their
    units have in any case. With ``full`` every part is recorded, not a few of each kind. Of a model
    to be ``planned`` large parts that do not repeat are units of their own; FSDP2 has them in the
    root's. ``routed`` are paths of embeddings that are tables, or None for all that can be; ``cut``
    are layers that ``tensor`` ranks share, and experts that those of ``routing`` do; with ``stage``
    a pipeline's ranks have one each.
    """

    call: FunctionCall
    dtype: str
    treatment: Treatment
    full: bool = False
    planned: bool = False
    routed: tuple[str, ...] | None = ()
    tensor: int = 1
    cut: tuple[tuple[str, Style], ...] = ()
    routing: Routing = Routing()
    stage: ModelStage | None = None

    @classmethod
    def of(
        cls, job: Job, treatment: Treatment, batch: int, parallel: ParallelSection | None = None
    ) -> ModuleRequest:
        """That of a job's module for ``batch`` samples; ``parallel`` stands in for its section."""
        parallel = parallel or parallel_of(job)
        layers = tuple((parallel.parallelize_plan or {}).items())
        call, dtype = FunctionCall.of(job, batch), step_dtypes(job)[0]
        routing = Routing.of(parallel)
        return cls(call, dtype, treatment, tensor=parallel.tensor, cut=layers, routing=routing)


def module_recording(
    function: Callable[[], Any],
    name: str,
    dtype: str,
    treatment: Treatment,
    routed: tuple[str, ...] | None,
) -> Recording:
    """The recording of what ``function`` gives, to be planned; errors call it ``name``."""
    request = ModuleRequest(
        FunctionCall(name, "{}", 1, 1), dtype, treatment, planned=True, routed=routed
    )
    return _recorded.__wrapped__(request, function).recording


def recorded(request: ModuleRequest) -> RecordedStage:
    """The recording of what a job's function returns. InputError where the function or its module
    cannot be used, in one line that says why."""
    with importable():
        return _recorded(request, python_function(request.call.name, request.call.where))


class OwnModel:
    """A module that a function returns; tensor ranks have parts of its layers, expert ranks some of
    its experts, a pipeline's stages some of its blocks."""

    def __init__(self, job: Job, degrees: Degrees, treatment: Treatment) -> None:
        self.job, self.treatment, self.several = job, treatment, degrees.microbatches
        self.batch = job.batch.size // self.several
        self.blocks: OwnBlocks | None = None
        if degrees.pipeline > 1:
            request = ModuleRequest.of(job, treatment, self.batch)
            with importable():
                call = request.call
                self.blocks = _blocks(request, python_function(call.name, call.where))
        self.layers = len(self.blocks.names) if self.blocks else 1
        ends = stages(self.layers, degrees.pipeline * degrees.chunks)
        first = self._of(ends[0], parallel_of(job))
        self.parameters, whole = first.parameters, Unfolded(first.recording).units.values()
        self.frozen = 0
        if degrees.tensor == degrees.pipeline == degrees.expert == 1:  # else a part is here
            self.frozen = sum(t.numel for u in whole for t in u.tensors if t.fqn in u.frozen)

    def recorded(self, parallel: ParallelSection, stage: ModelStage) -> RecordedStage:
        """The module, or a stage of its blocks; of those that are alike one stands for others."""
        begin, end = stage.layers
        by = 0
        # Stages in the middle have as many blocks, which are alike: one recording serves them all,
        # however long the pipeline is.
        if self.blocks and self.blocks.alike and not stage.first and not stage.last:
            by = begin - 1  # the blocks of the second stage on, wherever they lie
            stage = ModelStage((1, end - by), False, False)
        of = self._of(stage, parallel)
        found = moved(of.recording, self.blocks, by) if self.blocks else of.recording
        # A microbatch is recorded, but the inputs of all of them are on the rank from the step's
        # begin.
        found = msgspec.structs.replace(found, inputs=found.inputs * self.several)
        return of._replace(recording=found)

    def _of(self, stage: ModelStage, parallel: ParallelSection) -> RecordedStage:
        request = ModuleRequest.of(self.job, self.treatment, self.batch, parallel)
        return recorded(msgspec.structs.replace(request, stage=stage if self.blocks else None))


def built_in_recording(job: Job, treatment: Treatment) -> Recording:
    """A step of a DLRM or a small GPT on one rank, its tables apart."""
    built = _dlrm(job) if job.model.traits.reads_clicks else _transformer(job)
    request = ModuleRequest(FunctionCall(job.model.kind, "{}", 1, 1), "", treatment)
    with FakeMode(allow_non_fake_inputs=True) as mode:
        return _traced(request, built, mode).recording


@lru_cache(maxsize=64)
def _blocks(request: ModuleRequest, function: Callable[..., Any]) -> OwnBlocks:
    with _made(request, function) as (built, _):
        return blocks_of(built.module)


@lru_cache(maxsize=64)
def _recorded(request: ModuleRequest, function: Callable[..., Any]) -> RecordedStage:
    with _made(request, function) as (built, mode), without_pointers(), without_log():
        return _traced(request, built, mode)


@contextmanager
def _made(
    request: ModuleRequest, function: Callable[..., Any]
) -> Iterator[tuple[Built, FakeTensorMode]]:
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
    # On fake tensors a comparison has no value: a loop that draws until all numbers are within
    # bounds would never end, or raise.
    sampling = getattr(nn.init, name)
    setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        setattr(nn.init, name, sampling)


def _traced(request: ModuleRequest, built: Built, mode: FakeTensorMode) -> RecordedStage:
    # The order matters: names and dtypes are those of the module as it was built; then tensors
    # become fake ones of the mode, and only fake ones are cut, for real parts would take their
    # memory.
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
    # One map over all of them: a tensor that stands in two places must be one fake tensor in both,
    # or its bytes count twice.
    given = (built.inputs, built.keywords, built.targets)
    inputs, keywords, targets = tree_map(
        lambda leaf: seen.setdefault(id(leaf), faked(leaf, mode)), given
    )
    built = built._replace(inputs=inputs, keywords=keywords, targets=targets)
    check_call(built)
    of = StageOf(module, request.stage) if request.stage else None
    # Ends, for each round takes one table out and none is put back.
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
    return RecordedStage(found, parameters, of.received if of else 0)


def _composed(
    request: ModuleRequest,
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
    chosen = policy(request.treatment.checkpointing)
    parts: Sequence[str] | None = None if request.planned else built.apart
    if of:
        last = of.stage.last
        subject = replace(subject, call=of.run, loss=subject.loss if last else None)
        parts = of.apart(chosen)
    full = request.full or bool(of and parts)
    run = _run(request, subject, routed, experts)
    if built.units:
        return run(built.units)

    @torch.no_grad()
    def forward() -> None:
        # This forward is a check, not a step: what it asks of tables must not count as a second
        # lookup.
        asked = dict(routed.asked)
        routed.asked.clear()
        try:
            module(*subject.inputs, **subject.keywords)
        finally:
            routed.asked = asked

    known = of or built.apart  # which of their parts run
    composer = Composer(module, run, chosen, full, parts, experts, None if known else forward)
    try:
        found = composer.recording()
    except Untraceable as error:
        raise explained(error, module, built.where, built.called) from error
    found = of.of_stage(found, subject) if of else found
    about = (*_about_units(composer, request), *_not_trained(module, found))
    notes = (*composer.notes, *about, *found.notes)
    return msgspec.structs.replace(found, buffers=storage_bytes(whole), notes=notes)


def _run(
    request: ModuleRequest, subject: TracedModule, routed: Routed, experts: Collection[nn.Module]
) -> Callable[[Shortened], Recording]:
    """Records the module with the parts that it has just then."""
    treatment, dtype = request.treatment, DTYPES.get(request.dtype)
    chosen = policy(treatment.checkpointing)

    def run(shortened: Shortened) -> Recording:
        routed.asked.clear()
        blocks, places = shortened.blocks, shortened.places
        # A stage's blocks that repeat no other are units apart, which the composer does not count
        # as blocks; the checkpointing policy counts places among all of them.
        if subject.call and shortened.apart:  # all blocks of a stage, in order
            units = {part for name, parts in shortened.units.items() if name for part in parts}
            blocks = [part for part in subject.module.modules() if part in units - set(experts)]
            places = list(range(len(blocks)))
        picked = treated(places, chosen)
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


def _about_units(composer: Composer, request: ModuleRequest) -> Iterator[str]:
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


# ---- our own models ------------------------------------------------------------------------------


def _dlrm(job: Job) -> Built:
    """A DLRM without its tables, whose exchange is a plan's to decide."""
    model, batch = DLRM(job, device="meta"), job.batch.size
    model.tables = _stand_in(job)
    _expect_distinct(model, job)
    dense, labels = torch.empty(batch, job.model.dense_features), torch.empty(batch)
    ids = _bags(job) if reads_bags(job) else torch.empty(batch, len(job.tables), dtype=torch.int64)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), labels)

    parts = {"bottom": model.bottom, "kinds": model.kinds, "interact": model.interact}
    parts["top"] = model.top
    units = {n: [part] for n, part in parts.items() if part is not None and list(part.parameters())}
    whole = Shortened(units, (), [], [], [])
    return Built(job.model.kind, model, (dense, ids), {}, loss, labels, units=whole)


def _stand_in(job: Job) -> RoutedRows:
    """For the tables that are placed."""
    of = [(name, table) for table in placed_tables(job) for name in table.feature_names]
    dims = {name: table.dim for name, table in of}
    each = {name for name, table in of if not table.pooled}
    return RoutedRows(of[0][1].dim if of else 0, dims=dims, each=each)


def _expect_distinct(model: DLRM, job: Job) -> None:
    """Hash networks compute as many rows as there are expected to be different ids."""
    for table in job.tables:
        network = None if model.kinds is None else model.kinds.of_table.get(table.name)
        if isinstance(network, HashNetwork):
            network.distinct = partial(_expected, table.rows, batch_of(job).zipf_of(table))


def _expected(rows: int, zipf: float, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = expected_distinct(len(ids), rows, zipf)
    return ids.new_empty(count), torch.empty_like(ids)


def _bags(job: Job) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of every feature ids, offsets and perhaps weights."""
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for table in job.tables:
        for name, length in zip(table.feature_names, table.pooling_factors, strict=True):
            ids = torch.empty(round(length * job.batch.size), dtype=torch.int64)
            offsets = torch.empty(job.batch.size + 1, dtype=torch.int64)
            weights = (torch.empty(len(ids)),) if table.weighted else ()
            found[name] = (ids, offsets, *weights)
    return found


def _transformer(job: Job) -> Built:
    """A small GPT on tokens; one of one block repeats none, so that block stands for itself."""
    model = Transformer(job, device="meta")
    size = (job.batch.size, job.batch.sequence)
    tokens, targets = (torch.empty(size, dtype=torch.int64) for _ in range(2))
    built = Built(job.model.kind, model, (tokens,), {}, next_token_loss, targets, apart=ENDS)
    if len(model.layers) > 1:
        return built
    (only,) = names = (f"{BLOCKS}.0",)
    units = {name: [model.get_submodule(name)] for name in (*ENDS, only)}
    alone = Series(BLOCKS, names, names)
    return built._replace(units=Shortened(units, (alone,), list(model.layers), [0], []))
