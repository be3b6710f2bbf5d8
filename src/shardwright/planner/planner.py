"""From a job to a plan: look at all that it leaves open, prove the bound, write everything down.

A job may leave open which tables are of another kind, the stage of ZeRO, over how many replicas it
shares, the size of its buckets and how it is checkpointed. Every such choice makes a job of its
own, which is searched (:mod:`shardwright.planner.strategy`) as if it had been asked for.
"""

# What was chosen is written into the job of the plan, so that `explain` makes the same draft again
# from the plan alone. Only checkpointing stays open there, for recordings of other policies are not
# in the plan: `search.tried` says which one it has. All else that a plan has follows from its draft
# (`assemble`): `explain` writes the same plan from the draft that it makes again, and compares.

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec
from msgspec import UNSET, UnsetType

from shardwright import __version__
from shardwright.core.amount import ceil_div, maximum, minimum, named
from shardwright.core.block import BlockRun, Role, encode
from shardwright.core.errors import UnsupportedError
from shardwright.core.kinds import settled
from shardwright.core.model import KindName, ModelSpec, TableSpec
from shardwright.core.placement import Zero
from shardwright.core.timeline import encode as encode_events
from shardwright.job.job import Job, checkpointing_of, memory_of, parallel_of
from shardwright.job.plan import (
    Plan,
    Reserved,
    Search,
    ShardPlan,
    TablePlan,
    Tried,
    UnitPlan,
    sealed,
)
from shardwright.job.planner import reservation_kind
from shardwright.job.tables import embeddings_of, free_tables
from shardwright.planner import profiles, shortage
from shardwright.planner.choice import Placed
from shardwright.planner.draft import Draft, Found
from shardwright.planner.problem import Problem, hosts_of
from shardwright.planner.search.watch import Hear, Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import search_steps, smallest, step_bound
from shardwright.planner.strategy.tables import search_exactly, search_tables, tables_bound
from shardwright.planner.unit_choice import Calls, UnitChoice
from shardwright.planner.variation import ModelOf, changed, checkpointed, halved, shared

WHOLE_STAGES: tuple[Zero, ...] = (2, 1)  # of ZeRO, in which parameters stay whole
PARTS = (1, 2, 4, 8, 16, 32)  # buckets of a model that are tried


def plan(job: Job, model_of: ModelOf, hear: Hear | None = None) -> Plan:
    """The best plan found for a job of which all kinds of tables are known; NoPlanError with the
    shortfall if none fits. ``hear`` is called with the :class:`Watch` of the search in every round.
    """
    watch = watch_of(job, hear)
    return written(surely_or_perhaps(lambda sure: find(job, [model_of], watch, sure)), watch)


def surely_or_perhaps(look: Callable[[bool], Found]) -> Found:
    """What ``look`` finds that fits for sure; where nothing does, what perhaps fits, which is less
    than that on an accelerator alone."""
    # Two whole searches and not one with a looser limit: what surely fits comes before anything
    # that is faster and only perhaps does.
    found = look(True)
    if found.draft is not None or not found.problem.on_accelerator:
        return found
    return look(False)


def watch_of(job: Job, hear: Hear | None = None) -> Watch:
    """One with the time that a job gives its search."""
    return Watch(job.planner.time_limit or float("inf"), hear)


def written(found: Found, watch: Watch) -> Plan:
    """What was found as a plan; NoPlanError with the shortfall where nothing fits."""
    if found.draft is None:
        raise shortage.error(found, watch)
    how = found.described(watch.elapsed, cut_short=watch.cut_short)
    return assemble(found.draft, found.bound, how)


def find(job: Job, models: Iterable[ModelOf], watch: Watch, sure: bool = True) -> Found:
    """The fastest that is found at every stage of ZeRO, over all replicas, with all buckets and
    checkpointing policies that a job leaves open, and fits, or if it need not be ``sure`` perhaps
    fits; where nothing does, what asks least.

    ``models`` describe the model of a job that leaves one policy open, recorded with that, in one
    or several ways that train alike: of those as fast as one another the first is taken, and one
    that cannot run is passed over.
    """
    found: list[Found] = []
    refused: list[UnsupportedError] = []
    for model_of in models:
        try:
            found.append(_found(job, model_of, watch, sure))
        except UnsupportedError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=lambda each: each.seconds)


