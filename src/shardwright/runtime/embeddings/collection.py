"""TorchRec's collections of tables, whose rows come from somewhere else than weights of their own.

TorchRec itself is never imported: what goes in and comes out has the methods of its types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.runtime.embeddings.bags import (
    Keyed,
    check_dtype,
    check_names,
    checked,
    keyed_of,
)
from shardwright.runtime.embeddings.module import Entrance, NoTableError, StandIn
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


class RoutedTable(nn.Module):
    """Where a table of a collection was: ``requires_grad_`` is of its rows alone."""

    def __init__(self, rows: Any, fqn: str) -> None:
        super().__init__()
        self._learning, self._fqn = rows.learning, fqn

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether its rows are updated, from the next backward on; the same on every rank."""
        self._learning.say_of(self._fqn, requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            wanted = "to be looked up by its collection, for a plan routes its rows"
            raise NoTableError(self._fqn.removesuffix(".weight"), wanted, "a use of its weight")
        return super().__getattr__(name)


class RoutedTables(nn.ModuleDict):
    """Where the tables of a collection were."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether rows are updated, of every table in it."""
        for table in self.values():
            table.requires_grad_(requires_grad)
        return self


class RoutedCollection(StandIn):
    """Stands in for ``like``, an EmbeddingBagCollection or an EmbeddingCollection: features as a
    KeyedJaggedTensor -> ``Pooled``, or a ``Sequence`` of each. ``rows`` has its tables, which are
    frozen one by one where they were (``embedding_bags.NAME.requires_grad_(False)``)."""

    def __init__(
        self, rows: nn.Module, like: nn.Module, read: Callable[[Any], Keyed] = keyed_of
    ) -> None:
        super().__init__(like, rows)
        self.weighted, self._read = is_weighted(like), read
        tables = collected(like)
        self.pooled = all(table.pooling != "none" for table in tables)
        for table in tables if isinstance(rows, Entrance) else ():  # not while it is recorded
            kind, _, name = table.inside.removesuffix(".weight").rpartition(".")
            ends = table.inside, f".{table.inside}"
            fqn = next(t.fqn for t in rows.tables if t.fqn == ends[0] or t.fqn.endswith(ends[1]))
            if kind not in self._modules:
                self.add_module(kind, RoutedTables())
            self.get_submodule(kind).add_module(name, RoutedTable(rows, fqn))
        self._stands = True

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
        inverse = _inverse_of(features, given.names, given.bags)
        weights = given.weights if self.weighted else [None] * len(given.names)
        return replace(given, weights=weights, inverse=inverse)


def _inverse_of(given: Any, keys: list[str], bags: list[int]) -> dict[str, torch.Tensor] | None:
    """Of every feature the bag of each sample, where bags come once for several of them;
    InputError where one of these is none."""
    found = given.inverse_indices_or_none() if hasattr(given, "inverse_indices_or_none") else None
    if found is None:
        return None
    names, places = found
    places = checked(places, "inverse_indices of features")
    check_dtype(places, "inverse_indices of features")
    if places.dim() != 2 or len(places) != len(names):
        wanted = f"a tensor [{len(names)}, samples]"
        raise InputError(expected("inverse_indices of features", wanted, str(list(places.shape))))
    inverse = dict(zip(map(str, names), places.unbind(), strict=True))
    check_names(keys, inverse)
    for key, count in zip(keys, bags, strict=True):
        low, high = inverse[key].aminmax() if len(inverse[key]) else (0, -1)
        if int(low) < 0 or int(high) >= count:
            found = int(low) if int(low) < 0 else int(high)
            spot = f"inverse_indices of feature '{key}'"
            raise InputError(expected(spot, f"bags from 0 to {count - 1}", str(found)))
    return inverse
