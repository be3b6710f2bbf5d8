"""Why no plan can be faster, by the functions of the search's bound, and what more memory does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.core.amount import Amount, alike, grouped, leaf, named, summed, times
from shardwright.core.cluster import TIERS
from shardwright.planner.assemble import gap, proven
from shardwright.planner.crossing import without_hidden
from shardwright.planner.explain.explanation import REORDERED, Explanation, Subject, finished
from shardwright.planner.problem import Problem
from shardwright.planner.search.bound import (
    Bound,
    OptionTable,
    beyond_room,
    cheapest,
    lower_bound,
    priced,
    priced_options,
    slowest_rank,
    table,
)
from shardwright.planner.search.space import Floats, Space
from shardwright.planner.statistics.memory import fall, prices_of, with_more
from shardwright.planner.strategy.spacing import bounded_space
from shardwright.planner.strategy.steps import shared_seconds, step_seconds
from shardwright.planner.unit_floor import unit_floors

RELAXED = (
    "relaxed: shards may be spread over the ranks at will, so only sums matter; a byte of a scarce "
    "memory has a price in seconds, and every price proves a bound"
)
COUNTED = "no choice of options is within all budgets of less, shards counted by their sizes"
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
    bounds = [_with_the_rest(problem, found.seconds)]
    if plan.search.proved_seconds:
        how = "branch and bound" if plan.search.name == "exact" else COUNTED
        bounds.append(leaf(plan.search.proved_seconds, "proved_by_search", "s", how))
    notes = [RELAXED, f"binding: {found.binding}"]
    known = " and TorchRec's options" if problem.job.planner.as_torchrec else ""
    yield finished(
        f"seconds per step that no plan of this job{known} can beat",
        plan.lower_bound_seconds,
        proven(bounds, slowest),
        notes=notes,
        relative=REORDERED,
    )
    if plan.lower_bound_seconds:
        bound = leaf(plan.lower_bound_seconds, "lower_bound", "s", "above")
        title = "share by which the slowest rank is above the bound"
        yield finished(title, plan.gap, gap(slowest, bound), absolute=REORDERED)


def explain_prices(subject: Subject) -> Iterator[Explanation]:
    """By how much the bound falls with one more GiB of each memory on every rank."""
    problem = subject.draft.problem
    now = relaxation(problem, problem.capacity, "")
    for memory in prices_of(problem):
        more = relaxation(
            problem, with_more(problem.capacity, TIERS.index(memory.tier)), " with 1 GiB more"
        )
        yield finished(
            f"seconds by which the bound falls with 1 GiB more {memory.tier.upper()} per rank",
            memory.bound_falls,
            fall(*(without_hidden(problem, found.seconds, leaf) for found in (now, more))),
            relative=REORDERED,
            absolute=REORDERED * max(now.seconds.value, SAME),
            notes=[
                f"binding now: {now.binding}",
                f"binding with 1 GiB more: {more.binding}",
                f"the price of the next GiB alone is {memory.price:.6g} s",
            ],
        )


def relaxation(problem: Problem, capacity: tuple[int, int, int], suffix: str) -> Relaxation:
    """The bound of the tables alone under ``capacity``; names of its steps end in ``suffix``."""
    if not problem.tables:
        why = "no tables: the least of every unit"
        return Relaxation(leaf(0.0, f"relaxed{suffix}", "s", why), why)
    space = dataclasses.replace(bounded_space(problem), capacity=capacity)
    options = table(space)
    bound = lower_bound(space, options)
    if not bound.usable:
        why = "no choice of options fits the memory of all ranks together"
        return Relaxation(leaf(0.0, f"relaxed{suffix}", "s", why), why)
    names = [problem.model.tables[item.tables[0]].name for item in space.items]
    solved = _Solved(space, options, bound, names, suffix)
    ranks = leaf(space.ranks, "ranks", "", "cluster.world_size")
    work = solved.work(ranks)
    shard, why = solved.largest_shard(work.value / space.ranks)
    found = slowest_rank(work, shard, ranks, suffix)
    return Relaxation(named(f"relaxed{suffix}", found, "s"), why or _scarce(bound))


@dataclass(frozen=True)
class _Solved:
    """A space with its bound; ``names`` are those of its items."""

    space: Space
    options: OptionTable
    bound: Bound
    names: list[str]
    suffix: str

    @property
    def scarce(self) -> list[int]:
        """The tiers whose bytes have a price."""
        return [tier for tier in range(len(TIERS)) if self.bound.prices[tier]]

    @property
    def sizes(self) -> Floats:
        """The largest shard of every option that fits a rank."""
        return np.where(self.options.fits, self.options.largest, np.inf)

    def leaf(self, value: float, name: str, unit: str, source: str) -> Amount:
        """An input of this bound."""
        return leaf(value, f"{name}{self.suffix}", unit, source)

    def work(self, ranks: Amount) -> Any:
        """Seconds of the options that are cheapest at the bound's prices, beyond what fits."""
        source = "of a rank, reservation apart"
        prices, rooms = {}, []
        for tier in self.scarce:
            price, name = float(self.bound.prices[tier]), f"price_of_{TIERS[tier]}_byte"
            prices[tier] = self.leaf(price, name, "s/B", "by bisection")
            capacity = self.space.capacity[tier]
            room = self.leaf(capacity, f"{TIERS[tier]}_capacity", "B", source) * ranks
            rooms.append((room, prices[tier]))
        terms = [
            times(self._priced(label, option, prices), count)
            for label, option, count in grouped(self._cheapest())
        ]
        least = summed(f"{'priced_' if prices else ''}work{self.suffix}", terms, "s")
        return named(f"work{self.suffix}", beyond_room(least, rooms), "s") if rooms else least

    def _cheapest(self) -> dict[str, tuple[float, ...]]:
        """Seconds of every item's cheapest option, and its bytes of each tier."""
        within = self.sizes <= self.bound.seconds * (1 + SAME)
        seconds = np.where(within, self.options.seconds, np.inf)
        rows = cheapest(priced_options(seconds, self.options, self.bound.prices), self.options)
        columns = [self.options.seconds, *self.options.storage.T[self.scarce]]
        chosen = zip(*(column[rows].tolist() for column in columns), strict=True)
        return dict(zip(self.names, chosen, strict=True))

    def _priced(self, label: str, option: tuple[float, ...], prices: dict[int, Amount]) -> Any:
        source = "on all ranks, by its option that is cheapest at these prices"
        work = self.leaf(option[0], f"work{label}", "s", source)
        asked = []
        for nbytes, (tier, price) in zip(option[1:], prices.items(), strict=True):
            if nbytes:
                name = f"{TIERS[tier]}_bytes{label}"
                asked.append((self.leaf(int(nbytes), name, "B", "of the same option"), price))
        found = priced(work, asked)
        return named(f"priced_work{label}{self.suffix}", found, "s") if asked else found

    def largest_shard(self, work: float) -> tuple[Amount, str]:
        """What some shard takes in any plan; and why, where the bound rests on that."""
        least = np.minimum.reduceat(self.sizes, self.options.starts)
        item = int(least.argmax())
        floor, name, seconds = float(least[item]), self.names[item], self.bound.seconds
        source = f"{name} in its finest cut"
        why = f"{name} has no cut whose shards all take less" if floor >= work else ""
        if seconds > max(work, floor) * (1 + SAME):
            floor, source = seconds, "of any plan whose work is less per rank"
            why = (
                f"no plan's shards all take less than {seconds:.6g} s: of such options the work, "
                "bytes priced, is more per rank than that"
            )
        return self.leaf(floor, "largest_shard", "s", source), why


def _scarce(bound: Bound) -> str:
    scarce = [tier.upper() for tier, price in zip(TIERS, bound.prices, strict=True) if price]
    if not scarce:
        return "the work of all tables, spread evenly; no memory is scarce"
    return (
        f"the work of all tables within the {' and '.join(scarce)} of all ranks: the fastest "
        "options together need more"
    )


def _with_the_rest(problem: Problem, tables: Any) -> Any:
    """The bound of a whole step: the least of every unit and what every rank spends on top."""
    if not problem.model.is_trained:
        return tables
    if problem.tables:
        tables = without_hidden(problem, tables, leaf)
    units: list[Any] = []
    floors = list(unit_floors(problem.unit_space))
    for why in dict.fromkeys(floor.why for floor in floors):
        least = {floor.name: floor.seconds for floor in floors if floor.why == why}
        units += alike("unit", least, "s", why)
    shared = [
        leaf(seconds, f"{part}[every rank]", "s", "whatever is placed where")
        for part, seconds in shared_seconds(problem).items()
    ]
    return named("step", step_seconds(tables, units, shared), "s")
