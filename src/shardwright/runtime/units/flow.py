"""The schedule of a step, carried out on the units of a model."""

# Every rank has to issue the same collectives in the same order, or all wait for ever (or, of equal
# sizes, mix up weights, which ``Note`` in gradients.py finds). Nothing here may therefore depend on
# what only this rank knows: which inputs need gradients, which of them arrived, how fast it was.
# What to do next follows from the order in which passes enter units, which is the model's own and
# the same everywhere, and is said by ``UnitFlow``, which the estimator of memory asks as well: that
# is why a predicted step has the collectives, and the moments of freeing, of a real one.
#
# Users drive units as they like: losses of two forwards, backwards in pieces, an exception half
# way, a forward in a backward (checkpointing), ``torch.autograd.grad``. So a forward of the whole
# model first drops what any of these left (``recover``), and the end of a backward, which only
# autograd's engine knows, does what no input announced (``end_backward``).

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardwright.core.errors import InputError, expected
from shardwright.core.schedule import Action, Direction, Order, UnitFlow
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import adds_to, outside_of_transforms
from shardwright.runtime.units.linked import asked_for
from shardwright.runtime.units.rebind import absorb, copied, start_gather
from shardwright.runtime.units.unit import Unit
from shardwright.tracker.private import after_backward, in_backward


