"""A recording of a module made from few of the parts that repeat in it, and checked.

The module runs with three periods of every stretch of parts that are alike, and once more with
four: unfolded to four, the first recording must say of every piece what the second one does. And in
a forward of the whole module, in which one part does what it does and those like it hand on what
that one gave, the same parts must run. Where one of this is not so, or where the module will not
run with fewer parts, it is recorded in full.
"""

# Why few parts: a trace of a model of 100 layers takes 100 times as long as one of a layer, and
# the recording travels inside of every plan. Recorded with a few layers, both cost the same at
# any depth. Why three periods and not one: the first part may keep what came before the series,
# the last one what comes after it; only one between others shows what all those between keep.
#
# What must stay true: a recording that is unfolded says of every piece what the whole module
# would have. A wrong one gives a wrong peak that nobody notices, so two checks look for a
# difference: with one period more everything must go up by that period (a list of all layers'
# results does not), and in a run of the whole module the same parts must be entered (a module
# that skips every second layer, or routes by number, is found so). Recording in full is always
# right and only slow: in doubt, differ.
#
# The user's module is borrowed: children are taken out of containers and forwards replaced while
# it runs, and all that it remembers is put back, for the same object may be trained afterwards.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import nn

from shardwright.core.recording import (
    BlockNames,
    RecordedUnit,
    Recording,
    Series,
    Touch,
    Unfolded,
    moments,
)
from shardwright.core.tensor import TensorSpec
from shardwright.heap.ledger import Summaries
from shardwright.trace.checkpointing import Policy
from shardwright.trace.checks import Untraceable, first_line
from shardwright.trace.module import NoUnitsError
from shardwright.trace.structure import FEW, Container, called, containers, large_parts, repeats
from shardwright.tracker.private import own_buffers, own_children
from shardwright.tracker.tensors import map_tensors

ROOT = ""  # the unit of everything that is in no other
# The first call of an operator may differ: torch 2.13 remembers of mkldnn's RNN that its gradients
# have memory of their own, which they share in the first one.
ATTEMPTS = 2
ALL = 10**6  # periods: more than there are


@dataclass(frozen=True, slots=True)
class Shortened:
    """A module while it has few of its parts: ``units`` by their own names, in order, the root's
    last; ``blocks`` the repeated parts among them and ``places`` which of all of them they are;
    ``apart`` names units that do not repeat."""

    units: dict[str, Sequence[nn.Module]]
    series: tuple[Series, ...]
    blocks: list[nn.Module]
    places: list[int]
    apart: list[str]


Run = Callable[[Shortened], Recording]


