"""Parameters whose gradient is somewhere else, and say so to whoever asks or clears it."""

# Every parameter exists twice, whole while its unit computes and sharded otherwise, and an
# optimizer may have it a third time, as a part of a flat tensor. Users read, clear and clip the
# gradient of whichever they hold, so ``grad`` is a property here that leads to the one place where
# the gradient is. Autograd knows nothing of properties: it reads and writes the field beneath,
# which is reached by ``C_GRAD`` and must be empty once its gradient was summed, or it counts twice.

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.runtime.torch_private import C_DATA, C_GRAD, adds_to, no_subclass_functions
from shardwright.tracker.private import accumulated_hooks, gradient_hooks


class Home(Protocol):
    """Where the gradient and the memory of a parameter really are."""

    def gradient(self) -> torch.Tensor | None:
        """The gradient there."""
        ...

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Put one there, or nothing."""
        ...

    def refusal(self) -> InputError:
        """What to say to someone who wants to give the parameter other memory."""
        ...

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a parameter has its own gradient. Who copies tensors with their attributes, as
        torch's stagers do, would copy optimizer and model through this."""


def without_gradient(parameter: Any) -> None:
    """``del parameter.grad``."""
    parameter.grad = None


class LinkedParameter(nn.Parameter):
    """A plain parameter with a ``home``: what modules compute with while a unit is UNSHARDED.

    ``grad`` is autograd's own while a backward is under way and the one at home otherwise;
    clearing it clears both. ``data`` shares the version counter, so that writes are noticed.
    """

    home: Home | None = None

    def __getattr__(self, name: str) -> Any:
        """What a user set on the sharded parameter, which module code asks for in a forward."""
        # Private names are torch's own. What the class of the sharded parameter has is left out, or
        # hasattr(p, "full_tensor") would be true of a plain tensor.
        given = getattr(self.home, "parameter", None)
        if given is not None and not name.startswith("_") and not hasattr(type(given), name):
            found = vars(given).get(name, given)
            if found is not given:
                return found
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient, here or at home."""
        found: torch.Tensor | None = C_GRAD.__get__(self)
        return self.home.gradient() if found is None and self.home is not None else found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.home is None:
            C_GRAD.__set__(self, value)
            return
        # Both, for autograd's own would be found first, and summed with the next backward.
        C_GRAD.__set__(self, None)
        self.home.set_gradient(value)

    grad = grad.deleter(without_gradient)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same memory without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.home is not None:
            raise self.home.refusal()
        C_DATA.__set__(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.detach().clone(), self.requires_grad)  # not the unit's buffer


@contextmanager
def trainable(parameter: nn.Parameter) -> Iterator[None]:
    """``parameter`` takes hooks on its gradient, which torch refuses for frozen ones."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(trains)


def follow_gradients(whole: nn.Parameter, unit: weakref.ref[Any]) -> None:
    """Let ``unit`` hear of every gradient that comes to its ``whole`` parameter, announced or
    not."""
    if whole.is_floating_point() or whole.is_complex():
        with trainable(whole):
            whole.register_hook(partial(_comes, unit, weakref.ref(whole)))


def follow_accumulation(whole: nn.Parameter, place: int, unit: weakref.ref[Any]) -> None:
    """Let ``unit`` hear when a backward has left the gradient of its ``whole`` parameter at
    ``place``."""
    if whole.is_floating_point() or whole.is_complex():
        with trainable(whole):
            whole.register_post_accumulate_grad_hook(partial(_is_left, unit, place))


def _is_left(of: weakref.ref[Any], place: int, _: torch.Tensor) -> None:
    unit = of()
    if unit is not None and unit.gradients.expected:
        unit.flow.come(unit, place)


def _comes(of: weakref.ref[Any], whole: weakref.ref[nn.Parameter], _: torch.Tensor) -> None:
    unit = of()
    if unit is None or unit.gradients.expected or unit.driven_by_hand:
        return
    # torch.autograd.grad takes this gradient for itself. Nothing would be left here to sum, and
    # ranks that were not asked would wait.
    if adds_to(whole()) is None:
        raise asked_for(unit.name)
    unit.flow.arrive(unit)


class OfStrays(partial[None]):
    """Our hook on what autograd leaves on a parameter that no unit computes with. It has nothing to
    do where a unit's mean gradient comes, which alone is no reason to call hooks one by one."""


