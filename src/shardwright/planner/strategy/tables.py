"""The bounded search over tables alone."""

from __future__ import annotations

from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.core.option import column_width
from shardwright.planner.draft import TablesDraft
from shardwright.planner.options.torchrec import TORCHREC_MIN_PARTITION
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import lower_bound, table
from shardwright.planner.search.space import ItemOption
from shardwright.planner.search.widening import search_widening
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.spacing import placed_tables, space_of


def search_tables(job: Job, model: ModelSpec, deadline: float) -> Found:
    """The fastest plan found. Kernels with weights in host memory are slower on every rank, so they
    are looked at only where accelerator memory has a price."""
    found, short = _search(make_problem(job, model, slow=False), deadline)
    if short:
        problem = make_problem(job, model, slow=True)
        if problem.tables != found.problem.tables:
            found, _ = _search(problem, deadline)
    return found


def _search(problem: Problem, deadline: float) -> tuple[Found, bool]:
    """What was found, and whether memory is short."""
    space = space_of(problem, problem.tables, problem.capacity)
    outcome = search_widening(space, _narrow, deadline)
    draft = None
    if outcome.best is not None:
        draft = TablesDraft(problem, placed_tables(space, outcome.best), ())
        if not draft.fits:  # by less than the last digit of the doubles that the search adds
            draft = None
    bound = outcome.bound
    found = Found(problem, draft, bound.seconds, "bounded", outcome.tried, outcome.feasible)
    return found, draft is None or bool(bound.prices.any())


def _narrow(option: ItemOption) -> bool:
    """Whether TorchRec's planner would look at it: one column split, no grid."""
    choice = option.choices[0]
    sharding_type = choice.option.sharding_type
    if sharding_type == "column_wise":
        table = choice.table
        width = column_width(table, table.min_partition or TORCHREC_MIN_PARTITION)
        return choice.option.runs[0].columns == width
    return sharding_type != "grid_shard"


def tables_bound(problem: Problem) -> float:
    """No plan of these tables is faster."""
    space = space_of(problem, problem.tables, problem.capacity)
    return lower_bound(space, table(space)).seconds
