"""What the tensors of a collective are for, by the operator that moves them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from shardwright.core.timeline import Kind

_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
# These also carry activations of a forward, and tokens to experts: there they stay what they are.
_OTHERS = ("allreduce_", "allreduce_coalesced_", "alltoall_base_", "alltoall_", "broadcast_")
_TENSOR_ARGUMENTS = 2  # every one of these names its tensors first


@cache
def _kinds() -> dict[Any, Kind]:
    names: dict[str, Kind] = {
        **dict.fromkeys(_GATHERS, "all_gather"),
        **dict.fromkeys(_SCATTERS, "reduce_scatter"),
        **dict.fromkeys(_OTHERS, "communication"),
    }
    found: dict[Any, Kind] = {}
    for name, kind in names.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            found[packet.default] = kind
    return found


def kind_moved(function: Any, *, computing: bool) -> Kind | None:
    """What buffers of a collective are; None for other operators, and where it carries what a
    forward is ``computing``."""
    kind = _kinds().get(function)
    return None if computing and kind == "communication" else kind


def buffers_of(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors that a collective moves."""
    todo = list(arguments[:_TENSOR_ARGUMENTS])
    while todo:
        argument = todo.pop()
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            todo.extend(argument)
