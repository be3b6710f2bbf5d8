"""Start from the relaxation, then improve the ranks that are worst off until nothing helps."""

# The phases, in the order in which they are tried:
#
# 1. starts: relaxed choices, placed (bound.py, placing.py). The relaxation knows nothing of what
#    fits beside what, so there are several.
# 2. improve: blocks moved and swapped, options changed (moves.py, reoption.py), on the worst
#    ranks.
# 3. proof: a nearer bound, whose choices are starts too (proof.py).
# 4. finish: polish, annealing of few items, then one item after the other (polish.py), and fewer
#    pieces where that costs nothing.
#
# The same space gives the same plan on every machine: draws are seeded, ties go to the first, and
# only a time limit that strikes ends anything early. What follows rests on that: plans are
# compared byte for byte, and --why-not searches again and must find what planning finds.

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.planner.search import moves
from shardwright.planner.search.bound import TINY, Bound, Relaxed, starts
from shardwright.planner.search.placing import longest_first, placed
from shardwright.planner.search.polish import (
    MAX_ANNEALED,
    MOST_ANNEALED_RANKS,
    annealed,
    coarsened,
    polish,
    settled,
)
from shardwright.planner.search.proof import ProofFacts, facts_of, prove
from shardwright.planner.search.reoption import reoption_and_relocate, reoption_best
from shardwright.planner.search.space import Assignment, Ints, Space
from shardwright.planner.search.state import SearchState, least_first, restored
from shardwright.planner.search.watch import Watch

