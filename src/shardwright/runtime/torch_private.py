"""The private interfaces of torch by which it is changed; `tracker/private.py` has those by which
it is looked at."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwright.core.errors import UnsupportedError, expected
from shardwright.tracker.private import Wrapped, in_backward

_Function = TypeVar("_Function", bound=Callable[..., Any])
no_torch_function = torch._C._disabled_torch_function_impl
C_DATA: Any = (
    torch._C.TensorBase.data
)  # what torch itself reads and writes, whatever a subclass says
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
    apart = torch._disable_dynamo(function)
    asked = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        # Where nothing is being compiled in this thread there is nothing to keep away from: torch's
        # way around takes 12 calls and as long as what a unit's hook does itself.
        if asked() is None:
            return function(*arguments, **keywords)
        return apart(*arguments, **keywords)

    return cast(_Function, called)


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


class Operations:
    """One process group's collectives without the wrappers around them, names picked once.

    Each returns the Work (None where the backend needs no waiting); ``wait`` says whether the
    caller waits at once, which spares NCCL a stream. torch 2.13 renamed two of them.
    """

    __slots__ = ("_all_reduce", "_all_to_all", "_gather", "_options", "_scatter", "group")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._gather = getattr(group, "all_gather_single", None) or group._allgather_base
        self._scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
        self._all_to_all = getattr(group, "all_to_all_single", None) or group.alltoall_base
        self._all_reduce = group.allreduce
        self._options = (_options(later=True), _options(later=False))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, wait: bool) -> dist.Work | None:
        return self._gather(full, shard, self._options[wait][0])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, wait: bool
    ) -> dist.Work | None:
        return self._scatter(shard, full, self._options[wait][1])

    def all_reduce(self, tensor: torch.Tensor, wait: bool, largest: bool) -> dist.Work | None:
        return self._all_reduce([tensor], self._options[wait][4 if largest else 2])

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
        wait: bool,
    ) -> dist.Work | None:
        options = self._options[wait][3]
        return self._all_to_all(received, sent, list(received_splits), list(sent_splits), options)

    def broadcast(self, tensor: torch.Tensor, source: int, wait: bool) -> dist.Work | None:
        """``source`` is a rank of the group."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = source, 0, not wait
        return self.group.broadcast([tensor], options)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> dist.Work:
        """``to`` is a rank of the group."""
        return self.group.send([tensor], to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work:
        return self.group.recv([tensor], source, tag)


def _options(later: bool) -> tuple[Any, ...]:
    """Options of all_gather, reduce_scatter, all_reduce, all_to_all and all_reduce by maximum."""
    kinds = ("Allgather", "ReduceScatter", "Allreduce", "AllToAll", "Allreduce")
    made: tuple[Any, ...] = tuple(getattr(c10d, f"{kind}Options")() for kind in kinds)
    for options in made:
        options.asyncOp = later
    made[1].reduceOp = made[2].reduceOp = dist.ReduceOp.SUM
    made[4].reduceOp = dist.ReduceOp.MAX
    return made


def default_store() -> c10d.Store:
    """The store through which the ranks of this process's default group met."""
    return c10d._get_default_store()


def wait_limit(group: dist.ProcessGroup) -> timedelta | None:
    """How long a wait in ``group`` may take; None where its backend does not say."""
    try:
        limit = _backend(group).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return limit if isinstance(limit, timedelta) else None


def limit_waits(group: dist.ProcessGroup, limit: timedelta | None) -> timedelta | None:
    """Bound the waits in ``group`` by ``limit``; returns the bound that holds now.

    None: a group that still has torch's default (30 minutes for gloo), as the groups of a sub-mesh
    have, gets the default group's bound; any other keeps its own.
    """
    present = wait_limit(group)
    if limit is None:
        if present is None or present != c10d._get_default_timeout(dist.get_backend(group)):
            return present
        limit = wait_limit(c10d._get_default_group())
    setter = getattr(_backend(group), "_set_default_timeout", None)
    if limit is None or limit == present or setter is None:
        return present
    setter(limit)
    return limit


def _backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(group._device_types[0])


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` in one dimension, with a group of its own (collective)."""
    return mesh._flatten()


def sub_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], name: str, limit: timedelta | None
) -> dist.ProcessGroup:
    """The group of the global ``ranks``, made by its members alone.

    ``name`` must be the same on all members and new. (``new_group`` with local synchronisation
    makes its name from the number of groups a rank is in, so members that are in different numbers
    of other groups would wait for each other under different names.) It is never split off a
    communicator: a split is a collective of the whole world.
    """
    group: dist.ProcessGroup
    default = c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(default.rank()),
            list(ranks),
            c10d.Backend(c10d._world.pg_map[parent][0]),
            c10d._get_default_store(),
            cast(Any, name),
            timeout=limit or c10d._get_default_timeout(dist.get_backend(parent)),
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


THREADS = "threads"  # our backend among threads of one process


class _Worlds(threading.local):
    """What torch's module of process groups knows, for every thread its own."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.devices: Any = None  # those whose rank this thread is one of


@contextmanager
def several_worlds() -> Iterator[None]:
    """Every thread may be in a default process group of its own inside."""
    before, worlds = c10d._world, _Worlds()
    c10d._world = cast(Any, worlds)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        c10d._world = before


@contextmanager
def world_of(devices: Any) -> Iterator[None]:
    """Process groups that this thread makes inside are among the ranks of ``devices``."""
    worlds = cast(Any, c10d._world)
    worlds.devices = devices
    try:
        yield
    finally:
        worlds.devices = None


def present_devices() -> Any:
    """Those whose rank this thread is one of."""
    return cast(Any, c10d._world).devices


@cache
def register_threads(make: Callable[[str, int, Sequence[int], timedelta], Any]) -> None:
    """Groups of backend ``THREADS`` are made by ``make(name, rank, global ranks, timeout)``."""

    def created(options: Any, _: Any) -> Any:
        size = options.group_size
        members = list(options.global_ranks_in_group) or list(range(size))
        return make(options.group_id, options.group_rank, members, options.timeout)

    dist.Backend.register_backend(THREADS, created, extended_api=True, devices=["cpu", "cuda"])


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter on this rank, whether it is plain or a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a slice of, or itself."""
    return mesh._get_root_mesh()


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
        with torch._C._EnableTorchFunction():
            if any(isinstance(leaf, self.kind) for leaf in tree_flatten((args, kwargs))[0]):
                return self.dispatch(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


def listen(
    kind: type[torch.Tensor], dispatch: Callable[..., Any], func: Any, args: Any, kwargs: Any
) -> Any:
    """Call what torch's Python offers, and answer the operators that come of it. A backward's come
    from elsewhere, so what has a graph is refused once a backward comes to it."""
    with torch._C.DisableTorchFunctionSubclass(), Listening(kind, dispatch):
        found = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            for leaf in tree_flatten(found)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
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
    raise UnsupportedError(
        expected(
            "backward through an operator on a sharded tensor",
            "torch 2.13 or later",
            torch.__version__,
            "Compute with full_tensor(), or in its unit's forward.",
        )
    )
