"""Megatron-LM's words for data parallelism in buckets, over units that keep whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import InputError, UnsupportedError, check_type
from shardwright.core.placement import Replicate, Shard
from shardwright.runtime.comm import check_mesh
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.runtime.units.dstorage import storages_of, units_of
from shardwright.runtime.units.rebind import absorb
from shardwright.tracker.private import in_backward

# Other fields of DistributedDataParallelConfig: the value that asks for nothing, and what to do.
_OTHERS: dict[str, tuple[Any, str]] = {
    "align_param_gather": (False, "Stages of a pipeline gather on their own."),
    "check_for_large_grads": (False, "Clip with sw.clip_grad_norm_."),
    "check_for_nan_in_grad": (False, "Clip with sw.clip_grad_norm_(..., error_if_nonfinite=True)."),
    "data_parallel_sharding_strategy": ("no_shard", "Call sw.fully_shard_flat(..., zero=...)."),
    "delay_wgrad_compute": (False, "Weight gradients come with the others."),
    "fp8_param_gather": (False, "Parameters are gathered as they compute."),
    "gradient_reduce_div_fusion": (True, "Sums are divided once, after they came."),
    "keep_fp8_transpose_cache": (False, "Parameters are gathered as they compute."),
    "nccl_ub": (False, "Buffers are torch's."),
    "num_distributed_optimizer_instances": (1, "Give a mesh of instances x ranks."),
    "pad_buckets_for_high_nccl_busbw": (False, "Buckets are padded to even shares."),
    "preserve_fp32_weights": (True, "Shares keep their dtype."),
    "reduce_scatter_with_fp32_accumulation": (False, "Give grad_reduce_in_fp32."),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "Gradients and parameters share no memory."),
    "use_custom_fsdp": (False, "Call sw.fully_shard_flat."),
    "use_megatron_fsdp": (False, "Call sw.fully_shard_flat."),
}


class Buckets:
    """``model`` in buckets, with the names of Megatron-LM's DistributedDataParallel.

    The model is sharded in place and used as before; ``Buckets(model, mesh,
    **dataclasses.asdict(ddp_config))`` takes Megatron's own configuration. Its optimizer is any
    over ``sw.optimizer_parameters(model)``, and several may share it. ``storages`` are the buckets,
    the last parameters first.

    Args:
        mesh: 1-D, or 2-D of instances of the distributed optimizer x ranks.
        overlap_grad_reduce: sum a bucket's gradients in the backward, as soon as its last one is
            there; every backward but the last of a step belongs in ``no_sync``. False: gradients
            wait for ``finish_grad_sync``.
        overlap_param_gather: gather the next bucket while the one before it computes. False: all
            are gathered before a forward begins.
        use_distributed_optimizer: each rank has gradients and optimizer states of its share
            (ZeRO-1); False: of everything, as under DDP.
        bucket_size: elements; None: with overlap 40 million, or a million a rank where that is
            more, and else one bucket.
        average_in_collective: accepted; gradients are the mean of ranks either way.
        grad_reduce_in_fp32: sum gradients in fp32.

    Raises:
        InputError: for names that Megatron-LM has not, and what ``fully_shard_flat`` refuses.
        UnsupportedError: for what is not done here, with what to do instead.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        use_distributed_optimizer: bool = False,
        bucket_size: int | None = None,
        average_in_collective: bool = False,
        grad_reduce_in_fp32: bool = False,
        **others: Any,
    ) -> None:
        _refuse(others)
        check_type(model, nn.Module, "model")
        check_mesh(mesh)
        if overlap_param_gather and not (use_distributed_optimizer and overlap_grad_reduce):
            wanted = "use_distributed_optimizer and overlap_grad_reduce beside it"
            found = f"{use_distributed_optimizer} and {overlap_grad_reduce}"
            raise InputError("overlap_param_gather", wanted, found)
        every = sum(p.numel() for p in model.parameters())
        if bucket_size is None:
            wished = max(40_000_000, 1_000_000 * mesh.size())
            bucket_size = wished if overlap_grad_reduce else max(every, 1)
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        fully_shard_flat(
            model,
            mesh,
            placements=(Shard(0) if use_distributed_optimizer else Replicate(),),
            shard_strategy="flat",
            zero=1 if use_distributed_optimizer else 3,
            precision=MixedPrecision(reduce_dtype=torch.float32) if grad_reduce_in_fp32 else None,
            prefetch=int(overlap_grad_reduce),
            bucket_size=bucket_size,
        )
        self.storages = tuple(storages_of(model))
        self._units = units_of(model)
        if not overlap_grad_reduce:
            self.storages[0].set_requires_gradient_sync(False)
        if not overlap_param_gather:
            model.register_forward_pre_hook(self._before_forward, prepend=True)

    def start_param_sync(
        self, *_: Any, force_sync: bool = False, force_dispatch: Any = None
    ) -> None:
        """Gather what an optimizer has changed (collective), in the order of a forward: only begin
        to with ``overlap_param_gather``, unless ``force_sync``. A forward would do it, too."""
        # Buckets lie from the last parameters to the first; a forward needs them the other way
        # around.
        for unit in reversed(self._units):
            absorb(unit)
            if not unit.is_current and not unit.is_present:
                unit.start_gather()
        if force_sync or not self.overlap_param_gather:
            for unit in self._units:
                unit.free()  # when it is there: modules show their own parameters again

    def _before_forward(self, *_: Any) -> None:
        if not in_backward():
            self.start_param_sync(force_sync=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients, whole, for one that sums or a grad sync."""
        with self.storages[0].no_sync() if self.overlap_grad_reduce else nullcontext():
            yield

    def start_grad_sync(self, *_: Any) -> None:
        """Begin to sum gradients that wait (collective): with ``overlap_grad_reduce`` what
        ``no_sync`` kept, else all. Every rank has to have some of the same buckets."""
        for unit in self._units:
            if unit.gradients.is_here or not self.overlap_grad_reduce:
                unit.start_reduce()

    def finish_grad_sync(self, *_: Any, force_all_reduce: bool = False) -> None:
        """Gradients are there: those that wait are summed (collective), sums are waited for."""
        if force_all_reduce:
            wanted, remedy = "False", "Do without use_distributed_optimizer."
            raise UnsupportedError("force_all_reduce", wanted, "True", remedy)
        # Called alone, as with overlap_grad_reduce off, it has to begin what it waits for.
        if not any(unit.gradients.under_way for unit in self._units):
            self.start_grad_sync()
        for unit in self._units:
            unit.finish_reduce()
            unit.land()

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, those that wait as well."""
        for unit in self._units:
            unit.gradients.drop()
            for member in unit.members:
                member.parameter.grad = None


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise for fields that ask for what is not done."""
    for name, value in others.items():
        if name not in _OTHERS:
            wanted = "a field of Megatron-LM's DistributedDataParallelConfig"
            raise InputError("Buckets", wanted, f"'{name}'")
        nothing, remedy = _OTHERS[name]
        if value is not None and value != nothing:
            raise UnsupportedError(name, repr(nothing), repr(value), remedy)
