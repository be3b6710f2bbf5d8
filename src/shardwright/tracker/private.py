"""The private interfaces of torch by which it is looked at: storages, operators, modules, graphs.

Each patch is a context that puts back what it replaced. Names are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from shardwright.tracker.announce import thread_rank

_META = torch.device("meta")
_DTENSOR = "torch.distributed.tensor"  # without it there is nothing to be worked out


def key_of(storage: torch.UntypedStorage) -> int:
    """What distinguishes storages while they live: the address of the object behind one."""
    # Not the data pointer, which fake storages do not have and which changes with a resize.
    return int(storage._cdata)


def schema_of(operator: Any) -> Any:
    """Names, types and effects of an operator's arguments; None for what is no operator."""
    return getattr(operator, "_schema", None)


def written_by(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes into, lists of tensors among them; None of those that
    were not given."""
    schema = schema_of(function)
    return [
        arguments[index]
        if index < len(arguments) and not argument.kwarg_only
        else keywords.get(argument.name)
        for index, argument in enumerate(schema.arguments if schema is not None else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# The question where a tensor is. Torch asks it of fake ones, through all modes, more often than it
# does anything else.
DEVICE = torch.ops.prim.device.default


def answered_device(tensor: torch.Tensor) -> torch.device:
    """Where a fake tensor says it is, and any other one is."""
    if not isinstance(tensor, FakeTensor):
        return tensor.device
    return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def operator_name(operator: OpOverload) -> str:
    """``aten::mm``."""
    return str(operator._schema.name)


# What a module has itself, by name, as torch keeps it; None where a name stands for nothing.


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Without those of modules inside."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Without those of modules inside."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module twice where it has two names."""
    return module._modules


def has_still(module: nn.Module, children: list[int] | None, parameters: int) -> bool:
    """Whether it has those children, by their ``id``, and as many parameters; no children at all
    are what anything may become. Asked of every module in every forward, so in one call."""
    own = module._modules
    if own and [*map(id, own.values())] != children:
        return False
    return len(module._parameters) == parameters


def hook_counts(module: nn.Module) -> tuple[int, ...]:
    """How many hooks its forward and backward have."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return tuple(map(len, hooks))


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """What was given to ``register_hook``."""
    hooks = tensor._backward_hooks
    return list(hooks.values()) if hooks else []


def any_gradient_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``tensors`` has some; asked of all at once in every step."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice the time)
        if tensor._backward_hooks:
            return True
    return False


def accumulated_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """What was given to ``register_post_accumulate_grad_hook``."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def any_accumulated_hooks(parameters: Sequence[torch.Tensor], beside: type) -> bool:
    """Whether any of ``parameters`` has some that are not of type ``beside``; asked of all at once
    in every step."""
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks:
            for hook in hooks.values():
                if type(hook) is not beside:
                    return True
    return False


def in_backward() -> bool:
    """Whether this thread is running a backward pass, as a recomputed forward does."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward pass has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def when_complete(tensors: Sequence[torch.Tensor], callback: Callable[[], None]) -> list[Any]:
    """Call back in every backward when all gradients of ``tensors`` that it makes are there; the
    handles of the hooks. ``register_multi_grad_hook`` does the same, but keeps the gradients alive
    until the last one, which of what all layers share comes at the very end."""
    nodes = [_get_grad_fn_or_grad_acc(tensor) for tensor in tensors]
    missing: dict[int, int] = {}  # gradients, by backward

    def arrived(_: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in missing:
            # Only those that this pass will reach, or the callback would wait for a gradient that
            # never comes. By the number of the pass, for a checkpoint runs another backward inside
            # of one.
            missing[task] = sum(map(torch._C._will_engine_execute_node, nodes))
        missing[task] -= 1
        if not missing[task]:
            del missing[task]
            callback()

    return [tensor.register_hook(arrived) for tensor in tensors]


def counting_nodes() -> int:
    """The number that the next node of an autograd graph will get."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number() -> int:
    """The number of the node that the backward is evaluating, -1 outside of one."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def unwraps_itself(kind: type) -> bool:
    """Whether a tensor class consists of other tensors, as a DTensor does."""
    return bool(is_traceable_wrapper_subclass_type(kind))


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that ``tensor`` consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        if tensor.layout is torch.strided:
            yield tensor
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from plain_parts(part)


without_dispatch_modes = _disable_current_modes


@contextmanager
def without_modes() -> Iterator[None]:
    """No dispatch mode and no function mode is active inside."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def present_fake_mode() -> FakeTensorMode | None:
    """The fake mode that is on."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode | None:
    """The mode a fake tensor belongs to, None for a real one."""
    for part in plain_parts(tensor):
        if isinstance(part, FakeTensor):
            return part.fake_mode
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has taken over the forward of ``module``."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class Wrapped:
    """A function of torch's that is replaced while somebody wraps it. Where several ranks are in
    this process, everyone's wrappers are around what his own rank calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._original: Any = None
        self._wrappers: list[tuple[int | None, Callable[..., Any]]] = []
        self._lock = threading.Lock()

    @contextmanager
    def by(self, wrapper: Callable[..., Any]) -> Iterator[None]:
        """Call ``wrapper(original, *arguments, **keywords)`` in place of the function inside."""
        # One replacement for all, made by the first and put back by the last: two that each put
        # back what they found would restore each other's replacement for good.
        entry = (thread_rank(), wrapper)
        with self._lock:
            if not self._wrappers:
                self._original = getattr(self._owner, self._name)
                setattr(self._owner, self._name, wraps(self._original)(self._replacement()))
            self._wrappers.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._wrappers.remove(entry)
                if not self._wrappers:
                    setattr(self._owner, self._name, self._original)

    def _replacement(self) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            function, rank = self._original, thread_rank()
            for owner, wrapper in tuple(self._wrappers):
                if owner == rank:
                    function = partial(wrapper, function)
            return function(*arguments, **keywords)

        return call


_resize = Wrapped(torch.UntypedStorage, "resize_")


@contextmanager
def following_resizes(changed: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report every storage that is resized, which no dispatch mode sees."""

    def resize(original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        changed(storage)
        return result

    with _resize.by(resize):
        yield


@contextmanager
def quiet_propagation(pause: Callable[[bool], None]) -> Iterator[None]:
    """Call ``pause(True)`` while DTensor works out shapes, and ``pause(False)`` after.

    It does so by running operations on fake tensors of global size, under the fake mode that is on
    if there is one: the tensors cannot be distinguished from the caller's own, only the caller can.
    """
    if _DTENSOR not in sys.modules:
        yield
        return

    def quiet(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        pause(True)
        try:
            return original(*arguments, **keywords)
        finally:
            pause(False)

    with _propagation().by(quiet):
        yield


@cache
def _propagation() -> Wrapped:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return Wrapped(ShardingPropagator, "_propagate_tensor_meta_non_cached")


Wrapper = Callable[[Any, Callable[[], Any]], Any]  # a group, and what it was about to do


@contextmanager
def wrapping_groups(wrappers: Mapping[str, Wrapper]) -> Iterator[None]:
    """Put a wrapper around methods of FSDP2's parameter groups, by name."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    originals = {name: getattr(FSDPParamGroup, name) for name in wrappers}
    for name, original in originals.items():
        setattr(FSDPParamGroup, name, _wrapped(original, wrappers[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)


def _wrapped(original: Callable[..., Any], wrapper: Wrapper) -> Callable[..., Any]:
    @wraps(original)
    def method(group: Any, *arguments: Any, **keywords: Any) -> Any:
        return wrapper(group, lambda: original(group, *arguments, **keywords))

    return method


@cache
def fsdp2_holds_all_reduced() -> bool:
    """Whether each of FSDP2's parameter groups holds what it has summed over replicas until the
    backward is over. Where the context of all groups holds it, only the last one's stays."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    return "all_reduce_state" not in inspect.getsource(FSDPCommContext)


def fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP2's parameter groups in ``model``, each once; torch 2.11 has one a module at most."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group]
            found.update({id(group): group for group in groups if group is not None})
    return list(found.values())
