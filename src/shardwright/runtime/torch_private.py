"""The private interfaces of torch by which it is changed, but those of process groups, which are in
`comm/torch_groups.py`; `tracker/private.py` has those by which it is looked at."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwright.core.errors import UnsupportedError
from shardwright.tracker.private import Wrapped, in_backward

_Function = TypeVar("_Function", bound=Callable[..., Any])
no_torch_function = torch._C._disabled_torch_function_impl
# What torch itself reads and writes, whatever a subclass says.
C_DATA: Any = torch._C.TensorBase.data
C_GRAD: Any = torch._C.TensorBase.grad
_backward = Wrapped(torch.autograd, "backward")
_OFFSET_BITS = 60  # more than any offset within a storage has


@contextmanager
def following_backwards(turn: Callable[[Literal["backward", "step"]], None]) -> Iterator[None]:
    """Say when a backward begins, before anything is computed, and what comes after it."""

    def backward(original: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        if in_backward():  # of what is computed again
            original(*arguments, **keywords)
            return
        turn("backward")
        original(*arguments, **keywords)
        turn("step")

    with _backward.by(backward):
        yield


def will_accumulate(node: Any, place: int) -> bool | None:
    """Whether the running backward adds to the gradient of a leaf, which is the input ``place`` of
    the function whose ``node`` runs: ``torch.autograd.grad`` for other tensors does not. None for
    nodes of torch.func's transforms, which have no inputs to ask."""
    inputs = getattr(node, "next_functions", None)
    if not inputs or inputs[place][0] is None:
        return None
    return bool(torch._C._will_engine_execute_node(inputs[place][0]))


def adds_to(leaf: Any) -> bool | None:
    """Whether the running backward adds to the gradient of ``leaf`` if it reaches it; None where
    ``torch.autograd.grad`` was asked for it."""
    with torch.enable_grad():
        # A leaf has no function of its own. The node that adds to its gradient is what a view of it
        # leads to, and a view has a graph only while gradients are on.
        node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was asked for
        return None


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What torch.func's transforms have wrapped, which alone has memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def trains(tensor: torch.Tensor) -> bool:
    """Whether a backward comes to ``tensor``, on whichever level of torch.func's transforms: what
    ``torch.vmap`` has wrapped does not say so itself."""
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


no_subclass_functions = torch._C.DisableTorchFunctionSubclass
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active

# What runs inside is no part of the function that torch.func transforms.
outside_of_transforms = torch._C._DisableFuncTorch


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let autograd take ``tensor`` and its views for what they were at ``version``."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


# The bytes of a one, said and not asked of a tensor: under a fake mode tensors have none.
_ONE = {
    torch.float64: struct.pack("d", 1.0),
    torch.float32: struct.pack("f", 1.0),
    torch.float16: struct.pack("e", 1.0),
    torch.bfloat16: b"\x80\x3f",
    torch.complex128: struct.pack("dd", 1.0, 0.0),
    torch.complex64: struct.pack("ff", 1.0, 0.0),
}


def of_bits(bits: Iterable[object], length: int, like: torch.Tensor) -> torch.Tensor:
    """A one for every true one of ``bits`` and zeros up to ``length``, in dtype and on device of
    ``like``: what ``torch.tensor`` would make, which looks at every number by itself and takes
    eight times as long."""
    one = _ONE[like.dtype]
    zero = bytes(len(one))
    row = b"".join([one if bit else zero for bit in bits]).ljust(length * len(zero), b"\0")
    made = torch.frombuffer(bytearray(row), dtype=like.dtype)
    made = torch.ops.aten.lift_fresh.default(made)  # so modes hear of it, as of any new tensor
    return made if like.is_cpu else made.to(like.device)


def outside_graphs(function: _Function) -> _Function:
    """``function``, which torch.compile calls instead of tracing; torch._dynamo is imported by the
    first call, as by the first optimizer."""
    return cast(_Function, torch._disable_dynamo(function))