def _found(job: Job, model_of: ModelOf, watch: Watch, sure: bool) -> Found:
    """The same of one way to describe the model."""
    jobs = tuple(_shared(job, model_of))
    is_open = memory_of(job).zero == "auto" or len(jobs) > 1
    looked: list[tuple[Found, Tried | None]] = []
    for its in jobs if is_open else (job,):
        found = tuple(_under_policies(its, model_of, watch, sure))
        told = is_open or len(found) > 1
        looked += [(each, _row(each, shared=is_open) if told else None) for each in found]

    def rank(each: tuple[Found, Tried | None]) -> tuple[float, int]:
        found, row = each
        # Where nothing fits, seconds are infinite for all, and the one that asks least is the one
        # that a refusal should speak of.
        return found.seconds, row.peak_bytes if row and found.draft is None else 0

    best, _ = min(looked, key=rank)
    return replace(best, tried=tuple(row for _, row in looked if row))


def _under_policies(job: Job, model_of: ModelOf, watch: Watch, sure: bool) -> Iterator[Found]:
    """What is found with each checkpointing policy, none first."""
    policies = checkpointing_of(job)
    for policy in policies:
        model = model_of(checkpointed(job, policy))
        if reason := shortage.not_run(model) if policy != "none" else "":
            if "none" in policies:
                return
            wanted = f"'none' for a model {reason}"
            raise UnsupportedError("memory.checkpointing", wanted, f"'{policy}'")
        found = search(job, model, watch, sure=sure)
        yield replace(found, policy=policy, model_of=model_of)
        # To compute again costs seconds and saves activations, so it cannot be faster unless these
        # kept something faster from fitting.
        if policy == "none" and found.draft is not None and not found.gave_up:
            return


def _row(found: Found, *, shared: bool) -> Tried:
    """What a plan tells of a try, and of how units are ``shared`` where that was open."""
    job, draft = found.problem.job, found.draft
    if draft is None:
        row = Tried(found.policy, None, smallest(found.problem).demand)
    else:
        row = Tried(found.policy, found.seconds, draft.highest_peak)
    if not shared:
        return row
    replicas = parallel_of(job).data_replicate
    zero, bucket_size = memory_of(job).zero, job.planner.dense.bucket_size
    return msgspec.structs.replace(
        row, zero=zero, replicas=replicas if replicas > 1 else UNSET, bucket_size=bucket_size
    )


def _shared(job: Job, model_of: ModelOf) -> Iterator[Job]:
    """The job at every stage of ZeRO, over all replicas and with all buckets that it leaves open;
    of those as fast the first is taken. On several hosts units may be shared within each."""
    cluster, _ = profiles.cluster_of(job)
    section, sizes = parallel_of(job), _bucket_sizes(job, model_of)
    hosts, replicas, zero = hosts_of(cluster), section.data_replicate, memory_of(job).zero
    if zero != "auto":
        yield from (shared(job, zero, replicas, size) for size in sizes)
        return
    modules = 0 in sizes  # units may be modules, which stage 3 asks for
    if modules:
        yield shared(job, 3, replicas)
    if not (job.planner.dense.reshard and modules):
        for stage, size in itertools.product(WHOLE_STAGES, sizes):
            yield shared(job, stage, replicas, size)
    if modules and replicas > 1:
        yield shared(job, (2, 3), replicas)
    elif modules and hosts > 1 and section.data_shard == -1:
        yield shared(job, 3, hosts)
        yield shared(job, (2, 3), hosts)


def _bucket_sizes(job: Job, model_of: ModelOf) -> tuple[int, ...]:
    """What is tried of them; for the whole parameters of a stage that is known, or left open."""
    if memory_of(job).zero not in (1, 2, "auto"):
        return (0,)
    if job.planner.dense.bucket_size != "auto":
        return bucket_sizes_of(job, 0)
    units = model_of(checkpointed(shared(job, 2), checkpointing_of(job)[0])).units
    trained = (t.numel for unit in units for t in unit.tensors if t.fqn not in unit.frozen)
    return bucket_sizes_of(job, sum(trained))


