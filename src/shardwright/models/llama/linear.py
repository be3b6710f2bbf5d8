"""Layers whose starting values are not made: a trace needs none, and a model makes its own."""

from __future__ import annotations

import torch
from torch import nn

Device = torch.device | str | None


class Linear(nn.Linear):
    """A linear layer with unset weights [out, in]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


class RMSNorm(nn.RMSNorm):
    """An RMSNorm with unset weights [width]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: not on the meta device, not a fake one of a trace."""
    return not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter)
