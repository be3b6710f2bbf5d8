"""How the parts of FSDP2 are known: sharded and whole parameters, gradients, collectives' buffers.

torch keeps them in parameter groups, whose methods are wrapped while a tracker is at work. What a
method makes counts as that collective's buffer, unless it is found in a better place afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.core.timeline import Kind
from shardwright.tracker.log import DECLARED
from shardwright.tracker.private import fsdp_groups, wrapping_groups

if TYPE_CHECKING:
    from shardwright.tracker.memory import MemoryTracker

_FSDP2 = "torch.distributed.fsdp"  # without it there are no units of FSDP2


@contextmanager
def following_fsdp2(tracker: MemoryTracker, model: nn.Module) -> Iterator[None]:
    """Mark the kinds of what FSDP2 holds for ``model``, and of what it makes."""
    groups = fsdp_groups(model) if _FSDP2 in sys.modules else []
    if not groups:
        yield
        return
    watch = _Groups(tracker)
    for group in groups:
        watch.take_stock(group)
    methods = {
        "unshard": watch.gather,
        "wait_for_unshard": watch.gather,
        "reshard": watch.reshard,
        "post_backward": watch.reduce,
    }
    with wrapping_groups(methods):
        yield


class _Groups:
    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker

    def take_stock(self, group: Any) -> None:
        """Also where the model is left gathered, and shows whole parameters."""
        self._assign_parameters(group)
        self._assign_gradients(group)

    def gather(self, group: Any, run: Callable[[], Any]) -> Any:
        with self.tracker.region("all_gather"):
            result = run()
        self._assign_parameters(group)
        return result

    def reshard(self, group: Any, run: Callable[[], Any]) -> Any:
        with self.tracker.region("gathered_weight"):  # a part of it, kept by fewer ranks
            return run()

    def reduce(self, group: Any, run: Callable[[], Any]) -> Any:
        self._assign_gradients(group)
        with self.tracker.region("reduce_scatter"):
            result = run()
        self._assign_gradients(group)
        return result

    def _assign_parameters(self, group: Any) -> None:
        for held in group.fsdp_params:
            self._assign(held.sharded_param, "weight")
            for whole in (*held.all_gather_outputs, *held._unsharded_inner_tensors):
                self._assign(whole, "gathered_weight")

    def _assign_gradients(self, group: Any) -> None:
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            self._assign(getattr(whole, "grad", None), "unreduced_gradient")
            self._assign(held.unsharded_accumulated_grad, "unreduced_gradient")
            self._assign(held.sharded_param.grad, "gradient")

    def _assign(self, tensor: torch.Tensor | None, kind: Kind) -> None:
        if tensor is not None:
            self.tracker.storages.assign(tensor, kind, DECLARED)