@dataclass
class Composer:
    """Records ``model`` by ``run``, which is called while it is shortened; ``chosen`` is the
    policy that picks its blocks, ``full`` says that it is not to be shortened at all. Modules
    ``apart`` are units of their own beside the parts that repeat, found by their size where it is
    None; those whose parameters others use as well are none. Modules ``within`` others, by their
    paths, are units beside those that they are in. ``forward`` runs the whole module once."""

    model: nn.Module
    run: Run
    chosen: Policy | None = None
    full: bool = False
    apart: Sequence[str] | None = ()
    within: Mapping[nn.Module, str] = field(default_factory=dict)
    forward: Callable[[], object] | None = None
    notes: list[str] = field(default_factory=list)

    def recording(self) -> Recording:
        """The recording, unfolded by its series to every part that the module has."""
        if self.apart is None:
            self.apart = large_parts(self.model, self.containers)
        if self.full or not self.left_out:
            return self._run({})
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                found = self._run(dict.fromkeys(self.left_out, FEW))
                reason = self._differs(found) or self._run_otherwise(found)
            except Untraceable as error:
                reason = f"it does not run with fewer ({first_line(error.cause)})"
                break
            if not reason:
                return found
        names = ", ".join(f"'{name}'" for name in self.left_out)
        self.notes.append(f"all parts of {names} were traced, not a few of each kind: {reason}")
        return self._run({})

    @cached_property
    def containers(self) -> list[Container]:
        """Where parts repeat."""
        return containers(self.model, self.chosen)

    @cached_property
    def left_out(self) -> dict[str, int]:
        """Periods that a recording can do without, by the name of their series."""
        found = {
            name: container.stretches[index].left_out
            for container in self.containers
            for index, name in self._titles(container)
        }
        return {name: periods for name, periods in found.items() if periods}

    def _differs(self, found: Recording) -> str:
        """Why a recording cannot be unfolded; series that lack as many periods grow together."""
        for size in sorted(set(self.left_out.values())):
            # Series of as many parts are grown in one run: each run traces the module once more,
            # and two series that both go wrong would not make up for each other.
            grown = [name for name, periods in self.left_out.items() if periods == size]
            periods = {name: FEW + (name in grown) for name in self.left_out}
            more = self._run(periods)
            if not alike(found, more):
                return "what they keep does not go up evenly with their number"
        return ""

    def _run_otherwise(self, found: Recording) -> str:
        """Why parts of the whole module do not run as an unfolded recording has it."""
        if self.forward is None:
            return ""
        ran: set[str] = set()
        with unchanged(self.model):
            for container in self.containers:
                for index, _ in self._titles(container):
                    cut, gave = container.stretches[index], dict[tuple[int, int], Any]()
                    for place, k in enumerate(cut.every):
                        for number, part in enumerate(called(container.children[k])):
                            kind = place % cut.period, number
                            # The first part of each kind runs as it is. Those behind it hand on
                            # something like what it gave, so that a forward of a hundred layers
                            # costs about as much as one of a single layer.
                            passing = _passing(part, container.names[k], gave, kind, ran)
                            vars(part)["forward"] = passing
            try:
                self.forward()
            # A module that computes with what the replaced parts gave may fail on values that
            # mean nothing. That says nothing against the recording, which the other check has
            # passed.
            except Exception:  # as modules fail that look at what a part of them gave
                return ""
        entered = {m.unit for m in Unfolded(found).forward if m.piece.point == "enter"}
        units = [c.names[k] for c in self.containers for k in c.units]
        other = [name for name in units if (name in entered) != (name in ran)]
        return f"'{other[0]}' does not run as it would among few" if other else ""

    def _run(self, periods: Mapping[str, int]) -> Recording:
        """A recording with so many periods of each series, of others all there are."""
        real = {module: name for name, module in self.model.named_modules()}
        # Names are taken before the children are, for inside a list they are numbered anew then.
        with unchanged(self.model):
            shortened = self._shortened(periods)
            names = {name: real[module] for name, module in self.model.named_modules()}
            try:
                return renamed(self.run(shortened), names)
            except NoUnitsError as error:  # their parameters are the root's
                self.apart = [name for name in self.apart or () if name not in error.units]
        return self._run(periods)

    def _shortened(self, periods: Mapping[str, int]) -> Shortened:
        units: dict[str, Sequence[nn.Module]] = {}
        series, places, begin = [], [], 0
        for container in self.containers:
            titles, kept = dict(self._titles(container)), []
            for index, cut in enumerate(container.stretches):
                here = cut.kept(periods.get(titles.get(index, ""), ALL))
                kept.extend(here)
                if index in titles:
                    every, some = ([container.names[k] for k in its] for its in (cut.every, here))
                    series.append(Series(titles[index], tuple(every), tuple(some), cut.period))
            for number, child in enumerate(container.units):
                if child in kept:
                    parts = called(container.children[child])
                    units[container.names[child]] = parts
                    places += [begin + number] * len(parts)
            begin += len(container.units)
            _keep(container, kept)
        blocks = [part for parts in units.values() for part in parts]
        units |= {name: [self.model.get_submodule(name)] for name in self.apart or ()}
        inside = {p for parts in units.values() for part in parts for p in part.parameters()}
        if any(parameter not in inside for parameter in self.model.parameters()):
            units[ROOT] = [self.model]
        units = self._with_inner(units)
        return Shortened(units, tuple(series), blocks, places, list(self.apart or ()))

    def _with_inner(self, units: dict[str, Sequence[nn.Module]]) -> dict[str, Sequence[nn.Module]]:
        """Modules within units as units, each before the one that it is in."""
        found: dict[str, Sequence[nn.Module]] = {}
        for name, modules in units.items():
            parts = [part for module in modules for part in module.modules()]
            found |= {self.within[part]: [part] for part in parts if part in self.within}
            found[name] = modules
        return found

    def _titles(self, container: Container) -> Iterator[tuple[int, str]]:
        """The names of stretches that repeat: of the first, their container's."""
        found = [k for k, cut in enumerate(container.stretches) if repeats(cut)]
        path = container.path or type(container.module).__name__
        for number, index in enumerate(found):
            yield index, f"{path}+{number}" if number else path


