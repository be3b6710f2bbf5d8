"""Write a draft down as a plan."""

# Nothing is decided here: all that a plan has follows from the draft, so that `explain` can write
# the same plan from the draft that it makes again, and compare.

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, get_args

import msgspec
from msgspec import UNSET, UnsetType

from shardwright import __version__
from shardwright.core.amount import maximum, minimum, named
from shardwright.core.block import BlockRun, Role, encode
from shardwright.core.timeline import encode as encode_events
from shardwright.job.plan import (
    Plan,
    Reserved,
    Search,
    ShardPlan,
    TablePlan,
    UnitPlan,
    sealed,
)
from shardwright.job.planner import reservation_kind
from shardwright.planner.choice import Placed
from shardwright.planner.draft import Draft
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.unit_choice import Calls, UnitChoice


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
            timeline=encode_events(chain(draft.byte_events(), draft.time_events())),
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