POWERS = (8.0, 16.0, 64.0)  # powers of two
ALIKE = (16.0,)  # powers at which two changes together rarely help that did not at the one before
RANKS_TRIED = 6  # the worst ranks that are helped before a round is over
ITEMS_TRIED = 24  # items of a rank whose other options are looked at
POLISHING = (16.0, 64.0)
STEPS, STEPS_PER_ITEM = 500, 20  # of one start and power; far more than they take
LEAST_WINDOW, PROGRESS = 64, 0.01  # steps, or one per rank, that make all ranks cost so much less
PATIENCE, LEAST_STEPS = 2, 100  # times the best start's steps are what others take that fit by then
SAME_BOUND = 1e-6
CLOSE_ENOUGH = 1e-4  # to the bound for a start to end
FAR = (0.005, 0.04, 0.05, 0.05)  # from the bound, for options to be drawn at random (again)
FAR_BEHIND = 1.05  # times what the best start took
WORTHWHILE = 0.99  # of the best so far is what a start of many items takes, shared evenly
FEW_OF_MANY, NEAR = 3, 0.02  # starts of many items at most, until one is so near the bound
PROMISING = 1.1  # times the bound that a start's work takes, shared evenly, to be placed at once
PLACED, PLACED_WELL = 16, 3  # ways of a proof that are placed, and improved
HOPED = 2  # times what is left to the bound: what is further above the best is not improved
MOST_FORCED, PLACED_OF_TYPE = 8, 8  # items, and ways with each of their types
WORTH = 1e-3  # share by which a way has to be able to be faster
BUDGETS, MOST_BUDGETS = 2, 8  # of memory: steps between powers of two, and how many are looked at
GOOD_ENOUGH = 2e-3  # to the bound, for each start that fitted, for no further start


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The best assignment that fits, if any, and what can be said about all others: none takes less
    than the ``bound``, nor than the seconds that the search has ``proved``."""

    best: Assignment | None
    seconds: float
    bound: Bound
    tried: int
    feasible: int
    proved: float = 0.0


@dataclass
class _BestSoFar:
    """The best assignment so far, and how many steps a start may take."""

    watch: Watch
    most: int
    bound: Bound
    best: Assignment | None = None
    seconds: float = float("inf")
    tried: int = 0
    feasible: int = 0

    def take(self, start: SearchState, enough: float) -> SearchState:
        """A start, improved; its end is the best if it is faster."""
        self.tried += 1
        state = improve(start, enough, self.watch, most=self.most, least=self.seconds)
        self.feasible += state.fits
        if self.keep(state):
            self.watch.found(self.seconds, self.bound.seconds)
        return state

    def keep(self, state: SearchState) -> bool:
        """Whether a state is better than the best, which it is then."""
        is_better = state.fits and state.worst < self.seconds
        if is_better:
            self.best, self.seconds = state.assignment(), state.worst
        return is_better

    def outcome(self, proved: float) -> SearchOutcome:
        """What there is to tell."""
        best, seconds = self.best, self.seconds
        return SearchOutcome(best, seconds, self.bound, self.tried, self.feasible, proved)


class Earlier(NamedTuple):
    """What was found in a space of fewer options, by the numbers of these: where it ended, if
    anywhere (``first``), its ``bound``, and the options of its first ``start``, which need no
    second look."""

    first: Assignment | None = None
    bound: float = float("inf")
    start: tuple[int, ...] = ()


def search(
    whole: Relaxed,
    watch: Watch | None = None,
    earlier: Earlier | None = None,
    enough: float = 0.0,
    quick: bool = False,
    roomy: bool | None = False,
) -> SearchOutcome:
    """The fastest assignment found; the same space gives the same one unless time runs out.

    The end of an ``earlier`` search is improved before any other start, so the outcome is never
    worse than it. Of many items no start is placed whose work, shared evenly, takes nearly as long
    as the best so far. At ``enough`` seconds nothing better is looked for. Where the bound is not
    below the earlier one, or ``quick`` is asked for, one more start is all that is tried, of many
    items a few until one is near the bound; and what is found quickly is not polished. ``roomy``:
    beside the options of the space there are others that take less memory, so nothing is proved by
    what is full; None: nothing is proved.
    """
    space, _, found = whole
    first, known_bound, known_start = earlier or Earlier()
    if not found.usable:
        return SearchOutcome(None, float("inf"), found, 0, 0)
    watch = watch or Watch()
    target = max(found.seconds, TINY)
    begun = [] if first is None else [restored(space, target, POWERS[0], first)]
    best = _BestSoFar(watch, _most_steps(space), found)
    proved = found.seconds
    # More options that leave the bound where it was have nothing to offer but other placements,
    # which one more start shows as well as many.
    few = quick or found.seconds >= known_bound * (1 - SAME_BOUND)
    most = (FEW_OF_MANY if space.has_many and not quick else 1) if few else None
    fresh = _fresh(whole, best, known_start, most)
    # `fresh` makes each start when it is asked for, so that it sees what the ones before have found
    # and none is placed in vain.
    for start in itertools.chain(begun, fresh):
        if few and best.tried > len(begun) and best.seconds <= proved * (1 + NEAR):
            break
        before = best.seconds
        state = best.take(start, max(proved, enough))
        # The best start says how long a start takes to get anywhere. Others that have not caught up
        # in twice as many steps (of many items in as many) are given up; what the search was given
        # to improve says nothing of that, for it was nearly done.
        if best.seconds < before and start not in begun:
            patience = 1 if space.has_many else PATIENCE
            best.most = min(best.most, max(patience * state.steps, LEAST_STEPS))
        # The more starts have ended near here, the less another one is likely to bring: what is
        # good enough grows with them.
        good = proved * (1 + GOOD_ENOUGH * max(best.feasible, 1))
        if best.seconds <= max(good, enough) or watch.over():
            break
    if best.best is None or quick:
        return best.outcome(proved)
    ways: list[_Way] = []
    # A proof takes time of its own: it is asked for only where there is something left between the
    # plan and the bound.
    if roomy is not None and best.seconds > max(proved * (1 + GOOD_ENOUGH), enough):
        proved, ways = _proved(whole, best, enough, roomy=roomy)
    _finish(space, best, proved, enough)
    seconds = best.seconds
    for way in ways:
        hopeless = way.seconds > best.seconds + HOPED * (best.seconds - proved)
        if hopeless or best.seconds <= max(proved * (1 + FAR[0]), enough) or watch.over():
            break
        start = restored(space, target, POWERS[0], Assignment(way.options, way.slots))
        best.take(start, max(proved, enough))
    # Polished once more only if a way was better: what was polished before is not likely to move.
    if best.seconds < seconds:
        _finish(space, best, proved, enough)
    return best.outcome(proved)


class _Way(NamedTuple):
    """Options of all items whose blocks have fallen, the longest first; the slowest rank's
    seconds."""

    seconds: float
    options: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


def _proved(
    whole: Relaxed, best: _BestSoFar, enough: float, *, roomy: bool
) -> tuple[float, list[_Way]]:
    """Seconds that no plan takes less than, and the best of the ways that may come near them."""
    space, _, bound = whole
    facts = facts_of(whole, roomy=roomy)
    if facts is None:
        return bound.seconds, []
    fallen: list[_Way] = []  # the best, in order
    seen: set[tuple[int, ...]] = set()

    hoped = best.seconds + HOPED * (best.seconds - bound.seconds)

    def take(ways: Ints) -> float:
        chosen = [] if space.constrained else sorted({*map(tuple, ways.tolist())})
        for way in chosen[:PLACED]:
            if way not in seen:
                seen.add(way)
                worst = fallen[-1].seconds if len(fallen) == PLACED_WELL else hoped
                fell = longest_first(space, way, min(worst, hoped))
                if fell is not None:
                    fallen.append(_Way(fell[0], way, fell[1]))
                    fallen.sort()
                    del fallen[PLACED_WELL:]
        return min((way.seconds for way in fallen), default=best.seconds)

    proved = prove(facts, bound.seconds, best.seconds, take)
    least = min(best.seconds, min((way.seconds for way in fallen), default=best.seconds))
    if least > max(proved * (1 + FAR[1] / 2), enough) and not space.constrained:
        for ways in _others(space, facts, least * (1 - WORTH), best.best):
            if best.watch.over():
                break
            take(ways)
    return proved, fallen


def _others(
    space: Space, facts: ProofFacts, seconds: float, best: Assignment | None
) -> Iterator[Ints]:
    """Ways that may take so few ``seconds`` in less memory, of a grid that is the same whatever
    there is, and with each type of the items of most work that they have not in the ``best``."""
    capacity = int(facts.capacity[0]) if len(facts.capacity) else 0
    budget = capacity.bit_length() * BUDGETS
    for steps in range(budget, max(budget - MOST_BUDGETS, 0), -1):
        share = 2 ** (steps / BUDGETS) / capacity
        if share < 1:
            ways = facts.ways(seconds, share)
            if ways is None:
                break
            yield ways
    most = sorted(range(len(space.items)), key=lambda item: -space.least_work[item])
    for item in most[:MOST_FORCED]:
        first = int(facts.starts[item])
        options = space.items[item].options
        types = [option.choices[0].option.sharding_type for option in options]
        had = types[best.options[item]] if best is not None else None
        for kind in (kind for kind in dict.fromkeys(types) if kind != had):
            only = np.ones(len(facts.owner), bool)
            only[first : first + len(types)] = [own == kind for own in types]
            ways = facts.ways(seconds, only=only)
            if ways is not None:
                yield ways[:: -(-len(ways) // PLACED_OF_TYPE)]


def _fresh(
    whole: Relaxed, best: _BestSoFar, known_start: tuple[int, ...], most: int | None
) -> Iterator[SearchState]:
    """At ``most`` so many relaxed choices, placed; of many items only those whose work, shared
    evenly, is less than the ``best`` takes."""
    space, options, found = whole
    target = max(found.seconds, TINY)

    def even(chosen: Ints) -> float:
        return float(options.seconds[options.starts + chosen].sum()) / space.ranks

    def worthwhile(chosen: Ints) -> bool:
        if tuple(chosen.tolist()) == known_start:
            return False
        return not space.has_many or even(chosen) < best.seconds * WORTHWHILE

    chosen = itertools.islice(starts(whole), most)
    if not space.has_many or space.ranks <= len(space.items):
        yield from (placed(space, own, target) for own in chosen if worthwhile(own))
        return
    known = list(filter(worthwhile, chosen))  # the most promising first: the rest is cut
    lean = [own for own in known if even(own) <= found.seconds * PROMISING]
    rest = [own for own in known if even(own) > found.seconds * PROMISING]
    ranked = [(own, placed(space, own, target)) for own in lean]
    ranked.sort(key=lambda each: float(each[1].rank_costs().sum()))
    yield from (state for own, state in ranked if worthwhile(own))
    yield from (placed(space, own, target) for own in rest if worthwhile(own))


def _finish(space: Space, best: _BestSoFar, bound: float, enough: float) -> None:
    """Polish the ``best`` that was found until no item alone can do better."""
    assert best.best is not None
    target, over = max(bound, TINY), best.watch.over
    improved = functools.partial(improve, bound=bound, watch=best.watch)
    good = bound * (1 + GOOD_ENOUGH)
    if best.seconds > max(good, enough) and not space.constrained:
        moved = functools.partial(improved, reoption=False)
        best.keep(polish(space, best.best, target, good, moved))
        is_small = len(space.items) <= MAX_ANNEALED and space.ranks <= MOST_ANNEALED_RANKS
        before = best.seconds
        for seed in range(len(FAR) if is_small else 0):
            if best.seconds <= max(bound * (1 + FAR[seed]), enough):
                break
            other = annealed(space, best.best, target, improved, over, seed)
            if not best.keep(other) and best.seconds == before:
                break
    near = GOOD_ENOUGH if space.has_many else CLOSE_ENOUGH
    settling = max(bound * (1 + near), enough)
    if best.seconds > settling:
        best.keep(settled(restored(space, target, POWERS[0], best.best), settling, over))
    if not over():
        coarse = coarsened(restored(space, target, POWERS[0], best.best), best.seconds)
        best.best, best.seconds = coarse.assignment(), coarse.worst


def _most_steps(space: Space) -> int:
    """Steps of a start while there is no better one to compare it with."""
    return len(POWERS) * (STEPS + STEPS_PER_ITEM * len(space.items))


def improve(
    state: SearchState,
    bound: float,
    watch: Watch,
    *,
    reoption: bool = True,
    most: int | None = None,
    least: float = float("inf"),
) -> SearchState:
    """Rounds of rising power, of at most ``most`` steps in all; the best state that fits, else the
    last one. Without ``reoption`` every item keeps its option. There is only one round where that
    stays far behind the ``least`` seconds, of another start."""
    best: Assignment | None = state.assignment() if state.fits else None
    worst = state.worst if state.fits else float("inf")
    most = _most_steps(state.space) if most is None else most
    each = STEPS + STEPS_PER_ITEM * len(state.space.items)
    window = max(LEAST_WINDOW, state.space.ranks)
    for power in POWERS if reoption else POLISHING:
        state.sharpen(power)
        cost = float("inf")
        for number in range(each):
            # Costs, not the slowest rank, say whether a round still gets on: many steps help ranks
            # that are nearly the slowest before the slowest itself can be helped.
            if number % window == 0:
                before, cost = cost, float(state.rank_costs().sum())
                if state.fits and cost > before * (1 - PROGRESS):
                    break
            # A state that does not fit yet is not worth as many steps as one that does.
            given_up = state.steps >= (most if state.fits else most // PATIENCE)
            if given_up or not _step(state, reoption) or watch.over():
                break
            state.steps += 1
            if state.fits and state.worst < worst:
                best, worst = state.assignment(), state.worst
                if worst <= bound * (1 + CLOSE_ENOUGH):
                    break
        if state.fits and worst > least * FAR_BEHIND:
            break
    # Steps lower the sum of all ranks' costs, in which the slowest rank may get slower for a while,
    # or memory may run over: the last state need not be the best one.
    if best is not None and not (state.fits and state.worst <= worst):
        steps, state = state.steps, restored(state.space, state.target, state.power, best)
        state.steps = steps
    return state


def _step(state: SearchState, reoption: bool) -> bool:
    """One move that helps one of the worst ranks."""
    costs = state.rank_costs()
    order = least_first(-costs, min(RANKS_TRIED, len(costs)))
    order = order[np.argsort(-costs[order], kind="stable")]
    near = least_first(costs, min(moves.SWAP_PARTNERS, len(costs)))
    enough = -moves.EPSILON * costs.sum()
    move = moves.helping_move(state, order.tolist(), costs, near, enough)
    if move is not None:
        move.apply(state)
        return True
    if not reoption:
        return False
    tried: set[int] = set()
    for rank in order[:2]:
        # Sorted: only so many items are tried, and which ones must not depend on the order of a
        # set.
        items = [*sorted(state.on_rank[int(rank)] - tried), *sorted(state.uniform - tried)]
        if reoption_best(state, items[:ITEMS_TRIED]):
            return True
        tried.update(items[:ITEMS_TRIED])
    return state.power not in ALIKE and reoption_and_relocate(state)
