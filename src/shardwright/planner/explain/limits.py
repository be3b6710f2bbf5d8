"""What limits a plan: why none can be faster, what more memory would do to that, and where memory
goes: what is set aside by which rule, what is filled, what is free."""

# All of it is made by the functions that made the plan's own numbers (the search's bound, the rules
# of a reservation), given amounts in place of numbers: what is explained cannot differ from what
# was done.

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.core.amount import (
    Amount,
    alike,
    grouped,
    largest,
    leaf,
    named,
    smallest,
    summed,
    times,
)
from shardwright.core.batch import feature_batches
from shardwright.core.cluster import TIERS, Tier
from shardwright.cost import reservation
from shardwright.job.planner import reservation_kind
from shardwright.planner.exchange import without_hidden
from shardwright.planner.explain.explanation import (
    REORDERED,
    Explanation,
    Subject,
    finished,
    rank_groups,
    ranks_label,
)
from shardwright.planner.planner import gap, proven
from shardwright.planner.problem import Problem
from shardwright.planner.search.bound import (
    Bound,
    Relaxed,
    beyond_room,
    cheapest,
    priced,
    priced_options,
    relaxed,
    slowest_rank,
)
from shardwright.planner.search.space import Floats
from shardwright.planner.statistics.memory import (
    DENSE,
    FREE,
    INPUTS,
    SET_ASIDE,
    TIER_WIDTH,
    fall,
    filled,
    free,
    prices_of,
    set_aside,
    with_more,
)
from shardwright.planner.statistics.records import MemoryLedger
from shardwright.planner.strategy.steps import shared_seconds, step_seconds, unit_floors
from shardwright.planner.strategy.tables import bounded_space

RELAXED = (
    "relaxed: shards may be spread over the ranks at will, so only sums matter; a byte of a scarce "
    "memory has a price in seconds, and every price proves a bound"
)
COUNTED = "no choice of options is within all budgets of less, shards counted by their sizes"
SAME = 1e-12
WHERE = "planner.reservation"


@dataclass(frozen=True)
class Relaxation:
    """A bound as a derivation, and the constraint that it rests on."""

    seconds: Any
    binding: str


def explain_bound(subject: Subject) -> Iterator[Explanation]:
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
        within=REORDERED * plan.lower_bound_seconds,
    )
    if plan.lower_bound_seconds:
        bound = leaf(plan.lower_bound_seconds, "lower_bound", "s", "above")
        title = "share by which the slowest rank is above the bound"
        yield finished(title, plan.gap, gap(slowest, bound), within=REORDERED)


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
            within=REORDERED * max(memory.bound_falls, now.seconds.value, SAME),
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
    whole = relaxed(dataclasses.replace(bounded_space(problem), capacity=capacity))
    space, _, bound = whole
    if not bound.usable:
        why = "no choice of options fits the memory of all ranks together"
        return Relaxation(leaf(0.0, f"relaxed{suffix}", "s", why), why)
    names = [problem.model.tables[item.tables[0]].name for item in space.items]
    solved = _Solved(whole, names, suffix)
    ranks = leaf(space.ranks, "ranks", "", "cluster.world_size")
    work = solved.work(ranks)
    shard, why = solved.largest_shard(work.value / space.ranks)
    found = slowest_rank(work, shard, ranks, suffix)
    return Relaxation(named(f"relaxed{suffix}", found, "s"), why or _scarce(bound))


@dataclass(frozen=True)
class _Solved:
    """The ``whole`` of a space; ``names`` are those of its items."""

    whole: Relaxed
    names: list[str]
    suffix: str

    @property
    def scarce(self) -> list[int]:
        """The tiers whose bytes have a price."""
        return [tier for tier in range(len(TIERS)) if self.whole.bound.prices[tier]]

    @property
    def sizes(self) -> Floats:
        """The largest shard of every option that fits a rank."""
        return np.where(self.whole.options.fits, self.whole.options.largest, np.inf)

    def leaf(self, value: float, name: str, unit: str, source: str) -> Amount:
        """An input of this bound."""
        return leaf(value, f"{name}{self.suffix}", unit, source)

    def work(self, ranks: Amount) -> Any:
        """Seconds of the options that are cheapest at the bound's prices, beyond what fits."""
        source = "of a rank, reservation apart"
        prices, rooms = {}, []
        for tier in self.scarce:
            price, name = float(self.whole.bound.prices[tier]), f"price_of_{TIERS[tier]}_byte"
            prices[tier] = self.leaf(price, name, "s/B", "by bisection")
            capacity = self.whole.space.capacity[tier]
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
        within = self.sizes <= self.whole.bound.seconds * (1 + SAME)
        seconds = np.where(within, self.whole.options.seconds, np.inf)
        rows = cheapest(
            priced_options(seconds, self.whole.options, self.whole.bound.prices), self.whole.options
        )
        columns = [self.whole.options.seconds, *self.whole.options.storage.T[self.scarce]]
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
        least = np.minimum.reduceat(self.sizes, self.whole.options.starts)
        item = int(least.argmax())
        floor, name, seconds = float(least[item]), self.names[item], self.whole.bound.seconds
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


