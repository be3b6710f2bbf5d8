"""An embedding of the user's own, whose rows come from somewhere else than a weight of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.runtime.embeddings.bags import INTEGERS


class NoTableError(UnsupportedError, AttributeError):
    """The embedding at ``path`` is used as no table can be."""

    def __init__(self, path: str, wanted: str, found: str) -> None:
        super().__init__(expected(f"embedding '{path}'", wanted, found))
        self.path, self.found = path, found


class RoutedEmbedding(nn.Module):
    """Stands in for ``like`` at ``path``: called as it is, and gives what it gives.

    ``rows`` is a module of one table: ids [N, 1] int64 -> rows [N, 1, D]. Bags are pooled here, or
    by ``rows`` if that has a feature of the name ``bags``. Rows at ``padding_idx`` get no gradient,
    as in torch. NoTableError where it is called with ``offsets`` and pools bags here, or where
    somebody reads its weight, which is not here.
    """

    def __init__(
        self, path: str, like: nn.Embedding | nn.EmbeddingBag, rows: nn.Module, bags: str = ""
    ) -> None:
        super().__init__()
        self.path, self.bags = path, bags
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx = like.padding_idx
        self.mode = like.mode if isinstance(like, nn.EmbeddingBag) else ""
        self.rows = rows
        self.training = like.training

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            wanted = "to be looked up alone, for a plan routes its rows"
            raise NoTableError(self.path, wanted, "a use of its weight")
        return super().__getattr__(name)

    @property
    def learning_rate(self) -> float:
        """Of the rows' updates; set it to follow a schedule."""
        rate: float = self.rows.learning_rate  # type: ignore[assignment]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.rows.learning_rate = rate  # type: ignore[assignment]

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids of any shape -> rows [..., D]; of a bag ids [B, L] -> [B, D]. InputError for what are
        no integers."""
        if not isinstance(input, torch.Tensor) or input.dtype not in INTEGERS:
            kind = getattr(input, "dtype", type(input).__name__)
            text = str(kind).removeprefix("torch.")
            raise InputError(expected(f"ids of '{self.path}'", "a tensor of int64 or int32", text))
        if self.bags and self.mode:
            if offsets is None:
                offsets = torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
            else:
                offsets = torch.cat([offsets, offsets.new_tensor([input.numel()])])
            weights = () if per_sample_weights is None else (per_sample_weights.reshape(-1),)
            pooled: dict[str, torch.Tensor] = self.rows(
                {self.bags: (input.reshape(-1), offsets, *weights)}
            )
            return pooled[self.bags]
        if offsets is not None or (self.mode and input.dim() != 2):
            raise NoTableError(self.path, "bags of one length, [B, L]", "offsets")
        ids = input.reshape(-1, 1).long()
        found: torch.Tensor = self.rows(ids).squeeze(1)
        if self.padding_idx is not None and found.requires_grad:
            padding = ids == self.padding_idx
            found.register_hook(lambda gradient: gradient.masked_fill(padding, 0.0))
        found = found.view(*input.shape, self.embedding_dim)
        if per_sample_weights is not None:
            return torch.bmm(per_sample_weights.unsqueeze(1), found).squeeze(1)
        if self.mode:
            is_mean = self.mode == "mean" and input.shape[1]  # of no ids torch gives zeros
            return found.mean(1) if is_mean else found.sum(1)
        return found
