"""Which module is at work, and the moments before and after each of its hooks.

Hooks for all modules run before a module's own, and hooks that were added last run after them, so
between two marks lies what FSDP does around a forward. A backward is seen by hooks on the tensors
that come in and go out: a runtime puts what it does around one into hooks of its own on the same
tensors, or into nodes of its own between what the module returned and what the caller got. Either
way two hooks enclose it, and whichever is reached first is the one before.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter

from shardwright.core.footprint import State
from shardwright.tracker.private import counting_nodes, in_backward, node_number, when_complete
from shardwright.tracker.storages import Log

if TYPE_CHECKING:
    from shardwright.tracker.owners import Owners

_UNNUMBERED = 2**63  # nodes that add up gradients run as soon as they can and have no place


class Mark(NamedTuple):
    """A module reached a state at a moment of the log."""

    moment: int
    module: str
    state: State
    iteration: int
    call: int


class ModuleCall(NamedTuple):
    """A forward of a module, from its first moment to its last."""

    module: str
    iteration: int
    begin: int
    end: int


class _Frame(NamedTuple):
    """A forward that is under way; ``backward`` is None where it is computed again."""

    path: str
    call: int
    begin: int
    given: list[torch.Tensor]
    backward: Backward | None


class Modules:
    """Marks and calls of every module of a model; ``end`` takes all hooks away again."""

    def __init__(self, model: nn.Module, log: Log, listener: Owners) -> None:
        self.model = model
        self.log = log
        self.listener = listener
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.marks: list[Mark] = []
        self.calls: list[ModuleCall] = []
        self.iteration = 1
        self.backwards = Backwards(self._mark)
        self._frames: list[_Frame] = []
        self._counts: dict[str, int] = {}
        self._numbers: list[int] = []  # from this node of the graph on ...
        self._owners: list[str | None] = []  # ... nodes are this module's
        self._latest: str | None = None
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Put hooks on every module; they change nothing."""
        add = self._handles.append
        add(register_module_forward_pre_hook(self._before_pre_hooks))
        add(register_module_forward_hook(self._before_post_hooks, always_call=True))
        for module in self.model.modules():
            path = self.paths[id(module)]
            before = partial(self._after_pre_hooks, path)
            after = partial(self._after_post_hooks, path)
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            add(module.register_forward_hook(after, always_call=True))

    def end(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frames.clear()
        self.backwards.end()

    def at_work(self) -> str | None:
        """The path of the module whose operation this is, None outside of all: the one that runs,
        or in a backward the one that made the node of the graph."""
        if self._frames:
            return self._frames[-1].path
        if not in_backward():
            return None
        # In a backward nothing says which module is at work. autograd numbers the nodes of its
        # graph in the order in which they are made, so the number of the node that runs tells whose
        # forward made it.
        number = node_number()
        if 0 <= number < _UNNUMBERED:
            place = bisect_right(self._numbers, number) - 1
            self._latest = self._owners[place] if place >= 0 else None
        return self._latest

    def next_iteration(self) -> None:
        """An optimizer has stepped and the model runs again."""
        self.iteration += 1
        self._counts.clear()
        # Nodes of an iteration that is over run no more: without this the lists would grow with
        # every step.
        self._numbers.clear()
        self._owners.clear()

    # ---- hooks, in the order they are called -----------------------------------------------------

    def _before_pre_hooks(self, module: nn.Module, arguments: Any) -> None:
        path = self.paths.get(id(module))
        if path is None:
            return
        recomputed = in_backward()
        if not recomputed:
            if not self._frames:
                self.listener.begin_forward()
            if module is self.model:
                self.listener.begin_model(arguments)
            self._counts[path] = self._counts.get(path, 0) + 1
        call = self._counts.get(path, 1)
        backward = None if recomputed else Backward(self.backwards, path, self.iteration, call)
        given = _with_gradient(arguments)
        self._frames.append(_Frame(path, call, self.log.now, given, backward))
        self._own_nodes()
        self._reach("before recompute" if recomputed else "before pre-forward", self._frames[-1])

    def _after_pre_hooks(self, path: str, module: nn.Module, given: Any, named: Any) -> None:
        if not self._frames or self._frames[-1].path != path:
            return
        self.listener.meet(path, module)
        frame = self._frames[-1]
        if frame.backward is None:
            return
        self._reach("after pre-forward", frame)
        if torch.is_grad_enabled():
            final = _with_gradient((given, named))
            self.backwards.watch_inputs(frame.backward, frame.given, final)

    def _before_post_hooks(self, module: nn.Module, arguments: Any, output: Any) -> None:
        path = self.paths.get(id(module))
        if not self._frames or self._frames[-1].path != path or _raised(output):
            return
        frame = self._frames[-1]
        if frame.backward is None:
            return
        self._reach("before post-forward", frame)
        if torch.is_grad_enabled():
            self.backwards.watch_outputs(frame.backward, _with_gradient(output), inner=True)

    def _after_post_hooks(self, path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if not any(frame.path == path for frame in self._frames):
            return
        while (frame := self._frames.pop()).path != path:
            pass  # forwards within this one that raised
        self._own_nodes()
        if _raised(output):
            return
        if frame.backward is None:
            self._reach("after recompute", frame)
            return
        self._reach("after post-forward", frame)
        self.calls.append(ModuleCall(path, self.iteration, frame.begin, self.log.now))
        if torch.is_grad_enabled():
            self.backwards.watch_outputs(frame.backward, _with_gradient(output), inner=False)
        if module is self.model:
            self.listener.end_model(output)

    # ---- small things ----------------------------------------------------------------------------

    def _mark(
        self, path: str, state: State, iteration: int, call: int, moment: int | None = None
    ) -> None:
        at = self.log.now if moment is None else moment
        self.marks.append(Mark(at, path, state, iteration, call))

    def _reach(self, state: State, frame: _Frame) -> None:
        self._mark(frame.path, state, self.iteration, frame.call)

    def _own_nodes(self) -> None:
        """The graph grows for the module that runs now."""
        self._numbers.append(counting_nodes())
        self._owners.append(self._frames[-1].path if self._frames else None)


def _with_gradient(values: Any) -> list[torch.Tensor]:
    return [v for v in tree_iter(values) if isinstance(v, torch.Tensor) and v.requires_grad]


def _raised(output: Any) -> bool:
    """Whether a hook is called because the forward raised."""
    return output is None and sys.exc_info()[0] is not None


# path, state, iteration, number of the call, and the moment where it is not now
Reached = Callable[[str, State, int, int, int | None], None]


class Backward:
    """The backward of one forward; it may come, and come again where the graph is kept."""

    __slots__ = ("_first", "_leaving", "_passed", "call", "iteration", "owner", "path")

    def __init__(self, owner: Backwards, path: str, iteration: int, call: int) -> None:
        self.owner = owner
        self.path = path
        self.iteration = iteration
        self.call = call
        self._first: bool | None = None
        self._passed = False
        self._leaving = False

    def entered(self, inner: bool, _: object) -> None:
        """A gradient arrives at an output, as the module's own code made it (``inner``) or as the
        caller got it."""
        # A module with several outputs is entered with the first gradient that arrives, and a
        # runtime's own hooks lie between the two of ours, on whichever side: the first of the two
        # is before them.
        if self._first is None:
            self._first = inner
            self._mark("before pre-backward")
            self.owner.opened[id(self)] = self
        elif inner is not self._first and not self._passed:
            self._passed = True
            self._mark("after pre-backward")

    def leaving(self) -> None:
        """The gradients of the inputs that the module's own code got are there."""
        self._leaving = True
        self._mark("before post-backward")

    def left(self) -> None:
        """The gradients of the inputs that the caller gave are there."""
        self._mark("after post-backward")
        self._close()

    def leave(self, moment: int | None = None) -> None:
        """Both, where nothing lies between."""
        if not self._leaving:
            self._mark("before post-backward", moment)
        self._mark("after post-backward", moment)
        self._close()

    def _close(self) -> None:
        self.owner.opened.pop(id(self), None)
        self._first, self._passed, self._leaving = None, False, False

    def _mark(self, state: State, moment: int | None = None) -> None:
        if self.owner.is_on:
            self.owner.mark(self.path, state, self.iteration, self.call, moment)


class Backwards:
    """Hooks for the backwards of all modules; ``opened`` are those under way."""

    def __init__(self, mark: Reached) -> None:
        self.mark = mark
        self.is_on = True
        self.opened: dict[int, Backward] = {}
        self._handles: list[Any] = []

    def watch_inputs(
        self, backward: Backward, given: Sequence[torch.Tensor], final: Sequence[torch.Tensor]
    ) -> None:
        """``given`` by the caller by position, and ``final`` as the module's own code gets them."""
        same = len(given) == len(final) and all(map(is_, given, final))
        if same or not given:
            callbacks = [(final, backward.leave)]
        else:
            callbacks = [(final, backward.leaving), (given, backward.left)]
        # Taken away at the end: leaves outlive the graph, and a hook that knows its node is in a
        # circle with it, through memory in which Python's collector does not look.
        for tensors, callback in callbacks:
            self._handles += when_complete(tensors, callback)

    def watch_outputs(
        self, backward: Backward, outputs: Iterable[torch.Tensor], *, inner: bool
    ) -> None:
        """What the module's own code returned (``inner``), or what the caller gets."""
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(backward.entered, inner))

    def finish(self, moment: int) -> None:
        """The pass was over at ``moment``, and with it every backward whose inputs have no
        gradient."""
        for backward in list(self.opened.values()):
            backward.leave(moment)

    def end(self) -> None:
        """Hear nothing any more."""
        self.is_on = False
        self.opened.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
