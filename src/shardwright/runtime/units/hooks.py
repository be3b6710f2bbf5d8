"""When a unit is gathered, reduced and freed: hooks on its modules and marks in the graph."""

# A unit has to be there before its modules compute and before the first of its gradients is
# computed, and may go when the last one is. Modules' own backward hooks tell neither of units of
# several modules, nor of outputs in containers, so the graph itself is marked: an identity on every
# output, whose backward is the first thing of the unit that runs (``_BeforeBackward``), and one
# identity on all inputs together, whose backward runs when the gradients of all of them are there
# (``_AfterBackward``). Of inputs that need no gradient nothing tells; the end of the backward does.
# ``anchor``, a leaf in every graph of the unit, tells a mark whether the backward adds gradients to
# leaves, or somebody asked torch.autograd.grad for others and parameters get none.
#
# Hooks come before a user's (``prepend``), who may look at whole parameters, and are called when a
# forward raised (``always_call``), or a unit would stay whole for ever.

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.core.errors import UnsupportedError
from shardwright.core.schedule import Action
from shardwright.runtime.torch_private import (
    in_transform,
    outside_graphs,
    trains,
    unwrapped,
    will_accumulate,
)
from shardwright.runtime.units.dstorage import holder_of
from shardwright.runtime.units.unit import UNSHARDED, Unit
from shardwright.tracker.private import in_backward, own_parameters
from shardwright.tracker.tensors import map_tensors

LOOKS = 2  # forwards of each of a unit's modules that are looked through for stashed tensors

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has