def bucket_sizes_of(job: Job, elements: int) -> tuple[int, ...]:
    """What buckets a plan may choose, 0 for none, of a model with so many trained ``elements``."""
    wanted = job.planner.dense.bucket_size
    if wanted == "auto":
        return (0, *dict.fromkeys(max(ceil_div(elements, parts), 1) for parts in PARTS))
    return (wanted or 0,)


def find_kinds(job: Job, look: Callable[[Job], Found]) -> Found:
    """What ``look`` finds for the job with the kinds of its tables chosen, where it lets its plan
    choose them and tables do not fit full.

    Kinds come in the order in which a job would have them. As few tables as possible, those that
    are largest, are of a later kind than the first with which anything fits.
    """
    kinds = job.planner.kinds
    free = free_tables(job.tables, embeddings_of(job.embeddings), kinds)
    if kinds is UNSET or not free:
        return look(job)
    order = sorted(free, key=lambda table: (-table.nbytes, table.name))
    found = look(_of_kinds(job, order, 0, kinds[0], kinds[0]))
    for before, kind in itertools.pairwise(kinds):
        if found.draft is None:
            found = _fewest_of(kind, before, order, job, look)
    return found


def _fewest_of(
    kind: KindName,
    before: KindName,
    order: Sequence[TableSpec],
    job: Job,
    look: Callable[[Job], Found],
) -> Found:
    """What is found with the fewest tables of a ``kind`` with which anything fits, the others of
    the one ``before``: more of them take less memory."""
    looked: dict[int, Found] = {}

    def fits(count: int) -> bool:
        looked[count] = look(_of_kinds(job, order, count, before, kind))
        return looked[count].draft is not None

    most = len(order)
    return looked[halved(fits, most, 0) if fits(most) else most]


def _of_kinds(
    job: Job, order: Sequence[TableSpec], count: int, before: KindName, kind: KindName
) -> Job:
    """The job with the first ``count`` tables of a ``kind``, and the others of the one before."""
    of = {table.name: kind if k < count else before for k, table in enumerate(order)}
    tables = [
        msgspec.structs.replace(t, kind=of[t.name]) if t.name in of else t for t in job.tables
    ]
    return changed(job, {"tables": settled(tables, embeddings_of(job.embeddings))})


def search(job: Job, model: ModelSpec, watch: Watch, *, sure: bool = True) -> Found:
    """Search as the job asks, for steps that fit for sure or perhaps."""
    wanted = job.planner.search
    if model.is_trained:
        if wanted != "bounded":
            where, remedy = "planner.search", "Leave [model] out to plan the tables alone."
            raise UnsupportedError(where, f"'bounded' for a {model.kind}", f"'{wanted}'", remedy)
        return search_steps(job, model, watch, sure)
    if wanted == "proposers":
        return profiles.torchrec.search(job, model, watch)
    if wanted == "exact":
        return search_exactly(job, model, watch)
    return search_tables(job, model, watch)


def bound_of(problem: Problem) -> float:
    """Seconds that no plan of ``problem`` can beat."""
    return step_bound(problem) if problem.model.is_trained else tables_bound(problem)


def assemble(draft: Draft, bound: float, found: Search) -> Plan:
    """The plan of a draft; ``bound`` is what no plan can be faster than."""
    problem = draft.problem
    # A bound is a sum in another order than the seconds: where it is proven equal it may come out a
    # bit above, and no plan takes less than its own bound.
    slowest = draft.max_rank_seconds
    bound = proven([bound, found.proved_seconds], slowest)
    needs: tuple[int, int] | UnsetType = UNSET  # but on accelerators they are the live bytes
    if isinstance(draft, StepDraft) and problem.on_accelerator:
        needs = draft.needs
    tables = tuple(_table_plan(placed) for placed in draft.tables)
    return sealed(
        Plan(
            schema="shardwright.plan/4",
            version=__version__,
            job=problem.job,
            recording=problem.model.recording,
            cluster=problem.cluster,
            tables=tables,
            units=tuple(_unit_plans(draft)),
            prefetch=draft.prefetch if isinstance(draft, StepDraft) else 0,
            blocks=(*_table_blocks(tables), *_unit_blocks(draft)),
            timeline=encode_events(itertools.chain(draft.byte_events(), draft.time_events())),
            ranks=tuple(draft.totals(r) for r in range(draft.ranks)),
            max_rank_seconds=slowest,
            lower_bound_seconds=bound,
            gap=gap(slowest, bound) if bound else 0.0,
            reserved=Reserved(
                reservation_kind(problem.job),
                *problem.capacity,
                problem.reserved.dense or (0, 0),
                problem.reserved.kjt or (0, 0),
            ),
            assumptions=problem.assumptions,
            search=found,
            needs=needs,
        )
    )


