"""Parameters whose gradient is somewhere else, and say so to whoever asks or clears it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.runtime.torch_private import C_DATA, C_GRAD


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


class LinkedParameter(nn.Parameter):
    """A plain parameter with a ``home``: what modules compute with while a unit is UNSHARDED.

    ``grad`` is autograd's own while a backward is under way and the one at home otherwise;
    clearing it clears both. ``data`` shares the version counter, so that writes are noticed.
    """

    home: Home | None = None

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
        C_GRAD.__set__(self, None)
        self.home.set_gradient(value)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same memory without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.home is not None:
            raise self.home.refusal()
        C_DATA.__set__(self, value)


class FlatReplica(LinkedParameter):
    """An optimizer's flat tensor of what every rank has whole, the memory of many parameters."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in getattr(func, "__name__", ""):
            raise norm_of_many("a flat tensor that every rank has whole")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def norm_of_many(name: str) -> UnsupportedError:
    """What to say of the norm of many parameters, which optimizers take to scale each by its."""
    return UnsupportedError(
        expected(
            name,
            "a use that has one answer for all of its parameters",
            "the norm of a flat tensor, as optimizers take that scale each tensor by it",
            "Give Adafactor, LAMB and the like model.parameters().",
        )
    )


class AtShard:
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
            raise InputError(
                expected(
                    self.name,
                    "the sharded parameter",
                    "the gathered one, whose memory is freed",
                    "Make optimizers and lists of parameters before a forward or after a backward.",
                )
            )
        return self.parameter.grad

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Only nothing can be put there, for a part is not a whole."""
        if gradient is not None:
            raise self.refusal()
        self.parameter.grad = None

    def refusal(self) -> InputError:
        """It lives as long as the unit is UNSHARDED."""
        return InputError(
            expected(
                self.name,
                "to be changed while its unit is sharded",
                "other memory or a gradient for the gathered parameter",
                "Write inside storage.unsharded(write=True), or before the forward.",
            )
        )
