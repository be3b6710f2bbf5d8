"""What one lookup asks: of every feature ids, in bags that are pooled to one row each.

A feature's ids are a tensor [B], or [B, L] of bags of one length; or (values, offsets [B + 1]), or
(values, offsets, weights); or something with ``values()``, ``lengths()`` and ``weights_or_none()``.
Features come as a mapping of names to these, or all at once as something that also has ``keys()``,
as TorchRec's KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwright.core.errors import InputError, ShardwrightError, expected
from shardwright.runtime.embeddings.route import Table

INTEGERS = (torch.int64, torch.int32)
Ends = tuple[int, int, int]  # of a feature's lengths of bags: their sum, least and largest
_METHODS = ("values", "lengths")  # of what a feature's ids may be, as a JaggedTensor has them
_FORMS = "ids [B] or [B, L], or (values, offsets [B + 1]), or (values, offsets, weights)"


@dataclass(frozen=True, slots=True)
class TableFeature:
    """Something that is looked up in a table; its results are called ``output``."""

    name: str
    table: Table
    output: str

    @property
    def spot(self) -> str:
        """Where its ids are, for messages."""
        feature = "" if self.name == self.table.name else f", feature '{self.name}'"
        return f"ids of table '{self.table.name}'{feature}"


def features_of(tables: Sequence[Table]) -> list[TableFeature]:
    """The features of ``tables`` in their order; what is looked up in two tables has two outputs,
    ``feature@table`` as in TorchRec."""
    pairs = [(name, table) for table in tables for name in table.features]
    names = [name for name, _ in pairs]
    return [
        TableFeature(name, table, name if names.count(name) == 1 else f"{name}@{table.name}")
        for name, table in pairs
    ]


@dataclass(slots=True)
class Bags:
    """Ids of F features, feature by feature: [F, B] with one in each of B bags, or a tensor each.

    ``sizes`` are the ids of each, ``results`` the rows that each comes to; ``lengths`` the ids of
    every bag, None of a feature with one in each; ``weights`` of every id, or None. Rows are
    multiplied with ``shares`` [results, 1] once they are pooled, which makes sums means.
    """

    ids: torch.Tensor | Sequence[torch.Tensor]
    sizes: Sequence[int]
    results: Sequence[int]
    lengths: Sequence[torch.Tensor | None]
    weights: Sequence[torch.Tensor | None]
    shares: Sequence[torch.Tensor | None]

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

    def forget(self) -> None:
        """Let go of all but ``results`` and ``shares``: everything is asked for."""
        self.ids = self.lengths = self.weights = ()


def one_each(ids: torch.Tensor) -> Bags:
    """Bags of ``ids`` [F, B], one id in each."""
    features, batch = ids.shape
    nothing = (None,) * features
    return Bags(ids, (batch,) * features, (batch,) * features, nothing, nothing, nothing)


def check_dtype(ids: torch.Tensor, spot: str) -> None:
    """InputError for ids that are no integers."""
    if ids.dtype not in INTEGERS:
        raise InputError(spot, "int64 or int32", str(ids.dtype).removeprefix("torch."))


def bad_id(spot: str, rows: int, found: int) -> str:
    """What to say of an id that is no row."""
    remedy = "Reduce ids modulo the table's rows."
    return expected(spot, f"ids from 0 to {rows - 1}", str(found), remedy)


def check_columns(ids: Any, features: Sequence[TableFeature], limits: torch.Tensor) -> None:
    """InputError for ``ids`` that are not [B, F], or no rows; ``limits`` [F] are rows of tables."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] != len(features):
        found = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InputError("ids", f"shape [batch, {len(features)}]", str(found))
    check_dtype(ids, "ids")
    if not ids.numel() or (int(ids.min()) >= 0 and bool((ids.amax(0) < limits).all())):
        return
    wrong = (ids < 0) | (ids >= limits)
    sample, place = (int(x) for x in wrong.nonzero()[0])
    feature = features[place]
    found = int(ids[sample, place])
    raise InputError(bad_id(f"{feature.spot}, sample {sample}", feature.table.rows, found))


