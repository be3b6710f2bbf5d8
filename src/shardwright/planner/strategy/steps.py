"""The bounded search over tables and dense units together, inside one budget per rank.

Tables are placed by the bytes they keep. What a step adds to them is found by running the step, so
of drafts that it takes over the budget a further round leaves room for that. Units alone need no
rounds: their arrangements are tried from the fastest on.
"""

# The search of tables adds up bytes that shards keep. What decides is the peak of a step, which
# also has exchanges, gathered units and activations, and is known only once the step was run on a
# heap. So tables are searched in some room, the step is run, and where its peak is over the budget
# the next round has less room. The peak is not guessed instead: a guess that is too low makes plans
# that run out of memory, one that is too high loses plans that fit.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardwright.core.amount import summed
from shardwright.core.errors import InputError
from shardwright.core.model import ModelSpec
from shardwright.core.quantities import SAME_SECONDS
from shardwright.core.schedule import Prefetch
from shardwright.core.timeline import Kind, Phase
from shardwright.cost import dense, network, optimizer
from shardwright.cost.network import Collective
from shardwright.job.job import Job
from shardwright.planner.choice import Choice, Placed, tally
from shardwright.planner.choices import Tables
from shardwright.planner.draft import Found
from shardwright.planner.exchange import least_latencies, windows_of, without_hidden
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import relaxed
from shardwright.planner.search.polish import SHARPEST, changes, relieving
from shardwright.planner.search.search import search
from shardwright.planner.search.space import Assignment, Space
from shardwright.planner.search.state import restored
from shardwright.planner.search.watch import Watch
from shardwright.planner.search.widening import least_memory
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.tables import assignment_of, placed_tables, space_of
from shardwright.planner.unit_choice import UnitChoice
from shardwright.planner.units import Arrangement, Unit, UnitSpace, fastest_first, worthwhile

ALONE = "its fastest placement"
ANYHOW = "its compute, and its bytes over the links and through memory"
ONCE = "one update and one reduce at least, however many layers share them"

MAX_BUDGET_ROUNDS = 6
MAX_CHANGES = 100  # of single tables, at the end
PASSES: tuple[Phase, ...] = ("forward", "backward")
OF_MODEL: tuple[Kind, ...] = ("activation", "temporary", "input", "buffer")  # not of its units

# The first replica, the first routed table, the first whose ids have to be counted and the first
# with sums over columns cost collectives of their own, which the search of tables does not see: so
# plans that avoid any of them are proposed as well.
AVOIDED: tuple[Callable[[Choice], bool], ...] = (
    lambda choice: choice.is_replicated,
    lambda choice: not choice.is_replicated,
    lambda choice: not (choice.is_replicated or choice.is_steady),
    lambda choice: choice.has_strips,
)


def search_steps(job: Job, model: ModelSpec, watch: Watch, sure: bool = True) -> Found:
    """The fastest draft whose simulated step fits."""
    problem = make_problem(job, model, sure=sure)
    seeker = _StepSearch(problem, watch, step_bound(problem))
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
    # The search of tables prices each alone, but the first of a kind in a module pays for the
    # collectives of all: a step that moves the last of them saves what no single price shows.
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
    # A change may make a rank slower by itself and still pay off by a collective that no table
    # needs any more: so much slower it may be.
    latency = 0.0 if space.has_many else draft.shared_latency
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
    least = without_hidden(problem, _least(problem, problem.tables)) if problem.tables else 0.0
    floors = [floor.seconds for floor in unit_floors(problem.unit_space)]
    found: float = step_seconds(least, floors, [*shared_seconds(problem).values()])
    return found


def _least(problem: Problem, tables: Tables) -> float:
    """Seconds that the tables take at least, by any of their choices."""
    try:
        space = space_of(problem, tables, problem.capacity)
    except InputError:
        if tables is not problem.tables:  # what is left breaks the job's rules
            return math.inf
        raise
    return relaxed(space).bound.seconds


def shared_seconds(problem: Problem) -> dict[str, float]:
    """Seconds by part that every rank spends at least beside the units and what the tables take one
    by one, whatever is placed where."""
    units = tuple(choices[0] for choices in problem.units)
    found = dict(StepDraft(problem, (), units).other_seconds)
    for part, seconds in _latencies(problem, problem.tables).items():
        found[part] = found.get(part, 0.0) + seconds
    return found


