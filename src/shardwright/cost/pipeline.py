"""Seconds of a step's dense part, action by action.

A rank has two lanes: one computes, one communicates. Without prefetch a collective holds up the
lane that computes until it is done. With prefetch gathers and reduces run beside it: the share
``overlap`` of a collective's seconds costs no compute, the rest does, for it needs the same cores.
Whoever needs what is not there yet waits. Collectives run one after the other. On a machine with a
clock they get on in the share ``hides`` of what is computed meanwhile, and cost compute only as
far as they are hidden, as in a step without a plan.

Numbers give numbers, Amounts derivations. What tables do is not in it, but for what of their
exchanges is hidden.
"""

# The same walk makes a step's seconds for the search and the derivation of them, so it keeps two
# clocks and nothing else; ``settle`` cuts a derivation where a clock would carry all that came
# before it along.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from shardwright.core.amount import maximum, minimum
from shardwright.core.recording import Unfolded
from shardwright.core.schedule import Action, Modes, training_step
from shardwright.core.timeline import PHASES, Phase

Settle = Callable[[str, Any], Any]
Brought = Literal["gathered", "reduced"]  # by a collective of a unit


class UnitSeconds(NamedTuple):
    """Seconds of one gather, one reduce, the gradient's buffer, and the update of a unit; of its
    first gather in a step what comes before it, over ``replicas``, where anything does."""

    gather: Any
    reduce: Any
    gradient: Any
    update: Any
    replicas: Any = None


class ComputeSeconds(NamedTuple):
    """Seconds that a unit computes, or whoever is at work outside of units."""

    forward: Any
    backward: Any


class Spent(NamedTuple):
    """What an action takes of the lane that computes; ``unit`` is empty outside of units."""

    action: Action
    unit: str
    seconds: Any


# Seconds of the piece at a place among those of a direction.
PieceSeconds = Callable[[Action], Any]


def walk(
    step: Unfolded,
    modes: Modes,
    units: Mapping[str, UnitSeconds],
    pieces: PieceSeconds,
    c: Mapping[str, Any],
    settle: Settle | None = None,
) -> list[Spent]:
    """Every action of the step that computes, gathers, reduces or updates a unit.

    ``units`` has the seconds by name; a unit that has none is left out with its pieces. ``pieces``
    has the seconds of what an action computes, ``c`` are constants. ``settle`` is given the clocks
    with their names, which otherwise grow into derivations of all that came before.
    """
    return list(_Lanes(step, modes, units, pieces, c, settle).run())


def by_phase(spent: Iterable[Spent]) -> dict[str, dict[Phase, Any]]:
    """The sums of every unit, phase by phase; those of stages without a unit under no name."""
    found: dict[str, dict[Phase, Any]] = {}
    for action, unit, seconds in spent:
        phases = found.setdefault(unit, {})
        before = phases.get(action.phase)
        phases[action.phase] = seconds if before is None else before + seconds
    return found


def hidden_seconds(exchanges: Iterable[tuple[Any, Any]], overlap: Any) -> Any:
    """Seconds of exchanges of tables that cost a step nothing: the share ``overlap`` of each, as
    long as its rank computes meanwhile.

    Of each its seconds, and those that are computed while it may travel. These windows lie one in
    another, the narrowest first.
    """
    hidden: Any = None
    for seconds, window in exchanges:
        # Exchanges share what is computed: what of it already hides the ones in narrower windows is
        # not there for this one, so hidden seconds are summed before they are cut at the window.
        share = seconds * overlap
        hidden = minimum(share if hidden is None else hidden + share, window)
    return 0.0 if hidden is None else hidden


def fixed_seconds(
    loading: float, computed: float, c: Mapping[str, float], *, routed: bool
) -> dict[str, float]:
    """Seconds of a step by phase that are the same whatever is placed where, as far as constants
    say it: fixed costs, and what collectives wait for the slowest rank. The first waits for its
    batch, if ids are ``routed``; sums of gradients for what it computed."""
    found: dict[str, float] = {p: c[f"{p}_latency"] for p in PHASES if f"{p}_latency" in c}
    if share := c.get("slowest_share"):
        for phase, before in (("exchange_ids", loading), ("reduce", computed)):
            found[phase] = found.get(phase, 0.0) + share * before
    unless = () if routed else ("exchange_ids", "exchange_rows")
    return {phase: seconds for phase, seconds in found.items() if phase not in unless}