def _passing(
    part: nn.Module,
    name: str,
    gave: dict[tuple[int, int], Any],
    kind: tuple[int, int],
    ran: set[str],
) -> Callable[..., Any]:
    """A forward that says that it runs; after the first of its kind its results are like that
    one's."""
    own = part.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        ran.add(name)
        if kind not in gave:
            gave[kind] = own(*arguments, **keywords)
            return gave[kind]
        return map_tensors(torch.empty_like, gave[kind])

    return forward


def alike(few: Recording, more: Recording) -> bool:
    """Whether ``few``, unfolded to the parts of ``more``, says of each piece the same."""
    names = {series.name: series.recorded for series in more.series}
    unfolded = tuple(msgspec.structs.replace(s, names=names[s.name]) for s in few.series)
    recorded = tuple(msgspec.structs.replace(s, names=s.recorded) for s in more.series)
    return _said(msgspec.structs.replace(few, series=unfolded)) == _said(
        msgspec.structs.replace(more, series=recorded)
    )


def _said(recording: Recording) -> list[object]:
    blocks, summaries = BlockNames(recording), Summaries(recording, "stays")
    said: list[object] = []
    for moment in moments(recording, blocks):
        summary = summaries.of(moment.piece)
        gradients = {(blocks.beside(u, moment), d): n for (u, d), n in summary.gradients.items()}
        # Sums, not touches: two runs may number and order storages otherwise and still take the
        # same.
        sums = (summary.net, summary.peak, gradients)
        said.append((moment.piece.point, moment.unit, sums, moment.piece.work))
    return said


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What modules remember of a forward, and which parts they have, is as before at the end."""
    before = [
        (part, dict(vars(part)), dict(own_buffers(part)), dict(own_children(part)))
        for part in model.modules()
    ]
    try:
        yield
    finally:
        for part, attributes, buffers, modules in before:
            vars(part).clear()
            vars(part).update(attributes)
            own_buffers(part).clear()
            own_buffers(part).update(buffers)
            own_children(part).clear()
            own_children(part).update(modules)


def _keep(container: Container, kept: Sequence[int]) -> None:
    """Leave these children in a container; those of a list are numbered anew."""
    old = [name for name, child in own_children(container.module).items() if child is not None]
    # The keys of a list are its indices: with a gap it could not be indexed. A dict's keys, and
    # those of a sequence, may be used by name and stay.
    numbered = isinstance(container.module, nn.ModuleList)
    names = [str(k) if numbered else old[place] for k, place in enumerate(sorted(kept))]
    modules = own_children(container.module)
    modules.clear()
    modules.update(zip(names, (container.children[place] for place in sorted(kept)), strict=True))


def renamed(recording: Recording, names: Mapping[str, str]) -> Recording:
    """A recording with the names that modules have in the whole model."""
    if all(name == real for name, real in names.items()):
        return recording

    def tensor(name: str) -> str:
        path, _, own = name.rpartition(".")
        return f"{names[path]}.{own}" if names[path] else own

    def touch(old: Touch) -> Touch:
        name = tensor(old.name) if old.what == "gradient" else old.name
        module = names.get(old.module, old.module)
        return msgspec.structs.replace(old, name=name, module=module)

    def unit(old: RecordedUnit) -> RecordedUnit:
        tensors = tuple(TensorSpec(tensor(t.fqn), t.shape, t.dtype) for t in old.tensors)
        modules = tuple(names[path] for path in old.modules)
        frozen = tuple(map(tensor, old.frozen))
        return msgspec.structs.replace(old, tensors=tensors, modules=modules, frozen=frozen)

    return msgspec.structs.replace(
        recording,
        pieces=tuple(
            msgspec.structs.replace(p, touches=tuple(map(touch, p.touches)))
            for p in recording.pieces
        ),
        units=tuple(map(unit, recording.units)),
    )