def fused_adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    squares: torch.Tensor,
    step: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """AdamW's update number ``step`` with the settings of an option group: one kernel."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [weight],
        [gradient],
        [average],
        [squares],
        [],
        [step],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter on this rank, whether it is plain or a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, or stands for one that would: a fake tensor does."""
    return type(tensor) is torch.Tensor or type(tensor) is FakeTensor


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage a tensor is in, to be compared."""
    return int(tensor.untyped_storage()._cdata)


def address_of(tensor: torch.Tensor) -> int:
    """Where the elements of a tensor begin, to be compared; 0 without any.

    A fake tensor has no address, so the object behind its storage makes one up.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor.data_ptr()
    if not tensor.numel():
        return 0
    place = tensor.storage_offset() * tensor.element_size()
    return (storage_of(tensor) << _OFFSET_BITS) + place


def tensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """What a DTensor knows of itself."""
    # On meta: the whole has no memory here, only a shape.
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, dtype))


def set_local(parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Make ``local`` the memory of a parameter on this rank, whether it is plain or a DTensor."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local
    else:
        C_DATA.__set__(parameter, local)


def unrecorded(function: _Function) -> _Function:
    """``function`` under ``torch.no_grad``, which is not entered where nothing is recorded anyway:
    in a backward, unless that has a graph."""

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments, **keywords)
        with torch.no_grad():
            return function(*arguments, **keywords)

    return cast(_Function, call)


def chunk_cat(tensors: list[torch.Tensor], rows: torch.Tensor) -> None:
    """Row r of ``rows`` [W, n] becomes the r-th of W equal parts of every tensor, in one kernel."""
    torch._chunk_cat(tensors, 0, rows.shape[0], out=rows)


def _hears_of_operators() -> bool:
    """Whether a subclass of DTensor is asked what operators do with it; torch 2.11 asks none."""
    try:
        # By what it does and not by its version: torch 2.11 raises here.
        return bool(DTensor.__torch_dispatch__(lambda: True, (), (), {}))
    except NotImplementedError:
        return False


HEARS_OF_OPERATORS = _hears_of_operators()


class Listening(TorchDispatchMode):
    """Gives operators on a class of tensors to ``dispatch``, where torch does not."""

    def __init__(self, kind: type[torch.Tensor], dispatch: Callable[..., Any]) -> None:
        super().__init__()
        self.kind, self.dispatch = kind, dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # ``listen`` has switched subclasses' functions off. What the rules themselves call on
        # sharded tensors must be heard again.
        with torch._C._EnableTorchFunction():
            if any(isinstance(leaf, self.kind) for leaf in tree_flatten((args, kwargs))[0]):
                return self.dispatch(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


def listen(
    kind: type[torch.Tensor], dispatch: Callable[..., Any], func: Any, args: Any, kwargs: Any
) -> Any:
    """Call what torch's Python offers, and answer the operators that come of it. A backward's come
    from elsewhere, so what has a graph is refused once a backward comes to it."""
    # Off while torch's own Python runs, or each function in it would come here again. The mode
    # hears of the operators instead.
    with torch._C.DisableTorchFunctionSubclass(), Listening(kind, dispatch):
        found = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            for leaf in tree_flatten(found)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    # Nothing is wrong as long as no backward comes: values are looked at with
                    # gradients on, too.
                    leaf.register_hook(_refuse_backward)
    return found


def hear_of_collectives(kind: type[torch.Tensor], dispatch: Callable[..., Any]) -> None:
    """Give collectives on a class of tensors to ``dispatch`` where torch asks no subclass: those of
    ``torch.distributed`` are no functions that ``listen`` hears of. Other DTensors are refused as
    torch does."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(leaf, kind) for leaf in tree_flatten((args, kwargs))[0]):
            return dispatch(func, args, kwargs or {})
        raise NotImplementedError(f"Operator {func} does not have a sharding strategy registered.")

    for name in torch._C._dispatch_get_all_op_names():
        space, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if space == "c10d":
            func = getattr(getattr(torch.ops.c10d, packet), overload or "default")
            DTensor._op_dispatcher._custom_op_handlers[func] = handle


def _refuse_backward(_: torch.Tensor) -> None:
    where = "backward through an operator on a sharded tensor"
    remedy = "Compute with full_tensor(), or in its unit's forward."
    raise UnsupportedError(where, "torch 2.13 or later", torch.__version__, remedy)
