"""A bound that no plan of a problem can beat: one option per table, placement relaxed.

A mixed-integer program over the prices of all options, with T the slowest rank's seconds:

    minimise T
    one option per table
    seconds of all shards together  <=  T x ranks
    bytes of all shards together    <=  capacity x ranks
    the slowest shard of each table's option  <=  T

HiGHS solves it; what is returned is its dual bound, so it holds at any time limit.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np

from shardwright.estimate.recordings import described
from shardwright.job.job import Job
from shardwright.planner.problem import make_problem

RELATIVE_GAP = 1e-4


def installed() -> bool:
    """Whether HiGHS is there."""
    return importlib.util.find_spec("highspy") is not None


def bound(job: Job, seconds: float) -> dict[str, Any]:
    """The bound in ms and how it was found, within ``seconds``."""
    import highspy

    started = time.perf_counter()
    lp = _program(job, highspy)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", RELATIVE_GAP)
    solver.setOptionValue("time_limit", seconds)
    solver.passModel(lp)
    solver.run()
    info = solver.getInfo()
    return {
        "ms": info.mip_dual_bound,
        "relaxed_plan_ms": info.objective_function_value,
        "seconds": time.perf_counter() - started,
        "status": solver.modelStatusToString(solver.getModelStatus()),
        "options": lp.num_col_ - 1,
    }


def _program(job: Job, highspy: Any) -> Any:
    """The program in ms: the last column is T; rows are tables, slowest shards, time, bytes."""
    problem = make_problem(job, described(job), slow=False)
    on_cpu = problem.cluster.compute_device == "cpu"
    capacity, ranks = problem.capacity[1 if on_cpu else 0], problem.cluster.world_size
    columns = []
    for number, choices in enumerate(problem.tables):
        for choice in choices:
            runs = [
                (run.count, sum(cost.seconds.values()), cost.storage[1 if on_cpu else 0])
                for run, cost in zip(choice.option.runs, choice.costs, strict=True)
            ]
            if max(nbytes for _, _, nbytes in runs) <= capacity:
                seconds = sum(count * each for count, each, _ in runs)
                nbytes = sum(count * each for count, _, each in runs)
                columns.append((number, max(each for _, each, _ in runs), seconds, nbytes))
    tables, options = len(problem.tables), len(columns)
    owner = np.array([column[0] for column in columns])
    slowest = np.array([column[1] for column in columns]) * 1e3
    total = np.array([column[2] for column in columns]) * 1e3 / ranks
    share = np.array([column[3] / capacity for column in columns]) / ranks
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = options + 1, 2 * tables + 2
    lp.col_cost_ = np.append(np.zeros(options), 1.0)
    lp.col_lower_ = np.zeros(options + 1)
    lp.col_upper_ = np.append(np.ones(options), highspy.kHighsInf)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * options + [highspy.HighsVarType.kContinuous]
    below = np.full(tables + 1, -highspy.kHighsInf)
    lp.row_lower_ = np.concatenate([np.ones(tables), below, [-highspy.kHighsInf]])
    lp.row_upper_ = np.concatenate([np.ones(tables), np.zeros(tables + 1), [1.0]])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    last = np.full(options, 2 * tables)
    rows = np.stack([owner, tables + owner, last, last + 1], 1)
    values = np.stack([np.ones(options), slowest, total, share], 1)
    lp.a_matrix_.start_ = np.append(4 * np.arange(options + 1), 4 * options + tables + 1)
    lp.a_matrix_.index_ = np.concatenate([rows.ravel(), tables + np.arange(tables + 1)])
    lp.a_matrix_.value_ = np.concatenate([values.ravel(), -np.ones(tables + 1)])
    return lp
