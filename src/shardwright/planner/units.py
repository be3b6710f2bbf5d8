"""Which layers share a unit, which units are sharded, and whether the next one is gathered ahead.

Layers of one series may be merged with their neighbours. Few large units save latency; many small
ones keep fewer bytes gathered at once. All units of a series are cut alike, as evenly as they go.
"""

# Cuts, placements and prefetch multiply to thousands of arrangements of a deep model, and to run
# the step of one takes milliseconds. So what a run of units adds is worked out once for every way
# to cut and place it (`PlacedRun`), and arrangements are sums over these; seconds with prefetch,
# which are no sum, are walked only for those whose lower bound (`floor`) comes first. A floor above
# the seconds would make the search drop the fastest plan without a word.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain, groupby, product

from msgspec import UNSET

from shardwright.core.amount import ceil_div
from shardwright.core.errors import InputError
from shardwright.core.model import ModelSpec, UnitSpec
from shardwright.core.recording import Moment
from shardwright.core.schedule import Action, Modes, Prefetch
from shardwright.cost.clock import computed_seconds
from shardwright.cost.pipeline import ComputeSeconds, Spent, walk
from shardwright.job.planner import DenseSection
from shardwright.planner.unit_choice import DenseContext, UnitChoice, unit_choices

MAX_COMBINATIONS = 125  # of ways to place each run of units; beyond, all runs are placed alike
# Constants are not known better: larger units, or units gathered ahead, have to save this share
# of a step's seconds.
WORTH = 0.02
MOST_AT_ONCE = 2  # units, with prefetch
ROUNDING = 1e-9  # far more than sums in another order differ by

FREE = DenseSection()

Unit = tuple[UnitSpec, ...]


