"""The context in which a trace on CPU tensors keeps and takes what the device's kernels do."""

# Why functions are replaced and not operators: a call of attention on the CPU is taken apart into
# other operators than on CUDA, which keep other tensors for the backward. When a dispatch mode
# sees it, that choice has been made. So the call itself is replaced, at the three doors that lead
# to it: the name in ``torch.nn.functional``, a name that a module imported before (by the
# function mode), and torch's own function of the same name.
#
# Why autograd's engine is wrapped: a function mode is off inside of a function that it handles,
# and ``backward`` is one; what a checkpointed block computes again there would run on the CPU's
# kernels.
#
# What must stay true: all of it is undone at the end. A module that is imported meanwhile may
# keep a replacement for good, so each asks whether its lowering is still entered.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.trace.lowering import functions
from shardwright.trace.lowering.kernels import Kernels, kernels, workspace
from shardwright.tracker.private import DEVICE, operator_name, without_modes

_ORIGINALS = {
    function.__name__: function
    for function in (
        functional.scaled_dot_product_attention,
        functional.dropout,
        functional.rms_norm,
        functional.cross_entropy,
    )
}
_STATISTICS = ("aten::native_layer_norm",)  # whose row statistics CUDA keeps in fp32


@torch.library.custom_op("shardwright::workspace", mutates_args=())
def take(like: Tensor, nbytes: int) -> Tensor:
    """A kernel's own buffer; an operator of its own, so that a trace names it."""
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


@take.register_fake
def _(like: Tensor, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def lowering(
    device: str = "cuda",
    attention: str = "flash",
    rms_norm: str = "fused",
    cross_entropy: str = "composite",
) -> Lowering:
    """The lowering of a device, its kernels chosen by name.

    Enter it last, inside the fake mode and inside what records, around forward and backward: what
    records then sees the buffers that kernels take inside.
    """
    return Lowering(kernels(device, attention, rms_norm, cross_entropy))


class Lowering:
    """Use as a context. Functions are replaced however a model calls them: as those of
    ``torch.nn.functional``, by a name of its own, or as those of ``torch``."""

    def __init__(self, kernels: Kernels, inner: bool = True) -> None:
        """``inner`` says whether the buffers inside kernels are taken too."""
        self.kernels, self.inner = kernels, inner
        self._functions: _Functions | None = None
        self._operators: _Operators | None = None
        self._patched: dict[str, Any] = {}
        self._engine: Any = None

    def __enter__(self) -> Lowering:
        if self.kernels.device == "cpu":
            return self
        replaced = _replacements(self.kernels)
        # a function of torch.nn.functional that calls another one is entered once by the function
        # mode, which then is off inside: its own names are exchanged as well
        for name, original in _ORIGINALS.items():
            self._patched[name] = getattr(functional, name)
            setattr(functional, name, self._while_inside(replaced.get(original), original))
        self._functions = functions = _Functions(replaced)
        functions.__enter__()
        self._engine = engine = torch.autograd._engine_run_backward

        def backward(*arguments: Any, **keywords: Any) -> Any:
            # backward is a function too, so the mode is off inside; what it computes again is not
            with functions:
                return engine(*arguments, **keywords)

        torch.autograd._engine_run_backward = backward
        self._operators = _Operators(self.inner)
        self._operators.__enter__()
        return self

    def _while_inside(
        self, replaced: Callable[..., Any] | None, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A module that is imported here may keep the name for good; it gets torch's later."""
        if replaced is None:
            return original

        def call(*arguments: Any, **keywords: Any) -> Any:
            inside = self._functions is not None
            return (replaced if inside else original)(*arguments, **keywords)

        return call

    def __exit__(self, *exception: Any) -> None:
        if self._operators is None or self._functions is None:
            return
        self._operators.__exit__(*exception)
        self._functions.__exit__(*exception)
        self._operators = self._functions = None
        torch.autograd._engine_run_backward = self._engine
        for name, original in self._patched.items():
            setattr(functional, name, original)
        self._patched.clear()


@contextmanager
def alone() -> Iterator[None]:
    """Without the modes and replacements that are active, for a trace inside a trace."""
    patched = {name: getattr(functional, name) for name in _ORIGINALS}
    for name, original in _ORIGINALS.items():
        setattr(functional, name, original)
    try:
        with without_modes():
            yield
    finally:
        for name, function in patched.items():
            setattr(functional, name, function)


class _Functions(TorchFunctionMode):
    """Replaces functions of torch before they are taken apart into operators."""

    def __init__(self, replaced: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        return self.replaced.get(function, function)(*arguments, **(keywords or {}))


class _Operators(TorchDispatchMode):
    """Takes what a kernel takes inside, and keeps row statistics in the kernel's dtype."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under a trace: torch would import its compiler, for seconds, to keep
        it away from every operation."""
        return False

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.inner = inner

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is DEVICE:
            return function(*arguments)
        nbytes = workspace(function, arguments) if self.inner else 0
        # The buffer is there while the operator runs and its results are made, and goes with it: so
        # what records sees both at once, as on the device.
        taken = take(_tensor(arguments), nbytes) if nbytes else None
        result = function(*arguments, **(keywords or {}))
        del taken
        if operator_name(function) in _STATISTICS and result[1].element_size() < 4:
            return result[0], result[1].float(), result[2].float()
        return result


def _replacements(kernels: Kernels) -> dict[Any, Callable[..., Any]]:
    """What to call instead, by the function that a model calls."""
    named = _ORIGINALS
    attention = partial(functions.scaled_dot_product_attention, kernels.attention)
    found: dict[Any, Callable[..., Any]] = {
        named["scaled_dot_product_attention"]: attention,
        named["dropout"]: _dropout(named["dropout"]),
        torch.dropout: _dropout_operator(torch.dropout),
    }
    if kernels.rms_norm == "fused":
        for original in (named["rms_norm"], torch.rms_norm):
            found[original] = _rms_norm(original)
    if kernels.cross_entropy == "fused":
        found[named["cross_entropy"]] = _cross_entropy(named["cross_entropy"])
    return found


def _rms_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(
        input: Tensor,  # noqa: A002 - torch's name, which callers may write
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        use = functions.rms_norm if functions.fusible(input, weight) else original
        return use(input, normalized_shape, weight, eps)

    return replaced


def _cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(*arguments: Any, **keywords: Any) -> Any:
        fused = functions.cross_entropy(*arguments, **keywords)
        return original(*arguments, **keywords) if fused is None else fused

    return replaced


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(
        input: Tensor,  # noqa: A002 - torch's name, which callers may write
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        # The condition of torch's is_fused_kernel_acceptable: only then CUDA keeps a mask of one
        # byte an element instead of noise in the input's dtype.
        if training and not inplace and 0.0 < p < 1.0:
            return torch.native_dropout(input, p, True)[0]
        return original(input, p, training, inplace)

    return replaced


def _dropout_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(input: Tensor, p: float, train: bool) -> Any:  # noqa: A002
        if train and 0.0 < p < 1.0:
            return torch.native_dropout(input, p, True)[0]
        return original(input, p, train)

    return replaced


def _tensor(arguments: Any) -> Tensor:
    return next(value for value in arguments if isinstance(value, Tensor))