class Arrivals:
    """The tensors of a bucket by their places, whose gradients come one by one.

    Each is waited for as often as it ever came in a backward: with reentrant checkpoints it comes
    with every use. So nothing is complete before the end of a first backward.
    """

    _END = -1  # among places that are waited for: the end of the backward

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        # Counts are learned and never lowered. One too high only means that the reduce begins at
        # the end of the backward; one too low would reduce before the last part of a gradient has
        # come.
        self._came: dict[int, int] = {}
        self._most: dict[int, int] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is waited for."""
        return not self.awaited

    def begin(self, places: Collection[int]) -> None:
        """A backward begins, in which the tensors at ``places`` train."""
        for place, times in self._came.items():
            self._most[place] = max(times, self._most.get(place, 1))
        self.awaited = set(places)
        # Nothing came in the last backward, or there was none: no count can be trusted yet.
        if places and not self._came:
            self.awaited.add(self._END)
        self._came.clear()

    def wait_for_end(self) -> None:
        """Nothing tells which gradients are still to come."""
        self.awaited.add(self._END)

    def come(self, place: int) -> bool:
        """The gradient of the tensor at ``place`` has come; whether it was the last."""
        came = self._came[place] = self._came.get(place, 0) + 1
        if not self.awaited or came < self._most.get(place, 1):
            return False
        self.awaited.discard(place)
        return not self.awaited


class Settings(NamedTuple):
    """What was set for every unit of a model; None is what nobody has set."""

    synchronise: bool | None = None
    divisor: float | None = None


class Flow(UnitFlow):
    """The schedule of a model's units, held weakly in the order they were added, and whoever does
    what it says.

    It learns in which order passes ask for units, so that the next one can be on its way. Every
    rank learns the same order, so every rank issues the same collectives. The schedule knows units
    by ``key``, for names may come twice and change.
    """

    def __init__(self, prefetch: int = 1, guard: Guard | None = None) -> None:
        super().__init__(prefetch, Order(), Order())
        self.guard = guard  # looks at every gradient before it is summed
        self.after: Any = None  # an event of another stream that a forward waits for
        self.settings = Settings()
        self._leader: weakref.ref[Unit] | None = None
        # Weakly: hooks of modules hold units and these their flow, so a deleted model frees its
        # memory at once and not when a garbage collector comes.
        self._units: dict[str, weakref.ref[Unit]] = {}
        self._arrivals: dict[str, Arrivals] = {}  # of units that are buckets
        self._is_open = False  # a forward that trains, whose backward has not ended
        self._open = 0  # such forwards one after the other
        self._agreed = 0  # as many as all ranks had at some time

    def add(self, unit: Unit) -> None:
        """Drive a unit from now on, under the settings of the model."""
        key = str(len(self._units))
        unit.follow(self, key)
        unit.take_settings(*self.settings)
        self._units[key] = weakref.ref(unit)
        if unit.is_bucket:
            self._arrivals[key] = Arrivals()

    def set(self, *, synchronise: bool | None = None, divisor: float | None = None) -> None:
        """Let every unit reduce gradients or not, or divide them; those to come as well."""
        given = Settings(synchronise, divisor)
        kept = {name: value for name, value in given._asdict().items() if value is not None}
        self.settings = self.settings._replace(**kept)
        for unit in self.units():
            unit.take_settings(*given)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside hold the gradients of all units back."""
        settings, before = self.settings, {unit: unit.synchronise for unit in self.units()}
        self.set(synchronise=False)
        try:
            yield
        finally:
            self.set(synchronise=settings.synchronise is not False)  # of units that came inside
            self.settings = settings
            # Units differ in what was set for them alone, so each gets its own back.
            for unit, synchronise in before.items():
                unit.take_settings(synchronise)

    def join(self, other: Flow) -> None:
        """Take in every unit of another flow, whose forwards are parts of this one's. What was set
        there before this flow began holds here too."""
        # Its root is a part of a larger model now. Two leaders would each take their forward for
        # the model's and drop what the other one has begun.
        other.lead(None)
        own = self.settings._asdict()
        for name, value in other.settings._asdict().items():
            if None not in (own[name], value) and own[name] != value:
                where = f"'{name}' of the units of a model"
                remedy = "Make such settings after the whole model is sharded."
                raise InputError(where, f"{own[name]}, as of other ones", f"{value}", remedy)
        self.set(synchronise=other.settings.synchronise, divisor=other.settings.divisor)
        for unit in list(other.units()):
            self.add(unit)

    def lead(self, unit: Unit | None) -> None:
        """The unit whose forward is the forward of the whole model, if a unit has it."""
        self._leader = None if unit is None else weakref.ref(unit)

    def is_led_by(self, unit: Unit) -> bool:
        """Whether the forward of ``unit`` is that of the whole model."""
        return self._leader is not None and self._leader() is unit

    def units(self) -> Iterator[Unit]:
        """Every unit that still lives, in order."""
        for reference in self._units.values():
            unit = reference()
            if unit is not None:
                yield unit

    @property
    def holds_back(self) -> bool:
        """Whether backwards leave gradients to a later one to be reduced."""
        return any(not (unit.synchronise and unit.over_replicas) for unit in self.units())

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of an earlier backward are here, which the next one adds to."""
        return any(
            unit.gradients.is_here
            or unit.gradients.is_partial
            or any(p.grad is not None for p in unit.sharded.all)
            for unit in self.units()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Flow:
        made = memo[id(self)] = Flow(self.prefetch, self.guard)
        made.settings = self.settings
        return made

    def copied(self, unit: Unit, memo: dict[int, Any]) -> Unit:
        """``unit`` of modules that are being copied, in one flow with the others of them."""
        made, flow = copied(unit, memo), copy.deepcopy(self, memo)
        if self.is_led_by(unit) or not flow._units:
            flow.lead(made)
        flow.add(made)
        return made

    # ---- what the schedule asks ------------------------------------------------------------------

    def _unit(self, key: str) -> Unit | None:
        return self._units[key]()

    def is_freed(self, unit: str) -> bool:
        """Every unit is freed after a backward, if only to show its sharded parameters."""
        return True

    def is_gathered(self, unit: str) -> bool:
        found = self._units[unit]()
        return found is None or found.is_present or (found.keeps_whole and found.is_current)

    def reshards(self, unit: str) -> bool:
        """Whether the whole unit goes after a forward that trains. Left open, it does unless it is
        the root of others, whose backward comes at once."""
        found = self._unit(unit)
        # What is whole all the time frees nothing and only shows its sharded parameters again.
        if found is None or found.keeps_whole:
            return True
        if found.reshard_after_forward is None:
            return not (self.is_led_by(found) and len(self._units) > 1)
        return found.reshard_after_forward is not False

    def left(self) -> Iterator[str]:
        """All that are there but those that are to stay, driven by hand, or in a forward,
        inside of which there was a torch.autograd.grad."""
        for unit in self.units():
            if not unit.is_present:
                continue
            # Freed in the middle of its forward, the modules of a unit would compute with sharded
            # parameters.
            is_running = unit.writes.watched is not None
            if unit.reshard_after_backward and not unit.driven_by_hand and not is_running:
                yield unit.key

    def _do(self, actions: Iterable[Action], *, reports: bool = True) -> None:
        """Do what the schedule says, with those units that still live."""
        for action in actions:
            verb, unit = action.verb, self._units[action.target]()
            if unit is None:
                continue
            if verb == "gather":
                if unit.is_present:  # asked for twice, by someone who looks far ahead
                    continue
                start_gather(unit)
            elif verb == "free":
                unit.free(after_forward=action.phase == "forward")
                if unit.keeps_whole:
                    continue
            elif verb == "reduce":
                unit.start_reduce()
            elif verb == "collect":
                unit.finish_reduce()
            else:
                unit.gradients.keep()
                continue
            if reports and unit.comm.probe.listens:
                self._report(unit, action)
            # Without prefetch nothing is left under way: the sum is waited for at once.
            if verb == "reduce" and self.pending != action.target:
                unit.finish_reduce()

    def _report(self, unit: Unit, action: Action) -> None:
        unit.comm.probe.did(Action(action.verb, unit.name, action.phase, action.direction))

    # ---- a forward ------------------------------------------------------------------------------

    def begin_forward(self, *_: Any) -> None:
        """A forward of the whole model begins: nothing of an earlier one may be in the way."""
        # A checkpoint runs the whole model again inside its backward. To recover would drop the
        # gradients of that backward.
        if in_backward():
            return
        if self.after is not None:
            self.after.wait()
            self.after = None
        # First, as a rank that is still in a backward must not be met by collectives of a forward.
        self._follow_open()
        self.recover()
        self.begin()

    def _follow_open(self) -> None:
        """A rank that left out a backward, or went on after an error in one, is at a forward while
        others are in that backward. Ranks that had more forwards without a backward than ever
        before therefore meet first: all do in losses of two forwards, microbatches or after an
        error on all of them."""
        if self._is_open:
            self._open += 1
        self._is_open = True
        leader = None if self._leader is None else self._leader()
        if self._open <= self._agreed or leader is None:
            return
        if not all(unit.keeps_whole for unit in self.units()):  # else nothing is gathered there
            leader.comm.meet(f"forward of unit '{leader.name}'", _LEFT_OUT, _BACKWARDS_OF_ALL)
        self._agreed = self._open

    def tell_of_buffers(self) -> None:
        """Say once which buffers got memory after the meta device, and values from nobody."""
        found = [
            (unit, f"{path} of unit '{unit.name}'")
            for unit in self.units()
            for path in unit.structure.without_values()
        ]
        if not found:
            return
        (unit, first), more = found[0], len(found) - 1
        where = f"buffer {first}" + (f" and {more} more" if more else "")
        remedy = (
            "Give buffers their values after to_empty, as __init__ did, or build them on a real "
            "device: no state_dict has one that is not persistent."
        )
        text = expected(where, "values", "what to_empty left in memory", remedy)
        unit.comm.tell(f"{where} without values", text)

    def enter_forward(self) -> None:
        """A unit's own forward begins; if a backward never ended, it failed."""
        if self.in_backward:
            self.recover()

    def leave_forward(self, unit: Unit, *, trains: bool) -> None:
        """A unit's forward is over. Without a backward to come it goes, whatever was said."""
        if trains:
            self._do(self.leave(unit.key))
            return
        if self.is_led_by(unit):
            self._is_open = False
        unit.free()
        unit.buffers.let_change()
        if not unit.keeps_whole and unit.comm.probe.listens:
            self._report(unit, Action("free", unit.key, "forward"))

    def recover(self, *, absorbs: bool = True) -> None:
        """Drop what exceptions or forwards without backward left; gradients held back stay. With
        ``absorbs`` also take over what was done to sharded parameters."""
        failed = self.in_backward
        self.forget()
        for unit in self.units():
            unit.recover(failed=failed)
            if absorbs:
                absorb(unit)

    def need(self, unit: Unit, direction: Direction) -> None:
        """Gather ``unit`` now, and let what will be needed next be on its way."""
        with outside_of_transforms():
            # Not asked of the schedule: its order is that of units which have to be gathered.
            if unit.keeps_whole and unit.is_current and not unit.is_coming:  # nothing travels
                if not unit.is_present:
                    start_gather(unit)
                unit.finish_gather()
                return
            if unit.writes.is_changed:
                if direction == "backward":
                    # To gather now would give the backward other weights than its forward had:
                    # gradients of no function, and nobody would notice.
                    raise _changed(unit.name)
                # What is whole here is of before the change. To free it first lets the gather below
                # begin.
                unit.free()
            chosen = unit.ahead[direction]
            self._do(self.enter(unit.key, direction, ahead=chosen is None))
            for reference in chosen or ():
                following = reference()
                if following and not (following.is_present or following.is_current):
                    start_gather(following)
                    if following.comm.probe.listens:
                        action = Action("gather", following.key, direction, direction)
                        self._report(following, action)
            unit.finish_gather()

    # ---- a backward -----------------------------------------------------------------------------

    def enter_backward(self, unit: Unit, accumulates: bool | None) -> None:
        """A backward reaches ``unit``: its whole parameters are there."""
        # Nothing else of torch tells these apart. In a backward for certain tensors no gradient
        # comes to other parameters, so no rank may wait for a sum of them; asked for a parameter,
        # the answer would be this rank's part of a gradient and not the mean.
        if accumulates is False:
            trains = (parameter for parameter in unit.sharded.all if parameter.requires_grad)
            if any(adds_to(parameter) is not False for parameter in trains):
                raise asked_for(unit.name)
        self._begin_backward()
        arrivals = self._arrivals.get(unit.key)
        # Of a replicated unit nothing is gathered, so ``need`` would not find this out; nor does
        # autograd, for the shard that an optimizer writes has another version counter.
        # A bucket that is there was entered before, and may have been updated in this backward.
        entered = arrivals is not None and unit.is_present
        if unit.keeps_whole and not entered and unit.writes.is_changed:
            raise _changed(unit.name)
        if unit.unshard_in_backward:  # also for a forward that a checkpoint runs again inside
            self.need(unit, "backward")
        # Once a backward: a unit with several outputs is entered by each of them, and to begin
        # again would wait for gradients that have come already.
        if arrivals is not None and unit.key not in self.touched:
            wholes = enumerate(unit.buffers.parameters)
            arrivals.begin([place for place, whole in wholes if whole.requires_grad])
        self._do(self.touch(unit.key))
        if accumulates:
            unit.gradients.expect()

    def come(self, bucket: Unit, place: int) -> None:
        """A backward has left the gradient of a bucket's tensor at ``place``. Of one that has all
        of them now the reduce begins, unless a bucket before it waits for some: so ranks that use
        other parameters reduce in one order all the same."""
        if not self._arrivals[bucket.key].come(place):
            return
        for key in list(self.touched):
            unit, arrivals = self._unit(key), self._arrivals.get(key)
            if unit is None or arrivals is None:
                continue
            # Not passed over: the buckets after it may be complete here and not on another rank.
            if not arrivals.is_complete:
                return
            self.leave_backward(unit)

    def arrive(self, unit: Unit) -> None:
        """A gradient comes to ``unit`` that none of its outputs announced: what was captured inside
        of its forward, or a parameter that was used outside of it."""
        self._begin_backward()
        if unit.key in self._arrivals:
            # A use of this kind is in no count of earlier backwards.
            self._arrivals[unit.key].wait_for_end()
        self._do(self.touch(unit.key))
        unit.gradients.expect()

    def _begin_backward(self) -> None:
        # Once for each backward: the engine calls back when it has run every node, marks included.
        if self.begin_backward():
            after_backward(self.end_backward)

    def leave_backward(self, unit: Unit) -> None:
        """Every gradient of ``unit`` is there: free its parameters, and sum it over ranks."""
        if unit.key not in self.touched:
            return
        probe = unit.comm.probe
        if probe.listens:
            for name in reversed(unit.module_names):
                probe.did(Action("compute", name, "backward", "backward"))
        # Units that were sharded one by one, and no root with them, have a flow each. One reduce of
        # a group is under way at a time all the same: else every unit's buffer would be there until
        # the backward is over.
        other = unit.comm.reducing
        if other is not None and other is not self:
            other._do(other.collect())
        self._do(
            self.reduce(
                unit.key,
                # before the sum, which takes memory of its own; of buckets all at the end
                frees=unit.reshard_after_backward and not unit.is_bucket,
                sums=unit.gradients.expected,  # torch.autograd.grad asks for others
                holds=unit.holds,
            )
        )
        if self.prefetch and other is not self:
            unit.comm.reducing = self

    def end_backward(self) -> None:
        """Reduce what no input announced, in the order of need, and finish everything."""
        for key in list(self.touched):
            unit = self._unit(key)
            if unit is not None:
                self.leave_backward(unit)
        # All sums are collected before what is left is freed and settled, in one order on every
        # rank.
        self._do(self.collect())
        left = self.finish()
        self._is_open, self._open = False, 0
        for unit in self.units():
            unit.settle()
        self._do(left, reports=False)


_LEFT_OUT = "the last one had no whole backward"
_BACKWARDS_OF_ALL = (
    "Let all ranks leave out a batch or none: agree on it by an all_reduce, or let loss * 0 have a "
    "backward. After an error in a forward or a backward all ranks stop or all go on."
)


def _changed(unit: str) -> InputError:
    """What to say of a backward whose forward had other weights."""
    found = "weights that were changed in between"
    remedy = "Step the optimizer after the backward, or run the forward again."
    return InputError(f"backward of unit '{unit}'", "the weights of its forward", found, remedy)