def cat(parts: list[torch.Tensor]) -> torch.Tensor:
    """One after the other; a single one is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Ids of features ``names``, one feature after the other: ``values`` [N], ``sizes`` of them of
    each; of their ``bags`` the ``lengths``, None: one id in each; of each feature ``weights`` of
    ids, or None, and the ``ends`` of its lengths where they are known. Where bags come once for
    several samples ``inverse`` has of each feature the bag of every sample [B]."""

    names: list[str]
    values: torch.Tensor
    sizes: list[int]
    bags: list[int]
    lengths: torch.Tensor | None
    weights: Sequence[torch.Tensor | None]
    ends: Sequence[Ends] | None = None
    inverse: Mapping[str, torch.Tensor] | None = None

    @property
    def has_one_each(self) -> bool:
        """Whether all features have as many bags, one id without a weight in each."""
        alike = self.lengths is None and len(set(self.sizes)) == 1
        return alike and all(weights is None for weights in self.weights)

    def of(self, names: list[str]) -> Keyed:
        """Those of some features; InputError for one that is not there."""
        if names == self.names:
            return self
        places = {name: place for place, name in enumerate(self.names)}
        check_names(names, places)
        chosen = [places[name] for name in names]
        lengths = self.lengths
        return Keyed(
            names,
            _picked(self.values, self.sizes, chosen),
            [self.sizes[place] for place in chosen],
            [self.bags[place] for place in chosen],
            None if lengths is None else _picked(lengths, self.bags, chosen),
            [self.weights[place] for place in chosen],
            None if self.ends is None else [self.ends[place] for place in chosen],
            self.inverse,
        )


def _picked(values: torch.Tensor, sizes: list[int], chosen: list[int]) -> torch.Tensor:
    parts = values.split(sizes)
    return torch.cat([values[:0], *(parts[place] for place in chosen)])


def check_names(names: Iterable[str], found: Mapping[str, Any]) -> None:
    """InputError for the first of ``names`` that is not ``found``."""
    for name in names:
        if name not in found:
            had = ", ".join(found) or "none"
            raise InputError("features", f"'{name}'", had, "Pass every feature.")


@dataclass(frozen=True, slots=True)
class OwnPooling:
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


def read_bags(
    given: Any, features: Sequence[TableFeature], limits: torch.Tensor
) -> tuple[Bags, dict[int, OwnPooling]]:
    """What is ``given`` for ``features``, and how some are pooled where they were asked for;
    ``limits`` [F] are rows of tables.

    InputError, naming table, feature and value, for what cannot be looked up.
    """
    if isinstance(given, Mapping):
        keyed = _joined(given, features)
    else:
        keyed = keyed_of(given).of([feature.name for feature in features])
        check_dtype(keyed.values, features[0].spot)
    if keyed.has_one_each:
        columns = keyed.values.long().view(len(features), -1)
        _check_range(columns, keyed.sizes, features, limits)
        return one_each(columns), {}
    values, lengths = keyed.values.long(), _lengths(keyed, features)
    if all(length is None for length in lengths) and len(set(keyed.sizes)) == 1:
        values = values.view(len(features), -1)
    _check_range(values, keyed.sizes, features, limits)
    pools: dict[int, OwnPooling] = {}
    weights = list(keyed.weights)
    poolings = [feature.table.pooling for feature in features]
    kept = [None if p == "none" else part for p, part in zip(poolings, lengths, strict=True)]
    shares: list[torch.Tensor | None] = [None] * len(features)
    means = {k: n for k, n in enumerate(kept) if n is not None and poolings[k] == "mean"}
    if means:
        # An empty bag is 0 and not 0 / 0.
        share = torch.cat([*means.values()]).clamp_(min=1).float().reciprocal_().unsqueeze(1)
        sizes = [len(each) for each in means.values()]
        for k, part in zip(means, share.split(sizes), strict=True):
            shares[k] = part
    for k, weight in enumerate(weights):
        if weight is None:
            continue
        # Owners would send sums of weighted rows, which tell nothing of the gradient of a weight:
        # the rows of such a feature come one by one.
        if weight.requires_grad and torch.is_grad_enabled():
            pools[k] = OwnPooling(kept[k], weight, shares[k])
            kept[k] = weights[k] = shares[k] = None
        else:
            weights[k] = weight.detach().float()
    pairs = zip(keyed.sizes, kept, strict=True)
    results = [size if length is None else length.shape[0] for size, length in pairs]
    ids = values if values.dim() == 2 else values.split(keyed.sizes)
    return Bags(ids, keyed.sizes, results, kept, weights, shares), pools


