"""TorchRec's collections of tables, whose rows come from somewhere else than weights of their own.

TorchRec itself is never imported: what goes in and comes out has the methods of its types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.runtime.embeddings.bags import Keyed, keyed_of
from shardwright.runtime.embeddings.module import Entrance
from shardwright.trace.tables import collected, is_weighted


class Pooled:
    """Pooled rows of several features, as TorchRec's KeyedTensor has them."""

    def __init__(self, rows: Mapping[str, torch.Tensor]) -> None:
        self._rows = dict(rows)

    def keys(self) -> list[str]:
        """The features."""
        return list(self._rows)

    def values(self) -> torch.Tensor:
        """Their rows side by side [B, sum of dims]; InputError where there are not as many of
        each."""
        if len({len(rows) for rows in self._rows.values()}) > 1:
            found = ", ".join(f"{len(rows)} of '{name}'" for name, rows in self._rows.items())
            remedy = "Give the KeyedJaggedTensor inverse_indices, or take to_dict()."
            raise InputError(expected("values", "as many bags of every feature", found, remedy))
        return torch.cat(list(self._rows.values()), 1)

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return [rows.shape[1] for rows in self._rows.values()]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Rows [B, dim] by feature."""
        return dict(self._rows)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._rows[key]


class Sequence:
    """The rows of one feature's ids, as TorchRec's JaggedTensor has them."""

    def __init__(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._rows, self._lengths = rows, lengths

    def values(self) -> torch.Tensor:
        """Rows [values, dim]."""
        return self._rows

    def lengths(self) -> torch.Tensor:
        """Rows of each bag [B]."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Where bags start and the last one ends [B + 1]."""
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def weights_or_none(self) -> None:
        """Rows have no weights."""


class RoutedCollection(Entrance):
    """Stands in for ``like``, an EmbeddingBagCollection or an EmbeddingCollection: features as a
    KeyedJaggedTensor -> ``Pooled``, or a ``Sequence`` of each. ``rows`` has its tables."""

    def __init__(
        self, rows: nn.Module, like: nn.Module, read: Callable[[Any], Keyed] = keyed_of
    ) -> None:
        super().__init__()
        self.rows, self.weighted, self._read = rows, is_weighted(like), read
        self.pooled = all(table.pooling != "none" for table in collected(like))

    def forward(self, features: Any) -> Pooled | dict[str, Sequence]:
        """Look every feature up."""
        given: Any = self.given(features)
        found: dict[str, torch.Tensor] = self._looked_up(self.rows, given)
        if self.pooled and given.inverse is not None:
            bags = {name: given.inverse[name.partition("@")[0]] for name in found}
            return Pooled({n: rows.index_select(0, bags[n]) for n, rows in found.items()})
        if self.pooled:
            return Pooled(found)
        lengths = dict(zip(given.names, given.lengths.split(given.bags), strict=True))
        return {
            name: Sequence(rows, lengths[name.partition("@")[0]]) for name, rows in found.items()
        }

    def asks(self, *arguments: Any) -> Keyed:
        """Features one after the other."""
        (features,) = arguments
        given = self._read(features)
        return given if self.weighted else replace(given, weights=[None] * len(given.names))

    def rows_of(self) -> Any:
        """The module of its tables."""
        return self.rows
