"""Every step from the sizes of a dense unit to its bytes, its collectives and its seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from shardwright.core.amount import Amount, leaf, named, summed, total
from shardwright.core.errors import ShardwrightError
from shardwright.core.model import UnitSpec
from shardwright.core.optimizer_states import MIN_8BIT_ELEMENTS, Elements
from shardwright.core.schedule import Action
from shardwright.core.tensor import element_bytes
from shardwright.core.timeline import EXACT_KINDS
from shardwright.core.work import Work
from shardwright.cost import dense
from shardwright.cost.clock import computed_seconds
from shardwright.cost.pipeline import Spent, walk
from shardwright.job.plan import Plan, UnitPlan
from shardwright.planner.explain.explanation import REORDERED, Explanation, finished, ranks_label
from shardwright.planner.explain.recompute import recorded_with
from shardwright.planner.pricing.evaluate import constants_of
from shardwright.planner.problem import Problem
from shardwright.planner.step_draft import StepDraft, unit_events
from shardwright.planner.unit_choice import UnitChoice, UnitSizes, unit_seconds
from shardwright.planner.variation import ModelOf

SERIAL = "nothing overlaps: the unit's actions follow one another"
AHEAD = (
    "gathers and reduces run beside compute; what hides costs no time, what is not there yet is "
    "waited for; clocks are those of the whole step's actions"
)


@dataclass(frozen=True)
class UnitAmounts:
    """Derivations of a draft's units; leaves are sizes, the job's keys and the constants."""

    draft: StepDraft

    @cached_property
    def constants(self) -> Mapping[str, Any]:
        """The cluster's constants."""
        return constants_of(self.draft.problem.cluster)

    @cached_property
    def ranks(self) -> Amount:
        """How many ranks there are."""
        return leaf(self.draft.ranks, "ranks", "", "cluster.world_size")

    @cached_property
    def local(self) -> Amount | None:
        """How many of them are linked closely; None where all are."""
        local = self.draft.problem.unit_space.context.local
        return _near(local, "ranks_of_host", "cluster.local_world_size")

    def piece(self, action: Action) -> Amount:
        """What is computed between two moments of a step."""
        step = self.draft.model.step
        moments = step.forward if action.direction == "forward" else step.backward
        moment = moments[action.place]
        work, where = moment.piece.work, f"{moment.piece.point} {moment.unit}".strip()
        amounts: tuple[Any, ...] = (
            leaf(work.calls, f"operators[{where}]", "", "the recorded step"),
            leaf(work.flops, f"flops[{where}]", "FLOP", "its products"),
            leaf(work.moved, f"moved[{where}]", "B", "read and written by other operators"),
        )
        home = step.homes[action.direction][action.place]
        dtype = self.draft.problem.unit_space.dtype_of(home)
        piece = msgspec.structs.replace(moment.piece, work=Work(*amounts))
        seconds = computed_seconds(piece, self.constants, dtype)
        found: Amount = named(f"compute[{where}]", seconds, "s")
        return found

    def sizes(self, choice: UnitChoice) -> UnitSizes:
        """What the bytes and the seconds of a unit follow from."""
        known, layout = choice.sizes, choice.layout
        gathered = leaf(
            known.gathered, "gathered_bytes", "B", "the buffer in the dtype of computing"
        )
        cleared = gathered
        if known.cleared != known.gathered:
            source = "of it, what has a gradient"
            cleared = leaf(known.cleared, "gradient_buffer_bytes", "B", source)
        reduced = leaf(known.reduced, "reduced_bytes", "B", "the gradient in the dtype of sums")
        if choice.stays:
            own = leaf(known.slice, "slice_bytes", "B", "of whole parameters, what a rank updates")
        else:
            source = "tensors at their alignment, cut evenly"
            buffer = leaf(layout.nbytes, "buffer_bytes", "B", source)
            count = 1 if choice.replicated else layout.world_size
            slices = leaf(count, "slices", "", "ranks that share it")
            own = named("slice_bytes", buffer // slices, "B")
        trained = stored = own
        if layout.trained is not layout:
            source = "of the slice, what has a gradient"
            trained = leaf(known.trained, "trained_slice_bytes", "B", source)
        if choice.grid.twice or choice.stays:
            twice = choice.grid.twice
            source = "the slices of all replicas of a shard" if twice else "parameters stay whole"
            stored = leaf(known.stored, "kept_bytes", "B", source)
        shards, local = self.ranks, self.local
        if choice.grid.replicas > 1:
            shards = leaf(known.shards, "shards", "", "ranks / parallel.data_replicate")
            local = _near(known.local, "shards_of_host", "of them on one host")
        return UnitSizes(
            gathered=gathered,
            cleared=cleared,
            reduced=reduced,
            part_reduced=named("reduced_of_shard", reduced // shards, "B"),
            slice=own,
            trained=trained,
            stored=stored,
            shards=shards,
            local=local,
            replicas=leaf(known.replicas, "replicas", "", "parallel.data_replicate"),
            replicas_local=_near(known.replicas_local, "replicas_of_host", "of them on one"),
        )

    def spent(self, choice: UnitChoice) -> list[Spent]:
        """What every action of one unit takes; other units are shown by their numbers alone."""
        # The walk needs the seconds of all units, for they wait for one another; a derivation of
        # every one of them would be as long as the model is deep, so others are plain numbers.
        space, name = self.draft.problem.unit_space, choice.unit.name
        units: dict[str, Any] = {u.unit.name: u.spent for u in self.draft.units}
        units[name] = unit_seconds(choice, self.sizes(choice), self.constants)

        def piece(action: Action) -> Any:
            return self.piece(action) if action.target == name else space.of_piece(action)

        found = walk(self.draft.model.step, self.draft.modes, units, piece, self.constants, _clock)
        return [spent for spent in found if spent.unit == name]


def _near(ranks: int | None, name: str, source: str) -> Amount | None:
    """How many ranks are linked closely; None where all are."""
    return None if ranks is None else leaf(ranks, name, "", source)


def _clock(name: str, value: Any) -> Amount:
    """A clock of the walk as an input: what came before it is shown of other actions."""
    return leaf(getattr(value, "value", value), name, "s", "the actions before")


def explain_unit(
    plan: Plan, draft: StepDraft, choice: UnitChoice, again: ModelOf | None = None
) -> Iterator[Explanation]:
    """Bytes of each rank, bytes of the tensors, what checkpointing saves and costs, collectives of
    a step, seconds of a step; ``again`` records the model without checkpointing."""
    amounts = UnitAmounts(draft)
    where = f"unit {choice.unit.name}"
    yield from _bytes(amounts, choice, where)
    yield _tensors(plan, choice, where)
    if choice.unit.checkpointed:
        yield from _checkpointing(plan, amounts, choice, where, again)
    planned = next(unit for unit in plan.units if unit.name == choice.unit.name)
    yield from _collectives(amounts, choice, where, planned)
    yield _seconds(amounts, choice, where, planned)


def _bytes(amounts: UnitAmounts, choice: UnitChoice, where: str) -> Iterator[Explanation]:
    """Ranks with as much padding are shown together."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    sizes, trained = amounts.sizes(choice), choice.layout.trained
    for rank, paddings in enumerate(zip(choice.padding, choice.trained_padding, strict=True)):
        alike.setdefault((*paddings, choice.elements(rank)), []).append(rank)
    for (padding, trained_padding, elements), ranks in alike.items():
        source = "what is no tensor's in the slice of these ranks"
        gap = leaf(padding, "padding_of_slice", "B", source)
        own = named("payload_of_slice", sizes.stored - gap, "B")
        learns, its_gap = own, gap
        if trained is not choice.layout or choice.stays or choice.grid.twice:
            its_gap = leaf(trained_padding, "padding_of_trained", "B", source)
            learns = named("trained_payload", sizes.trained - its_gap, "B")
        kind, count = choice.unit.optimizer, trained.flat_tensors
        both = elements and (_elements(elements[0], ""), _elements(elements[1], " of padding"))
        kept = dense.unit_bytes(own, gap, kind, learns, its_gap, count, both)
        amount = named("bytes_on_rank", total(kept[kind] for kind in EXACT_KINDS), "B")
        stored = sum(unit_events(choice, ranks[0]).values())
        yield finished(f"{where} on {ranks_label(ranks)}: bytes", stored, amount, ranks=ranks)


def _elements(found: Elements, of: str) -> Elements:
    """What of a slice an optimizer quantizes, and what it does not."""
    least = f"{MIN_8BIT_ELEMENTS:,} elements"
    return Elements(
        leaf(found.whole, f"small_elements{of}", "elements", f"of tensors of less than {least}"),
        leaf(
            found.quantized, f"quantized_elements{of}", "elements", f"of tensors of {least} or more"
        ),
        leaf(found.blocks, f"blocks{of}", "", "of elements that are quantized together"),
    )


def _tensors(plan: Plan, choice: UnitChoice, where: str) -> Explanation:
    parts = []
    dtypes = dict.fromkeys(tensor.dtype for tensor in choice.unit.tensors)
    for dtype in dtypes:
        of = f" of {dtype}" if len(dtypes) > 1 else ""
        terms = [
            leaf(t.numel, t.fqn, "elements", f"shape {'x'.join(map(str, t.shape))}")
            for t in choice.unit.tensors
            if t.dtype == dtype
        ]
        elements = summed(f"elements{of}", terms, "elements")
        parts.append(elements * leaf(element_bytes(dtype), f"element_bytes{of}", "B", dtype))
    payload = named("unit_bytes", total(parts), "B")
    stored = choice.layout.payload_bytes
    return finished(f"{where}: bytes of its tensors", stored, payload, ranks=range(plan.world_size))


def _checkpointing(
    plan: Plan, amounts: UnitAmounts, choice: UnitChoice, where: str, again: ModelOf | None
) -> Iterator[Explanation]:
    """Bytes that its blocks do not keep for their backward, and seconds of computing again, beside
    the same blocks without checkpointing; nothing where they cannot be recorded here."""
    try:
        usual = recorded_with(plan, "none", again)
    except ShardwrightError:
        return
    name, problem = choice.unit.checkpointing, amounts.draft.problem
    steps = (("none", usual), (name, problem))
    everyone = range(plan.world_size)
    kept, spent = (
        [
            leaf(of(each, choice.unit), f"{what}[{policy}]", unit, "the recorded step")
            for policy, each in steps
        ]
        for what, unit, of in (
            ("bytes_kept_for_backward", "B", _kept),
            ("seconds_of_backward", "s", _backward),
        )
    )
    saved = named("bytes_saved", kept[0] - kept[1], "B")
    title = f"{where}: bytes that checkpointing {name} saves, beside none"
    yield finished(title, saved.value, saved, ranks=everyone)
    cost = named("seconds_again", spent[1] - spent[0], "s")
    title = f"{where}: seconds that checkpointing {name} costs, beside none"
    yield finished(title, cost.value, cost, ranks=everyone)


def _kept(problem: Problem, unit: UnitSpec) -> int:
    """Bytes that the forward of a unit leaves."""
    step, summaries = problem.model.step, problem.chunk.summaries["stays"]
    homes = step.homes["forward"]
    return sum(
        sum(summaries.of(moment.piece).net.values())
        for moment, home in zip(step.forward, homes, strict=True)
        if home in unit.members
    )


def _backward(problem: Problem, unit: UnitSpec) -> float:
    """Seconds that the backward of a unit computes."""
    space, homes = problem.unit_space, problem.model.step.homes["backward"]
    pairs = zip(space.pieces["backward"], homes, strict=True)
    return math.fsum(seconds for seconds, home in pairs if home in unit.members)


def _collectives(
    amounts: UnitAmounts, choice: UnitChoice, where: str, planned: UnitPlan
) -> Iterator[Explanation]:
    done = choice.calls(amounts.draft.actions)
    kind = "an all-reduce" if choice.replicated else "a reduce-scatter"
    why = f"{kind} after each backward" if choice.reduces else "nothing of it has a gradient"
    reduces = calls = leaf(done.reduces, "reduces", "", why)
    gathers = leaf(0, "gathers", "", "every rank has it")
    if not choice.replicated:
        why = "one for each forward that finds it sharded"
        first = leaf(done.forward, "gathers_before_forward", "", why)
        why = "resharded after forward" if done.backward else "not resharded after forward"
        again = leaf(done.backward, "gathers_before_backward", "", why)
        gathers = named("gathers", first + again)
        calls = gathers + reduces
    if choice.between:
        why = "replicas sum" + (", and fill in what others updated" if choice.grid.twice else "")
        calls = calls + leaf(done.between, "calls_of_replicas", "", why)
    calls = named("collectives", calls)
    everyone = range(len(choice.padding))
    yield finished(f"{where}: collectives per step", planned.collectives, calls, ranks=everyone)
    why = "a note for every rank: what ranks did so far, and which tensors have a gradient"
    notes = leaf(choice.note_bytes, "note_bytes", "B", why)
    sizes = amounts.sizes(choice)
    summed = sizes.reduced + notes
    if choice.between:
        summed = summed + sizes.part_reduced
    buffers = gathers * sizes.gathered + reduces * summed
    if choice.kept_bytes:
        buffers = buffers + sizes.stored
    moved = named("bytes_per_step", buffers, "B")
    yield finished(
        f"{where}: full buffers of its collectives per step",
        planned.bytes_per_step,
        moved,
        ranks=everyone,
    )


def _seconds(
    amounts: UnitAmounts, choice: UnitChoice, where: str, planned: UnitPlan
) -> Explanation:
    terms = []
    for action, _, seconds in amounts.spent(choice):
        at = f" {action.place}" if action.verb == "compute" else ""
        terms.append(named(f"{action.verb} {action.target} {action.direction}{at}", seconds, "s"))
    return finished(
        f"{where}: seconds per step",
        planned.seconds,
        summed("seconds_of_unit", terms, "s"),
        ranks=range(len(choice.padding)),
        within=REORDERED * planned.seconds,
        notes=[AHEAD if amounts.draft.prefetch else SERIAL],
    )