def _check_range(
    values: torch.Tensor, sizes: list[int], features: Sequence[TableFeature], limits: torch.Tensor
) -> None:
    """InputError for ``values`` [F, B] or [N] that are no rows of their features' tables."""
    if not values.numel():
        return
    # One pass over all ids, and on an accelerator one wait, in place of one for each feature.
    low, high = (int(end) for end in values.aminmax())
    if low >= 0:
        if high < min(feature.table.rows for feature in features):
            return
        if values.dim() == 2:
            fits = values.amax(1) < limits
        else:
            along = torch.tensor(sizes, device=values.device)
            fits = values < limits.repeat_interleave(along, output_size=len(values))
        if bool(fits.all()):
            return
    for ids, feature in zip(values.view(-1).split(sizes), features, strict=True):
        rows = feature.table.rows
        wrong = (ids < 0) | (ids >= rows)
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            spot = f"{feature.spot}, position {place}"
            raise InputError(bad_id(spot, rows, int(ids[place])))


def _lengths(keyed: Keyed, features: Sequence[TableFeature]) -> list[torch.Tensor | None]:
    """Ids of every bag of each feature, None where each has one; InputError where they do not add
    up to the feature's ids."""
    if keyed.lengths is None:
        return [None] * len(features)
    lengths = keyed.lengths.long()
    ends = _ends(lengths, keyed.bags) if keyed.ends is None else keyed.ends
    parts = zip(lengths.split(keyed.bags), ends, strict=True)
    found: list[torch.Tensor | None] = []
    for (part, (total, low, high)), size, feature in zip(parts, keyed.sizes, features, strict=True):
        if total != size or low < 0:
            has = f"lengths of {total} in all for {size} values"
            raise InputError(feature.spot, "lengths from 0 that add up to its values", has)
        found.append(None if low == high == 1 else part)
    return found


def _ends(lengths: torch.Tensor, bags: list[int]) -> list[Ends]:
    """Sum, least and largest of every feature's ``lengths``; of none they are 0, 1 and 1."""
    if len(set(bags)) == 1 and bags[0]:
        rows = lengths.view(len(bags), -1)
        low, high = rows.aminmax(dim=1)
        return list(zip(rows.sum(1).tolist(), low.tolist(), high.tolist(), strict=True))
    parts = lengths.split(bags)
    return [(int(p.sum()), int(p.min()), int(p.max())) if len(p) else (0, 1, 1) for p in parts]


