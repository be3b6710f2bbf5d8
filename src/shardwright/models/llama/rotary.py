"""Rotary positions: pairs of a head's elements are turned by an angle that grows with position."""

from __future__ import annotations

import torch


def rotations(
    length: int, head_dim: int, theta: float, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [length, head_dim / 2] fp32: the bytes of one complex table."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(
        torch.arange(length, device=device, dtype=torch.float32), 1.0 / theta**steps
    )
    return torch.cos(angles), torch.sin(angles)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [B, T, heads, head_dim] turned, in the dtype of ``x``.

    The first half of a head is paired with the second, as Hugging Face lays weights out. It is
    computed in the wider dtype of the two; autograd keeps the cosines and sines, not ``x``.
    """
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)
