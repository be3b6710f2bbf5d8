"""The bytes of one sharded unit: a buffer per rank, gathered for compute and freed after it.

States are told by the bytes they own:

* ``SHARDED``: the shard (1/W of the padded unit) and, after a backward, its reduced gradient.
  The module shows 1-D local parameters, views of the shard.
* ``UNSHARDED``: in addition the full buffer. The module shows full parameters, views of it.
  During backward also a full gradient buffer, which autograd accumulates into.

A replicated unit is the same thing with one slice: it is always UNSHARDED, gathers nothing, and
sums its gradient instead of scattering it.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.layout import Piece, Slot, unit_layout
from shardwright.core.placement import Flat, Placement, Replicate
from shardwright.core.schedule import Action
from shardwright.core.tensor import TensorSpec
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import set_parameter

FLOAT_BYTES = 4

Initial = Callable[[str], torch.Tensor]


class State(enum.Enum):
    """Which bytes a unit owns; see the module's text."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"


class ParamInfo:
    """A parameter's place: shapes, dtype, placement, and byte offsets in both buffers."""

    __slots__ = (
        "_module",
        "byte_offset",
        "dtype",
        "fqn",
        "global_shape",
        "local_shape",
        "name",
        "owner_rank",
        "placements",
        "unsharded_byte_offset",
    )

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        name: str,
        global_shape: torch.Size,
        local_numel: int,
        dtype: torch.dtype,
        placement: Placement,
        byte_offset: int,
        unsharded_byte_offset: int,
    ) -> None:
        self.fqn = fqn
        self._module = weakref.ref(module)  # the module's hooks own the storage, not the reverse
        self.name = name
        self.global_shape = global_shape
        self.local_shape = torch.Size((local_numel,))
        self.dtype = dtype
        self.placements = (placement,)
        self.byte_offset = byte_offset
        self.unsharded_byte_offset = unsharded_byte_offset
        self.owner_rank: int | None = None

    def module(self) -> nn.Module | None:
        """The module that shows this parameter, while it lives."""
        return self._module()