def _latencies(problem: Problem, tables: Tables) -> dict[str, float]:
    """The least that exchanges of several tables take; nothing where some may be hidden."""
    return least_latencies(problem, tables) if windows_of(problem) is None else {}


def step_seconds(tables: Any, units: Sequence[Any], shared: Sequence[Any]) -> Any:
    """Seconds of a step: of the tables, of every unit, and what every rank spends besides."""
    rest = summed("seconds_of_every_rank", shared, "s", math.fsum)
    return tables + summed("seconds_of_units", units, "s", math.fsum) + rest


def smallest(problem: Problem) -> StepDraft:
    """The draft that asks least of the fullest rank, whatever its memory."""
    # What keeps least between steps need not have the lowest peak: sharded units are gathered whole
    # in turn. Which of the two is lower only the steps of both can say.
    tables = smallest_tables(problem)
    found = problem.unit_space.arrangements
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


class Floor(NamedTuple):
    """No plan spends less than ``seconds`` on what ``name`` says; ``why`` is what that rests on."""

    name: str
    seconds: float
    why: str


def unit_floors(space: UnitSpace) -> Iterator[Floor]:
    """Floors that add up to one of all units."""
    for run in space.runs:
        if run[0].series or 1 in space.prefetches:
            yield from _of_run(space, run)
        else:
            choices = space.choices(run)
            least = min(math.fsum(choice.seconds.values()) for choice in choices)
            yield Floor(run[0].name, least, ALONE)


def _of_run(space: UnitSpace, run: Unit) -> Iterator[Floor]:
    """Layers that may be merged: every layer's own, and once what all of them may share.

    Compute cannot hide, nor can the share of a collective that needs the same cores. Resharding,
    padding and more collectives only add to that.
    """
    context = space.context
    for unit in run:
        choices = space.choices((unit,))
        moved = min(_bytes_of(space, choice) for choice in choices)
        cleared = _payload(choices[0], choices[0].sizes.cleared)
        own = sum(choices[0].computing) + dense.gradient_seconds(cleared, context.c)
        yield Floor(unit.name, own + moved, ANYHOW)
    # Latencies count once a run, for layers may all share one unit; compute and bytes count for
    # each, for merging saves none of them.
    waits = [
        sum(network.latency_seconds(k, ranks, c, local) for k, _, ranks, local, c in calls)
        for calls in (_calls(choice) for choice in space.choices(run[:1]))
    ]
    once = _shown(space) * min(waits) + dense.update_seconds(0, context.c)
    yield Floor(f"{run[0].series or run[0].name}, once", once, ONCE)


def _calls(choice: UnitChoice) -> Iterator[tuple[Collective, int, int, int | None, Any]]:
    """The collectives of a step, each with its bytes, padding included, its ranks, how many of them
    are near, and constants; what is frozen reduces nothing."""
    sizes, c = choice.sizes, choice.context.c
    if not choice.replicated:
        yield "all_gather", sizes.gathered, sizes.shards, sizes.local, c
    if choice.reduces and choice.replicated:
        replicas = network.among_replicas(c, sizes.shards, sizes.local)
        yield "all_reduce", sizes.reduced, sizes.shards, sizes.local, replicas
    elif choice.reduces:
        yield "reduce_scatter", sizes.reduced, sizes.shards, sizes.local, c
    if choice.between:
        kind: Collective = "reduce_scatter" if choice.grid.twice else "all_reduce"
        replicas = network.among_replicas(c, sizes.replicas, sizes.replicas_local)
        yield kind, sizes.part_reduced, sizes.replicas, sizes.replicas_local, replicas


def _shown(space: UnitSpace) -> float:
    """The share of a collective that costs compute."""
    return 1 - space.context.c["overlap"] if 1 in space.prefetches else 1.0


