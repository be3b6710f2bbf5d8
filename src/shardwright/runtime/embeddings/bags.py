"""What one lookup asks: of every feature ids, in bags that are pooled to one row each.

A feature's ids are a tensor [B], or [B, L] of bags of one length; or (values, offsets [B + 1]), or
(values, offsets, weights); or something with ``values()``, ``lengths()`` and ``weights_or_none()``.
Features come as a mapping of names to these, or all at once as something that also has ``keys()``,
as TorchRec's KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.core.errors import InputError, expected
from shardwright.runtime.embeddings.route import Table

_INTEGERS = (torch.int64, torch.int32)
_FORMS = "ids [B] or [B, L], or (values, offsets [B + 1]), or (values, offsets, weights)"


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that is looked up in a table; its results are called ``output``."""

    name: str
    table: Table
    output: str

    @property
    def spot(self) -> str:
        """Where its ids are, for messages."""
        feature = "" if self.name == self.table.name else f", feature '{self.name}'"
        return f"ids of table '{self.table.name}'{feature}"


def features_of(tables: Sequence[Table]) -> list[Feature]:
    """The features of ``tables`` in their order; what is looked up in two tables has two outputs,
    ``feature@table`` as in TorchRec."""
    pairs = [(name, table) for table in tables for name in table.features]
    names = [name for name, _ in pairs]
    return [
        Feature(name, table, name if names.count(name) == 1 else f"{name}@{table.name}")
        for name, table in pairs
    ]


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids of F features, feature by feature: [F, B] with one in each of B bags, or a tensor each.

    ``results`` are the rows that each comes to; ``lengths`` the ids of every bag, None of a feature
    with one in each; ``weights`` of every id, or None. Rows are multiplied with ``shares``
    [results, 1] once they are pooled, which makes sums means.
    """

    ids: torch.Tensor | Sequence[torch.Tensor]
    results: Sequence[int]
    lengths: Sequence[torch.Tensor | None]
    weights: Sequence[torch.Tensor | None]
    shares: Sequence[torch.Tensor | None]

    def counts_of(self, features: Sequence[int]) -> list[int]:
        """Ids of each of ``features``."""
        return [self.ids[f].shape[0] for f in features]

    def lengths_of(self, features: Sequence[int]) -> torch.Tensor | None:
        """Ids of every bag of ``features``, one after the other; None if each bag has one."""
        return self._filled(self.lengths, features, torch.int64)

    def weights_of(self, features: Sequence[int]) -> torch.Tensor | None:
        """The weight of every id of ``features``, one after the other; None if none has any."""
        return self._filled(self.weights, features, torch.float32)

    def _filled(
        self, given: Sequence[torch.Tensor | None], features: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        if all(given[f] is None for f in features):
            return None
        parts = ((given[f], self.ids[f]) for f in features)
        return torch.cat([torch.ones_like(i, dtype=dtype) if g is None else g for g, i in parts])


def one_each(ids: torch.Tensor) -> Bags:
    """Bags of ``ids`` [F, B], one id in each."""
    nothing = (None,) * len(ids)
    return Bags(ids, (ids.shape[1],) * len(ids), nothing, nothing, nothing)


def check_ids(ids: torch.Tensor, feature: Feature) -> None:
    """InputError, naming the first, for ids [N] that are no rows of the feature's table."""
    _check_dtype(ids, feature.spot)
    if not ids.numel():
        return
    low, high = (int(end) for end in ids.aminmax())
    rows = feature.table.rows
    if low < 0 or high >= rows:
        place = int(((ids < 0) | (ids >= rows)).nonzero()[0])
        spot = f"{feature.spot}, position {place}"
        raise InputError(bad_id(spot, rows, int(ids[place])))


def _check_dtype(ids: torch.Tensor, spot: str) -> None:
    if ids.dtype not in _INTEGERS:
        raise InputError(expected(spot, "int64 or int32", str(ids.dtype).removeprefix("torch.")))


def bad_id(spot: str, rows: int, found: int) -> str:
    """What to say of an id that is no row."""
    remedy = "Reduce ids modulo the table's rows."
    return expected(spot, f"ids from 0 to {rows - 1}", str(found), remedy)


def check_columns(ids: Any, features: Sequence[Feature], limits: torch.Tensor) -> None:
    """InputError for ``ids`` that are not [B, F], or no rows; ``limits`` [F] are rows of tables."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] != len(features):
        found = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InputError(expected("ids", f"shape [batch, {len(features)}]", str(found)))
    _check_dtype(ids, "ids")
    wrong = (ids < 0) | (ids >= limits)
    if bool(wrong.any()):
        sample, place = (int(x) for x in wrong.nonzero()[0])
        feature = features[place]
        found = int(ids[sample, place])
        raise InputError(bad_id(f"{feature.spot}, sample {sample}", feature.table.rows, found))


@dataclass(frozen=True, slots=True)
class Jagged:
    """One feature's ids [N]; ``lengths`` None: one in each bag."""

    ids: torch.Tensor
    lengths: torch.Tensor | None
    weights: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Pool:
    """How rows [N, D] that came back one by one are pooled here, for their weights learn."""

    lengths: torch.Tensor | None
    weights: torch.Tensor
    share: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows * self.weights.to(rows.dtype).unsqueeze(1)
        if self.lengths is not None:
            bag = torch.arange(len(self.lengths), device=rows.device)
            bag = bag.repeat_interleave(self.lengths)
            rows = rows.new_zeros(len(self.lengths), rows.shape[1]).index_add(0, bag, rows)
        return rows if self.share is None else rows * self.share