@dataclass(frozen=True, eq=False)
class PlacedRun:
    """A run of units, cut and placed in one way: what of an arrangement follows from it alone."""

    space: UnitSpace
    units: tuple[UnitChoice, ...]

    @cached_property
    def at_rest(self) -> int:
        """Bytes of a rank's weights and states in the memory that decides."""
        return sum(u.sizes.stored + u.state_bytes for u in self.units if not u.away)

    @cached_property
    def gradients(self) -> int:
        """Bytes of their gradients there."""
        return sum(u.sizes.trained for u in self.units if not u.away)

    @cached_property
    def whole(self) -> int:
        """Bytes of units that stay whole from their forward to their backward."""
        there = [u for u in self.units if u.comes and not u.reshard]
        return sum(u.sizes.gathered for u in there if not u.layout.stays)

    @cached_property
    def largest(self) -> tuple[list[int], list[int]]:
        """Bytes of the units that are largest whole, for a moment, and as gradients, as many as
        there are at once."""
        # No more than two of them are ever whole at once, the one that computes and the one
        # gathered ahead, so nothing else of a run has to be remembered for its footprint.
        passing = sorted(u.sizes.gathered for u in self.units if u.reshard)
        unreduced = sorted(u.sizes.reduced for u in self.units if not u.replicated)
        return passing[-MOST_AT_ONCE:], unreduced[-MOST_AT_ONCE:]

    @cached_property
    def spent(self) -> list[float]:
        """Seconds of every action without prefetch: what a unit does then is due to it alone."""
        return [spent.seconds for spent in self._walked]

    @cached_property
    def floors(self) -> tuple[float, float, float]:
        """No arrangement spends less on it: without prefetch; with it where the share ``overlap``
        of all collectives is hidden; and where these follow one another, updates after them."""
        units = {choice.unit.name: choice.spent for choice in self.units}
        collectives, updates = 0.0, 0.0
        # Of a reduce the walk's seconds also hold the gradient's buffer, which compute pays for:
        # only the collective itself may be hidden.
        for action, unit, seconds in self._walked:
            if action.verb == "gather":
                collectives += seconds
            elif action.verb == "reduce":
                collectives += units[unit].reduce
            elif action.verb == "update":
                updates += units[unit].update
        # Rounded down, and what is hidden up: sums are added in another order than those of the
        # walk, and a floor a last digit above its seconds would rule the arrangement out.
        total = math.fsum(self.spent) * (1 - ROUNDING)
        hidden = self.space.context.c["overlap"] * collectives * (1 + ROUNDING)
        return total, total - hidden, (collectives + updates) * (1 - ROUNDING)

    @cached_property
    def _walked(self) -> list[Spent]:
        found = self.space.walk(self.units, dense_modes(self.units, 0))
        return [spent for spent in found if spent.unit]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Every unit of a model, in order. ``placed`` is the way each run of units was placed."""

    space: UnitSpace
    parts: tuple[PlacedRun, ...]
    prefetch: Prefetch
    placed: tuple[int, ...] = ()

    @cached_property
    def units(self) -> tuple[UnitChoice, ...]:
        """Its units, run after run."""
        return tuple(unit for part in self.parts for unit in part.units)

    @property
    def modes(self) -> Modes:
        """The order of the step, of the dense part alone."""
        return dense_modes(self.units, self.prefetch)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the dense part."""
        # With prefetch what a unit waits for depends on its neighbours, so the step has to be
        # walked; without it every action's seconds are its own and add up.
        if self.prefetch:
            return math.fsum(s.seconds for s in self.space.walk(self.units, self.modes))
        return math.fsum(chain(self.space.apart, *(part.spent for part in self.parts)))

    @cached_property
    def floor(self) -> float:
        """The same or less, found at once."""
        alone, hidden, sent = (sum(part.floors[k] for part in self.parts) for k in range(3))
        apart = math.fsum(self.space.apart) * (1 - ROUNDING)
        # Two reasons why prefetch cannot be faster: compute and what of collectives it cannot hide
        # come one after another, and so do all collectives, whatever is computed meanwhile.
        return max(apart + hidden, sent) if self.prefetch else apart + alone

    @cached_property
    def kept(self) -> int:
        """Bytes of a rank's weights, gradients and states in the memory that decides."""
        return self.at_rest + sum(part.gradients for part in self.parts)

    @cached_property
    def at_rest(self) -> int:
        """Of them weights and states, which are there at every moment of a step."""
        return sum(part.at_rest for part in self.parts)

    @cached_property
    def footprint(self) -> int:
        """About how many bytes of a rank it fills at most, activations apart: everything kept, and
        the largest units that are whole at once."""
        whole = sum(part.whole for part in self.parts)
        passing, unreduced = (
            sorted(chain.from_iterable(part.largest[k] for part in self.parts)) for k in (0, 1)
        )
        ahead = 1 + self.prefetch
        return self.kept + whole + sum(passing[-ahead:]) + 2 * sum(unreduced[-ahead:])


def dense_modes(
    units: Sequence[UnitChoice],
    prefetch: Prefetch,
    *,
    routed: frozenset[str] = frozenset(),
    replicated_tables: frozenset[str] = frozenset(),
    early: frozenset[str] = frozenset(),
    asked: frozenset[str] = frozenset(),
) -> Modes:
    """What a choice of units means for the order of a step."""
    return Modes(
        sharded_units=frozenset(u.unit.name for u in units if u.comes),
        resharded_units=frozenset(u.unit.name for u in units if u.reshard),
        routed=routed,
        replicated_tables=replicated_tables,
        early=early,
        asked=asked,
        prefetch=prefetch,
        merged=tuple(
            (u.unit.name, u.unit.members) for u in units if u.unit.members != (u.unit.name,)
        ),
        staying_units=frozenset(u.unit.name for u in units if u.stays),
    )


