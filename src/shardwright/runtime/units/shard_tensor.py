"""A sharded tensor that knows the whole it is a part of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.core.errors import InputError
from shardwright.runtime.checkpoint.region import window
from shardwright.runtime.torch_private import (
    C_DATA,
    C_GRAD,
    HEARS_OF_OPERATORS,
    hear_of_collectives,
    listen,
    no_torch_function,
)
from shardwright.runtime.units.cut import Cut, restored_cut
from shardwright.runtime.units.linked import Home, without_gradient
from shardwright.runtime.units.operators import Operators, View, refused, refused_memory

OF_THE_PART = "Ask to_local(), this rank's part, or full_tensor(), the whole."


@classmethod  # type: ignore[misc]
def _listening(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return listen(cls, OPERATORS.dispatch, func, args, kwargs)


class ShardTensor(DTensor):
    """This rank's part of a tensor that is sharded as ``cut`` says, which need not be by rows.

    Shape and number of elements are those of the whole tensor. Element-wise operators and
    optimizers work on the parts, norms and other reductions are those of the whole tensor (one
    all-reduce; the result is a plain tensor), views write through, and any other operator is given
    the whole tensor, gathered (collective). What would be wrong is refused: to train through a
    sharded parameter outside of its unit's forward. ``to_local()`` is the part, ``full_tensor()``
    the whole; ``torch.distributed.checkpoint`` saves and loads parts where they lie.
    """

    cut: Cut
    view_of_base: View | None
    home: Home | None
    _local_tensor: torch.Tensor
    # Torch's stagers copy a tensor as an empty one of its shape and then each of its class's slots:
    # the part is among them again, although it is DTensor's; nothing else leads to memory.
    __slots__ = ("_local_tensor", "cut", "home", "view_of_base")
    # torch 2.13 asks a subclass of DTensor what its operators do, torch 2.11 does not: there this
    # one listens to functions, which are what calls operators.
    __torch_function__ = no_torch_function if HEARS_OF_OPERATORS else _listening

    def __new__(
        cls,
        local: torch.Tensor,
        cut: Cut,
        *,
        requires_grad: bool = False,
        view: View | None = None,
        spec: Any = None,
    ) -> ShardTensor:
        made: ShardTensor = DTensor.__new__(
            cls, local, spec or cut.spec(local.dtype), requires_grad=requires_grad
        )
        made.cut = cut
        made.view_of_base = view
        made.home = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Everything is done by ``__new__``; DTensor's own is for torch.export and slow."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return OPERATORS.dispatch(func, args, kwargs or {})

    def __repr__(self, *_: Any, **__: Any) -> str:
        part = f"{tuple(self.cut.sizes)} from {tuple(self.cut.offsets)}"
        rank = f"rank {self.cut.comm.rank} of {self.cut.comm.size}"
        shape = tuple(self.shape)
        return f"ShardTensor({self._local_tensor}, {part} of {shape} on {rank}, {self.cut.fqn})"

    # ---- parts and wholes ----------------------------------------------------------------------

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's part [cut.sizes]; shares memory, and gradients reach it."""
        if self.view_of_base is not None:
            raise refused(self.cut, "to_local() of a view", "Take it of the whole tensor.")
        if torch.is_grad_enabled() and self.requires_grad:
            return _Local.apply(self)
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor on every rank, in new memory (collective).

        A gradient that comes back must be the same on every rank: each keeps its part.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _Whole.apply(self)
        return self.gathered()

    def gathered(self) -> torch.Tensor:
        """``full_tensor`` without a graph."""
        if self.view_of_base is None:
            return self.cut.whole(self._local_tensor)
        base = self.view_of_base.base
        return self.view_of_base.of(base.cut.whole(base._local_tensor))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[TorchPlacement] | None = None,
        **options: Any,
    ) -> DTensor:
        """A DTensor of torch's that is cut as ``placements`` say (collective)."""
        mesh = device_mesh or self.device_mesh
        every = [TorchReplicate() for _ in range(mesh.ndim)]
        whole = DTensor.from_local(self.full_tensor(), mesh, every, run_check=False)
        wanted = every if placements is None else placements
        if all(isinstance(placement, TorchReplicate) for placement in wanted):
            return whole
        return whole.redistribute(mesh, wanted, **options)

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """Torch's nearest words for the cut: ``Shard(dim)``, and ``Replicate()`` over replicas."""
        has_part = self.view_of_base is None and not self._local_tensor.is_meta
        return self.cut.parts_for_torch if has_part else self._spec.placements

    # ---- memory and gradients ------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The same part without a graph; another tensor given takes its place, and the memory that
        was here keeps its values."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.home is not None:
            raise self.home.refusal()
        value = OPERATORS.as_part(value, self.cut)
        C_DATA.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; where an optimizer's flat tensor has this parameter, a view of its."""
        if self.home is None:
            found: torch.Tensor | None = C_GRAD.__get__(self)
            if type(found) is DTensor and found._local_tensor.shape == self.cut.sizes:
                found = ShardTensor(found._local_tensor, self.cut)  # of torch 2.11's autograd
                C_GRAD.__set__(self, found)
            return found
        return self.home.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.home is None:
            C_GRAD.__set__(self, value)
        else:
            self.home.set_gradient(value)

    grad = grad.deleter(without_gradient)

    # ---- copies and files ----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            return memo[id(self)]
        if self.view_of_base is not None:
            raise refused(self.cut, "a view to be copied", "Clone it first.")
        made = ShardTensor(self._local_tensor.detach().clone(), self.cut)
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if isinstance(self, nn.Parameter):
            made._is_param = True  # type: ignore[attr-defined]
        elif self.grad is not None:  # torch's parameters leave it behind
            made.grad = ShardTensor(self.grad._local_tensor.detach().clone(), self.cut)  # type: ignore[attr-defined]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.view_of_base is not None:
            raise refused(self.cut, "a view to be pickled", "Clone it first.")
        is_parameter = isinstance(self, nn.Parameter)
        local = self._local_tensor.detach().clone()  # the part alone, not the unit's buffer
        return restored, (local, self.cut, self.requires_grad, is_parameter)

    # The memory is the part's. Torch has none for a tensor that wraps another: it gives an offset
    # for an address, which stagers would copy from, and ends the process where it is read.

    def data_ptr(self) -> int:
        """0, as torch says of tensors without memory of their own."""
        return 0

    def is_shared(self) -> bool:
        """Whether the part is in memory that processes share."""
        return self._local_tensor.is_shared()

    def share_memory_(self) -> ShardTensor:
        """Move what the part is in, its unit's memory, to where processes share it."""
        self._local_tensor.share_memory_()
        return self

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, here because torch asks neither mode nor function for it."""
        raise refused_memory(self.cut, "set_")

    def untyped_storage(self) -> NoReturn:
        raise refused(self.cut, "its storage, which only the part has", OF_THE_PART)

    def __dlpack__(self, **_: Any) -> NoReturn:
        """Refused."""
        raise refused(self.cut, "DLPack, which would hand its memory over", OF_THE_PART)

    def numpy(self, **_: Any) -> NoReturn:
        raise refused(self.cut, "numpy()", OF_THE_PART)

    def tolist(self) -> NoReturn:
        raise refused(self.cut, "tolist()", OF_THE_PART)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self.cut, self.view_of_base, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> ShardTensor:
        cut, view, requires_grad = flatten_spec
        return ShardTensor(
            inner_tensors["_local_tensor"], cut, requires_grad=requires_grad, view=view
        )

    # torch.distributed.checkpoint asks these.

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
            for part in self.cut.boxes()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for part in self.cut.boxes():
            if torch.Size(part.box.offsets) == index.offset:
                return window(self._local_tensor, part, part.box)
        wanted = f"a part of {self.cut.fqn} that begins at {tuple(index.offset)}"
        raise InputError("torch.distributed.checkpoint", wanted, "none on this rank")


OPERATORS = Operators(ShardTensor)
if not HEARS_OF_OPERATORS:
    hear_of_collectives(ShardTensor, OPERATORS.dispatch)


def restored(local: torch.Tensor, cut: Cut, requires_grad: bool, is_parameter: bool) -> ShardTensor:
    """A tensor that was pickled, in a process with the mesh it was made on."""
    made = ShardTensor(local, cut, requires_grad=requires_grad)
    if is_parameter:
        made._is_param = True  # type: ignore[attr-defined]
    return made


# torch.load takes only what it knows, unless weights_only is switched off.
torch.serialization.add_safe_globals([restored, restored_cut])


class _Local(torch.autograd.Function):
    """A part with a graph: its gradient is this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.cut = tensor.cut
        # A view, for autograd writes the graph on the very object that a Function returns, and that
        # one is the parameter's memory in all steps to come.
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ShardTensor(gradients[0], ctx.cut)


class _Whole(torch.autograd.Function):
    """A whole tensor with a graph: of its gradient, the same everywhere, each rank keeps a part."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.cut = tensor.cut
        if tensor.view_of_base is not None:
            what = "full_tensor() of a view to train through"
            raise refused(tensor.cut, what, "Take it of the whole tensor.")
        return tensor.gathered()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ShardTensor(ctx.cut.part(gradients[0]).clone(), ctx.cut)


def as_parameter(tensor: ShardTensor, requires_grad: bool) -> nn.Parameter:
    """``tensor`` as a module's parameter."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]
