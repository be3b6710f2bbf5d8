"""Where a divided sublayer takes tokens from the stream, and gives what it computed back to it."""

from __future__ import annotations

import torch

from shardwright.core.llama_local import LocalShape
from shardwright.models.llama.collectives import (
    all_gather,
    all_reduce,
    copy_to_ranks,
    reduce_scatter,
)

TOKENS = 1  # the dimension of a stream [B, T, D] that sequence parallelism cuts


def enter(x: torch.Tensor, local: LocalShape) -> torch.Tensor:
    """All tokens of the tensor ranks: gathered once for all products that read them, and kept."""
    if local.sequence_parallel:
        return all_gather(x, TOKENS, local.tensor)
    return copy_to_ranks(x, local.tensor)


def leave(x: torch.Tensor, local: LocalShape) -> torch.Tensor:
    """The sum over the tensor ranks: of this rank's tokens, or of all."""
    if local.sequence_parallel:
        return reduce_scatter(x, TOKENS, local.tensor)
    return all_reduce(x, local.tensor)