class _Lanes:
    """Two clocks; ``ready`` says when what a collective brings is there. Where only a share of
    compute ``hides``, clocks run in seconds of compute: a collective takes more of them, of which a
    wait costs that share."""

    def __init__(
        self,
        step: Unfolded,
        modes: Modes,
        units: Mapping[str, UnitSeconds],
        pieces: PieceSeconds,
        c: Mapping[str, Any],
        settle: Settle | None,
    ) -> None:
        self.actions = training_step(step, modes)
        self.prefetch = modes.prefetch
        self.units = units
        self.pieces = pieces
        self.overlap = c["overlap"]
        self.hides = c.get("hides")
        self.settle = settle
        self.cleared: set[str] = set()  # units whose gradient was seen
        self.filled: set[str] = set()  # units that were gathered once
        self.computing: Any = 0.0
        self.beside: Any = None  # by how much the clock goes further than an action's seconds
        self.communicating: Any = 0.0
        self.ready: dict[tuple[str, Brought], Any] = {}

    def run(self) -> Iterator[Spent]:
        take: dict[str, Callable[[Action, str], Any]] = {
            "compute": self._compute,
            "gather": self._gather,
            "reduce": self._reduce,
            "collect": self._collect,
            "update": self._update,
        }
        for action in self.actions:
            unit, verb = action.target, action.verb
            if verb in take and (unit in self.units or (verb == "compute" and not unit)):
                seconds = take[verb](action, unit)
                if self.prefetch:
                    # Without prefetch nothing is under way beside compute, so no clock is asked for
                    # and sums are all there is.
                    clock = self.computing + seconds
                    if self.beside is not None:
                        clock, self.beside = clock + self.beside, None
                    if self.settle:
                        clock = self.settle(f"clock after {_words(action)}", clock)
                    self.computing = clock
                yield Spent(action, unit, seconds)

    def _compute(self, action: Action, unit: str) -> Any:
        seconds, waited = self.pieces(action), self._wait(unit, "gathered")
        if action.direction == "backward" and unit:
            seconds = self._with_gradient(unit, seconds)
        return seconds if waited is None else seconds + waited

    def _with_gradient(self, unit: str, seconds: Any) -> Any:
        """With what the gradient's buffer takes: once, where a unit's gradient is first seen."""
        if unit in self.cleared:
            return seconds
        self.cleared.add(unit)
        return self.units[unit].gradient + seconds

    def _gather(self, action: Action, unit: str) -> Any:
        its = self.units[unit]
        first = unit not in self.filled
        self.filled.add(unit)
        seconds = its.gather
        # Replicas that cut a shard once more updated a part each: before the first gather of a step
        # they send each other these parts, and later gathers find them there.
        if first and its.replicas is not None:
            seconds = seconds + its.replicas
        return self._communicate(seconds, unit, "gathered")

    def _reduce(self, action: Action, unit: str) -> Any:
        seconds = self._communicate(self.units[unit].reduce, unit, "reduced")
        return self._with_gradient(unit, seconds)

    def _collect(self, action: Action, unit: str) -> Any:
        return self._wait(unit, "reduced")

    def _update(self, action: Action, unit: str) -> Any:
        return self._with_gradient(unit, self.units[unit].update)

    def _communicate(self, seconds: Any, unit: str, what: Brought) -> Any:
        """Everything at once, or what cannot hide; then ``what`` is ready later."""
        if not self.prefetch:
            return seconds
        # A collective begins when it is issued, which takes the lane of compute as far as it is,
        # and when the one before it is through: NCCL and gloo run those of one group one after the
        # other.
        costs = seconds * (1 - self.overlap)
        if self.hides is not None:
            seconds, self.beside = seconds / self.hides, -1 * costs
        done = maximum(self.computing, self.communicating) + seconds
        if self.settle:
            done = self.settle(f"{unit} {what} at", done)
        self.communicating = self.ready[unit, what] = done
        return costs

    def _wait(self, unit: str, what: Brought) -> Any:
        """Until ``what`` is ready; None where nothing is under way."""
        ready = self.ready.pop((unit, what), None)
        # Taken out: a unit is waited for once, and what is there later is another gather.
        if ready is None:
            return None
        waits = maximum(ready - self.computing, 0.0)
        if self.hides is None:
            return waits
        # What is waited for was not hidden, so the cost of hiding it, paid as it began, comes off.
        costs = waits * self.hides * self.overlap
        self.beside = waits - costs
        return costs


def _words(action: Action) -> str:
    return f"{action.verb} {action.target} {action.direction}"