def keyed_of(given: Any) -> Keyed:
    """Features that come all at once, as in a KeyedJaggedTensor; a Keyed is taken as it is."""
    if isinstance(given, Keyed):
        return given
    if not all(hasattr(given, name) for name in ("keys", "values", "lengths")):
        wanted = "a mapping of features to ids, or a KeyedJaggedTensor"
        raise InputError("features", wanted, type(given).__name__)
    keys = [*map(str, given.keys())]
    values = checked(given.values(), "values of features", flat=True)
    lengths = checked(given.lengths(), "lengths of features").reshape(-1)
    check_dtype(lengths, "lengths of features")
    bags = [len(lengths) // max(len(keys), 1)] * len(keys)
    if hasattr(given, "stride_per_key"):
        bags = list(given.stride_per_key())
    if len(bags) != len(keys) or sum(bags) != len(lengths):
        wanted = f"as many bags of each of {len(keys)} features as lengths"
        raise InputError("features", wanted, f"{len(lengths)} lengths")
    ends = _ends(lengths, bags)
    sizes = [total for total, _, _ in ends]
    if sum(sizes) != len(values) or min(sizes, default=0) < 0:
        raise InputError("values of features", str(sum(sizes)), str(len(values)))
    given = given.weights_or_none() if hasattr(given, "weights_or_none") else None
    weights: Sequence[torch.Tensor | None] = [None] * len(keys)
    if given is not None:
        weights = _weights(given, values, "features").split(sizes)
    return Keyed(keys, values, sizes, bags, lengths, weights, ends)


def checked(part: Any, spot: str, *, flat: bool = False) -> torch.Tensor:
    """``part``, which has to be a tensor, a ``flat`` one [N]."""
    if isinstance(part, torch.Tensor) and (part.dim() == 1 or not flat):
        return part
    found = list(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
    raise InputError(spot, "a tensor [N]" if flat else "a tensor", str(found))


def _weights(given: Any, ids: torch.Tensor, spot: str) -> torch.Tensor:
    """The weights ``given`` for ids [N]; InputError for what are none."""
    weights = checked(given, f"weights of {spot}")
    if weights.shape != ids.shape:
        raise InputError(spot, f"{len(ids)} weights", str(list(weights.shape)))
    if weights.is_complex():
        raise InputError(f"weights of {spot}", "real numbers", "complex ones")
    return weights


def refusal(error: Exception, path: str) -> ShardwrightError:
    """What to say of an ``error`` in what the tables at ``path`` were given: torch's own is one of
    what it was given, too."""
    if isinstance(error, ShardwrightError):
        return error
    line = next(iter(str(error).splitlines()), type(error).__name__)
    found = InputError(f"ids of '{path}'", "tensors that can be looked up", f"'{line}'")
    found.__cause__ = error
    return found


def versions_of(given: Any) -> tuple[int, ...]:
    """How often the tensors of what is looked up were changed in place."""
    # Tensors of inference mode have no versions: they are taken for unchanged.
    return tuple(0 if t.is_inference() else t._version for t in _tensors(given))


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        for part in given.values():
            yield from _tensors(part)
    elif isinstance(given, (tuple, list)):
        for part in given:
            yield from _tensors(part)
    elif isinstance(given, Keyed):
        yield from _tensors((given.values, given.lengths, *given.weights))
    elif given is not None:
        for name in ("values", "lengths", "weights_or_none"):
            part = getattr(given, name, None)
            yield from _tensors(part() if callable(part) else None)


class _FeatureIds(NamedTuple):
    """One feature's ids [N], with offsets or lengths of their bags; without both one in each."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    lengths: torch.Tensor | None
    weights: torch.Tensor | None


def _joined(given: Mapping[str, Any], features: Sequence[TableFeature]) -> Keyed:
    """What is given feature by feature."""
    names = [feature.name for feature in features]
    check_names(names, given)
    keyed = _one_each_of(names, given)
    if keyed is not None:
        return keyed
    parts = [_part(feature, given[feature.name]) for feature in features]
    for part, feature in zip(parts, features, strict=True):
        if part.ids.dtype not in INTEGERS:
            check_dtype(part.ids, feature.spot)
        if part.weights is not None:
            _weights(part.weights, part.ids, feature.spot)
    sizes = [part.ids.shape[0] for part in parts]
    lengths, bags = None, sizes
    if any(part.offsets is not None or part.lengths is not None for part in parts):
        lengths, bags = _bags_of(parts, features, sizes)
    values = cat([part.ids for part in parts])
    return Keyed(names, values, sizes, bags, lengths, [part.weights for part in parts])


def _one_each_of(names: list[str], given: Mapping[str, Any]) -> Keyed | None:
    """What is given as (values, offsets) of every feature, with one id in each of as many bags;
    None where a feature comes otherwise, or is none."""
    pairs = [given[name] for name in names]
    if not pairs or any(type(pair) is not tuple or len(pair) != 2 for pair in pairs):
        return None
    tensors = [part for pair in pairs for part in pair]
    if any(type(part) is not torch.Tensor for part in tensors):
        return None
    values, offsets = tensors[::2], tensors[1::2]
    shapes = {ids.shape for ids in values}, {ends.shape for ends in offsets}
    (bags,) = shape if len(shape := values[0].shape) == 1 else (-1,)
    dtypes = {part.dtype for part in tensors}
    if shapes != ({(bags,)}, {(bags + 1,)}) or not dtypes.issubset(INTEGERS):
        return None
    # Worth a look: bags of one id need no lengths, which would travel with the ids.
    if not bool((torch.stack(offsets) == torch.arange(bags + 1, device=offsets[0].device)).all()):
        return None
    sizes = [bags] * len(names)
    return Keyed(names, torch.cat(values), sizes, sizes, None, (None,) * len(names))


def _bags_of(
    parts: Sequence[_FeatureIds], features: Sequence[TableFeature], sizes: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """The lengths of all bags, and how many each feature has."""
    given = [part.offsets for part in parts if part.offsets is not None]
    if len(given) == len(parts) and len({offsets.shape for offsets in given}) == 1:
        offsets = torch.stack(given)
        bags = offsets.shape[1] - 1
        if bags < 0 or bool(offsets[:, 0].any()) or offsets[:, -1].tolist() != sizes:
            for part, feature in zip(parts, features, strict=True):
                _offsets_of(part, feature)
        return offsets.diff().view(-1), [bags] * len(parts)
    lengths = []
    for part, feature in zip(parts, features, strict=True):
        if part.offsets is not None:
            lengths.append(_offsets_of(part, feature).diff())
        else:
            lengths.append(torch.ones_like(part.ids) if part.lengths is None else part.lengths)
    return cat(lengths), [len(each) for each in lengths]


def _offsets_of(part: _FeatureIds, feature: TableFeature) -> torch.Tensor:
    """Its offsets; InputError if they are not those of its ids."""
    offsets, values = part.offsets, len(part.ids)
    assert offsets is not None
    ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (-1, -1)
    if ends != (0, values):
        found = "none" if not len(offsets) else f"offsets from {ends[0]} to {ends[1]}"
        raise InputError(feature.spot, f"offsets [B + 1] from 0 to its {values} values", found)
    return offsets


def _part(feature: TableFeature, given: Any) -> _FeatureIds:
    """One feature's ids, whichever way they come."""
    if isinstance(given, torch.Tensor) and given.dim() in (1, 2):
        if given.dim() == 1 or given.shape[1] == 1:
            return _FeatureIds(given.reshape(-1), None, None, None)
        batch, length = given.shape
        lengths = torch.full((batch,), length, device=given.device)
        return _FeatureIds(given.reshape(-1), None, lengths, None)
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        values, offsets, *rest = given
        if not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in given[:2]):
            raise InputError(feature.spot, _FORMS, "something else")
        check_dtype(offsets, f"offsets of {feature.spot}")
        return _FeatureIds(values, offsets, None, rest[0] if rest else None)
    if isinstance(given, torch.Tensor) or not all(map(partial(hasattr, given), _METHODS)):
        raise InputError(feature.spot, _FORMS, type(given).__name__)
    weights = given.weights_or_none() if hasattr(given, "weights_or_none") else None
    values = checked(given.values(), feature.spot, flat=True)
    lengths = checked(given.lengths(), f"lengths of {feature.spot}", flat=True)
    check_dtype(lengths, f"lengths of {feature.spot}")
    return _FeatureIds(values, None, lengths, weights)