def read_bags(given: Any, features: Sequence[Feature]) -> tuple[Bags, dict[int, Pool]]:
    """What is ``given`` for ``features``, and how some are pooled where they were asked for.

    InputError, naming table, feature and value, for what cannot be looked up.
    """
    found = dict(by_name(given))
    pools: dict[int, Pool] = {}
    ids, results, lengths, weights, shares = [], [], [], [], []
    for number, feature in enumerate(features):
        if feature.name not in found:
            had = ", ".join(found) or "none"
            raise InputError(expected("features", f"'{feature.name}'", had, "Pass every feature."))
        one = _jagged(feature.spot, found[feature.name])
        check_ids(one.ids, feature)
        pooling = feature.table.pooling
        length = None if pooling == "none" else one.lengths
        share = None
        if pooling == "mean" and length is not None:
            share = length.clamp(min=1).float().reciprocal().unsqueeze(1)
        weight = one.weights
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            pools[number] = Pool(length, weight, share)
            length = share = weight = None
        ids.append(one.ids.long())
        results.append(len(one.ids) if length is None else len(length))
        lengths.append(length)
        weights.append(None if weight is None else weight.detach().float())
        shares.append(share)
    return Bags(ids, results, lengths, weights, shares), pools


def by_name(given: Any) -> Iterator[tuple[str, Any]]:
    """The ids of every feature that is ``given``."""
    if isinstance(given, Mapping):
        yield from given.items()
        return
    if not all(hasattr(given, name) for name in ("keys", "values", "lengths")):
        wanted = "a mapping of features to ids, or a KeyedJaggedTensor"
        raise InputError(expected("features", wanted, type(given).__name__))
    keys, values, lengths = list(given.keys()), given.values(), given.lengths()
    strides = [len(lengths) // max(len(keys), 1)] * len(keys)
    if hasattr(given, "stride_per_key"):
        strides = list(given.stride_per_key())
    each = lengths.split(strides)
    sizes = [int(part.sum()) for part in each]
    if sum(sizes) != len(values):
        raise InputError(expected("values of features", str(sum(sizes)), str(len(values))))
    weights = given.weights_or_none() if hasattr(given, "weights_or_none") else None
    weighted = [None] * len(keys) if weights is None else weights.split(sizes)
    for key, ids, length, weight in zip(keys, values.split(sizes), each, weighted, strict=True):
        yield key, Jagged(ids, length, weight)


def _jagged(spot: str, given: Any) -> Jagged:
    """One feature's ids, whichever way they come."""
    if isinstance(given, torch.Tensor) and given.dim() in (1, 2):
        if given.dim() == 1 or given.shape[1] == 1:
            return Jagged(given.reshape(-1), None, None)
        batch, length = given.shape
        lengths = torch.full((batch,), length, device=given.device)
        return Jagged(given.reshape(-1), lengths, None)
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        values, offsets, *rest = given
        if not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in given[:2]):
            raise InputError(expected(spot, _FORMS, "something else"))
        _check_offsets(spot, offsets, len(values))
        given = Jagged(values, offsets.diff(), rest[0] if rest else None)
    elif not isinstance(given, Jagged):
        if not hasattr(given, "values") or not hasattr(given, "lengths"):
            raise InputError(expected(spot, _FORMS, type(given).__name__))
        weights = given.weights_or_none() if hasattr(given, "weights_or_none") else None
        given = Jagged(given.values(), given.lengths(), weights)
    ids, lengths, weights = given.ids, given.lengths.long(), given.weights
    if int(lengths.sum()) != len(ids) or (len(lengths) and int(lengths.min()) < 0):
        found = f"lengths of {int(lengths.sum())} in all for {len(ids)} values"
        raise InputError(expected(spot, "lengths from 0 that add up to its values", found))
    if weights is not None and weights.shape != ids.shape:
        raise InputError(expected(spot, f"{len(ids)} weights", f"{list(weights.shape)}"))
    if len(lengths) == len(ids) and bool((lengths == 1).all()):
        lengths = None
    return Jagged(ids, lengths, weights)


def _check_offsets(spot: str, offsets: torch.Tensor, values: int) -> None:
    ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (-1, -1)
    if ends != (0, values):
        found = "none" if ends[0] < 0 else f"offsets from {ends[0]} to {ends[1]}"
        raise InputError(expected(spot, f"offsets [B + 1] from 0 to its {values} values", found))
