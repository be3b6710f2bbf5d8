"""Embeddings of a user's own module as tables, while a step of it is recorded."""

# Whether an embedding can be a table shows only while the module runs: it must be looked up once,
# and be trained by the step. So those that look possible are replaced, and the first that is used
# otherwise raises NoTableError, which names it; it goes back and the step is recorded anew. Rows of
# a table are in no unit, so a step that walks over ``parameters()`` (a norm in the loss, a tied
# head) would silently miss them: ``_Unread`` makes that an error, too.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError, expected, listed
from shardwright.core.recording import Collected, RecordedTable, Recording, Unfolded
from shardwright.estimate.with_tables import COULD, LARGE, NOTE
from shardwright.runtime.embeddings.bags import Keyed, features_of
from shardwright.runtime.embeddings.modules import NoTableError, RoutedCollection, RoutedEmbedding
from shardwright.runtime.embeddings.route import Table
from shardwright.trace.tables import (
    OWN_DTYPES,
    Embedding,
    Reached,
    RoutedRows,
    collected,
    embeddings,
    is_weighted,
)
from shardwright.tracker.tensors import DTYPES, NAMES

MOST_NAMED = 3
ALONE = "to be looked up once in every step, and trained by it"


class _Unread(dict[str, Any]):
    """The parameters of a table, none: a step that goes through all parameters would miss it."""

    def __init__(self, path: str, rows: RoutedRows) -> None:
        super().__init__()
        self.path, self.rows = path, rows

    def items(self) -> Any:
        """As of any module, but not while a step runs."""
        if self.rows.mark is not None:
            raise NoTableError(self.path, ALONE, "among parameters that a step goes through")
        return super().items()


class Routed:
    """The embeddings of ``module`` that are tables: those of ``wanted``, by path, or all that can
    be where it is None, and unless none is wanted those of all collections. ``notes`` say which of
    all cannot, and why."""

    def __init__(self, module: nn.Module, wanted: Collection[str] | None) -> None:
        self.module = module
        self.tables: dict[str, Embedding] = {}
        self.notes: list[str] = []
        self.asked: dict[str, int] = {}  # ids of a step
        self._reached: Reached | None = None  # which of them are asked for what the module is given
        self.spread: dict[str, Keyed] = {}  # what collections are asked for
        self.collections: dict[str, nn.Module] = {}
        self.made = {name: NAMES[p.dtype] for name, p in module.named_parameters()}
        if wanted != ():
            self.collections = {p: part for p, part in module.named_modules() if collected(part)}
        self._check_collections()
        for path, part, reason in () if wanted == () else embeddings(module):
            if not reason and (wanted is None or path in wanted):
                self.tables[path] = part
            elif reason and wanted is None:
                self._note(path, reason)

    def left_dense(self) -> str:
        """Where none is a table, the large ones that could be; empty without any."""
        found = embeddings(self.module)
        left = [path for path, part, reason in found if not reason and part.weight.nbytes >= LARGE]
        if not left or self.tables:
            return ""
        named = listed([f"'{path}'" for path in left], MOST_NAMED)
        return f"{COULD} {named}: train.table_optimizer takes them out of dense units"

    def _check_collections(self) -> None:
        """UnsupportedError for one whose tables a plan cannot have."""
        for path, part in self.collections.items():
            for table in collected(part):
                reason = "" if table.weight.requires_grad else "a frozen one"
                if table.weight.dtype not in OWN_DTYPES:
                    reason = str(table.weight.dtype).removeprefix("torch.")
                if reason or not path:
                    place = f"collection '{path}', table '{table.name}'"
                    wanted = "fp32 or bf16 weights that learn, inside of a model"
                    found = reason or "the whole module"
                    remedy = "sw.shard_embeddings takes collections alone and in float16."
                    raise UnsupportedError(expected(place, wanted, found, remedy))

    def drop(self, error: NoTableError) -> None:
        """One of them is none, as its use has shown. UnsupportedError for a collection, whose class
        is for tables alone: no dense unit can have it."""
        if error.path in self.collections:
            wanted = "each looked up once in every step, and trained by it"
            remedy = "Call it once, or use nn.EmbeddingBag in its place."
            place = f"collection '{error.path}'"
            raise UnsupportedError(expected(place, wanted, error.found, remedy)) from None
        del self.tables[error.path]
        self._note(error.path, error.found)

    def _note(self, path: str, reason: str) -> None:
        self.notes.append(f"{NOTE}'{path}' is a dense unit's, not a table: {reason}")

    @contextmanager
    def instead(self) -> Iterator[None]:
        """They are looked up elsewhere inside."""
        instead_of: dict[str, nn.Module] = {}
        try:
            for path, part in self.tables.items():
                dtype = part.weight.dtype  # that it computes in
                rows = RoutedRows(part.embedding_dim, path, self._asking(path), dtype=dtype)
                instead = RoutedEmbedding(path, part, rows)
                vars(instead)["_parameters"] = _Unread(path, rows)
                self._put(path, instead)
                instead_of[path] = instead
            for path, part in self.collections.items():
                rows = CollectionRows(path, part, self._asking(path), self.spread)
                instead_of[path] = RoutedCollection(rows, part, rows.read)
                self._put(path, instead_of[path])
            self._reached = Reached(self.module, instead_of)
            yield
        finally:
            if self._reached is not None:
                self._reached.remove()
            for path, own in (*self.tables.items(), *self.collections.items()):
                self._put(path, own)

    def _asking(self, path: str) -> Any:
        def asked(ids: int) -> None:
            if path in self.asked:
                raise NoTableError(path, ALONE, "looked up several times in a step")
            self.asked[path] = ids

        return asked

    def _put(self, path: str, part: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.module.get_submodule(parent), name, part)

    def completed(self, found: Recording) -> dict[str, Any]:
        """What they add to a recording; NoTableError for one that no step of it trains."""
        step = Unfolded(found)
        # The runtime exchanges a table's gradients in each backward: a step that does not reach one
        # may leave other ranks waiting for it.
        for path in (*self.tables, *self.collections):
            if path not in step.lookups or path not in step.returned:
                raise NoTableError(path, ALONE, "not trained by every step")
        tables = [
            RecordedTable(path, part.num_embeddings, part.embedding_dim, self.asked[path])
            for path, part in self.tables.items()
        ]
        for path, part in self.collections.items():
            given = self.spread[path]
            ids = dict(zip(given.names, given.sizes, strict=True))
            for each in collected(part):
                sizes = [ids[name] for name in each.features]
                weighted = is_weighted(part)
                bags = max(given.bags[0], 1)
                lengths = tuple(size / bags for size in sizes)
                of = Collected(each.inside, each.features, lengths, bags, each.pooling, weighted)
                tables.append(RecordedTable(path, *each.weight.shape, sum(sizes), of))
        tables = [msgspec.structs.replace(each, dtype=self.made[each.fqn]) for each in tables]
        early = () if self._reached is None else tuple(self._reached.found)
        return {"tables": tuple(tables), "early": early or UNSET} if tables else {}