def proven(bounds: Sequence[Any], slowest: Any) -> Any:
    """The highest of the bounds, which is above the slowest rank by rounding alone."""
    return named("lower_bound", minimum(functools.reduce(maximum, bounds), slowest), "s")


def gap(slowest: Any, bound: Any) -> Any:
    """The share by which the slowest rank is above the bound."""
    return named("gap", (slowest - bound) / bound)


def _table_plan(placed: Placed) -> TablePlan:
    table, option = placed.choice.table, placed.choice.option
    return TablePlan(
        name=table.name,
        fqn=table.tensor.fqn,
        rows=table.rows,
        dim=table.dim,
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        optimizer=str(table.optimizer),
        shards=tuple(
            ShardPlan(first, run, cost.seconds, cost.hbm, cost.ddr, cost.ssd)
            for first, run, cost in placed.stretches()
        ),
        cache_load_factor=table.cache.load_factor if table.cache else None,
        dedup=True if placed.choice.dedup else UNSET,
    )


def _unit_plans(draft: Draft) -> Iterator[UnitPlan]:
    if not isinstance(draft, StepDraft):
        return
    for choice in draft.units:
        seconds = math.fsum(draft.dense_seconds[choice.unit.name].values())
        yield _unit_plan(choice, seconds, choice.calls(draft.actions))


def _unit_plan(choice: UnitChoice, seconds: float, calls: Calls) -> UnitPlan:
    layout = choice.layout
    return UnitPlan(
        name=choice.unit.name,
        modules=choice.unit.modules,
        members=choice.unit.members,
        tensors=tuple(tensor.fqn for tensor in choice.unit.tensors),
        parameter=choice.roles.parameter,
        gradient=choice.roles.gradient,
        optimizer_state=choice.roles.optimizer_state,
        optimizer=choice.unit.optimizer,
        reshard_after_forward=choice.reshard,
        seconds=seconds,
        bytes_per_rank=layout.stored_bytes,
        padding_bytes=layout.nbytes - layout.payload_bytes,
        collectives=calls.gathers + calls.reduces + calls.between,
        bytes_per_step=choice.moved_bytes(calls),
        checkpointing=choice.unit.checkpointing,
        checkpointed=choice.unit.checkpointed,
        offloaded=True if choice.offloaded else UNSET,
    )


def _table_blocks(tables: Iterable[TablePlan]) -> Iterator[BlockRun]:
    """The parameters of every table: a run of shards is a run of blocks."""
    for table in tables:
        for shard in table.shards:
            run = shard.run
            # A table with fewer rows than ranks has shards without rows, whose blocks would cover
            # nothing.
            if run.rows:
                step = (run.row_step, run.column_step) if run.count > 1 else ()
                offsets, sizes = (run.row, run.column), (run.rows, run.columns)
                yield BlockRun(table.fqn, "parameter", offsets, sizes, shard.rank, run.count, step)


def _unit_blocks(draft: Draft) -> Iterator[BlockRun]:
    """Every role of every dense unit: gradients and states live where parameters do, unless these
    stay whole, and of frozen tensors there are none."""
    for choice in draft.units:
        parameters = encode(choice.blocks)
        for role, placement in zip(get_args(Role), choice.roles, strict=True):
            # Else all roles have the parameters' blocks, which are thousands of a deep model: they
            # are encoded once.
            if choice.unit.frozen or choice.stays or choice.grid.twice:
                yield from encode(choice.grid.blocks(choice.layout, role, placement))
            else:
                yield from (msgspec.structs.replace(run, role=role) for run in parameters)
