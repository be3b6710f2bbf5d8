"""Why no plan can be faster: the relaxation that proves it, and what more memory would change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.core.amount import Amount, leaf, maximum, minimum, named
from shardwright.core.cluster import TIERS
from shardwright.planner.explain.explanation import Explanation, alike, finished, summed
from shardwright.planner.explain.subject import RELATIVE, Subject
from shardwright.planner.problem import Problem
from shardwright.planner.search.bound import Bound, Table, cheapest, lower_bound, table
from shardwright.planner.search.space import Floats, Space
from shardwright.planner.statistics.price import prices_of, with_more
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.spacing import bounded_space
from shardwright.planner.unit_floor import unit_floors

RELAXED = (
    "relaxed: shards may be spread over the ranks at will, so only sums matter; a byte of a scarce "
    "memory has a price in seconds, and every price proves a bound"
)
SAME = 1e-12


@dataclass(frozen=True)
class Relaxation:
    """A bound as a derivation, and the constraint that it rests on."""

    seconds: Any
    binding: str


def explain(subject: Subject) -> Iterator[Explanation]:
    """The lower bound, and the gap to it."""
    plan, problem = subject.plan, subject.draft.problem
    found = relaxation(problem, problem.capacity, "")
    slowest = leaf(plan.max_rank_seconds, "seconds_of_slowest_rank", "s", "--statistic ranks")
    bound = _with_the_rest(problem, found.seconds, "")
    if plan.search.proved_seconds:
        proved = leaf(plan.search.proved_seconds, "proved_by_search", "s", "branch and bound")
        bound = maximum(bound, proved)
    bound = named("lower_bound", minimum(bound, slowest), "s")
    notes = [RELAXED, f"binding: {found.binding}"]
    known = " and TorchRec's options" if problem.job.planner.as_torchrec else ""
    yield finished(
        f"seconds per step that no plan of this job{known} can beat",
        plan.lower_bound_seconds,
        bound,
        notes=notes,
        relative=RELATIVE,
    )
    if plan.lower_bound_seconds:
        proven = leaf(plan.lower_bound_seconds, "lower_bound", "s", "above")
        gap = named("gap", (slowest - proven) / proven)
        title = "share by which the slowest rank is above the bound"
        yield finished(title, plan.gap, gap, absolute=RELATIVE)


def explain_prices(subject: Subject) -> Iterator[Explanation]:
    """By how much the bound falls with one more GiB of each memory on every rank."""
    problem = subject.draft.problem
    now = relaxation(problem, problem.capacity, "")
    for told in prices_of(problem):
        more = relaxation(
            problem, with_more(problem.capacity, TIERS.index(told.tier)), " with 1 GiB more"
        )
        yield finished(
            f"seconds by which the bound falls with 1 GiB more {told.tier.upper()} per rank",
            told.bound_falls,
            named("bound_falls", maximum(now.seconds - more.seconds, 0.0), "s"),
            relative=RELATIVE,
            absolute=RELATIVE * max(now.seconds.value, SAME),
            notes=[
                f"binding now: {now.binding}",
                f"binding with 1 GiB more: {more.binding}",
                f"the price of the next GiB alone is {told.price:.6g} s",
            ],
        )


def relaxation(problem: Problem, capacity: tuple[int, int, int], suffix: str) -> Relaxation:
    """The bound of the tables alone under ``capacity``; names of its steps end in ``suffix``."""
    if not problem.tables:
        why = "no tables: the least of every unit"
        return Relaxation(leaf(0.0, f"relaxed{suffix}", "s", why), why)
    space = bounded_space(problem)
    space = dataclasses.replace(space, capacity=capacity)
    options = table(space)
    bound = lower_bound(space, options)
    if not bound.usable:
        why = "no choice of options fits the memory of all ranks together"
        return Relaxation(leaf(0.0, f"relaxed{suffix}", "s", why), why)
    sizes = np.where(options.fits, options.largest, np.inf)
    usable = np.where(sizes <= bound.seconds * (1 + SAME), options.seconds, np.inf)
    work = _work(problem, space, options, bound, usable, suffix)
    shard, why = _largest_shard(problem, space, options, bound, sizes, work.value, suffix)
    binding = why or _scarce(bound)
    return Relaxation(named(f"relaxed{suffix}", maximum(work, shard), "s"), binding)


def _work(
    problem: Problem, space: Space, options: Table, bound: Bound, usable: Floats, suffix: str
) -> Any:
    """Seconds per rank of the options that are cheapest at the bound's prices."""
    chosen = cheapest(usable + options.storage @ bound.prices, options)
    names = [problem.model.tables[item.tables[0]].name for item in space.items]
    work = {name: float(options.seconds[row]) for name, row in zip(names, chosen, strict=True)}
    source = "on all ranks, by its option that is cheapest at these prices"
    total = summed(f"work{suffix}", alike(f"work{suffix}", work, "s", source), "s")
    ranks = leaf(space.ranks, "ranks", "", "cluster.world_size")
    for tier, price, most in zip(TIERS, bound.prices, space.capacity, strict=True):
        if price:
            sizes = {
                n: int(options.storage[r, TIERS.index(tier)])
                for n, r in zip(names, chosen, strict=True)
            }
            sizes = {name: size for name, size in sizes.items() if size}
            name = f"{tier}_bytes{suffix}"
            asked = summed(name, alike(name, sizes, "B", "of the same options"), "B")
            cost = leaf(float(price), f"price_of_{tier}_byte{suffix}", "s/B", "by bisection")
            room = leaf(most, f"{tier}_capacity{suffix}", "B", "of a rank, reservation apart")
            over = named(f"{tier}_over{suffix}", asked - room * ranks, "B")
            total = named(f"work_and_{tier}{suffix}", total + cost * over, "s")
    return named(f"work_per_rank{suffix}", total / ranks, "s")