def explain_reservation(subject: Subject) -> Iterator[Explanation]:
    """What is left for the plan of every memory, and the ledger of its fullest rank."""
    for record in subject.statistics.ledgers:
        yield _left(subject, record.tier)
        yield _ledger(record)


def _left(subject: Subject, tier: Tier) -> Explanation:
    """The capacity less what the rule of the reservation takes, by that rule's formulas."""
    plan, section = subject.plan, subject.plan.job.planner.reservation
    kind = reservation_kind(plan.job)
    aside = set_aside(plan, tier)
    amount = leaf(getattr(plan.cluster, f"{tier}_cap"), "capacity", "B", f"cluster.{tier}_cap")
    if aside[SET_ASIDE] and kind in ("absolute", "traced"):
        fixed = leaf(section.nbytes, "set_aside", "B", f"{WHERE}.nbytes")
        amount = reservation.amount_left(amount, fixed)
    elif aside[SET_ASIDE]:
        share = leaf(section.percentage, "percentage", "", f"{WHERE}.percentage")
        amount = reservation.share_left(amount, share)
    if aside[DENSE] or aside[INPUTS]:
        amount = reservation.left_for_tables(amount, _dense(subject, kind), _inputs(subject, kind))
    return finished(
        f"{tier.upper()} of a rank that the plan may fill",
        getattr(plan.reserved, f"{tier}_left"),
        named("left", amount, "B"),
        notes=[f"{WHERE}.kind {kind}"],
    )


def _dense(subject: Subject, kind: str) -> Any:
    section = subject.plan.job.planner.reservation
    nbytes = leaf(section.dense_bytes, "dense_parameter_bytes", "B", f"{WHERE}.dense_bytes")
    times = leaf(section.multiplier, "multiplier", "", f"{WHERE}.multiplier")
    if kind == "inference":
        copies = reservation.DENSE_COPIES_IN_INFERENCE
        times = leaf(copies, "multiplier", "", "inference keeps no gradients")
    return reservation.dense_bytes(nbytes, times)


def _inputs(subject: Subject, kind: str) -> Any:
    """Bytes of the inputs alive at once; features with equal numbers of ids are shown together."""
    groups: dict[tuple[float, int], int] = {}
    problem = subject.draft.problem
    for own in problem.model.tables:
        for pair in zip(own.pooling_factors, feature_batches(own, problem.batch), strict=True):
            groups[pair] = groups.get(pair, 0) + 1
    lengths, sizes = [], []
    for number, ((length, size), count) in enumerate(groups.items()):
        factor = leaf(length, f"pooling_factor_{number}", "ids", "tables.pooling_factors")
        features = leaf(count, f"features_{number}", "", "tables' features of that kind")
        lengths.append(factor * features)
        sizes.append(leaf(size, f"batch_size_{number}", "samples", "batch.size or batch_sizes"))
    ids = reservation.batch_ids(lengths, sizes)
    batches, copies = 1, 1
    if kind != "inference":
        batches, copies = reservation.PIPELINED_BATCHES, reservation.BATCH_COPIES
    return reservation.input_bytes(
        ids,
        leaf(batches, "batches", "", "alive at once"),
        leaf(copies, "copies_of_a_batch", "", "made on its way"),
    )


def _ledger(record: MemoryLedger) -> Explanation:
    capacity = leaf(record.capacity, "capacity", "B", f"cluster.{record.tier}_cap")
    sources = {
        SET_ASIDE: WHERE,
        DENSE: f"{WHERE}: dense part",
        INPUTS: f"{WHERE}: inputs of a step",
    }
    here = f"on rank {record.rank}; --statistic ranks --rank {record.rank}"
    lines = [
        leaf(line.nbytes, line.what, "B", sources.get(line.what, here))
        for line in record.lines
        if line.what != FREE
    ]
    return finished(
        f"{record.tier.upper()} that is free on rank {record.rank}, its fullest",
        record.lines[-1].nbytes,
        free(capacity, lines),
        ranks=[record.rank],
        notes=["what is taken and what is free are the whole capacity"],
    )


def explain_tiers(subject: Subject) -> Iterator[Explanation]:
    """The bytes of the fullest rank of each tier, and how near its emptiest one is to the edge."""
    nbytes = filled(subject.plan, subject.statistics.decisive)
    for number, record in enumerate(subject.statistics.peak_tiers, start=1):
        title = f"tier {number}, {ranks_label(record.ranks)}"
        values = {rank: nbytes[rank] for rank in record.ranks}
        terms = [group.value for group in rank_groups("bytes", values, "B")]
        most = largest("most", terms, "B")
        yield finished(f"{title}: most bytes", record.nbytes, most, ranks=record.ranks)
        if len(record.ranks) > 1:
            width = leaf(TIER_WIDTH, "width_of_a_tier", "B", "1 MiB")
            least = smallest("least", terms, "B")
            yield finished(
                f"{title}: bytes by which its emptiest rank is inside the tier",
                min(values.values()) - (record.nbytes - TIER_WIDTH),
                named("inside", least - (most - width), "B"),
                ranks=record.ranks,
            )