@dataclass(frozen=True)
class UnitSpace:
    """What may be chosen of a model's units. ``forced`` says by unit or series whether it is to
    "shard", to "replicate" or to "offload"."""

    model: ModelSpec
    context: DenseContext
    forced: Mapping[str, str] = field(default_factory=dict)
    section: DenseSection = FREE
    _known: dict[tuple[str, ...], tuple[UnitChoice, ...]] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict)
    _parts: dict[tuple[int, int, int], PlacedRun] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> dict[str, list[float]]:
        """Seconds that every recorded piece computes, by direction."""
        step = self.model.step
        return {
            "forward": self._seconds("forward", step.forward),
            "backward": self._seconds("backward", step.backward),
        }

    def _seconds(self, direction: str, moments: Sequence[Moment]) -> list[float]:
        # Blocks that repeat share their pieces: a model of a hundred layers has thousands of
        # moments and a few dozen pieces, told apart by identity.
        known: dict[tuple[int, str], float] = {}
        keys = []
        for moment, home in zip(moments, self.model.step.homes[direction], strict=True):
            key = id(moment.piece), self.dtype_of(home)
            keys.append(key)
            if key not in known:
                known[key] = computed_seconds(moment.piece, self.context.c, key[1])
        return [known[key] for key in keys]

    def dtype_of(self, home: str) -> str:
        """What a recorded unit computes in: what the job says, or else most of its numbers; in fp32
        what is in none."""
        if home not in self._dtypes:
            sizes: dict[str, int] = {}
            for tensor in self.model.step.units[home].tensors if home else ():
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel
            own = max(sizes, key=lambda dtype: sizes[dtype], default="fp32")
            self._dtypes[home] = self.context.param_dtype or own
        return self._dtypes[home]

    def of_piece(self, action: Action) -> float:
        """Seconds of the piece that an action computes."""
        return self.pieces[action.direction][action.place]

    @cached_property
    def all_computed(self) -> float:
        """Seconds that all pieces compute, whatever is placed where."""
        return math.fsum(chain(*self.pieces.values()))

    @cached_property
    def computed(self) -> dict[str, ComputeSeconds]:
        """Seconds that every unit computes, apart from what it is merged with."""
        names = {member: unit.name for unit in self.model.units for member in unit.members}
        found: dict[str, dict[str, list[float]]] = {
            unit.name: {"forward": [], "backward": []} for unit in self.model.units
        }
        for direction, homes in self.model.step.homes.items():
            for home, seconds in zip(homes, self.pieces[direction], strict=True):
                if home in names:
                    found[names[home]][direction].append(seconds)
        return {
            name: ComputeSeconds(math.fsum(its["forward"]), math.fsum(its["backward"]))
            for name, its in found.items()
        }

    @cached_property
    def runs(self) -> tuple[Unit, ...]:
        """Neighbours that may share a unit; a unit without a series is alone."""

        def key(pair: tuple[int, UnitSpec]) -> tuple[object, ...]:
            index, unit = pair
            # One buffer has one optimizer and one placement, so what differs in either cannot be
            # merged.
            alike = (unit.series, unit.optimizer, self._wanted(unit))
            return (*alike, -1 if unit.series else index)

        found = groupby(enumerate(self.model.units), key)
        return tuple(tuple(unit for _, unit in members) for _, members in found)

    @property
    def prefetches(self) -> tuple[Prefetch, ...]:
        """What is tried; units that tables or little else stand between are not gathered ahead."""
        if self.section.prefetch is not None:
            return (self.section.prefetch,)
        # A gather ahead helps where the next unit is known and follows at once, as layers of a
        # series and buckets do; it costs the memory of one more unit.
        follow = self.model.bucket_size or len(self.runs) < len(self.model.units)
        return (0, 1) if follow and len(self.model.units) > 1 else (0,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Most layers that share a unit: every number that cuts the longest run otherwise."""
        longest = max((len(run) for run in self.runs), default=1)
        if self.section.layers_per_unit is not None:
            return (self.section.layers_per_unit,)
        # Only sizes that make another number of units: 6 and 7 of 16 layers at most both make
        # three, which are cut alike.
        return tuple(sorted({ceil_div(longest, parts) for parts in range(1, longest + 1)}))

    def choices(self, units: Unit) -> tuple[UnitChoice, ...]:
        """The ways to place neighbours as one unit that the job leaves open."""
        names = tuple(unit.name for unit in units)
        if names not in self._known:
            self._known[names] = tuple(self._allowed(units))
        return self._known[names]

    def _allowed(self, units: Unit) -> Iterator[UnitChoice]:
        wanted, reshard = self._wanted(units[0]), self.section.reshard
        offload = "all" if wanted == "offload" else self.context.offload
        offloads = offload != "none"
        for choice in unit_choices(units, self.computed, self.context, offloads=offloads):
            # Below stage 3 parameters are whole anyway, so a replica saves a gather and loses the
            # share of its states: where a unit trains it is sharded, and replicated where nothing
            # of it would be shared.
            if wanted is None and self.context.zero < 3:  # whose states are shared, or nothing is
                shares = choice.layout.trains or offload == "all"
                wanted = "shard" if shares else "replicate"
            if choice.replicated:
                if wanted in (None, "replicate") and offload != "all":
                    yield choice
            elif (
                wanted != "replicate"
                and reshard in (None, choice.reshard)
                and offload in ("auto", "all" if choice.offloaded else "none")
            ):
                yield choice

    def _wanted(self, unit: UnitSpec) -> str | None:
        return self.forced.get(unit.name, self.forced.get(unit.series) if unit.series else None)

    @cached_property
    def arrangements(self) -> tuple[Arrangement, ...]:
        """Every cut of the series, every way to place each run, with and without prefetch."""
        return tuple(
            Arrangement(
                self,
                tuple(self._part(run, size, way) for run, way in enumerate(placed)),
                prefetch,
                placed,
            )
            for size in self.sizes
            for placed in self._ways()
            for prefetch in self.prefetches
        )

    def _part(self, index: int, size: int, way: int) -> PlacedRun:
        """A run in units of ``size`` at most: sizes that make as many units make the same."""
        run = self.runs[index]
        key = index, ceil_div(len(run), size), way
        if key not in self._parts:
            units = (self.choices(unit)[way] for unit in cut_evenly(run, size))
            self._parts[key] = PlacedRun(self, tuple(units))
        return self._parts[key]

    @cached_property
    def apart(self) -> list[float]:
        """Seconds of what is computed in no unit; the root's own is a unit by another name."""
        # What no unit computes is the same in every arrangement, so any one of them tells it.
        units = tuple(choice for unit in self.model.units for choice in self.choices((unit,))[:1])
        found = self.walk(units, dense_modes(units, 0))
        return [spent.seconds for spent in found if not spent.unit]

    def _ways(self) -> list[tuple[int, ...]]:
        """For each run the number of a choice; where there are many runs, all alike but the last,
        whose backward comes first."""
        # The unit that comes last in a forward is first in the backward, so that freeing it in
        # between only costs a gather: it is placed apart even where all others are placed alike.
        open_ways = [range(len(self.choices(run[:1]))) for run in self.runs]
        if math.prod(len(ways) for ways in open_ways) <= MAX_COMBINATIONS:
            return list(product(*open_ways))
        most = max(len(ways) for ways in open_ways)
        alike = product(range(most), open_ways[-1])
        return [(*(min(way, ways[-1]) for ways in open_ways[:-1]), last) for way, last in alike]

    def walk(self, units: Sequence[UnitChoice], modes: Modes) -> list[Spent]:
        """The seconds of every action of ``units`` and of what runs between them."""
        spent = {choice.unit.name: choice.spent for choice in units}
        return walk(self.model.step, modes, spent, self.of_piece, self.context.c)

    def check(self) -> None:
        """Raise InputError for what is forced of units that there are not."""
        units = self.model.units
        known = {name for unit in units for name in (unit.name, unit.series) if name}
        text = ", ".join(dict.fromkeys(unit.series or unit.name for unit in units))
        alone = ", or one layer of a series" if any(unit.series for unit in units) else ""
        for name, wanted in self.forced.items():
            if wanted == "replicate" and self.context.offload == "all":
                want = "'shard', 'offload' or nothing beside memory.offload = 'all'"
                raise InputError(f"planner.units.{name}", want, "'replicate'")
            if name not in known:
                want = f"units {text}{alone}" if known else "no unit: tables alone"
                raise InputError("planner.units", want, f"'{name}'")
        if not self.model.units and self.section != FREE:
            wanted = "nothing: tables alone have no units"
            raise InputError("planner.dense", wanted, "a section", "Leave it out.")
        if self.section.reshard and self.context.zero < 3:
            wanted = f"false or nothing beside memory.zero = {self.context.zero}"
            where = "planner.dense.reshard"
            raise InputError(where, f"{wanted}, which keeps parameters whole", "true")
        self._check_buckets()
        size = self.section.layers_per_unit
        longest = max((len(run) for run in self.runs), default=1)
        if size is not None and size > longest:
            alone = "whose units have no neighbours alike"
            most = f"at most {longest}, the layers that follow one another alike"
            wanted = most if longest > 1 else f"1 for a {self.model.kind}, {alone}"
            raise InputError("planner.dense.layers_per_unit", wanted, str(size))

    def _check_buckets(self) -> None:
        where, wanted = "planner.dense.bucket_size", self.section.bucket_size
        if wanted is UNSET:
            return
        if self.context.zero == 3:
            zero = "[2, 3]" if self.context.twice else "3"
            remedy = "Name 1 or 2, which keep parameters whole, or cut units by layers_per_unit."
            raise InputError(where, f"nothing beside memory.zero = {zero}", repr(wanted), remedy)
        if self.section.layers_per_unit is not None:
            wanted_ = "nothing beside planner.dense.layers_per_unit"
            raise InputError(where, wanted_, repr(wanted), "Name one of the two.")


def cut_evenly(run: Unit, size: int) -> list[Unit]:
    """``run`` in parts of ``size`` at most that differ by one at most, the longer ones first."""
    # As even as can be: the largest unit decides how much is gathered at once. A plan is read back
    # by the same cut (`explain/recompute`), so another one would make older plans unreadable.
    count = ceil_div(len(run), size)
    short, longer = divmod(len(run), count)
    parts, start = [], 0
    for index in range(count):
        stop = start + short + (index < longer)
        parts.append(run[start:stop])
        start = stop
    return parts


def fastest_first(
    arrangements: Sequence[Arrangement], dropped: Callable[[Arrangement], bool]
) -> Iterator[Arrangement]:
    """By their seconds, without those that are ``dropped`` when it is their turn. Seconds are found
    of those alone of which nothing else can be faster."""
    # The place breaks ties, so that of arrangements as fast the first listed, which is the
    # simplest, comes out whatever the heap does.
    queue = [(a.floor, place, False) for place, a in enumerate(arrangements)]
    heapify(queue)
    while queue:
        _, place, is_known = heappop(queue)
        found = arrangements[place]
        # Asked when it is its turn, not before: what does not fit is only known of those that were
        # run.
        if dropped(found):
            continue
        if is_known:
            yield found
        else:
            heappush(queue, (found.seconds, place, True))


def worthwhile(
    arrangements: Sequence[Arrangement], fastest: Arrangement, seconds: float
) -> Iterator[Arrangement]:
    """What is placed like ``fastest`` and hardly slower, in a step of ``seconds``, but smaller: the
    smallest first."""
    near = fastest.seconds + WORTH * seconds
    alike = [
        a
        for a in arrangements
        if a.placed == fastest.placed and a.footprint < fastest.footprint and a.floor <= near
    ]
    alike.sort(key=lambda a: a.footprint)
    for _, same in groupby(alike, lambda a: a.footprint):
        yield from sorted((a for a in same if a.seconds <= near), key=lambda a: a.seconds)
