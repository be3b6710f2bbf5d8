"""TorchRec's way to search: proposers and a partitioner, over the options that it looks at."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.model import CacheSpec, ModelSpec, TableSpec
from shardwright.core.option import Option
from shardwright.job.job import Job
from shardwright.job.planner import ConstraintsSection
from shardwright.planner.choice import Choice, Cost
from shardwright.planner.choices import Tables, price
from shardwright.planner.draft import TablesDraft
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.tables import tables_bound
from shardwright.torchrec.loop import Proposed, propose
from shardwright.torchrec.proposers import make_proposers
from shardwright.torchrec.scaleup import CACHED, WHOLE


def search(job: Job, model: ModelSpec, watch: Watch) -> Found:
    """The best plan of the job's proposers; its bound is that of the same options."""
    if job.planner.constraints != ConstraintsSection():
        raise UnsupportedError(
            expected(
                "planner.constraints",
                "none with search 'proposers', as in TorchRec",
                "a section",
                "Use search 'bounded'.",
            )
        )
    problem = make_problem(job, model)
    section = job.planner

    def priced(cases: Sequence[tuple[TableSpec, Option]]) -> Sequence[Choice]:
        return price(problem.job, problem.context, cases)

    found = propose(
        problem.tables,
        problem.cluster,
        [problem.capacity] * problem.cluster.world_size,
        make_proposers(section.proposers),
        section.partitioner,
        price=priced,
        watch=watch,
    )
    return Found(
        problem,
        _draft(problem, found),
        tables_bound(problem),
        "proposers",
        found.proposals,
        found.plans,
        skipped=tuple(f"{name}: {why}" for name, why in found.skipped.items()),
        attempts=found.attempts,
    )


def _draft(problem: Problem, found: Proposed) -> TablesDraft | None:
    """The best placement in the job's order of tables."""
    if not found.tables:
        return None
    placed = {item.choice.table.name: item for item in found.tables}
    return TablesDraft(problem, tuple(placed[table.name] for table in problem.model.tables), ())


def bounded_tables(problem: Problem) -> Tables:
    """The choices of every table; where proposers may enlarge caches, cached ones take no longer
    than with any larger cache, and a table may be kept whole instead."""
    planner = problem.job.planner
    if planner.search != "proposers" or all(p.kind != "scaleup" for p in planner.proposers):
        return problem.tables
    return tuple(_enlarged(problem, choices) for choices in problem.tables)


def _enlarged(problem: Problem, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    cached = [choice for choice in choices if choice.option.compute_kernel == CACHED]
    full, whole = [], []
    for choice in cached:
        cache = msgspec.structs.replace(choice.table.cache or CacheSpec(), load_factor=1.0)
        full.append((msgspec.structs.replace(choice.table, cache=cache), choice.option))
        whole.append((choice.table, msgspec.structs.replace(choice.option, compute_kernel=WHOLE)))
    relaxed = {
        choice.option: msgspec.structs.replace(
            choice, costs=tuple(map(_least, choice.costs, other.costs))
        )
        for choice, other in zip(cached, price(problem.job, problem.context, full), strict=True)
    }
    kept = {choice.option for choice in choices}
    more = [c for c in price(problem.job, problem.context, whole) if c.option not in kept]
    return (*(relaxed.get(choice.option, choice) for choice in choices), *more)


def _least(small: Cost, large: Cost) -> Cost:
    """Part by part the lesser seconds of two sizes of a cache, each of which falls or rises from
    one to the other; the bytes of the smaller."""
    seconds = {part: min(value, large.seconds[part]) for part, value in small.seconds.items()}
    return msgspec.structs.replace(small, seconds=seconds, total_seconds=sum(seconds.values()))
