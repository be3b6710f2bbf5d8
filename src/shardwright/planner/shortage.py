"""Why nothing fits: the fullest rank, the shortfall in bytes, and ways out that were tried."""

from __future__ import annotations

import msgspec

from shardwright.core.errors import NoPlanError
from shardwright.core.units import format_bytes
from shardwright.memory import simulate
from shardwright.planner import greedy
from shardwright.planner.draft import Draft
from shardwright.planner.problem import Problem, make_problem

MAX_RANKS_TRIED = 1024


def error(problem: Problem) -> NoPlanError:
    """The refusal, from the draft that asks least of its fullest rank."""
    draft = greedy.smallest(problem)
    capacity = problem.cluster.memory_per_rank
    rank = max(range(len(draft.peak_bytes)), key=lambda r: draft.peak_bytes[r])
    peak = draft.peak_bytes[rank]
    cap = "ddr_cap" if problem.cluster.compute_device == "cpu" else "hbm_cap"
    ways = [f"cluster.{cap} of {peak:,} B ({format_bytes(peak)}) fits", *_ways(problem)]
    return NoPlanError(
        f"no plan found that fits: rank {rank} is the fullest and needs {peak:,} B "
        f"({format_bytes(peak)}) of {capacity:,} B ({format_bytes(capacity)}), "
        f"{peak - capacity:,} B too much; {_largest(draft, rank)}. "
        f"What would help: {'; '.join(ways)}."
    )


def _largest(draft: Draft, rank: int) -> str:
    held = {name: size for (_, kind, name), size in draft.exact[rank].items() if kind == "weight"}
    name = max(held, key=lambda n: held[n])
    return f"its largest weight is {name} with {held[name]:,} B ({format_bytes(held[name])})"


def _ways(problem: Problem) -> list[str]:
    """More ranks or a smaller batch, each tried before it is named."""
    ways = []
    ranks = problem.cluster.world_size * 2
    while ranks <= MAX_RANKS_TRIED:
        if _fits(problem, ranks=ranks):
            ways.append(f"{ranks} ranks fit")
            break
        ranks *= 2
    batch = problem.batch.size // 2
    while batch >= 1:
        if _fits(problem, batch=batch):
            ways.append(f"a batch of {batch} per rank fits")
            break
        batch //= 2
    return ways


def _fits(problem: Problem, ranks: int | None = None, batch: int | None = None) -> bool:
    job = problem.job
    if ranks is not None:
        section = msgspec.structs.replace(job.cluster, world_size=ranks, local_world_size=ranks)
        job = msgspec.structs.replace(job, cluster=section)
    if batch is not None:
        job = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=batch))
    draft = greedy.smallest(make_problem(job, problem.model))
    loads = draft.kept_bytes
    fullest = max(range(len(loads)), key=lambda r: loads[r])
    capacity = problem.cluster.memory_per_rank
    if loads[fullest] > capacity:
        return False
    peaks = simulate.phase_peaks(draft.model, draft.modes, draft.load(fullest))
    alone = max(sum(kinds.values()) for kinds in peaks.values())
    return alone <= capacity and draft.fits  # one rank can say no for all of them