def _largest_shard(
    problem: Problem,
    space: Space,
    options: Table,
    bound: Bound,
    sizes: Floats,
    work: float,
    suffix: str,
) -> tuple[Amount, str]:
    """What some shard takes in any plan; and why, where the bound rests on that."""
    least = np.minimum.reduceat(sizes, options.starts)
    item = int(least.argmax())
    floor = float(least[item])
    name = problem.model.tables[space.items[item].tables[0]].name
    source = f"{name} in its finest cut"
    if bound.seconds > max(work, floor) * (1 + SAME):
        source = "of any plan whose work is less per rank"
        why = (
            f"no plan's shards all take less than {bound.seconds:.6g} s: of such options the work, "
            "bytes priced, is more per rank than that"
        )
        return leaf(bound.seconds, f"largest_shard{suffix}", "s", source), why
    why = f"{name} has no cut whose shards all take less" if floor >= work else ""
    return leaf(floor, f"largest_shard{suffix}", "s", source), why


def _scarce(bound: Bound) -> str:
    scarce = [tier.upper() for tier, price in zip(TIERS, bound.prices, strict=True) if price]
    if not scarce:
        return "the work of all tables, spread evenly; no memory is scarce"
    return (
        f"the work of all tables within the {' and '.join(scarce)} of all ranks: the fastest "
        "options together need more"
    )


def _with_the_rest(problem: Problem, tables: Any, suffix: str) -> Any:
    """The bound of a whole step: the least of every unit and what every rank spends on top."""
    if not problem.model.is_trained:
        return tables
    terms = [tables]
    floors = list(unit_floors(problem.unit_space))
    for why in dict.fromkeys(floor.why for floor in floors):
        least = {floor.name: floor.seconds for floor in floors if floor.why == why}
        terms += alike("unit", least, "s", why)
    for part, seconds in StepDraft(problem, (), ()).shared_seconds.items():
        terms.append(leaf(seconds, f"{part}[every rank]{suffix}", "s", "whatever is placed where"))
    return summed(f"step{suffix}", terms, "s")