class UnitHooks:
    """The hooks of one unit, or of all buckets of the same modules. They hold the units; the
    modules hold them.

    What is ``early`` is there before the forward begins. Of buckets that are gathered ahead those
    are not whose parameters are used by forwards of the modules that own them, as the first
    forward shows: they are there when such a module begins.

    Which modules run, and in which order, may differ from rank to rank. The order of gathers may
    not, so a bucket comes with all that lie before it, and the last ones when the forward is over.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.unit = self.units[0]
        for unit in self.units:
            unit.driven_by_hand = False
        self.early = self.units
        self.owners: list[_Owner] = []
        self.is_running = False  # a forward of one of its modules
        self.handled: BaseException | None = None  # by whoever called it
        self.anchor = torch.empty(0, requires_grad=True)  # a leaf of every graph of the unit
        self.replaced: Replaced = []  # in callers' containers, during a forward
        self._stashes: dict[tuple[int, str], dict[str, Any]] = {}

    def register(self, modules: Sequence[nn.Module]) -> None:
        """Put the hooks on the unit's modules, which run in this order."""
        last = len(modules) - 1
        names = self.unit.module_names
        for index, module in enumerate(modules):
            before = _Before(self, first=index == 0)
            after = _After(self, names[index], last=index == last)
            # with_kwargs: inputs that are passed by name count as well. Were they not marked, the
            # unit would be taken for done while a path through them is still under way.
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, always_call=True)
        if len(self.units) > 1 and self.unit.flow.prefetch:
            for owner, units in _owners(modules, self.units):
                # The modules of the unit itself have a hook already that gathers before they run.
                if owner not in modules:
                    self.owners.append(_Owner(self, units))
                    owner.register_forward_pre_hook(self.owners[-1], prepend=True)

    def begin(self, *, first: bool) -> None:
        """The forward of a module begins, and what is early is there."""
        self.is_running = True
        for unit in self.early:
            if first:
                unit.check()
            unit.writes.watch()

    def end(self, *, last: bool) -> None:
        """It is over: raise if it wrote a parameter. After that of the last module the next forward
        waits for less."""
        self.is_running = False
        for error in [unit.unwatch() for unit in self.units]:  # of all, before one is raised
            if error is not None:
                raise error
        if last and self.early is not self.units:
            self.need(self.units)
        if last and self.owners and torch.is_grad_enabled():
            # An owner that did not run has parameters that somebody else reads, as F.linear(x,
            # other.weight) does. No hook tells when that is, so the buckets of these stay early.
            idle = [s for owner in self.owners if not owner.ran for s in owner.units]
            owned = [s for owner in self.owners for s in owner.units]
            early = (i for i, s in enumerate(self.units) if s in idle or s not in owned)
            self.early = self.units[min(early, default=len(self.units)) :]
            self.owners.clear()  # for it is asked once

    def need(self, buckets: Sequence[Unit]) -> None:
        """``buckets`` are there, and all that lie before them (as a forward comes to them)."""
        missing = [i for i, s in enumerate(self.units) if s.state is not UNSHARDED and s in buckets]
        for unit in reversed(self.units[min(missing, default=len(self.units)) :]):
            if unit.state is not UNSHARDED:
                unit.flow.need(unit, "backward" if in_backward() else "forward")
                unit.check()
                if self.is_running:
                    unit.writes.watch()

    def fail(self, *, recomputed: bool) -> None:
        """The forward raised."""
        self.is_running = False
        for unit in self.units:
            # A raised forward may have written parameters; the exception that is on its way says
            # more than a refusal would.
            unit.writes.watched = None
            # torch.utils.checkpoint ends a recomputed forward by an exception as soon as it has the
            # tensors it needs (early stop). That is no failure: the unit stays, for its backward
            # comes next.
            if not recomputed:
                unit.free()
        # Nothing is absorbed here: taking over parameters can need a collective, and other ranks
        # may not have raised.
        if not recomputed and self.unit.flow.is_led_by(self.unit):
            self.unit.flow.recover(absorbs=False)

    def announce(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, with a hook by which a backward reaches this unit."""
        # The anchor is a leaf that every output leads to and that gets no gradient. Whether the
        # engine will run its node is how a mark learns what kind of backward this is.
        return _BeforeBackward.apply(tensor, self.anchor, self)

    def entering(self, gradient: Any) -> Any:
        """A gradient of an input, by which a backward of this backward reaches the unit."""
        if torch.is_grad_enabled() and gradient is not None and trains(gradient):
            return self.announce(gradient)
        return gradient

    def leaving(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Gradients of outputs, by which a backward of this backward leaves the unit."""
        if torch.is_grad_enabled() and all(g is not None and trains(g) for g in gradients):
            return _AfterBackward.apply(self, *gradients)
        return gradients

    def mark_stashed(self, module: nn.Module, *, looks: bool) -> None:
        """Announce what a forward leaves in attributes of modules, as auxiliary losses are: their
        backward may come alone. Where they are is found in the first forwards."""
        if looks:
            # Looking through the attributes of all modules takes too long for every step, so later
            # forwards only look where something was found.
            for inner in module.modules():
                if holder_of(inner) is self.unit:
                    for name, value in vars(inner).items():
                        if name not in _OF_MODULES and _has_unmarked(value):
                            self._stashes[id(vars(inner)), name] = vars(inner)
        for (_, name), attributes in self._stashes.items():
            before = attributes.get(name)
            if not _has_unmarked(before):
                continue
            after = map_tensors(self._announce_once, before, 0)
            if isinstance(before, list):
                # In place, for the loss may have the same list by another name.
                before[:] = after
            else:
                attributes[name] = after

    def _announce_once(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.announce(tensor) if _is_unmarked(tensor) else tensor

    def enter_backward(self, accumulates: bool | None) -> None:
        """A gradient arrives at an output, of a backward that leaves gradients on parameters, of
        torch.autograd.grad for others (False), or of one of torch.func's (None)."""
        for unit in self.units:
            unit.flow.enter_backward(unit, accumulates)

    def leave_backward(self) -> None:
        """The gradients of all inputs are there."""
        for unit in self.units:
            unit.flow.leave_backward(unit)


def _owners(
    modules: Sequence[nn.Module], units: Sequence[Unit]
) -> Iterator[tuple[nn.Module, list[Unit]]]:
    """Modules that have parameters of their own, and the units that these are in."""
    shown: dict[int, list[Unit]] = {}
    for unit in units:
        for place in {id(place) for member in unit.members for place, _ in member.places}:
            shown.setdefault(place, []).append(unit)
    inside = {id(m): m for module in modules for m in module.modules()}
    for inner in inside.values():
        found = shown.get(id(own_parameters(inner)))
        if found:
            yield inner, found


class _Owner:
    """Before a module runs that has parameters in buckets: they are there."""

    __slots__ = ("hooks", "ran", "units")

    def __init__(self, hooks: UnitHooks, units: Sequence[Unit]) -> None:
        self.hooks = hooks
        self.units = tuple(units)
        self.ran = False

    @outside_graphs
    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self.ran = True
        # Also in a backward: what a checkpoint around the whole unit runs again is before it.
        for unit in self.units:
            if unit.state is not UNSHARDED:
                self.hooks.need(self.units)
                return


class _Before:
    """Before a module of the unit runs: gather, cast and mark its inputs."""

    __slots__ = ("first", "hooks")

    def __init__(self, hooks: UnitHooks, *, first: bool) -> None:
        self.hooks = hooks
        self.first = first

    @outside_graphs
    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        hooks, unit = self.hooks, self.hooks.unit
        hooks.handled = sys.exception()
        recomputed = in_backward()
        if not recomputed:
            if self.first and unit.flow.is_led_by(unit):
                unit.flow.begin_forward()
            else:
                unit.flow.enter_forward()
        for each in reversed(hooks.early):  # as a forward comes to them
            each.flow.need(each, "backward" if recomputed else "forward")
        hooks.begin(first=self.first)
        if not self.first:
            return None
        dtype = unit.precision.param_dtype if unit.precision.cast_forward_inputs else None
        if not torch.is_grad_enabled() and dtype is None:
            return None
        # The usual call by itself: to flatten and rebuild the arguments takes longer than the mark.
        if len(arguments) == 1 and not keywords and type(arguments[0]) is torch.Tensor:
            tensor = arguments[0] if dtype is None else _cast(arguments[0], dtype)
            if tensor.requires_grad or trains(tensor):
                tensor = _AfterBackward.apply(hooks, tensor)[0]
            return ((tensor,), keywords)
        return self._marked((arguments, keywords), dtype)

    def _marked(self, given: Any, dtype: torch.dtype | None) -> Any:
        """``given`` with its tensors cast and marked, None where that changes nothing. Lists and
        dictionaries stay the caller's own, for a forward may append to them, and get back after it
        what they had."""
        leaves = tree_flatten(given)[0]
        changed = [_cast(leaf, dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        tensors = [i for i, leaf in enumerate(changed) if torch.is_tensor(leaf)]
        spots = [i for i in tensors if trains(changed[i])]
        if torch.is_grad_enabled() and spots:
            # One node for all inputs: autograd runs it once the gradients of every one of them are
            # there. A node each would say that the unit is over with the first one.
            marked = _AfterBackward.apply(self.hooks, *(changed[i] for i in spots))
            for index, tensor in zip(spots, marked, strict=True):
                changed[index] = tensor
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return None
        found = {id(old): new for old, new in zip(leaves, changed, strict=True)}
        return _with_leaves(given, found, self.hooks.replaced)


Replaced = list[tuple[Any, Any, Any, Any]]  # a container, where in it, what it had and what it has


def _with_leaves(value: Any, found: dict[int, Any], replaced: Replaced) -> Any:
    """``value`` with other leaves; lists and dictionaries are the same objects as before."""
    if id(value) in found:
        return found[id(value)]
    if isinstance(value, list | dict):
        places = enumerate(value) if isinstance(value, list) else value.items()
        for key, before in list(places):
            after = _with_leaves(before, found, replaced)
            if after is not before:
                value[key] = after
                replaced.append((value, key, before, after))
    elif isinstance(value, tuple):
        every = [_with_leaves(each, found, replaced) for each in value]
        return type(value)(*every) if hasattr(value, "_fields") else type(value)(every)
    else:
        leaves, shape = tree_flatten(value)
        return tree_unflatten([_with_leaves(leaf, found, replaced) for leaf in leaves], shape)
    return value


def _restore(replaced: Replaced) -> None:
    """Let callers' containers have their own again, where a forward left what it was given."""
    for value, key, before, after in reversed(replaced):
        places = enumerate(value) if isinstance(value, list) else [(key, value.get(key))]
        # A forward may have moved what it was given to another place of its list (insert, pop), so
        # every place is looked at. What the forward put there itself stays.
        for place, each in list(places):
            if each is after:
                value[place] = before
    replaced.clear()


class _After:
    """After a module of the unit ran, or raised: mark outputs and free the unit."""

    __slots__ = ("hooks", "last", "looks", "name")

    def __init__(self, hooks: UnitHooks, name: str, *, last: bool) -> None:
        self.hooks = hooks
        self.name = name
        self.last = last
        self.looks = LOOKS  # that are left

    @outside_graphs
    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        unit = self.hooks.unit
        recomputed = in_backward()
        # Also after an exception: a container of the caller's must not keep tensors of this graph.
        if self.hooks.replaced:
            _restore(self.hooks.replaced)
        # Torch calls with None where the forward raised; one may also return it, with tensors left
        # in attributes.
        handled, self.hooks.handled = self.hooks.handled, None
        if output is None and sys.exception() is not handled:
            self.hooks.fail(recomputed=recomputed)
            return None
        self.hooks.end(last=self.last)
        counts = torch.is_grad_enabled()
        output = self._marked(output, module, counts)
        if counts:
            self.hooks.mark_stashed(module, looks=self.looks > 0)
            self.looks = max(self.looks - 1, 0)
        probe = unit.comm.probe
        if probe.listens:
            probe.did(Action("compute", self.name, "forward"))
        # A recomputed forward frees nothing, for the backward of the unit is what asked for it.
        if not self.last or recomputed:
            return output
        for each in self.hooks.units:
            each.flow.leave_forward(each, trains=counts)
        return output

    def _marked(self, output: Any, module: nn.Module, counts: bool) -> Any:
        """The output with nothing that points into the unit's memory, announcing its backward."""
        unit = self.hooks.unit
        dtype = unit.precision.output_dtype if self.last else None
        found = 0

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            found += 1
            inner = unwrapped(tensor)
            for each in self.hooks.units:
                # A view of a whole parameter, such as a tied weight that is returned, would lose
                # its memory as the unit is freed, which comes next.
                if each.shares_full_buffer(inner):
                    tensor = tensor.clone()
                    break
            if dtype is not None:
                tensor = _cast(tensor, dtype)
            if not (counts and trains(tensor)):
                return tensor
            return self.hooks.announce(tensor)

        if type(output) is torch.Tensor:
            return mark(output)
        output = map_tensors(mark, output)
        # Without a mark no backward would gather the unit again, and autograd would refuse it in
        # words that say nothing of units.
        if counts and not found and not _is_plain(output):
            name = unit.name or type(module).__name__
            raise UnsupportedError(
                f"output of unit '{name}'",
                "tensors, alone, in containers or in attributes of objects",
                f"a {type(output).__name__} without any that can be found",
                "Return tensors, or run under torch.no_grad().",
            )
        return output


def _is_unmarked(tensor: torch.Tensor) -> bool:
    node = tensor.grad_fn
    return node is not None and type(node).__name__ != f"{_BeforeBackward.__name__}Backward"


def _has_unmarked(value: Any) -> bool:
    """Whether there are tensors with a graph in ``value`` that announce nothing."""
    if not isinstance(value, torch.Tensor | list | tuple | dict):
        return False
    return any(isinstance(t, torch.Tensor) and _is_unmarked(t) for t in tree_flatten(value)[0])


def _is_plain(value: Any) -> bool:
    """Whether no tensor can be in ``value``."""
    kinds = (int, float, complex, str, bytes, type(None))
    return all(isinstance(leaf, kinds) for leaf in tree_flatten(value)[0])


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Floating-point tensors in ``dtype``, others and None as they are."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` have floating-point inputs in ``dtype``, as a unit of its own would."""

    def cast(_: nn.Module, arguments: Any, keywords: Any) -> Any:
        return map_tensors(lambda tensor: _cast(tensor, dtype), (arguments, keywords), 0)

    module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


class _Mark(torch.autograd.Function):
    """A function that is applied as quickly as those that torch.func does not know."""

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Without the look at the signature of ``forward`` that torch takes every time."""
        # Only torch.func needs the rest of what it does.
        if in_transform():
            return super().apply(*arguments)
        return super(torch.autograd.Function, cls).apply(*arguments)


class _BeforeBackward(_Mark):
    """Identity on an output; its backward is the first thing a unit sees of a backward pass.

    Where that backward has a graph (``create_graph``), a backward of it comes to the unit by the
    gradients that the first one left it with and leaves by those that it came with, so the marks
    are put on these the other way around."""

    # torch.func takes only Functions whose forward has no ctx, with a setup_context, and which say
    # what vmap and forward-mode derivatives do with them.
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, anchor: torch.Tensor, hooks: UnitHooks) -> torch.Tensor:
        # Not view_as: autograd refuses in-place operators on a view that a Function made, and
        # models do write on what a block returned (x += y, relu_).
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.hooks = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hooks.enter_backward(will_accumulate(ctx, 1))
        return ctx.hooks.leaving(gradients)[0], None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return tangent.view_as(tangent)


class _AfterBackward(_Mark):
    """Identity on all inputs at once: its backward runs when the unit's gradients are complete."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: UnitHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hooks.leave_backward()
        return None, *map(ctx.hooks.entering, gradients)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return tuple(None if t is None else t.view_as(t) for t in tangents)
