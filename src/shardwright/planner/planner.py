"""From a job to a plan: search, prove the bound, write everything down."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from shardwright import __version__
from shardwright.core.block import Block, encode
from shardwright.core.job import Job
from shardwright.core.layout import unit_blocks
from shardwright.core.option import place
from shardwright.core.plan import Plan, RankTotals, Search, TablePlan, UnitPlan, sealed
from shardwright.core.specs import model_spec
from shardwright.core.timeline import EXACT_KINDS, PEAK, PHASES, Event
from shardwright.core.timeline import encode as encode_events
from shardwright.planner import greedy, shortage
from shardwright.planner.draft import Draft, Placed
from shardwright.planner.problem import Problem, UnitChoice, make_problem

MAX_BUDGET_ROUNDS = 6


def plan(job: Job) -> Plan:
    """The best plan found for ``job``; raises NoPlanError with the shortfall if none fits."""
    started = time.perf_counter()
    problem = make_problem(job, model_spec(job))
    best, tried, feasible = search(problem)
    if best is None:
        raise shortage.error(problem)
    found = Search(job.planner.search, tried, feasible, time.perf_counter() - started)
    return assemble(best, found)


def search(problem: Problem) -> tuple[Draft | None, int, int]:
    """The fastest draft whose peak fits, how many were tried and how many fitted.

    Tables are placed by the bytes they keep. What a step adds to them is found by running the
    step, so the second round leaves room for what the first draft added, and further rounds for
    what still broke the budget.
    """
    capacity = problem.cluster.memory_per_rank
    best: Draft | None = None
    tried = feasible = 0
    budget = float(capacity)
    for round_number in range(MAX_BUDGET_ROUNDS):
        overshoot = transient = 0.0
        for draft in greedy.proposals(problem, budget):
            tried += 1
            transient = transient or max(draft.peak_bytes) - max(draft.kept_bytes)
            if best is not None and draft.max_rank_seconds >= best.max_rank_seconds:
                continue
            if draft.fits:
                feasible += 1
                best = draft
            else:
                excess = max(draft.peak_bytes) - capacity
                overshoot = min(overshoot, excess) if overshoot else excess
        if round_number == 0:
            budget -= max(transient, overshoot)
        elif overshoot:
            budget -= overshoot
        else:
            break
    if best is None:
        tried += 1
        last = greedy.smallest(problem)
        best = last if last.fits else None
        feasible += best is not None
    return best, tried, feasible


def lower_bound(problem: Problem) -> float:
    """No plan of this problem can be faster: cheapest options, spread perfectly, no latency."""
    ranks = problem.cluster.world_size
    tables = math.fsum(
        min(math.fsum(choice.seconds) + choice.request_seconds * ranks for choice in choices)
        for choices in problem.tables
    )
    units = math.fsum(
        min(math.fsum(c.seconds.values()) for c in choices) for choices in problem.units
    )
    rest = Draft(problem, (), ()).shared_seconds
    return tables / ranks + units + math.fsum(rest.values())


def assemble(draft: Draft, found: Search) -> Plan:
    """Write a draft down as a plan."""
    problem = draft.problem
    bound = lower_bound(problem)
    slowest = draft.max_rank_seconds
    return sealed(
        Plan(
            schema="shardwright.plan/1",
            version=__version__,
            job=problem.job,
            cluster=problem.cluster,
            tables=tuple(_table_plan(placed) for placed in draft.tables),
            units=tuple(_unit_plan(choice) for choice in draft.units),
            blocks=encode(_blocks(draft)),
            timeline=encode_events(_events(draft)),
            ranks=tuple(_totals(draft, r) for r in range(problem.cluster.world_size)),
            max_rank_seconds=slowest,
            lower_bound_seconds=bound,
            gap=(slowest - bound) / bound,
            assumptions=problem.assumptions,
            search=found,
        )
    )


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
        ranks=placed.ranks,
        shard_sizes=tuple((s.rows, s.columns) for s in option.shards),
        seconds=placed.choice.seconds,
        nbytes=placed.choice.bytes,
    )


def _unit_plan(choice: UnitChoice) -> UnitPlan:
    layout = choice.layout
    return UnitPlan(
        name=choice.unit.name,
        tensors=tuple(tensor.fqn for tensor in choice.unit.tensors),
        parameter=choice.placement,
        gradient=choice.placement,
        optimizer_state=choice.placement,
        optimizer=choice.unit.optimizer,
        reshard_after_forward=not choice.replicated,
        seconds=math.fsum(choice.seconds.values()),
        bytes_per_rank=layout.shard_bytes,
        padding_bytes=layout.nbytes - layout.payload_bytes,
    )


def _blocks(draft: Draft) -> Iterable[Block]:
    """Parameters of every table, then every role of every dense unit."""
    for placed in draft.tables:
        yield from place(placed.choice.option, placed.ranks, placed.choice.table)
    world_size = draft.problem.cluster.world_size
    for choice in draft.units:
        tensors = choice.unit.tensors
        for role in ("parameter", "gradient", "optimizer_state"):
            yield from unit_blocks(tensors, choice.placement, role, world_size)


def _events(draft: Draft) -> Iterable[Event]:
    """The predicted timeline: exact bytes, peaks by phase, seconds by phase."""
    for rank, exact in enumerate(draft.exact):
        for (phase, kind, name), size in exact.items():
            yield Event(rank, 0 if phase == "setup" else 1, phase, kind, name, size)
    for rank, phases in enumerate(draft.peaks):
        for phase, kinds in phases.items():
            for kind, size in sorted(kinds.items()):
                yield Event(rank, 1, phase, kind, PEAK, size)
    for rank, seconds in enumerate(draft.seconds):
        start = 0.0
        for phase in (p for p in PHASES if p in seconds):
            yield Event(rank, 1, phase, "time", phase, 0, start, seconds[phase])
            start += seconds[phase]


def _totals(draft: Draft, rank: int) -> RankTotals:
    phases = draft.peaks[rank]
    phase = max(phases, key=lambda p: sum(phases[p].values()))
    exact: dict[str, int] = dict.fromkeys(EXACT_KINDS, 0)
    for (_, kind, _), size in draft.exact[rank].items():
        exact[kind] += size
    on_device = draft.problem.cluster.compute_device != "cpu"
    peak = draft.peak_bytes[rank]
    return RankTotals(
        rank=rank,
        peak_bytes=peak,
        peak_phase=phase,
        at_peak={str(kind): size for kind, size in phases[phase].items()},
        exact=exact,
        seconds=draft.rank_seconds[rank],
        hbm_bytes=peak if on_device else 0,
        ddr_bytes=0 if on_device else peak,
    )
