"""The bounded search over tables and dense units together, inside one budget per rank.

Tables are placed by the bytes they keep. What a step adds to them is found by running the step, so
the second round leaves room for what the first draft added, and further rounds for what still broke
the budget. Units alone need no rounds: their arrangements are tried from the fastest on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from shardwright.core.amount import summed
from shardwright.core.errors import InputError
from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.core.quantities import SAME_SECONDS
from shardwright.core.schedule import Prefetch
from shardwright.core.sharding import TYPES, ShardingType, traits
from shardwright.core.timeline import Kind, Phase
from shardwright.planner.choices import Tables
from shardwright.planner.crossing import without_hidden
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import lower_bound, table
from shardwright.planner.search.least import least_memory
from shardwright.planner.search.polish import MAX_ITEMS, SHARPEST, changes, relieving
from shardwright.planner.search.search import search
from shardwright.planner.search.space import Assignment, Space
from shardwright.planner.search.state import restored
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.spacing import assignment_of, placed_tables, space_of
from shardwright.planner.tally import Placed, tally
from shardwright.planner.unit_choice import UnitChoice
from shardwright.planner.unit_floor import unit_floors
from shardwright.planner.units import Arrangement, worthwhile

MAX_BUDGET_ROUNDS = 6
MAX_CHANGES = 100  # of single tables, at the end
PASSES: tuple[Phase, ...] = ("forward", "backward")
OF_MODEL: tuple[Kind, ...] = ("activation", "temporary", "input", "buffer")  # not of its units

# The first replica and the first routed table cost collectives of their own, which the search of
# tables does not see: so plans that avoid either are proposed as well.
LEFT_OUT: tuple[tuple[ShardingType, ...], ...] = (
    (),
    tuple(t for t in TYPES if traits(t).replicated),
    tuple(t for t in TYPES if not traits(t).replicated),
)


def search_steps(job: Job, model: ModelSpec, watch: Watch) -> Found:
    """The fastest draft whose simulated peak fits."""
    problem = make_problem(job, model)
    seeker = _Seeker(problem, watch, step_bound(problem))
    if model.tables:
        seeker.run()
    else:
        seeker.arrange()
    best = seeker.best and _changed_singly(seeker.best, watch)
    return Found(
        problem,
        best,
        seeker.bound,
        "bounded",
        seeker.tried,
        seeker.feasible,
        gave_up=seeker.gave_up,
    )


def _changed_singly(draft: StepDraft, watch: Watch) -> StepDraft:
    """The draft after changes of single tables, as long as one makes a step faster and fits. The
    search of tables does not see what several of them share of an exchange."""
    if not draft.tables:
        return draft
    problem = draft.problem
    space = space_of(problem, problem.tables, draft.room)
    for _ in range(MAX_CHANGES):
        better = None if watch.over() else next(_faster(draft, space), None)
        if better is None:
            break
        draft = better
        watch.found(draft.max_rank_seconds)
    return draft


def _faster(draft: StepDraft, space: Space) -> Iterator[StepDraft]:
    """Drafts with one table otherwise that fit and take less than ``draft``."""
    found = assignment_of(space, draft.tables)
    if found is None:
        return
    latency = draft.shared_latency if len(space.items) <= MAX_ITEMS else 0.0
    state = restored(space, draft.max_rank_seconds, SHARPEST, found)
    for item in relieving(state, state.worst + latency):
        for change in sorted(changes(state, item, state.worst + latency)):
            options, slots = [*found.options], [*found.slots]
            options[item], slots[item] = change.option, change.slots
            tables = placed_tables(space, Assignment(tuple(options), tuple(slots)))
            tried = replace(draft, tables=tables)
            gain = state.worst - change.seconds + draft.shared_latency - tried.shared_latency
            least = SAME_SECONDS * draft.max_rank_seconds
            if gain > least < draft.max_rank_seconds - tried.max_rank_seconds and tried.fits:
                yield tried


def step_bound(problem: Problem) -> float:
    """No plan of this problem can be faster: tables relaxed, and the least of every unit."""
    least = without_hidden(problem, _least(problem)) if problem.tables else 0.0
    floors = [floor.seconds for floor in unit_floors(problem.unit_space)]
    found: float = step_seconds(least, floors, [*shared_seconds(problem).values()])
    return found


def _least(problem: Problem, left_out: tuple[ShardingType, ...] = ()) -> float:
    """Seconds that the tables take at least, where some types are left out."""
    try:
        space = space_of(problem, without(problem.tables, left_out), problem.capacity)
    except InputError:
        if left_out:  # what is left breaks the job's rules
            return math.inf
        raise
    return lower_bound(space, table(space)).seconds


def shared_seconds(problem: Problem) -> dict[str, float]:
    """Seconds by part that every rank spends beside the units, whatever is placed where."""
    return StepDraft(problem, (), ()).shared_seconds


def step_seconds(tables: Any, units: Sequence[Any], shared: Sequence[Any]) -> Any:
    """Seconds of a step: of the tables, of every unit, and what every rank spends besides."""
    rest = summed("seconds_of_every_rank", shared, "s", math.fsum)
    return tables + summed("seconds_of_units", units, "s", math.fsum) + rest


def smallest(problem: Problem) -> StepDraft:
    """The draft that asks least of the fullest rank, whatever its memory."""
    tables = smallest_tables(problem)
    found = list(problem.unit_space.arrangements())
    at_rest = min(found, key=lambda a: (a.kept, a.footprint))
    at_work = min(found, key=lambda a: a.footprint)
    drafts = (StepDraft(problem, tables, a.units, a.prefetch) for a in (at_rest, at_work))
    return min(drafts, key=lambda draft: draft.highest_peak)


def smallest_tables(problem: Problem) -> tuple[Placed, ...]:
    """Tables placed so that the fullest rank holds as little as the search can make it."""
    if not problem.tables:
        return ()
    space = space_of(problem, problem.tables, problem.capacity)
    found = least_memory(space).best
    assert found is not None
    return placed_tables(space, found)


class _Known(NamedTuple):
    """What was ``placed`` in ``room``, and the bytes that its fullest rank holds."""

    room: int
    filled: int
    placed: tuple[Placed, ...] | None


@dataclass
class _Seeker:
    """The best draft so far; table placements are remembered by what was left out.
    ``gave_up``: something faster would fit but for what a step adds to what a rank keeps."""

    problem: Problem
    watch: Watch
    bound: float
    best: StepDraft | None = None
    tried: int = 0
    feasible: int = 0
    gave_up: bool = False
    known: dict[int, list[_Known]] = field(default_factory=dict)
    too_much: dict[tuple[int, ...], int] = field(default_factory=dict)

    def arrange(self) -> None:
        """Units alone: the fastest that fit, then those that save memory and hardly cost time."""
        found = sorted(self.problem.unit_space.arrangements(), key=lambda a: a.seconds)
        fastest = next(filter(self._fits, found), None)
        faster = takewhile(lambda a: a is not fastest, found)
        self.gave_up = any(a.kept <= self.problem.decisive_capacity for a in faster)
        if fastest is None:
            self._take_smallest()
            return
        self._take(self._draft(fastest))
        seconds = self._draft(fastest).max_rank_seconds
        near = worthwhile(found, fastest, seconds)
        if not self.watch.over():
            self._take(self._draft(next(filter(self._fits, near), fastest)))

    def _fits(self, arrangement: Arrangement) -> bool:
        """Whether its peak fits; not asked where less does not: what a rank keeps, alone or beside
        the activations, or the same placement with less of it at once."""
        capacity = self.problem.decisive_capacity
        if max(arrangement.kept, arrangement.at_rest + self.activations) > capacity:
            return False
        if arrangement.footprint > self.too_much.get(arrangement.placed, math.inf):
            return False
        self.tried += 1
        fits = self._draft(arrangement).fits
        self.feasible += fits
        if not fits:
            self.too_much[arrangement.placed] = arrangement.footprint
        return fits

    @cached_property
    def activations(self) -> int:
        """Bytes that a forward and backward take at their peak however the units are placed."""
        peaks = StepDraft(self.problem, (), ()).peaks[0]
        return max(sum(peaks[phase].get(kind, 0) for kind in OF_MODEL) for phase in PASSES)

    def _draft(self, arrangement: Arrangement) -> StepDraft:
        return StepDraft(self.problem, (), arrangement.units, arrangement.prefetch)

    def run(self) -> None:
        """Rounds of shrinking budgets until no fast draft is over."""
        capacity = self.problem.decisive_capacity
        budget = capacity
        for round_number in range(MAX_BUDGET_ROUNDS):
            overshoot = transient = 0
            for draft in self._drafts(budget):
                if self.watch.over() and self.best is not None:
                    return
                self.tried += 1
                transient = transient or max(draft.peak_bytes) - max(draft.kept_bytes)
                if self.best is not None and draft.max_rank_seconds >= self.best.max_rank_seconds:
                    continue
                if draft.fits:
                    self.feasible += 1
                    self._take(draft)
                    if draft.max_rank_seconds <= self.bound * (1 + SAME_SECONDS):
                        return
                else:
                    excess = max(draft.peak_bytes) - capacity
                    overshoot = min(overshoot, excess) if overshoot else excess
            self.gave_up |= overshoot > 0
            if round_number == 0:
                budget -= max(transient, overshoot)
            elif overshoot:
                budget -= overshoot
            else:
                break
        if self.best is None:
            self._take_smallest()

    def _take_smallest(self) -> None:
        self.tried += 1
        last = smallest(self.problem)
        if last.fits:
            self.feasible += 1
            self._take(last)

    def _take(self, draft: StepDraft) -> None:
        self.best = draft
        self.watch.found(draft.max_rank_seconds)

    def _drafts(self, budget: int) -> Iterator[StepDraft]:
        for units, prefetch in self.arrangements:
            alone = StepDraft(self.problem, (), units, prefetch)
            kept = max(alone.kept_bytes)
            for variant, left_out in enumerate(self.left_out):
                least = alone.max_rank_seconds + self.least[variant]
                if self.best is not None and least >= self.best.max_rank_seconds:
                    continue
                placed = self._tables(variant, left_out, budget - kept)
                if placed is not None:
                    yield replace(alone, tables=placed)

    @cached_property
    def arrangements(self) -> list[tuple[tuple[UnitChoice, ...], Prefetch]]:
        """Of the units that are placed alike, the fastest cut."""
        best: dict[tuple[int, ...], Arrangement] = {}
        for found in self.problem.unit_space.arrangements():
            known = best.get(found.placed)
            if known is None or found.seconds < known.seconds:
                best[found.placed] = found
        return [(found.units, found.prefetch) for found in best.values()]

    @cached_property
    def least(self) -> list[float]:
        """Seconds that the tables take at least, by what is left out."""
        least = (_least(self.problem, left_out) for left_out in self.left_out)
        return [without_hidden(self.problem, seconds) for seconds in least]

    @cached_property
    def left_out(self) -> tuple[tuple[ShardingType, ...], ...]:
        """What is left out in turn; nothing where every table's search knows its own exchange."""
        alone = all(choice.latency for choices in self.problem.tables for choice in choices)
        return LEFT_OUT[:1] if alone else LEFT_OUT

    def _tables(
        self, variant: int, left_out: tuple[ShardingType, ...], room: int
    ) -> tuple[Placed, ...] | None:
        if room <= 0:
            return None
        ranks, tier = self.problem.cluster.world_size, self.problem.decisive_tier
        known = self.known.setdefault(variant, [])
        for before in known:
            if before.filled <= room <= before.room:  # found with more room, it fits this as well
                return before.placed
        placed = self._placed(left_out, room)
        filled = 0 if placed is None else max(tally(placed, ranks).tier_bytes(tier, ranks))
        known.append(_Known(room, filled, placed))
        return placed

    def _placed(self, left_out: tuple[ShardingType, ...], room: int) -> tuple[Placed, ...] | None:
        tables = without(self.problem.tables, left_out)
        try:
            space = space_of(self.problem, tables, self.problem.capacity_with(room))
        except InputError:
            if left_out:  # what is left breaks the job's rules
                return None
            raise
        found = search(space, self.watch.part()).best
        return None if found is None else placed_tables(space, found)


def without(tables: Tables, types: tuple[ShardingType, ...]) -> Tables:
    """The choices that are not of ``types``, for tables that have any."""
    return tuple(
        tuple(c for c in choices if c.option.sharding_type not in types) or choices
        for choices in tables
    )