class Replica(LinkedParameter):
    """What users hold of a tensor that every rank has whole. Its gradient is the mean over ranks,
    kept beside autograd's own: that is of a use outside of the unit's forward, such as CLIP's
    temperature in a loss, and goes to the unit's next sum."""

    unit: weakref.ref[Any] | None = None
    place = 0  # in the unit's layout
    mean: torch.Tensor | None = None

    @classmethod
    def over(cls, memory: torch.Tensor, requires_grad: bool) -> Replica:
        """A parameter over ``memory``."""
        trains = memory.is_floating_point() or memory.is_complex()
        made = cls(memory, requires_grad=trains and requires_grad)
        if trains:
            with trainable(made):
                made.register_post_accumulate_grad_hook(OfStrays(_take_stray))
        return made

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The mean gradient, here or in an optimizer's flat tensor."""
        return self.mean if self.home is None else self.home.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.home is not None:
            self.home.set_gradient(value)
            return
        C_GRAD.__set__(self, value)  # which checks it
        self.mean = value
        C_GRAD.__set__(self, None)

    grad = grad.deleter(without_gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replica:
        if id(self) not in memo:
            memo[id(self)] = Replica.over(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


def _take_stray(parameter: Any) -> None:
    stray = C_GRAD.__get__(parameter)
    unit = None if parameter.unit is None else parameter.unit()
    if stray is None:
        return
    # The unit sums it. Left here it would be added to again, and counted twice.
    C_GRAD.__set__(parameter, None)
    if unit is not None:
        unit.take_stray(parameter, stray)
    elif parameter.mean is None:  # a copy, which is of no unit
        parameter.mean = stray
    else:
        parameter.mean = parameter.mean + stray


class FlatReplica(LinkedParameter):
    """An optimizer's flat tensor of what every rank has whole, the memory of many parameters."""

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient, which its home looks at first."""
        return C_GRAD.__get__(self) if self.home is None else self.home.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.home is None:
            C_GRAD.__set__(self, value)
        else:
            self.home.set_gradient(value)

    grad = grad.deleter(without_gradient)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in getattr(func, "__name__", ""):
            raise norm_of_many("a flat tensor that every rank has whole")
        if any(issubclass(kind, DTensor) for kind in types):  # which torch 2.11 does not ask else
            return NotImplemented
        with no_subclass_functions():
            return func(*args, **(kwargs or {}))


def norm_of_many(name: str) -> UnsupportedError:
    """What to say of the norm of many parameters, which optimizers take to scale each by its."""
    wanted = "a use that has one answer for all of its parameters"
    found = "the norm of a flat tensor, as optimizers take that scale each tensor by it"
    remedy = "Give Adafactor, LAMB and the like model.parameters()."
    return UnsupportedError(name, wanted, found, remedy)


class AtShard(Home):
    """The home of a whole parameter: the sharded one. ``memory`` is what the whole one lives in."""

    def __init__(
        self, parameter: nn.Parameter, name: str, memory: torch.UntypedStorage | None = None
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.memory = memory

    def gradient(self) -> torch.Tensor | None:
        """That of the sharded parameter, for as long as the whole one is there: an optimizer that
        was given the whole one would write memory that is gone."""
        if self.memory is not None and not self.memory.size() and self.parameter.numel():
            wanted = "the sharded parameter"
            remedy = "Make optimizers and lists of parameters before a forward or after a backward."
            raise InputError(self.name, wanted, "the gathered one, whose memory is freed", remedy)
        return self.parameter.grad

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Only nothing can be put there, for a part is not a whole."""
        if gradient is not None:
            raise self.refusal()
        self.parameter.grad = None

    def refusal(self) -> InputError:
        """It lives as long as the unit is UNSHARDED."""
        found = "other memory or a gradient for the gathered parameter"
        remedy = "Write inside storage.unsharded(write=True), or before the forward."
        return InputError(self.name, "to be changed while its unit is sharded", found, remedy)


def call_gradient_hooks(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Let hooks on ``parameter`` change ``gradient``, which autograd did not bring, in place."""
    for hook in gradient_hooks(parameter):
        changed = hook(gradient)
        if changed is not None and changed is not gradient:
            # In place, for it is a part of the tensor that goes to optimizers.
            gradient.copy_(changed)


def call_accumulated(parameter: nn.Parameter) -> None:
    """Call the hooks that wait for a gradient, such as an optimizer in the backward."""
    for hook in accumulated_hooks(parameter):
        hook(parameter)


def asked_for(unit: str) -> UnsupportedError:
    """What to say to someone who asks autograd for gradients of certain parameters of a unit."""
    wanted = "backward() for gradients of parameters, which are summed over ranks"
    found = "torch.autograd.grad or backward(inputs=...) for parameters of it"
    remedy = "Call backward() and read .grad; freeze what shall have none."
    return UnsupportedError(f"a backward through unit '{unit}'", wanted, found, remedy)


def on_meta(where: str) -> InputError:
    """What to say where memory is asked of a unit without any."""
    remedy = "Call to_empty(device=...) on the model, then give its parameters their values."
    return InputError(where, "a real tensor", "one on the meta device", remedy)


def hooked_twice(where: str) -> InputError:
    """What to say of hooks on a gradient that comes in two parts."""
    wanted = "hooks on its gradient, or a use outside of its unit's forward"
    remedy = "Use it inside of the forward, or change its gradient after the backward."
    return InputError(where, wanted, "both, and each hook would be called twice", remedy)


def inherit(parameter: nn.Parameter, original: nn.Parameter) -> None:
    """Let ``parameter`` have what users gave the one that it stands for: attributes and hooks."""
    for name, value in vars(original).items():
        if name not in vars(parameter):
            setattr(parameter, name, value)
    for hook in gradient_hooks(original):
        parameter.register_hook(hook)
    for hook in accumulated_hooks(original):
        parameter.register_post_accumulate_grad_hook(hook)
