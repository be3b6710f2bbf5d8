"""Tables while a step is recorded: a stand-in that takes what comes back from them, and no row.

What the exchange itself takes is not the module's; a plan decides it, so it is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.core.recording import Point

Mark = Callable[[str, Point], None]


class RoutedRows(nn.Module):
    """Ids [B, F] -> rows [B, F, ``dim``] that nobody looked up; ``mark`` hears where a step is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mark: Mark | None = None
        self.handle = torch.empty(0, requires_grad=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the ids; they lie table by table, as an exchange puts them."""
        shape = (*ids.t().shape, self.dim)
        rows: torch.Tensor = _Rows.apply(self.handle, shape, self.mark)
        if self.mark is not None:
            self.mark("tables", "rows")
        return rows.transpose(0, 1)


class _Rows(torch.autograd.Function):
    """Rows come; their gradient goes back and is gone."""

    @staticmethod
    def forward(context: Any, handle: torch.Tensor, shape: tuple[int, ...], mark: Mark) -> Any:
        context.mark = mark
        if mark is not None:
            mark("tables", "lookup")
        return torch.empty(shape)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if context.mark is not None:
            context.mark("tables", "row_gradients")
        return None, None, None