class DStorage:
    """One unit's storage on this rank. Made by ``fully_shard_flat`` and by ``apply``."""

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        placement: Placement,
        *,
        name: str = "",
        reshard_after_forward: bool = True,
        driven_by_hand: bool = False,
        initial: Initial | None = None,
    ) -> None:
        self.name = name
        self.driven_by_hand = driven_by_hand
        self.comm = comm
        self.mesh = comm.mesh
        self.placement = placement
        self.reshard_after_forward = reshard_after_forward
        self.state = State.SHARDED
        owners = _parameters_of(module, name)
        self.layout = unit_layout(_specs(owners), placement, comm.size)
        self.param_infos = self._infos(owners)
        self.byte_storage = torch.zeros(
            self.layout.shard_bytes, dtype=torch.uint8, device=comm.mesh.device_type
        )
        self.flat = self.byte_storage.view(torch.float32)  # never requires grad: safe to view
        self._fill(owners, initial)
        self._full = self.flat if self.is_replicated else self.flat.new_empty(self._whole_numel)
        # Gathered into through an alias with a version counter of its own: autograd saved the views
        # before the refill, which gives them back the very values they had.
        self._refill = self._full.data
        infos = list(self.param_infos.values())
        self._full_parameters = _views(
            self._full, self._full_slices(), [info.global_shape for info in infos]
        )
        self._local_parameters = self._full_parameters
        if not self.is_replicated:
            self._local_parameters = _views(
                self.flat, self._local_slices(), [info.local_shape for info in infos]
            )
        self.optimizer_parameter: nn.Parameter | None = None
        self._full_gradient: torch.Tensor | None = None
        self._earlier: list[torch.Tensor | None] = []
        comm.probe.holds(self.flat, "weight")
        if self.is_replicated:
            self._show(self._full_parameters, State.UNSHARDED)
        else:
            comm.probe.holds(self._full, "gathered_weight")
            self._full.untyped_storage().resize_(0)
            self._show(self._local_parameters, State.SHARDED)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank keeps the whole unit."""
        return isinstance(self.placement, Replicate)

    # ---- what the public interface offers -------------------------------------------------

    def get_local_view(self, fqn: str) -> torch.Tensor:
        """This rank's elements of a parameter, 1-D, possibly empty; shares the shard's storage."""
        return self._local_parameters[self._index(fqn)].detach()

    def get_unsharded_view(self, fqn: str) -> torch.Tensor:
        """The full parameter, a view that dies with the UNSHARDED state: clone it to keep it."""
        if self.state is not State.UNSHARDED:
            raise InputError(
                expected(f"{fqn} of unit '{self.name}'", "state UNSHARDED", "SHARDED")
                + " Call unshard() first."
            )
        return self._full_parameters[self._index(fqn)].detach()

    def all_gather(self) -> torch.Tensor:
        """The unsharded byte buffer [layout.nbytes], gathered into a new tensor (collective)."""
        if self.is_replicated:
            return self.byte_storage.clone()
        full = self.flat.new_empty(self._whole_numel)
        self.comm.all_gather(f"{self.name} all_gather", full, self.flat)
        return full.view(torch.uint8)

    def unshard(self) -> None:
        """Gather the unit and show full parameters (collective); nothing if already so.

        Driven by hand and with gradients on, it also makes room for the gradient that the next
        ``reshard()`` reduces, on every rank alike.
        """
        if self.driven_by_hand and torch.is_grad_enabled():
            self.prepare_gradient()
        if self.state is State.UNSHARDED:
            return
        self._full.untyped_storage().resize_(self.layout.nbytes)
        self.comm.all_gather(f"{self.name} gather", self._refill, self.flat)
        self._show(self._full_parameters, State.UNSHARDED)

    def reshard(self) -> None:
        """Reduce gradients if a backward left some (collective), then free the full buffer."""
        self.reduce()
        self.free()

    def has_gradient(self, info: ParamInfo) -> bool:
        """Whether the parameter that the module shows holds a gradient."""
        return self._local_parameters[self._index(info.fqn)].grad is not None

    # ---- what the hooks call ---------------------------------------------------------------

    def recover(self) -> None:
        """Drop what a forward without backward or a failed backward left, so that the next forward
        gathers the weights of now; a refill gives tensors saved for backward their values again."""
        if self._full_gradient is not None:
            self._full_gradient = None
            self._restore_earlier()
        self.free()

    def free(self) -> None:
        """Free the full buffer and show local parameters; nothing for a replicated unit."""
        if self.is_replicated or self.state is State.SHARDED:
            return
        self._full.untyped_storage().resize_(0)
        self._show(self._local_parameters, State.SHARDED)

    def prepare_gradient(self) -> None:
        """Give every full parameter a zeroed view of one flat gradient to accumulate into."""
        if self._full_gradient is not None:
            return
        self._full_gradient = self.flat.new_zeros(self._whole_numel)
        self.comm.probe.holds(self._full_gradient, "unreduced_gradient")
        # of a replicated unit these may be gradients of earlier backwards, already reduced
        self._earlier = [parameter.grad for parameter in self._full_parameters]
        for parameter, (start, stop) in zip(
            self._full_parameters, self._full_slices(), strict=True
        ):
            parameter.grad = self._full_gradient[start:stop].view(parameter.shape)

    @torch.no_grad()
    def reduce(self) -> None:
        """Mean of the gradient over ranks, added to this rank's shard gradient."""
        full = self._full_gradient
        if full is None:
            return
        self._full_gradient = None
        slices = self._full_slices()
        for parameter, (start, stop) in zip(self._full_parameters, slices, strict=True):
            part = full[start:stop]
            if parameter.grad is not None and parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad.reshape(-1))  # autograd did not accumulate in place
        self._restore_earlier()
        with self.comm.probe.phase("reduce"):
            if self.is_replicated:
                self.comm.all_reduce(f"{self.name} reduce", full)
                shard = full
            else:
                shard = full.new_empty(self.flat.shape)
                self.comm.reduce_scatter(f"{self.name} reduce", shard, full)
            shard.mul_(1.0 / self.comm.size)
            self.comm.probe.holds(shard, "gradient")
            self._accept(shard)
        self.comm.probe.did(Action("reduce", self.name, "reduce", "backward"))

    def _restore_earlier(self) -> None:
        for parameter, earlier in zip(self._full_parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def _accept(self, shard: torch.Tensor) -> None:
        """Hand the reduced gradient to whatever the user's optimizer looks at."""
        if self.optimizer_parameter is not None:
            held = self.optimizer_parameter.grad
            self.optimizer_parameter.grad = shard if held is None else held.add_(shard)
            return
        slices = self._local_slices()
        for parameter, (start, stop) in zip(self._local_parameters, slices, strict=True):
            part = shard[start:stop].view(parameter.shape)
            parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

    # ---- construction ------------------------------------------------------------------------

    @property
    def _whole_numel(self) -> int:
        return self.layout.nbytes // FLOAT_BYTES

    def _places(self) -> Iterator[tuple[Slot, Piece]]:
        """Every parameter's slot, and what this rank holds of it; a replica holds slice 0 of 1."""
        rank = 0 if self.is_replicated else self.comm.rank
        yield from zip(self.layout.slots, self.layout.pieces(rank), strict=True)

    def _infos(self, owners: dict[str, tuple[nn.Module, str]]) -> dict[str, ParamInfo]:
        infos = {}
        for slot, piece in self._places():
            module, name = owners[slot.tensor.fqn]
            infos[slot.tensor.fqn] = ParamInfo(
                slot.tensor.fqn,
                module,
                name,
                torch.Size(slot.tensor.shape),
                piece.numel,
                torch.float32,
                self.placement,
                piece.shard_offset,
                slot.offset,
            )
        return infos

    def _fill(self, owners: dict[str, tuple[nn.Module, str]], initial: Initial | None) -> None:
        for slot, piece in self._places():
            module, name = owners[slot.tensor.fqn]
            source = module._parameters[name]
            assert source is not None
            if source.is_meta:
                if initial is None:
                    raise InputError(
                        expected(slot.tensor.fqn, "a real tensor", "one on the meta device")
                        + " Build the module on a real device first."
                    )
                source = initial(slot.tensor.fqn)
            start = piece.shard_offset // FLOAT_BYTES
            values = source.detach().reshape(-1)[piece.start : piece.stop]
            self.flat[start : start + piece.numel].copy_(values)

    def _full_slices(self) -> list[tuple[int, int]]:
        starts = [slot.offset // FLOAT_BYTES for slot in self.layout.slots]
        return [(s, s + i.tensor.numel) for s, i in zip(starts, self.layout.slots, strict=True)]

    def _local_slices(self) -> list[tuple[int, int]]:
        starts = [info.byte_offset // FLOAT_BYTES for info in self.param_infos.values()]
        sizes = [info.local_shape.numel() for info in self.param_infos.values()]
        return [(s, s + n) for s, n in zip(starts, sizes, strict=True)]

    def _show(self, parameters: list[nn.Parameter], state: State) -> None:
        for info, parameter in zip(self.param_infos.values(), parameters, strict=True):
            module = info.module()
            if module is not None:
                set_parameter(module, info.name, parameter)
        self.state = state

    def _index(self, fqn: str) -> int:
        if fqn not in self.param_infos:
            names = ", ".join(self.param_infos)
            raise InputError(expected(f"unit '{self.name}'", f"one of {names}", f"'{fqn}'"))
        return list(self.param_infos).index(fqn)

    def shares_full_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` would point to freed memory once the unit is resharded."""
        if self.is_replicated:
            return False
        return tensor.untyped_storage()._cdata == self._full.untyped_storage()._cdata


def _views(
    buffer: torch.Tensor, slices: list[tuple[int, int]], shapes: list[torch.Size]
) -> list[nn.Parameter]:
    return [
        nn.Parameter(buffer[start:stop].view(shape))
        for (start, stop), shape in zip(slices, shapes, strict=True)
    ]


def _parameters_of(module: nn.Module, name: str) -> dict[str, tuple[nn.Module, str]]:
    """Every parameter's owner by fqn; what this version cannot shard is refused by name."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    seen: dict[nn.Parameter, str] = {}
    for fqn, parameter, owner, short in _walk(module, name):
        problem = None
        if parameter in seen:
            problem = ("parameters of its own", f"one tied to {seen[parameter]}", "Untie them.")
        elif parameter.dtype != torch.float32:
            problem = ("fp32", str(parameter.dtype).removeprefix("torch."), "Cast it to fp32.")
        elif not parameter.requires_grad:
            problem = ("a parameter that requires grad", "a frozen one", "Leave it out.")
        if problem:
            raise UnsupportedError(expected(fqn, *problem))
        seen[parameter] = fqn
        owners[fqn] = (owner, short)
    if not owners:
        raise InputError(expected(f"unit '{name}'", "at least one parameter", "none"))
    return owners


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter, nn.Module, str]]:
    for path, owner in module.named_modules(prefix=name):
        for short, parameter in owner._parameters.items():
            if parameter is not None:
                yield f"{path}.{short}" if path else short, parameter, owner, short


def _specs(owners: dict[str, tuple[nn.Module, str]]) -> list[TensorSpec]:
    specs = []
    for fqn, (module, name) in owners.items():
        parameter = module._parameters[name]
        assert parameter is not None
        specs.append(TensorSpec(fqn, tuple(parameter.shape), "fp32"))
    return specs


def placement_of(strategy: str) -> Placement:
    """The placement behind a shard strategy; those that are not built yet are refused by name."""
    if strategy == "flat":
        return Flat()
    raise UnsupportedError(
        expected(
            "shard_strategy",
            "'flat'",
            f"'{strategy}'",
            "This version cuts the unit's buffer evenly: pass shard_strategy='flat'.",
        )
    )
