"""The moments of a module's backward, seen by hooks on the tensors that come in and go out.

A runtime puts what it does around a backward into hooks of its own on the same tensors, or into
nodes of its own between what the module returned and what the caller got. Either way two hooks
enclose it, and whichever is reached first is the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from shardwright.core.tracked import State

# path, state, iteration, number of the call, and the moment where it is not now
Mark = Callable[[str, State, int, int, int | None], None]


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
        if self._first is None:
            self._first = inner
            self._mark("before pre-backward")
            self.owner.opened[id(self)] = self
        elif inner is not self._first and not self._passed:
            self._passed = True
            self._mark("after pre-backward")

    def leaving(self, _: object) -> None:
        """The gradients of the inputs that the module's own code got are there."""
        self._leaving = True
        self._mark("before post-backward")

    def left(self, _: object) -> None:
        """The gradients of the inputs that the caller gave are there."""
        self._mark("after post-backward")
        self._close()

    def leave(self, _: object, moment: int | None = None) -> None:
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

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.is_on = True
        self.opened: dict[int, Backward] = {}
        self._handles: list[Any] = []

    def expect(self, path: str, iteration: int, call: int) -> Backward:
        """A forward has begun that may have a backward."""
        return Backward(self, path, iteration, call)

    def watch_inputs(
        self,
        backward: Backward,
        given: Sequence[torch.Tensor],
        final: Sequence[torch.Tensor],
    ) -> None:
        """``given`` by the caller by position, and ``final`` as the module's own code gets them."""
        same = len(given) == len(final) and all(map(_is, given, final))
        if same or not given:
            self._when_complete(final, backward.leave)
        else:
            self._when_complete(final, backward.leaving)
            self._when_complete(given, backward.left)

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
            backward.leave(None, moment)

    def end(self) -> None:
        """Hear nothing any more."""
        self.is_on = False
        self.opened.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _when_complete(
        self, tensors: Sequence[torch.Tensor], callback: Callable[..., None]
    ) -> None:
        if tensors:
            handle = register_multi_grad_hook(tensors, callback)
            if any(tensor.grad_fn is None for tensor in tensors):
                self._handles.append(handle)  # leaves outlive the graph


def _is(one: object, other: object) -> bool:
    return one is other