class CollectionRows(RoutedRows):
    """Stands in for the tables of a collection ``like`` at ``path``, while a step is recorded:
    features as ``read`` gives them -> rows of each that nobody looked up. What was read is put in
    ``spread``."""

    def __init__(
        self, path: str, like: nn.Module, asked: Callable[[int], None], spread: dict[str, Keyed]
    ) -> None:
        super().__init__(0, path, asked)
        tables = [
            Table(
                path,
                t.name,
                *t.weight.shape,
                t.features,
                pooling=t.pooling,
                output_dtype=NAMES[t.weight.dtype],
            )
            for t in collected(like)
        ]
        self.features, self.spread = features_of(tables), spread

    def read(self, given: Any) -> Keyed:
        """A KeyedJaggedTensor whose lengths have no values: each feature has as many of its ids,
        unless it knows how many. UnsupportedError where it has another number of bags of some, or
        weights that learn."""
        place = f"collection '{self.path}'"
        if not all(hasattr(given, name) for name in ("keys", "values", "lengths")):
            raise InputError(expected(place, "a KeyedJaggedTensor", type(given).__name__))
        keys, values, lengths = list(given.keys()), given.values(), given.lengths()
        for feature in self.features:
            if feature.name not in keys:
                raise InputError(expected(place, f"'{feature.name}'", ", ".join(keys) or "none"))
        weights = given.weights_or_none() if hasattr(given, "weights_or_none") else None
        if weights is not None and weights.requires_grad:
            wanted = "weights that do not learn, for their bags are pooled by a plan's ranks"
            raise UnsupportedError(expected(place, wanted, "weights with a gradient"))
        known = given.length_per_key_or_none() if hasattr(given, "length_per_key_or_none") else None
        # Fake lengths have no values, so how many ids are whose cannot be read: dealt evenly the
        # sum is right.
        even, over = divmod(len(values), len(keys))
        sizes = list(known or (even + (place < over) for place in range(len(keys))))
        bags = [lengths.numel() // len(keys)] * len(keys)
        if hasattr(given, "stride_per_key"):
            bags = list(given.stride_per_key())
        if len(set(bags)) > 1:
            found = " and ".join(map(str, sorted(set(bags))))
            raise UnsupportedError(expected(place, "as many bags of each feature", found))
        nothing = [None] * len(keys)
        self.spread[self.path] = Keyed(keys, values, sizes, bags, lengths.view(-1), nothing)
        return self.spread[self.path]

    def forward(self, given: Any) -> Any:
        """Rows of every feature."""
        places = [given.names.index(feature.name) for feature in self.features]
        self.asked(sum(given.sizes[place] for place in places))
        shapes = []
        for feature, place in zip(self.features, places, strict=True):
            results = given.sizes if feature.table.pooling == "none" else given.bags
            shapes.append((results[place], feature.table.dim))
        found = self._rows(shapes)
        return {
            feature.output: rows.to(DTYPES[feature.table.output_dtype])
            for feature, rows in zip(self.features, found, strict=True)
        }