def _bytes_of(space: UnitSpace, choice: UnitChoice) -> float:
    """Transfers and update of a unit that every rank keeps, or that all ranks share."""
    context = space.context
    moved = 0.0
    for kind, whole, ranks, local, c in _calls(choice):
        sent = _payload(choice, whole)
        moved += network.transfer_seconds(kind, sent, ranks, c, local)
        of_parts = choice.replicated or whole == choice.sizes.part_reduced
        if not (of_parts or (choice.stays and kind == "all_gather")):
            moved += dense.fresh_seconds(sent, context.c)
    trained = choice.layout.trained.payload_bytes
    # An even share, which no rank's is below: padding and uneven cuts only add.
    held = trained if choice.replicated else trained / choice.layout.world_size
    on_host = choice.away or not context.on_gpu
    updated: float = optimizer.dense_update_bytes(held, choice.unit.optimizer, on_host=on_host)
    return _shown(space) * moved + updated / context.c["memory_rate"]


def _payload(choice: UnitChoice, whole: int) -> int:
    """Bytes of the tensors alone in a buffer of ``whole`` bytes, or less."""
    layout = choice.layout
    return layout.payload_bytes * whole // layout.nbytes if layout.nbytes else 0


class _Known(NamedTuple):
    """What was ``placed`` in ``room``, and the bytes that its fullest rank holds."""

    room: int
    filled: int
    placed: tuple[Placed, ...] | None


