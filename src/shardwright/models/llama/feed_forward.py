"""SwiGLU: ``w2(silu(w1 x) * w3 x)``, its width divided by the tensor degree."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from shardwright.core.llama_local import LocalShape
from shardwright.models.llama.linear import Device, Linear
from shardwright.models.llama.streams import enter, leave


class SwiGLU(nn.Module):
    """[..., D] -> [..., D] on tokens that are all here; with a degree the result is a summand."""

    def __init__(
        self, dim: int, wide: int, device: Device, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        self.w1 = Linear(dim, wide, bias, device=device, dtype=dtype)
        self.w2 = Linear(wide, dim, bias, device=device, dtype=dtype)
        self.w3 = Linear(dim, wide, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate, product, and back."""
        return self.w2(silu(self.w1(x)) * self.w3(x))


class FeedForward(SwiGLU):
    """The SwiGLU of a block, on this rank's part of the stream."""

    def __init__(
        self,
        dim: int,
        wide: int,
        local: LocalShape,
        device: Device,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, wide // local.tensor, device, dtype, bias)
        self.local = local

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        return leave(super().forward(enter(x, self.local)), self.local)