@dataclass
class _StepSearch:
    """The best draft so far; table placements are remembered by the choices that they are from.
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
    drafts: dict[Arrangement, StepDraft] = field(default_factory=dict)

    def arrange(self) -> None:
        """Units alone: the fastest that fit, then those that save memory and hardly cost time."""
        found = self.problem.unit_space.arrangements
        fastest = next(filter(self._fits, fastest_first(found, self._is_too_large)), None)
        self.gave_up = self.tried > self.feasible or self._spared(found, fastest)
        if fastest is None:
            self._take_smallest()
            return
        self._take(self._draft(fastest))
        seconds = self._draft(fastest).max_rank_seconds
        near = worthwhile(found, fastest, seconds)
        if not self.watch.over():
            self._take(self._draft(next(filter(self._fits, near), fastest)))

    def _spared(self, found: Sequence[Arrangement], fastest: Arrangement | None) -> bool:
        """Whether what a rank keeps of anything faster would fit; of what is as fast the first is
        taken."""
        places = [k for k, a in enumerate(found) if a.kept <= self.problem.decisive_capacity]
        if fastest is None:
            return bool(places)
        # The floor of an arrangement is known at once, its seconds take a walk of the whole step:
        # they are asked for only where the floor does not say no already.
        limit = fastest.seconds, next(k for k in places if found[k] is fastest)
        return any(
            found[k].floor <= fastest.seconds and (found[k].seconds, k) < limit for k in places
        )

    def _is_too_large(self, arrangement: Arrangement) -> bool:
        """Whether less does not fit: what a rank keeps, alone or beside the activations, or the
        same placement with less of it at once."""
        # All of this is known without running the step, which takes most of the time of a search.
        # Within one placement a larger footprint is taken to have no lower peak: once one did not
        # fit, the larger ones are not run. Where that is wrong an arrangement that fits is passed
        # over.
        capacity = self.problem.decisive_capacity
        if max(arrangement.kept, arrangement.at_rest + self.activations) > capacity:
            return True
        return arrangement.footprint > self.too_much.get(arrangement.placed, math.inf)

    def _fits(self, arrangement: Arrangement) -> bool:
        """Whether its peak fits."""
        if self._is_too_large(arrangement):
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
        if arrangement not in self.drafts:
            its = arrangement.units, arrangement.prefetch
            self.drafts[arrangement] = StepDraft(self.problem, (), *its)
        return self.drafts[arrangement]

    def run(self) -> None:
        """Rounds of drafts with tables; those over the budget are made anew with less room."""
        drafts = [StepDraft(self.problem, (), *its) for its in self.arrangements]
        capacity = self.problem.decisive_capacity
        ways = [
            (draft, variant, capacity - max(draft.kept_bytes))
            for draft in drafts
            for variant in range(len(self.variants))
        ]
        for _ in range(MAX_BUDGET_ROUNDS):
            again = []
            for draft, variant, room in ways:
                if self.watch.over() and self.best is not None:
                    return
                less = self._propose(draft, variant, room)
                if less is not None:
                    again.append((draft, variant, less))
                if self.best and self.best.max_rank_seconds <= self.bound * (1 + SAME_SECONDS):
                    return
            ways = again
        if self.best is None:
            self._take_smallest()

    def _propose(self, alone: StepDraft, variant: int, room: int) -> int | None:
        """Take the draft with tables in so much room where it is better; how much room to look at
        next where only its peak stands in the way."""
        fastest = math.inf if self.best is None else self.best.max_rank_seconds
        if alone.max_rank_seconds + self.least[variant] >= fastest:
            return None
        known = self._tables(variant, room)
        if known is None or known.placed is None:
            return None
        self.tried += 1
        draft = replace(alone, tables=known.placed)
        if draft.max_rank_seconds >= fastest:
            return None
        if draft.fits:
            self.feasible += 1
            self._take(draft)
            return None
        # Less than the tables filled, not than the room they had: where they left much of it free,
        # a smaller room that is still larger than that would find the same placement again.
        self.gave_up = True
        room = self.problem.decisive_capacity
        needed = draft.least_demand if draft.least_demand > room else draft.demand
        return known.filled - max(1, needed - room)

    def _take_smallest(self) -> None:
        self.tried += 1
        last = smallest(self.problem)
        if last.fits:
            self.feasible += 1
            self._take(last)

    def _take(self, draft: StepDraft) -> None:
        self.best = draft
        self.watch.found(draft.max_rank_seconds)

    @cached_property
    def arrangements(self) -> list[tuple[tuple[UnitChoice, ...], Prefetch]]:
        """Of the units that are placed alike, the fastest cut."""
        best: dict[tuple[int, ...], Arrangement] = {}
        for found in self.problem.unit_space.arrangements:
            known = best.get(found.placed)
            if known is None or (found.floor < known.seconds and found.seconds < known.seconds):
                best[found.placed] = found
        return [(found.units, found.prefetch) for found in best.values()]

    @cached_property
    def least(self) -> list[float]:
        """Seconds that the tables take at least, by any of the choices of each variant."""
        problem = self.problem
        return [
            without_hidden(problem, _least(problem, tables))
            + math.fsum(_latencies(problem, tables).values())
            for tables in self.variants
        ]

    @cached_property
    def variants(self) -> list[Tables]:
        """All choices, and without some; all alone where the search of tables knows the exchange of
        each."""
        tables = self.problem.tables
        if all(choice.latency for choices in tables for choice in choices):
            return [tables]
        found = [tables]
        for avoided in AVOIDED:
            some = without(tables, avoided)
            if not any(_same(some, other) for other in found):
                found.append(some)
        return found

    def _tables(self, variant: int, room: int) -> _Known | None:
        """What the search of tables finds in ``room``; None in none."""
        if room <= 0:
            return None
        ranks, tier = self.problem.cluster.world_size, self.problem.cluster.decisive_tier
        known = self.known.setdefault(variant, [])
        for before in known:
            # Found with more room, it fits this as well, and nothing faster fits in less.
            if before.filled <= room <= before.room:
                return before
        placed = self._placed(self.variants[variant], room)
        filled = 0 if placed is None else max(tally(placed, ranks).tier_bytes(tier, ranks))
        known.append(_Known(room, filled, placed))
        return known[-1]

    def _placed(self, tables: Tables, room: int) -> tuple[Placed, ...] | None:
        try:
            space = space_of(self.problem, tables, self.problem.capacity_with(room))
        except InputError:
            if tables is not self.problem.tables:  # what is left breaks the job's rules
                return None
            raise
        found = search(relaxed(space), self.watch.part()).best
        return None if found is None else placed_tables(space, found)


def _same(tables: Tables, others: Tables) -> bool:
    return all(list(map(id, a)) == list(map(id, b)) for a, b in zip(tables, others, strict=True))


def without(tables: Tables, avoided: Callable[[Choice], bool]) -> Tables:
    """The choices that are not ``avoided``, for tables that have any."""
    return tuple(tuple(c for c in choices if not avoided(c)) or choices for choices in tables)
